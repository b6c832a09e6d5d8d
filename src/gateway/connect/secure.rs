//! A TLS connection to an engine, in the form of a plain one, so that both go into the same pool of idle connections.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream, TimingDigest, UniqueID,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio_rustls::client::TlsStream;

/// TLS on one of pingora's connections.
#[derive(Debug)]
pub(super) struct SecureStream(pub(super) TlsStream<Stream>);

impl SecureStream {
    fn inner(&self) -> &Stream {
        self.0.get_ref().0
    }
}

impl AsyncRead for SecureStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, into)
    }
}

impl AsyncWrite for SecureStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[async_trait]
impl Shutdown for SecureStream {
    async fn shutdown(&mut self) {
        // An error means that the engine has already closed the connection.
        let _ = AsyncWriteExt::shutdown(self).await;
    }
}

impl UniqueID for SecureStream {
    fn id(&self) -> i32 {
        self.inner().id()
    }
}

impl Ssl for SecureStream {}

impl Peek for SecureStream {}

impl GetTimingDigest for SecureStream {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.inner().get_timing_digest()
    }
}

impl GetProxyDigest for SecureStream {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.inner().get_proxy_digest()
    }

    fn set_proxy_digest(&mut self, digest: ProxyDigest) {
        self.0.get_mut().0.set_proxy_digest(digest);
    }
}

impl GetSocketDigest for SecureStream {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.inner().get_socket_digest()
    }

    fn set_socket_digest(&mut self, digest: SocketDigest) {
        self.0.get_mut().0.set_socket_digest(digest);
    }
}
