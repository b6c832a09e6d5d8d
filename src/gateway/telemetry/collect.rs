//! From records to metrics, and from metrics to a page.
//!
//! [`Telemetry`] takes each finished record exactly once:
//!
//! | metric | requests |
//! |---|---|
//! | TTFT, ITL | streams, however they ended: a client that left may have seen tokens |
//! | TPOT, duration | completed ones; a cut-off request is shorter for the wrong reason |
//! | the same, and attainment | only requests that generate; others have their own durations |
//! | tokens | all; counted by the gateway if the engine reported no usage |
//! | estimate ratio | requests whose engine reported usage |
//! | queue wait | requests that asked for a backend |
//!
//! Gauges are read at scrape time from admission's view, so nothing is counted twice. Recording
//! takes about a microsecond and never waits for I/O.

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use prometheus::{GaugeVec, Histogram, IntCounterVec, IntGaugeVec, Registry, TextEncoder};
use tokio::time::Instant;

use super::access_log::{AccessLogError, AccessLogWriter};
use super::by_engine::ByEngine;
use super::clients::{self, ClientView};
use super::cluster::{self, ClusterMetrics};
use super::continued::ContinuedCounters;
use super::engines::{self, EngineMetrics, EnginePage, PoolEngines};
use super::experiments;
use super::exposition::{Page, PoolViews, Scraped, shown};
use super::families::{self, Family};
use super::finished::{LastRequests, RequestView};
use super::gauges;
use super::history::Resolution;
use super::history_report::{self, HistoryReport};
use super::keys;
use super::openmetrics;
#[cfg(feature = "otel")]
use super::otlp::{self, Exporter};
use super::recent::WindowStats;
use super::records;
use super::series::{self, PoolSeries, Series, SeriesTable};
use super::totals::{TotalsTable, TotalsView};
use super::tuner::{self, TunerView};
use super::tunnels::{TunnelBytes, TunnelCounters};
use crate::experiment::ExperimentReport;
use crate::flow::keys::{KeyInFlight, KeyTokens};
use crate::flow::owner::KeyWork;
use crate::flow::{Outcome, Record, Recorder};
use sluice_config::{Config, Model};
use sluice_core::base::ModelId;
use sluice_core::meter::StreamStats;
use sluice_core::openai::Route;

/// Takes records and renders pages.
pub struct Telemetry {
    registry: Registry,
    table: Arc<SeriesTable>,
    by_engine: Arc<ByEngine>,
    continued: ContinuedCounters,
    totals: TotalsTable,
    overhead_estimate: Histogram,
    overhead_connect: Histogram,
    client_wait: Histogram,
    tunnels: TunnelCounters,
    reloads: IntCounterVec,
    certificates: IntGaugeVec,
    slo_targets: GaugeVec,
    /// Names of the pools of the configuration in force.
    pools: Mutex<HashSet<String>>,
    access_log: Option<AccessLogWriter>,
    records: Option<AccessLogWriter>,
    observer: OnceLock<Observer>,
    #[cfg(feature = "otel")]
    exporter: Option<Exporter>,
    /// The beginning of the history.
    started: Instant,
    finished: LastRequests,
}

/// Why telemetry cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The access log.
    #[error(transparent)]
    AccessLog(#[from] AccessLogError),
    /// The exporter of traces.
    #[error("cannot send traces: {0}; check [tracing]")]
    Traces(std::io::Error),
}

type Observer = Box<dyn Fn(&Record) + Send + Sync>;

impl std::fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Telemetry").finish_non_exhaustive()
    }
}

impl Telemetry {
    /// Telemetry of a configuration, with its access log and records; gauges are read from `pools`.
    pub fn new(config: &Config, pools: PoolViews) -> Result<Self, TelemetryError> {
        let access_log = config.access_log.as_ref().map(AccessLogWriter::open).transpose()?;
        let mut telemetry = Self::with(pools, access_log);
        if let Some(config) = &config.records {
            let records = records::open(config)?;
            telemetry.records = Some(records.clone());
            let dropped = families::RECORDS_DROPPED;
            telemetry.show([dropped], move |page| page.add(&dropped, &[], records.dropped() as f64));
        }
        #[cfg(feature = "otel")]
        if let Some(tracing) = &config.tracing {
            let (registry, exemplars) = (telemetry.registry.clone(), telemetry.table.exemplars.clone());
            let exporter = Exporter::start(tracing, registry, exemplars).map_err(TelemetryError::Traces)?;
            telemetry.show(otlp::FAMILIES, exporter.metrics());
            telemetry.exporter = Some(exporter);
        }
        telemetry.configured(config);
        Ok(telemetry)
    }

