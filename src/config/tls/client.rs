//! TLS to engines: trusted certificates, the required name, and the gateway's client certificate.
//!
//! A certificate that is itself in the CA file is trusted without a chain, because
//! `vllm serve --ssl-certfile` usually gets a self-signed certificate. The certificate's dates and
//! name are still checked.

use std::fmt;
use std::hash::Hasher as _;
use std::io;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use twox_hash::XxHash3_64;

use super::pem::{Certificates, PrivateKey};
use super::server::{HTTP_11, roots};
use super::validity::Validity;
use super::{TlsError, provider};

/// Which certificates are trusted.
#[derive(Clone, Copy, Debug)]
pub enum Roots<'a> {
    /// Certificates signed by the machine's CAs.
    System,
    /// Certificates in a file, or signed by a CA in it.
    File(&'a Certificates),
    /// Every certificate: the connection is encrypted, but any server can answer.
    Unverified,
}

/// TLS settings for a group of engines: everything except the name of the server.
#[derive(Clone)]
pub struct ClientSettings {
    config: Arc<ClientConfig>,
    digest: u64,
}

impl ClientSettings {
    /// Settings that trust `trusted`, and send `own` to an engine that requests a client
    /// certificate.
    ///
    /// # Errors
    /// The key of `own` does not match, a certificate cannot be used, or the machine has no CA
    /// certificates.
    pub fn new(trusted: Roots<'_>, own: Option<(&Certificates, &PrivateKey)>) -> Result<Self, TlsError> {
        let mut digest = XxHash3_64::new();
        let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        let builder = builder.dangerous().with_custom_certificate_verifier(verifier(trusted, &mut digest)?);
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some((certificates, key)) => {
                digest.write(&certificates.bytes());
                digest.write(key.bytes());
                builder.with_client_auth_cert(certificates.chain(), key.der().clone_key())?
            }
        };
        config.alpn_protocols = vec![HTTP_11.to_vec()];
        Ok(Self { config: Arc::new(config), digest: digest.finish() })
    }

    /// Settings for an engine whose certificate must be for `name`, a DNS name or an IP address.
    /// `None`: `name` is neither.
    pub fn to(&self, name: &str) -> Option<ClientTls> {
        let server = ServerName::try_from(name.to_owned()).ok()?;
        let mut digest = XxHash3_64::with_seed(self.digest);
        digest.write(name.as_bytes());
        // 0 means no TLS.
        Some(ClientTls { config: Arc::clone(&self.config), name: server, digest: digest.finish().max(1) })
    }
}

impl fmt::Debug for ClientSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientSettings({:016x})", self.digest)
    }
}

/// TLS settings for one engine.
#[derive(Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    digest: u64,
}

impl ClientTls {
    /// Digest of CA, name, certificate and key; never 0. A connection is reused only for settings
    /// with the same digest.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Performs the handshake on a connection. The caller limits the time.
    ///
    /// # Errors
    /// The connection broke, or one side rejected the other's certificate.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsStream<S>> {
        TlsConnector::from(Arc::clone(&self.config)).connect(self.name.clone(), stream).await
    }
}

impl PartialEq for ClientTls {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for ClientTls {}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientTls({})", self.name.to_str())
    }
}

fn verifier(trusted: Roots<'_>, digest: &mut XxHash3_64) -> Result<Arc<Verifier>, TlsError> {
    let (roots, pinned) = match trusted {
        Roots::Unverified => {
            digest.write(b"unverified");
            return Ok(Arc::new(Verifier { chains: None, pinned: Vec::new() }));
        }
        Roots::System => (system()?, Vec::new()),
        Roots::File(ca) => {
            digest.write(&ca.bytes());
            (roots(ca)?, ca.chain())
        }
    };
    let chains = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build();
    let chains = chains.map_err(|error| TlsError::Unusable(error.to_string()))?;
    Ok(Arc::new(Verifier { chains: Some(chains), pinned }))
}

/// The CA certificates of this machine, or of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
fn system() -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs().certs;
    let (usable, _) = roots.add_parsable_certificates(found);
    if usable == 0 { Err(TlsError::NoRoots) } else { Ok(roots) }
}

#[derive(Debug)]
struct Verifier {
    /// Verifies chains to a CA. `None`: every certificate is accepted.
    chains: Option<Arc<WebPkiServerVerifier>>,
    /// Certificates that are trusted without a chain.
    pinned: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(chains) = &self.chains else { return Ok(ServerCertVerified::assertion()) };
        if !self.pinned.iter().any(|pinned| pinned == own) {
            return chains.verify_server_cert(own, chain, name, ocsp, now);
        }
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        match Validity::of(own) {
            Some(dates) if now < dates.from => return Err(CertificateError::NotValidYet.into()),
            Some(dates) if dates.contains(now) => {}
            _ => return Err(CertificateError::Expired.into()),
        }
        rustls::client::verify_server_name(&ParsedCertificate::try_from(own)?, name)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = provider().signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}
