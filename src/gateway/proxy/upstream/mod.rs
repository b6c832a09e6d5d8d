//! Connections to engines: pingora's connector behind the [`Upstream`] trait.
//!
//! Idle connections are kept at most [`limits::UPSTREAM_IDLE`] (vLLM closes its side at 5 s), and pingora checks that
//! one is still open before it is used again.
//! Names are resolved when first needed and again after [`RESOLVE_AGAIN`]; addresses are used as they are.
//!
//! Bounds: [`PEERS_MAX`] entries in the peer table; pingora's own pool holds [`POOL_SIZE`] idle connections in all.

mod connected;
mod exchange;
mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use pingora::connectors::{ConnectorOptions, TransportConnector};
use pingora::upstreams::peer::HttpPeer;
use tokio::time::{Instant, timeout};

use connected::Connected;
use exchange::EngineExchange;

use crate::config::limits;
use crate::flow::{Connection, ExchangeError, SendError, Upstream, UpstreamRequest};
use crate::pool::Address;

/// How long a resolved name is used.
const RESOLVE_AGAIN: Duration = Duration::from_secs(10);
/// Idle connections in all; the oldest is closed first.
const POOL_SIZE: usize = 4_096;
/// Peers remembered at most: every backend of a configuration, a few times over for reloads.
const PEERS_MAX: usize = 4 * limits::MAX_BACKENDS;

/// Connections to all engines.
pub struct UpstreamConnector {
    connector: Arc<TransportConnector>,
    connect_timeout_ms: AtomicU64,
    peers: DashMap<Arc<str>, (Arc<HttpPeer>, Option<Instant>)>,
}

impl std::fmt::Debug for UpstreamConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpstreamConnector").field("peers", &self.peers.len()).finish_non_exhaustive()
    }
}

impl UpstreamConnector {
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

    async fn peer(&self, address: &Address) -> Result<Arc<HttpPeer>, ExchangeError> {
        if let Some(known) = self.peers.get(&address.authority) {
            let (peer, until) = known.value();
            if until.is_none_or(|until| Instant::now() < until) {
                return Ok(Arc::clone(peer));
            }
        }
        let limit = Duration::from_millis(self.connect_timeout_ms.load(Ordering::Relaxed));
        let (host, port) = (address.endpoint.host.as_str(), address.endpoint.port);
        let (socket, until) = match host.parse() {
            Ok(ip) => (SocketAddr::new(ip, port), None),
            Err(_) => (resolve(host, port, limit).await?, Some(Instant::now() + RESOLVE_AGAIN)),
        };
        let mut peer = HttpPeer::new(socket, false, String::new());
        peer.options.connection_timeout = Some(limit);
        peer.options.idle_timeout = Some(limits::UPSTREAM_IDLE);
        let peer = Arc::new(peer);
        if self.peers.len() >= PEERS_MAX {
            self.peers.clear();
        }
        self.peers.insert(Arc::clone(&address.authority), (Arc::clone(&peer), until));
        Ok(peer)
    }
}

impl UpstreamConnector {
    async fn connect(&self, to: &Address, connection: Connection) -> Result<Connected, ExchangeError> {
        let peer = self.peer(to).await?;
        let connected = match connection {
            Connection::New => self.connector.new_stream(&*peer).await.map(|stream| (stream, false)),
            Connection::Any => self.connector.get_stream(&*peer).await,
        };
        let (stream, reused) = connected.map_err(|error| ExchangeError::Connect(error.to_string()))?;
        Ok(Connected { peer, stream, reused })
    }
}

async fn resolve(host: &str, port: u16, limit: Duration) -> Result<SocketAddr, ExchangeError> {
    let failed = |why: String| ExchangeError::Connect(format!("cannot resolve {host}: {why}"));
    match timeout(limit, tokio::net::lookup_host((host, port))).await {
        Ok(Ok(mut found)) => found.next().ok_or_else(|| failed("no address".to_owned())),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(_) => Err(failed("no response in time".to_owned())),
    }
}

impl Upstream for UpstreamConnector {
    type Exchange = EngineExchange;

    async fn send(
        &self,
        to: &Address,
        request: &UpstreamRequest,
        connection: Connection,
    ) -> Result<EngineExchange, SendError> {
        let begun = Instant::now();
        let failed = |error| SendError { error, reused: false };
        // Boxed: the state of connecting, over 2 KB, is freed when it ends and not kept for the whole response.
        let connected = Box::pin(self.connect(to, connection)).await.map_err(failed)?;
        let reused = connected.reused;
        let mut exchange = EngineExchange::new(connected, Arc::clone(&self.connector), begun.elapsed());
        match exchange.write(to, request).await {
            Ok(()) => Ok(exchange),
            Err(error) => Err(SendError { error, reused }),
        }
    }
}
