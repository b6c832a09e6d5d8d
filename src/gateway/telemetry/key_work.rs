//! Metrics of the engine time and the waiting requests of API keys in fair pools.
//!
//! They are read at scrape time from a view that `serve` passes in, so that a request costs
//! nothing.
//!
//! Bounds: the keys of the configuration.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{MetricFamily, MetricType};

use super::exposition::{describe, family_of};
use super::families;
use super::gauges::{counter_of, gauge};
use crate::flow::owner::KeyWork;

pub(super) struct KeysWork<F> {
    view: F,
    descs: Vec<Desc>,
}

impl<F: Fn() -> Vec<KeyWork> + Send + Sync> KeysWork<F> {
    pub(super) fn new(view: F) -> Self {
        Self { view, descs: [&families::KEY_WORK, &families::KEY_WAITING].map(describe).into() }
    }
}

impl<F: Fn() -> Vec<KeyWork> + Send + Sync> Collector for KeysWork<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let keys = (self.view)();
        let work = keys.iter().map(|on| counter_of(&families::KEY_WORK, &[&on.pool, &on.key], on.seconds)).collect();
        let waiting = keys.iter().map(|on| gauge(&families::KEY_WAITING, &[&on.pool, &on.key], on.waiting as f64));
        let pages = [
            family_of(&families::KEY_WORK, MetricType::COUNTER, work),
            family_of(&families::KEY_WAITING, MetricType::GAUGE, waiting.collect()),
        ];
        pages.into_iter().flatten().collect()
    }
}
