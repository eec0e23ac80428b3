//! A port of this host's loopback in front of the engine's socket, plain or TLS, as an engine elsewhere has one.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

const SOCKET: &str = "/var/run/docker.sock";

/// Signs certificates.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let name = format!("authority {}", runtime_core::names::random_hex(8));
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("signed"))
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    fn sign(&self, names: &[&str], usage: ExtendedKeyUsagePurpose) -> (rcgen::Certificate, KeyPair) {
        let names = names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut params = CertificateParams::new(names).expect("names");
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().expect("a key");
        (params.signed_by(&key, &self.0).expect("signed"), key)
    }

    /// `ca.pem`, `cert.pem` and `key.pem` of a client that this authority signed and that trusts `trusted`.
    pub(crate) fn write_client(&self, trusted: &Authority, dir: &Path) {
        let (certificate, key) = self.sign(&["client"], ExtendedKeyUsagePurpose::ClientAuth);
        std::fs::create_dir_all(dir).expect("a directory");
        std::fs::write(dir.join("ca.pem"), trusted.pem()).expect("a file");
        std::fs::write(dir.join("cert.pem"), certificate.pem()).expect("a file");
        std::fs::write(dir.join("key.pem"), key.serialize_pem()).expect("a file");
    }

    /// The same in a directory of its own.
    pub(crate) fn client(&self, trusted: &Authority) -> TempDir {
        let dir = TempDir::with_prefix("sandbox-certs-").expect("a directory");
        self.write_client(trusted, dir.path());
        dir
    }

    /// A server with a certificate for these names, which takes nobody but this authority's clients.
    fn server(&self, names: &[&str]) -> ServerConfig {
        let provider = Arc::new(ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).expect("an authority");
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
        let (certificate, key) = self.sign(names, ExtendedKeyUsagePurpose::ServerAuth);
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_client_cert_verifier(clients.build().expect("a verifier"))
            .with_single_cert(vec![certificate.der().clone()], key)
            .expect("they belong together")
    }
}

pub(crate) struct Forwarder {
    address: SocketAddr,
    accepted: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Forwarder {
    pub(crate) async fn plain() -> Self {
        Self::start(None).await
    }

    /// The authority signs the server's certificate, and every client's.
    pub(crate) async fn tls(authority: &Authority) -> Self {
        Self::tls_as(authority, &["127.0.0.1", "localhost"]).await
    }

    pub(crate) async fn tls_as(authority: &Authority, names: &[&str]) -> Self {
        Self::start(Some(TlsAcceptor::from(Arc::new(authority.server(names))))).await
    }

    async fn start(tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = accepted.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(carry(client, tls.clone()));
            }
        });
        Self {
            address,
            accepted,
            task,
        }
    }

    pub(crate) fn host(&self) -> String {
        format!("tcp://{}", self.address)
    }

    /// How many connections have come.
    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(mut client: TcpStream, tls: Option<TlsAcceptor>) {
    let Some(tls) = tls else {
        let mut engine = UnixStream::connect(SOCKET).await.expect("the engine");
        let _ = copy_bidirectional(&mut client, &mut engine).await;
        return;
    };
    match tls.accept(client).into_fallible().await {
        Ok(mut client) => {
            let mut engine = UnixStream::connect(SOCKET).await.expect("the engine");
            let _ = copy_bidirectional(&mut client, &mut engine).await;
        }
        Err((_, mut client)) => {
            // What the client has sent is read, so that the alert reaches it and not a reset.
            let _ = client.shutdown().await;
            let _ = client.read_to_end(&mut Vec::new()).await;
        }
    }
}
