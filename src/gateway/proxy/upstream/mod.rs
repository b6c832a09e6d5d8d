//! Connections to engines: the shared connector and the idle connections behind the [`Upstream`]
//! trait.
//!
//! Idle connections are kept for at most [`limits::UPSTREAM_IDLE`], because vLLM closes them after
//! 5 s. An idle connection is reused only while a new connection could be opened to the same
//! address ([`Connector::is_current`]). The connect timeout covers the resolution of a name, all
//! its addresses and the TLS handshake together.

mod outgoing;
mod wire;
mod gunzip;
mod idle;
mod exchange;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use exchange::EngineExchange;
use idle::{EngineConnection, IdleConnections};

pub(super) use wire::{HEAD_MAX, ParsedHead, take_head};

use crate::connect::{ConnectError, Connector, EngineStream, Resolve, SystemResolver};
use crate::flow::{Connection, ExchangeError, Upstream, UpstreamRequest};
use sluice_config::{Address, Timeouts};

/// Connections to all engines.
#[derive(Debug)]
pub struct UpstreamConnector<R = SystemResolver> {
    connector: Arc<Connector<R>>,
    idle: Arc<IdleConnections>,
    connect_timeout_ms: AtomicU64,
    send_timeout_ms: AtomicU64,
}

impl UpstreamConnector {
    /// Connections with these timeouts: `connect` and `send`.
    pub fn new(timeouts: &Timeouts) -> Self {
        Self::over(Connector::shared(), timeouts)
    }
}

impl<R: Resolve> UpstreamConnector<R> {
    fn over(connector: Arc<Connector<R>>, timeouts: &Timeouts) -> Self {
        let engines = Self {
            connector,
            idle: Arc::new(IdleConnections::new()),
            connect_timeout_ms: AtomicU64::new(0),
            send_timeout_ms: AtomicU64::new(0),
        };
        engines.set_timeouts(timeouts);
        engines
    }

    /// Changes the timeouts of future connections and requests.
    pub fn set_timeouts(&self, timeouts: &Timeouts) {
        let ms = |timeout: Duration| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.send_timeout_ms.store(ms(timeouts.send), Ordering::Relaxed);
        self.connect_timeout_ms.store(ms(timeouts.connect), Ordering::Relaxed);
    }

    pub(super) async fn dial(&self, to: &Address) -> Result<EngineStream, ConnectError> {
        let limit = Duration::from_millis(self.connect_timeout_ms.load(Ordering::Relaxed));
        self.connector.connect(to, limit).await.map(|(_, stream)| stream)
    }

    async fn connect(&self, to: &Address, connection: Connection) -> Result<EngineConnection, ExchangeError> {
        let key = idle::key_of(to);
        if connection == Connection::Any
            && let Some(idle) = self.idle.take(key, |socket| self.connector.is_current(to, socket))
        {
            return Ok(idle);
        }
        let limit = Duration::from_millis(self.connect_timeout_ms.load(Ordering::Relaxed));
        let connected = self.connector.connect(to, limit).await;
        let (socket, stream) = connected.map_err(|error| {
            let limit = if error == ConnectError::Timeout { " (timeouts.connect)" } else { "" };
            ExchangeError::Connect(format!("{error}{limit}"))
        })?;
        Ok(EngineConnection { stream, socket, key, reused: false })
    }
}

impl<R: Resolve> Upstream for UpstreamConnector<R> {
    type Exchange = EngineExchange;

    async fn send(
        &self,
        to: &Address,
        request: &UpstreamRequest,
        connection: Connection,
    ) -> Result<EngineExchange, ExchangeError> {
        let begun = Instant::now();
        // Boxed, so that the state of connecting (over 2 KB) is freed when it ends.
        let connected = Box::pin(self.connect(to, connection)).await?;
        let mut exchange = EngineExchange::new(connected, Arc::clone(&self.idle), begun.elapsed());
        let pause = Duration::from_millis(self.send_timeout_ms.load(Ordering::Relaxed));
        exchange.write(to, request, pause).await?;
        Ok(exchange)
    }
}

#[cfg(test)]
mod tests;
