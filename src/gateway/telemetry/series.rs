//! The series of each combination of label values, resolved once.
//!
//! Looking up a child of a Prometheus vector hashes every label value under a lock, and a request
//! touches about ten. So the children of one combination (pool, model, arm, class) are kept
//! together, and one look-up finds them all.
//!
//! Bounds: [`MAX_SERIES`], [`MAX_HISTORIES`], [`MAX_POOLS_SEEN`]. Beyond that, requests count under
//! the label "other" everywhere, so totals stay right. [`super::merge`] lets combinations share
//! series. One combination takes about 6 KiB.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use foldhash::quality::RandomState;
use parking_lot::RwLock;
use prometheus::core::{Atomic, GenericGaugeVec};
use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry};
use tokio::time::Instant;

use super::buckets::{GapCounts, GapHistograms};
use super::exemplars::{Exemplars, TracedHistogram};
use super::exposition::pairs;
use super::families::{self, Family, MetricKind};
use super::history_report::PairHistory;
use super::merge::Merge;
use super::recent::Recent;
use crate::flow::record::RetryReason;
use crate::flow::routing_table::OTHER;
use crate::flow::{Outcome, Record};
use sluice_config::Config;
use sluice_core::openai::{Route, ShedReason};

/// The most combinations of pool, model, arm and class: 12 MiB if many reloads bring new names.
const MAX_SERIES: usize = 2_048;
/// The most pools: four times as many as one configuration may have, because of reloads.
const MAX_POOLS_SEEN: usize = 256;
/// The most pairs of class and pool for which the last hour is kept. A pair usually takes 200 KiB,
/// and at most 1.1 MiB.
const MAX_HISTORIES: usize = 64;
/// The most names of earlier configurations; a reload that exceeds it resets the counters.
const RETIRED_MAX: usize = 16;
const NO_ROUTE: &str = "unknown";
const OUTCOMES: usize = Outcome::LABELS.len();
const ROUTES: usize = Route::ALL.len() + 1;

/// The key of a combination; `None` is an empty label.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SeriesLabels {
    pool: Option<Arc<str>>,
    home: Option<Arc<str>>,
    model: Option<Arc<str>>,
    arm: Option<Arc<str>>,
    class: Option<Arc<str>>,
}

impl SeriesLabels {
    pub(super) fn of(record: &Record) -> Self {
        Self {
            pool: record.pool.clone().or_else(|| record.home.clone()),
            home: record.home.clone(),
            model: record.model.clone(),
            arm: record.arm.clone(),
            class: record.class.clone(),
        }
    }

    fn other() -> Self {
        let other: Option<Arc<str>> = Some(OTHER.into());
        let other = || other.clone();
        Self { pool: other(), home: other(), model: other(), arm: other(), class: other() }
    }
}

fn text(label: &Option<Arc<str>>) -> &str {
    label.as_deref().unwrap_or_default()
}

pub(super) struct Series {
    pub(super) ttft: TracedHistogram,
    pub(super) tpot: TracedHistogram,
    duration: TracedHistogram,
    other_duration: [OnceLock<TracedHistogram>; ROUTES],
    pub(super) itl: Arc<GapCounts>,
    pub(super) prompt: IntCounter,
    pub(super) cached: IntCounter,
    pub(super) expected_cached: IntCounter,
    pub(super) generation: IntCounter,
    pub(super) estimate_ratio: Histogram,
    /// Set only if the pool is not the home.
    pub(super) spill: Option<IntCounter>,
    pub(super) home: Arc<PoolSeries>,
    pub(super) ran_in: Arc<PoolSeries>,
    pub(super) queue_wait: TracedHistogram,
    /// Requests that met the objectives (first entry) and that missed them (second entry); for each
    /// the counters of the pool and by class.
    slo: [OnceLock<[IntCounter; 2]>; 2],
    pub(super) history: Arc<PairHistory>,
    labels: SeriesLabels,
    requests: [OnceLock<IntCounter>; ROUTES * OUTCOMES],
}

pub(super) struct PoolSeries {
    pub(super) name: Arc<str>,
    pub(super) shed: [IntCounter; ShedReason::ALL.len()],
    pub(super) retries: [IntCounter; RetryReason::ALL.len()],
    pub(super) recent: Recent,
}

impl PoolSeries {
    pub(super) fn shed(&self, reason: ShedReason) -> &IntCounter {
        &self.shed[ShedReason::ALL.iter().position(|one| *one == reason).unwrap_or(0)]
    }

    pub(super) fn retried(&self, reason: RetryReason) -> &IntCounter {
        &self.retries[RetryReason::ALL.iter().position(|one| *one == reason).unwrap_or(0)]
    }
}

