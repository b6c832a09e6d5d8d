//! The online tuner in a run: it looks every second, limits are applied, and restarts take virtual
//! time.
//!
//! A restart begins under the rule of `sluice serve` ([`Replacement`]). It is simplified to the
//! effect on requests: the backend gets no new requests, requests in flight finish, the engine is
//! gone for 60 s, and a new one with empty caches takes over. If vLLM refuses the new flags, the
//! engine returns as it was. Forecasts are simulated at once, in separate runs.

use std::time::Duration;

use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::setup::{EngineChange, EngineSetup, Forecaster, Lab, PlantedFault};
use sluice_core::base::BackendId;
use sluice_gateway::config::TunerMode;
use sluice_gateway::experiment::Experiments;
use sluice_gateway::pool::{Admission, BackendView, Cordon, Irreplaceable, PoolView, Replacement};
use sluice_online::change::EXPERIMENT;
use sluice_online::{Answer, EngineFlag, EngineState, Event, Load, Observer, Order, Restarted, Tuner, TunerReport};

/// Time of a restart from the last request to readiness, for an 8B model with a warm compile cache.
const START: Duration = Duration::from_secs(60);
/// Seconds between two looks at the engines' metrics.
const LOOK_EVERY: u64 = 5;

/// A restart in progress.
#[derive(Debug)]
struct Restart {
    /// `pool/backend`.
    name: String,
    backend: BackendId,
    engine: usize,
    /// The new engine, or why vLLM refuses it.
    setup: Result<EngineSetup, String>,
    /// Whether requests may wait for the engine, although no other backend serves the models.
    crowded: bool,
    step: Step,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Waits until all requests have ended, at most until this time.
    Drain(Duration),
    /// Waits until this time.
    Start(Duration),
}

/// The view that the tuner and the autoscaler have of a run.
pub(crate) struct Surroundings<'a> {
    pub(crate) now: Duration,
    pub(crate) start: Instant,
    pub(crate) admission: &'a Admission,
    pub(crate) cluster: &'a Cluster,
    pub(crate) observer: &'a Observer,
    pub(crate) lab: &'a Lab,
    /// The gateway's backends, each with the index of its engine.
    pub(crate) backends: &'a [(BackendId, usize)],
}

/// The tuner, and a restart in progress.
#[derive(Debug)]
pub(crate) struct LabTuner {
    tuner: Tuner,
    events: Vec<Event>,
    /// The setups with which the engines were started last.
    setups: Vec<EngineSetup>,
    restart: Option<Restart>,
    simulations: u64,
}

impl LabTuner {
    /// The tuner of a run, if it acts.
    pub(crate) fn new(lab: &Lab, observer: &Observer) -> Option<Self> {
        let acts = lab.config.tuner.mode == TunerMode::Apply;
        let mut tuner = Tuner::new(&lab.config, observer, Duration::ZERO);
        if lab.forecaster.is_some_and(|by| by.limits.is_some()) {
            tuner.simulate_limits();
        }
        acts.then(|| Self { tuner, events: Vec::new(), setups: lab.engines.clone(), restart: None, simulations: 0 })
    }

    /// The tuner's actions and report.
    pub(crate) fn result(self) -> (Vec<Event>, TunerReport) {
        (self.events, self.tuner.report())
    }

    /// Puts the tuner's limits into a configuration.
    pub(crate) fn put(&self, config: &mut sluice_gateway::config::Config) {
        self.tuner.put(config);
    }

