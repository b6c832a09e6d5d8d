//! The request path's access to a client's socket, which pingora owns while a request is served.
//!
//! Reading cannot detect a disconnect, because bytes after the request would come first. The kernel
//! reports a disconnect (`EPOLLRDHUP`). A client that only shuts down its sending side counts as
//! disconnected, as with nginx, HAProxy (`abortonclose`) and vLLM: HTTP/1.1 has no other way to
//! cancel. A disconnect is not seen while the receive buffer is full, nor if the host has vanished.
//! TCP keep-alive finds both.
//!
//! Bounds: [`LINGER_PIECES`] of [`LINGER_PIECE`] bytes are discarded in a row; a chunk is sent from
//! the caller's buffer.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::MsgFlags;
use pingora::protocols::http::ServerSession;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout_at};

use super::socket::{ClientSocket, SocketState};

/// Digits of the largest size, and the line break.
const SIZE_LINE_MAX: usize = 2 * size_of::<usize>() + 2;
const LINGER_PIECE: usize = 16 << 10;
/// System calls in a row. With [`LINGER_PAUSE`], a refused client can make the gateway discard 25
/// MiB/s.
const LINGER_PIECES: usize = 16;
/// Pause after these calls, so that a client that sends without end does not keep a thread busy.
const LINGER_PAUSE: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug)]
pub(super) struct ClientHandle<'a> {
    tcp: &'a TcpStream,
    /// Whether chunks may be sent.
    pub(super) is_direct: bool,
    /// Whether nothing is left of the bytes that were read from the client.
    pub(super) is_drained: bool,
    pub(super) state: &'a Arc<SocketState>,
}

impl<'a> ClientHandle<'a> {
    pub(super) fn of(session: &'a ServerSession) -> Option<Self> {
        Self::below(session.stream()?)
    }

    pub(super) fn below(stream: &'a pingora::protocols::Stream) -> Option<Self> {
        let socket: &ClientSocket = (**stream).as_any().downcast_ref()?;
        Some(Self::to(socket))
    }

    fn to(socket: &'a ClientSocket) -> Self {
        let (is_direct, is_drained) = (socket.is_direct(), socket.is_drained());
        Self { tcp: socket.tcp(), is_direct, is_drained, state: socket.state() }
    }

    /// Sends as much of a chunk as the socket takes, if the handle [is direct](Self::is_direct).
    /// Returns whether the chunk is sent.
    pub(super) fn try_send(&self, chunk: &mut Chunk<'_>) -> io::Result<bool> {
        loop {
            let mut slices = [chunk.line.bytes(), chunk.bytes, b"\r\n"].map(IoSlice::new);
            let mut rest = &mut slices[..];
            IoSlice::advance_slices(&mut rest, chunk.sent);
            if rest.is_empty() {
                return Ok(true);
            }
            match self.tcp.try_write_vectored(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    chunk.sent += count;
                    self.state.has_accepted();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends the rest of a chunk.
    pub(super) async fn send(&self, mut chunk: Chunk<'_>) -> io::Result<()> {
        while !self.try_send(&mut chunk)? {
            self.tcp.writable().await?;
        }
        Ok(())
    }

    /// Resolves when the socket may have bytes or the client has left.
    pub(super) async fn readable(&self) {
        let _ = poll_fn(|cx| self.tcp.poll_read_ready(cx)).await;
    }

    /// Returns when the client has closed its side or the connection is broken, even if received
    /// bytes are unread.
    pub(super) async fn left(&self) {
        // The end of the connection also makes a socket readable, and most clients send nothing
        // while they wait.
        self.readable().await;
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

/// A chunk of a chunked body, and how much of it is sent.
pub(super) struct Chunk<'a> {
    line: SizeLine,
    bytes: &'a [u8],
    sent: usize,
}

impl<'a> Chunk<'a> {
    /// `bytes` must not be empty: the empty chunk ends a body.
    pub(super) fn of(bytes: &'a [u8]) -> Self {
        Self { line: SizeLine::of(bytes.len()), bytes, sent: 0 }
    }
}

/// The line before the bytes of a chunk: their number in hexadecimal digits.
struct SizeLine {
    text: [u8; SIZE_LINE_MAX],
    start: usize,
}

impl SizeLine {
    fn of(mut size: usize) -> Self {
        let mut text = [b'\n'; SIZE_LINE_MAX];
        let mut start = SIZE_LINE_MAX - 2;
        text[start] = b'\r';
        while size > 0 {
            start -= 1;
            text[start] = b"0123456789ABCDEF"[size % 16];
            size /= 16;
        }
        Self { text, start }
    }

    fn bytes(&self) -> &[u8] {
        &self.text[self.start..]
    }
}

/// A separate function, so that the buffer is not part of the future.
fn drop_piece(tcp: &TcpStream) -> io::Result<usize> {
    // The kernel drops the bytes without copying them (tcp(7), MSG_TRUNC).
    tcp.try_io(Interest::READABLE, || {
        Ok(nix::sys::socket::recv(tcp.as_raw_fd(), &mut [0; LINGER_PIECE], MsgFlags::MSG_TRUNC)?)
    })
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::super::socket::tests::pair;
    use super::*;

    /// Resolves within a second, or panics.
    async fn leaves(socket: &ClientSocket) {
        let client = ClientHandle::to(socket);
        tokio::time::timeout(Duration::from_secs(1), client.left()).await.expect("the client has left");
    }

    async fn stays(socket: &ClientSocket) {
        let client = ClientHandle::to(socket);
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
    async fn a_chunk_is_sent_whole_however_much_the_socket_takes_at_once() {
        let (socket, mut client) = pair().await;
        let large: Vec<u8> = (0..5_000_000).map(|n| (n / 1_000) as u8).collect();
        let reading = tokio::spawn(async move {
            let mut got = Vec::new();
            client.read_to_end(&mut got).await.unwrap();
            got
        });
        let handle = ClientHandle::to(&socket);
        for bytes in [&b"x"[..], &[b'y'; 255]] {
            assert!(handle.try_send(&mut Chunk::of(bytes)).unwrap());
        }
        let mut chunk = Chunk::of(&large);
        assert!(!handle.try_send(&mut chunk).unwrap(), "it is larger than the socket's buffers");
        handle.send(chunk).await.unwrap();
        assert!(socket.state().accepted() > 3, "it was sent in parts");
        drop(socket);
        let [one, two] = [&b"1\r\nx\r\nFF\r\n"[..], &[b'y'; 255]];
        assert!(reading.await.unwrap() == [one, two, b"\r\n4C4B40\r\n", &large, b"\r\n"].concat());
    }

    #[tokio::test]
    async fn a_socket_that_gathers_takes_no_chunk_directly() {
        let (mut socket, _client) = pair().await;
        assert!(ClientHandle::to(&socket).is_direct);
        socket.state().cork(true);
        socket.write_all(b"head").await.unwrap();
        assert!(!ClientHandle::to(&socket).is_direct, "the head goes first");
        socket.state().cork(false);
        socket.flush().await.unwrap();
        assert!(ClientHandle::to(&socket).is_direct);
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
        let handle = ClientHandle::to(&socket);
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
