//! Metrics of the engines that the gateway runs, of the number of engines that pools should have,
//! and of the pages that engines show themselves.
//!
//! Read at scrape time from views that `serve` passes in. Engines that another program runs have
//! only the values of their own pages. The wanted numbers of pools with `autoscale` are for KEDA or
//! an HPA. Each gateway of a pool reports a number from the load that it sees, and the largest
//! number counts.

use super::exposition::Page;
use super::families::{self, Family};

/// One engine that the gateway runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineMetrics {
    /// The pool of the engine's backend.
    pub pool: String,
    /// The engine's backend.
    pub backend: String,
    /// The engine's phase, which is 1 in the metric, while every other phase is 0.
    pub phase: String,
    /// Number of starts of the engine since the gateway started, without the first one.
    pub restarts: u64,
    /// How often the engine died, hung or did not come up, since the gateway started.
    pub crashes: u64,
    /// How often the engine woke from sleep.
    pub wakes: u64,
    /// Duration of the last wake.
    pub wake_seconds: Option<f64>,
    /// Start time, seconds since 1970; `None` while no engine runs.
    pub started: Option<f64>,
}

/// The engines that one pool should have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolEngines {
    /// The name of the pool.
    pub pool: String,
    /// Engines that the pool should have.
    pub wanted: u32,
    /// Expected time from the order of an engine to its first request, seconds.
    pub start_seconds: f64,
}

/// The last metrics page of a backend's engine, summed over the engine's ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EnginePage {
    /// The pool of the backend.
    pub pool: String,
    /// The backend.
    pub backend: String,
    /// Requests that run.
    pub running: f64,
    /// Requests that wait.
    pub waiting: f64,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_usage: f64,
    /// Preemptions since the engine's start.
    pub preemptions: f64,
    /// Tokens looked up in the prefix cache, and found, since the engine's start.
    pub prefix: [f64; 2],
}

pub(super) const PAGES: [Family; 6] = [
    families::VLLM_RUNNING,
    families::VLLM_WAITING,
    families::VLLM_KV_USAGE,
    families::VLLM_PREEMPTIONS,
    families::VLLM_PREFIX_QUERIES,
    families::VLLM_PREFIX_HITS,
];
pub(super) const FAMILIES: [Family; 6] = [
    families::ENGINE_RESTARTS,
    families::ENGINE_CRASHES,
    families::ENGINE_WAKES,
    families::ENGINE_WAKE_SECONDS,
    families::ENGINE_PHASE,
    families::ENGINE_START,
];
pub(super) const WANTED: [Family; 2] = [families::ENGINES_WANTED, families::ENGINE_START_EXPECTED];

pub(super) fn add(engines: &[EngineMetrics], phases: &[&str], page: &mut Page) {
    for engine in engines {
        let labels = [&*engine.pool, &engine.backend];
        page.add(&families::ENGINE_RESTARTS, &labels, engine.restarts as f64);
        page.add(&families::ENGINE_CRASHES, &labels, engine.crashes as f64);
        page.add(&families::ENGINE_WAKES, &labels, engine.wakes as f64);
        if let Some(seconds) = engine.wake_seconds {
            page.add(&families::ENGINE_WAKE_SECONDS, &labels, seconds);
        }
        page.add_states(&families::ENGINE_PHASE, &labels, phases.iter().copied(), &engine.phase);
        if let Some(started) = engine.started {
            page.add(&families::ENGINE_START, &labels, started);
        }
    }
}

pub(super) fn add_pages(engines: &[EnginePage], page: &mut Page) {
    for engine in engines {
        let [queries, hits] = engine.prefix;
        let values = [engine.running, engine.waiting, engine.kv_usage, engine.preemptions, queries, hits];
        for (family, value) in PAGES.iter().zip(values) {
            page.add(family, &[&engine.pool, &engine.backend], value);
        }
    }
}

pub(super) fn add_wanted(pools: &[PoolEngines], page: &mut Page) {
    for pool in pools {
        page.add(&families::ENGINES_WANTED, &[&pool.pool], f64::from(pool.wanted));
        page.add(&families::ENGINE_START_EXPECTED, &[&pool.pool], pool.start_seconds);
    }
}
