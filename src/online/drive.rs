//! Drives the tuner on a deployment: `sluice serve`, or `sluice lab`, which simulates with this
//! same code. The deployment calls:
//!
//! | function | when |
//! |---|---|
//! | [`look`], then [`carry_out`] | every [`LOOK_INTERVAL`] |
//! | [`pages`] | every [`PAGES_INTERVAL`] |
//! | [`restarted`] | a restart that [`Deployment::restart`] began has ended |
//! | [`answered`], [`limits_answered`] | a simulation has ended |
//!
//! The driver unlocks the tuner before it calls a method that changes the deployment.

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;

use crate::engines::change::EXPERIMENT;
use crate::engines::flags::EngineFlag;
use crate::engines::forecast::{EngineAnswer, EngineQuestion};
use crate::engines::look::{EngineState, Restarted, TunerOrder};
use crate::event::Event;
use crate::limits::forecast::{LimitsAnswer, LimitsQuestion};
use crate::observe::Observer;
use crate::tuner::Tuner;
use sluice_config::Config;
use sluice_gateway::experiment::{Experiment, Experiments, Phase};
use sluice_gateway::pool::{Admission, BackendView, Bound, PoolView, WaitingRequest};

/// Time between two looks at the pools.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two reads of a metrics page. Not shorter than usual with Prometheus, because vLLM
/// writes the page on the thread that also serves requests.
pub const PAGES_INTERVAL: Duration = Duration::from_secs(15);
const COMPARES: &str = "while an experiment compares pools";

/// The parts of a deployment that the driver reads.
#[derive(Debug)]
pub struct Parts<'a> {
    /// The configuration in force.
    pub config: Arc<Config>,
    /// Pools and backends.
    pub admission: &'a Admission,
    /// Requests that wait now.
    pub waiting: Vec<WaitingRequest>,
    /// The experiments in force.
    pub experiments: &'a Experiments,
    /// The observer of finished requests.
    pub observer: &'a Observer,
    /// Minute of the day, UTC.
    pub minute: u16,
}

/// Pools and engines that the tuner acts on.
pub trait Deployment {
    /// Time since the tuner's clock began.
    fn now(&self) -> Duration;
    /// The parts at this moment.
    fn parts(&self) -> Parts<'_>;
    /// The tuner, locked.
    fn tuner(&self) -> impl DerefMut<Target = Tuner>;
    /// The states of all engines.
    fn engines(&self, view: &[PoolView]) -> Vec<EngineState>;
    /// Keeps `events`. If `changed`, also puts the tuner's limits and experiment in force.
    fn follow(&mut self, changed: bool, events: Vec<Event>);
    /// Saves the tuner's state.
    fn save(&mut self);
    /// Begins to restart an engine; the result goes to [`restarted`].
    fn restart(&mut self, engine: String, change: (EngineFlag, f64), crowded: bool);
    /// Begins to simulate flags; the answer goes to [`answered`].
    fn simulate(&mut self, question: EngineQuestion);
    /// Begins to simulate limits; the answer goes to [`limits_answered`].
    fn simulate_limits(&mut self, question: LimitsQuestion);
}

/// Lets the tuner look once at the pools and engines, and puts changed limits in force. Returns
/// orders for [`carry_out`].
#[must_use]
pub fn look(deployment: &mut impl Deployment) -> Vec<TunerOrder> {
    if !deployment.tuner().has_work() {
        return Vec::new();
    }
    let parts = deployment.parts();
    let view = parts.admission.view();
    let engines = deployment.engines(&view);
    let stopped = parts.experiments.why_stopped(EXPERIMENT);
    let (changed, orders, events) = {
        let (mut tuner, observer) = (deployment.tuner(), parts.observer);
        let now = deployment.now();
        let hindered = tuner.hinder(parts.compare_pools().then_some(COMPARES), observer, now);
        let mut orders = stopped.map_or_else(Vec::new, |why| tuner.experiment_stopped(&why, observer, now));
        observer.note_waiting(&parts.waiting, now);
        let changed = tuner.step(&view, observer, now) || hindered;
        orders.extend(tuner.step_engines(&engines, parts.why_engines_wait(), observer, now));
        let ids = view.iter().flat_map(|pool| pool.backends.iter().map(|backend| backend.id));
        parts.admission.set_bounds(ids.zip(tuner.trials(&engines).into_iter().map(Bound::Trial)));
        (changed || orders.contains(&TunerOrder::Configure), orders, tuner.take_events())
    };
    deployment.follow(changed, events);
    if orders.iter().any(|order| matches!(order, TunerOrder::Restart { .. })) {
        deployment.save();
    }
    orders
}

