//! A client connection with HTTP/2, on which each stream is a request.
//!
//! Each stream is served in a separate task, by the same code as an HTTP/1.1 request. A reset of a
//! stream cancels one request; the end of the connection cancels all. On shutdown and hand-over,
//! GOAWAY is sent, and open streams finish. A connection without streams for `server.keepalive`
//! also gets GOAWAY, and has [`CLOSE_MAX`] to close.
//!
//! Limits per connection: [`STREAMS_MAX`] requests at once, header lists as for HTTP/1.1,
//! [`WINDOW`], [`SEND_BUFFER`], and costly frames (`frames.rs`). Further requests, and requests
//! above `server.max_connections`, are refused in a way that is safe to retry. After
//! [`REFUSED_MAX`] refused streams the client gets ENHANCE_YOUR_CALM. A client that accepts no byte
//! for `timeouts.send` is disconnected. h2 itself limits resets of streams not accepted yet,
//! continuations and provoked errors.

use std::future::poll_fn;
use std::net::IpAddr;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::server::Connection;
use h2::{Reason, SendStream};
use http::HeaderMap;
use pingora::apps::HttpServerApp;
use pingora::protocols::http::ServerSession;
use pingora::protocols::http::v2::server::{H2Accept, H2Options, HttpSession, handshake};
use pingora::protocols::{Digest, GetSocketDigest, Stream};
use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;

use super::body;
use super::clients::CountedConnection;
use super::ending::Ends;
use super::socket::ClientSocket;
use sluice_config::limits;

/// Requests at once on one connection (nginx: 128, Envoy: 100).
const STREAMS_MAX: u32 = 128;
/// Refused or malformed streams on one connection before GOAWAY.
const REFUSED_MAX: u32 = 1_000;
/// Bytes of request bodies that a client may send unread. Many, so that a long prompt needs few
/// round trips.
const WINDOW: u32 = 1 << 20;
/// Buffered bytes of one response; less than the initial flow-control window of HTTP/2 (64 KiB).
const SEND_BUFFER: usize = 32 << 10;
/// The longest time for the last bytes of an aborted response.
const LAST_BYTES_MAX: Duration = Duration::from_millis(500);
/// Bytes of a refused body that a client may go on sending. They are more than the usual
/// `server.max_body`.
const LINGER_BYTES: usize = 64 << 20;
/// Longest time for a refused body, as a multiple of the client's pause.
const LINGER_PAUSES: u32 = 4;
/// How long a connection without requests may take to close after GOAWAY.
const CLOSE_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub(super) struct Pauses {
    /// From the first byte to the end of the client's settings.
    pub(super) preface: Duration,
    /// Without an open request.
    pub(super) idle: Duration,
    /// While the client accepts no byte.
    pub(super) send: Duration,
}

/// Names the client of a request with these headers.
pub(super) type Naming<'a> = &'a (dyn Fn(&HeaderMap) -> IpAddr + Sync);

fn options() -> H2Options {
    let mut options = H2Options::default();
    options
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEADER_LIST_MAX)
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_send_buffer_size(SEND_BUFFER);
    options
}

/// Bytes of a header list. They are the limit of HTTP/1.1, and the 32 bytes per field that HTTP/2
/// adds (RFC 9113, 10.5.1).
const HEADER_LIST_MAX: u32 = (limits::MAX_HEADER_BYTES + 32 * limits::MAX_HEADERS) as u32;

/// Serves a connection until it and all of its requests have ended.
pub(super) async fn serve<A: HttpServerApp + Send + Sync + 'static>(
    app: &Arc<A>,
    socket: ClientSocket,
    counted: &CountedConnection,
    naming: Naming<'_>,
    pauses: Pauses,
    ends: &Ends,
) {
    let streams = TaskTracker::new();
    // `TaskTracker::wait` returns only on a closed tracker; tasks can still be added.
    streams.close();
    drive(app, socket, counted, naming, pauses, ends, &streams).await;
    // The connection has ended, so each request notices that the client has disconnected.
    streams.wait().await;
}

