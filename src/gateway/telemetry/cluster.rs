//! Metrics of this gateway's part in a ledger of several gateways.
//!
//! They are read at scrape time from a view that `serve` passes in. Without a ledger there are
//! none. The gateway's share of each backend is among the gauges of backends.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{MetricFamily, MetricType};

use super::exposition::{describe, family_of};
use super::families;
use super::gauges::{counter_of, gauge};

/// This gateway's part.
#[derive(Clone, Debug)]
pub struct ClusterMetrics {
    /// The gateway's standing, one of `standings`.
    pub standing: &'static str,
    /// All possible standings.
    pub standings: Vec<&'static str>,
    /// Gateways in the ledger.
    pub gateways: usize,
    /// Time since the last confirmed renewal was sent; `None`: there was none.
    pub renewed_seconds: Option<f64>,
    /// Writes by their outcome.
    pub writes: [(&'static str, u64); 3],
    /// If one gateway is elected: whether this gateway leads, and how often it saw another one lead
    /// than before.
    pub leader: Option<(bool, u64)>,
}

pub(super) struct Cluster<F> {
    view: F,
    descs: Vec<Desc>,
}

impl<F: Fn() -> ClusterMetrics + Send + Sync> Cluster<F> {
    pub(super) fn new(view: F) -> Self {
        let all = [
            families::CLUSTER_STANDING,
            families::CLUSTER_GATEWAYS,
            families::CLUSTER_RENEWED,
            families::CLUSTER_WRITES,
            families::CLUSTER_LEADS,
            families::CLUSTER_LEADER_CHANGES,
        ];
        Self { view, descs: all.iter().map(describe).collect() }
    }
}

impl<F: Fn() -> ClusterMetrics + Send + Sync> Collector for Cluster<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let view = (self.view)();
        let standings = view.standings.iter().map(|standing| {
            let value = f64::from(u8::from(view.standing == *standing));
            gauge(&families::CLUSTER_STANDING, &[standing], value)
        });
        let renewed = view.renewed_seconds.map(|seconds| gauge(&families::CLUSTER_RENEWED, &[], seconds));
        let writes =
            view.writes.iter().map(|(result, count)| counter_of(&families::CLUSTER_WRITES, &[result], *count as f64));
        let leads = view.leader.map(|(leads, _)| gauge(&families::CLUSTER_LEADS, &[], f64::from(u8::from(leads))));
        let changes =
            view.leader.map(|(_, changes)| counter_of(&families::CLUSTER_LEADER_CHANGES, &[], changes as f64));
        let all = [
            family_of(&families::CLUSTER_STANDING, MetricType::GAUGE, standings.collect()),
            family_of(
                &families::CLUSTER_GATEWAYS,
                MetricType::GAUGE,
                vec![gauge(&families::CLUSTER_GATEWAYS, &[], view.gateways as f64)],
            ),
            family_of(&families::CLUSTER_RENEWED, MetricType::GAUGE, renewed.into_iter().collect()),
            family_of(&families::CLUSTER_WRITES, MetricType::COUNTER, writes.collect()),
            family_of(&families::CLUSTER_LEADS, MetricType::GAUGE, leads.into_iter().collect()),
            family_of(&families::CLUSTER_LEADER_CHANGES, MetricType::COUNTER, changes.into_iter().collect()),
        ];
        all.into_iter().flatten().collect()
    }
}
