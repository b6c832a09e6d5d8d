//! Connections to engines: pingora's connector and its pool behind the [`Upstream`] trait.
//!
//! Idle connections are kept for at most [`limits::UPSTREAM_IDLE`], because vLLM closes them after 5 s. A connection is reused only
//! if it is still open (`idle.rs`).
//!
//! For an `https` URL, the connect timeout applies to the TCP connection and once more to the TLS handshake. Host names are
//! resolved when first needed and again after [`RESOLVE_AGAIN`].
//!
//! Bounds: [`PEERS_MAX`] entries in the peer table.

mod connected;
mod outgoing;
mod secure;
mod wire;
mod gunzip;
mod idle;
mod exchange;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use pingora::ErrorType;
use pingora::connectors::TransportConnector;
use pingora::protocols::Stream;
use pingora::upstreams::peer::HttpPeer;
use tokio::time::{Instant, timeout};

use connected::Connected;
use exchange::EngineExchange;
use idle::IdleConnections;
use secure::SecureStream;

use crate::config::{Timeouts, limits};
use crate::flow::{Connection, ExchangeError, Upstream, UpstreamRequest};
use crate::pool::Address;
use crate::tls::ClientTls;

/// How long a resolved name is used.
const RESOLVE_AGAIN: Duration = Duration::from_secs(10);
/// Entries of the peer table: all backends of a configuration, and those of a few earlier ones.
const PEERS_MAX: usize = 4 * limits::MAX_BACKENDS;

/// Connections to all engines.
pub struct UpstreamConnector {
    connector: TransportConnector,
    idle: Arc<IdleConnections>,
    connect_timeout_ms: AtomicU64,
    send_timeout_ms: AtomicU64,
    peers: DashMap<Arc<str>, (Arc<HttpPeer>, Option<Instant>)>,
}

impl std::fmt::Debug for UpstreamConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpstreamConnector").field("peers", &self.peers.len()).finish_non_exhaustive()
    }
}

impl UpstreamConnector {
    /// A connector with these timeouts: `connect` and `send`.
    pub fn new(timeouts: &Timeouts) -> Self {
        let engines = Self {
            connector: TransportConnector::new(None),
            idle: Arc::new(IdleConnections::new()),
            connect_timeout_ms: AtomicU64::new(0),
            send_timeout_ms: AtomicU64::new(0),
            peers: DashMap::new(),
        };
        engines.set_timeouts(timeouts);
        engines
    }

    /// Changes the timeouts of future connections and requests.
    pub fn set_timeouts(&self, timeouts: &Timeouts) {
        let ms = |timeout: Duration| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.send_timeout_ms.store(ms(timeouts.send), Ordering::Relaxed);
        if self.connect_timeout_ms.swap(ms(timeouts.connect), Ordering::Relaxed) != ms(timeouts.connect) {
            self.peers.clear();
        }
    }

    async fn peer(&self, address: &Address) -> Result<Arc<HttpPeer>, ExchangeError> {
        let group = address.tls.as_ref().map_or(0, ClientTls::digest);
        if let Some(known) = self.peers.get(&address.authority) {
            let (peer, until) = known.value();
            if peer.group_key == group && until.is_none_or(|until| Instant::now() < until) {
                return Ok(Arc::clone(peer));
            }
        }
        let limit = self.connect_timeout();
        let (host, port) = (address.endpoint.host.as_str(), address.endpoint.port);
        let (socket, until) = match host.parse() {
            Ok(ip) => (SocketAddr::new(ip, port), None),
            Err(_) => (resolve(host, port, limit).await?, Some(Instant::now() + RESOLVE_AGAIN)),
        };
        let mut peer = HttpPeer::new(socket, false, String::new());
        peer.group_key = group;
        peer.options.connection_timeout = Some(limit);
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
        if connection == Connection::Any
            && let Some(stream) = self.idle.take(&peer).await
        {
            return Ok(Connected { peer, stream, reused: true });
        }
        let stream = self.connector.new_stream(&*peer).await;
        let mut stream = stream.map_err(|error| ExchangeError::Connect(root_cause(&error)))?;
        if let Some(tls) = &to.tls {
            stream = self.secure(stream, tls).await?;
        }
        Ok(Connected { peer, stream, reused: false })
    }

    async fn secure(&self, stream: Stream, tls: &ClientTls) -> Result<Stream, ExchangeError> {
        let failed = |why: String| ExchangeError::Connect(format!("TLS: {why}"));
        match timeout(self.connect_timeout(), tls.connect(stream)).await {
            Ok(Ok(secure)) => Ok(Box::new(SecureStream(secure))),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed("the handshake took too long".to_owned())),
        }
    }

    fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms.load(Ordering::Relaxed))
    }
}

/// What failed first, such as `Connection refused (os error 111)`; pingora repeats the address around it.
fn root_cause(error: &pingora::Error) -> String {
    let root = error.root_cause();
    match root.downcast_ref::<pingora::Error>().map(|root| root.etype()) {
        Some(ErrorType::ConnectTimedout) => "not established in time (timeouts.connect)".to_owned(),
        Some(other) => other.as_str().to_owned(),
        None => root.to_string(),
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
    ) -> Result<EngineExchange, ExchangeError> {
        let begun = Instant::now();
        // Boxed, so that the state of connecting (over 2 KB) is freed when it ends and not with the response.
        let connected = Box::pin(self.connect(to, connection)).await?;
        let mut exchange = EngineExchange::new(connected, Arc::clone(&self.idle), begun.elapsed());
        let pause = Duration::from_millis(self.send_timeout_ms.load(Ordering::Relaxed));
        exchange.write(to, request, pause).await?;
        Ok(exchange)
    }
}

#[cfg(test)]
mod tests {
    use pingora::Error;

    use super::*;

    #[test]
    fn a_failed_connection_shows_its_first_cause_once() {
        let refused = std::io::Error::from_raw_os_error(111);
        let inner = Error::because(ErrorType::ConnectRefused, "Fail to connect to 127.0.0.1:8000", refused);
        let outer = Error::because(ErrorType::ConnectRefused, "Fail to connect to addr: 127.0.0.1:8000", inner);
        assert_eq!(root_cause(&outer), "Connection refused (os error 111)");
        assert_eq!(
            root_cause(&Error::explain(ErrorType::ConnectTimedout, "timeout 1.5s")),
            "not established in time (timeouts.connect)"
        );
    }
}
