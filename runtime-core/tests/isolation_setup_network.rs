//! Setup on the host's network: what it reaches, what is left of it after the cut, and what opens it again. For root and
//! for an ordinary user.

#[cfg(target_os = "linux")]
mod subprocess_target;

#[cfg(target_os = "linux")]
mod suite {
    use std::io::{ErrorKind as Io, Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    use std::time::Duration;

    use runtime_core::cache::CacheDir;
    use runtime_core::network::Routes;
    use runtime_core::subprocess::{SetupNetwork, SubprocessConfig};
    use runtime_core::{ErrorKind, Sandbox};
    use tempfile::TempDir;

    use crate::subprocess_target::{busybox_root, isolation};

    /// Services of this host on its loopback.
    struct Host {
        tcp: TcpListener,
        udp: UdpSocket,
        cache: TempDir,
    }

    impl Host {
        fn new() -> Self {
            let tcp = TcpListener::bind("127.0.0.1:0").expect("a listener");
            let udp = UdpSocket::bind("127.0.0.1:0").expect("a socket");
            udp.set_nonblocking(true).expect("a mode");
            let cache = tempfile::tempdir().expect("a directory");
            Self { tcp, udp, cache }
        }

        fn to_tcp(&self) -> String {
            format!(
                "/dev/tcp/127.0.0.1/{}",
                self.tcp.local_addr().expect("its address").port()
            )
        }

        fn to_udp(&self) -> String {
            format!(
                "/dev/udp/127.0.0.1/{}",
                self.udp.local_addr().expect("its address").port()
            )
        }

        /// The next connection, which somebody has made or is about to make.
        fn accept(&self) -> TcpStream {
            self.tcp.set_nonblocking(false).expect("a mode");
            self.tcp.accept().expect("a connection").0
        }

        fn has_connection(&self) -> bool {
            self.tcp.set_nonblocking(true).expect("a mode");
            match self.tcp.accept() {
                Ok(_) => true,
                Err(error) => {
                    assert_eq!(error.kind(), Io::WouldBlock);
                    false
                }
            }
        }

        /// What has come by datagrams.
        fn datagrams(&self) -> Vec<String> {
            let mut buffer = [0; 100];
            let mut said = Vec::new();
            while let Ok(count) = self.udp.recv(&mut buffer) {
                said.push(String::from_utf8_lossy(&buffer[..count]).trim().to_owned());
            }
            said
        }

        /// Waits until each of these has come.
        async fn wait_for(&self, wanted: &[&str]) {
            let mut missing = wanted.to_vec();
            while !missing.is_empty() {
                let said = self.datagrams();
                missing.retain(|word| !said.iter().any(|one| one == word));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }

        async fn provision(&self, config: SubprocessConfig) -> Sandbox {
            let builder = Sandbox::builder(config).cache(CacheDir::at(self.cache.path()));
            builder.provision().await.expect("a box")
        }
    }

    fn config(allow: &[&str]) -> SubprocessConfig {
        let mut config = SubprocessConfig::namespaces();
        config.setup_network = SetupNetwork::Host;
        config.allow = allow.iter().map(|&rule| rule.to_owned()).collect();
        config
    }

    async fn bash(sandbox: &Sandbox, script: impl AsRef<str>) -> String {
        let output = sandbox.run(["bash", "-c", script.as_ref()]).await.expect("bash");
        output.stdout_lossy().trim().to_owned()
    }

    /// Connects to an abstract socket.
    const ABSTRACT: &str = "perl -MSocket -e 'socket(S, PF_UNIX, SOCK_STREAM, 0) or die; \
                            print connect(S, pack_sockaddr_un(qq(\\0$ARGV[0]))) ? qq(in) : qq(out)'";

    /// Setup reaches what the host does, by every protocol; the execution phase nothing of it.
    async fn reach() {
        let host = Host::new();
        let name = format!("setup-network-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let _abstract = UnixListener::bind_addr(&address).expect("an abstract socket");
        let has_perl = std::path::Path::new("/usr/bin/perl").exists();
        let sandbox = host.provision(config(&[])).await;
        assert_eq!(sandbox.info()["setup_network"], "host");
        assert!(sandbox.info().get("ended_at_cut").is_none());
        let (tcp, udp) = (host.to_tcp(), host.to_udp());
        let attempts = format!(
            "(echo stream >{tcp}) 2>/dev/null && echo connected; (echo datagram >{udp}) 2>/dev/null; \
             echo ${{http_proxy:+proxy}}; readlink /proc/self/ns/net"
        );
        for _ in 0..2 {
            sandbox.prepare_setup().await.expect("setup");
            let said = bash(&sandbox, &attempts).await;
            let lines: Vec<&str> = said.lines().collect();
            assert_eq!(&lines[..2], ["connected", ""], "{said}");
            let mut text = String::new();
            host.accept().read_to_string(&mut text).expect("its words");
            assert_eq!(text, "stream\n");
            assert_eq!(host.datagrams(), ["datagram"]);
            let own = std::fs::read_link("/proc/self/ns/net").expect("a network");
            assert_eq!(Some(lines[2]), own.to_str(), "the host's network itself");
            // The box is the same otherwise.
            let box_of = "readlink /proc/1/ns/pid; echo $$ $(cat /proc/self/status | grep -c NoNewPrivs:.1); pwd; ls -d /home/* /root/* 2>/dev/null";
            let said = bash(&sandbox, box_of).await;
            assert!(said.ends_with(" 1\n/sandbox"), "{said}");
            if has_perl {
                assert_eq!(bash(&sandbox, format!("{ABSTRACT} {name}")).await, "in");
            }
            // Nothing of the box's own goes by it.
            // Once who has started the killer is gone, and its start told.
            let killer = "until grep -q '^PPid:.1$' /proc/$$/status; do :; done; kill -9 -1; true";
            assert_eq!(bash(&sandbox, killer).await, "");
            assert_eq!(bash(&sandbox, "echo alive").await, "alive");

            sandbox.prepare_execution(Routes::none()).await.expect("the cut");
            let said = bash(&sandbox, &attempts).await;
            let (proxy, network) = said.split_once('\n').expect("two lines");
            assert_eq!(proxy, "proxy");
            assert!(network.starts_with("net:[") && Some(network) != own.to_str(), "{said}");
            let interfaces = bash(&sandbox, "echo $(tail -n +3 /proc/net/dev | cut -d: -f1)").await;
            assert_eq!(interfaces, "lo");
            assert!(!host.has_connection() && host.datagrams().is_empty());
            if has_perl {
                assert_eq!(bash(&sandbox, format!("{ABSTRACT} {name}")).await, "out");
            }
            assert_eq!(sandbox.info()["ended_at_cut"], 0);
        }
        sandbox.stop().await.expect("stopped");
        if !has_perl {
            println!("SKIPPED: abstract sockets: there is no perl here");
        }
    }

    /// No process of setup outlives it, however it hides.
    async fn survivors() {
        let host = Host::new();
        let sandbox = host.provision(config(&[])).await;
        sandbox.prepare_setup().await.expect("setup");
        let (tcp, udp) = (host.to_tcp(), host.to_udp());
        let beat = |word: &str| format!("trap '' HUP INT TERM; while :; do echo {word} >{udp}; sleep 0.02; done");
        sandbox
            .run_background(["bash", "-c", &beat("server")], "log")
            .await
            .expect("a server");
        let mut live = sandbox.spawn(["bash", "-c", &beat("live")]).await.expect("a process");
        // Forked twice, in a session of its own, with a connection open.
        let escape = async |name: &str, script: &str| {
            // What is still in the program's group when it ends is killed, so it waits until that is left.
            let launch = format!(
                "(setsid bash -c \"touch {name}; $SCRIPT\" >/dev/null 2>&1 </dev/null &); \
                 until [ -e {name} ]; do sleep 0.01; done"
            );
            let program = runtime_core::Command::new(["bash", "-c", &launch]).env("SCRIPT", script);
            assert!(sandbox.run_program(program).await.expect("bash").success());
        };
        escape("daemon", &format!("exec 3<>{tcp}; echo held >&3; {}", beat("daemon"))).await;
        // One that is never the same process for long.
        let hop = format!("echo hop >{udp}; sleep 0.01; bash -c \"$SCRIPT\" & exit");
        escape("hop", &hop).await;
        // And one that is stopped.
        escape("stopped", "kill -STOP $$").await;
        let mut held = host.accept();
        host.wait_for(&["server", "live", "daemon", "hop"]).await;

        sandbox.prepare_execution(Routes::none()).await.expect("the cut");
        host.datagrams();
        let status = live.wait().await.expect("its end");
        assert_eq!(status.signal(), Some(9));
        let mut said = Vec::new();
        let end = held.read_to_end(&mut said);
        assert!(end.is_ok() || end.is_err_and(|error| error.kind() == Io::ConnectionReset));
        assert!(said.starts_with(b"held\n"));
        // Process 1, and the shell that looks.
        assert_eq!(
            bash(&sandbox, "shopt -s nullglob; set -- /proc/[0-9]*; echo $#").await,
            "2"
        );
        let ended = sandbox.info()["ended_at_cut"].as_u64().expect("a number");
        assert!(ended >= 5, "{ended}");
        assert!(host.datagrams().is_empty(), "somebody still speaks");
        // Another cut ends nobody.
        sandbox
            .run_background(["sleep", "1000"], "log")
            .await
            .expect("a server");
        sandbox.prepare_execution(Routes::none()).await.expect("the cut");
        assert_eq!(
            bash(&sandbox, "shopt -s nullglob; set -- /proc/[0-9]*; echo $#").await,
            "3"
        );
        assert_eq!(sandbox.info()["ended_at_cut"].as_u64(), Some(ended));
        sandbox.stop().await.expect("stopped");
    }

    /// A policy that restricts nothing takes the host's network away too.
    async fn unrestricted() {
        let host = Host::new();
        let sandbox = host.provision(config(&["*"])).await;
        let tcp = host.to_tcp();
        let attempt =
            format!("(echo hi >{tcp}) 2>/dev/null && echo connected || echo refused; echo ${{http_proxy:+proxy}}");
        assert_eq!(bash(&sandbox, &attempt).await, "connected");
        drop(host.accept());
        sandbox.prepare_execution(Routes::none()).await.expect("the cut");
        assert_eq!(bash(&sandbox, &attempt).await, "refused\nproxy");
        assert!(!host.has_connection());
        sandbox.stop().await.expect("stopped");
    }

    fn get(url: &str) -> String {
        let mut stream = TcpStream::connect(url.trim_start_matches("http://")).expect("a connection");
        let _ = stream.write_all(b"GET /page HTTP/1.0\r\n\r\n");
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text.rsplit("\r\n\r\n").next().unwrap_or_default().to_owned()
    }

    /// A root of its own: services of the host by their URLs, and servers by `expose`, on both sides of the cut.
    async fn services() {
        let host = Host::new();
        let root = tempfile::tempdir().expect("a directory");
        busybox_root(root.path());
        let mut config = config(&[]);
        config.root = root.path().to_str().expect("UTF-8").to_owned();
        let sandbox = host.provision(config).await;
        let url = format!("http://{}/", host.tcp.local_addr().expect("its address"));
        let tcp = host.tcp.try_clone().expect("the listener");
        let serving = std::thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = tcp.accept().expect("a connection");
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi");
            }
        });
        assert_eq!(sandbox.host_url(&url).await.expect("a URL"), url);
        let fetch = format!("unset http_proxy; wget -q -O- {url}");
        let fetched = sandbox.run(["sh", "-c", &fetch]).await.expect("sh");
        assert_eq!(fetched.stdout_lossy(), "hi");

        // A port that is free in both networks.
        let port = TcpListener::bind("127.0.0.1:0")
            .expect("a listener")
            .local_addr()
            .expect("its address")
            .port();
        let server = format!("exec httpd -f -p 127.0.0.1:{port} -h /sandbox");
        let exposed = sandbox.expose(port).await.expect("a URL");
        let listening = format!("until grep -q :{port:04X} /proc/net/tcp; do sleep 0.02; done");
        let serve = async |word: &str| {
            sandbox.write("page", word.to_owned()).await.expect("written");
            sandbox
                .run_background(["sh", "-c", &server], "log")
                .await
                .expect("a server");
            assert!(sandbox.run(["sh", "-c", &listening]).await.expect("sh").success());
            get(&exposed)
        };
        assert_eq!(serve("one").await, "one");
        let by_host = get(&format!("http://127.0.0.1:{port}"));
        assert_eq!(by_host, "one", "in setup it listens on the host's loopback");
        sandbox
            .prepare_execution(Routes::new([&url]).expect("a route"))
            .await
            .expect("the cut");
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "the server has ended");
        assert_eq!(sandbox.host_url(&url).await.expect("a URL"), url);
        let fetched = sandbox.run(["sh", "-c", &fetch]).await.expect("sh");
        assert_eq!(fetched.stdout_lossy(), "hi", "by the relay");
        serving.join().expect("served");
        assert_eq!(serve("two").await, "two");
        assert!(
            TcpStream::connect(("127.0.0.1", port)).is_err(),
            "it is in the box's network"
        );
        sandbox.stop().await.expect("stopped");
    }

    /// Failed starts are told apart on that side, too.
    async fn failures() {
        let host = Host::new();
        let sandbox = host.provision(config(&[])).await;
        let kind = |ended: runtime_core::Result<runtime_core::Output>| ended.expect_err("no start").kind();
        assert_eq!(kind(sandbox.run(["no-such-program"]).await), ErrorKind::ProgramNotFound);
        assert_eq!(
            kind(sandbox.run(["/etc/passwd"]).await),
            ErrorKind::ProgramNotExecutable
        );
        let ended = sandbox
            .run(["bash", "-c", "head -c 300000 /dev/zero | wc -c; exit 7"])
            .await
            .expect("bash");
        assert_eq!((ended.code(), ended.stdout_lossy().trim()), (Some(7), "300000"));
        let long = "x".repeat(120_000);
        let ended = sandbox.run(["bash", "-c", "echo ${#0}", &long]).await.expect("bash");
        assert_eq!(ended.stdout_lossy().trim(), "120000");
        sandbox.stop().await.expect("stopped");
    }

    pub(crate) fn run() -> std::process::ExitCode {
        isolation::run("isolation_setup_network", || {
            let executor = tokio::runtime::Runtime::new().expect("an executor");
            let user = rustix::process::geteuid();
            executor.block_on(async {
                reach().await;
                println!("user {user}: setup reaches what the host does ... ok");
                survivors().await;
                println!("user {user}: no process of setup outlives it ... ok");
                unrestricted().await;
                println!("user {user}: a policy that restricts nothing cuts too ... ok");
                services().await;
                println!("user {user}: services on both sides of the cut ... ok");
                failures().await;
                println!("user {user}: failed starts ... ok");
            });
            std::process::ExitCode::SUCCESS
        })
    }
}

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    use std::process::ExitCode;
    if std::env::args().any(|argument| argument == "--list") {
        println!("setup_has_the_hosts_network_and_nothing_of_it_is_left_after_the_cut: test");
        return ExitCode::SUCCESS;
    }
    // First as whoever runs the tests, then, where that is root, as an ordinary user.
    if rustix::process::geteuid().is_root() && suite::run() != ExitCode::SUCCESS {
        return ExitCode::FAILURE;
    }
    subprocess_target::as_user::run(suite::run)
}

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("SKIPPED: isolation_setup_network: there are no namespaces on this system");
}
