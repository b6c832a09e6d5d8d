//! TLS settings for both sides (clients and engines), and the validity of certificates.
//!
//! TLS is rustls with ring, on byte streams that this crate owns. pingora's own TLS is not used.
//! Its `rustls` feature is marked experimental, has no client certificates per backend and cannot
//! replace the certificate of a running listener. Its `openssl` feature would make the wheel and
//! the Debian package depend on each machine's libssl. The provider is ring and not aws-lc, because
//! aws-lc takes most of a minute of a cold build.
//!
//! The versions are TLS 1.2 and 1.3, with rustls' defaults for ciphers and groups, which no
//! configuration key can weaken. Early data is off, because a request in it could be replayed. A
//! name is compared with the certificate's subject alternative names, as in all current clients.
//! All functions are pure, except `random`, and `client::system`, which reads the CA certificates
//! of the machine.

mod pem;
mod validity;
mod client;
mod server;

pub use client::{ClientSettings, ClientTls, Roots};
pub use pem::{Certificates, PrivateKey};
pub use server::H2;
pub use server::{ClientCertificates, ServerTls};
pub use validity::Validity;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

/// Why a certificate, key or CA cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// No certificate in a file.
    #[error("it has no certificate in PEM format (-----BEGIN CERTIFICATE-----)")]
    NoCertificate,
    /// No private key in a file.
    #[error("it has no private key in PEM format (PKCS#8, PKCS#1 or SEC1, without a passphrase)")]
    NoKey,
    /// PEM or DER that cannot be read.
    #[error("it is malformed: {0}")]
    Malformed(String),
    /// The private key belongs to another certificate.
    #[error("the private key does not match the certificate")]
    KeyMismatch,
    /// A key or certificate of a kind that is not supported.
    #[error("it cannot be used: {0}")]
    Unusable(String),
    /// The machine has no CA certificates.
    #[error("this machine has no CA certificates to verify the engine's certificate with; set tls.ca")]
    NoRoots,
}

impl From<rustls::Error> for TlsError {
    fn from(error: rustls::Error) -> Self {
        match error {
            rustls::Error::InconsistentKeys(_) => Self::KeyMismatch,
            error => Self::Unusable(error.to_string()),
        }
    }
}

/// The cryptography provider for both sides.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Random bytes that cannot be guessed.
///
/// # Errors
/// The system has none.
pub fn random<const BYTES: usize>() -> std::io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    let filled = provider().secure_random.fill(&mut bytes);
    filled.map(|()| bytes).map_err(|_| std::io::Error::other("the system has no random numbers"))
}

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
