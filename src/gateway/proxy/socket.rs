//! A client's socket: gathers small writes into one packet.
//!
//! pingora writes and flushes head, chunks and last chunk separately: three system calls where
//! nginx needs one. Here writes are gathered, up to [`GATHER_MAX`], and sent at a flush, unless the
//! caller corks the socket because more bytes follow at once.
//!
//! pingora owns the socket while a request is served; the request path reaches the socket through a
//! `ClientHandle`.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::{Buf, BytesMut};
use pingora::protocols::l4::socket::SocketAddr;
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, TimingDigest, UniqueID,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::clients::CountedConnection;
use super::frames::FrameMeter;
use super::transport::Transport;

/// The most bytes that are gathered. A larger write is sent directly, after the gathered bytes.
const GATHER_MAX: usize = 16 << 10;

#[derive(Debug)]
pub(super) struct ClientSocket {
    stream: Transport,
    gathered: BytesMut,
    state: Arc<SocketState>,
    established: SystemTime,
    socket: Arc<SocketDigest>,
    proxy: Option<Arc<ProxyDigest>>,
    frames: Option<Box<FrameWatch>>,
}

/// Checks of a whole HTTP/2 connection, which no single request can make.
#[derive(Debug)]
struct FrameWatch {
    meter: FrameMeter,
    flood: Arc<Notify>,
    /// Since when the client has accepted none of the pending bytes.
    blocked: Option<Instant>,
    /// The longest time without an accepted byte.
    pause: Duration,
}

/// State that the request path shares with the socket while pingora owns the socket.
#[derive(Debug)]
pub(super) struct SocketState {
    corked: AtomicBool,
    unbuffered: AtomicBool,
    /// Number of writes of which the socket has accepted bytes, which wraps around.
    accepted: AtomicUsize,
    /// Whether bytes of the next request have been read.
    begun: AtomicBool,
    /// Bytes that may still be read for the head.
    head_room: AtomicUsize,
    connection: Arc<CountedConnection>,
}

impl SocketState {
    fn new(connection: Arc<CountedConnection>) -> Self {
        let [corked, unbuffered, begun] = [const { AtomicBool::new(false) }; 3];
        let [accepted, head_room] = [0, usize::MAX].map(AtomicUsize::new);
        Self { corked, unbuffered, accepted, begun, head_room, connection }
    }

    /// Corks or uncorks the socket. While corked, a flush does nothing: more bytes follow at once.
    pub(super) fn cork(&self, corked: bool) {
        self.corked.store(corked, Ordering::Relaxed);
    }

    /// Sets whether each write is sent at once, which a body with a known length needs because
    /// pingora flushes it only after the last byte.
    pub(super) fn unbuffered(&self, unbuffered: bool) {
        self.unbuffered.store(unbuffered, Ordering::Relaxed);
    }

    /// A number that changes whenever the socket accepts bytes.
    pub(super) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Notes that the socket accepted bytes. Only the connection's task writes.
    pub(super) fn has_accepted(&self) {
        self.accepted.store(self.accepted().wrapping_add(1), Ordering::Relaxed);
    }

    pub(super) fn connection(&self) -> &CountedConnection {
        &self.connection
    }

    /// Whether the connection is over the limit, so that requests are refused.
    pub(super) fn is_refused(&self) -> bool {
        self.connection.refused
    }

    /// Starts the next request. `ahead`: bytes that were read together with the previous one.
    pub(super) fn next_request(&self, ahead: &[u8]) {
        self.begun.store(holds_request(ahead), Ordering::Relaxed);
    }

    /// Whether bytes of the next request have been read, apart from leading line breaks (RFC 9112,
    /// 2.2).
    pub(super) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// Limits the bytes that can be read for the head. More bytes are an error.
    pub(super) fn limit_head(&self, bytes: usize) {
        self.head_room.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn is_head_full(&self) -> bool {
        self.head_room.load(Ordering::Relaxed) == 0
    }

    fn read(&self, bytes: &[u8]) {
        let room = self.head_room.load(Ordering::Relaxed);
        self.head_room.store(room.saturating_sub(bytes.len()), Ordering::Relaxed);
        if !self.has_begun() && holds_request(bytes) {
            self.begun.store(true, Ordering::Relaxed);
        }
    }
}

fn holds_request(bytes: &[u8]) -> bool {
    bytes.iter().any(|byte| !matches!(byte, b'\r' | b'\n'))
}

impl ClientSocket {
    pub(super) fn new(stream: Transport, connection: Arc<CountedConnection>) -> Self {
        let socket = SocketDigest::from_raw_fd(stream.descriptor());
        // Sets the address that a PROXY header has named. The port is not needed. No address is set
        // yet.
        let _ = socket.peer_addr.set(Some(SocketAddr::Inet((connection.address(), 0).into())));
        let socket = Arc::new(socket);
        Self {
            stream,
            gathered: BytesMut::new(),
            state: Arc::new(SocketState::new(connection)),
            established: SystemTime::now(),
            socket,
            proxy: None,
            frames: None,
        }
    }

