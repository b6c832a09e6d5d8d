//! The transport of a client's connection: TCP, or TLS over TCP.
//!
//! With TLS, ALPN decides the version of HTTP. Without TLS, a client with prior knowledge of HTTP/2
//! starts with the connection preface (RFC 9113, 3.4), which is not a valid HTTP/1.1 request.
//!
//! Bounds: with TLS, the first byte and the handshake together may take `server.header_timeout`.
//! Without TLS, the first byte may take as long as a connection may be idle, and the rest of a
//! preface `server.header_timeout`. If there are too many handshakes, one is ended, usually the
//! oldest of the address with the most (rule in `shares`). So clients that stop inside a handshake
//! keep out no other client. Clients that send nothing take no place.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

use super::clients::CountedConnection;
use sluice_config::Config;
use sluice_config::tls::H2;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of the first read, into which the head of most requests fits.
const FIRST_READ: usize = 2 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

#[derive(Debug)]
pub(super) struct Transport {
    /// Boxed: the state is over 1 KB.
    stream: Either<TcpStream, Box<TlsStream<TcpStream>>>,
    /// Bytes that were read to detect the protocol.
    first: BytesMut,
}

impl Transport {
    pub(super) fn plain(stream: TcpStream) -> Self {
        Self { stream: Either::Left(stream), first: BytesMut::new() }
    }

    /// Performs the TLS handshake if TLS is configured, and detects the protocol. `None`: the
    /// connection ended or timed out. The time limit with TLS is `pause`; otherwise it is `idle`
    /// until the first byte, and `pause` after it.
    pub(super) async fn establish(
        stream: TcpStream,
        counted: &CountedConnection,
        config: &Config,
        idle: Duration,
        pause: Duration,
    ) -> Option<(Self, Protocol)> {
        let Some(tls) = &config.server.tls else {
            let mut plain = Self::plain(stream);
            let protocol = plain.detect(idle, pause).await.ok()?;
            return Some((plain, protocol));
        };
        let acceptor = TlsAcceptor::from(tls.settings().config());
        let handshake = handshake(stream, counted, acceptor);
        // Boxed, so that the state of the handshake is freed when it ends.
        let stream = timeout(pause, Box::pin(handshake)).await.ok()??;
        let protocol = if stream.get_ref().1.alpn_protocol() == Some(H2) { Protocol::Http2 } else { Protocol::Http1 };
        Some((Self { stream: Either::Right(Box::new(stream)), first: BytesMut::new() }, protocol))
    }

    /// Reads until the protocol is known: one byte is enough unless it is a `P`.
    async fn detect(&mut self, idle: Duration, pause: Duration) -> io::Result<Protocol> {
        let Either::Left(stream) = &mut self.stream else { return Ok(Protocol::Http1) };
        let mut deadline = Instant::now() + idle;
        loop {
            // Waits without a buffer, because thousands of connections may be silent. A spurious
            // wake-up must not leave a buffer behind.
            timeout_at(deadline, stream.readable()).await??;
            self.first.reserve(FIRST_READ);
            match stream.try_read_buf(&mut self.first) {
                Ok(0) => return Ok(Protocol::Http1),
                Ok(count) if count == self.first.len() => deadline = Instant::now() + pause,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.first.is_empty() {
                        self.first = BytesMut::new();
                    }
                    continue;
                }
                Err(error) => return Err(error),
            }
            let seen = self.first.len().min(PREFACE.len());
            if self.first[..seen] != PREFACE[..seen] {
                return Ok(Protocol::Http1);
            }
            if seen == PREFACE.len() {
                return Ok(Protocol::Http2);
            }
        }
    }

    /// Whether there is no TLS.
    pub(super) fn is_plain(&self) -> bool {
        matches!(self.stream, Either::Left(_))
    }

    /// Whether nothing is left of the bytes that were read. With TLS, that is not known.
    pub(super) fn is_drained(&self) -> bool {
        self.is_plain() && self.first.is_empty()
    }

    pub(super) fn tcp(&self) -> &TcpStream {
        match &self.stream {
            Either::Left(stream) => stream,
            Either::Right(stream) => stream.get_ref().0,
        }
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.tcp().as_raw_fd()
    }
}

