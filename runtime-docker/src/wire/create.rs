//! The request that creates a container.

use std::collections::HashMap;

use bollard::models::{
    ContainerCreateBody, DeviceMapping, DeviceRequest, HostConfig, Mount, MountType, PortBinding, ResourcesUlimits,
};
use runtime_core::{BoxSpec, Result};

use crate::config::{ContainerConfig, EngineKind, gigabytes};
use crate::{NAME_LABEL, RUN_LABEL, SERVICE_PORT};

/// How process 1 of the container comes about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Init {
    /// The guest, with these bind mounts and variables.
    Guest {
        /// Arguments after the entrypoint.
        args: Vec<String>,
        /// Path of the guest in the container.
        entrypoint: String,
        /// `NAME=value`, among them the one-time token.
        env: Vec<String>,
        /// `source:target:ro`.
        binds: Vec<String>,
        /// Whether the link runs over the container's stdio.
        stdio: bool,
    },
    /// A program that keeps the container alive, for the Engine API's exec.
    KeepAlive,
}

/// The request for a container of this configuration.
///
/// # Errors
/// [`InvalidConfig`](runtime_core::ErrorKind::InvalidConfig) naming the field.
pub(crate) fn request(
    kind: EngineKind,
    config: &ContainerConfig,
    spec: &BoxSpec,
    image_id: &str,
    init: &Init,
) -> Result<ContainerCreateBody> {
    let mut labels: HashMap<String, String> = config.labels.clone().into_iter().collect();
    labels.insert(RUN_LABEL.to_owned(), spec.run_scope.id().to_owned());
    labels.insert(NAME_LABEL.to_owned(), spec.name.clone());

    // The sandbox's own variables come with each program: a view of the box replaces them.
    let mut env = Vec::new();
    let mut host = HostConfig {
        network_mode: Some(config.network.clone().unwrap_or_else(|| "bridge".to_owned())),
        nano_cpus: config.cpu.map(|cores| (cores * 1e9).round() as i64),
        memory: config.memory_bytes().map(signed),
        // As much as memory alone: no swap.
        memory_swap: config.memory_bytes().map(signed),
        shm_size: config.shm_size.map(|gb| signed(gigabytes(gb))),
        pids_limit: config.pids_limit,
        runtime: config.oci_runtime.clone(),
        ulimits: (!config.ulimits.is_empty()).then(|| config.ulimits.iter().map(ulimit).collect()),
        tmpfs: (!config.tmpfs.is_empty()).then(|| config.tmpfs.clone().into_iter().collect()),
        mounts: (!config.mounts.is_empty()).then(|| config.mounts.iter().map(mount).collect()),
        ..HostConfig::default()
    };
    if config.is_restricted() {
        // Not what keeps the network closed, but there is no use for either in such a box. Where the engine's resolver
        // has to be blocked, the guest needs one of them; its programs get neither.
        if needs_blocked_resolver(kind, config) {
            host.cap_add = Some(vec!["NET_ADMIN".to_owned()]);
            host.cap_drop = Some(vec!["NET_RAW".to_owned()]);
        } else {
            host.cap_drop = Some(["NET_ADMIN", "NET_RAW"].map(str::to_owned).to_vec());
        }
    }
    gpus(kind, config, &mut host)?;

    let mut body = ContainerCreateBody {
        image: Some(image_id.to_owned()),
        // The engine would create the workdir as root's.
        working_dir: Some("/".to_owned()),
        user: config.user.clone(),
        labels: Some(labels),
        ..ContainerCreateBody::default()
    };
    match init {
        Init::Guest {
            args,
            entrypoint,
            env: own,
            binds,
            stdio,
        } => {
            env.extend(own.iter().cloned());
            host.binds = Some(binds.clone());
            // The guest starts programs as the image's user; it is root to be able to.
            body.user = Some("0:0".to_owned());
            body.entrypoint = Some(vec![entrypoint.clone()]);
            body.cmd = Some(args.clone());
            if *stdio {
                body.open_stdin = Some(true);
                body.stdin_once = Some(true);
                body.attach_stdin = Some(true);
                body.attach_stdout = Some(true);
                body.attach_stderr = Some(true);
            }
        }
        Init::KeepAlive => {
            host.init = Some(config.init.unwrap_or(true));
            body.entrypoint = Some(vec!["sleep".to_owned()]);
            body.cmd = Some(vec!["infinity".to_owned()]);
            let port = format!("{SERVICE_PORT}/tcp");
            let binding = PortBinding {
                host_ip: Some("127.0.0.1".to_owned()),
                host_port: Some(String::new()),
            };
            host.port_bindings = Some(HashMap::from([(port.clone(), Some(vec![binding]))]));
            body.exposed_ports = Some(vec![port]);
        }
    }
    body.env = Some(env);
    body.host_config = Some(host);
    Ok(body)
}

