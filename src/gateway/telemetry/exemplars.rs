//! The last traced request in each bucket of a histogram. It leads from a slow bucket of a panel to
//! a trace.
//!
//! OpenMetrics ([`super::openmetrics`]) and OTLP show them. Only a request with a sampled trace
//! becomes an exemplar, so without `[tracing]` exemplars cost only an empty row for each histogram.
//! Bounds: one per bucket; rows exist only for combinations of labels that have series, which
//! [`super::series`] bounds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::{Mutex, RwLock};
use prometheus::proto::LabelPair;
use prometheus::{Histogram, HistogramVec};

use super::exposition::pairs;
use super::families::{Family, MetricKind};
use crate::flow::Record;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Exemplar {
    /// The measured value, in the unit of the family.
    pub(super) value: f64,
    pub(super) trace: u128,
    pub(super) span: u64,
    pub(super) at: SystemTime,
}

/// The exemplars of one histogram, by bucket; the last bucket has no upper bound. Empty until there
/// is one.
type Row = Arc<Mutex<Vec<Option<Exemplar>>>>;
/// By the name of the histogram, and by the labels as in [`labels_key`].
type ByHistogram<V> = BTreeMap<&'static str, BTreeMap<String, V>>;
pub(super) type Found = ByHistogram<Vec<Option<Exemplar>>>;

pub(super) fn labels_key(labels: &[LabelPair]) -> String {
    labels.iter().flat_map(|label| [label.name(), "\u{1}", label.value(), "\u{2}"]).collect()
}

/// A histogram that remembers traced requests.
#[derive(Debug)]
pub(super) struct TracedHistogram {
    counts: Histogram,
    bounds: &'static [f64],
    row: Row,
}

impl TracedHistogram {
    pub(super) fn observe(&self, value: f64, record: &Record) {
        self.counts.observe(value);
        let Some(trace) = record.trace.as_ref().filter(|trace| trace.is_sampled()) else { return };
        let own = trace.own();
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        let mut row = self.row.lock();
        if row.is_empty() {
            row.resize(self.bounds.len() + 1, None);
        }
        row[bucket] = Some(Exemplar { value, trace: own.trace, span: own.span, at: SystemTime::now() });
    }
}

/// The exemplars of all histograms. A clone has the same rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Exemplars(Arc<RwLock<ByHistogram<Row>>>);

impl Exemplars {
    /// The histogram of `vec` with these label values, with exemplars.
    pub(super) fn histogram(&self, family: &Family, vec: &HistogramVec, values: &[&str]) -> TracedHistogram {
        let bounds = match family.kind {
            MetricKind::Histogram(bounds) => bounds,
            MetricKind::Counter | MetricKind::Gauge => &[],
        };
        let key = labels_key(&pairs(family, values));
        let row = Arc::clone(self.0.write().entry(family.name).or_default().entry(key).or_default());
        TracedHistogram { counts: vec.with_label_values(values), bounds, row }
    }

    pub(super) fn reset(&self) {
        self.0.write().clear();
    }

    pub(super) fn found(&self) -> Found {
        let rows = |rows: &BTreeMap<String, Row>| {
            let each = rows.iter().map(|(labels, row)| (labels, row.lock().clone()));
            each.filter(|(_, row)| !row.is_empty()).map(|(labels, row)| (labels.clone(), row)).collect()
        };
        self.0.read().iter().map(|(family, own)| (*family, rows(own))).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus::Registry;

    use super::super::{families, openmetrics, series, testing};
    use super::*;
    use crate::flow::trace::{RequestTrace, TRACEPARENT};

    fn traced(flag: &str) -> Record {
        let parent = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flag}");
        let mut headers = http::HeaderMap::new();
        headers.insert(TRACEPARENT, parent.parse().unwrap());
        let trace = RequestTrace::of(&headers, Some(1.0), || unreachable!());
        Record { trace, ..testing::completed(Duration::from_millis(30), Duration::from_millis(5)) }
    }

    #[test]
    fn a_bucket_shows_the_last_traced_request_in_it() {
        let (registry, exemplars) = (Registry::new(), Exemplars::default());
        let vec = series::histograms(&registry, &families::QUEUE_WAIT_SECONDS);
        let own = exemplars.histogram(&families::QUEUE_WAIT_SECONDS, &vec, &["a\"b", "short"]);
        let other = exemplars.histogram(&families::QUEUE_WAIT_SECONDS, &vec, &["other", "short"]);
        other.observe(0.25, &traced("00"));
        own.observe(0.25, &traced("01"));
        own.observe(0.2, &traced("01"));
        own.observe(0.21, &traced("00"));
        own.observe(1_000.0, &traced("01"));
        let page = openmetrics::page(&registry.gather(), &exemplars.found());
        let lines: Vec<&str> = page.lines().filter(|line| line.contains(" # ")).collect();
        let [bounded, last] = lines[..] else { panic!("{page}") };
        assert!(
            bounded.starts_with(
                "sluice_queue_wait_seconds_bucket{class=\"short\",pool=\"a\\\"b\",le=\"0.25\"} 3 # {trace_id="
            ),
            "{bounded}"
        );
        assert!(
            bounded.contains("\"4bf92f3577b34da6a3ce929d0e0e4736\",span_id=\"") && bounded.contains("} 0.2 "),
            "{bounded}"
        );
        assert!(last.contains("le=\"+Inf\"} 4 # ") && last.contains("} 1000 "), "{last}");
    }

    #[test]
    fn both_formats_have_the_same_samples() {
        let admission = testing::admission(tokio::time::Instant::now());
        let telemetry = crate::telemetry::Telemetry::with(Box::new(move || admission.view()), None);
        telemetry.record(&traced("00"));
        let samples = |page: &str| {
            let own = page.lines().filter(|line| !line.starts_with('#') && !line.starts_with("process_"));
            own.map(str::to_owned).collect::<Vec<_>>()
        };
        let (text, open) = (telemetry.page(), telemetry.open_metrics());
        assert_eq!(samples(&text), samples(&open));
        assert!(samples(&text).len() > 50);
        assert!(open.contains("# TYPE sluice_requests counter\n") && open.ends_with("# EOF\n"), "{open}");
    }
}
