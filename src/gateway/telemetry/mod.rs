//! Data for the operator: metrics, the access log, the gateway's own log.
//!
//! [`families`] has every metric in one table; [`collect`] updates metrics from records and renders
//! them. [`recent`], [`history`] and [`finished`] serve the live page. [`access_log`] writes one
//! JSON line per sampled request, and `records` writes the lines that `sluice` can replay. `otlp`
//! sends spans and metrics to a collector. [`log`] configures the gateway's own log.
//!
//! The request path hands over one finished record and does not wait. Values that admission counts
//! (in flight, queues, states) are read at scrape time, so they cannot drift.

pub mod access_log;
pub mod collect;
pub mod families;
pub mod log;
pub mod recent;

mod finished;
mod span;
mod history;
mod history_report;
mod buckets;
mod exposition;
mod exemplars;
mod gauges;
mod clients;
mod experiments;
mod tuner;
mod engines;
mod cluster;
mod keys;
mod openmetrics;
#[cfg(feature = "otel")]
mod otlp;
mod salt;
mod line;
mod records;
mod process;
mod merge;
mod series;
mod by_engine;
mod continued;
mod tunnels;
pub mod totals;

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

pub use access_log::{AccessLogError, AccessLogWriter};
pub use clients::{ClientView, PROXY_FAULTS, ProxyFault};
pub use cluster::ClusterMetrics;
pub use collect::{Telemetry, TelemetryError};
pub use engines::{EngineMetrics, EnginePage, PoolEngines};
pub use exposition::PoolViews;
pub use finished::{FAILURES_MAX, FINISHED_MAX, RequestView};
pub use history::Resolution;
pub use history_report::{EstimateAccuracy, HistoryReport, HistoryRow, PartsOfGroup, Points, Tails, TtftParts};
pub use recent::{Quantiles, WindowStats};
pub use tuner::TunerView;
pub use tunnels::TunnelBytes;
