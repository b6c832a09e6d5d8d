//! A client's socket: gathers small writes into one packet, and detects that the client has
//! disconnected.
//!
//! pingora writes and flushes head, chunks and last chunk separately: three system calls where
//! nginx needs one. Here writes are gathered, up to [`GATHER_MAX`], and sent at a flush, unless the
//! caller corks the socket because more bytes follow at once.
//!
//! pingora owns the socket while a request is served; the request path reaches it through a
//! [`ClientHandle`]. Reading cannot detect a disconnect, because bytes after the request would come
//! first. The kernel reports disconnects (`EPOLLRDHUP`). A client that only shuts down its sending
//! side counts as disconnected, as with nginx, HAProxy (`abortonclose`) and vLLM: HTTP/1.1 has no
//! other way to cancel.
//!
//! A disconnect is not seen while the receive buffer is full, nor if the host has vanished. TCP
//! keep-alive finds both.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::{Buf, BytesMut};
use nix::sys::socket::MsgFlags;
use pingora::protocols::http::ServerSession;
use pingora::protocols::l4::socket::SocketAddr;
use pingora::protocols::raw_connect::ProxyDigest;
use pingora::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, TimingDigest, UniqueID,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};

use super::clients::CountedConnection;
use super::frames::FrameMeter;
use super::transport::Transport;

/// The most bytes that are gathered. A larger write is sent directly, after the gathered bytes.
const GATHER_MAX: usize = 16 << 10;
const LINGER_PIECE: usize = 16 << 10;
/// System calls in a row that discard a refused client's bytes. With [`LINGER_PAUSE`], this is up
/// to 25 MiB/s.
const LINGER_PIECES: usize = 16;
/// Pause after these calls, so that a client that sends without end does not keep a thread busy.
const LINGER_PAUSE: Duration = Duration::from_millis(10);

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

/// Checks of an HTTP/2 connection that no single request can make.
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
    /// Writes of which the socket has accepted bytes; wraps.
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

    /// While corked, a flush does nothing: more bytes follow at once.
    pub(super) fn cork(&self, corked: bool) {
        self.corked.store(corked, Ordering::Relaxed);
    }

    /// While unbuffered, each write is sent at once: pingora flushes a body with a known length
    /// only after the last byte.
    pub(super) fn unbuffered(&self, unbuffered: bool) {
        self.unbuffered.store(unbuffered, Ordering::Relaxed);
    }

    /// A number that changes whenever the socket accepts bytes.
    pub(super) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
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

    /// Limits how much can be read for the head; more is an error.
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

#[derive(Clone, Copy, Debug)]
pub(super) struct ClientHandle<'a> {
    tcp: &'a TcpStream,
    pub(super) state: &'a Arc<SocketState>,
}

impl<'a> ClientHandle<'a> {
    pub(super) fn of(session: &'a ServerSession) -> Option<Self> {
        Self::below(session.stream()?)
    }

    pub(super) fn below(stream: &'a pingora::protocols::Stream) -> Option<Self> {
        let socket: &ClientSocket = (**stream).as_any().downcast_ref()?;
        Some(Self { tcp: socket.stream.tcp(), state: &socket.state })
    }

    /// Returns when the client has closed its side or the connection is broken, whatever is unread.
    pub(super) async fn left(&self) {
        // The end makes a socket readable, too, and most clients send nothing while they wait.
        let _ = poll_fn(|cx| self.tcp.poll_read_ready(cx)).await;
        // "Priority" means the end (or urgent data, which is not enabled).
        let _ = self.tcp.ready(Interest::PRIORITY | Interest::ERROR).await;
    }

    /// Lingering close: discards bytes that the client still sends until it closes the connection,
    /// for at most `time`. Closing a socket with unread bytes would reset the connection, and the
    /// client would lose the response.
    pub(super) async fn linger(&self, time: Duration) {
        let until = Instant::now() + time;
        // A socket that always has bytes is readable even after the deadline.
        while Instant::now() < until && timeout_at(until, self.tcp.readable()).await.is_ok() {
            for _ in 0..LINGER_PIECES {
                match drop_piece(self.tcp) {
                    Ok(0) => return,
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => return,
                }
            }
            sleep(LINGER_PAUSE).await;
        }
    }
}

