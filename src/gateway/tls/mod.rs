//! TLS on both sides: the settings of a server, of a client, and what is known about a certificate.
//!
//! rustls with ring's cryptography, on byte streams that this crate owns on both sides; pingora knows nothing of TLS. Why
//! not pingora's own TLS: its `rustls` feature is marked experimental, has no client certificates towards engines per
//! backend and cannot exchange a certificate under a running listener; its `openssl` feature would make the wheel and the
//! Debian package depend on the libssl of each machine. Why ring and not aws-lc: aws-lc is most of a minute of a cold build.
//!
//! TLS 1.2 and 1.3, with rustls' choice of ciphers and groups; there is no key to weaken them. Early data is off: a request
//! in it could be replayed. A name is checked against the certificate's alternative names (the common name alone does not
//! count, as in every current client).
//!
//! Pure except for `client::system`, which reads the CA certificates of the machine: files are read by `config`.

mod pem;
mod validity;
mod client;
mod server;

pub use client::{ClientSettings, ClientTls, Roots};
pub use pem::{Certificates, PrivateKey};
pub(crate) use server::H2;
pub use server::{ClientCertificates, ServerTls};
pub use validity::Validity;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

/// Why TLS cannot be set up with what was given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// No certificate in a file.
    #[error("it has no certificate in PEM form (-----BEGIN CERTIFICATE-----)")]
    NoCertificate,
    /// No private key in a file.
    #[error("it has no private key in PEM form (PKCS#8, PKCS#1 or SEC1, without a passphrase)")]
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
    #[error("this machine has no CA certificates to check the engine's certificate with; set tls.ca")]
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

/// The cryptography of both sides.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
