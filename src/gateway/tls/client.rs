//! TLS towards engines: whose certificates are trusted, which name they must have, and our own certificate.
//!
//! A certificate that stands in the CA file itself is trusted as it is: `vllm serve --ssl-certfile` is most often given a
//! certificate that signed itself, which no chain leads to. Its dates and its name are still checked.

use std::fmt;
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
use xxhash_rust::xxh3::Xxh3;

use super::pem::{Certificates, PrivateKey};
use super::server::{HTTP_11, roots};
use super::validity::Validity;
use super::{TlsError, provider};

/// Whose certificates are trusted.
#[derive(Clone, Copy, Debug)]
pub enum Roots<'a> {
    /// Those that the machine trusts.
    System,
    /// Those of a file.
    File(&'a Certificates),
    /// All: the connection is encrypted, but may lead to anyone.
    Unverified,
}

/// How to connect to engines: everything except their name.
#[derive(Clone)]
pub struct ClientSettings {
    config: Arc<ClientConfig>,
    /// A digest of what they were made of.
    digest: u64,
}

impl ClientSettings {
    /// Settings that trust `trusted` and show `own` to an engine that asks for a certificate.
    ///
    /// # Errors
    /// The own key does not match, a certificate cannot be used, or the machine has no CA certificates.
    pub fn new(trusted: Roots<'_>, own: Option<(&Certificates, &PrivateKey)>) -> Result<Self, TlsError> {
        let mut digest = Xxh3::new();
        let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        let builder = builder.dangerous().with_custom_certificate_verifier(verifier(trusted, &mut digest)?);
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some((certificates, key)) => {
                digest.update(&certificates.bytes());
                digest.update(key.bytes());
                builder.with_client_auth_cert(certificates.chain(), key.der().clone_key())?
            }
        };
        config.alpn_protocols = vec![HTTP_11.to_vec()];
        Ok(Self { config: Arc::new(config), digest: digest.digest() })
    }

    /// Connections to an engine that must have the certificate of `name`, a DNS name or an IP address. `None`: not a name.
    pub fn to(&self, name: &str) -> Option<ClientTls> {
        let server = ServerName::try_from(name.to_owned()).ok()?;
        let mut digest = Xxh3::with_seed(self.digest);
        digest.update(name.as_bytes());
        // 0 is what connections without TLS have.
        Some(ClientTls { config: Arc::clone(&self.config), name: server, digest: digest.digest().max(1) })
    }
}

impl fmt::Debug for ClientSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientSettings({:016x})", self.digest)
    }
}

/// How to connect to one engine.
#[derive(Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    digest: u64,
}

impl ClientTls {
    /// A digest of CA, name, certificate and key, never 0: connections with another one are not exchangeable.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Makes a connection secure. The caller limits the time.
    ///
    /// # Errors
    /// The connection broke, or one side refuses the other's certificate.
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

fn verifier(trusted: Roots<'_>, digest: &mut Xxh3) -> Result<Arc<Verifier>, TlsError> {
    let (roots, pinned) = match trusted {
        Roots::Unverified => {
            digest.update(b"unverified");
            return Ok(Arc::new(Verifier { chains: None, pinned: Vec::new() }));
        }
        Roots::System => (system()?, Vec::new()),
        Roots::File(ca) => {
            digest.update(&ca.bytes());
            (roots(ca)?, ca.chain())
        }
    };
    let chains = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build();
    let chains = chains.map_err(|error| TlsError::Unusable(error.to_string()))?;
    Ok(Arc::new(Verifier { chains: Some(chains), pinned }))
}

/// The CA certificates of this machine, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
fn system() -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs().certs;
    let (usable, _) = roots.add_parsable_certificates(found);
    if usable == 0 { Err(TlsError::NoRoots) } else { Ok(roots) }
}

/// Checks an engine's certificate.
#[derive(Debug)]
struct Verifier {
    /// Follows chains to a CA; `None`: every certificate is accepted.
    chains: Option<Arc<WebPkiServerVerifier>>,
    /// Certificates that are trusted as they are.
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
