//! A run as the deployment that the online tuner drives ([`drive`]); restarts take virtual time.
//!
//! A restart begins under the rule of `sluice serve` ([`Replacement`]). The backend gets no new
//! requests, requests in flight finish, the engine is gone for 60 s, and a new one with empty
//! caches takes over. If vLLM refuses the new flags, the engine returns as it was. With
//! `fleet.rollback = "wake"` a return to the flags before the change takes 5 s; memory is assumed
//! to suffice. A restart ends without a change if the drain is too short for a request. Forecasts
//! are simulated at once, in separate runs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::job::LabFlow;
use crate::setup::{EngineChange, EngineSetup, Forecaster, Lab, PlantedFault};
use sluice_config::{Config, Rollback, TunerMode};
use sluice_core::base::BackendId;
use sluice_gateway::flow::{LearnedState, RoutingTable, specs};
use sluice_gateway::pool::{BackendView, Bound, Cordon, Irreplaceable, PoolView, Replacement};
use sluice_online::drive::{self, Deployment, PAGES_INTERVAL, Parts};
use sluice_online::engines::flags::{EngineFlag, Flags};
use sluice_online::engines::forecast::EngineQuestion;
use sluice_online::engines::look::{EngineState, Restarted};
use sluice_online::event::Event;
use sluice_online::limits::forecast::LimitsQuestion;
use sluice_online::observe::Observer;
use sluice_online::tuner::Tuner;
use sluice_online::tuner::report::TunerReport;

/// Time from the last request to readiness, for an 8B model with a warm compile cache.
const START: Duration = Duration::from_secs(60);
/// The same for an old engine that is kept asleep (`fleet.rollback = "wake"`): the new one is
/// stopped, and the old one wakes.
const WAKE: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Restart {
    /// `pool/backend`.
    name: String,
    backend: BackendId,
    engine: usize,
    /// The new engine, or why vLLM refuses it.
    setup: Result<EngineSetup, String>,
    /// Whether requests may wait for the engine, because no other backend serves the models.
    crowded: bool,
    step: Step,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Waits for the end of all requests on the engine, at most until this time.
    Drain(Duration),
    Start(Duration),
}

#[derive(Debug)]
pub(crate) struct LabTuner {
    tuner: RefCell<Tuner>,
    events: Vec<Event>,
    /// The setup with which each engine was last started.
    setups: Vec<EngineSetup>,
    restart: Option<Restart>,
    /// Flags of the old engines that are kept asleep during a change.
    kept: BTreeMap<usize, Flags>,
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
        let (tuner, setups) = (RefCell::new(tuner), lab.engines.clone());
        acts.then_some(Self { tuner, events: Vec::new(), setups, restart: None, kept: BTreeMap::new(), simulations: 0 })
    }

    /// The time of a restart from one setup to another. Keeps the old engine, or wakes a kept one.
    pub(crate) fn restart_takes(&mut self, engine: usize, to: Option<&EngineSetup>) -> Duration {
        let is_kept = to.is_some_and(|to| self.kept.get(&engine) == Some(&to.flags()));
        if is_kept {
            self.kept.remove(&engine);
            return WAKE;
        }
        let from = self.setups[engine].flags();
        self.kept.entry(engine).or_insert(from);
        START
    }

    pub(crate) fn result(self) -> (Vec<Event>, TunerReport) {
        (self.events, self.tuner.into_inner().report())
    }
}

/// A run at one moment, as the tuner sees and changes it.
pub(crate) struct LabDeployment<'a> {
    pub(crate) own: &'a mut LabTuner,
    pub(crate) now: Duration,
    pub(crate) start: Instant,
    pub(crate) lab: &'a mut Lab,
    pub(crate) flow: &'a LabFlow,
    pub(crate) learned: &'a LearnedState,
    pub(crate) cluster: &'a Cluster,
    /// The gateway's backends, each with the index of its engine.
    pub(crate) backends: &'a [(BackendId, usize)],
}

