//! One server: the address and the idle connections.
//!
//! The most recently used idle connection is reused first. If the connection breaks before the
//! first byte of a response, the request is sent again on a new connection; the latency still
//! counts from the first send.
//!
//! The task that waits for a response also polls the connection ([`HttpConnection::drive`]). If a
//! second task polled the connection, sending would wait for the scheduler, for milliseconds with
//! 500 streams on two cores.
//!
//! Bounds: as many idle connections as were opened ahead or in use at once.

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

/// Longest idle time after which a connection is reused. vLLM closes a connection after 5 s.
pub(crate) const IDLE_LIMIT: Duration = Duration::from_secs(4);

type HyperConnection = Connection<TokioIo<Either<TcpStream, Box<TlsStream<TcpStream>>>>, Full<Bytes>>;

#[derive(Debug)]
pub(crate) struct HttpConnection {
    sender: SendRequest<Full<Bytes>>,
    /// `None` once the connection has closed, because `sender` notices the end only after this half
    /// is dropped.
    connection: Option<Pin<Box<HyperConnection>>>,
}

impl HttpConnection {
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

    /// Errors of the connection are ignored here, because the future that waits for the response
    /// returns them.
    fn advance(&mut self, context: &mut Context<'_>) {
        if self.connection.as_mut().is_some_and(|connection| connection.as_mut().poll(context).is_ready()) {
            self.connection = None;
        }
    }

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
    pub(crate) url: String,
    /// `host:port`, for connecting and for the `Host` header.
    authority: String,
    host: HeaderValue,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// Without a trailing slash.
    base: String,
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

    pub(crate) fn request(&self, method: Method, path: &str, headers: &HeaderMap, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        // Cannot fail: `new` has parsed the base as part of a URI, and `path` is valid.
        *request.uri_mut() = format!("{}{path}", self.base).parse().unwrap_or_default();
        *request.headers_mut() = headers.clone();
        request.headers_mut().insert(HOST, self.host.clone());
        request
    }

    /// Sends the request that `make` builds and waits for the response head. After the body, the
    /// caller calls [`Target::put_back`].
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
                // Only in this case the request is sent again.
                Err(error) if error.is_canceled() || error.is_incomplete_message() || error.is_closed() => break,
                Err(_) => return Err(RequestFailure::NoResponse),
            }
        }
        let mut connection = self.connect().await?;
        let response = connection.send(make()).await.map_err(|_| RequestFailure::NoResponse)?;
        Ok((connection, response))
    }

    /// Sends GET `path`; a body over `max` bytes is an error.
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
        // If the most recently used connection is too old, all are.
        idle.clear();
        None
    }

    pub(crate) async fn put_back(&self, mut connection: HttpConnection) {
        if connection.ready().await && connection.connection.is_some() {
            self.idle.lock().push(Idle { connection, since: Instant::now() });
        }
    }

    pub(crate) async fn open(&self) {
        if let Ok(connection) = self.connect().await {
            self.put_back(connection).await;
        }
    }

    async fn connect(&self) -> Result<HttpConnection, RequestFailure> {
        let socket = TcpStream::connect(&self.authority).await.map_err(|_| RequestFailure::Connect)?;
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
