//! Traces of finished requests, and metrics, for an OpenTelemetry collector (OTLP over HTTP).
//!
//! [`spans`] builds the spans of a request from the record, and [`collector`] sends them. Between
//! them is [`Exporter`]: a bounded queue, and a thread that reads it and sends [`metrics`], too.
//! The path of a request only copies the record, after the request has ended and only if the trace
//! is sampled.
//!
//! A collector that refuses, hangs or is gone costs traces and nothing else. A batch is sent once
//! (and once more if a connection was closed while idle), within `tracing.timeout`. A trace that
//! finds the queue full is dropped. Failed, dropped and rejected traces are counted, and reported
//! at most every [`WARN_EVERY`](collector::WARN_EVERY).

mod origin;
mod collector;
mod spans;
mod metrics;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc as blocking;
use std::time::{Duration, SystemTime};

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::exemplars::Exemplars;
use super::exposition::Page;
use super::families::{self, Family};
use crate::flow::Record;
use collector::{Collector, CollectorError, Flush, WARN_EVERY};
use metrics::{ExportCounts, MetricsSender};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use opentelemetry_proto::tonic::resource::v1::Resource;
use prometheus::Registry;
use sluice_config::{METRICS_PATH, TRACES_PATH, Tracing};

/// The most traces in a request: about 1 MiB.
const BATCH: usize = 512;
/// How long the first trace of a batch waits for more.
const LINGER: Duration = Duration::from_secs(1);
/// The longest that [`Exporter::flush`] waits for the collector.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

struct Finished {
    record: Record,
    ended: SystemTime,
}

#[derive(Debug, Default)]
struct Counts {
    sent: AtomicU64,
    failed: AtomicU64,
    queue_full: AtomicU64,
    rejected_spans: AtomicU64,
}

