//! A histogram to which many values are added at once: the inter-token gaps of a whole stream.
//!
//! At the end of a stream, the counts of its gaps are added here, with one atomic addition per
//! non-empty bucket instead of one observation per token. A scrape may see a stream half added.
//!
//! The caller bounds the combinations of labels. The sum is in nanoseconds, which overflow after
//! 584 years of gaps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Bucket, Histogram, LabelPair, Metric, MetricFamily};

use super::exposition::{describe, family_of};
use super::families::Family;

use sluice_core::meter::{ITL_BUCKETS_SECONDS, ItlHistogram};

const BUCKETS: usize = ITL_BUCKETS_SECONDS.len() + 1;

#[derive(Debug)]
pub(super) struct GapCounts {
    counts: [AtomicU64; BUCKETS],
    nanos: AtomicU64,
}

impl GapCounts {
    fn new() -> Self {
        Self { counts: [const { AtomicU64::new(0) }; BUCKETS], nanos: AtomicU64::new(0) }
    }

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

type Labelled = (Vec<LabelPair>, Arc<GapCounts>);

/// All counts of a family. A clone is the same family.
#[derive(Clone, Debug)]
pub(super) struct GapHistograms {
    family: Family,
    desc: Desc,
    rows: Arc<RwLock<Vec<Labelled>>>,
}

impl GapHistograms {
    pub(super) fn new(family: Family) -> Self {
        Self { family, desc: describe(&family), rows: Arc::default() }
    }

    pub(super) fn row(&self, labels: Vec<LabelPair>) -> Arc<GapCounts> {
        let mut rows = self.rows.write();
        if let Some((_, row)) = rows.iter().find(|(known, _)| *known == labels) {
            return Arc::clone(row);
        }
        let row = Arc::new(GapCounts::new());
        rows.push((labels, Arc::clone(&row)));
        row
    }

    pub(super) fn reset(&self) {
        self.rows.write().clear();
    }
}

impl Collector for GapHistograms {
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
        family_of(&self.family, metrics).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::families;
    use super::*;

    #[test]
    fn rows_add_up_and_are_cumulative() {
        let rows = GapHistograms::new(families::INTER_TOKEN_LATENCY);
        let row = rows.row(Vec::new());
        let mut gaps = ItlHistogram::default();
        gaps.record(Duration::from_millis(5), 3);
        gaps.record(Duration::from_secs(60), 1);
        row.merge(&gaps);
        row.merge(&gaps);
        assert!(Arc::ptr_eq(&row, &rows.row(Vec::new())), "labels have one row");
        let page = rows.collect();
        let histogram = page[0].get_metric()[0].get_histogram();
        assert_eq!(histogram.get_sample_count(), 8);
        assert!((histogram.get_sample_sum() - 120.03).abs() < 1e-6);
        let at =
            |bound: f64| histogram.get_bucket().iter().find(|b| b.upper_bound() == bound).unwrap().cumulative_count();
        assert_eq!((at(0.004), at(0.005), at(10.0)), (0, 6, 6));
    }
}