async fn handshake(
    stream: TcpStream,
    counted: &CountedConnection,
    acceptor: TlsAcceptor,
) -> Option<TlsStream<TcpStream>> {
    // Waits for a byte, so that a client that sends nothing holds no place. A new socket may be
    // `readable` without a byte.
    stream.peek(&mut [0]).await.ok()?;
    let place = counted.handshake()?;
    let accepted = tokio::select! {
        biased;
        accepted = acceptor.accept(stream) => accepted,
        () = poll_fn(|cx| place.poll_gave_way(cx)) => return None,
    };
    accepted.inspect_err(|error| tracing::debug!(%error, "TLS handshake failed")).ok()
}

impl AsyncRead for Transport {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, into);
        }
        let count = self.first.len().min(into.remaining());
        into.put_slice(&self.first[..count]);
        self.first.advance(count);
        if self.first.is_empty() {
            self.first = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Transport {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::super::clients::ClientLimits;
    use super::super::clients::tests::server;
    use super::*;
    use sluice_config::tls::testing::Issued;
    use sluice_config::tls::{Certificates, ClientSettings, PrivateKey, Roots, ServerTls};

    /// How long a test waits for an event that must not happen.
    const PAUSE: Duration = Duration::from_millis(20);

    async fn tcp_pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (listener.accept().await.unwrap().0, client)
    }

    async fn pair() -> (Transport, TcpStream) {
        let (server, client) = tcp_pair().await;
        (Transport::plain(server), client)
    }

    #[tokio::test]
    async fn the_protocol_is_known_as_soon_as_the_bytes_show_it() {
        for (sent, protocol) in
            [("P", None), ("PO", Some(Protocol::Http1)), ("PRI * HT", None), ("G", Some(Protocol::Http1))]
        {
            let (mut transport, mut client) = pair().await;
            client.write_all(sent.as_bytes()).await.unwrap();
            transport.tcp().readable().await.unwrap();
            assert_eq!(transport.detect(PAUSE, PAUSE).await.ok(), protocol, "{sent}");
            assert_eq!(transport.first, sent);
            assert!(!transport.is_drained(), "a request may be there already");
        }
        let (mut transport, mut client) = pair().await;
        client.write_all(PREFACE).await.unwrap();
        assert_eq!(transport.detect(PAUSE * 500, PAUSE * 500).await.unwrap(), Protocol::Http2);
    }

    #[tokio::test]
    async fn a_handshake_that_has_to_end_for_others_closes_its_connection() {
        let issued = Issued::self_signed(&["localhost"]);
        let certificates = Certificates::parse(issued.certificate.as_bytes()).unwrap();
        let key = PrivateKey::parse(issued.key.as_bytes()).unwrap();
        let acceptor = TlsAcceptor::from(ServerTls::new(&certificates, &key, None).unwrap().config());
        let trusting = ClientSettings::new(Roots::File(&certificates), None).unwrap().to("localhost").unwrap();
        let limits = Arc::new(ClientLimits::default());
        let settings = server(&[]);
        let start = async || {
            let (server, client) = tcp_pair().await;
            let counted = limits.connected([10, 0, 0, 1].into(), &settings).unwrap();
            let acceptor = acceptor.clone();
            let served = tokio::spawn(async move { handshake(server, &counted, acceptor).await.is_some() });
            (served, client)
        };
        let begun = async |number: usize| {
            let waiting = async {
                while limits.view().handshakes != number {
                    tokio::task::yield_now().await;
                }
            };
            timeout(Duration::from_secs(20), waiting).await.unwrap_or_else(|_| panic!("{number} handshakes"));
        };
        let silent = start().await;
        let (stopped, mut client) = start().await;
        client.write_all(b"\x16\x03").await.unwrap();
        begun(1).await;
        assert!(limits.end_one_handshake());
        assert!(!timeout(Duration::from_secs(20), stopped).await.expect("it ends").unwrap());
        begun(0).await;
        let (served, client) = start().await;
        let connected = timeout(Duration::from_secs(20), trusting.connect(client)).await.expect("it is served");
        assert!(connected.is_ok() && served.await.unwrap());
        begun(0).await;
        drop(silent);
    }

    #[tokio::test]
    async fn a_wake_without_bytes_leaves_no_buffer_with_a_silent_connection() {
        let (mut transport, mut client) = pair().await;
        client.write_all(b"x").await.unwrap();
        // Takes the only byte, while the runtime still believes that there may be more.
        transport.tcp().readable().await.unwrap();
        assert_eq!(transport.tcp().try_read(&mut [0]).unwrap(), 1);
        assert!(transport.detect(PAUSE, PAUSE).await.is_err(), "silent");
        assert_eq!(transport.first.capacity(), 0);
        assert!(transport.is_drained());
    }
}