impl Deployment for LabDeployment<'_> {
    fn now(&self) -> Duration {
        self.now
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            config: Arc::clone(&self.lab.config),
            admission: self.flow.admission(),
            waiting: self.flow.admission().waiting(self.start + self.now),
            experiments: &self.learned.experiments,
            observer: self.flow.recorder().observer(),
            // A run begins at midnight.
            minute: (self.now.as_secs() / 60 % (24 * 60)) as u16,
        }
    }

    fn tuner(&self) -> impl DerefMut<Target = Tuner> {
        self.own.tuner.borrow_mut()
    }

    fn engines(&self, view: &[PoolView]) -> Vec<EngineState> {
        let of_pool = view.iter().flat_map(|pool| pool.backends.iter().map(move |backend| (pool, backend)));
        let state = |((pool, backend), (_, engine)): ((&PoolView, &BackendView), &(_, usize))| {
            let setup = &self.own.setups[*engine];
            let flags = setup.can_change().then(|| setup.flags());
            EngineState { flags, started_in: Some(START), ..EngineState::of(pool, backend) }
        };
        of_pool.zip(self.backends).map(state).collect()
    }

    /// Applies a configuration with the same pools and backends, as a reload does.
    fn follow(&mut self, changed: bool, events: Vec<Event>) {
        self.own.events.extend(events);
        if !changed {
            return;
        }
        let mut config = Config::clone(&self.lab.config);
        self.tuner().put(&mut config);
        let config = Arc::new(config);
        let (pools, rules) = (specs::pools(&config), specs::health_rules(&config.health));
        let counters = vec![None; config.models.len()];
        let draft = RoutingTable::draft(Arc::clone(&config), &self.lab.model_names(), &counters, self.learned);
        self.flow.admission().apply_with(&pools, rules, self.start + self.now, |layout| {
            self.flow.set_routing_table(draft.placed(layout));
        });
        self.flow.drop_unused_tables();
        self.lab.config = config;
    }

    fn save(&mut self) {}

    fn restart(&mut self, engine: String, change: (EngineFlag, f64), crowded: bool) {
        if let Err(outcome) = self.begin((&engine, crowded), change) {
            drive::restarted(self, outcome);
        }
    }

    fn simulate(&mut self, question: EngineQuestion) {
        let answer = self.forecast(|lab, by, seed| Some((by.flags)(lab, &question, seed)));
        drive::answered(self, &answer);
    }

    fn simulate_limits(&mut self, question: LimitsQuestion) {
        let answer = self.forecast(|lab, by, seed| Some((by.limits?)(lab, &question, seed)));
        drive::limits_answered(self, &question, &answer);
    }
}

