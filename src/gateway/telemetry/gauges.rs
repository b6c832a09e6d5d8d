//! Values that are read at scrape time: the pools as admission sees them, the attainment of
//! objectives, the process.
//!
//! Nothing is counted here: each scrape prints a snapshot. So a removed backend is absent from the
//! next page, and no gauge can drift.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Counter, Gauge, Metric, MetricFamily, MetricType};

use super::access_log::AccessLogWriter;
use super::exposition::{PoolViews, describe, family_of, pairs};
use super::families::{self, Family};
use super::process;
use crate::pool::{BackendView, PoolView};

pub(super) fn gauge(family: &Family, values: &[&str], value: f64) -> Metric {
    let mut gauge = Gauge::default();
    gauge.set_value(value);
    let mut metric = Metric::from_label(pairs(family, values));
    metric.set_gauge(gauge);
    metric
}

pub(super) fn counter(family: &Family, value: f64) -> Metric {
    counter_of(family, &[], value)
}

pub(super) fn counter_of(family: &Family, values: &[&str], value: f64) -> Metric {
    let mut counter = Counter::default();
    counter.set_value(value);
    let mut metric = Metric::from_label(pairs(family, values));
    metric.set_counter(counter);
    metric
}

/// Families per backend, each with a function that reads the value.
type BackendValue = fn(&BackendView) -> f64;
const BACKEND_GAUGES: [(Family, BackendValue); 5] = [
    (families::IN_FLIGHT, |backend| f64::from(backend.used.requests)),
    (families::SLOTS, |backend| f64::from(backend.limits.slots)),
    (families::OUTSTANDING_TOKENS, |backend| backend.used.tokens as f64),
    (families::PREFILL_TOKENS, |backend| backend.used.prefill_tokens as f64),
    (families::LONG_PREFILLS, |backend| f64::from(backend.used.long_prefills)),
];

/// The collector of all values that are read at scrape time.
pub(super) struct Scrape {
    pools: PoolViews,
    attainment: Box<dyn Fn() -> Vec<(String, f64)> + Send + Sync>,
    access_log_dropped: Box<dyn Fn() -> u64 + Send + Sync>,
    descs: Vec<Desc>,
}

