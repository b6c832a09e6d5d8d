//! The engine, as the request path sees it: pingora's HTTP/1.1 connector behind the [`Upstream`] trait.
//!
//! Idle connections are kept at most [`defaults::UPSTREAM_IDLE`] (vLLM closes its side at 5 s). Reading
//! takes everything that has arrived, up to [`COALESCE_MAX`], and never waits for more: one read of the
//! socket, one write to the client, however many chunks it held.
//!
//! Names are resolved when first needed and again after [`RESOLVE_AGAIN`]; addresses are used as they are.
//! Bounds: one entry per configured authority in the peer table; pingora's own pool holds
//! [`POOL_SIZE`] idle connections in all.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::BytesMut;
use dashmap::DashMap;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, HOST, HeaderValue};
use http::{HeaderMap, Method};
use pingora::connectors::{ConnectorOptions, TransportConnector};
use pingora::http::RequestHeader;
use pingora::protocols::http::v1::client::HttpSession;
use pingora::upstreams::peer::{HttpPeer, Peer};
use tokio::time::{Instant, timeout};

use super::headers;
use crate::config::defaults;
use crate::flow::{Broken, Call, Exchange, Head, SendError, Upstream};
use crate::pool::Address;

/// The most that is gathered into one write.
const COALESCE_MAX: usize = 256 << 10;
/// How long a resolved name is believed.
const RESOLVE_AGAIN: Duration = Duration::from_secs(10);
/// Idle connections in all; the oldest is closed first.
const POOL_SIZE: usize = 4_096;
/// Peers remembered at most: every backend of a configuration, a few times over for reloads.
const PEERS_MAX: usize = 4 * defaults::MAX_BACKENDS;
/// Chunk memory reserved before a read.
const CHUNK_RESERVE: usize = 4 << 10;

/// Connections to all engines.
pub struct Engines {
    connector: Arc<TransportConnector>,
    connect_timeout_ms: AtomicU64,
    peers: DashMap<Arc<str>, (Arc<HttpPeer>, Option<Instant>)>,
}

impl std::fmt::Debug for Engines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engines").field("peers", &self.peers.len()).finish_non_exhaustive()
    }
}

impl Engines {
    /// A connector whose attempts to connect may take `connect_timeout`.
    pub fn new(connect_timeout: Duration) -> Self {
        let options = ConnectorOptions::new(POOL_SIZE);
        let engines = Self {
            connector: Arc::new(TransportConnector::new(Some(options))),
            connect_timeout_ms: AtomicU64::new(0),
            peers: DashMap::new(),
        };
        engines.set_connect_timeout(connect_timeout);
        engines
    }

    /// Changes how long connecting may take, for connections from now on.
    pub fn set_connect_timeout(&self, timeout: Duration) {
        let ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        if self.connect_timeout_ms.swap(ms, Ordering::Relaxed) != ms {
            self.peers.clear();
        }
    }

    async fn peer(&self, address: &Address) -> Result<Arc<HttpPeer>, Broken> {
        if let Some(known) = self.peers.get(&address.authority) {
            let (peer, until) = known.value();
            if until.is_none_or(|until| Instant::now() < until) {
                return Ok(Arc::clone(peer));
            }
        }
        let patience = Duration::from_millis(self.connect_timeout_ms.load(Ordering::Relaxed));
        let (host, port) = (address.endpoint.host.as_str(), address.endpoint.port);
        let (socket, until) = match host.parse() {
            Ok(ip) => (SocketAddr::new(ip, port), None),
            Err(_) => (resolve(host, port, patience).await?, Some(Instant::now() + RESOLVE_AGAIN)),
        };
        let mut peer = HttpPeer::new(socket, false, String::new());
        peer.options.connection_timeout = Some(patience);
        peer.options.idle_timeout = Some(defaults::UPSTREAM_IDLE);
        let peer = Arc::new(peer);
        if self.peers.len() >= PEERS_MAX {
            self.peers.clear();
        }
        self.peers.insert(Arc::clone(&address.authority), (Arc::clone(&peer), until));
        Ok(peer)
    }
}

async fn resolve(host: &str, port: u16, patience: Duration) -> Result<SocketAddr, Broken> {
    let failed = |why: String| Broken::Connect(format!("cannot resolve {host}: {why}"));
    match timeout(patience, tokio::net::lookup_host((host, port))).await {
        Ok(Ok(mut found)) => found.next().ok_or_else(|| failed("no address".to_owned())),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(_) => Err(failed("no answer in time".to_owned())),
    }
}

impl Upstream for Engines {
    type Exchange = EngineExchange;

    async fn send(&self, to: &Address, call: &Call, fresh: bool) -> Result<EngineExchange, SendError> {
        let begun = Instant::now();
        let new = |broken| SendError { broken, reused: false };
        let peer = self.peer(to).await.map_err(new)?;
        let connected = match fresh {
            true => self.connector.new_stream(&*peer).await.map(|stream| (stream, false)),
            false => self.connector.get_stream(&*peer).await,
        };
        let (stream, reused) = connected.map_err(|error| new(Broken::Connect(error.to_string())))?;
        let session = HttpSession::new_with_options(stream, &*peer);
        let connect_time = begun.elapsed();
        let connector = Arc::clone(&self.connector);
        let mut exchange =
            EngineExchange { session, peer, connector, reused, connect_time, ended: false, failed: None };
        match exchange.write(to, call).await {
            Ok(()) => Ok(exchange),
            Err(broken) => Err(SendError { broken, reused }),
        }
    }
}

