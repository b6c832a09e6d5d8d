//! Pools that serve the same models and are tuned together, by one [`Controller`].
//!
//! Groups share no request, so a change in one does not concern the others.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::event::Acting;
use crate::limits::Limits;
use crate::limits::controller::Controller;
use crate::observe::engines::EngineWatch;
use crate::observe::objectives;
use sluice_config::{Config, ModelScope, Pool, TunerMode, attainment};
use sluice_core::meter::slo::Objectives;

/// Time after arrival from which a request counts, without an objective for E2EL.
pub(crate) const HORIZON: Duration = Duration::from_secs(5);
/// The longest time from arrival until a request counts.
const HORIZON_MAX: Duration = Duration::from_secs(20);
/// A request counts after this multiple of the E2EL objective, which it has then missed.
const HORIZON_OF_BOUND: f64 = 1.5;

#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) pools: Vec<usize>,
    pub(crate) controller: Controller,
    pub(crate) has_objectives: bool,
    /// Observations of engines, by `pool/backend`.
    pub(crate) engines: BTreeMap<String, EngineWatch>,
}

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
        let objectives: Vec<Objectives> = own().flat_map(|pool| objectives(config, pool)).map(|(_, own)| own).collect();
        let target = own().map(|pool| attainment(&config.classes, pool)).fold(0.0, f64::max);
        let longest = objectives.iter().filter_map(|own| own.e2el).max().map(|bound| bound.mul_f64(HORIZON_OF_BOUND));
        let horizon = longest.unwrap_or(HORIZON).min(HORIZON_MAX);
        let mut controller = Controller::new(names, limits, target, horizon, acting(config.tuner.mode));
        // Before this moment, other engines may have run.
        controller.engines_since = now;
        controller.set_simulates(simulates(config));
        let has_objectives = objectives.iter().any(|own| !own.is_empty());
        Self { pools: pools.clone(), controller, has_objectives, engines: BTreeMap::new() }
    }
}

pub(crate) fn simulates(config: &Config) -> bool {
    config.tuner.simulation.gpu.is_some() && config.tuner.simulation.model.is_some()
}

/// Groups of pools that serve a common model, directly or through other pools, in the order of the
/// configuration. Pools only for arms are left out, because an experiment judges them.
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