/// A separate function, so that the buffer is not part of the future.
fn drop_piece(tcp: &TcpStream) -> io::Result<usize> {
    // The kernel drops the bytes without copying them (tcp(7), MSG_TRUNC).
    tcp.try_io(Interest::READABLE, || {
        Ok(nix::sys::socket::recv(tcp.as_raw_fd(), &mut [0; LINGER_PIECE], MsgFlags::MSG_TRUNC)?)
    })
}

impl ClientSocket {
    pub(super) fn new(stream: Transport, connection: Arc<CountedConnection>) -> Self {
        let socket = SocketDigest::from_raw_fd(stream.descriptor());
        // The address that a PROXY header has named; the port is not needed. None is set yet.
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

    /// Starts to monitor the frames of an HTTP/2 connection, and whether the client accepts bytes.
    /// Notifies the result after too many costly frames; then nothing more is read.
    pub(super) fn watch_frames(&mut self, pause: Duration) -> Arc<Notify> {
        let flood = Arc::new(Notify::new());
        let meter = FrameMeter::new(Instant::now());
        self.frames = Some(Box::new(FrameWatch { meter, flood: Arc::clone(&flood), blocked: None, pause }));
        flood
    }

    /// Notes whether the socket accepted bytes. With HTTP/2, an error if it accepted none for
    /// `timeouts.send`.
    fn has_taken(&mut self, some: bool) -> io::Result<()> {
        if some {
            // Only this connection's task writes.
            self.state.accepted.store(self.state.accepted().wrapping_add(1), Ordering::Relaxed);
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
        // Frees the buffer: most of thousands of connections are waiting at any time.
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
mod tests {
    use tokio::io::AsyncReadExt;

    use super::super::clients::tests::connection;
    use super::*;

    async fn pair() -> (ClientSocket, TcpStream) {
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

    /// Resolves within a second, or panics.
    async fn leaves(socket: &ClientSocket) {
        let client = ClientHandle { tcp: socket.stream.tcp(), state: &socket.state };
        tokio::time::timeout(Duration::from_secs(1), client.left()).await.expect("the client has left");
    }

    async fn stays(socket: &ClientSocket) {
        let client = ClientHandle { tcp: socket.stream.tcp(), state: &socket.state };
        let left = tokio::time::timeout(Duration::from_millis(20), client.left()).await;
        assert!(left.is_err(), "the client is still there");
    }

    #[tokio::test]
    async fn a_client_that_leaves_is_noticed_whatever_it_has_sent() {
        for bytes in [0, 1, 2, 500, 20_000] {
            let (socket, mut client) = pair().await;
            client.write_all(&vec![b'\n'; bytes]).await.unwrap();
            stays(&socket).await;
            client.shutdown().await.unwrap();
            leaves(&socket).await;
            leaves(&socket).await;
        }
    }

    #[tokio::test]
    async fn a_client_that_resets_the_connection_is_noticed() {
        let (socket, mut client) = pair().await;
        client.write_all(b"more").await.unwrap();
        client.set_zero_linger().unwrap();
        drop(client);
        leaves(&socket).await;
    }

    #[tokio::test]
    async fn what_a_client_has_sent_ahead_is_still_there() {
        let (mut socket, mut client) = pair().await;
        client.write_all(b"next").await.unwrap();
        stays(&socket).await;
        let mut got = [0; 4];
        socket.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"next");
    }

    #[tokio::test]
    async fn a_refused_client_that_sends_without_end_holds_no_thread_and_is_cut() {
        let (socket, client) = pair().await;
        let mut client = client.into_std().unwrap();
        client.set_nonblocking(false).unwrap();
        let flood = std::thread::spawn(move || {
            let mut sent = 0;
            while let Ok(bytes) = io::Write::write(&mut client, &[0; 64 << 10]) {
                sent += bytes;
            }
            sent
        });
        let mut turns = 0_u64;
        let others = async {
            loop {
                turns += 1;
                tokio::task::yield_now().await;
            }
        };
        let handle = ClientHandle { tcp: socket.stream.tcp(), state: &socket.state };
        let linger = tokio::time::timeout(Duration::from_secs(20), handle.linger(Duration::from_millis(200)));
        tokio::select! { biased; ended = linger => ended.expect("it ends in time"), () = others => {} }
        assert!(turns > 1, "others had no turn");
        drop(socket);
        // 20 pauses, and the bytes in the two buffers of the connection.
        let most = 21 * LINGER_PIECES * LINGER_PIECE + (16 << 20);
        let sent = flood.join().unwrap();
        assert!(sent < most, "{sent} bytes were taken");
    }
}