/// One request and its answer.
pub struct EngineExchange {
    session: HttpSession,
    peer: Arc<HttpPeer>,
    connector: Arc<TransportConnector>,
    reused: bool,
    connect_time: Duration,
    ended: bool,
    failed: Option<Broken>,
}

impl EngineExchange {
    async fn write(&mut self, to: &Address, call: &Call) -> Result<(), Broken> {
        let closed = |error: Box<pingora::Error>| Broken::Closed(error.to_string());
        let header = request_header(to, call).map_err(|why| Broken::Malformed(why.to_owned()))?;
        self.session.write_request_header(Box::new(header)).await.map_err(closed)?;
        for piece in call.body.pieces() {
            self.session.write_body(piece).await.map_err(closed)?;
        }
        self.session.finish_body().await.map_err(closed)?;
        Ok(())
    }
}

fn request_header(to: &Address, call: &Call) -> Result<RequestHeader, &'static str> {
    let mut map: HeaderMap = call.headers.clone();
    map.insert(HOST, HeaderValue::from_str(&to.authority).map_err(|_| "unusable host name")?);
    map.insert(CONTENT_LENGTH, HeaderValue::from(call.body.len()));
    if let Some(key) = &to.api_key {
        let mut bearer = HeaderValue::from_str(&format!("Bearer {}", key.expose())).map_err(|_| "unusable api key")?;
        bearer.set_sensitive(true);
        map.insert(AUTHORIZATION, bearer);
    }
    let uri = format!("{}{}", to.endpoint.prefix, call.path).parse().map_err(|_| "unusable path")?;
    let (mut parts, ()) = http::Request::new(()).into_parts();
    parts.method = Method::POST;
    parts.uri = uri;
    parts.headers = map;
    Ok(RequestHeader::from(parts))
}

impl Exchange for EngineExchange {
    fn reused(&self) -> bool {
        self.reused
    }

    fn connect_time(&self) -> Duration {
        self.connect_time
    }

    async fn head(&mut self) -> Result<Head, Broken> {
        loop {
            self.session.read_response().await.map_err(|error| answer_error(&error))?;
            let Some(response) = self.session.resp_header() else {
                return Err(Broken::Closed("no answer".to_owned()));
            };
            // 100 Continue and the like are between the engine and us.
            if !response.status.is_informational() {
                let mut map = response.headers.clone();
                headers::remove_hop_by_hop(&mut map);
                return Ok(Head { status: response.status, headers: map });
            }
            if response.status == http::StatusCode::SWITCHING_PROTOCOLS {
                return Err(Broken::Malformed("the engine switched protocols".to_owned()));
            }
        }
    }

    async fn body(&mut self, into: &mut BytesMut) -> Result<bool, Broken> {
        if let Some(broken) = self.failed.take() {
            return Err(broken);
        }
        if self.ended {
            return Ok(false);
        }
        into.reserve(CHUNK_RESERVE);
        match self.session.read_body_ref().await {
            Ok(Some(bytes)) => into.extend_from_slice(bytes),
            Ok(None) => return Ok(false),
            Err(error) => return Err(answer_error(&error)),
        }
        while into.len() < COALESCE_MAX && self.take_ready(into).await {}
        Ok(true)
    }

    async fn keep(mut self) {
        if self.failed.is_none() && self.session.is_body_done() {
            self.session.respect_keepalive();
            if let Some(stream) = self.session.reuse().await {
                self.connector.release_stream(stream, self.peer.reuse_hash(), Some(defaults::UPSTREAM_IDLE));
            }
        }
    }
}

impl EngineExchange {
    /// Appends one more chunk if it is there already; false when there is none, or no more to come.
    async fn take_ready(&mut self, into: &mut BytesMut) -> bool {
        let session = &mut self.session;
        let ready = poll_fn(|cx| {
            let mut reading = pin!(session.read_body_ref());
            Poll::Ready(match reading.as_mut().poll(cx) {
                Poll::Pending => None,
                Poll::Ready(Ok(Some(bytes))) => {
                    into.extend_from_slice(bytes);
                    Some(Ok(true))
                }
                Poll::Ready(Ok(None)) => Some(Ok(false)),
                Poll::Ready(Err(error)) => Some(Err(answer_error(&error))),
            })
        });
        match ready.await {
            None => false,
            Some(Ok(true)) => true,
            Some(Ok(false)) => {
                self.ended = true;
                false
            }
            Some(Err(broken)) => {
                self.failed = Some(broken);
                false
            }
        }
    }
}

/// Whose fault a failed read is: the connection's, or what came over it.
fn answer_error(error: &pingora::Error) -> Broken {
    use pingora::ErrorType::{ConnectionClosed, ReadError, ReadTimedout, WriteError};
    match error.etype() {
        ConnectionClosed | ReadError | ReadTimedout | WriteError => Broken::Closed(error.to_string()),
        _ => Broken::Malformed(error.to_string()),
    }
}
