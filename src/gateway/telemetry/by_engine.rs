//! Requests by the backend and by the key, so that one slow engine or one busy client is visible.
//!
//! A request counts at the backend of the last attempt. A repeated attempt counts as a retry at the
//! backend that failed. TTFT of a backend excludes the gateway's queue; TTFT of a key includes it.
//! There are many histograms, so each has few buckets. [`super::merge`] decides when classes count
//! together.
//!
//! Bounds: [`ENTRIES_MAX`] entries of each kind; further requests count as "other". Backends that
//! left their pools and keys that left the configuration are forgotten.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, Registry};

use super::families;
use super::merge::{ALL_CLASSES, BACKENDS};
use super::series::{Bounded, counters, histograms, outcome_index};
use crate::flow::routing_table::OTHER;
use crate::flow::{Outcome, Record};
use crate::pool::PoolView;
use sluice_config::Config;

/// The most entries of each kind: as many as a configuration may have backends.
const ENTRIES_MAX: usize = 1_024;

type Name = Option<Arc<str>>;

/// The series of backends and keys.
pub(super) struct ByEngine {
    requests: IntCounterVec,
    retries: IntCounterVec,
    ttft: HistogramVec,
    tpot: HistogramVec,
    backends: Bounded<[Name; 3], BackendSeries>,
    /// Repeated attempts by pool, backend and reason.
    retried: Bounded<[Name; 3], IntCounter>,
    classes: AtomicUsize,
    merges_classes: AtomicBool,
    merges_classes_of_keys: AtomicBool,
    /// The label of merged classes.
    all_classes: Name,
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
            backends: Bounded::new(ENTRIES_MAX),
            retried: Bounded::new(ENTRIES_MAX),
            classes: AtomicUsize::new(1),
            merges_classes: AtomicBool::new(false),
            merges_classes_of_keys: AtomicBool::new(false),
            all_classes: Some(ALL_CLASSES.into()),
            key_requests: counters(registry, &families::KEY_REQUESTS),
            key_prompt: counters(registry, &families::KEY_PROMPT_TOKENS),
            key_generation: counters(registry, &families::KEY_GENERATION_TOKENS),
            key_wait: histograms(registry, &families::KEY_QUEUE_WAIT),
            key_ttft: histograms(registry, &families::KEY_TTFT),
            keys: Bounded::new(ENTRIES_MAX),
        }
    }

    /// Applies the rules for the size of a configuration, and forgets keys and classes that it does
    /// not have.
    pub(super) fn configured(&self, config: &Config, merge_keys: bool) {
        self.classes.store(config.classes.len().max(1), Ordering::Relaxed);
        let backends = config.pools.iter().map(|pool| pool.backends.len()).sum();
        self.merge_classes(backends);
        let classes: HashSet<&str> = config.classes.iter().map(|class| class.name.as_str()).collect();
        let is_class = |class: &Name| matches!(text(class), "" | OTHER | ALL_CLASSES) || classes.contains(text(class));
        self.keep_backends(|[_, _, class]| is_class(class));
        let stay = self.keys.keys().iter().all(|[_, class]| is_class(class));
        if self.merges_classes_of_keys.swap(merge_keys, Ordering::Relaxed) != merge_keys || !stay {
            self.keep_keys(|_| false);
        }
        let keys: HashSet<&str> = config.auth.keys.iter().map(|key| key.name.as_str()).collect();
        self.keep_keys(|[key, _]| keys.contains(text(key)));
    }

    /// Whether each backend has one series for all classes, because there are too many pairs.
    pub(super) fn merges_classes(&self) -> bool {
        self.merges_classes.load(Ordering::Relaxed)
    }

    /// Forgets backends that are in no pool any more. `view` is called after the backends that have
    /// series were listed, so that a backend that joins meanwhile is not forgotten.
    pub(super) fn follow(&self, view: impl FnOnce() -> Vec<PoolView>) -> Vec<PoolView> {
        let listed = self.backends.keys().into_iter().chain(self.retried.keys());
        let listed = listed.map(|[pool, backend, _]| [pool, backend]);
        let listed: HashSet<[Name; 2]> = listed.filter(|name| name.iter().any(|part| text(part) != OTHER)).collect();
        let pools = view();
        let names = |pool: &PoolView| {
            pool.backends.iter().map(|own| [Arc::clone(&pool.name), Arc::clone(&own.name)]).collect::<Vec<_>>()
        };
        let present: HashSet<[Name; 2]> = pools.iter().flat_map(names).map(|name| name.map(Some)).collect();
        if !self.merges_classes() {
            self.merge_classes(present.len());
        }
        let gone: HashSet<&[Name; 2]> = listed.difference(&present).collect();
        if !gone.is_empty() {
            let stays = |[pool, backend, _]: &[Name; 3]| !gone.contains(&[pool.clone(), backend.clone()]);
            self.keep_backends(stays);
            self.retried.retain(|name| {
                stays(name) || {
                    let _ = self.retries.remove_label_values(&name.each_ref().map(text));
                    false
                }
            });
        }
        pools
    }

    fn merge_classes(&self, backends: usize) {
        let merge = backends * self.classes.load(Ordering::Relaxed) > BACKENDS;
        if self.merges_classes.swap(merge, Ordering::Relaxed) != merge {
            self.keep_backends(|_| false);
        }
    }

    /// Forgets all pairs of backend and class that are not wanted.
    fn keep_backends(&self, is_wanted: impl Fn(&[Name; 3]) -> bool) {
        self.backends.retain(|name| {
            is_wanted(name) || {
                let [pool, backend, class] = name.each_ref().map(text);
                for outcome in Outcome::LABELS {
                    let _ = self.requests.remove_label_values(&[pool, backend, class, outcome]);
                }
                let _ = self.ttft.remove_label_values(&[pool, backend, class]);
                let _ = self.tpot.remove_label_values(&[pool, backend, class]);
                false
            }
        });
    }

    /// Forgets all pairs of key and class that are not wanted. All pairs of a key share one
    /// histogram of waits.
    fn keep_keys(&self, is_wanted: impl Fn(&[Name; 2]) -> bool) {
        self.keys.retain(|name| {
            is_wanted(name) || {
                let [key, class] = name.each_ref().map(text);
                for outcome in Outcome::LABELS {
                    let _ = self.key_requests.remove_label_values(&[key, class, outcome]);
                }
                let _ = self.key_prompt.remove_label_values(&[key, class]);
                let _ = self.key_generation.remove_label_values(&[key, class]);
                let _ = self.key_ttft.remove_label_values(&[key, class]);
                let _ = self.key_wait.remove_label_values(&[key]);
                false
            }
        });
    }

    /// Counts a finished request.
    pub(super) fn count(&self, record: &Record) {
        for (reason, [pool, backend]) in record.retries.iter().zip(&record.retried_on) {
            let name = [Some(pool.clone()), Some(backend.clone()), Some(reason.label().into())];
            let other = || [Some(OTHER.into()), Some(OTHER.into()), Some(reason.label().into())];
            self.retried.get(name, other, |name| self.retries.with_label_values(&name.each_ref().map(text))).inc();
        }
        if record.backend.is_some() {
            self.count_at_backend(record);
        }
        if record.key.is_some() {
            self.count_at_key(record);
        }
    }

    fn count_at_backend(&self, record: &Record) {
        let class = if self.merges_classes() { self.all_classes.clone() } else { record.class.clone() };
        let other = || [Some(OTHER.into()), Some(OTHER.into()), self.all_classes.clone()];
        let series = self.backends.get([record.pool.clone(), record.backend.clone(), class], other, |name| {
            let labels @ [pool, backend, class] = name.each_ref().map(text);
            BackendSeries {
                outcomes: Outcome::LABELS
                    .map(|outcome| self.requests.with_label_values(&[pool, backend, class, outcome])),
                ttft: self.ttft.with_label_values(&labels),
                tpot: self.tpot.with_label_values(&labels),
            }
        });
        series.outcomes[outcome_index(record.outcome)].inc();
        // A slow client held the engine up, so the times say nothing about the engine.
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
        let is_merged = self.merges_classes_of_keys.load(Ordering::Relaxed);
        let class = if is_merged { self.all_classes.clone() } else { record.class.clone() };
        let other = || [Some(OTHER.into()), self.all_classes.clone()];
        let series = self.keys.get([record.key.clone(), class], other, |name| {
            let labels @ [key, class] = name.each_ref().map(text);
            KeySeries {
                outcomes: Outcome::LABELS.map(|outcome| self.key_requests.with_label_values(&[key, class, outcome])),
                prompt: self.key_prompt.with_label_values(&labels),
                generation: self.key_generation.with_label_values(&labels),
                wait: self.key_wait.with_label_values(&[key]),
                ttft: self.key_ttft.with_label_values(&labels),
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
