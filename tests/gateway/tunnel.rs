//! TLS for plain text endpoints of the tests: in front of a scripted engine, and behind a scripted
//! client.
//!
//! A tunnel passes bytes in both directions, and closes both connections together, so that each
//! side sees when the other side leaves.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use sluice_config::tls::testing::{Authority, Issued};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Certificates in a folder, signed by one CA.
pub(crate) struct Files {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) ca: Authority,
}

impl Files {
    /// A folder with `ca.pem`, and `server.pem` and `server.key` for 127.0.0.1.
    pub(crate) fn new() -> Self {
        let (folder, ca) = (tempfile::tempdir().unwrap(), Authority::new());
        std::fs::write(folder.path().join("ca.pem"), &ca.pem).unwrap();
        ca.issue(&["127.0.0.1"]).write(folder.path(), "server");
        Self { folder, ca }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn server(&self) -> [String; 2] {
        let folder: &Path = self.folder.path();
        ["certificate=server.pem", "key=server.key"].map(|pair| {
            let (key, file) = pair.split_once('=').unwrap();
            format!("server.tls.{key}={}", folder.join(file).display())
        })
    }

    /// Configuration of a client that trusts the CA and offers these protocols in ALPN.
    pub(crate) fn client(&self, offered: &[&str]) -> ClientConfig {
        client(&self.ca, None, offered)
    }
}

fn chain(pem: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem.as_bytes()).map(Result::unwrap).collect()
}

fn roots(ca: &Authority) -> Arc<RootCertStore> {
    let mut roots = RootCertStore::empty();
    chain(&ca.pem).into_iter().for_each(|certificate| roots.add(certificate).unwrap());
    Arc::new(roots)
}

fn key(issued: &Issued) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap()
}

fn ring() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Configuration of a client that trusts `ca`, shows the certificate `own` and offers these
/// protocols in ALPN.
pub(crate) fn client(ca: &Authority, own: Option<&Issued>, offered: &[&str]) -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(ring()).with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots(ca));
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some(own) => builder.with_client_auth_cert(chain(&own.certificate), key(own)).unwrap(),
    };
    config.alpn_protocols = offered.iter().map(|name| name.as_bytes().to_vec()).collect();
    config
}

/// Configuration of a server with a certificate. With `clients`, the server requires a client
/// certificate that this authority signed.
pub(crate) fn server(issued: &Issued, clients: Option<&Authority>) -> ServerConfig {
    let builder = ServerConfig::builder_with_provider(ring()).with_safe_default_protocol_versions().unwrap();
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(ca) => builder
            .with_client_cert_verifier(WebPkiClientVerifier::builder_with_provider(roots(ca), ring()).build().unwrap()),
    };
    builder.with_single_cert(chain(&issued.certificate), key(issued)).unwrap()
}

pub(crate) async fn connect(address: SocketAddr, config: ClientConfig) -> std::io::Result<TlsStream<TcpStream>> {
    let socket = TcpStream::connect(address).await?;
    socket.set_nodelay(true)?;
    let name = ServerName::try_from(address.ip().to_string()).unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, socket).await
}

/// A port whose connections pass through TLS. Dropping it closes all its connections.
pub(crate) struct Tunnel {
    pub(crate) address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Tunnel {
    async fn start<A, B>(
        open: impl Fn(TcpStream) -> Box<dyn Future<Output = Option<(A, B)>> + Send + Unpin> + Send + 'static,
    ) -> Self
    where
        A: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        B: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = tokio::spawn(async move {
            let mut tasks = tokio::task::JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                socket.set_nodelay(true).unwrap();
                let opening = open(socket);
                tasks.spawn(async move {
                    if let Some((mut one, mut other)) = opening.await {
                        pass(&mut one, &mut other).await;
                    }
                });
            }
        });
        Self { address, accepting }
    }

    /// Opens a port with TLS in front of an engine without TLS.
    pub(crate) async fn before(engine: SocketAddr, config: ServerConfig) -> Self {
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Self::start(move |socket| {
            let acceptor = acceptor.clone();
            Box::new(Box::pin(async move {
                let secure = acceptor.accept(socket).await.ok()?;
                Some((secure, TcpStream::connect(engine).await.ok()?))
            }))
        })
        .await
    }

    /// Opens a port without TLS, through which a client reaches a gateway with TLS.
    pub(crate) async fn to(gateway: SocketAddr, config: ClientConfig) -> Self {
        Self::start(move |socket| {
            let config = config.clone();
            Box::new(Box::pin(async move { Some((socket, connect(gateway, config).await.ok()?)) }))
        })
        .await
    }

    pub(crate) fn https(&self) -> String {
        format!("https://{}", self.address)
    }
}

/// Copies bytes in both directions until both sides have ended, then closes both connections.
async fn pass<A: AsyncRead + AsyncWrite + Unpin, B: AsyncRead + AsyncWrite + Unpin>(one: &mut A, other: &mut B) {
    let _ = copy_bidirectional(one, other).await;
    let _ = one.shutdown().await;
    let _ = other.shutdown().await;
}
