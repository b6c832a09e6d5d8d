//! Metrics of the engines that the gateway runs.
//!
//! They are read at scrape time from a view that `serve` passes in. Engines that another program
//! runs have none. An engine that is no longer configured is absent from the next page.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{MetricFamily, MetricType};

use super::exposition::{describe, family_of};
use super::families;
use super::gauges::{counter_of, gauge};

/// One engine that the gateway runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineMetrics {
    /// The pool of the engine's backend.
    pub pool: String,
    /// The engine's backend.
    pub backend: String,
    /// The engine's phase, one of the phases given to the collector.
    pub phase: String,
    /// Starts after the first, since the gateway started.
    pub restarts: u64,
    /// How often the engine died, hung or did not come up, since the gateway started.
    pub crashes: u64,
    /// Start time, seconds since 1970; `None` while no engine runs.
    pub started: Option<f64>,
}

pub(super) struct Engines<F> {
    phases: Vec<&'static str>,
    view: F,
    descs: Vec<Desc>,
}

impl<F: Fn() -> Vec<EngineMetrics> + Send + Sync> Engines<F> {
    pub(super) fn new(phases: Vec<&'static str>, view: F) -> Self {
        let all = [families::ENGINE_RESTARTS, families::ENGINE_CRASHES, families::ENGINE_PHASE, families::ENGINE_START];
        Self { phases, view, descs: all.iter().map(describe).collect() }
    }
}

impl<F: Fn() -> Vec<EngineMetrics> + Send + Sync> Collector for Engines<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let view = (self.view)();
        let (mut restarts, mut crashes, mut phases, mut starts) = (vec![], vec![], vec![], vec![]);
        for engine in &view {
            let labels = [&*engine.pool, &engine.backend];
            restarts.push(counter_of(&families::ENGINE_RESTARTS, &labels, engine.restarts as f64));
            crashes.push(counter_of(&families::ENGINE_CRASHES, &labels, engine.crashes as f64));
            phases.extend(self.phases.iter().map(|phase| {
                let value = f64::from(u8::from(engine.phase == *phase));
                gauge(&families::ENGINE_PHASE, &[&engine.pool, &engine.backend, phase], value)
            }));
            starts.extend(engine.started.map(|started| gauge(&families::ENGINE_START, &labels, started)));
        }
        let all = [
            family_of(&families::ENGINE_RESTARTS, MetricType::COUNTER, restarts),
            family_of(&families::ENGINE_CRASHES, MetricType::COUNTER, crashes),
            family_of(&families::ENGINE_PHASE, MetricType::GAUGE, phases),
            family_of(&families::ENGINE_START, MetricType::GAUGE, starts),
        ];
        all.into_iter().flatten().collect()
    }
}