pub(super) struct SeriesTable {
    requests: IntCounterVec,
    ttft: HistogramVec,
    tpot: HistogramVec,
    duration: HistogramVec,
    other_duration: HistogramVec,
    itl: GapHistograms,
    queue_wait: HistogramVec,
    prompt: IntCounterVec,
    cached: IntCounterVec,
    expected_cached: IntCounterVec,
    generation: IntCounterVec,
    estimate_ratio: HistogramVec,
    shed: IntCounterVec,
    spill: IntCounterVec,
    retries: IntCounterVec,
    slo: IntCounterVec,
    class_slo: IntCounterVec,
    pub(super) exemplars: Exemplars,
    series: Bounded<SeriesLabels, Series>,
    pools: Bounded<Option<Arc<str>>, PoolSeries>,
    histories: Bounded<[Option<Arc<str>>; 2], PairHistory>,
    merge: RwLock<Merge>,
    /// Names of pools, models and classes in force, and of at most [`RETIRED_MAX`] earlier ones.
    names: RwLock<HashSet<String>>,
}

impl SeriesTable {
    pub(super) fn new(registry: &Registry) -> Self {
        let itl = GapHistograms::new(families::INTER_TOKEN_LATENCY);
        register(registry, itl.clone());
        Self {
            requests: counters(registry, &families::REQUESTS),
            ttft: histograms(registry, &families::TIME_TO_FIRST_TOKEN),
            tpot: histograms(registry, &families::TIME_PER_OUTPUT_TOKEN),
            duration: histograms(registry, &families::REQUEST_DURATION),
            other_duration: histograms(registry, &families::OTHER_REQUEST_DURATION),
            itl,
            queue_wait: histograms(registry, &families::QUEUE_WAIT_SECONDS),
            prompt: counters(registry, &families::PROMPT_TOKENS),
            cached: counters(registry, &families::CACHED_TOKENS),
            expected_cached: counters(registry, &families::EXPECTED_CACHED_TOKENS),
            generation: counters(registry, &families::GENERATION_TOKENS),
            estimate_ratio: histograms(registry, &families::ESTIMATE_RATIO),
            shed: counters(registry, &families::SHED),
            spill: counters(registry, &families::SPILL),
            retries: counters(registry, &families::RETRIES),
            slo: counters(registry, &families::SLO_REQUESTS),
            class_slo: counters(registry, &families::CLASS_SLO_REQUESTS),
            exemplars: Exemplars::default(),
            series: Bounded::new(MAX_SERIES),
            pools: Bounded::new(MAX_POOLS_SEEN),
            histories: Bounded::new(MAX_HISTORIES),
            merge: RwLock::default(),
            names: RwLock::default(),
        }
    }

    /// Applies the rules for the size of a configuration. If the rules change, or more than
    /// [`RETIRED_MAX`] names are retired, the metrics with a model or class begin again.
    pub(super) fn configured(&self, config: &Config) {
        let pools = config.pools.iter().map(|pool| format!("pool {}", pool.name));
        let models = config.models.iter().map(|model| format!("model {}", model.name));
        let classes = config.classes.iter().map(|class| format!("class {}", class.name));
        let mut names: HashSet<String> = pools.chain(models).chain(classes).collect();
        let merge = Merge::of(config);
        let (before, present) = (self.names.read().clone(), names.len());
        let stay = *self.merge.read() == merge && before.union(&names).count() <= present + RETIRED_MAX;
        self.histories.retain(|[class, pool]| {
            let has = |kind: &str, name: &Option<Arc<str>>| {
                matches!(text(name), "" | OTHER) || names.contains(&format!("{kind} {}", text(name)))
            };
            has("class", class) && has("pool", pool)
        });
        if merge != Merge::default() {
            tracing::info!("some models or classes count together in metrics: see sluice_metrics_merged");
        }
        if stay {
            names.extend(before);
        }
        (*self.merge.write(), *self.names.write()) = (merge, names);
        if !stay {
            self.begin_again();
        }
    }

    pub(super) fn merge(&self) -> Merge {
        self.merge.read().clone()
    }

    fn begin_again(&self) {
        for vec in
            [&self.ttft, &self.tpot, &self.duration, &self.other_duration, &self.queue_wait, &self.estimate_ratio]
        {
            vec.reset();
        }
        let counters =
            [&self.requests, &self.prompt, &self.cached, &self.expected_cached, &self.generation, &self.class_slo];
        counters.iter().for_each(|vec| vec.reset());
        self.itl.reset();
        self.exemplars.reset();
        // The map is cleared last, because an entry that was made meanwhile may have series that
        // are gone from the page.
        self.series.clear();
    }

    pub(super) fn series(&self, record: &Record) -> Arc<Series> {
        self.series.get(SeriesLabels::of(record), SeriesLabels::other, |labels| self.resolve(labels))
    }