    /// Telemetry without objectives so far.
    pub fn with(pools: PoolViews, access_log: Option<AccessLogWriter>) -> Self {
        let registry = Registry::new();
        let table = Arc::new(SeriesTable::new(&registry));
        let by_engine = Arc::new(ByEngine::new(&registry));
        let (counted, followed, lines) = (Arc::clone(&table), Arc::clone(&by_engine), access_log.clone());
        let read = move |page: &mut Page| {
            let dropped = lines.as_ref().map_or(0, AccessLogWriter::dropped);
            gauges::add(&followed.follow(&pools), &attainments(&counted), dropped, page);
            counted.merge().add(followed.merges_classes(), page);
        };
        series::register(&registry, Scraped::new(&gauges::FAMILIES, read));
        let overhead = series::histograms(&registry, &families::OVERHEAD_SECONDS);
        let client_wait = series::histograms(&registry, &families::CLIENT_WAIT_SECONDS);
        let reloads = series::counters(&registry, &families::RELOADS);
        let certificates = series::gauges(&registry, &families::CERTIFICATE_EXPIRY);
        let slo_targets = series::gauges(&registry, &families::SLO_TARGET);
        for result in ["ok", "failed"] {
            reloads.with_label_values(&[result]);
        }
        Self {
            overhead_estimate: overhead.with_label_values(&["estimate"]),
            overhead_connect: overhead.with_label_values(&["connect"]),
            client_wait: client_wait.with_label_values::<&str>(&[]),
            by_engine,
            tunnels: TunnelCounters::new(&registry),
            continued: ContinuedCounters::new(&registry),
            totals: TotalsTable::default(),
            registry,
            table,
            reloads,
            certificates,
            slo_targets,
            pools: Mutex::default(),
            access_log,
            records: None,
            observer: OnceLock::new(),
            #[cfg(feature = "otel")]
            exporter: None,
            started: Instant::now(),
            finished: LastRequests::default(),
        }
    }

    /// The counters of bytes of the WebSockets of a pool.
    pub fn tunnel_bytes(&self, pool: &str) -> TunnelBytes {
        self.tunnels.of(pool)
    }

    /// Adds families, whose metrics `read` adds at scrape time, to the metrics page. A second call
    /// with the same families panics, as every `show_` function does.
    fn show<const N: usize>(&self, families: [Family; N], read: impl Fn(&mut Page) + Send + Sync + 'static) {
        series::register(&self.registry, Scraped::new(&families, read));
    }

    /// Shows the connections and bodies of clients.
    pub fn show_clients(&self, view: impl Fn() -> ClientView + Send + Sync + 'static) {
        self.show(clients::FAMILIES, move |page| clients::add(&view(), page));
    }

    /// Shows the engine time and the waiting requests of keys in fair pools.
    pub fn show_key_work(&self, view: impl Fn() -> Vec<KeyWork> + Send + Sync + 'static) {
        self.show(keys::WORK, move |page| keys::add_work(&view(), page));
    }

    /// Shows the experiments.
    pub fn show_experiments(&self, view: impl Fn() -> Vec<ExperimentReport> + Send + Sync + 'static) {
        self.show(experiments::FAMILIES, move |page| experiments::add(&view(), page));
    }

    /// Shows the engines that the gateway runs. `phases`: all phases of an engine.
    pub fn show_engines(
        &self,
        phases: Vec<&'static str>,
        view: impl Fn() -> Vec<EngineMetrics> + Send + Sync + 'static,
    ) {
        self.show(engines::FAMILIES, move |page| engines::add(&view(), &phases, page));
    }

    /// Shows this gateway's part in the ledger of several gateways.
    pub fn show_cluster(&self, view: impl Fn() -> ClusterMetrics + Send + Sync + 'static) {
        self.show(cluster::FAMILIES, move |page| cluster::add(&view(), page));
    }

    /// Shows the tokens that API keys have used of their limits.
    pub fn show_keys(&self, view: impl Fn() -> Vec<KeyTokens> + Send + Sync + 'static) {
        self.show(keys::TOKENS, move |page| keys::add_tokens(&view(), page));
    }

    /// Shows the requests that API keys have in flight.
    pub fn show_keys_in_flight(&self, view: impl Fn() -> Vec<KeyInFlight> + Send + Sync + 'static) {
        self.show(keys::IN_FLIGHT, move |page| keys::add_in_flight(&view(), page));
    }

    /// Shows the values of the engines' own pages.
    pub fn show_engine_pages(&self, view: impl Fn() -> Vec<EnginePage> + Send + Sync + 'static) {
        self.show(engines::PAGES, move |page| engines::add_pages(&view(), page));
    }