    pub(super) fn tcp(&self) -> &TcpStream {
        self.stream.tcp()
    }

    pub(super) fn state(&self) -> &Arc<SocketState> {
        &self.state
    }

    /// Whether bytes may be written to [`Self::tcp`]: there is no TLS, and nothing is gathered.
    pub(super) fn is_direct(&self) -> bool {
        self.stream.is_plain() && self.gathered.is_empty()
    }

    /// Whether nothing is left of the bytes that were read. With TLS, that is not known.
    pub(super) fn is_drained(&self) -> bool {
        self.stream.is_drained()
    }

    /// Starts to monitor the frames of an HTTP/2 connection, and whether the client accepts bytes.
    /// After too many costly frames, the result is notified and nothing more is read.
    pub(super) fn watch_frames(&mut self, pause: Duration) -> Arc<Notify> {
        let flood = Arc::new(Notify::new());
        let meter = FrameMeter::new(Instant::now());
        self.frames = Some(Box::new(FrameWatch { meter, flood: Arc::clone(&flood), blocked: None, pause }));
        flood
    }

    /// Notes whether the socket accepted bytes. With HTTP/2, returns an error if it accepted none
    /// for `timeouts.send`.
    fn has_taken(&mut self, some: bool) -> io::Result<()> {
        if some {
            self.state.has_accepted();
        }
        let Some(watch) = &mut self.frames else { return Ok(()) };
        if some {
            watch.blocked = None;
            return Ok(());
        }
        let since = *watch.blocked.get_or_insert_with(Instant::now);
        if since.elapsed() < watch.pause { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.gathered.is_empty() {
            let writing = Pin::new(&mut self.stream).poll_write(cx, &self.gathered);
            self.has_taken(writing.is_ready())?;
            let written = ready!(writing)?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.gathered.advance(written);
        }
        // Frees the buffer, because most of thousands of connections have nothing to send at any
        // time.
        self.gathered = BytesMut::new();
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.state.is_head_full() {
            return Poll::Ready(Err(io::ErrorKind::FileTooLarge.into()));
        }
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, into);
        if let Some(watch) = &mut self.frames
            && !watch.meter.pass(&into.filled()[before..], Instant::now)
        {
            into.set_filled(before);
            watch.flood.notify_one();
            return Poll::Pending;
        }
        self.state.read(&into.filled()[before..]);
        read
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
        let state = &self.state;
        let more_follows = state.corked.load(Ordering::Relaxed)
            || !self.gathered.is_empty() && !state.unbuffered.load(Ordering::Relaxed);
        if more_follows && self.gathered.len() + total <= GATHER_MAX {
            slices.iter().for_each(|slice| self.gathered.extend_from_slice(slice));
            return Poll::Ready(Ok(total));
        }
        ready!(self.poll_drain(cx))?;
        let writing = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.has_taken(writing.is_ready())?;
        writing
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.state.corked.load(Ordering::Relaxed) {
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
        // An error means that the client has already disconnected.
        let _ = AsyncWriteExt::shutdown(self).await;
    }
}

impl UniqueID for ClientSocket {
    fn id(&self) -> i32 {
        self.stream.descriptor()
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
pub(super) mod tests {
    use tokio::io::AsyncReadExt;

    use super::super::clients::tests::connection;
    use super::*;

    pub(in crate::proxy) async fn pair() -> (ClientSocket, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (ClientSocket::new(Transport::plain(listener.accept().await.unwrap().0), connection()), client)
    }

    #[tokio::test]
    async fn what_is_corked_leaves_with_what_follows() {
        let (mut socket, mut client) = pair().await;
        socket.state.corked.store(true, Ordering::Relaxed);
        socket.write_all(b"head ").await.unwrap();
        socket.flush().await.unwrap();
        assert!(client.try_read(&mut [0; 8]).is_err(), "nothing has left");
        socket.state.corked.store(false, Ordering::Relaxed);
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
