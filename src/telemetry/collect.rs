//! From records to metrics, and from metrics to a page.
//!
//! [`Telemetry`] takes each finished record exactly once: one request counter by outcome, histograms of what was
//! measured, the window of the last minute, the access log. What is measured when:
//!
//! | metric | of which requests |
//! |---|---|
//! | TTFT, ITL | streams, however they ended: a client that left after the first token did see it |
//! | TPOT, duration | completed ones; a cut-off request is shorter for the wrong reason |
//! | tokens, estimate ratio | those whose engine reported usage |
//! | queue wait | those that asked for a backend |
//!
//! Gauges are read at scrape time from a closure given at construction (admission's view), so nothing here
//! counts what admission counts already.
//!
//! A clone is the same telemetry. Recording takes about a microsecond and never waits for I/O.

use std::sync::Arc;
use std::time::Duration;

use prometheus::{Histogram, IntCounterVec, Registry, TextEncoder};
use tokio::time::Instant;

use super::access_log::Sink;
use super::families;
use super::gauges::Scrape;
use super::recent::Minute;
use super::series::{self, Book, OfPool, Series};
use crate::flow::{Outcome, Record, Recorder};
use crate::meter::StreamStats;
use crate::pool::PoolView;

/// Gives a picture of all pools: `Admission::view`.
pub type Pools = Arc<dyn Fn() -> Vec<PoolView> + Send + Sync>;

/// Where records go and pages come from. A clone is the same telemetry.
#[derive(Clone)]
pub struct Telemetry {
    inner: Arc<Inner>,
}

struct Inner {
    registry: Registry,
    book: Arc<Book>,
    pools: Pools,
    overhead_estimate: Histogram,
    overhead_connect: Histogram,
    reloads: IntCounterVec,
    access_log: Option<Sink>,
}

impl std::fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Telemetry").finish_non_exhaustive()
    }
}

impl Telemetry {
    /// Telemetry whose gauges are read from `pools`; `access_log`: where lines go, if anywhere.
    pub fn new(pools: Pools, access_log: Option<Sink>) -> Self {
        let registry = Registry::new();
        let book = Arc::new(Book::new(&registry));
        let (judged, lines) = (Arc::clone(&book), access_log.clone());
        let dropped = move || lines.as_ref().map_or(0, Sink::dropped);
        series::register(&registry, Scrape::new(Arc::clone(&pools), move || attainments(&judged), dropped));
        let overhead = series::histograms(&registry, &families::OVERHEAD_SECONDS);
        let reloads = series::counters(&registry, &families::RELOADS);
        for result in ["ok", "failed"] {
            reloads.with_label_values(&[result]);
        }
        let inner = Inner {
            overhead_estimate: overhead.with_label_values(&["estimate"]),
            overhead_connect: overhead.with_label_values(&["connect"]),
            registry,
            book,
            pools,
            reloads,
            access_log,
        };
        Self { inner: Arc::new(inner) }
    }

    /// The metrics page, in Prometheus' text format.
    pub fn page(&self) -> String {
        // Counters of a pool exist from the first scrape on, at zero, so that `rate` sees their first step.
        for pool in (self.inner.pools)() {
            self.inner.book.pool(Some(&pool.name));
        }
        let families = self.inner.registry.gather();
        let mut page = String::with_capacity(PAGE_BYTES);
        if let Err(error) = TextEncoder::new().encode_utf8(&families, &mut page) {
            tracing::error!(%error, "the metrics page could not be written whole");
        }
        page
    }

    /// The last minute of a pool's own traffic; empty for a pool that has seen none.
    pub fn minute(&self, pool: &Arc<str>) -> Minute {
        self.inner.book.pool(Some(pool)).recent.minute(Instant::now())
    }

    /// Counts a reload of the configuration.
    pub fn reloaded(&self, ok: bool) {
        self.inner.reloads.with_label_values(&[if ok { "ok" } else { "failed" }]).inc();
    }

    /// Opens the access log's file anew, as after it was rotated. Nothing without an access log.
    pub fn reopen(&self) {
        if let Some(access_log) = &self.inner.access_log {
            access_log.reopen();
        }
    }

    /// Writes what the access log still holds and waits for it. Blocks for as long as the disk does.
    pub fn flush(&self) {
        if let Some(access_log) = &self.inner.access_log {
            access_log.flush();
        }
    }
}

/// Room for the page of a small configuration; larger ones grow it.
const PAGE_BYTES: usize = 64 << 10;

fn attainments(book: &Book) -> Vec<(String, f64)> {
    let now = Instant::now();
    let each = book.pools().into_iter().filter_map(|pool| Some((pool.name.to_string(), pool.recent.attainment(now)?)));
    each.collect()
}

impl Recorder for Telemetry {
    fn record(&self, record: &Record) {
        let inner = &*self.inner;
        let series = inner.book.series(record);
        inner.book.requests(&series, record).inc();
        if record.home.is_some() {
            inner.overhead_estimate.observe(seconds(record.estimate_time));
            placed(record, &series);
        }
        if record.backend.is_some() {
            inner.overhead_connect.observe(seconds(record.connect_time));
        }
        retried(record, &series.ran_in);
        if let Some(stats) = &record.stats {
            measured(record, stats, &series);
        } else if record.outcome == Outcome::Completed {
            series.duration.observe(seconds(record.total));
        }
        if let Outcome::Shed(reason) = record.outcome {
            series.home.shed(reason).inc();
        }
        series.home.recent.add(record, Instant::now());
        if let Some(access_log) = &inner.access_log {
            access_log.write(record);
        }
    }
}

/// Of a request whose home is known.
fn placed(record: &Record, series: &Series) {
    let asked = record.backend.is_some() || record.outcome != Outcome::Refused;
    if asked {
        series.home.queue_wait.observe(seconds(record.queue_wait));
    }
    if let Some(spill) = &series.spill {
        spill.inc();
    }
}

fn retried(record: &Record, pool: &OfPool) {
    for reason in &record.retries {
        pool.retried(*reason).inc();
    }
}

/// Of a request whose answer was metered.
fn measured(record: &Record, stats: &StreamStats, series: &Series) {
    if record.stream {
        if let Some(ttft) = stats.ttft {
            series.ttft.observe(seconds(ttft));
        }
        series.itl.merge(&stats.itl);
    }
    if record.outcome == Outcome::Completed {
        if let Some(tpot) = stats.tpot {
            series.tpot.observe(seconds(tpot));
        }
        series.duration.observe(seconds(stats.e2el.unwrap_or(record.total)));
    }
    series.prompt.inc_by(stats.usage.prompt.unwrap_or(0));
    series.generation.inc_by(stats.usage.completion.unwrap_or(0));
    if let (Some(estimate), Some(actual @ 1..)) = (&record.estimate, stats.usage.prompt) {
        series.estimate_ratio.observe(estimate.tokens as f64 / actual as f64);
    }
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}
