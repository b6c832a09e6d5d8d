//! Building blocks for metric families that the gateway collects itself instead of through the
//! prometheus types.
//!
//! The types in `prometheus` count in place. These families are read at scrape time or filled in
//! one step, so their descriptors and pages are made here, from the same table
//! ([`super::families`]).

use std::collections::HashMap;

use prometheus::Registry;
use prometheus::core::Desc;
use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};

use super::families::Family;
use crate::pool::PoolView;

/// Returns a snapshot of all pools: `Admission::view`.
pub type PoolViews = Box<dyn Fn() -> Vec<PoolView> + Send + Sync>;

pub(super) fn describe(family: &Family) -> Desc {
    let labels = family.labels.iter().map(|label| (*label).to_owned()).collect();
    // Invariant: the table of families has valid names only; tests register every one.
    Desc::new(family.name.to_owned(), family.help.to_owned(), labels, HashMap::new()).expect("a valid family")
}

/// Labels with their values, in the order of the prometheus types.
pub(super) fn pairs(family: &Family, values: &[&str]) -> Vec<LabelPair> {
    let mut pairs: Vec<LabelPair> = family
        .labels
        .iter()
        .zip(values)
        .map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        })
        .collect();
    pairs.sort();
    pairs
}

/// A family with metrics. `None` without metrics, since an empty family is not valid text.
pub(super) fn family_of(family: &Family, kind: MetricType, metrics: Vec<Metric>) -> Option<MetricFamily> {
    if metrics.is_empty() {
        return None;
    }
    let mut page = MetricFamily::default();
    page.set_name(family.name.to_owned());
    page.set_help(family.help.to_owned());
    page.set_field_type(kind);
    page.set_metric(metrics);
    Some(page)
}

/// All families that have something to show.
pub(super) fn shown(registry: &Registry) -> Vec<MetricFamily> {
    let mut families = registry.gather();
    for family in &mut families {
        family.mut_metric().retain(|metric| !is_unplaced_zero(metric));
    }
    families.retain(|family| !family.get_metric().is_empty());
    families
}

/// Whether a metric is a zero of requests without a pool. Such requests, refused before they were
/// placed, have few of the metrics that are resolved for every combination of labels; the others
/// would be noise.
fn is_unplaced_zero(metric: &Metric) -> bool {
    let empty = |pair: &LabelPair| matches!(pair.name(), "pool" | "model") && pair.value().is_empty();
    let nothing = metric.get_counter().get_value() == 0.0 && metric.get_histogram().get_sample_count() == 0;
    nothing && metric.get_label().iter().any(empty)
}
