//! Metrics of this gateway's part in a ledger of several gateways.
//!
//! The values are read at scrape time from a view that `serve` passes in. Without a ledger there
//! are none. The share of each backend is among the gauges of backends.

use super::exposition::Page;
use super::families::{self, Family};

/// This gateway's part.
#[derive(Clone, Debug)]
pub struct ClusterMetrics {
    /// The gateway's standing, one of `standings`.
    pub standing: &'static str,
    /// All possible standings.
    pub standings: Vec<&'static str>,
    /// Gateways in the ledger.
    pub gateways: usize,
    /// Time since the last confirmed renewal was sent, if any.
    pub renewed_seconds: Option<f64>,
    /// Writes by their outcome.
    pub writes: [(&'static str, u64); 3],
    /// With an elected leader: whether this gateway leads, and how often the leader changed.
    pub leader: Option<(bool, u64)>,
}

pub(super) const FAMILIES: [Family; 6] = [
    families::CLUSTER_STANDING,
    families::CLUSTER_GATEWAYS,
    families::CLUSTER_RENEWED,
    families::CLUSTER_WRITES,
    families::CLUSTER_LEADS,
    families::CLUSTER_LEADER_CHANGES,
];

pub(super) fn add(view: &ClusterMetrics, page: &mut Page) {
    page.add_states(&families::CLUSTER_STANDING, &[], view.standings.iter().copied(), view.standing);
    page.add(&families::CLUSTER_GATEWAYS, &[], view.gateways as f64);
    if let Some(seconds) = view.renewed_seconds {
        page.add(&families::CLUSTER_RENEWED, &[], seconds);
    }
    for (result, count) in &view.writes {
        page.add(&families::CLUSTER_WRITES, &[result], *count as f64);
    }
    if let Some((leads, changes)) = view.leader {
        page.add(&families::CLUSTER_LEADS, &[], f64::from(u8::from(leads)));
        page.add(&families::CLUSTER_LEADER_CHANGES, &[], changes as f64);
    }
}
