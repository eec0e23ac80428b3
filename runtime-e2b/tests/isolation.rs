//! What a box of the emulator has of its own: its network with the policy enforced, its processes, its ports.
#![cfg(all(feature = "emulator", target_os = "linux"))]

mod common;

use std::net::Ipv4Addr;

use common::Provider;
use runtime_core::{Command, Sandbox};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};

/// Public addresses, which in the test's network are its own.
const GOOD: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 5);
const OTHER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
/// Private, but there as well.
const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 1, 2, 3);
const PORTS: [u16; 3] = [80, 443, 7777];

/// Runs a test in a network namespace that has these addresses, on an executor of one thread. The emulator that it
/// starts is in that network too.
fn in_a_network_of_its_own(test: impl Future<Output = ()> + Send + 'static) {
    #[allow(
        deprecated,
        reason = "the replacement is unsafe because of a flag that is not used here"
    )]
    let unshare = || rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNET);
    let thread = std::thread::spawn(move || {
        if let Err(error) = unshare() {
            skipped(format_args!("no network namespace: {error}"));
            return;
        }
        let addresses = [GOOD, OTHER, PRIVATE].map(|address| format!("ip address add {address}/32 dev lo"));
        let script = format!("ip link set lo up && {}", addresses.join(" && "));
        let made = std::process::Command::new("sh").args(["-c", &script]).status();
        if !made.is_ok_and(|status| status.success()) {
            skipped("`ip` is missing or fails");
            return;
        }
        let executor = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("an executor");
        executor.block_on(test);
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn skipped(why: impl std::fmt::Display) {
    eprintln!("SKIPPED: a box's own network: {why}");
    assert!(std::env::var_os("CI").is_none(), "this must not be skipped in CI");
}

/// An emulator whose boxes have all that they can have of their own.
fn isolated() -> Option<Provider> {
    let provider = Provider::start()?;
    let isolation = provider.emulator.isolation();
    if isolation.network && isolation.processes {
        return Some(provider);
    }
    skipped(isolation.missing.join("; "));
    None
}

/// Servers on every address and port that answer a line, or a request, with who they are; and one of datagrams.
async fn serve() {
    for address in [GOOD, OTHER, PRIVATE] {
        for port in PORTS {
            let listener = TcpListener::bind((address, port)).await.expect("the test's own");
            tokio::spawn(async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    tokio::spawn(async move {
                        let mut said = [0; 4096];
                        let _ = stream.read(&mut said).await;
                        let _ = stream.write_all(format!("{address}:{port}\n").as_bytes()).await;
                    });
                }
            });
        }
        let socket = UdpSocket::bind((address, 7777)).await.expect("the test's own");
        tokio::spawn(async move {
            let mut said = [0; 4096];
            while let Ok((_, from)) = socket.recv_from(&mut said).await {
                let _ = socket.send_to(format!("{address}\n").as_bytes(), from).await;
            }
        });
    }
}

async fn bash(sandbox: &Sandbox, script: &str) -> String {
    let output = sandbox.run(["bash", "-c", script]).await.expect("ran");
    output.stdout_lossy().trim().to_owned()
}

/// Who answers a program of the box there, if anybody does.
async fn says(sandbox: &Sandbox, address: Ipv4Addr, port: u16, words: &str) -> String {
    let script = format!("exec 3<>/dev/tcp/{address}/{port} && printf '{words}\\r\\n\\r\\n' >&3 && cat <&3");
    bash(sandbox, &script).await
}

async fn reaches(sandbox: &Sandbox, address: Ipv4Addr, port: u16) -> bool {
    let said = says(sandbox, address, port, "hello").await;
    assert!(said.is_empty() || said == format!("{address}:{port}"), "{said}");
    !said.is_empty()
}

/// Boxes are stopped by a thread that is not in the test's network, so the emulator does it.
async fn end(provider: &Provider, sandbox: &Sandbox) {
    let id = sandbox.id().expect("an id");
    provider.emulator.kill_box(&id).await.expect("there was one");
}

