//! Real TLS on both ends of a tunnel, and ClientHellos made by hand.

use std::sync::Arc;

use rcgen::{CertificateParams, Issuer, KeyPair};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::upstream::{Arrived, bind, serve};

/// An authority of the test's own.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    pub(crate) pem: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, "test authority");
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        Self {
            certificate: certificate.der().clone(),
            pem: certificate.pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// A server for these names.
    pub(crate) fn server(&self, names: &[&str]) -> ServerConfig {
        self.server_with(names, ring::default_provider())
    }

    fn server_with(&self, names: &[&str], provider: CryptoProvider) -> ServerConfig {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let params = CertificateParams::new(names).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        ServerConfig::builder_with_provider(Arc::new(provider))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
            )
            .unwrap()
    }

    /// A server that never takes the key share that clients offer first, and so asks for a second ClientHello.
    pub(crate) fn retrying_server(&self, names: &[&str]) -> ServerConfig {
        let provider = CryptoProvider {
            kx_groups: vec![ring::kx_group::SECP384R1],
            ..ring::default_provider()
        };
        self.server_with(names, provider)
    }

    /// A client that trusts this authority.
    pub(crate) fn client(&self) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth()
    }
}

/// The HTTP server of `upstream` over TLS. What arrived is the plain text.
pub(crate) async fn https(address: &str, port: u16, config: ServerConfig) -> Arrived {
    let arrived = Arrived::default();
    let kept = arrived.clone();
    let listener = bind(address, port).await;
    let acceptor = TlsAcceptor::from(Arc::new(config));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, arrived) = (acceptor.clone(), kept.clone());
            tokio::spawn(async move {
                if let Ok(stream) = acceptor.accept(stream).await {
                    serve(stream, arrived).await;
                }
            });
        }
    });
    arrived
}

/// A handshake through what is already connected.
pub(crate) async fn handshake(
    config: ClientConfig,
    name: &str,
    stream: TcpStream,
) -> std::io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

/// The extension with these server names.
pub(crate) fn sni(names: &[&str]) -> (u16, Vec<u8>) {
    let mut list = Vec::new();
    for name in names {
        list.push(0);
        list.extend(u16::try_from(name.len()).unwrap().to_be_bytes());
        list.extend(name.as_bytes());
    }
    let length = u16::try_from(list.len()).unwrap().to_be_bytes();
    (0, [&length[..], &list].concat())
}

/// A ClientHello in records of at most `size` bytes.
pub(crate) fn hello(extensions: &[(u16, Vec<u8>)], size: usize) -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 0x01, 1, 0]);
    let mut all = Vec::new();
    for (kind, content) in extensions {
        all.extend(kind.to_be_bytes());
        all.extend(u16::try_from(content.len()).unwrap().to_be_bytes());
        all.extend(content);
    }
    body.extend(u16::try_from(all.len()).unwrap().to_be_bytes());
    body.extend(all);
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    let message = [&[1], &length[1..], &body].concat();
    let record = |part: &[u8]| {
        let length = u16::try_from(part.len()).unwrap().to_be_bytes();
        [&[22, 3, 1], &length[..], part].concat()
    };
    message.chunks(size).flat_map(record).collect()
}
