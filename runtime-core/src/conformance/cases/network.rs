//! Network policies, where they are enforced by us: what the cut takes away, and what it leaves.

use std::net::Ipv4Addr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::capability::Egress;
use crate::command::Command;
use crate::conformance::case::{Capability, Case, case, probe};
use crate::conformance::context::{Context, refused, sh};
use crate::conformance::verdict::{Failure, Verdict, ensure, ensure_eq};
use crate::error::ErrorKind;
use crate::network::Routes;
use crate::sandbox::{Phase, Sandbox};

pub(super) const CASES: &[Case] = &[
    case!("network/a-closed-box-has-nothing-but-loopback", closed)
        .needs(&[Capability::Egress])
        .or_else(probe!(policy_refused)),
    case!("network/a-program-has-the-proxy-and-setup-has-not", environment)
        .needs(&[Capability::Egress])
        .or_else(probe!(policy_refused)),
    case!("network/a-route-is-reached-and-nothing-beside-it", routes)
        .needs(&[Capability::Egress])
        .or_else(probe!(policy_refused)),
    case!("network/a-server-of-setup-outlives-the-cut", servers)
        .needs(&[Capability::Egress])
        .or_else(probe!(policy_refused)),
    case!("network/another-setup-opens-it-and-another-cut-closes-it", again)
        .needs(&[Capability::Egress])
        .or_else(probe!(policy_refused)),
];

/// A box with a policy.
async fn restricted(cx: &Context, allow: &[&str]) -> Result<Sandbox, Failure> {
    if cx.capabilities().egress != Egress::Enforced {
        return Err(Failure::skip("the provider enforces policies by itself"));
    }
    let config = cx.target().restricted(allow);
    let config = config.ok_or_else(|| Failure::skip("the target has no configuration with a policy"))?;
    let sandbox = cx.builder_of(config).provision().await?;
    cx.learn(&sandbox);
    Ok(sandbox)
}

async fn policy_refused(cx: Context) -> Verdict {
    if let Some(config) = cx.target().restricted(&[]) {
        let error = refused(cx.builder_of(config).provision().await, ErrorKind::Unsupported)?;
        ensure_eq!(error.field(), Some("allow"));
    }
    Ok(())
}

/// Interfaces that are up, and how many IPv4 routes there are.
const NETWORK: &str = "for link in /sys/class/net/*; do
        case $(cat $link/flags) in *[13579bdf]) echo ${link##*/};; esac
    done; tail -n +2 /proc/net/route | wc -l | tr -d ' '";

async fn closed(cx: Context) -> Verdict {
    let sandbox = restricted(&cx, &[]).await?;
    sandbox.prepare_execution(Routes::none()).await?;
    ensure_eq!(sandbox.phase(), Phase::Executing);
    ensure_eq!(sh(&sandbox, NETWORK).await?.trim(), "lo\n0");
    sandbox.stop().await?;
    Ok(())
}

const PROXIES: &str = "for name in HTTP_PROXY HTTPS_PROXY http_proxy https_proxy; do
        eval \"case \\$$name in http://verifiers:?*@127.0.0.1:?*) echo ours;; *) echo \\\"[\\$$name]\\\";; esac\"
    done; echo $NO_PROXY; echo $no_proxy";

async fn environment(cx: Context) -> Verdict {
    let sandbox = restricted(&cx, &["example.com"]).await?;
    sandbox.prepare_execution(Routes::none()).await?;
    let direct = "localhost,127.0.0.1,host.docker.internal";
    let expected = format!("ours\nours\nours\nours\n{direct}\n{direct}\n");
    let overridden = Command::shell(PROXIES)
        .env("http_proxy", "http://elsewhere")
        .env("NO_PROXY", "*");
    ensure_eq!(sandbox.run(overridden).await?.stdout_lossy(), expected);
    let mut process = sandbox.spawn(Command::shell(PROXIES)).await?;
    let mut seen = String::new();
    if let Some(mut stdout) = process.stdout.take() {
        stdout.read_to_string(&mut seen).await?;
    }
    process.wait().await?;
    ensure_eq!(seen, expected);
    sandbox.stop().await?;
    Ok(())
}

/// A service of this host that says its name.
async fn service(name: &'static str) -> Result<u16, Failure> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await;
                let length = name.len();
                let answer = format!("HTTP/1.0 200 OK\r\nContent-Length: {length}\r\n\r\n{name}");
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.shutdown().await;
            });
        }
    });
    Ok(port)
}

/// Not every client knows `NO_PROXY`.
fn get(url: &str) -> String {
    format!("unset http_proxy HTTP_PROXY; wget -q -O- {url} 2>/dev/null || echo none")
}

async fn routes(cx: Context) -> Verdict {
    let (one, other) = (service("one").await?, service("other").await?);
    let sandbox = restricted(&cx, &[]).await?;
    let [one, other] = [one, other].map(|port| format!("http://127.0.0.1:{port}/"));
    let inside = sandbox.host_url(&one).await?;
    let beside = sandbox.host_url(&other).await?;
    ensure_eq!(sh(&sandbox, get(&inside)).await?, "one");
    ensure_eq!(sh(&sandbox, get(&beside)).await?, "other");
    sandbox.prepare_execution(Routes::new([&one])?).await?;
    ensure_eq!(sandbox.host_url(&one).await?, inside);
    ensure_eq!(sh(&sandbox, get(&inside)).await?, "one");
    ensure_eq!(sh(&sandbox, get(&beside)).await?, "none\n");
    refused(sandbox.host_url(&other).await, ErrorKind::InvalidArgument)?;
    sandbox.stop().await?;
    Ok(())
}

async fn servers(cx: Context) -> Verdict {
    let sandbox = restricted(&cx, &[]).await?;
    let server = "echo $https_proxy >proxy.new; mv proxy.new proxy; while :; do echo x >>beats; sleep 0.05; done";
    sandbox.run_background(["sh", "-c", server], "server.log").await?;
    sh(&sandbox, "until [ -s proxy ]; do sleep 0.02; done").await?;
    sandbox.prepare_execution(Routes::none()).await?;
    let more = "before=$(wc -l <beats); until [ $(wc -l <beats) -gt $before ]; do sleep 0.02; done";
    sh(&sandbox, more).await?;
    ensure_eq!(
        sh(&sandbox, "cat proxy").await?,
        sh(&sandbox, "echo $https_proxy").await?
    );
    ensure!(
        !sh(&sandbox, "cat proxy").await?.trim().is_empty(),
        "the server has no proxy"
    );
    sandbox.stop().await?;
    Ok(())
}

async fn again(cx: Context) -> Verdict {
    let sandbox = restricted(&cx, &[]).await?;
    let open = sh(&sandbox, NETWORK).await?;
    sandbox.prepare_execution(Routes::none()).await?;
    let proxy = sh(&sandbox, "echo $http_proxy").await?;
    sandbox.prepare_execution(Routes::none()).await?;
    sandbox.prepare_setup().await?;
    let routes = |text: &str| text.lines().last().unwrap_or_default().to_owned();
    // The interface may have another name.
    ensure_eq!(routes(&sh(&sandbox, NETWORK).await?), routes(&open));
    sandbox.prepare_execution(Routes::none()).await?;
    ensure_eq!(sh(&sandbox, NETWORK).await?.trim(), "lo\n0");
    ensure!(
        sh(&sandbox, "echo $http_proxy").await? != proxy,
        "the proxy's credentials are the old ones"
    );
    sandbox.stop().await?;
    Ok(())
}
