//! Assigns requests to the arms of experiments.
//!
//! [`Experiments`] lives as long as the gateway and keeps the state of each experiment by name.
//! When a reload changes the identity of an experiment (arms, weights, models, salt, sticky unit),
//! the result is a new experiment of the same name that starts from zero. The ramp, the keys and
//! the part of the layer are not part of the identity.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::diagnosis::EngineAdapters;
use super::ledger::{Ending, Observation};
use super::plan::{ArmPlan, ExperimentPlan};
use super::shadow::CopyInFlight;
use super::state::{ExperimentState, Phase, Progress};
use super::unit::{Unit, group_of};
use sluice_config::Config;
use sluice_core::base::ModelId;

/// One experiment: configuration and state.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// The configuration.
    pub plan: Arc<ExperimentPlan>,
    /// The state.
    pub state: Arc<ExperimentState>,
}

/// The experiments of the gateway, across reloads.
#[derive(Debug, Default)]
pub struct Experiments {
    known: Mutex<HashMap<Arc<str>, Experiment>>,
    /// Whether arms wait until [`ExperimentState::note_served`] reports their model.
    wait_for_models: AtomicBool,
    /// Experiments saved by an earlier gateway, until they are configured.
    saved: Mutex<Vec<Saved>>,
}

/// A saved experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    name: String,
    identity: u64,
    phase: Phase,
    progress: Progress,
}

/// The experiments of one configuration.
#[derive(Clone, Debug, Default)]
pub struct ExperimentSet(Vec<Experiment>);

/// The facts that decide whether a request takes part.
pub struct Subject<'a> {
    /// The model of the request; `None`: not declared.
    pub model: Option<ModelId>,
    /// The name of the API key.
    pub key: Option<&'a str>,
    /// The position of the home pool.
    pub home: usize,
    /// The stratum in which the request is measured, whatever the arm.
    pub stratum: usize,
}

/// The arm of a request.
#[derive(Clone, Debug)]
pub struct Assigned {
    experiment: Experiment,
    /// The position of the arm.
    pub arm: usize,
    unit: Unit,
    pub(crate) stratum: usize,
    /// Whether the request is measured. It is not after an arm was promoted.
    measured: bool,
    /// Whether the arm could not serve the request, so that it was served as without the
    /// experiment.
    pub fell_back: bool,
    /// Whether the arm could not serve the request for lack of room.
    pub lacked_room: bool,
}

impl Assigned {
    /// The arm.
    pub fn arm(&self) -> &ArmPlan {
        &self.experiment.plan.arms[self.arm]
    }

    /// Whether the same pools serve all arms, so that all arms have one queue.
    pub fn shares_pools(&self) -> bool {
        self.experiment.plan.shares_pools
    }

    /// The cell of the unit.
    pub fn cell(&self) -> u16 {
        self.experiment.plan.hash.cell(self.unit)
    }

    /// The shadow arms that get a copy of a request now. `id` is different for every request.
    pub fn copies(&self, id: &str, now: Instant) -> impl Iterator<Item = (Self, CopyInFlight)> {
        let Experiment { plan, state } = &self.experiment;
        plan.arms.iter().enumerate().filter_map(move |(number, arm)| {
            let may_copy = self.measured && !state.is_stopped(number) && !state.is_waiting(number);
            let shadow = arm.shadow.as_ref().filter(|_| may_copy)?;
            // The draw is independent of the unit, and of the arm that serves the request.
            let draw = plan.hash.draw(Unit::new(format!("copy {number} {id}").as_bytes()));
            let in_flight =
                (draw < shadow.share).then(|| CopyInFlight::begin(state.copies(number), shadow, now)).flatten()?;
            Some((Self { arm: number, ..self.clone() }, in_flight))
        })
    }

    /// Counts the request as assigned to the arm.
    pub fn note(&self) {
        if self.measured {
            self.experiment.state.note_assigned(self.arm, self.cell());
        }
    }

    /// Adds the finished request to the measurements of the arm. The client may rate the answer by
    /// `request_id`.
    pub fn observe(&self, observation: &Observation, request_id: Option<&str>) {
        if self.measured {
            let was_served = observation.ending == Ending::Completed && !observation.fell_back;
            if let Some(id) = request_id.filter(|_| was_served) {
                self.experiment.state.note_answer(id, self.arm, group_of(observation.cell));
            }
            self.experiment.state.observe(&self.experiment.plan, self.arm, observation);
        }
    }
}

impl Experiments {
    /// The experiments of a configuration, which keep their state if the identity is unchanged.
    pub fn configure(&self, config: &Config) -> ExperimentSet {
        let (mut known, mut saved) = (self.known.lock(), self.saved.lock());
        let mut set = Vec::new();
        for plan in ExperimentPlan::all(config) {
            let plan = Arc::new(plan);
            let same = known.get(&plan.name).filter(|known| known.plan.identity == plan.identity);
            let state = match same {
                Some(same) => Arc::clone(&same.state),
                None => {
                    let exposure = plan.exposure(Duration::ZERO);
                    let is_same = |saved: &mut Saved| *saved.name == *plan.name && saved.identity == plan.identity;
                    let state = match saved.extract_if(.., is_same).next() {
                        Some(saved) => ExperimentState::resume(&plan, saved.phase, exposure, saved.progress),
                        None => ExperimentState::new(&plan, exposure),
                    };
                    if self.wait_for_models.load(Ordering::Acquire) {
                        state.wait_for_models(&plan);
                    }
                    Arc::new(state)
                }
            };
            let experiment = Experiment { plan: Arc::clone(&plan), state };
            set.push(experiment.clone());
            known.insert(Arc::clone(&plan.name), experiment);
        }
        known.retain(|name, _| set.iter().any(|experiment| experiment.plan.name == *name));
        ExperimentSet(set)
    }

