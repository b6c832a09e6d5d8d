//! A histogram that takes in a whole row of counts at once, and its page for Prometheus.
//!
//! A stream counts its own inter-token gaps; at its end its counters are added here: one atomic addition for each
//! bucket that is not empty, instead of one observation per token. Readers may see a row half added; Prometheus
//! reads that as a few gaps more in the next scrape.
//!
//! Bounds: one row per combination of labels; the caller bounds those. The sum is kept in nanoseconds, which
//! overflow after 584 years of gaps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Bucket, Histogram, LabelPair, Metric, MetricFamily, MetricType};

use super::families::Family;
use super::gauges::{describe, family_of};
use sluice_core::meter::{ITL_BUCKETS_SECONDS, ItlHistogram};

const BUCKETS: usize = ITL_BUCKETS_SECONDS.len() + 1;

/// Shared counts of gaps by length.
#[derive(Debug)]
pub(super) struct Row {
    counts: [AtomicU64; BUCKETS],
    nanos: AtomicU64,
}

impl Row {
    fn new() -> Self {
        Self { counts: [const { AtomicU64::new(0) }; BUCKETS], nanos: AtomicU64::new(0) }
    }

    /// Adds what one stream has counted.
    pub(super) fn merge(&self, gaps: &ItlHistogram) {
        for (shared, own) in self.counts.iter().zip(gaps.counts()) {
            if *own > 0 {
                shared.fetch_add(u64::from(*own), Ordering::Relaxed);
            }
        }
        self.nanos.fetch_add((gaps.sum_seconds() * 1e9) as u64, Ordering::Relaxed);
    }

    fn page(&self) -> Histogram {
        let mut below = 0;
        let mut buckets = Vec::with_capacity(BUCKETS);
        for (bound, count) in ITL_BUCKETS_SECONDS.iter().zip(&self.counts) {
            below += count.load(Ordering::Relaxed);
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(*bound);
            bucket.set_cumulative_count(below);
            buckets.push(bucket);
        }
        let mut page = Histogram::default();
        page.set_sample_count(below + self.counts[BUCKETS - 1].load(Ordering::Relaxed));
        page.set_sample_sum(self.nanos.load(Ordering::Relaxed) as f64 / 1e9);
        page.set_bucket(buckets);
        page
    }
}

/// A row and the labels it is shown with.
type Labelled = (Vec<LabelPair>, Arc<Row>);

/// All rows of a family; a clone is the same rows.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    family: Family,
    desc: Desc,
    rows: Arc<RwLock<Vec<Labelled>>>,
}

impl Rows {
    pub(super) fn new(family: Family) -> Self {
        Self { family, desc: describe(&family), rows: Arc::default() }
    }

    /// A new row. The caller sees to it that there is one per combination of labels.
    pub(super) fn row(&self, labels: Vec<LabelPair>) -> Arc<Row> {
        let row = Arc::new(Row::new());
        self.rows.write().push((labels, Arc::clone(&row)));
        row
    }
}

impl Collector for Rows {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let rows = self.rows.read();
        let metrics = rows.iter().map(|(labels, row)| {
            let mut metric = Metric::from_label(labels.clone());
            metric.set_histogram(row.page());
            metric
        });
        let metrics: Vec<Metric> = metrics.collect();
        family_of(&self.family, MetricType::HISTOGRAM, metrics).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::families;
    use super::*;

    #[test]
    fn rows_add_up_and_are_cumulative() {
        let rows = Rows::new(families::INTER_TOKEN_LATENCY);
        let row = rows.row(Vec::new());
        let mut gaps = ItlHistogram::default();
        gaps.record(Duration::from_millis(5), 3);
        gaps.record(Duration::from_secs(60), 1);
        row.merge(&gaps);
        row.merge(&gaps);
        let page = rows.collect();
        let histogram = page[0].get_metric()[0].get_histogram();
        assert_eq!(histogram.get_sample_count(), 8);
        assert!((histogram.get_sample_sum() - 120.03).abs() < 1e-6);
        let at =
            |bound: f64| histogram.get_bucket().iter().find(|b| b.upper_bound() == bound).unwrap().cumulative_count();
        assert_eq!((at(0.004), at(0.005), at(10.0)), (0, 6, 6));
    }
}
