//! Pools that serve the same models, which are tuned together.
//!
//! A group has one [`Controller`]. Pools of different groups share no request, so what is changed for one does not concern the other.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::controller::Controller;
use crate::engines::EngineWatch;
use crate::event::Acting;
use crate::limits::Limits;
use sluice_gateway::config::{Config, ModelScope, Pool, TunerMode};

/// How long after its arrival a request counts, where no objective says how long it may take.
pub(crate) const HORIZON: Duration = Duration::from_secs(5);
/// The same at most.
const HORIZON_MAX: Duration = Duration::from_secs(20);
/// A request that takes this many times its bound has missed it, and counts by then.
const HORIZON_OF_BOUND: f64 = 1.5;

#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) pools: Vec<usize>,
    pub(crate) controller: Controller,
    pub(crate) has_objectives: bool,
    /// What the engines show, by `pool/backend`.
    pub(crate) engines: BTreeMap<String, EngineWatch>,
}

/// What it may do in a mode.
pub(crate) fn acting(mode: TunerMode) -> Acting {
    match mode {
        TunerMode::Off | TunerMode::Advise => Acting::Proposes,
        TunerMode::Approve => Acting::WaitsForApproval,
        TunerMode::Apply => Acting::Acts,
    }
}

impl Group {
    pub(crate) fn new(pools: Vec<usize>, config: &Config, configured: &Limits, now: Duration) -> Self {
        let own = || pools.iter().map(|at| &config.pools[*at]);
        let names = own().map(|pool| pool.name.clone()).collect();
        let limits = Limits(pools.iter().map(|at| configured.0[*at]).collect());
        let target = own().map(|pool| pool.slo.attainment).fold(0.0, f64::max);
        let longest = own().filter_map(|pool| pool.slo.e2el).max().map(|bound| bound.mul_f64(HORIZON_OF_BOUND));
        let horizon = longest.unwrap_or(HORIZON).min(HORIZON_MAX);
        let mut controller = Controller::new(names, limits, target, horizon, acting(config.tuner.mode));
        // Before that, there may have been other engines.
        controller.engines_since = now;
        controller.set_simulates(simulates(config));
        let has_objectives = own().any(|pool| !pool.slo.objectives().is_empty());
        Self { pools: pools.clone(), controller, has_objectives, engines: BTreeMap::new() }
    }
}

/// Whether the configuration describes engines that can be simulated.
pub(crate) fn simulates(config: &Config) -> bool {
    config.tuner.simulation.gpu.is_some() && config.tuner.simulation.model.is_some()
}

/// The pools that serve a common model, directly or through others, each group in the order of the configuration. Pools of arms
/// alone are left out: an experiment judges them.
pub(crate) fn groups(pools: &[Pool]) -> Vec<Vec<usize>> {
    let share = |one: &Pool, other: &Pool| match (&one.models, &other.models) {
        (ModelScope::Only(own), ModelScope::Only(theirs)) => own.iter().any(|model| theirs.contains(model)),
        _ => true,
    };
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (at, pool) in pools.iter().enumerate().filter(|(_, pool)| !pool.arms_only) {
        let (with, without): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|group| group.iter().any(|other| share(pool, &pools[*other])));
        groups = without;
        let mut joined: Vec<usize> = with.into_iter().flatten().chain([at]).collect();
        joined.sort_unstable();
        groups.push(joined);
    }
    groups.sort();
    groups
}
