//! Nobody is shut out who is allowed: people's programs in a closed container, against a web server of a public address.
//! Both addresses and names are of a namespace of the test's own.

mod support;
#[path = "support/ways.rs"]
mod ways;

use std::path::Path;
use std::process::{Child, Command as HostCommand, Stdio};
use std::time::Duration;

use runtime_core::cache::CacheDir;
use runtime_core::network::Routes;
use runtime_core::{Command, Sandbox};
use runtime_docker::{DockerConfig, EngineKind, ExecMode, Mount};
use tempfile::TempDir;

const INNER: &str = "CLIENTS_TEST_DIRECTORY";

/// Serves plainly on 80 and by TLS on 443 of one address, and a WebSocket's echo on 4110 of loopback.
const SERVER: &str = r#"
import base64, hashlib, http.server, os, socketserver, ssl, sys, threading
directory, address = sys.argv[1:]
class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        if self.path == "/websocket":
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
            self.wfile.write(f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n\r\n".encode())
            while True:
                got = self.connection.recv(4096)
                if not got: break
                self.connection.sendall(got)
            self.close_connection = True
        elif self.path.startswith("/zeros/"):
            left = int(self.path.split("/")[2])
            self.send_response(200); self.send_header("Content-Length", str(left)); self.end_headers()
            piece = b"\0" * 65536
            while left:
                self.wfile.write(piece[:left]); left -= min(left, 65536)
        elif self.path == "/chunked":
            self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
            for piece in [b"one", b"two", b"three"]:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece)); self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        else:
            super().do_GET()
    def do_PUT(self):
        total = 0
        if self.headers.get("Transfer-Encoding") == "chunked":
            while True:
                length = int(self.rfile.readline(), 16)
                while length:
                    got = self.rfile.read(min(length, 65536)); length -= len(got); total += len(got)
                self.rfile.readline()
                if not got_more(self, total): break
        else:
            left = int(self.headers["Content-Length"])
            while left:
                got = self.rfile.read(min(left, 65536)); left -= len(got); total += len(got)
        body = str(total).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    do_POST = do_PUT
