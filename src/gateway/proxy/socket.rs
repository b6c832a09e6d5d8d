//! A client's socket that can be corked: what belongs together leaves in one packet.
//!
//! pingora writes a response's head, each chunk and the last chunk apart and flushes after each, which is three system
//! calls where nginx needs one. Here writes are gathered up to [`GATHER_MAX`] and leave at the flush, and a flush is
//! skipped while the socket is corked. The caller corks only when more follows at once (the first bytes behind the head, the
//! end behind the last bytes); nothing is ever held for bytes that are yet to come.

use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::SystemTime;

use async_trait::async_trait;
use bytes::{Buf, BytesMut};
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, TimingDigest, UniqueID,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;

/// Bytes that are gathered; a larger write passes through behind what was gathered before.
const GATHER_MAX: usize = 16 << 10;

/// A client's connection.
#[derive(Debug)]
pub(super) struct ClientSocket {
    stream: TcpStream,
    gathered: BytesMut,
    corked: AtomicBool,
    passing: AtomicBool,
    established: SystemTime,
    socket: Arc<SocketDigest>,
    proxy: Option<Arc<ProxyDigest>>,
}

impl ClientSocket {
    pub(super) fn new(stream: TcpStream) -> Self {
        let socket = Arc::new(SocketDigest::from_raw_fd(stream.as_raw_fd()));
        Self {
            stream,
            gathered: BytesMut::new(),
            corked: AtomicBool::new(false),
            passing: AtomicBool::new(false),
            established: SystemTime::now(),
            socket,
            proxy: None,
        }
    }

    /// While corked, a flush does nothing: more follows at once.
    pub(super) fn cork(&self, corked: bool) {
        self.corked.store(corked, Ordering::Relaxed);
    }

    /// While passing, writes leave at once: pingora flushes behind every chunk, but in a body of known length only
    /// behind the last byte, and what is there of it must not wait for the rest.
    pub(super) fn pass(&self, passing: bool) {
        self.passing.store(passing, Ordering::Relaxed);
    }

    /// Writes out what was gathered.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.gathered.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.gathered))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.gathered.advance(written);
        }
        // Thousands of connections wait most of the time: they keep nothing.
        self.gathered = BytesMut::new();
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let total: usize = slices.iter().map(|slice| slice.len()).sum();
        if self.gathered.len() + total <= GATHER_MAX && !self.passing.load(Ordering::Relaxed) {
            slices.iter().for_each(|slice| self.gathered.extend_from_slice(slice));
            return Poll::Ready(Ok(total));
        }
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.corked.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[async_trait]
impl Shutdown for ClientSocket {
    async fn shutdown(&mut self) {
        // The client may have left already; then the error does not matter.
        let _ = AsyncWriteExt::shutdown(self).await;
    }
}

impl UniqueID for ClientSocket {
    fn id(&self) -> i32 {
        self.stream.as_raw_fd()
    }
}

impl Ssl for ClientSocket {}

impl Peek for ClientSocket {}

impl GetTimingDigest for ClientSocket {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        vec![Some(TimingDigest { established_ts: self.established, ..TimingDigest::default() })]
    }
}

impl GetProxyDigest for ClientSocket {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.proxy.clone()
    }

    fn set_proxy_digest(&mut self, digest: ProxyDigest) {
        self.proxy = Some(Arc::new(digest));
    }
}

impl GetSocketDigest for ClientSocket {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        Some(Arc::clone(&self.socket))
    }

    fn set_socket_digest(&mut self, digest: SocketDigest) {
        self.socket = Arc::new(digest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    async fn pair() -> (ClientSocket, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (ClientSocket::new(listener.accept().await.unwrap().0), client)
    }

    #[tokio::test]
    async fn what_is_corked_leaves_with_what_follows() {
        let (mut socket, mut client) = pair().await;
        socket.cork(true);
        socket.write_all(b"head ").await.unwrap();
        socket.flush().await.unwrap();
        assert!(client.try_read(&mut [0; 8]).is_err(), "nothing has left");
        socket.cork(false);
        socket.write_all(b"body").await.unwrap();
        socket.flush().await.unwrap();
        let mut got = [0; 9];
        client.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"head body");
    }

    #[tokio::test]
    async fn a_large_write_keeps_its_place_behind_what_was_gathered() {
        let (mut socket, mut client) = pair().await;
        let large = vec![b'x'; 3 * GATHER_MAX];
        let reading = tokio::spawn(async move {
            let mut got = Vec::new();
            client.read_to_end(&mut got).await.unwrap();
            got
        });
        socket.write_all(b"first").await.unwrap();
        socket.write_all(&large).await.unwrap();
        socket.write_all(b"last").await.unwrap();
        AsyncWriteExt::shutdown(&mut socket).await.unwrap();
        drop(socket);
        assert_eq!(reading.await.unwrap(), [b"first", &large[..], b"last"].concat());
    }
}
