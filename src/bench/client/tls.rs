//! TLS for https addresses: the accepted certificates, and the handshake.
//!
//! Accepted CAs are the machine's, or if set, the ones in `SSL_CERT_FILE` and `SSL_CERT_DIR`.
//! Reading them takes milliseconds, so it happens at the first https address.
//!
//! [`Trust::Anyone`] accepts every certificate, like `--insecure` of `vllm bench serve`.

use std::sync::{Arc, OnceLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_rustls::TlsConnector;

use crate::error::BenchError;

/// Which servers are trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// Servers with a certificate of a CA that this machine trusts.
    #[default]
    System,
    /// All servers, so any server can answer.
    Anyone,
}

#[derive(Clone, Default)]
pub(crate) struct TlsSettings {
    pub(crate) trust: Trust,
    config: Arc<OnceLock<Arc<ClientConfig>>>,
}

impl std::fmt::Debug for TlsSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TlsSettings({:?})", self.trust)
    }
}

impl TlsSettings {
    pub(crate) fn new(trust: Trust) -> Self {
        Self { trust, config: Arc::default() }
    }

    /// Returns the connector, and the server's name in certificates.
    pub(crate) fn to(&self, host: &str) -> Result<(TlsConnector, ServerName<'static>), BenchError> {
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare).map_err(|_| BenchError::BadUrl(format!("https://{host}")))?;
        if let Some(config) = self.config.get() {
            return Ok((TlsConnector::from(Arc::clone(config)), name));
        }
        let config = Arc::new(config(self.trust)?);
        Ok((TlsConnector::from(Arc::clone(self.config.get_or_init(|| config))), name))
    }
}

fn config(trust: Trust) -> Result<ClientConfig, BenchError> {
    let provider = Arc::new(ring::default_provider());
    let failed = |error: rustls::Error| BenchError::Tls(error.to_string());
    let builder = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
    let builder = builder.map_err(failed)?;
    let mut config = match trust {
        Trust::Anyone => {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AcceptAll(provider))).with_no_client_auth()
        }
        Trust::System => {
            let mut roots = RootCertStore::empty();
            let (usable, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if usable == 0 {
                return Err(BenchError::Tls("this machine has no CA certificates".to_owned()));
            }
            builder.with_root_certificates(roots).with_no_client_auth()
        }
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

#[derive(Debug)]
struct AcceptAll(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAll {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
