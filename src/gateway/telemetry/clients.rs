//! Metrics of client connections and request bodies, with their limits.
//!
//! The values are read from `proxy::ClientLimits` at scrape time. The limits are metrics, too, so that an alert does not depend
//! on the configuration.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{MetricFamily, MetricType};

use super::exposition::{describe, family_of};
use super::families::{self, Family};
use super::gauges::{counter, gauge};

/// Connections and bodies of all clients, and their limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientView {
    /// Open connections, including those over the limit that get a 503.
    pub connections: usize,
    /// Limit on connections that are served.
    pub connections_max: usize,
    /// Connections that were closed without a response, because too many were already waiting for a 503.
    pub dropped: u64,
    /// Bytes of request bodies in memory.
    pub body_bytes: u64,
    /// Limit on these bytes.
    pub body_bytes_max: u64,
    /// Bytes of responses that wait for slow clients.
    pub response_bytes: u64,
    /// The most they may be.
    pub response_bytes_max: u64,
}

type Value = fn(&ClientView) -> f64;
const GAUGES: [(Family, Value); 6] = [
    (families::CLIENT_CONNECTIONS, |view| view.connections as f64),
    (families::CLIENT_CONNECTIONS_MAX, |view| view.connections_max as f64),
    (families::BODY_BYTES, |view| view.body_bytes as f64),
    (families::BODY_BYTES_MAX, |view| view.body_bytes_max as f64),
    (families::RESPONSE_BYTES, |view| view.response_bytes as f64),
    (families::RESPONSE_BYTES_MAX, |view| view.response_bytes_max as f64),
];

/// The collector of these metrics.
pub(super) struct Clients<F> {
    view: F,
    descs: Vec<Desc>,
}

impl<F: Fn() -> ClientView + Send + Sync> Clients<F> {
    pub(super) fn new(view: F) -> Self {
        let families = GAUGES.iter().map(|(family, _)| family).chain([&families::CONNECTIONS_DROPPED]);
        Self { view, descs: families.map(describe).collect() }
    }
}

impl<F: Fn() -> ClientView + Send + Sync> Collector for Clients<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let view = (self.view)();
        let gauges = GAUGES
            .iter()
            .map(|(family, read)| family_of(family, MetricType::GAUGE, vec![gauge(family, &[], read(&view))]));
        let dropped = counter(&families::CONNECTIONS_DROPPED, view.dropped as f64);
        let dropped = family_of(&families::CONNECTIONS_DROPPED, MetricType::COUNTER, vec![dropped]);
        gauges.chain([dropped]).flatten().collect()
    }
}
