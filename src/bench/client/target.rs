//! One server: its address and its idle connections.
//!
//! Idle connections are kept for [`IDLE_LIMIT`] (vLLM closes them after 5 s); the most recently used one is reused first. If a
//! reused connection breaks before the first byte of a response, the request is sent again on a new connection, as HTTP clients
//! do, and the latency still counts from the first send. In no other case is a request sent twice.
//!
//! A connection has no task of its own: the task that waits for a response polls it ([`HttpConnection::drive`]). With a
//! second task, writing a request and reading the clock would wait for the scheduler, which takes milliseconds with 500
//! streams on two cores. Bounds: a target has at most as many idle connections as it had requests in flight at once.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HOST, HeaderValue};
use http::{HeaderMap, Method, Request, Response, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use crate::client::failure::RequestFailure;
use crate::client::tls::TlsSettings;
use crate::error::BenchError;

/// How long an idle connection is reused: below the 5 s after which vLLM closes it.
pub(crate) const IDLE_LIMIT: Duration = Duration::from_secs(4);

/// The I/O part of a connection, which must be polled.
type HyperConnection = Connection<TokioIo<Either<TcpStream, Box<TlsStream<TcpStream>>>>, Full<Bytes>>;

/// One connection to the server.
#[derive(Debug)]
pub(crate) struct HttpConnection {
    sender: SendRequest<Full<Bytes>>,
    /// `None` once it is closed: `sender` notices the end only after this half is dropped.
    connection: Option<Pin<Box<HyperConnection>>>,
}

impl HttpConnection {
    /// Waits for `work`, and polls the connection while it waits.
    pub(crate) async fn drive<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(value) = work.as_mut().poll(context) {
                return Poll::Ready(value);
            }
            self.advance(context);
            work.as_mut().poll(context)
        })
        .await
    }

    /// Polls the connection. Its errors are ignored here: the future that waits for the response returns them, too.
    fn advance(&mut self, context: &mut Context<'_>) {
        if self.connection.as_mut().is_some_and(|connection| connection.as_mut().poll(context).is_ready()) {
            self.connection = None;
        }
    }

    /// Whether another request may be sent.
    async fn ready(&mut self) -> bool {
        let ready = poll_fn(|context| {
            self.advance(context);
            self.sender.poll_ready(context)
        });
        ready.await.is_ok()
    }

    async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        let response = self.sender.send_request(request);
        self.drive(response).await
    }
}

pub(crate) struct Target {
    /// As configured, without a trailing slash.
    pub(crate) url: String,
    /// `host:port`, for connecting and for the Host header.
    authority: String,
    host: HeaderValue,
    /// For an https address.
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// The path prefix, without a trailing slash.
    base: String,
    /// At most as many as requests were in flight at once.
    idle: Mutex<Vec<Idle>>,
}

#[derive(Debug)]
struct Idle {
    connection: HttpConnection,
    since: Instant,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Target({})", self.url)
    }
}

impl Target {
    pub(crate) fn new(url: &str, tls: &TlsSettings) -> Result<Self, BenchError> {
        let bad = || BenchError::BadUrl(url.to_owned());
        let uri: Uri = url.parse().map_err(|_| bad())?;
        let host = uri.host().ok_or_else(bad)?;
        let (port, tls) = match uri.scheme_str() {
            Some("http") => (80, None),
            Some("https") => (443, Some(tls.to(host)?)),
            _ => return Err(bad()),
        };
        let authority = format!("{host}:{}", uri.port_u16().unwrap_or(port));
        let host = HeaderValue::from_str(&authority).map_err(|_| bad())?;
        let base = uri.path().trim_end_matches('/').to_owned();
        let url = url.trim_end_matches('/').to_owned();
        Ok(Self { url, authority, host, tls, base, idle: Mutex::new(Vec::new()) })
    }

    /// A request for `path` of this server.
    pub(crate) fn request(&self, method: Method, path: &str, headers: &HeaderMap, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        // Parsing does not fail: `new` has parsed the base as part of a URI, and `path` is a valid path.
        *request.uri_mut() = format!("{}{path}", self.base).parse().unwrap_or_default();
        *request.headers_mut() = headers.clone();
        request.headers_mut().insert(HOST, self.host.clone());
        request
    }

    /// Sends the request that `make` builds and waits for the head of the response. The caller returns the connection with
    /// [`Target::put_back`] after it has read the body.
    pub(crate) async fn send(
        &self,
        make: impl Fn() -> Request<Full<Bytes>>,
    ) -> Result<(HttpConnection, Response<Incoming>), RequestFailure> {
        while let Some(mut connection) = self.take_idle() {
            if !connection.ready().await {
                continue;
            }
            match connection.send(make()).await {
                Ok(response) => return Ok((connection, response)),
                // Broken before the first byte of a response: the only case in which a request is sent again.
                Err(error) if error.is_canceled() || error.is_incomplete_message() || error.is_closed() => break,
                Err(_) => return Err(RequestFailure::NoResponse),
            }
        }
        let mut connection = self.connect().await?;
        let response = connection.send(make()).await.map_err(|_| RequestFailure::NoResponse)?;
        Ok((connection, response))
    }

    /// Sends GET `path`. Returns the status and the body, which may have at most `max` bytes.
    pub(crate) async fn get(
        &self,
        path: &str,
        headers: &HeaderMap,
        max: usize,
    ) -> Result<(u16, Bytes), RequestFailure> {
        let (mut connection, response) = self.send(|| self.request(Method::GET, path, headers, Bytes::new())).await?;
        let status = response.status().as_u16();
        let body = connection.drive(http_body_util::Limited::new(response.into_body(), max).collect()).await;
        let body = body.map_err(|_| RequestFailure::Truncated)?.to_bytes();
        self.put_back(connection).await;
        Ok((status, body))
    }

    fn take_idle(&self) -> Option<HttpConnection> {
        let mut idle = self.idle.lock();
        let newest = idle.pop()?;
        if newest.since.elapsed() < IDLE_LIMIT {
            return Some(newest.connection);
        }
        // The newest is too old, so all others are, too.
        idle.clear();
        None
    }

    /// Keeps a connection whose response has been read to its end.
    pub(crate) async fn put_back(&self, mut connection: HttpConnection) {
        if connection.ready().await && connection.connection.is_some() {
            self.idle.lock().push(Idle { connection, since: Instant::now() });
        }
    }

    /// Opens a connection and keeps it. Failures are ignored.
    pub(crate) async fn open(&self) {
        if let Ok(connection) = self.connect().await {
            self.put_back(connection).await;
        }
    }

    async fn connect(&self) -> Result<HttpConnection, RequestFailure> {
        let socket = TcpStream::connect(&self.authority).await.map_err(|_| RequestFailure::Connect)?;
        // Sends small requests without delay. The error is ignored: without the option they are only slower.
        let _ = socket.set_nodelay(true);
        let stream = match &self.tls {
            None => Either::Left(socket),
            Some((connector, name)) => {
                let handshake = connector.connect(name.clone(), socket).await;
                Either::Right(Box::new(handshake.map_err(|_| RequestFailure::Tls)?))
            }
        };
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|_| RequestFailure::Connect)?;
        let mut connection = HttpConnection { sender, connection: Some(Box::pin(connection)) };
        if connection.ready().await { Ok(connection) } else { Err(RequestFailure::Connect) }
    }
}
