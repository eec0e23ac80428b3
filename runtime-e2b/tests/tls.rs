//! The client over TLS, as the provider serves it: a certificate that is trusted, and those that are not.
#![cfg(all(feature = "emulator", target_os = "linux"))]

mod common;

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use common::Provider;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use runtime_core::cache::CacheDir;
use runtime_core::{Builder, ErrorKind, Retry, Sandbox};
use runtime_e2b::{ApiKey, E2bConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// Set in the process of a client: what is expected of its first request.
const CLIENT: &str = "E2B_TLS_TEST_CLIENT";

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("signed")
}

/// A server's certificate for this name.
fn acceptor(authority: &Authority, name: &str) -> TlsAcceptor {
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
    let certificate = params.signed_by(&key, authority).expect("signed");
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .expect("they belong together");
    TlsAcceptor::from(Arc::new(config))
}

/// TLS in front of an address; its port.
async fn in_front_of(url: &str, acceptor: TlsAcceptor) -> u16 {
    let address = url.strip_prefix("http://").expect("http").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, address) = (acceptor.clone(), address.clone());
            tokio::spawn(async move {
                let Ok(mut outer) = acceptor.accept(stream).await else {
                    return;
                };
                let mut inner = TcpStream::connect(address).await.expect("the emulator listens");
                let _ = tokio::io::copy_bidirectional(&mut outer, &mut inner).await;
            });
        }
    });
    port
}

/// A client in a process of its own, as trust comes from the environment.
async fn client(provider: &Provider, ports: (u16, u16), trusted: &Path, expected: &str) {
    let output = tokio::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "a_client_of_the_other_test", "--nocapture"])
        .env(CLIENT, expected)
        .env("SSL_CERT_FILE", trusted)
        .env_remove("SSL_CERT_DIR")
        .env("E2B_API_KEY", provider.emulator.api_key())
        .env("E2B_API_URL", format!("https://localhost:{}", ports.0))
        .env("E2B_SANDBOX_URL", format!("https://localhost:{}", ports.1))
        .env("SANDBOX_CACHE_DIR", provider.cache.path())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("it runs");
    let said = [&output.stdout[..], &output.stderr[..]].concat();
    assert!(
        output.status.success(),
        "{expected}: {}",
        String::from_utf8_lossy(&said)
    );
}

fn builder() -> Builder {
    let variable = |name: &str| std::env::var(name).expect(name);
    let config = E2bConfig {
        api_key: Some(ApiKey::new(variable("E2B_API_KEY"))),
        api_url: Some(variable("E2B_API_URL")),
        sandbox_url: Some(variable("E2B_SANDBOX_URL")),
        creates_per_sec: None,
        ..E2bConfig::default()
    };
    Sandbox::builder(config).cache(CacheDir::at(variable("SANDBOX_CACHE_DIR")))
}

/// Does nothing unless it is started by the other test.
#[tokio::test]
async fn a_client_of_the_other_test() {
    let Some(expected) = std::env::var_os(CLIENT) else {
        return;
    };
    if expected == "trusted" {
        let sandbox = builder().provision().await.expect("a box");
        let output = sandbox.run(["echo", "over TLS"]).await.expect("ran");
        assert_eq!(&output.stdout.bytes[..], b"over TLS\n");
        let content = vec![7; 1 << 20];
        sandbox.write("f", content.clone()).await.expect("written");
        assert_eq!(&sandbox.read("f").await.expect("read")[..], &content[..]);
        sandbox.stop().await.expect("stopped");
        return;
    }
    let error = builder().provision().await.expect_err("refused");
    assert_eq!(
        (error.kind(), error.retry()),
        (ErrorKind::Unavailable, Retry::Permanent),
        "{error}"
    );
    assert!(error.message().contains("certificate"), "{error}");
}

#[tokio::test]
async fn a_trusted_certificate_is_taken_and_any_other_is_refused_for_good() {
    let Some(provider) = Provider::start() else { return };
    let (ours, other) = (authority(), authority());
    let trusted = provider.cache.path().join("ca.pem");
    std::fs::write(&trusted, ours.pem()).expect("written");
    for (authority, name, expected) in [
        (&ours, "localhost", "trusted"),
        (&other, "localhost", "of another authority"),
        (&ours, "api.e2b.example", "for another name"),
    ] {
        let acceptor = acceptor(authority, name);
        let ports = (
            in_front_of(&provider.emulator.api_url(), acceptor.clone()).await,
            in_front_of(&provider.emulator.sandbox_url(), acceptor).await,
        );
        let before = provider.emulator.requests().len();
        client(&provider, ports, &trusted, expected).await;
        let arrived = provider.emulator.requests().len() > before;
        assert_eq!(arrived, expected == "trusted", "{expected}");
    }
    assert!(provider.emulator.boxes().is_empty());
}