async fn set_policy(provider: &Provider, sandbox: &Sandbox, body: Value) {
    let id = sandbox.id().expect("an id");
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let answer = client
        .put(format!("{}/sandboxes/{id}/network", provider.emulator.api_url()))
        .header("x-api-key", provider.emulator.api_key())
        .header("content-type", "application/json")
        .body(body.to_string())
        .send()
        .await
        .expect("answered");
    assert_eq!(answer.status(), 204);
}

#[test]
fn a_policy_decides_what_programs_reach_and_may_be_changed_both_ways() {
    in_a_network_of_its_own(async {
        let Some(provider) = isolated() else { return };
        serve().await;
        let sandbox = provider.sandbox().await;
        for port in PORTS {
            assert!(reaches(&sandbox, GOOD, port).await, "open at first");
        }
        assert!(
            !reaches(&sandbox, PRIVATE, 7777).await,
            "private networks are always denied"
        );
        assert!(
            bash(&sandbox, "exec 3<>/dev/tcp/127.0.0.1/7777").await.is_empty(),
            "loopback is its own"
        );
        set_policy(&provider, &sandbox, json!({ "allow_internet_access": false })).await;
        for port in PORTS {
            assert!(!reaches(&sandbox, GOOD, port).await && !reaches(&sandbox, OTHER, port).await);
        }
        set_policy(
            &provider,
            &sandbox,
            json!({ "allowOut": [GOOD], "denyOut": ["0.0.0.0/0"] }),
        )
        .await;
        for port in PORTS {
            assert!(reaches(&sandbox, GOOD, port).await && !reaches(&sandbox, OTHER, port).await);
        }
        set_policy(&provider, &sandbox, json!({ "denyOut": ["203.0.113.0/24"] })).await;
        assert!(!reaches(&sandbox, GOOD, 7777).await && reaches(&sandbox, OTHER, 7777).await);
        set_policy(&provider, &sandbox, json!({ "allow_internet_access": true })).await;
        assert!(reaches(&sandbox, GOOD, 443).await && reaches(&sandbox, OTHER, 443).await);
        end(&provider, &sandbox).await;
    });
}

#[test]
fn a_name_is_judged_by_what_the_program_says_and_dialled_by_its_own_address() {
    in_a_network_of_its_own(async {
        let Some(provider) = isolated() else { return };
        serve().await;
        provider.emulator.set_address("good.example", GOOD);
        provider.emulator.set_address("inward.example", PRIVATE);
        let sandbox = provider.sandbox().await;
        let body = json!({ "allowOut": ["*.example"], "denyOut": ["0.0.0.0/0"] });
        set_policy(&provider, &sandbox, body).await;
        let ask = |host: &str| format!("GET / HTTP/1.1\\r\\nHost: {host}");
        // The address that the program has used does not matter.
        assert_eq!(
            says(&sandbox, OTHER, 80, &ask("good.example")).await,
            format!("{GOOD}:80")
        );
        for host in ["elsewhere.test", "inward.example", "example"] {
            assert_eq!(says(&sandbox, GOOD, 80, &ask(host)).await, "", "{host}");
        }
        assert!(!reaches(&sandbox, GOOD, 7777).await, "names help on two ports only");
        let hello = "import socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
try:
    context.wrap_socket(socket.create_connection((sys.argv[1], 443), 10), server_hostname=sys.argv[2])
except Exception as error:
    print('WRONG_VERSION' in str(error))";
        for (name, reached) in [("good.example", "True"), ("elsewhere.test", "False")] {
            // Who answers there speaks no TLS, which only shows if it was reached.
            let output = sandbox.run(["python3", "-c", hello, &OTHER.to_string(), name]).await;
            assert_eq!(output.expect("ran").stdout_lossy().trim(), reached, "{name}");
        }
        end(&provider, &sandbox).await;
    });
}

