//! What all clients hold, with its bounds: connections, and bytes of request bodies.
//!
//! Read at scrape time from `proxy::ClientLimits`, which counts it; nothing is counted here, so nothing can drift. The
//! bounds are shown beside the values, so that an alert can be written without knowing the configuration.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{MetricFamily, MetricType};

use super::exposition::{describe, family_of};
use super::families::{self, Family};
use super::gauges::{counter, gauge};

/// Connections and bodies of all clients, and their bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientView {
    /// Open connections, those being refused included.
    pub connections: usize,
    /// How many are served at once.
    pub connections_max: usize,
    /// Connections that were closed without a response, since too many were being refused already.
    pub dropped: u64,
    /// Bytes of request bodies in memory.
    pub body_bytes: u64,
    /// How many there may be.
    pub body_bytes_max: u64,
}

type Value = fn(&ClientView) -> f64;
const GAUGES: [(Family, Value); 4] = [
    (families::CLIENT_CONNECTIONS, |view| view.connections as f64),
    (families::CLIENT_CONNECTIONS_MAX, |view| view.connections_max as f64),
    (families::BODY_BYTES, |view| view.body_bytes as f64),
    (families::BODY_BYTES_MAX, |view| view.body_bytes_max as f64),
];

/// The collector of what clients hold.
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