    /// One look. Returns whether the configuration has changed.
    pub(crate) fn step(&mut self, around: &Surroundings<'_>, experiments: &Experiments) -> bool {
        let Surroundings { now, admission, observer, .. } = *around;
        if now.as_secs().is_multiple_of(LOOK_EVERY) {
            self.look_at_metrics(around);
        }
        let view = admission.view();
        observer.note_waiting(&admission.waiting(around.start + now), now);
        let mut changed = self.tuner.step(&view, observer, now);
        let engines = self.engines(around, &view);
        let stopped = experiments.why_stopped(EXPERIMENT);
        let mut orders = stopped.map_or_else(Vec::new, |why| self.tuner.experiment_stopped(&why, observer, now));
        orders.extend(self.tuner.step_engines(&engines, None, observer, now));
        if let Some(outcome) = self.advance(around) {
            orders.extend(self.tuner.restarted(outcome, observer, now));
        }
        let mut at = 0;
        while let Some(order) = orders.get(at).cloned() {
            at += 1;
            match order {
                Order::Configure => changed = true,
                Order::Simulate(question) => {
                    let answer = self.simulate(around, |lab, by, seed| Some((by.flags)(lab, &question, seed)));
                    changed |= self.tuner.answered(&answer, &engines, None, observer, now);
                }
                Order::SimulateLimits(question) => {
                    let answer = self.simulate(around, |lab, by, seed| Some((by.limits?)(lab, &question, seed)));
                    changed |= self.tuner.limits_answered(&question, &answer, observer, now);
                }
                Order::Restart { engine, flag, value, crowded } => {
                    if let Err(outcome) = self.begin(around, &view, (&engine, crowded), (flag, value)) {
                        orders.extend(self.tuner.restarted(outcome, observer, now));
                    }
                }
            }
        }
        let ids = around.backends.iter().map(|(backend, _)| *backend);
        admission.set_trials(&ids.zip(self.tuner.trials(&engines)).collect::<Vec<_>>());
        self.events.extend(self.tuner.take_events());
        changed
    }

    /// Simulates with the present engines.
    fn simulate(
        &mut self,
        around: &Surroundings<'_>,
        forecast: impl FnOnce(&Lab, Forecaster, u64) -> Option<Answer> + Send,
    ) -> Answer {
        let lab = Lab { engines: self.setups.clone(), ..around.lab.clone() };
        self.simulations += 1;
        let (seed, Some(by)) = (self.simulations, lab.forecaster) else { return Answer::default() };
        // A run needs a thread without a runtime.
        let answer = std::thread::scope(|scope| scope.spawn(|| forecast(&lab, by, seed)).join());
        answer.ok().flatten().unwrap_or_default()
    }

    fn look_at_metrics(&mut self, around: &Surroundings<'_>) {
        let pools = around.lab.config.pools.iter();
        let names = pools.flat_map(|pool| pool.backends.iter().map(|backend| (&pool.name, &backend.name)));
        for ((pool, backend), (_, engine)) in names.zip(around.backends) {
            self.tuner.note_engine(pool, backend, around.cluster.sample(*engine), around.now);
        }
    }

    fn engines(&self, around: &Surroundings<'_>, view: &[PoolView]) -> Vec<EngineState> {
        let of_pool = view.iter().flat_map(|pool| pool.backends.iter().map(move |backend| (pool, backend)));
        let state = |((pool, backend), (_, engine)): ((&PoolView, &BackendView), &(_, usize))| {
            let setup = &self.setups[*engine];
            EngineState {
                pool: pool.name.to_string(),
                backend: backend.name.to_string(),
                flags: setup.can_change().then(|| setup.flags()),
                serves: backend.in_rotation(),
                waiting: pool.queue_length,
                used: Load::new(backend.used.slots, backend.used.tokens),
                copies: Load::new(backend.copies.0, backend.copies.1),
                started_in: Some(START),
            }
        };
        of_pool.zip(around.backends).map(state).collect()
    }

