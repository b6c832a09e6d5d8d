//! Bytes of WebSockets, by pool and direction.
//!
//! Bytes are counted while a WebSocket is open, because one may be open for an hour. Bound: two
//! counters for each pool that had a WebSocket.

use prometheus::{IntCounter, IntCounterVec, Registry};

use super::{families, series};

pub(super) struct TunnelCounters(IntCounterVec);

/// Bytes of the WebSockets of a pool, by direction.
#[derive(Clone, Debug)]
pub struct TunnelBytes {
    pub(crate) to_engine: IntCounter,
    pub(crate) to_client: IntCounter,
}

impl TunnelCounters {
    pub(super) fn new(registry: &Registry) -> Self {
        Self(series::counters(registry, &families::TUNNEL_BYTES))
    }

    pub(super) fn of(&self, pool: &str) -> TunnelBytes {
        let counter = |direction| self.0.with_label_values(&[pool, direction]);
        TunnelBytes { to_engine: counter("to_engine"), to_client: counter("to_client") }
    }
}
