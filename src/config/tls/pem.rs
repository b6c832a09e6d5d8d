//! Reads certificates and private keys from PEM.
//!
//! A certificate file has one or more certificates: the server's own first, then the chain. Other
//! PEM blocks are skipped, so a combined file with a private key, as for HAProxy, also works. From
//! a key file the first private key is read. `Debug` prints no key.

use std::fmt;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::TlsError;
use super::validity::Validity;

/// The certificates of one file; at least one.
#[derive(Clone, PartialEq, Eq)]
pub struct Certificates(Arc<[CertificateDer<'static>]>);

impl Certificates {
    /// Reads all certificates of a PEM text.
    ///
    /// # Errors
    /// The text is not PEM, or has no certificate, or has one whose dates cannot be read.
    pub fn parse(text: &[u8]) -> Result<Self, TlsError> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
        let found = found.map_err(|error| TlsError::Malformed(error.to_string()))?;
        if found.is_empty() {
            return Err(TlsError::NoCertificate);
        }
        if found.iter().any(|certificate| Validity::of(certificate).is_none()) {
            return Err(TlsError::Malformed("a certificate is not X.509".to_owned()));
        }
        Ok(Self(found.into()))
    }

    /// The period in which all certificates are valid.
    pub fn validity(&self) -> Validity {
        let all = self.0.iter().filter_map(|certificate| Validity::of(certificate));
        all.reduce(|one, other| Validity { from: one.from.max(other.from), until: one.until.min(other.until) })
            .unwrap_or(Validity { from: 0, until: 0 })
    }

    /// All certificates in DER, concatenated.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|certificate| certificate.iter().copied()).collect()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &CertificateDer<'static>> {
        self.0.iter()
    }

    pub(super) fn chain(&self) -> Vec<CertificateDer<'static>> {
        self.0.to_vec()
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Certificates({})", self.0.len())
    }
}

/// A private key. It is never printed, and not wiped from memory on drop.
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateKey(Arc<PrivateKeyDer<'static>>);

impl PrivateKey {
    /// Reads the first private key of a PEM text.
    ///
    /// # Errors
    /// The text is not PEM or has no private key.
    pub fn parse(text: &[u8]) -> Result<Self, TlsError> {
        use rustls::pki_types::pem::Error;
        PrivateKeyDer::from_pem_slice(text).map(|key| Self(Arc::new(key))).map_err(|error| match error {
            Error::NoItemsFound => TlsError::NoKey,
            error => TlsError::Malformed(error.to_string()),
        })
    }

    /// The key in DER, for comparison.
    pub fn bytes(&self) -> &[u8] {
        self.0.secret_der()
    }

    pub(super) fn der(&self) -> &PrivateKeyDer<'static> {
        &self.0
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(********)")
    }
}