impl LabDeployment<'_> {
    pub(crate) fn step(&mut self) {
        if self.now.as_secs().is_multiple_of(PAGES_INTERVAL.as_secs()) {
            for (pool, backend) in drive::pages(self) {
                let engine = self.backends.iter().find(|(id, _)| *id == backend.id).map(|(_, engine)| *engine);
                let sample = engine.and_then(|engine| self.cluster.sample(engine));
                self.tuner().note_engine(&pool, &backend.name, sample, self.now);
            }
        }
        if let Some(outcome) = self.advance() {
            drive::restarted(self, outcome);
        }
        let orders = drive::look(self);
        if self.tuner().engine_change().is_none() {
            self.own.kept.clear();
        }
        drive::carry_out(self, orders);
    }

    fn forecast<T: Default + Send>(&mut self, forecast: impl FnOnce(&Lab, Forecaster, u64) -> Option<T> + Send) -> T {
        let lab = Lab { engines: self.own.setups.clone(), ..self.lab.clone() };
        self.own.simulations += 1;
        let (seed, Some(by)) = (self.own.simulations, lab.forecaster) else { return T::default() };
        // A run needs a thread without a runtime.
        let answer = std::thread::scope(|scope| scope.spawn(|| forecast(&lab, by, seed)).join());
        answer.ok().flatten().unwrap_or_default()
    }

    pub(crate) fn begin(
        &mut self,
        (name, crowded): (&str, bool),
        (flag, value): (EngineFlag, f64),
    ) -> Result<(), Restarted> {
        if let Some(other) = &self.own.restart {
            return Err(Restarted::Blocked(format!("{} is being changed", other.name)));
        }
        let view = self.flow.admission().view();
        let (pool, own) = name.split_once('/').unwrap_or_default();
        let all = view.iter().flat_map(|pool| pool.backends.iter().map(move |backend| (pool, backend)));
        let found = all.zip(self.backends).find(|((of, backend), _)| *of.name == *pool && *backend.name == *own);
        let Some(((_, shown), (backend, engine))) = found else { return Err(Restarted::Failed("it is gone".into())) };
        if shown.in_rotation() && !crowded {
            self.check_replacement(&view, name).map_err(|blocked| Restarted::Blocked(blocked.to_string()))?;
        }
        let made = self.own.setups[*engine].with_flag(flag, value).map_err(|error| error.to_string());
        let starts = |setup: &EngineSetup| setup.planted(&self.lab.plants).fault != Some(PlantedFault::RefusesToStart);
        let setup = made.and_then(|setup| if starts(&setup) { Ok(setup) } else { Err("it exits".to_owned()) });
        self.flow.admission().set_cordon(*backend, Cordon::Draining);
        let step = Step::Drain(self.now + self.lab.config.fleet.drain);
        let (name, backend, engine) = (name.to_owned(), *backend, *engine);
        self.own.restart = Some(Restart { name, backend, engine, setup, crowded, step });
        Ok(())
    }

    /// Checks, as `sluice serve` does, that other backends can carry the load of `name`.
    fn check_replacement(&self, view: &[PoolView], name: &str) -> Result<(), Irreplaceable> {
        let config = &self.lab.config;
        let (pool, backend) = name.split_once('/').unwrap_or_default();
        let spill = config.pools.iter().filter(|own| own.name == pool).flat_map(|own| &own.spill);
        let spill = spill.map(|id| config.pools[id.index()].name.as_str()).collect();
        let names = |backend: &BackendView| {
            let of = self.backends.iter().filter(|(id, _)| *id == backend.id);
            let sims = of.map(|(_, engine)| &self.own.setups[*engine].sim);
            let adapters = |lora| if lora { self.lab.adapter_names() } else { Vec::new() };
            sims.flat_map(|sim| sim.names.iter().cloned().chain(adapters(sim.lora))).collect()
        };
        Replacement { pool, backend, spill, headroom: config.fleet.headroom }.check(view, names)
    }

    /// Advances a restart. Returns the outcome at the end.
    fn advance(&mut self) -> Option<Restarted> {
        let mut restart = self.own.restart.take()?;
        let outcome = self.advance_step(&mut restart);
        self.own.restart = outcome.is_none().then_some(restart);
        outcome
    }

    fn advance_step(&mut self, restart: &mut Restart) -> Option<Restarted> {
        let Restart { name, backend, engine, setup, crowded, step } = restart;
        let (now, admission, cluster) = (self.now, self.flow.admission(), self.cluster);
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
                    (*crowded, self.check_replacement(&admission.view(), name))
                {
                    admission.set_cordon(*backend, Cordon::Open);
                    return Some(Restarted::Blocked(format!("while it drained: {blocked}")));
                }
                admission.set_cordon(*backend, Cordon::Starting);
                cluster.change(now, *engine, EngineChange::Stop);
                let takes = match self.lab.config.fleet.rollback {
                    Rollback::Start => START,
                    Rollback::Wake => self.own.restart_takes(*engine, setup.as_ref().ok()),
                };
                *step = Step::Start(now + takes);
                None
            }
            Step::Start(until) if now < until => None,
            Step::Start(_) => {
                let outcome = match setup {
                    Ok(setup) => {
                        self.own.setups[*engine] = setup.clone();
                        Restarted::Done
                    }
                    Err(why) => Restarted::Failed(why.clone()),
                };
                cluster.start_as(now, *engine, &self.own.setups[*engine].planted(&self.lab.plants));
                let slots = self.own.setups[*engine].sim.engine.max_num_seqs;
                admission.set_bounds([(*backend, Bound::Ceiling(Some(slots)))]);
                admission.engine_replaced(*backend, self.start + now);
                admission.set_cordon(*backend, Cordon::Open);
                Some(outcome)
            }
        }
    }
}
