//! Programs that people use, through the proxy, over HTTP and HTTPS. What is not installed is skipped, loudly.

use std::path::Path;
use std::process::Stdio;

use runtime_core::egress::{EgressProxy, Outcome};
use runtime_core::network::{EgressPolicy, Policy, Resolver, Routes};
use tokio::process::Command;

use crate::grpc;
use crate::tls::{self, Authority};
use crate::upstream;
use crate::world::{GOOD, World, isolated};

const SIZE: usize = 100 << 20;

struct Clients {
    world: World,
    dir: tempfile::TempDir,
    plain: upstream::Arrived,
    secure: upstream::Arrived,
}

impl Clients {
    async fn new() -> Self {
        let authority = Authority::new();
        let plain = upstream::http(GOOD, 80).await;
        let secure = tls::https(GOOD, 443, authority.server(&["good.example"])).await;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), &authority.pem).unwrap();
        let world = World::allow(&["good.example"]).await;
        Self {
            world,
            dir,
            plain,
            secure,
        }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Runs a shell script with the proxy's environment and the test's authority. `None` without `program`.
    async fn run(&self, program: &str, script: &str) -> Option<String> {
        let found = Command::new("sh")
            .args(["-c", &format!("command -v {program}")])
            .stdout(Stdio::null())
            .status();
        if !found.await.unwrap().success() {
            eprintln!("SKIPPED: {program} is not installed");
            return None;
        }
        let mut command = Command::new("sh");
        command
            .args(["-ec", script])
            .current_dir(self.path())
            .env("HOME", self.path());
        let ca = self.path().join("ca.pem");
        for name in [
            "CURL_CA_BUNDLE",
            "SSL_CERT_FILE",
            "GIT_SSL_CAINFO",
            "REQUESTS_CA_BUNDLE",
        ] {
            command.env(name, &ca);
        }
        for (name, value) in self.world.proxy.address("127.0.0.1", self.world.port).env().iter() {
            command.env(name, value);
        }
        let output = command.kill_on_drop(true).output().await.unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}: {stdout}{stderr}");
        Some(stdout)
    }

    fn failures(&self) -> Vec<String> {
        let refused = self.world.proxy.log().refused();
        refused.iter().map(|refusal| format!("{refusal:?}")).collect()
    }
}

isolated! {
    async fn curl_reaches_an_allowed_host() {
        let clients = Clients::new().await;
        for url in ["http://good.example", "https://good.example"] {
            let script = format!("curl -sSf {url}/ {url}/bytes/3 {url}/");
            let Some(text) = clients.run("curl", &script).await else { return };
            assert_eq!(text, "okxxxok");
            let script = format!("curl -sSf --http1.0 {url}/bytes/3; curl -sSf --no-keepalive -H 'Connection: close' {url}/");
            assert_eq!(clients.run("curl", &script).await.unwrap(), "xxxok");
            let script = format!("head -c {SIZE} /dev/zero > big; curl -sSf -T big -X POST {url}/count; echo; \
                 curl -sSf -H 'Transfer-Encoding: chunked' -T big -X POST {url}/count; echo; \
                 curl -sSf -H 'Expect: 100-continue' --data-binary @big {url}/count; echo; \
                 curl -sSf {url}/bytes/{SIZE} | wc -c; \
                 curl -sSf -d hello {url}/echo; echo; \
                 curl -sS -o /dev/null -w '%{{http_code}}' --data-binary @big {url}/refuse || true");
            let text = clients.run("curl", &script).await.unwrap();
            assert_eq!(text, format!("{SIZE}\n{SIZE}\n{SIZE}\n{SIZE}\nhello\n413"), "{url}");
        }
        // One process, one connection, both ways kept.
        let before = clients.plain.connections();
        clients.run("curl", "curl -sSf 'http://good.example/[1-20]'").await;
        assert_eq!(clients.plain.connections(), before + 1);
        assert_eq!(clients.failures(), Vec::<String>::new());
        // And not one that is not.
        let code = "curl -sS -o /dev/null -w '%{http_code} %{http_connect}' http://other.example/ || true; \
            curl -sS -o /dev/null -w ' %{http_connect}' https://other.example/ 2>/dev/null || true";
        assert_eq!(clients.run("curl", code).await.unwrap(), "403 000 403");
        assert!(clients.secure.connections() > 0);
    }
}

isolated! {
    async fn wget_reaches_an_allowed_host() {
        let clients = Clients::new().await;
        for url in ["http://good.example", "https://good.example"] {
            let script = format!(
                "wget -q --ca-certificate=ca.pem -O - {url}/ {url}/bytes/3; \
                 wget -q --ca-certificate=ca.pem -O - --no-http-keep-alive {url}/bytes/{SIZE} | wc -c; \
                 wget -q --ca-certificate=ca.pem -O - --post-data=hello {url}/echo"
            );
            let Some(text) = clients.run("wget", &script).await else { return };
            assert_eq!(text, format!("okxxx{SIZE}\nhello"), "{url}");
        }
        assert_eq!(clients.failures(), Vec::<String>::new());
    }
}

const PYTHON: &str = r#"
import http.client, os, ssl, sys, urllib.parse, urllib.request
base = sys.argv[1]
context = ssl.create_default_context(cafile="ca.pem")
opener = urllib.request.build_opener(urllib.request.ProxyHandler(), urllib.request.HTTPSHandler(context=context))
assert opener.open(base + "/").read() == b"ok"
assert opener.open(base + "/count", data=b"x" * 1000000).read() == b"1000000"
assert opener.open(urllib.request.Request(base + "/echo", data=iter([b"one", b"two"]), method="POST")).read() == b"onetwo"
proxy = urllib.parse.urlsplit(os.environ["http_proxy"])
import base64
auth = {"Proxy-Authorization": "Basic " + base64.b64encode(f"{proxy.username}:{proxy.password}".encode()).decode()}
if base.startswith("https"):
    connection = http.client.HTTPSConnection(proxy.hostname, proxy.port, context=context)
    connection.set_tunnel("good.example", 443, auth)
    prefix, headers = "", {}
