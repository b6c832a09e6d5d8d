//! Metrics of the number of engines that pools should have, read at scrape time from a view that
//! `serve` passes in.
//!
//! For KEDA or an HPA. Each gateway of a pool reports by the load that it sees: the largest number
//! counts. Pools without an `autoscale` table have none.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{MetricFamily, MetricType};

use super::exposition::{describe, family_of};
use super::families;
use super::gauges::gauge;

/// The engines that one pool should have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolEngines {
    /// The name of the pool.
    pub pool: String,
    /// Engines that the pool should have.
    pub wanted: u32,
    /// Expected time from the order of an engine to the engine's first request, seconds.
    pub start_seconds: f64,
}

pub(super) struct Wanted<F> {
    view: F,
    descs: Vec<Desc>,
}

impl<F: Fn() -> Vec<PoolEngines> + Send + Sync> Wanted<F> {
    pub(super) fn new(view: F) -> Self {
        let all = [families::ENGINES_WANTED, families::ENGINE_START_EXPECTED];
        Self { view, descs: all.iter().map(describe).collect() }
    }
}

impl<F: Fn() -> Vec<PoolEngines> + Send + Sync> Collector for Wanted<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let view = (self.view)();
        let of = |family, value: fn(&PoolEngines) -> f64| {
            view.iter().map(|pool| gauge(family, &[&*pool.pool], value(pool))).collect::<Vec<_>>()
        };
        let wanted = of(&families::ENGINES_WANTED, |pool| f64::from(pool.wanted));
        let starts = of(&families::ENGINE_START_EXPECTED, |pool| pool.start_seconds);
        let all = [
            family_of(&families::ENGINES_WANTED, MetricType::GAUGE, wanted),
            family_of(&families::ENGINE_START_EXPECTED, MetricType::GAUGE, starts),
        ];
        all.into_iter().flatten().collect()
    }
}
