//! Metric families whose values are read at scrape time. (The metric types of `prometheus` hold
//! counts themselves.)
//!
//! One collector ([`Scraped`]) serves all of them: a function adds the metrics of a snapshot to a
//! [`Page`], by the table of families ([`super::families`]). So a removed backend is absent from
//! the next page, and no gauge can drift.

use std::collections::HashMap;

use prometheus::Registry;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};

use super::families::{Family, MetricKind};
use crate::pool::PoolView;

/// Returns a snapshot of all pools: `Admission::view`.
pub type PoolViews = Box<dyn Fn() -> Vec<PoolView> + Send + Sync>;

pub(super) fn describe(family: &Family) -> Desc {
    let labels = family.labels.iter().map(|label| (*label).to_owned()).collect();
    // The table of families has valid names only; tests register every one.
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

/// A family with metrics; `None` without metrics, since an empty family is not valid text.
pub(super) fn family_of(family: &Family, metrics: Vec<Metric>) -> Option<MetricFamily> {
    if metrics.is_empty() {
        return None;
    }
    let mut page = MetricFamily::default();
    page.set_name(family.name.to_owned());
    page.set_help(family.help.to_owned());
    page.set_field_type(match family.kind {
        MetricKind::Counter => MetricType::COUNTER,
        MetricKind::Gauge => MetricType::GAUGE,
        MetricKind::Histogram(_) => MetricType::HISTOGRAM,
    });
    page.set_metric(metrics);
    Some(page)
}

/// The metrics of one scrape, by family.
#[derive(Default)]
pub(super) struct Page(Vec<(Family, Vec<Metric>)>);

impl Page {
    /// Adds a metric to a family of counters or gauges. `labels`: the values, in the order of the
    /// table.
    pub(super) fn add(&mut self, family: &Family, labels: &[&str], value: f64) {
        let mut metric = Metric::from_label(pairs(family, labels));
        if family.kind == MetricKind::Counter {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
        match self.0.iter_mut().find(|(known, _)| known.name == family.name) {
            Some((_, metrics)) => metrics.push(metric),
            None => self.0.push((*family, vec![metric])),
        }
    }

    /// Adds a metric for each state, as the last label: 1 for the current state, 0 for the others.
    pub(super) fn add_states<'a>(
        &mut self,
        family: &Family,
        labels: &[&str],
        states: impl IntoIterator<Item = &'a str>,
        current: &str,
    ) {
        for state in states {
            self.add(family, &[labels, &[state]].concat(), f64::from(u8::from(state == current)));
        }
    }
}

/// The collector of families whose metrics `read` adds to a page at scrape time.
pub(super) struct Scraped<R> {
    descs: Vec<Desc>,
    read: R,
}

impl<R: Fn(&mut Page) + Send + Sync> Scraped<R> {
    pub(super) fn new(families: &[Family], read: R) -> Self {
        Self { descs: families.iter().map(describe).collect(), read }
    }
}

impl<R: Fn(&mut Page) + Send + Sync> Collector for Scraped<R> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut page = Page::default();
        (self.read)(&mut page);
        page.0.into_iter().filter_map(|(family, metrics)| family_of(&family, metrics)).collect()
    }
}

pub(super) fn shown(registry: &Registry) -> Vec<MetricFamily> {
    let mut families = registry.gather();
    for family in &mut families {
        family.mut_metric().retain(|metric| !is_unplaced_zero(metric));
    }
    families.retain(|family| !family.get_metric().is_empty());
    families
}

/// Whether a metric without a pool or model is zero. Requests that were refused before they were
/// placed create every metric of the combination of labels, but change few of them.
fn is_unplaced_zero(metric: &Metric) -> bool {
    let empty = |pair: &LabelPair| matches!(pair.name(), "pool" | "model") && pair.value().is_empty();
    let nothing = metric.get_counter().get_value() == 0.0 && metric.get_histogram().get_sample_count() == 0;
    nothing && metric.get_label().iter().any(empty)
}
