//! Requests by the backend and by the key, so that one slow engine or one busy client is visible.
//!
//! A request counts at the backend of the last attempt, and an attempt that was repeated at the
//! backend that failed. Times are the engine's: TTFT from the time at which the request had been
//! sent, without the queue of the gateway. Histograms have few buckets, because there are many of
//! them.
//!
//! Bounds: [`BACKENDS_MAX`] pairs of backend and class; further classes of a backend count
//! together as "all". [`KEYS_MAX`] keys, in the order of their first requests; further keys count
//! together as "other". Names of earlier configurations count too.

use std::sync::Arc;

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, Registry};

use super::families;
use super::series::{Bounded, counters, histograms, outcome_index};
use crate::flow::{Outcome, Record};

/// The most pairs of a backend and a class.
const BACKENDS_MAX: usize = 600;
/// The most pairs of a key and a class.
const KEYS_MAX: usize = 300;
/// The class beyond the bound.
const ALL: &str = "all";
/// The key beyond the bound.
const OTHER: &str = "other";

type Name = Option<Arc<str>>;

/// The series of backends and keys.
pub(super) struct ByEngine {
    requests: IntCounterVec,
    retries: IntCounterVec,
    ttft: HistogramVec,
    tpot: HistogramVec,
    backends: Bounded<[Name; 3], BackendSeries>,
    key_requests: IntCounterVec,
    key_prompt: IntCounterVec,
    key_generation: IntCounterVec,
    key_wait: HistogramVec,
    key_ttft: HistogramVec,
    keys: Bounded<[Name; 2], KeySeries>,
}

struct BackendSeries {
    outcomes: [IntCounter; Outcome::LABELS.len()],
    ttft: Histogram,
    tpot: Histogram,
}

struct KeySeries {
    outcomes: [IntCounter; Outcome::LABELS.len()],
    prompt: IntCounter,
    generation: IntCounter,
    wait: Histogram,
    ttft: Histogram,
}

impl ByEngine {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            requests: counters(registry, &families::BACKEND_REQUESTS),
            retries: counters(registry, &families::BACKEND_RETRIES),
            ttft: histograms(registry, &families::BACKEND_TTFT),
            tpot: histograms(registry, &families::BACKEND_TPOT),
            backends: Bounded::new(BACKENDS_MAX),
            key_requests: counters(registry, &families::KEY_REQUESTS),
            key_prompt: counters(registry, &families::KEY_PROMPT_TOKENS),
            key_generation: counters(registry, &families::KEY_GENERATION_TOKENS),
            key_wait: histograms(registry, &families::KEY_QUEUE_WAIT),
            key_ttft: histograms(registry, &families::KEY_TTFT),
            keys: Bounded::new(KEYS_MAX),
        }
    }

    /// Counts a finished request.
    pub(super) fn count(&self, record: &Record) {
        for (reason, backend) in record.retries.iter().zip(&record.retried_on) {
            let pool = record.pool.as_deref().unwrap_or_default();
            self.retries.with_label_values(&[pool, backend, reason.label()]).inc();
        }
        if record.backend.is_some() {
            self.count_at_backend(record);
        }
        if record.key.is_some() {
            self.count_at_key(record);
        }
    }

    fn count_at_backend(&self, record: &Record) {
        let name = [record.pool.clone(), record.backend.clone(), record.class.clone()];
        let all = || [record.pool.clone(), record.backend.clone(), Some(ALL.into())];
        let series = self.backends.get(name, all, |[pool, backend, class]| {
            let (pool, backend, class) = (text(pool), text(backend), text(class));
            BackendSeries {
                outcomes: Outcome::LABELS
                    .map(|outcome| self.requests.with_label_values(&[pool, backend, class, outcome])),
                ttft: self.ttft.with_label_values(&[pool, backend, class]),
                tpot: self.tpot.with_label_values(&[pool, backend, class]),
            }
        });
        series.outcomes[outcome_index(record.outcome)].inc();
        // While the engine was not read, the client held it up.
        if !record.generates() || record.held_up {
            return;
        }
        if let Some(ttft) = record.backend_ttft {
            series.ttft.observe(ttft.as_secs_f64());
        }
        let tpot = record.stats.as_ref().and_then(|stats| stats.tpot);
        if let Some(tpot) = tpot.filter(|_| record.outcome == Outcome::Completed) {
            series.tpot.observe(tpot.as_secs_f64());
        }
    }

    fn count_at_key(&self, record: &Record) {
        let name = [record.key.clone(), record.class.clone()];
        let other = || [Some(OTHER.into()), Some(ALL.into())];
        let series = self.keys.get(name, other, |[key, class]| {
            let (key, class) = (text(key), text(class));
            KeySeries {
                outcomes: Outcome::LABELS.map(|outcome| self.key_requests.with_label_values(&[key, class, outcome])),
                prompt: self.key_prompt.with_label_values(&[key, class]),
                generation: self.key_generation.with_label_values(&[key, class]),
                wait: self.key_wait.with_label_values(&[key]),
                ttft: self.key_ttft.with_label_values(&[key, class]),
            }
        });
        series.outcomes[outcome_index(record.outcome)].inc();
        series.prompt.inc_by(record.prompt_tokens());
        series.generation.inc_by(record.generated_tokens());
        if record.home.is_some() {
            series.wait.observe(record.queue_wait.as_secs_f64());
        }
        let ttft = record.stats.as_ref().filter(|_| record.generates()).and_then(|stats| stats.ttft);
        if let Some(ttft) = ttft {
            series.ttft.observe(ttft.as_secs_f64());
        }
    }
}

fn text(name: &Name) -> &str {
    name.as_deref().unwrap_or_default()
}
