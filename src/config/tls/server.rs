//! TLS to clients: certificate, key, and verification of client certificates.
//!
//! ALPN offers HTTP/2 and HTTP/1.1; a client without ALPN gets HTTP/1.1. Sessions are resumed with
//! tickets. The ticket keys belong to these settings, so a reload that changes the certificate or
//! the CA ends old sessions.

use std::fmt;
use std::sync::Arc;

use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use super::pem::{Certificates, PrivateKey};
use super::{TlsError, provider};

/// The name of HTTP/2 in the negotiation of protocols.
pub const H2: &[u8] = b"h2";
pub(super) const HTTP_11: &[u8] = b"http/1.1";

/// How client certificates are verified.
#[derive(Clone, Copy, Debug)]
pub struct ClientCertificates<'a> {
    /// The CA that must have signed client certificates.
    pub ca: &'a Certificates,
    /// Whether a client without a certificate is rejected.
    pub required: bool,
}

/// Valid settings of a TLS server.
#[derive(Clone)]
pub struct ServerTls(Arc<ServerConfig>);

impl ServerTls {
    /// Settings with this certificate chain and key.
    ///
    /// # Errors
    /// The key does not match or has an unsupported type, or a CA cannot be read.
    pub fn new(
        certificates: &Certificates,
        key: &PrivateKey,
        clients: Option<ClientCertificates<'_>>,
    ) -> Result<Self, TlsError> {
        let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(ClientCertificates { ca, required }) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)?), provider());
                let verifier = if required { verifier } else { verifier.allow_unauthenticated() };
                let verifier = verifier.build().map_err(|error| TlsError::Unusable(error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(certificates.chain(), key.der().clone_key())?;
        config.alpn_protocols = vec![H2.to_vec(), HTTP_11.to_vec()];
        config.ticketer = rustls::crypto::ring::Ticketer::new()?;
        Ok(Self(Arc::new(config)))
    }

    /// The settings, for a handshake.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0)
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerTls")
    }
}

/// The CA certificates as a root store of rustls.
pub(super) fn roots(ca: &Certificates) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in ca.iter() {
        roots.add(certificate.clone())?;
    }
    Ok(roots)
}
