//! Metrics for an OpenTelemetry collector: the content of the metrics page, every
//! `tracing.metrics_interval`.
//!
//! Names, labels and buckets are the same as on the page; units are `s` and `By`. Counters and
//! histograms are cumulative since the start of the process, so the next request makes up for one
//! that is lost.
//!
//! Bounds: one request at a time, within `tracing.timeout`; a slow collector delays the next
//! request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Exemplar, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
    ScopeMetrics, Sum, exemplar, number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prometheus::Registry;
use prometheus::proto::{MetricFamily, MetricType};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

use super::collector::{Collector, CollectorError, Flush, WARN_EVERY};
use super::origin::{scope, text};
use crate::telemetry::exemplars::{self, Exemplars, Found, labels_key};
use crate::telemetry::exposition::shown;

const CUMULATIVE: i32 = AggregationTemporality::Cumulative as i32;

#[derive(Debug, Default)]
pub(super) struct ExportCounts {
    pub(super) sent: AtomicU64,
    pub(super) failed: AtomicU64,
}

pub(super) struct MetricsSender {
    pub(super) collector: Collector,
    pub(super) resource: Resource,
    pub(super) timeout: Duration,
    pub(super) interval: Duration,
    pub(super) registry: Registry,
    pub(super) exemplars: Exemplars,
    pub(super) counts: Arc<ExportCounts>,
    pub(super) started: SystemTime,
    pub(super) warned: Option<Instant>,
}

impl MetricsSender {
    /// Sends at each interval, and for each message in `flushes`, until `flushes` is closed.
    pub(super) async fn run(mut self, mut flushes: mpsc::Receiver<Flush>) {
        let mut ticks = interval_at(Instant::now() + self.interval, self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let flush = tokio::select! {
                _ = ticks.tick() => None,
                flush = flushes.recv() => match flush {
                    Some(done) => Some(done),
                    None => return,
                },
            };
            self.send().await;
            if let Some(done) = flush {
                let _ = done.send(());
            }
        }
    }

    async fn send(&mut self) {
        let families = shown(&self.registry);
        let points = Points { started: nanos(self.started), now: nanos(SystemTime::now()) };
        let request = points.request(&self.resource, &families, &self.exemplars.found());
        let posted = timeout(self.timeout, self.collector.post(&request)).await;
        let result: Result<ExportMetricsServiceResponse, _> =
            posted.unwrap_or(Err(CollectorError::TimedOut(self.timeout)));
        let reason = match result {
            Ok(said) => {
                self.counts.sent.fetch_add(1, Ordering::Relaxed);
                let said = said.partial_success.unwrap_or_default();
                if said.rejected_data_points == 0 {
                    return;
                }
                format!("{} data points were not taken: {}", said.rejected_data_points, said.error_message)
            }
            Err(error) => {
                self.counts.failed.fetch_add(1, Ordering::Relaxed);
                error.to_string()
            }
        };
        if self.warned.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
            tracing::warn!(collector = %self.collector, %reason, "metrics were not taken; the next request has their values");
            self.warned = Some(Instant::now());
        }
    }
}

/// The times of all points of a request, in nanoseconds since 1970.
struct Points {
    started: u64,
    now: u64,
}

impl Points {
    fn request(&self, resource: &Resource, families: &[MetricFamily], found: &Found) -> ExportMetricsServiceRequest {
        let metrics = families.iter().filter_map(|family| self.metric(family, found)).collect();
        let scope_metrics = vec![ScopeMetrics { scope: Some(scope()), metrics, schema_url: String::new() }];
        let resource = Some(resource.clone());
        let all = ResourceMetrics { resource, scope_metrics, schema_url: String::new() };
        ExportMetricsServiceRequest { resource_metrics: vec![all] }
    }

    fn metric(&self, family: &MetricFamily, found: &Found) -> Option<Metric> {
        let own = family.get_metric();
        let numbers = |value: fn(&prometheus::proto::Metric) -> f64| {
            own.iter().map(|metric| self.number(metric, value(metric))).collect()
        };
        let data = match family.get_field_type() {
            MetricType::COUNTER => Data::Sum(Sum {
                data_points: numbers(|metric| metric.get_counter().get_value()),
                aggregation_temporality: CUMULATIVE,
                is_monotonic: true,
            }),
            MetricType::GAUGE => Data::Gauge(Gauge { data_points: numbers(|metric| metric.get_gauge().get_value()) }),
            MetricType::HISTOGRAM => Data::Histogram(Histogram {
                data_points: own.iter().map(|metric| self.histogram(family.name(), metric, found)).collect(),
                aggregation_temporality: CUMULATIVE,
            }),
            _ => return None,
        };
        let (name, description) = (family.name().to_owned(), family.help().to_owned());
        Some(Metric { unit: unit(&name).to_owned(), name, description, metadata: Vec::new(), data: Some(data) })
    }

    fn number(&self, metric: &prometheus::proto::Metric, value: f64) -> NumberDataPoint {
        NumberDataPoint {
            attributes: attributes(metric),
            start_time_unix_nano: self.started,
            time_unix_nano: self.now,
            value: Some(number_data_point::Value::AsDouble(value)),
            ..NumberDataPoint::default()
        }
    }

    fn histogram(&self, name: &str, metric: &prometheus::proto::Metric, found: &Found) -> HistogramDataPoint {
        let counts = metric.get_histogram();
        let bounded = || counts.get_bucket().iter().filter(|bucket| bucket.upper_bound().is_finite());
        let mut below = 0;
        let up_to = bounded().map(prometheus::proto::Bucket::cumulative_count).chain([counts.get_sample_count()]);
        // A bucket of OTLP has only the values of that bucket.
        let bucket_counts = up_to.map(|count| count.saturating_sub(std::mem::replace(&mut below, count))).collect();
        let own = found.get(name).and_then(|rows| rows.get(&labels_key(metric.get_label())));
        HistogramDataPoint {
            attributes: attributes(metric),
            start_time_unix_nano: self.started,
            time_unix_nano: self.now,
            count: counts.get_sample_count(),
            sum: Some(counts.get_sample_sum()),
            bucket_counts,
            explicit_bounds: bounded().map(prometheus::proto::Bucket::upper_bound).collect(),
            exemplars: own.into_iter().flatten().flatten().map(exemplar_of).collect(),
            ..HistogramDataPoint::default()
        }
    }
}

fn exemplar_of(of: &exemplars::Exemplar) -> Exemplar {
    Exemplar {
        filtered_attributes: Vec::new(),
        time_unix_nano: nanos(of.at),
        span_id: of.span.to_be_bytes().into(),
        trace_id: of.trace.to_be_bytes().into(),
        value: Some(exemplar::Value::AsDouble(of.value)),
    }
}

fn attributes(metric: &prometheus::proto::Metric) -> Vec<KeyValue> {
    metric.get_label().iter().map(|label| text(label.name(), label.value())).collect()
}

fn unit(name: &str) -> &'static str {
    let name = name.strip_suffix("_total").unwrap_or(name);
    match name {
        _ if name.ends_with("_seconds") => "s",
        _ if name.ends_with("_bytes") => "By",
        _ => "",
    }
}

fn nanos(time: SystemTime) -> u64 {
    u64::try_from(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}