/// Carries out the orders of a [`look`].
pub fn carry_out(deployment: &mut impl Deployment, orders: Vec<TunerOrder>) {
    for order in orders {
        match order {
            TunerOrder::Configure => {}
            TunerOrder::Restart { engine, flag, value, crowded } => deployment.restart(engine, (flag, value), crowded),
            TunerOrder::Simulate(question) => deployment.simulate(question),
            TunerOrder::SimulateLimits(question) => deployment.simulate_limits(question),
        }
    }
}

/// Takes the result of a restart.
pub fn restarted(deployment: &mut impl Deployment, outcome: Restarted) {
    take(deployment, |tuner, parts, now| (false, tuner.restarted(outcome, parts.observer, now)));
}

/// Takes the answer to a question about flags.
pub fn answered(deployment: &mut impl Deployment, answer: &EngineAnswer) {
    let engines = deployment.engines(&deployment.parts().admission.view());
    take(deployment, |tuner, parts, now| {
        (tuner.answered(answer, &engines, parts.why_engines_wait(), parts.observer, now), Vec::new())
    });
}

/// Takes the answer to a question about limits.
pub fn limits_answered(deployment: &mut impl Deployment, question: &LimitsQuestion, answer: &LimitsAnswer) {
    take(deployment, |tuner, parts, now| (tuner.limits_answered(question, answer, parts.observer, now), Vec::new()));
}

/// Gives the tuner a result by `give`, and carries out the consequences. `give` returns whether
/// other limits must be put in force, and the tuner's orders.
fn take(
    deployment: &mut impl Deployment,
    give: impl FnOnce(&mut Tuner, &Parts<'_>, Duration) -> (bool, Vec<TunerOrder>),
) {
    let (changed, orders, events) = {
        let (parts, mut tuner) = (deployment.parts(), deployment.tuner());
        let (changed, orders) = give(&mut tuner, &parts, deployment.now());
        (changed || orders.contains(&TunerOrder::Configure), orders, tuner.take_events())
    };
    deployment.follow(changed, events);
    deployment.save();
    carry_out(deployment, orders);
}

/// The backends whose metrics pages are due, for [`Tuner::note_engine`].
pub fn pages(deployment: &impl Deployment) -> Vec<(Arc<str>, BackendView)> {
    if !deployment.tuner().has_work() {
        return Vec::new();
    }
    let of = |pool: PoolView| pool.backends.into_iter().map(move |backend| (Arc::clone(&pool.name), backend));
    let view = deployment.parts().admission.view();
    view.into_iter().flat_map(of).filter(|(_, backend)| backend.in_rotation()).collect()
}

impl Parts<'_> {
    /// The running experiments of operators.
    fn others(&self) -> impl Iterator<Item = Experiment> {
        let is_other = |one: &Experiment| one.state.phase() == Phase::Running && *one.plan.name != *EXPERIMENT;
        self.experiments.all().into_iter().filter(is_other)
    }

    /// Whether an operator's experiment compares pools or backends. The tuner must not change
    /// limits then.
    fn compare_pools(&self) -> bool {
        self.others().any(|experiment| experiment.plan.arms.iter().any(|arm| arm.pool.is_some()))
    }

    fn why_engines_wait(&self) -> Option<&'static str> {
        let windows = &self.config.tuner.windows;
        if !windows.is_empty() && !windows.iter().any(|window| window.contains(self.minute)) {
            return Some("engines are restarted in tuner.windows only");
        }
        self.others().next().map(|_| "an experiment of an operator runs")
    }
}