async fn drive<A: HttpServerApp + Send + Sync + 'static>(
    app: &Arc<A>,
    mut socket: ClientSocket,
    counted: &CountedConnection,
    naming: Naming<'_>,
    pauses: Pauses,
    ends: &Ends,
    streams: &TaskTracker,
) {
    let flood = socket.watch_frames(pauses.send);
    let digest = Arc::new(Digest { socket_digest: socket.get_socket_digest(), ..Digest::default() });
    let socket: Stream = Box::new(socket);
    let connected = tokio::select! {
        biased;
        connected = timeout(pauses.preface, handshake(socket, Some(options()))) => connected,
        () = counted.gave_way() => return,
    };
    let Ok(Ok(mut connection)) = connected else { return };
    let (mut closing, mut leaving, mut refused) = (ends.clone(), false, 0);
    loop {
        if refused > REFUSED_MAX {
            connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
            refused = 0;
            leaving = true;
        }
        let idle = if leaving { CLOSE_MAX } else { pauses.idle };
        let accepted = tokio::select! {
            biased;
            () = flood.notified() => {
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                // Polls the connection so that GOAWAY is sent.
                let _ = timeout(CLOSE_MAX, HttpSession::from_h2_conn(&mut connection, Arc::clone(&digest))).await;
                return;
            }
            () = closing.closed(), if !leaving => {
                connection.graceful_shutdown();
                leaving = true;
                continue;
            }
            accepted = next_stream(&mut connection, &digest, pauses.send / 4) => accepted,
            // Another client needs the place. This client opens a new connection with the next
            // request.
            () = without_place(streams, counted), if !leaving => {
                connection.graceful_shutdown();
                leaving = true;
                continue;
            }
            () = without_streams(streams, idle) => {
                if leaving {
                    return;
                }
                connection.graceful_shutdown();
                leaving = true;
                continue;
            }
        };
        match accepted {
            Ok(Some(H2Accept::Session(mut session))) => {
                let has_room = streams.len() < STREAMS_MAX as usize;
                let client = naming(&session.req_header().headers);
                let Some(counted) = has_room.then(|| counted.request(client)).flatten() else {
                    session.shutdown_with_reason(Reason::REFUSED_STREAM);
                    refused += 1;
                    continue;
                };
                let (app, stop) = (Arc::clone(app), ends.stop.clone());
                streams.spawn(async move {
                    let _counted = counted;
                    // A stream is not reused, so the result is ignored.
                    let _ = app.process_new_http(ServerSession::new_http2(session), &stop).await;
                });
            }
            Ok(Some(H2Accept::Rejected)) => refused += 1,
            Ok(None) | Err(_) => return,
        }
    }
}

/// The next stream. Polls the connection every `look`, which detects a client that reads nothing.
/// The same timeout in the loop of [`drive`] would restart the idle time.
async fn next_stream(
    connection: &mut Connection<Stream, Bytes>,
    digest: &Arc<Digest>,
    look: Duration,
) -> pingora::Result<Option<H2Accept>> {
    loop {
        let accepting = HttpSession::from_h2_conn(connection, Arc::clone(digest));
        if let Ok(accepted) = timeout(look, accepting).await {
            return accepted;
        }
    }
}

/// Ends a stream whose response is complete. While the client still sends the body, it is read and
/// dropped: at most [`LINGER_BYTES`], until the client pauses for `pause`, and no longer than
/// [`LINGER_PAUSES`] times `pause`. An unread body would reset the stream, and many clients drop a
/// response that arrives with a reset, or read none before they have sent the whole body.
pub(super) async fn linger(session: &mut ServerSession, pause: Duration) {
    let _ = timeout(pause * LINGER_PAUSES, body::discard(session, LINGER_BYTES, pause)).await;
}

/// Waits until the buffered bytes of an aborted response are sent. h2 drops the buffer when a
/// stream is reset, so the client would not get the error event.
pub(super) async fn deliver(stream: &mut SendStream<Bytes>) {
    stream.reserve_capacity(SEND_BUFFER);
    let left = poll_fn(|cx| {
        // The buffer is empty when the whole capacity is free. `poll_capacity` ends when the client
        // has disconnected.
        while stream.capacity() < SEND_BUFFER {
            if !matches!(ready!(stream.poll_capacity(cx)), Some(Ok(_))) {
                break;
            }
        }
        Poll::Ready(())
    });
    let _ = timeout(LAST_BYTES_MAX, left).await;
}

/// Waits until the idle connection must be closed to make room.
async fn without_place(streams: &TaskTracker, counted: &CountedConnection) {
    streams.wait().await;
    counted.gave_way().await;
}

async fn without_streams(streams: &TaskTracker, pause: Duration) {
    streams.wait().await;
    sleep(pause).await;
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use pingora::apps::ReusedHttpStream;
    use tokio::net::{TcpListener, TcpStream};

    use super::super::clients::tests::connection;
    use super::super::ending::Ending;
    use super::super::transport::Transport;
    use super::*;

    struct NoApp;

    impl HttpServerApp for NoApp {
        fn process_new_http<'a, 'b, 'c>(
            self: &'a Arc<Self>,
            _session: ServerSession,
            _shutdown: &'b tokio::sync::watch::Receiver<bool>,
        ) -> Pin<Box<dyn Future<Output = Option<ReusedHttpStream>> + Send + 'c>>
        where
            'a: 'c,
            'b: 'c,
            Self: 'c,
        {
            Box::pin(async { None })
        }
    }

    #[tokio::test]
    async fn a_connection_without_requests_is_closed_however_long_it_may_be_idle() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let server = Transport::plain(listener.accept().await.unwrap().0);
        let send = Duration::from_secs(60);
        let pauses = Pauses { preface: Duration::from_secs(10), idle: 2 * send, send };
        let ending = Ending::default();
        let ends = ending.watch();
        let counted = connection();
        let serving = tokio::spawn(async move {
            let socket = ClientSocket::new(server, Arc::clone(&counted));
            let naming = |_: &HeaderMap| counted.address();
            serve(&Arc::new(NoApp), socket, &counted, &naming, pauses, &ends).await;
        });
        let (_requests, connection) = h2::client::handshake(client).await.unwrap();
        let _driver = tokio::spawn(connection);
        tokio::time::pause();
        let begun = tokio::time::Instant::now();
        timeout(4 * send, serving).await.expect("the connection is closed").unwrap();
        assert!(begun.elapsed() >= pauses.idle, "closed after {:?}", begun.elapsed());
    }
}