    pub(crate) fn begin(
        &mut self,
        around: &Surroundings<'_>,
        view: &[PoolView],
        (name, crowded): (&str, bool),
        (flag, value): (EngineFlag, f64),
    ) -> Result<(), Restarted> {
        let (pool, own) = name.split_once('/').unwrap_or_default();
        let all = view.iter().flat_map(|pool| pool.backends.iter().map(move |backend| (pool, backend)));
        let found = all.zip(around.backends).find(|((of, backend), _)| *of.name == *pool && *backend.name == *own);
        let Some(((_, shown), (backend, engine))) = found else { return Err(Restarted::Failed("it is gone".into())) };
        if shown.in_rotation() && !crowded {
            self.check_replacement(around, view, name).map_err(|blocked| Restarted::Blocked(blocked.to_string()))?;
        }
        let made = self.setups[*engine].with_flag(flag, value).map_err(|error| error.to_string());
        let starts =
            |setup: &EngineSetup| setup.planted(&around.lab.plants).fault != Some(PlantedFault::RefusesToStart);
        let setup = made.and_then(|setup| if starts(&setup) { Ok(setup) } else { Err("it exits".to_owned()) });
        around.admission.set_cordon(*backend, Cordon::Draining);
        let step = Step::Drain(around.now + around.lab.config.fleet.drain);
        self.restart = Some(Restart { name: name.to_owned(), backend: *backend, engine: *engine, setup, crowded, step });
        Ok(())
    }

    /// Checks, as `sluice serve` does, that other backends can carry the load of `name`.
    fn check_replacement(
        &self,
        around: &Surroundings<'_>,
        view: &[PoolView],
        name: &str,
    ) -> Result<(), Irreplaceable> {
        let config = &around.lab.config;
        let (pool, backend) = name.split_once('/').unwrap_or_default();
        let spill = config.pools.iter().filter(|own| own.name == pool).flat_map(|own| &own.spill);
        let spill = spill.map(|id| config.pools[id.index()].name.as_str()).collect();
        let names = |backend: &BackendView| {
            let of = around.backends.iter().filter(|(id, _)| *id == backend.id);
            let sims = of.map(|(_, engine)| &self.setups[*engine].sim);
            let adapters = |lora| if lora { around.lab.adapter_names() } else { Vec::new() };
            sims.flat_map(|sim| sim.names.iter().cloned().chain(adapters(sim.lora))).collect()
        };
        Replacement { pool, backend, spill, headroom: config.fleet.headroom }.check(view, names)
    }

    /// Advances a restart. Returns the outcome when it has ended.
    fn advance(&mut self, around: &Surroundings<'_>) -> Option<Restarted> {
        let mut restart = self.restart.take()?;
        let outcome = self.advance_step(around, &mut restart);
        self.restart = outcome.is_none().then_some(restart);
        outcome
    }

    fn advance_step(&mut self, around: &Surroundings<'_>, restart: &mut Restart) -> Option<Restarted> {
        let Restart { name, backend, engine, setup, crowded, step } = restart;
        let Surroundings { now, admission, cluster, .. } = *around;
        match *step {
            Step::Drain(until) if now >= until && cluster.streams(*engine) > 0 => {
                admission.set_cordon(*backend, Cordon::Open);
                Some(Restarted::Blocked("requests took longer than the drain".to_owned()))
            }
            Step::Drain(_) if cluster.streams(*engine) > 0 && cluster.is_up(*engine) && !cluster.is_hung(*engine) => {
                None
            }
            Step::Drain(_) => {
                if let (false, Err(blocked @ Irreplaceable::Unserved(_))) =
                    (*crowded, self.check_replacement(around, &admission.view(), name))
                {
                    admission.set_cordon(*backend, Cordon::Open);
                    return Some(Restarted::Blocked(format!("while it drained: {blocked}")));
                }
                admission.set_cordon(*backend, Cordon::Starting);
                cluster.change(now, *engine, EngineChange::Stop);
                *step = Step::Start(now + START);
                None
            }
            Step::Start(until) if now < until => None,
            Step::Start(_) => {
                let outcome = match setup {
                    Ok(setup) => {
                        self.setups[*engine] = setup.clone();
                        Restarted::Done
                    }
                    Err(why) => Restarted::Failed(why.clone()),
                };
                cluster.start_as(now, *engine, &self.setups[*engine].planted(&around.lab.plants));
                admission.set_ceiling(*backend, Some(self.setups[*engine].sim.engine.max_num_seqs));
                admission.engine_replaced(*backend, around.start + now);
                admission.set_cordon(*backend, Cordon::Open);
                Some(outcome)
            }
        }
    }
}
