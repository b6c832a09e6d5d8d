//! Certificates for tests.
//!
//! A CA, and certificates that it signs.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};

static AUTHORITIES: AtomicUsize = AtomicUsize::new(0);

/// A CA.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// The certificate of the CA.
    pub pem: String,
}

/// A certificate and the key, in PEM.
#[derive(Clone, Debug)]
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// The private key of the certificate.
    pub key: String,
}

fn params(names: &[&str], until: i32) -> CertificateParams {
    let mut params = CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap();
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(until, 1, 1);
    params
}

impl Authority {
    /// A new CA.
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = params(&[], 2040);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Each CA needs a distinct name, because chains are built by issuer names.
        let number = AUTHORITIES.fetch_add(1, Ordering::Relaxed);
        params.distinguished_name.push(DnType::CommonName, format!("CA {number} for tests"));
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// A certificate for these DNS names and IP addresses, valid until the beginning of 2040.
    pub fn issue(&self, names: &[&str]) -> Issued {
        self.issue_until(names, 2040)
    }

    /// A certificate that expires at the beginning of this year.
    pub fn issue_until(&self, names: &[&str], year: i32) -> Issued {
        let key = KeyPair::generate().unwrap();
        let certificate = params(names, year).signed_by(&key, &self.issuer).unwrap().pem();
        Issued { certificate, key: key.serialize_pem() }
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

impl Issued {
    /// A self-signed certificate, marked as a CA like the certificates of `openssl req -x509`.
    pub fn self_signed(names: &[&str]) -> Self {
        Self::self_signed_until(names, 2040)
    }

    /// A self-signed certificate that expires at the beginning of this year.
    pub fn self_signed_until(names: &[&str], year: i32) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = params(names, year);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self { certificate: params.self_signed(&key).unwrap().pem(), key: key.serialize_pem() }
    }

    /// Writes certificate and key into a folder, as `NAME.pem` and `NAME.key` (mode 600). Returns
    /// the two paths.
    pub fn write(&self, folder: &Path, name: &str) -> (PathBuf, PathBuf) {
        use std::os::unix::fs::PermissionsExt as _;
        let (certificate, key) = (folder.join(format!("{name}.pem")), folder.join(format!("{name}.key")));
        std::fs::write(&certificate, &self.certificate).unwrap();
        std::fs::write(&key, &self.key).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
        (certificate, key)
    }
}