else:
    connection, prefix, headers = http.client.HTTPConnection(proxy.hostname, proxy.port), base, auth
for _ in range(5):
    connection.request("POST", prefix + "/count", body=b"y" * 70000, headers=headers)
    assert connection.getresponse().read() == b"70000"
    connection.request("POST", prefix + "/echo", body=iter([b"a", b"b"]), headers=headers, encode_chunked=True)
    assert connection.getresponse().read() == b"ab"
print("done")
"#;

isolated! {
    async fn python_reaches_an_allowed_host() {
        let clients = Clients::new().await;
        std::fs::write(clients.path().join("client.py"), PYTHON).unwrap();
        for url in ["http://good.example", "https://good.example"] {
            let script = format!("python3 client.py {url}");
            let Some(text) = clients.run("python3", &script).await else { return };
            assert_eq!(text, "done\n");
        }
        assert_eq!(clients.failures(), Vec::<String>::new());
    }
}

isolated! {
    async fn git_and_pip_and_apt_reach_an_allowed_host() {
        let clients = Clients::new().await;
        upstream::serve_files(clients.path());
        let repository = "git init -q -b main work; cd work; \
            git -c user.name=n -c user.email=e commit -q --allow-empty -m one; cd ..; \
            git clone -q --bare work bare.git; cd bare.git; git update-server-info";
        if clients.run("git", repository).await.is_some() {
            for (url, to) in [("http", "a"), ("https", "b")] {
                let script = format!("git clone -q {url}://good.example/files/bare.git {to}; git -C {to} log --format=%s");
                assert_eq!(clients.run("git", &script).await.unwrap(), "one\n");
            }
        }
        let wheel = "mkdir -p simple/tiny; python3 -c \"
import zipfile
w = zipfile.ZipFile('simple/tiny/tiny-1.0-py3-none-any.whl', 'w')
w.writestr('tiny.py', '')
w.writestr('tiny-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n')
w.writestr('tiny-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
w.writestr('tiny-1.0.dist-info/RECORD', '')
\"; echo '<a href=\"tiny-1.0-py3-none-any.whl\">tiny</a>' > simple/tiny/index.html";
        let has_pip = clients.run("pip", "pip --version").await.is_some();
        if has_pip && clients.run("python3", wheel).await.is_some() {
            for (url, trust) in [("http", "--trusted-host good.example"), ("https", "--cert ca.pem")] {
                let script = format!(
                    "pip download -q --isolated --disable-pip-version-check --no-deps --no-cache-dir {trust} -d {url}-out \
                     --index-url {url}://good.example/files/simple/ tiny >&2; ls {url}-out"
                );
                assert_eq!(clients.run("pip", &script).await.unwrap(), "tiny-1.0-py3-none-any.whl\n");
            }
        }
        let apt = "/usr/lib/apt/apt-helper -o APT::Sandbox::User=root download-file http://good.example/bytes/1000 got >&2; \
            wc -c < got";
        if let Some(text) = clients.run("/usr/lib/apt/apt-helper", apt).await {
            assert_eq!(text, "1000\n");
        }
        assert_eq!(clients.failures(), Vec::<String>::new());
    }
}

isolated! {
    async fn grpc_passes_a_tunnel() {
        let authority = Authority::new();
        let mut config = authority.server(&["good.example"]);
        config.alpn_protocols = vec![b"h2".to_vec()];
        let calls = grpc::Calls::default();
        let kept = calls.clone();
        let listener = upstream::bind(GOOD, 443).await;
        let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(config));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let stream = acceptor.accept(stream).await.unwrap();
                tokio::spawn(grpc::serve(stream, kept.clone()));
            }
        });
        let world = World::allow(&["good.example"]).await;
        let (status, raw) = world.tunnel("good.example:443").await;
        assert_eq!(status, 200);
        let mut config = authority.client();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let stream = tls::handshake(config, "good.example", raw.0).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        grpc::exercise(stream, &calls).await;
        assert!(world.proxy.log().refused().is_empty());
    }
}

isolated! {
    async fn what_was_used_is_the_allowlist_that_admits_it() {
        let _plain = upstream::http(GOOD, 80).await;
        let world = World::new(EgressPolicy::setup()).await;
        for line in ["GET http://good.example/", "GET http://api.good.example/", "GET http://third.example/"] {
            assert_eq!(world.ask(line).await.status, 200);
        }
        let used: Vec<String> = world.proxy.log().used().iter().map(ToString::to_string).collect();
        let policy = Policy::new(used.iter().map(String::as_str), []).unwrap();
        let resolver: std::sync::Arc<dyn Resolver> = std::sync::Arc::clone(&world.names) as _;
        let proxy = EgressProxy::builder("again")
            .policy(EgressPolicy::execution(policy, Routes::none()))
            .resolver(resolver)
            .build()
            .unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = proxy.serve(listener).unwrap().port();
        let mut log = proxy.log().subscribe();
        let again = World { proxy, port, names: std::sync::Arc::clone(&world.names) };
        for (line, status) in [("GET http://third.example/", 200), ("GET http://other.example/", 403)] {
            assert_eq!(again.ask(line).await.status, status);
        }
        assert_eq!(log.recv().await.unwrap().outcome, Outcome::Allowed);
    }
}