impl Counts {
    fn lost(&self) -> u64 {
        [&self.failed, &self.queue_full, &self.rejected_spans].iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Sends traces. Dropping it sends the queued traces and ends the thread.
#[derive(Debug)]
pub(super) struct Exporter {
    queue: mpsc::Sender<Finished>,
    flushes: mpsc::Sender<Flush>,
    counts: Arc<Counts>,
    metrics: Option<(mpsc::Sender<Flush>, Arc<ExportCounts>)>,
}

impl Exporter {
    /// Starts the thread that sends to the configured collector.
    pub(super) fn start(config: &Tracing, registry: Registry, exemplars: Exemplars) -> std::io::Result<Self> {
        let (queue, queued) = mpsc::channel(config.queue);
        let (flushes, flushing) = mpsc::channel(1);
        let counts = Arc::new(Counts::default());
        let collector = |path: &str| Collector::new(config, path).map_err(std::io::Error::other);
        let resource = origin::resource(&config.service_name);
        let sender = Sender {
            collector: collector(TRACES_PATH)?,
            resource: resource.clone(),
            timeout: config.timeout,
            counts: Arc::clone(&counts),
            warned: None,
            reported: 0,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut metrics = None;
        if !config.metrics_interval.is_zero() {
            let (flushes, flushing) = mpsc::channel(1);
            let counts = Arc::new(ExportCounts::default());
            let sender = MetricsSender {
                collector: collector(METRICS_PATH)?,
                resource,
                timeout: config.timeout,
                interval: config.metrics_interval,
                registry,
                exemplars,
                counts: Arc::clone(&counts),
                started: SystemTime::now(),
                warned: None,
            };
            runtime.spawn(sender.run(flushing));
            metrics = Some((flushes, counts));
        }
        let run = move || runtime.block_on(sender.run(queued, flushing));
        std::thread::Builder::new().name("otlp".to_owned()).spawn(run)?;
        Ok(Self { queue, flushes, counts, metrics })
    }

    /// Takes the trace of a request that has ended, if it is sampled. Never waits.
    pub(super) fn take(&self, record: &Record) {
        if !record.trace.as_ref().is_some_and(|trace| trace.is_sampled()) {
            return;
        }
        let finished = Finished { record: record.clone(), ended: SystemTime::now() };
        if self.queue.try_send(finished).is_err() {
            self.counts.queue_full.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Sends all queued traces and the metrics, and waits, at most 5 s.
    pub(super) fn flush(&self) {
        let all = [Some(&self.flushes), self.metrics.as_ref().map(|(flushes, _)| flushes)];
        let (done, finished) = blocking::sync_channel(all.len());
        let asked = all.iter().flatten().filter(|flushes| flushes.try_send(done.clone()).is_ok()).count();
        let until = std::time::Instant::now() + FLUSH_TIMEOUT;
        for _ in 0..asked {
            let _ = finished.recv_timeout(until.saturating_duration_since(std::time::Instant::now()));
        }
    }

    /// A function that adds the exporter's metrics to the metrics page.
    pub(super) fn metrics(&self) -> impl Fn(&mut Page) + Send + Sync + use<> {
        let exports = self.metrics.as_ref().map(|(_, counts)| Arc::clone(counts));
        let counts = Arc::clone(&self.counts);
        let value = |count: &AtomicU64| count.load(Ordering::Relaxed) as f64;
        move |page: &mut Page| {
            let Counts { sent, failed, queue_full, rejected_spans } = &*counts;
            for (result, count) in [("sent", sent), ("failed", failed), ("queue_full", queue_full)] {
                page.add(&families::TRACES, &[result], value(count));
            }
            page.add(&families::TRACE_SPANS_REJECTED, &[], value(rejected_spans));
            for (result, count) in exports.iter().flat_map(|all| [("sent", &all.sent), ("failed", &all.failed)]) {
                page.add(&families::METRICS_EXPORTS, &[result], value(count));
            }
        }
    }
}

pub(super) const FAMILIES: [Family; 3] = [families::TRACES, families::TRACE_SPANS_REJECTED, families::METRICS_EXPORTS];

struct Sender {
    collector: Collector,
    resource: Resource,
    timeout: Duration,
    counts: Arc<Counts>,
    warned: Option<Instant>,
    /// Lost traces that warnings have reported.
    reported: u64,
}

impl Sender {
    /// Sends batches until the queue is closed and empty.
    async fn run(mut self, mut queue: mpsc::Receiver<Finished>, mut flushes: mpsc::Receiver<Flush>) {
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            // If a flush is requested, all queued traces are sent at once.
            let mut flush = None;
            let mut deadline = None;
            while flush.is_none() && batch.len() < BATCH {
                let room = BATCH - batch.len();
                tokio::select! {
                    biased;
                    taken = queue.recv_many(&mut batch, room) => match taken {
                        0 if batch.is_empty() => return,
                        0 => break,
                        _ => _ = deadline.get_or_insert_with(|| Instant::now() + LINGER),
                    },
                    Some(done) = flushes.recv() => flush = Some(done),
                    () = until(deadline) => break,
                }
            }
            self.send(&mut batch).await;
            if let Some(done) = flush {
                while let Ok(next) = queue.try_recv() {
                    batch.push(next);
                    if batch.len() == BATCH || queue.is_empty() {
                        self.send(&mut batch).await;
                    }
                }
                let _ = done.send(());
            }
        }
    }

    async fn send(&mut self, batch: &mut Vec<Finished>) {
        if batch.is_empty() {
            return;
        }
        let traces = batch.len() as u64;
        let all = batch.drain(..).map(|finished| spans::spans(&finished.record, finished.ended));
        let request = spans::request(&self.resource, all);
        let posted = timeout(self.timeout, self.collector.post(&request)).await;
        let result: Result<ExportTraceServiceResponse, _> =
            posted.unwrap_or(Err(CollectorError::TimedOut(self.timeout)));
        let (counter, lost) = match result {
            Ok(said) => {
                let said = said.partial_success.unwrap_or_default();
                let rejected = said.rejected_spans.try_into().unwrap_or(0);
                self.counts.rejected_spans.fetch_add(rejected, Ordering::Relaxed);
                (&self.counts.sent, Some(said.error_message).filter(|why| !why.is_empty()))
            }
            Err(error) => (&self.counts.failed, Some(error.to_string())),
        };
        counter.fetch_add(traces, Ordering::Relaxed);
        self.report(lost);
    }

    /// Warns of traces lost since the last warning. `reason`: why the last ones were lost; `None`:
    /// the queue was full.
    fn report(&mut self, reason: Option<String>) {
        let lost = self.counts.lost();
        if lost == self.reported || self.warned.is_some_and(|at| at.elapsed() < WARN_EVERY) {
            return;
        }
        let reason =
            reason.unwrap_or_else(|| "the queue was full; the collector is slow, or tracing.queue is small".to_owned());
        tracing::warn!(collector = %self.collector, lost = lost - self.reported, %reason, "traces were dropped; requests are not affected");
        (self.reported, self.warned) = (lost, Some(Instant::now()));
    }
}

/// Resolves at `deadline`, if there is one.
async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