def got_more(handler, total):
    # The last chunk is empty: its length was read as zero by the loop before.
    handler.seen = getattr(handler, "seen", -1)
    more = handler.seen != total
    handler.seen = total
    return more
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True
os.chdir(directory + "/www")
plain = Server((address, 80), Handler)
secure = Server((address, 443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(directory + "/cert.pem", directory + "/key.pem")
secure.socket = context.wrap_socket(secure.socket, server_side=True, do_handshake_on_connect=False)
route = Server(("127.0.0.1", 4110), Handler)
for server in (plain, secure, route):
    threading.Thread(target=server.serve_forever, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"#;

/// Each is run by `sh` in the closed box, and prints what follows.
const CLIENTS: &[(&str, &str, &str)] = &[
    ("curl", "curl -sS http://good.example/page", "a page"),
    ("curl, TLS", "curl -sS https://good.example/page", "a page"),
    ("curl, one connection", "curl -sS https://good.example/page https://good.example/page http://good.example/page", "a pagea pagea page"),
    ("curl, HTTP/1.0", "curl -sS -0 http://good.example/page", "a page"),
    ("wget", "wget -q -O- http://good.example/page", "a page"),
    ("wget, TLS", "wget -q --ca-certificate=/ca.pem -O- https://good.example/page", "a page"),
    ("git", "git -c http.sslCAInfo=/ca.pem clone -q https://good.example/repo.git /tmp/repo && cat /tmp/repo/file", "in git"),
    ("urllib", "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://good.example/page\").read().decode(), r.urlopen(\"https://good.example/page\").read().decode())'", "a page a page\n"),
    ("http.client", "python3 -c '
import http.client, os, base64, urllib.parse
proxy = urllib.parse.urlparse(os.environ[\"https_proxy\"])
auth = base64.b64encode((proxy.username + \":\" + proxy.password).encode()).decode()
connection = http.client.HTTPSConnection(proxy.hostname, proxy.port)
connection.set_tunnel(\"good.example\", 443, {\"Proxy-Authorization\": \"Basic \" + auth})
for _ in range(3):
    connection.request(\"GET\", \"/page\"); print(connection.getresponse().read().decode())
'", "a page\na page\na page\n"),
    ("download, 100 MiB", "curl -sS http://good.example/zeros/104857600 | wc -c", "104857600\n"),
    ("download by TLS, 100 MiB", "curl -sS https://good.example/zeros/104857600 | wc -c", "104857600\n"),
    ("upload, 100 MiB, Expect: 100-continue", "head -c 104857600 /dev/zero >/tmp/zeros; curl -sS -H 'Expect: 100-continue' -T /tmp/zeros http://good.example/up", "104857600"),
    ("upload by TLS, 100 MiB", "curl -sS -T /tmp/zeros https://good.example/up", "104857600"),
    ("chunked upload", "head -c 5000000 /dev/zero | curl -sS -T - http://good.example/up", "5000000"),
    ("chunked download", "curl -sS http://good.example/chunked", "onetwothree"),
    ("1,000 requests at 64 in flight", "curl -sS --fail --parallel --parallel-immediate --parallel-max 64 'http://good.example/page?[1-1000]' -o /dev/null -w '%{http_code}\\n' | sort | uniq -c | tr -s ' '", " 1000 200\n"),
    ("WebSocket through a relay", "python3 -c '
import socket
s = socket.create_connection((\"127.0.0.1\", 4110))
s.sendall(b\"GET /websocket HTTP/1.1\\r\\nHost: x\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\nSec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\\r\\n\\r\\n\")
head = b\"\"
while not head.endswith(b\"\\r\\n\\r\\n\"): head += s.recv(1)
s.sendall(b\"\\x81\\x85\\0\\0\\0\\0hello\"); print(head.split()[1].decode(), s.recv(64)[6:].decode())
'", "101 hello\n"),
];

fn directory() -> TempDir {
    let directory = TempDir::with_prefix("sandbox-clients-").expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let key = rcgen::KeyPair::generate().expect("a key");
    let mut params = rcgen::CertificateParams::new(vec!["good.example".to_owned()]).expect("names");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let cert = params.self_signed(&key).expect("a certificate");
    std::fs::write(path("cert.pem"), cert.pem()).expect("a file");
    std::fs::write(path("key.pem"), key.serialize_pem()).expect("a file");
    std::fs::write(path("server.py"), SERVER).expect("a file");
    std::fs::write(path("hosts"), "127.0.0.1 localhost\n93.184.215.14 good.example\n").expect("a file");
    std::fs::create_dir(path("www")).expect("a directory");
    std::fs::write(path("www/page"), "a page").expect("a file");
    let script = "git init -q repo && cd repo && printf 'in git' >file && git add file && \
                  git -c user.name=n -c user.email=e@example commit -qm m && \
                  git clone -q --bare . ../www/repo.git && git -C ../www/repo.git update-server-info";
    let made = HostCommand::new("sh")
        .args(["-ec", script])
        .current_dir(directory.path())
        .status();
    assert!(made.is_ok_and(|status| status.success()), "a repository");
    directory
}

#[test]
fn programs_of_a_closed_box_reach_what_is_allowed() {
    if !support::is_there(EngineKind::Docker) || !ways::is_way_asked_for("socket") {
        return;
    }
    if let Some(directory) = std::env::var_os(INNER) {
        let executor = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .expect("an executor");
        return executor.block_on(inside(Path::new(&directory)));
    }
    let directory = directory();
    let steps = format!(
        "ip link set lo up; ip addr add 93.184.215.14/32 dev lo; mount --bind {}/hosts /etc/hosts; \
         exec {} --exact programs_of_a_closed_box_reach_what_is_allowed --nocapture",
        directory.path().display(),
        std::env::current_exe().expect("this program").display(),
    );
    let status = HostCommand::new("unshare")
        .args(["--net", "--mount", "sh", "-ec", &steps])
        .env(INNER, directory.path())
        .status();
    assert!(status.expect("unshare").success());
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn inside(directory: &Path) {
    let mut server = HostCommand::new("python3")
        .arg(directory.join("server.py"))
        .args([directory.as_os_str(), "93.184.215.14".as_ref()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3");
    let output = server.stdout.take().expect("output");
    let _server = Server(server);
    let mut first = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut first).expect("a line");
    assert_eq!(first, "ready\n");

    let mut config = support::config(EngineKind::Docker, "busybox", ExecMode::Guest);
    config.allow = vec!["good.example".to_owned()];
    // The programs are those of this host.
    let mounts = [
        ("/usr", "/usr"),
        ("/usr/lib", "/lib"),
        ("/usr/lib64", "/lib64"),
        ("/etc/ssl", "/etc/ssl"),
    ];
    for (source, target) in mounts.into_iter().filter(|(source, _)| Path::new(source).exists()) {
        config.mounts.push(Mount {
            source: source.to_owned(),
            target: target.to_owned(),
            read_only: true,
        });
    }
    let cache = TempDir::with_prefix("sandbox-clients-").expect("a directory");
    let sandbox = Sandbox::builder(DockerConfig(config))
        .cache(CacheDir::at(cache.path()))
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("CURL_CA_BUNDLE", "/ca.pem")
        .env("SSL_CERT_FILE", "/ca.pem")
        .provision()
        .await
        .expect("a box");
    let ca = std::fs::read(directory.join("cert.pem")).expect("a certificate");
    sandbox.write("/ca.pem", ca).await.expect("a write");
    sandbox.create_dir("/tmp").await.expect("a directory");
    let routes = Routes::new(["http://127.0.0.1:4110"]).expect("a route");
    sandbox.prepare_execution(routes).await.expect("a cut");
    let mut wrong = Vec::new();
    for (name, script, expected) in CLIENTS {
        let output = sandbox
            .run(Command::shell(*script).timeout(Duration::from_secs(120)))
            .await
            .expect(name);
        if output.stdout_lossy() != *expected {
            let (said, erred) = (output.stdout_lossy(), output.stderr_lossy());
            wrong.push(format!(
                "{name}: {}: {said:?}, not {expected:?}: {erred}",
                output.status
            ));
        }
    }
    let refused = sandbox.egress_log().expect("a log").refused();
    sandbox.stop().await.expect("a stop");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(refused, Vec::new());
}