    pub(super) fn pool(&self, name: Option<&Arc<str>>) -> Arc<PoolSeries> {
        self.pools.get(name.cloned(), || Some(OTHER.into()), |name| self.resolve_pool(text(name)))
    }

    pub(super) fn pools(&self) -> Vec<Arc<PoolSeries>> {
        self.pools.all()
    }

    pub(super) fn histories(&self) -> Vec<Arc<PairHistory>> {
        self.histories.all()
    }

    fn history(&self, class: Option<Arc<str>>, pool: Option<Arc<str>>) -> Arc<PairHistory> {
        let other = || [Some(OTHER.into()), Some(OTHER.into())];
        self.histories.get([class, pool], other, |[class, pool]| PairHistory {
            class: class.clone().unwrap_or_default(),
            pool: pool.clone().unwrap_or_default(),
            history: parking_lot::Mutex::default(),
        })
    }

    pub(super) fn requests<'a>(&self, series: &'a Series, record: &Record) -> &'a IntCounter {
        let (route, position) = route(record);
        let index = position * OUTCOMES + outcome_index(record.outcome);
        series.requests[index].get_or_init(|| {
            let (labels, merge) = (&series.labels, self.merge.read());
            let (pool, class) = (text(&labels.pool), merge.class(text(&labels.class)));
            let model = merge.model(pool, text(&labels.model));
            let values = [route, pool, model, text(&labels.arm), record.outcome.label(), class];
            self.requests.with_label_values(&values)
        })
    }

    /// Creates the counters of requests by objectives at zero, so that a rate sees the first step.
    pub(super) fn start_judging(&self, pool: &str, class: &str, model: &str) {
        for result in ["met", "missed"] {
            self.slo.with_label_values(&[pool, result]);
            self.class_slo.with_label_values(&[pool, result, class, model]);
        }
    }

    pub(super) fn count_judged(&self, series: &Series, met: bool) {
        let (labels, result) = (&series.labels, if met { "met" } else { "missed" });
        let counters = series.slo[usize::from(!met)].get_or_init(|| {
            let pool = text(&labels.home);
            let class = [pool, result, text(&labels.class), text(&labels.model)];
            [self.slo.with_label_values(&[pool, result]), self.class_slo.with_label_values(&class)]
        });
        counters.iter().for_each(IntCounter::inc);
    }

    pub(super) fn duration<'a>(&self, series: &'a Series, record: &Record) -> &'a TracedHistogram {
        if record.generates() {
            return &series.duration;
        }
        let (route, position) = route(record);
        series.other_duration[position].get_or_init(|| {
            let pool = text(&series.labels.pool);
            let values = [route, pool, self.merge.read().model(pool, text(&series.labels.model))];
            self.exemplars.histogram(&families::OTHER_REQUEST_DURATION, &self.other_duration, &values)
        })
    }

    fn resolve(&self, labels: &SeriesLabels) -> Series {
        let SeriesLabels { pool, home, model, arm, class } = labels;
        let merge = self.merge.read();
        let (pool, home, arm, class) = (text(pool), text(home), text(arm), merge.class(text(class)));
        let (model, merged) = (text(model), merge.model(pool, text(model)));
        let request = [pool, merged, arm, class];
        let spilled = pool != home;
        Series {
            ttft: self.exemplars.histogram(&families::TIME_TO_FIRST_TOKEN, &self.ttft, &request),
            tpot: self.exemplars.histogram(&families::TIME_PER_OUTPUT_TOKEN, &self.tpot, &request),
            duration: self.exemplars.histogram(&families::REQUEST_DURATION, &self.duration, &request),
            other_duration: [const { OnceLock::new() }; ROUTES],
            itl: self.itl.row(pairs(&families::INTER_TOKEN_LATENCY, &request)),
            prompt: self.prompt.with_label_values(&request),
            cached: self.cached.with_label_values(&[pool, merged, arm]),
            expected_cached: self.expected_cached.with_label_values(&[pool, merged, arm]),
            generation: self.generation.with_label_values(&request),
            estimate_ratio: self.estimate_ratio.with_label_values(&[model]),
            spill: spilled.then(|| self.spill.with_label_values(&[home, pool])),
            home: self.pool(labels.home.as_ref()),
            ran_in: self.pool(labels.pool.as_ref()),
            history: self.history(labels.class.clone(), labels.pool.clone()),
            queue_wait: self.exemplars.histogram(&families::QUEUE_WAIT_SECONDS, &self.queue_wait, &[home, class]),
            slo: [const { OnceLock::new() }; 2],
            labels: labels.clone(),
            requests: [const { OnceLock::new() }; ROUTES * OUTCOMES],
        }
    }

    fn resolve_pool(&self, name: &str) -> PoolSeries {
        PoolSeries {
            name: name.into(),
            shed: ShedReason::ALL.map(|reason| self.shed.with_label_values(&[name, reason.label()])),
            retries: RetryReason::ALL.map(|reason| self.retries.with_label_values(&[name, reason.label()])),
            recent: Recent::new(Instant::now()),
        }
    }
}