    /// In experiments that are configured from now on, arms with another model wait for
    /// [`ExperimentState::note_served`].
    pub fn wait_for_models(&self) {
        self.wait_for_models.store(true, Ordering::Release);
    }

    /// Experiments that are configured from now on continue from this saved state.
    pub fn restore(&self, saved: Vec<Saved>) {
        *self.saved.lock() = saved;
    }

    /// [`Experiments::restore`], also for experiments that are configured already: the next
    /// configuration begins with the saved state.
    pub fn restore_over(&self, saved: Vec<Saved>) {
        self.known.lock().retain(|name, _| !saved.iter().any(|saved| *saved.name == **name));
        self.restore(saved);
    }

    /// All experiments, for a later gateway. Includes restored ones that are not configured yet, if
    /// `keep` accepts their names.
    pub fn save(&self, keep: impl Fn(&str) -> bool) -> Vec<Saved> {
        let save = |Experiment { plan, state }: Experiment| Saved {
            name: plan.name.to_string(),
            identity: plan.identity,
            phase: state.phase(),
            progress: state.progress(),
        };
        let waiting: Vec<Saved> = self.saved.lock().iter().filter(|saved| keep(&saved.name)).cloned().collect();
        self.all().into_iter().map(save).chain(waiting).collect()
    }

    /// The experiment of this name.
    pub fn find(&self, name: &str) -> Option<Experiment> {
        self.known.lock().get(name).cloned()
    }

    /// Why the experiment was stopped, if it was.
    pub fn why_stopped(&self, name: &str) -> Option<String> {
        let found = self.find(name).filter(|found| found.state.phase() == Phase::Stopped)?;
        Some(found.state.progress().why.unwrap_or_else(|| "an operator has stopped the experiment".to_owned()))
    }

    /// All experiments, sorted by name.
    pub fn all(&self) -> Vec<Experiment> {
        let mut all: Vec<Experiment> = self.known.lock().values().cloned().collect();
        all.sort_by(|one, other| one.plan.name.cmp(&other.plan.name));
        all
    }

    /// Moves every ramp to the state at `now`, and reviews the measurements.
    pub fn advance(&self, now: Timestamp) {
        for Experiment { plan, state } in self.all().iter().filter(|one| one.state.phase() == Phase::Running) {
            let begins = plan.begins.unwrap_or_else(|| state.since(now));
            // Before the ramp begins, no unit takes part.
            let share = Duration::try_from(now.duration_since(begins)).map(|since| plan.exposure(since));
            state.set_exposure(share.unwrap_or(0.0));
            state.review(plan, now);
        }
    }

    /// Adds a user's rating of an answer. Returns the label of the arm that gave the answer;
    /// `None`: unknown.
    pub fn rate(&self, request_id: &str, good: bool) -> Option<Arc<str>> {
        self.all().iter().find_map(|Experiment { plan, state }| {
            let arm = state.rate(request_id, good)?;
            Some(Arc::clone(&plan.arms[arm].label))
        })
    }

    /// Whether an arm that is not stopped waits for a model.
    pub fn is_any_waiting(&self) -> bool {
        let waits = |Experiment { plan, state }: &Experiment| {
            state.phase() != Phase::Stopped && (0..plan.arms.len()).any(|arm| state.is_waiting(arm))
        };
        self.known.lock().values().any(waits)
    }

    /// The models of the arms that are measured now, perhaps served as adapters.
    pub fn arm_models(&self) -> Vec<Arc<str>> {
        let running = self.all().into_iter().filter(|one| one.state.phase() == Phase::Running);
        let models =
            running.flat_map(|one| one.plan.arms.iter().filter_map(|arm| arm.model.clone()).collect::<Vec<_>>());
        models.map(|(name, _)| name).collect()
    }

    /// Adds a look at engines that serve adapters.
    pub fn note_adapters(&self, seen: &[EngineAdapters]) {
        for Experiment { plan, state } in self.all().iter().filter(|one| one.state.phase() == Phase::Running) {
            state.note_adapters(plan, seen);
        }
    }
}

impl ExperimentSet {
    /// The arm of a request, from the first experiment in which it takes part. `unit` returns the
    /// sticky unit of the request, `may_use` whether the key may use a model. A request that may
    /// not use the models of all arms takes part in no arm, because otherwise the arms would get
    /// different kinds of requests.
    pub fn assign(
        &self,
        subject: &Subject<'_>,
        unit: impl Fn(&ExperimentPlan) -> Option<Unit>,
        may_use: impl Fn(ModelId) -> bool,
    ) -> Option<Assigned> {
        self.0.iter().find_map(|experiment| {
            let Experiment { plan, state } = experiment;
            let phase = state.phase();
            if phase == Phase::Stopped || !plan.is_for(subject.model, subject.key, subject.home) {
                return None;
            }
            let unit = unit(plan)?;
            let position = plan.position(plan.hash.place(unit))?;
            let arm = match phase {
                Phase::Promoted(arm) => arm,
                _ if position < state.exposure() => plan.arm_of(plan.hash.draw(unit)),
                _ => return None,
            };
            let mut models = plan.arms.iter().filter_map(|arm| arm.model.as_ref());
            let promoted = (phase != Phase::Running).then_some(arm);
            if state.is_stopped(arm) || state.holds(plan, promoted) || !models.all(|(_, id)| may_use(*id)) {
                return None;
            }
            let measured = phase == Phase::Running;
            Some(Assigned {
                experiment: experiment.clone(),
                arm,
                unit,
                stratum: subject.stratum,
                measured,
                fell_back: false,
                lacked_room: false,
            })
        })
    }
}