#[test]
fn datagrams_follow_the_policy_too() {
    in_a_network_of_its_own(async {
        let Some(provider) = isolated() else { return };
        serve().await;
        let sandbox = provider.sandbox().await;
        let body = json!({ "allowOut": [GOOD], "denyOut": ["0.0.0.0/0"] });
        set_policy(&provider, &sandbox, body).await;
        let script = "import socket
talk = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for address in ('198.51.100.7', '10.1.2.3', '203.0.113.5'):
    talk.sendto(b'x', (address, 7777))
print(talk.recvfrom(100))";
        // The last one that is asked is the only one that answers.
        let output = sandbox.run(["python3", "-c", script]).await.expect("ran");
        assert_eq!(
            output.stdout_lossy().trim(),
            "(b'203.0.113.5\\n', ('203.0.113.5', 7777))"
        );
        end(&provider, &sandbox).await;
    });
}

/// Whether this machine has a process with this word in its arguments.
fn runs(word: &str) -> bool {
    std::fs::read_dir("/proc")
        .expect("Linux")
        .filter_map(|entry| std::fs::read(entry.ok()?.path().join("cmdline")).ok())
        .any(|line| {
            line.split(|byte| *byte == 0)
                .any(|argument| argument == word.as_bytes())
        })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_sees_its_own_processes_and_takes_all_of_them_with_it() {
    let Some(provider) = isolated() else { return };
    let (one, other) = (provider.sandbox().await, provider.sandbox().await);
    let word = |index: u32| format!("{}.{index}", u64::from(std::process::id()) + 1_000_000);
    // Out of its group, its session and its parent's sight.
    let script = format!(
        "setsid sh -c 'sleep {} & sleep {} & disown -a 2>/dev/null; exit' & wait; echo $$; echo up >&2; exec sleep {}",
        word(1),
        word(2),
        word(3)
    );
    let mut process = one.spawn(["sh", "-c", &script]).await.expect("started");
    let mut said = [0; 3];
    let mut stderr = process.stderr.take().expect("a pipe");
    stderr.read_exact(&mut said).await.expect("it is up");
    let pid = process.id().expect("an id").to_string();
    let seen = "for dir in /proc/[0-9]*; do tr '\\0' ' ' <$dir/cmdline; echo; done";
    let inside = bash(&one, seen).await;
    assert!((1..=3).all(|index| inside.contains(&word(index)) && runs(&word(index))));
    assert!(
        bash(&one, &format!("tr '\\0' ' ' </proc/{pid}/cmdline"))
            .await
            .contains(&word(3))
    );
    assert!(!bash(&other, seen).await.contains(&word(1)));
    assert!(!inside.contains("isolation"), "the test itself is not seen: {inside}");
    // Not even all that can be killed ends the box.
    let _ = other.run(["bash", "-c", "kill -KILL -1"]).await;
    assert_eq!(bash(&other, "echo alive").await, "alive");
    provider
        .emulator
        .kill_box(&one.id().expect("an id"))
        .await
        .expect("killed");
    for index in 1..=3 {
        assert!(!runs(&word(index)), "a process has outlived its box");
    }
    assert_eq!(bash(&other, "echo alive").await, "alive");
    other.stop().await.expect("stopped");
    drop(process);
    let _ = one.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_boxes_have_the_same_port_and_this_machine_has_neither() {
    let Some(provider) = isolated() else { return };
    let (one, other) = (provider.sandbox().await, provider.sandbox().await);
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    for (sandbox, word) in [(&one, "one"), (&other, "other")] {
        sandbox.write("served/index.html", word).await.expect("written");
        let server = Command::new(["python3", "-u", "-m", "http.server", "--bind", "127.0.0.1", "8000"]);
        sandbox
            .run_background(server.workdir("served"), "server.log")
            .await
            .expect("started");
        let up = "until grep -q Serving server.log; do sleep 0.05; done";
        bash(sandbox, &format!("cd {}; {up}", sandbox.workdir().display())).await;
        let url = sandbox.expose(8000).await.expect("a URL");
        let answer = client.get(format!("{url}/index.html")).send().await.expect("answered");
        assert_eq!(answer.text().await.expect("read"), word);
    }
    assert!(!bash(&one, "cat /proc/net/dev").await.contains("docker"));
    for sandbox in [one, other] {
        sandbox.stop().await.expect("stopped");
    }
}