    /// Shows the cause, pool and subject of each present finding.
    pub fn show_findings(&self, view: impl Fn() -> Vec<[String; 3]> + Send + Sync + 'static) {
        self.show([families::FINDING], move |page| {
            for [cause, pool, subject] in view() {
                page.add(&families::FINDING, &[&cause, &pool, &subject], 1.0);
            }
        });
    }

    /// Shows the number of engines that pools should have.
    pub fn show_pool_engines(&self, view: impl Fn() -> Vec<PoolEngines> + Send + Sync + 'static) {
        self.show(engines::WANTED, move |page| engines::add_wanted(&view(), page));
    }

    /// Shows the online tuner, and gives it every record, including records of copies.
    pub fn show_tuner(
        &self,
        view: impl Fn() -> TunerView + Send + Sync + 'static,
        observe: impl Fn(&Record) + Send + Sync + 'static,
    ) {
        self.show(tuner::FAMILIES, move |page| tuner::add(&view(), page));
        let _ = self.observer.set(Box::new(observe));
    }

    /// Applies the objectives of a configuration's pools, the rules for the size of the page and
    /// the dates of the certificates. Counters of the pools begin at zero, so that a rate sees
    /// their first step.
    pub fn configured(&self, config: &Config) {
        self.table.configured(config);
        self.by_engine.configured(config, self.table.merge().classes_of_keys);
        self.slo_targets.reset();
        let names = config.pools.iter().map(|pool| pool.name.clone()).collect();
        let before: HashSet<String> = std::mem::replace(&mut *self.pools.lock(), names);
        for pool in &config.pools {
            let of_classes = config.classes.iter().filter(|class| !class.objectives_in(pool).is_empty());
            let targets: Vec<_> = of_classes.map(|class| (&class.name, class.attainment_in(pool))).collect();
            let series = self.table.pool(Some(&pool.name.as_str().into()));
            // A pool that was absent from the last configuration begins a new window.
            if !before.is_empty() && !before.contains(&pool.name) {
                series.recent.restart(Instant::now());
            }
            for (class, attainment) in targets {
                self.slo_targets.with_label_values(&[&pool.name, class]).set(attainment);
                let served = |(index, _): &(usize, &Model)| pool.models.includes(ModelId::new(*index));
                for (_, model) in config.models.iter().enumerate().filter(served).take(JUDGED_MODELS) {
                    self.table.start_judging(&pool.name, class, &model.name);
                }
            }
        }
        self.certificates.reset();
        for file in config.own_certificates() {
            self.certificate(&file.path, file.content.validity().until);
        }
    }

    /// Sets when a certificate of the gateway expires, in seconds since 1970.
    pub(super) fn certificate(&self, path: &Path, until: i64) {
        self.certificates.with_label_values(&[&path.display().to_string()]).set(until);
    }

    /// The metrics page in the OpenMetrics format, which has exemplars.
    pub fn open_metrics(&self) -> String {
        openmetrics::page(&shown(&self.registry), &self.table.exemplars.found())
    }

    /// The metrics page, in Prometheus' text format.
    pub fn page(&self) -> String {
        let families = shown(&self.registry);
        let mut page = String::with_capacity(PAGE_BYTES);
        if let Err(error) = TextEncoder::new().encode_utf8(&families, &mut page) {
            tracing::error!(%error, "the metrics page could not be written whole");
        }
        page
    }

    /// The last five minutes of a pool's home traffic.
    pub fn five_minutes(&self, pool: &str) -> WindowStats {
        self.table.pool(Some(&pool.into())).recent.five_minutes(Instant::now())
    }

    /// The last minute of a pool's home traffic.
    pub fn minute(&self, pool: &str) -> WindowStats {
        self.table.pool(Some(&pool.into())).recent.minute(Instant::now())
    }

    /// Sums over the requests of each pool, backend and key.
    pub fn totals(&self) -> TotalsView {
        self.totals.view()
    }

    /// The last five minutes or the last hour, by class and pool.
    pub fn history(&self, resolution: Resolution) -> HistoryReport {
        history_report::report(&self.table.histories(), resolution, self.started.elapsed())
    }

    /// The last finished requests with this id (the client's or the upstream one), latest first.
    pub fn requests(&self, id: &str) -> Vec<RequestView> {
        self.finished.with_id(id)
    }

    /// The last requests that were shed or failed, latest first, at most
    /// [`FAILURES_MAX`](super::FAILURES_MAX).
    pub fn failures(&self, most: usize) -> Vec<RequestView> {
        self.finished.failures(most)
    }

    /// The slowest of the last finished requests.
    pub fn slowest(&self, most: usize) -> Vec<RequestView> {
        self.finished.slowest(most)
    }

    /// The number of finished requests that can be looked up, and when the oldest ended.
    pub fn finished(&self) -> (usize, Option<Timestamp>) {
        self.finished.kept()
    }