/// Whether the engine's own resolver stays in the box after it was disconnected: Docker's on its user's networks.
pub(crate) fn needs_blocked_resolver(kind: EngineKind, config: &ContainerConfig) -> bool {
    let own = !matches!(config.network.as_deref(), None | Some("bridge" | "default" | "none"));
    kind == EngineKind::Docker && own && config.is_restricted()
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn ulimit(limit: &crate::config::Ulimit) -> ResourcesUlimits {
    ResourcesUlimits {
        name: Some(limit.name.clone()),
        soft: Some(limit.soft),
        hard: Some(limit.hard.unwrap_or(limit.soft)),
    }
}

fn mount(mount: &crate::config::Mount) -> Mount {
    let kind = if mount.source.starts_with('/') {
        MountType::BIND
    } else {
        MountType::VOLUME
    };
    Mount {
        target: Some(mount.target.clone()),
        source: Some(mount.source.clone()),
        typ: Some(kind),
        read_only: Some(mount.read_only),
        ..Mount::default()
    }
}

/// Docker takes a number of GPUs; Podman names devices of the Container Device Interface.
fn gpus(kind: EngineKind, config: &ContainerConfig, host: &mut HostConfig) -> Result<()> {
    let gpus = config.gpus()?;
    if !gpus.is_requested() {
        return Ok(());
    }
    match kind {
        EngineKind::Docker => {
            host.device_requests = Some(vec![DeviceRequest {
                count: Some(i64::from(gpus.count())),
                capabilities: Some(vec![vec!["gpu".to_owned()]]),
                ..DeviceRequest::default()
            }]);
        }
        EngineKind::Podman => {
            let device = |index| DeviceMapping {
                path_on_host: Some(format!("nvidia.com/gpu={index}")),
                ..DeviceMapping::default()
            };
            host.devices = Some((0..gpus.count()).map(device).collect());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use runtime_core::Env;
    use runtime_core::cache::CacheDir;
    use runtime_core::scope::RunScope;
    use serde_json::{Value, json};

    use super::*;

    fn spec() -> BoxSpec {
        BoxSpec {
            name: "vf-0".to_owned(),
            run_scope: RunScope::new("run/7").expect("an id"),
            env: Env::from_iter([("A", "1")]),
            cache: CacheDir::at("/cache"),
        }
    }

    fn body(kind: EngineKind, fields: Value, init: &Init) -> Value {
        let Value::Object(fields) = fields else {
            panic!("fields")
        };
        let config: ContainerConfig = runtime_core::config::from_fields("docker", fields).expect("a config");
        let body = request(kind, &config, &spec(), "sha256:1", init).expect("a request");
        serde_json::to_value(body).expect("JSON")
    }

    #[test]
    fn a_container_of_the_defaults_is_tagged_and_unlimited() {
        let body = body(EngineKind::Docker, json!({}), &Init::KeepAlive);
        assert_eq!(body["Image"], "sha256:1");
        assert_eq!(body["WorkingDir"], "/");
        assert_eq!(body["Env"], json!([]));
        assert_eq!(
            body["Labels"],
            json!({"verifiers.run": "run/7", "runtime-sandbox.name": "vf-0"})
        );
        assert_eq!(
            (&body["Entrypoint"], &body["Cmd"]),
            (&json!(["sleep"]), &json!(["infinity"]))
        );
        assert_eq!(body["HostConfig"]["NetworkMode"], "bridge");
        assert_eq!(body["HostConfig"]["Init"], true);
        let bindings = json!({"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]});
        assert_eq!(body["HostConfig"]["PortBindings"], bindings);
        assert!(body["HostConfig"].get("Memory").is_none() && body.get("User").is_none());
    }

    #[test]
    fn limits_are_in_the_engines_units() {
        let fields = json!({
            "cpu": 1.5, "memory": 2, "shm_size": 0.25, "pids_limit": 100, "oci_runtime": "runsc", "network": "mine",
            "user": "1000:1000", "ulimits": [{"name": "nofile", "soft": 10, "hard": 20}, {"name": "core", "soft": 0}],
            "tmpfs": {"/tmp": "size=1m"},
            "mounts": [{"source": "/data", "target": "/d", "read_only": true}, {"source": "vol", "target": "/v"}],
        });
        let body = body(EngineKind::Docker, fields, &Init::KeepAlive);
        let host = &body["HostConfig"];
        assert_eq!(host["NanoCpus"], 1_500_000_000_i64);
        assert_eq!(
            (&host["Memory"], &host["MemorySwap"]),
            (&json!(2_147_483_648_i64), &json!(2_147_483_648_i64))
        );
        assert_eq!(
            (&host["ShmSize"], &host["PidsLimit"]),
            (&json!(268_435_456), &json!(100))
        );
        assert_eq!(
            (&host["Runtime"], &host["NetworkMode"], &body["User"]),
            (&json!("runsc"), &json!("mine"), &json!("1000:1000"))
        );
        let nofile = json!({"Name": "nofile", "Soft": 10, "Hard": 20});
        assert_eq!(host["Ulimits"], json!([nofile, {"Name": "core", "Soft": 0, "Hard": 0}]));
        assert_eq!(host["Tmpfs"], json!({"/tmp": "size=1m"}));
        assert_eq!(
            (&host["Mounts"][0]["Type"], &host["Mounts"][0]["ReadOnly"]),
            (&json!("bind"), &json!(true))
        );
        assert_eq!(
            (&host["Mounts"][1]["Type"], &host["Mounts"][1]["ReadOnly"]),
            (&json!("volume"), &json!(false))
        );
    }

    #[test]
    fn a_restricted_box_has_no_capability_for_the_network() {
        let restricted = body(EngineKind::Docker, json!({"allow": ["a.com"]}), &Init::KeepAlive);
        assert_eq!(restricted["HostConfig"]["CapDrop"], json!(["NET_ADMIN", "NET_RAW"]));
        let own = body(
            EngineKind::Docker,
            json!({"allow": ["a.com"], "network": "mine"}),
            &Init::KeepAlive,
        );
        assert_eq!(
            (&own["HostConfig"]["CapAdd"], &own["HostConfig"]["CapDrop"]),
            (&json!(["NET_ADMIN"]), &json!(["NET_RAW"]))
        );
        let open = body(EngineKind::Docker, json!({}), &Init::KeepAlive);
        assert!(open["HostConfig"].get("CapDrop").is_none());
    }

    #[test]
    fn gpus_are_asked_for_as_each_engine_wants() {
        let docker = body(EngineKind::Docker, json!({"gpu": "A100:2"}), &Init::KeepAlive);
        assert_eq!(
            docker["HostConfig"]["DeviceRequests"],
            json!([{"Count": 2, "Capabilities": [["gpu"]]}])
        );
        let podman = body(EngineKind::Podman, json!({"gpu": "2"}), &Init::KeepAlive);
        let devices = podman["HostConfig"]["Devices"].as_array().expect("devices").clone();
        let names: Vec<_> = devices.iter().map(|device| device["PathOnHost"].clone()).collect();
        assert_eq!(names, [json!("nvidia.com/gpu=0"), json!("nvidia.com/gpu=1")]);
    }

    #[test]
    fn the_guest_replaces_the_entrypoint_and_publishes_nothing() {
        let init = Init::Guest {
            args: vec!["--stdio".into()],
            entrypoint: "/.sandbox/guest".into(),
            env: vec!["T=1".into()],
            binds: vec!["/h:/.sandbox:ro".into()],
            stdio: true,
        };
        let body = body(EngineKind::Podman, json!({}), &init);
        assert_eq!(
            (&body["Entrypoint"], &body["Cmd"]),
            (&json!(["/.sandbox/guest"]), &json!(["--stdio"]))
        );
        assert_eq!((&body["Env"], &body["User"]), (&json!(["T=1"]), &json!("0:0")));
        assert_eq!(body["HostConfig"]["Binds"], json!(["/h:/.sandbox:ro"]));
        assert_eq!((&body["OpenStdin"], &body["StdinOnce"]), (&json!(true), &json!(true)));
        assert!(body["HostConfig"].get("PortBindings").is_none() && body["HostConfig"].get("Init").is_none());
    }
}
