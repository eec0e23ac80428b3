//! TLS to an engine elsewhere. Each side shows a certificate, and what signs the engine's is `ca.pem` alone: bollard's own
//! TLS trusts the system's authorities besides, and goes on without a client certificate that it cannot read.

use std::path::Path;
use std::sync::Arc;

use bollard::{BollardRequest, ClientVersion, Docker};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use runtime_core::{Error, Result};
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{AlertDescription, ClientConfig, RootCertStore};

/// A client for the engine at `host:port` with the directory of `ca.pem`, `cert.pem` and `key.pem`.
///
/// # Errors
/// [`InvalidConfig`](runtime_core::ErrorKind::InvalidConfig) naming `host` for files that are missing or cannot be used.
pub(crate) fn client(
    address: &str,
    certs: &Path,
    timeout: u64,
    version: &ClientVersion,
) -> Result<std::result::Result<Docker, bollard::errors::Error>> {
    let config = config(certs)?;
    let mut plain = HttpConnector::new();
    plain.enforce_http(false);
    let client = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .build(HttpsConnector::from((plain, config)));
    let transport = move |request: BollardRequest| {
        let answer = client.request(request);
        async move { answer.await.map_err(bollard::errors::Error::from) }
    };
    let address = Some(format!("https://{address}"));
    Ok(Docker::connect_with_custom_transport(
        transport, address, timeout, version,
    ))
}

fn config(dir: &Path) -> Result<ClientConfig> {
    let authorities = dir.join("ca.pem");
    let mut roots = RootCertStore::empty();
    for authority in certificates(&authorities)? {
        roots.add(authority).map_err(|error| bad(&authorities, error))?;
    }
    let chain = certificates(&dir.join("cert.pem"))?;
    let file = dir.join("key.pem");
    let key = PrivateKeyDer::from_pem_file(&file).map_err(|error| unreadable(&file, "private key", error))?;
    ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| bad(dir, error))?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(|error| bad(&file, error))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let found = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
    match found {
        Ok(found) if found.is_empty() => Err(unreadable(file, "certificate", pem::Error::NoItemsFound)),
        Ok(found) => Ok(found),
        Err(error) => Err(unreadable(file, "certificate", error)),
    }
}

/// What else is wrong with a file is not told: the parser quotes lines of it.
fn unreadable(file: &Path, what: &str, error: pem::Error) -> Error {
    match error {
        pem::Error::Io(error) => bad(file, error),
        _ => bad(file, format_args!("has no {what} in PEM")),
    }
}

fn bad(file: &Path, detail: impl std::fmt::Display) -> Error {
    let message = format!("TLS to the engine: {}: {detail}", file.display());
    Error::invalid_config("host", message)
}

/// Whose certificate was refused.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The engine's, by us.
    Theirs(String),
    /// Ours, by the engine.
    Ours(String),
}

/// Whether an error is about a certificate that one of the two sides refuses.
pub(crate) fn refused(error: &(dyn std::error::Error + 'static)) -> Option<Refused> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let mut inner = error;
        // It may be wrapped more than once, and such an error's source is that of what it wraps.
        while let Some(wrapped) = inner.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
            inner = wrapped;
        }
        match inner.downcast_ref() {
            Some(why @ rustls::Error::InvalidCertificate(_)) => return Some(Refused::Theirs(why.to_string())),
            Some(why @ rustls::Error::AlertReceived(alert)) if is_about_ours(*alert) => {
                return Some(Refused::Ours(why.to_string()));
            }
            _ => cause = error.source(),
        }
    }
    None
}

fn is_about_ours(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::NoCertificate
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError
            | AlertDescription::CertificateRequired
    )
}