    /// Counts a reload of the configuration.
    pub fn reloaded(&self, ok: bool) {
        self.reloads.with_label_values(&[if ok { "ok" } else { "failed" }]).inc();
    }

    /// Reopens the files of the access log and of the records, as after a rotation.
    pub fn reopen(&self) {
        for lines in self.lines() {
            lines.reopen();
        }
    }

    /// Writes the lines and sends the traces that are still held. Blocks as long as disk and
    /// collector do, at most 5 s each.
    pub fn flush(&self) {
        for lines in self.lines() {
            lines.flush();
        }
        #[cfg(feature = "otel")]
        if let Some(exporter) = &self.exporter {
            exporter.flush();
        }
    }
}

/// The most models of a pool whose counters are created at zero.
const JUDGED_MODELS: usize = 16;
/// Initial capacity of a page, in bytes.
const PAGE_BYTES: usize = 64 << 10;

fn attainments(table: &SeriesTable) -> Vec<(String, f64)> {
    let now = Instant::now();
    let each = table.pools().into_iter().filter_map(|pool| Some((pool.name.to_string(), pool.recent.attainment(now)?)));
    each.collect()
}

impl Recorder for Arc<Telemetry> {
    fn record(&self, record: &Record) {
        Telemetry::record(self, record);
    }

    fn attempt_failed(&self, on: &[Arc<str>; 2]) {
        self.totals.attempt_failed(on);
    }
}

impl Telemetry {
    /// Counts a finished request, without waiting. A copy for a shadow arm is counted with the
    /// experiment.
    pub fn record(&self, record: &Record) {
        if record.copy.is_none() {
            self.count(record);
        }
        if let Some(observe) = self.observer.get() {
            observe(record);
        }
        for lines in self.lines() {
            lines.write(record);
        }
        #[cfg(feature = "otel")]
        if let Some(exporter) = &self.exporter {
            exporter.take(record);
        }
    }

    fn lines(&self) -> impl Iterator<Item = &AccessLogWriter> {
        self.access_log.iter().chain(&self.records)
    }

    fn count(&self, record: &Record) {
        let series = self.table.series(record);
        self.table.requests(&series, record).inc();
        if record.home.is_some() {
            self.overhead_estimate.observe(seconds(record.estimate_time));
            placed(record, &series);
        }
        if record.backend.is_some() {
            self.overhead_connect.observe(seconds(record.connect_time));
        }
        retried(record, &series.ran_in);
        if let Some(stats) = &record.stats {
            measured(record, stats, &series);
        }
        if record.outcome == Outcome::Completed
            && let Some(e2el) = record.e2el()
        {
            self.table.duration(&series, record).observe(seconds(e2el), record);
        }
        if !record.client_wait.is_zero() {
            self.client_wait.observe(seconds(record.client_wait));
        }
        if let Outcome::Shed(reason) = record.outcome {
            series.home.shed(reason).inc();
        }
        if let Some(met) = record.slo_met {
            self.table.count_judged(&series, met);
        }
        self.by_engine.count(record);
        self.continued.count(record);
        self.totals.count(record);
        let now = Instant::now();
        series.home.recent.add(record, now);
        series.history.history.lock().add(record, now.saturating_duration_since(self.started));
        self.finished.add(record, Timestamp::now());
    }
}

fn placed(record: &Record, series: &Series) {
    let asked = record.backend.is_some() || record.outcome != Outcome::Refused;
    if asked {
        series.queue_wait.observe(seconds(record.queue_wait), record);
    }
    if let Some(spill) = &series.spill {
        spill.inc();
    }
}

fn retried(record: &Record, pool: &PoolSeries) {
    for reason in &record.retries {
        pool.retried(*reason).inc();
    }
}

fn measured(record: &Record, stats: &StreamStats, series: &Series) {
    let is_job = record.route.is_some_and(Route::is_job);
    if (record.stream && record.generates()) || is_job {
        if let Some(ttft) = stats.ttft {
            series.ttft.observe(seconds(ttft), record);
        }
        series.itl.merge(&stats.itl);
    }
    if let Some(tpot) = stats.tpot.filter(|_| record.outcome == Outcome::Completed && record.generates()) {
        series.tpot.observe(seconds(tpot), record);
    }
    series.prompt.inc_by(record.prompt_tokens());
    series.cached.inc_by(stats.usage.cached.unwrap_or(0));
    series.expected_cached.inc_by(record.expected_cached);
    series.generation.inc_by(record.generated_tokens());
    if let (Some(estimate), Some(actual @ 1..)) = (&record.estimate, stats.usage.prompt) {
        series.estimate_ratio.observe(estimate.tokens as f64 / actual as f64);
    }
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}
