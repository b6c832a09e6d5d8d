//! Whether the engine of a silent stream generates for it, as the engine's counters show.
//!
//! Some output takes long: vLLM's tool parsers hold back the arguments of a call until they are
//! complete. Other requests also raise the engine's counters, so growth alone proves nothing. The
//! proof is tokens that no stream has received: since the first look, the engine has generated more
//! tokens than the gateway's streams received, by more than the [slack](WorkEvidence::look) of one
//! token for each request.
//!
//! Looks are taken only while a stream is watched ([`SilenceWatch`]). Without looks or counters
//! nothing is proven.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Looks after which a watch knows whether the engine works. The first one shows where the counters
/// stand.
const LOOKS: u64 = 3;

/// The counters on an engine's metrics page at one look.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineCounters {
    /// Tokens generated since the engine started.
    pub generated: f64,
    /// Requests that run or wait in the engine, if the page shows them.
    pub requests: Option<f64>,
}

/// Whether the engine of a silent stream works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineWork {
    /// The engine has generated tokens that no stream received, the last of them at this time.
    Proven(Instant),
    /// Not known yet.
    Pending,
    /// The engine has not generated such tokens, or hides the counters.
    Unproven,
}

/// Wakes the task that looks at engines.
#[derive(Debug, Default)]
pub(super) struct Bell {
    notify: Notify,
    is_attended: AtomicBool,
}

impl Bell {
    /// Resolves when a stream wants to be watched. From the first call on, streams wait for the
    /// result of looks.
    pub(super) async fn rung(&self) {
        self.is_attended.store(true, Ordering::Relaxed);
        self.notify.notified().await;
    }
}

#[derive(Debug, Default)]
pub(super) struct WorkEvidence {
    watches: AtomicU32,
    /// Tokens that all streams of the engine received while one of them was watched.
    received: AtomicU64,
    looks: Mutex<Looks>,
}

#[derive(Debug, Default)]
struct Looks {
    count: u64,
    /// The page was not readable, or has no counters.
    is_blind: bool,
    /// Tokens generated and received at the look with which later looks are compared.
    base: Option<(f64, u64)>,
    proven_at: Option<Instant>,
}

impl WorkEvidence {
    pub(super) fn is_watched(&self) -> bool {
        self.watches.load(Ordering::Relaxed) > 0
    }

    /// Counts tokens that streams received. Costs one atomic load while no stream is watched.
    pub(super) fn received(&self, tokens: u64) {
        if self.is_watched() {
            self.received.fetch_add(tokens, Ordering::Relaxed);
        }
    }

    /// Evaluates a look; `None`: the page was not usable. `slack`: the number of requests here,
    /// each of which may have one token in transit.
    pub(super) fn look(&self, look: Option<EngineCounters>, slack: u32, now: Instant) {
        let received = self.received.load(Ordering::Relaxed);
        let mut looks = self.looks.lock();
        looks.count += 1;
        looks.is_blind = look.is_none();
        let Some(look) = look else { return };
        match looks.base {
            Some((generated, before)) if look.generated >= generated => {
                let unseen = look.generated - generated - received.saturating_sub(before) as f64;
                if unseen > f64::from(slack) && look.requests != Some(0.0) {
                    looks.proven_at = Some(now);
                    looks.base = Some((look.generated, received));
                }
            }
            // The first look, or the engine has started again.
            _ => looks.base = Some((look.generated, received)),
        }
    }
}

/// While this exists, the gateway reads the counters of a silent stream's engine.
#[derive(Debug)]
pub struct SilenceWatch {
    evidence: Arc<WorkEvidence>,
    begun: Instant,
    looks: u64,
    is_attended: bool,
}

impl SilenceWatch {
    pub(super) fn new(evidence: Arc<WorkEvidence>, bell: &Bell, now: Instant) -> Self {
        let is_attended = bell.is_attended.load(Ordering::Relaxed);
        let mut looks = evidence.looks.lock();
        if evidence.watches.fetch_add(1, Ordering::Relaxed) == 0 {
            // Tokens that streams received until now were not counted.
            looks.base = None;
        }
        let count = looks.count;
        drop(looks);
        bell.notify.notify_one();
        Self { evidence, begun: now, looks: count, is_attended }
    }

    /// The result of the looks since the watch began.
    pub fn work(&self) -> EngineWork {
        let looks = self.evidence.looks.lock();
        match looks.proven_at {
            _ if !self.is_attended || looks.is_blind => EngineWork::Unproven,
            Some(at) if at >= self.begun => EngineWork::Proven(at),
            _ if looks.count < self.looks + LOOKS => EngineWork::Pending,
            _ => EngineWork::Unproven,
        }
    }
}

impl Drop for SilenceWatch {
    fn drop(&mut self) {
        self.evidence.watches.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn seen(generated: f64) -> Option<EngineCounters> {
        Some(EngineCounters { generated, requests: Some(3.0) })
    }

    fn watched() -> (Arc<WorkEvidence>, SilenceWatch, Instant) {
        let now = Instant::now();
        let (evidence, bell) = (Arc::new(WorkEvidence::default()), Bell::default());
        bell.is_attended.store(true, Ordering::Relaxed);
        let watch = SilenceWatch::new(Arc::clone(&evidence), &bell, now);
        (evidence, watch, now)
    }

    #[test]
    fn tokens_that_no_stream_received_prove_work_and_those_of_others_do_not() {
        let (evidence, watch, now) = watched();
        let at = |second| now + Duration::from_secs(second);
        evidence.look(seen(100.0), 3, at(1));
        evidence.received(40);
        evidence.look(seen(143.0), 3, at(2));
        assert_eq!(watch.work(), EngineWork::Pending, "a token of each request may be on its way");
        evidence.received(60);
        evidence.look(seen(203.0), 3, at(3));
        assert_eq!(watch.work(), EngineWork::Unproven, "all others' tokens");
        evidence.look(seen(210.0), 3, at(4));
        assert_eq!(watch.work(), EngineWork::Proven(at(4)));
        evidence.look(Some(EngineCounters { generated: 300.0, requests: Some(0.0) }), 3, at(5));
        assert_eq!(watch.work(), EngineWork::Proven(at(4)), "nothing runs there");
    }

    #[test]
    fn slow_work_adds_up_and_a_new_engine_begins_anew() {
        let (evidence, watch, now) = watched();
        (0..4).for_each(|look| evidence.look(seen(f64::from(look)), 2, now));
        assert_eq!(watch.work(), EngineWork::Proven(now));
        let (evidence, watch, now) = watched();
        [900.0, 5.0, 6.0].into_iter().for_each(|generated| evidence.look(seen(generated), 2, now));
        assert_eq!(watch.work(), EngineWork::Unproven);
    }

    #[test]
    fn nothing_is_proven_without_looks_or_counters() {
        let now = Instant::now();
        let evidence = Arc::new(WorkEvidence::default());
        assert_eq!(SilenceWatch::new(Arc::clone(&evidence), &Bell::default(), now).work(), EngineWork::Unproven);
        assert!(!evidence.is_watched());
        let (evidence, watch, now) = watched();
        assert_eq!(watch.work(), EngineWork::Pending);
        evidence.look(None, 1, now);
        assert_eq!(watch.work(), EngineWork::Unproven);
    }
}