fn route(record: &Record) -> (&'static str, usize) {
    match record.route {
        Some(route) => (route.label(), Route::ALL.iter().position(|one| *one == route).unwrap_or(ROUTES - 1)),
        None => (NO_ROUTE, ROUTES - 1),
    }
}

pub(super) fn outcome_index(outcome: Outcome) -> usize {
    match outcome {
        Outcome::Completed => 0,
        Outcome::ClientGone => 1,
        Outcome::Shed(_) => 2,
        Outcome::UpstreamError(_) => 3,
        Outcome::Timeout(_) => 4,
        Outcome::Refused => 5,
    }
}

/// A map that stops growing. Beyond the bound, all new keys share one entry.
pub(super) struct Bounded<K, V> {
    map: DashMap<K, Arc<V>, RandomState>,
    len: AtomicUsize,
    max: usize,
}

impl<K: Clone + Eq + std::hash::Hash, V> Bounded<K, V> {
    pub(super) fn new(max: usize) -> Self {
        Self { map: DashMap::default(), len: AtomicUsize::new(0), max }
    }

    pub(super) fn get(&self, key: K, other: impl FnOnce() -> K, make: impl Fn(&K) -> V) -> Arc<V> {
        if let Some(found) = self.map.get(&key) {
            return Arc::clone(&found);
        }
        let key = if self.len.load(Ordering::Relaxed) < self.max { key } else { other() };
        // `make` must not use this map, because the entry's shard is locked.
        let entry = self.map.entry(key);
        if let dashmap::Entry::Occupied(found) = &entry {
            return Arc::clone(found.get());
        }
        let value = Arc::new(make(entry.key()));
        self.len.fetch_add(1, Ordering::Relaxed);
        Arc::clone(&entry.or_insert(value))
    }

    pub(super) fn entries(&self) -> Vec<(K, Arc<V>)> {
        self.map.iter().map(|entry| (entry.key().clone(), Arc::clone(entry.value()))).collect()
    }

    pub(super) fn retain(&self, is_wanted: impl Fn(&K) -> bool) {
        self.map.retain(|key, _| {
            is_wanted(key) || {
                self.len.fetch_sub(1, Ordering::Relaxed);
                false
            }
        });
    }

    pub(super) fn clear(&self) {
        self.retain(|_| false);
    }

    pub(super) fn keys(&self) -> Vec<K> {
        self.map.iter().map(|entry| entry.key().clone()).collect()
    }

    fn all(&self) -> Vec<Arc<V>> {
        self.map.iter().map(|entry| Arc::clone(entry.value())).collect()
    }
}

// The table of families has valid names without repetition, as tests establish by building a table:
// the errors of the library in the functions below cannot happen.

pub(super) fn register(registry: &Registry, collector: impl prometheus::core::Collector + 'static) {
    registry.register(Box::new(collector)).expect("families are registered once");
}

pub(super) fn counters(registry: &Registry, family: &Family) -> IntCounterVec {
    let vec = IntCounterVec::new(Opts::new(family.name, family.help), family.labels).expect("a valid family");
    register(registry, vec.clone());
    vec
}

pub(super) fn gauges<N: Atomic + 'static>(registry: &Registry, family: &Family) -> GenericGaugeVec<N> {
    let vec = GenericGaugeVec::new(Opts::new(family.name, family.help), family.labels).expect("a valid family");
    register(registry, vec.clone());
    vec
}

pub(super) fn histograms(registry: &Registry, family: &Family) -> HistogramVec {
    let bounds = match family.kind {
        MetricKind::Histogram(bounds) => bounds.to_vec(),
        MetricKind::Counter | MetricKind::Gauge => Vec::new(),
    };
    let opts = HistogramOpts::new(family.name, family.help).buckets(bounds);
    let vec = HistogramVec::new(opts, family.labels).expect("a valid family");
    register(registry, vec.clone());
    vec
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounded_map_puts_what_is_beyond_its_bound_into_one_entry() {
        let map: Bounded<u32, u32> = Bounded::new(2);
        let get = |key| *map.get(key, || 99, |key| *key);
        assert_eq!([get(1), get(2), get(3), get(4), get(1)], [1, 2, 99, 99, 1]);
        assert_eq!(map.all().len(), 3);
        map.retain(|key| *key == 2);
        assert_eq!([get(5), get(6)], [5, 99]);
    }
}