impl Scrape {
    pub(super) fn new(
        pools: PoolViews,
        attainment: impl Fn() -> Vec<(String, f64)> + Send + Sync + 'static,
        access_log_dropped: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Self {
        let own = [
            families::BACKEND_PREFILL_RATE,
            families::LONG_PREFILLS_MAX,
            families::CLUSTER_SHARE,
            families::QUEUE_LENGTH,
            families::QUEUE_LENGTH_MAX,
            families::BACKEND_STATE,
            families::SLO_ATTAINMENT,
            families::ACCESS_LOG_DROPPED,
            families::BUILD_INFO,
            families::PROCESS_CPU,
            families::PROCESS_RESIDENT,
            families::PROCESS_OPEN_FDS,
            families::PROCESS_MAX_FDS,
            families::PROCESS_START,
        ];
        let descs = BACKEND_GAUGES.iter().map(|(family, _)| family).chain(&own).map(describe).collect();
        let (attainment, access_log_dropped) = (Box::new(attainment), Box::new(access_log_dropped));
        Self { pools, attainment, access_log_dropped, descs }
    }

    fn pages(&self) -> Vec<Option<MetricFamily>> {
        let pools = (self.pools)();
        let mut pages: Vec<Option<MetricFamily>> = BACKEND_GAUGES
            .iter()
            .map(|(family, read)| {
                let each = backends(&pools).map(|(pool, b)| gauge(family, &[&pool.name, &b.name], read(b)));
                family_of(family, MetricType::GAUGE, each.collect())
            })
            .collect();
        let rates = backends(&pools).filter(|(_, backend)| backend.prefill_seen.is_some());
        let rates = rates.map(|(pool, b)| gauge(&families::BACKEND_PREFILL_RATE, &[&pool.name, &b.name], b.prefill_rate));
        pages.push(family_of(&families::BACKEND_PREFILL_RATE, MetricType::GAUGE, rates.collect()));
        let waiting = pools.iter().map(|p| gauge(&families::QUEUE_LENGTH, &[&p.name], p.queue_length as f64)).collect();
        pages.push(family_of(&families::QUEUE_LENGTH, MetricType::GAUGE, waiting));
        pages.push(family_of(&families::QUEUE_LENGTH_MAX, MetricType::GAUGE, pools.iter().map(queue_limit).collect()));
        pages.push(family_of(&families::LONG_PREFILLS_MAX, MetricType::GAUGE, permits(&pools)));
        pages.push(family_of(&families::CLUSTER_SHARE, MetricType::GAUGE, shares(&pools)));
        pages.push(family_of(&families::BACKEND_STATE, MetricType::GAUGE, states(&pools)));
        let attained = (self.attainment)();
        let attained = attained.iter().map(|(pool, share)| gauge(&families::SLO_ATTAINMENT, &[pool], *share)).collect();
        pages.push(family_of(&families::SLO_ATTAINMENT, MetricType::GAUGE, attained));
        let dropped = counter(&families::ACCESS_LOG_DROPPED, (self.access_log_dropped)() as f64);
        pages.push(family_of(&families::ACCESS_LOG_DROPPED, MetricType::COUNTER, vec![dropped]));
        let version = gauge(&families::BUILD_INFO, &[env!("CARGO_PKG_VERSION")], 1.0);
        pages.push(family_of(&families::BUILD_INFO, MetricType::GAUGE, vec![version]));
        pages.extend(process_pages());
        pages
    }
}

fn backends(pools: &[PoolView]) -> impl Iterator<Item = (&PoolView, &BackendView)> {
    pools.iter().flat_map(|pool| distinct(pool).map(move |backend| (pool, backend)))
}

/// One backend per name: while a backend that moved drains, only its successor is shown.
fn distinct(pool: &PoolView) -> impl Iterator<Item = &BackendView> {
    pool.backends.iter().enumerate().filter_map(|(index, backend)| {
        let same = |other: &&BackendView| other.name == backend.name;
        let hidden = if backend.removed {
            pool.backends
                .iter()
                .enumerate()
                .any(|(at, other)| at != index && same(&other) && (!other.removed || at < index))
        } else {
            false
        };
        (!hidden).then_some(backend)
    })
}

fn queue_limit(pool: &PoolView) -> Metric {
    gauge(&families::QUEUE_LENGTH_MAX, &[&pool.name], pool.queue_limit as f64)
}

fn permits(pools: &[PoolView]) -> Vec<Metric> {
    let limited = backends(pools).filter_map(|(pool, backend)| {
        let permits = f64::from(backend.limits.long_prefix?.slots);
        Some(gauge(&families::LONG_PREFILLS_MAX, &[&pool.name, &backend.name], permits))
    });
    limited.collect()
}

/// The gateway's share in a ledger, for each unit that is limited.
fn shares(pools: &[PoolView]) -> Vec<Metric> {
    let each = backends(pools).flat_map(|(pool, backend)| {
        let units = backend.share_of_limits();
        units
            .into_iter()
            .map(move |(unit, share)| gauge(&families::CLUSTER_SHARE, &[&pool.name, &backend.name, unit], share as f64))
    });
    each.collect()
}

fn states(pools: &[PoolView]) -> Vec<Metric> {
    let each = backends(pools).flat_map(|(pool, backend)| {
        BackendView::STATES.iter().map(move |state| {
            let value = f64::from(u8::from(backend.state() == *state));
            gauge(&families::BACKEND_STATE, &[&pool.name, &backend.name, state], value)
        })
    });
    each.collect()
}

/// Empty on systems other than Linux.
fn process_pages() -> Vec<Option<MetricFamily>> {
    let Some(now) = process::read() else { return Vec::new() };
    let one = |family: &Family, value: f64| family_of(family, MetricType::GAUGE, vec![gauge(family, &[], value)]);
    let cpu = counter(&families::PROCESS_CPU, now.cpu_seconds);
    vec![
        family_of(&families::PROCESS_CPU, MetricType::COUNTER, vec![cpu]),
        one(&families::PROCESS_RESIDENT, now.resident_bytes as f64),
        one(&families::PROCESS_OPEN_FDS, now.open_fds as f64),
        one(&families::PROCESS_MAX_FDS, now.max_fds as f64),
        one(&families::PROCESS_START, now.start_seconds),
    ]
}

impl Collector for Scrape {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.pages().into_iter().flatten().collect()
    }
}

pub(super) struct Dropped {
    family: Family,
    log: AccessLogWriter,
    desc: Desc,
}

impl Dropped {
    pub(super) fn new(family: Family, log: AccessLogWriter) -> Self {
        Self { desc: describe(&family), family, log }
    }
}

impl Collector for Dropped {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let dropped = counter(&self.family, self.log.dropped() as f64);
        family_of(&self.family, MetricType::COUNTER, vec![dropped]).into_iter().collect()
    }
}
