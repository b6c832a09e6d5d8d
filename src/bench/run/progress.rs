//! The progress of a run, and the way to stop it.
//!
//! A progress line shows sent, ended and failed requests, and recent statistics. An observer sees
//! each request when it is sent and when it ends. Bounds: [`RECENT`] requests in the window, which
//! is therefore shorter at high rates.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::result::metrics::Distribution;
use crate::result::record::Record;

/// Length of the window for the recent rate and TTFT.
pub const WINDOW: Duration = Duration::from_secs(10);
/// The most ended requests that the window keeps.
pub const RECENT: usize = 8_192;

/// Counts that may be read during a run.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests sent.
    pub sent: AtomicU64,
    /// Requests ended, including failures.
    pub ended: AtomicU64,
    /// Requests failed.
    pub failed: AtomicU64,
    recent: Mutex<VecDeque<(Instant, Option<f64>)>>,
    stop: CancellationToken,
    observer: Observer,
}

/// An event of a request, for an observer.
#[derive(Clone, Copy, Debug)]
pub enum RequestEvent<'a> {
    /// The request was sent.
    Sent(InFlight),
    /// The request has ended.
    Ended(&'a Record),
}

/// A request in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InFlight {
    /// Number of the request in the workload.
    pub index: u64,
    /// Index of the class.
    pub class: u32,
    /// Index of the adapter; `None`: the base model.
    pub adapter: Option<u32>,
    /// Due time (in a closed loop: time of sending), seconds from the start.
    pub due: f64,
}

impl From<&Record> for InFlight {
    fn from(record: &Record) -> Self {
        let due = record.due.unwrap_or(record.sent);
        Self { index: record.index, class: record.class, adapter: record.adapter, due }
    }
}

/// A function that sees each event. The task that sends the request calls it, so it must be fast.
#[derive(Default)]
struct Observer(Option<Box<ObserverFn>>);

type ObserverFn = dyn Fn(RequestEvent<'_>) + Send + Sync;

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "an observer" } else { "no observer" })
    }
}

/// Statistics of the last [`WINDOW`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecentStats {
    /// Requests that ended, per second.
    pub rate: f64,
    /// P99 TTFT, seconds; `None` if no request completed.
    pub ttft_p99: Option<f64>,
}

impl Progress {
    /// A new progress that calls `observer` for each event.
    pub fn with_observer(observer: impl Fn(RequestEvent<'_>) + Send + Sync + 'static) -> Self {
        Self { observer: Observer(Some(Box::new(observer))), ..Self::default() }
    }

    pub(crate) fn notify(&self, event: RequestEvent<'_>) {
        if let Some(observer) = &self.observer.0 {
            observer(event);
        }
    }

    /// Ends the run and abandons requests in flight.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Whether the run was ended.
    pub fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Returns when the run is ended.
    pub async fn stopped(&self) {
        self.stop.cancelled().await;
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> u64 {
        self.sent.load(Relaxed).saturating_sub(self.ended.load(Relaxed))
    }

    pub(crate) fn record_sent(&self) {
        self.sent.fetch_add(1, Relaxed);
    }

    /// Counts a request that ended, with the `ttft` of a completed one.
    pub(crate) fn record_ended(&self, ttft: Option<f64>, failed: bool) {
        self.ended.fetch_add(1, Relaxed);
        self.failed.fetch_add(u64::from(failed), Relaxed);
        let mut recent = self.recent.lock();
        if recent.len() == RECENT {
            recent.pop_front();
        }
        recent.push_back((Instant::now(), ttft));
    }

    /// TTFTs of the requests that completed in the last [`WINDOW`], seconds.
    pub fn recent_ttfts(&self) -> Vec<f64> {
        let (recent, now) = (self.recent.lock(), Instant::now());
        recent.iter().filter(|(at, _)| now - *at <= WINDOW).filter_map(|(_, ttft)| *ttft).collect()
    }

    /// The statistics of the last [`WINDOW`] of a run that began `since` ago.
    pub fn now(&self, since: Duration) -> RecentStats {
        let mut recent = self.recent.lock();
        let (now, full) = (Instant::now(), recent.len() == RECENT);
        while recent.front().is_some_and(|(at, _)| now - *at > WINDOW) {
            recent.pop_front();
        }
        let span = match recent.front() {
            Some((first, _)) if full => now - *first,
            _ => since.min(WINDOW),
        };
        let ttfts: Vec<f64> = recent.iter().filter_map(|(_, ttft)| *ttft).collect();
        let rate = if span.is_zero() { 0.0 } else { recent.len() as f64 / span.as_secs_f64() };
        let ttft_p99 = (!ttfts.is_empty()).then(|| Distribution::of(ttfts).percentile(99.0));
        RecentStats { rate, ttft_p99 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn recent_statistics_cover_the_last_window() {
        let progress = Progress::default();
        for ttft in [5.0, 5.0] {
            progress.record_sent();
            progress.record_ended(Some(ttft), false);
        }
        tokio::time::advance(WINDOW + Duration::from_secs(1)).await;
        progress.record_sent();
        progress.record_sent();
        progress.record_ended(Some(0.25), false);
        progress.record_ended(None, true);
        assert_eq!(progress.recent_ttfts(), [0.25], "the old ones are still in memory");
        let now = progress.now(WINDOW * 2);
        assert_eq!((now.rate, now.ttft_p99), (0.2, Some(0.25)));
        assert_eq!((progress.in_flight(), progress.failed.load(Relaxed)), (0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_ring_is_bounded_and_a_young_run_has_a_short_window() {
        let progress = Progress::default();
        assert_eq!(progress.now(Duration::ZERO), RecentStats::default());
        for _ in 0..RECENT + 10 {
            progress.record_ended(None, false);
        }
        assert_eq!(progress.recent.lock().len(), RECENT);
        let young = Progress::default();
        young.record_ended(Some(1.0), false);
        assert_eq!(young.now(Duration::from_secs(2)).rate, 0.5);
    }
}
