//! The phase and the measurements of an experiment: kept across reloads while the identity is the
//! same.
//!
//! Whether and where a request takes part is read without a lock. A finished request is added under
//! a lock, in about a microsecond. The guardrails are checked after every request that failed or
//! missed an objective. Everything else is computed once a second, by [`ExperimentState::review`].
//!
//! Bounds: the ledger of each arm (see [`ledger`](super::ledger)) and [`HISTORY`] moments.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::diagnosis::{EngineAdapters, EngineLooks};
use super::ledger::{ArmLedger, Measured, Observation, Quantity};
use super::origins::ArmOrigins;
use super::plan::ExperimentPlan;
use super::quality::AnswerIds;
use super::shadow::ArmCopies;
use super::verdict::{self, Comparison, Conclusion};

/// The most kept [`Moment`]s; above this, every second one is dropped.
pub const HISTORY: usize = 256;

/// The phase of an experiment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Requests take part.
    #[default]
    Running,
    /// No request takes part.
    Stopped,
    /// All units are in this arm, whatever the ramp says.
    Promoted(usize),
}

impl Phase {
    /// The name in the admin API.
    pub fn label(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::Promoted(_) => "promoted",
        }
    }
}

/// A conclusion about an arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// The conclusion.
    pub conclusion: Conclusion,
    /// The conclusion as a sentence for the operator.
    pub sentence: String,
    /// When, milliseconds since 1970.
    pub at: i64,
    /// Requests of the arm until then.
    pub requests: u64,
}

/// The confidence sequences at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// When, milliseconds since 1970.
    pub at: i64,
    /// For each arm except the control, and each judged quantity: the change with lower and upper
    /// bound, if bounded.
    pub changes: Vec<[Option<[f64; 3]>; Quantity::JUDGED.len()]>,
}

/// The measurements and conclusions of an experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The measurements of each arm.
    pub arms: Vec<ArmLedger>,
    /// The measurements of the control when each arm was stopped, while other arms went on.
    #[serde(default)]
    pub controls: Vec<Option<ArmLedger>>,
    /// Why each arm was stopped.
    pub stops: Vec<Option<String>>,
    /// The first conclusion about each arm.
    pub decisions: Vec<Option<Decision>>,
    /// The looks of each arm at the engines that serve the arm's adapter.
    #[serde(default)]
    pub engines: Vec<Vec<EngineLooks>>,
    /// The confidence sequences over time.
    pub history: Vec<Moment>,
    /// When the experiment was first started, milliseconds since 1970.
    pub since: Option<i64>,
    /// Why the experiment is in this phase, unless an operator put it there.
    pub why: Option<String>,
}

/// The state of one experiment.
#[derive(Debug)]
pub struct ExperimentState {
    /// 0: running, 1: stopped, 2 and more: promoted.
    phase: AtomicU32,
    /// Arms that were stopped, as bits.
    stopped: AtomicU32,
    /// Arms whose model no ready backend serves, as bits.
    waiting: AtomicU32,
    /// Arms whose model a ready backend served since the gateway started, as bits.
    served: AtomicU32,
    /// Share of the units that take part, as bits of a float.
    exposure: AtomicU64,
    copies: Vec<Arc<ArmCopies>>,
    recent: Mutex<AnswerIds>,
    progress: Mutex<Progress>,
    /// The origins of each arm's requests; locked after `progress`.
    origins: Mutex<Vec<ArmOrigins>>,
}

impl ExperimentState {
    /// A state that starts from zero.
    pub fn new(plan: &ExperimentPlan, exposure: f64) -> Self {
        let phase = if plan.running { Phase::Running } else { Phase::Stopped };
        Self::resume(plan, phase, exposure, Progress::default())
    }

    /// A state that continues from saved progress.
    pub fn resume(plan: &ExperimentPlan, phase: Phase, exposure: f64, mut progress: Progress) -> Self {
        let arms = plan.arms.len();
        progress.resize(arms);
        let stopped = progress.stops.iter().enumerate().filter(|(_, why)| why.is_some()).map(|(arm, _)| 1 << arm).sum();
        let state = Self {
            phase: AtomicU32::new(0),
            stopped: AtomicU32::new(stopped),
            waiting: AtomicU32::new(0),
            served: AtomicU32::new(0),
            exposure: AtomicU64::new(exposure.to_bits()),
            copies: plan.arms.iter().map(|_| Arc::default()).collect(),
            recent: Mutex::default(),
            progress: Mutex::new(progress),
            origins: Mutex::new(plan.arms.iter().map(|_| ArmOrigins::default()).collect()),
        };
        state.set_phase(phase);
        state
    }

    /// The phase.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Running,
            1 => Phase::Stopped,
            arm => Phase::Promoted(arm as usize - 2),
        }
    }

    fn set_phase(&self, phase: Phase) {
        let number = match phase {
            Phase::Running => 0,
            Phase::Stopped => 1,
            Phase::Promoted(arm) => arm as u32 + 2,
        };
        self.phase.store(number, Ordering::Release);
    }

    /// Sets the phase that an operator orders. If an arm was stopped, a new start also starts this
    /// arm, and begins all measurements at zero, because the old ones would break the guardrail
    /// again.
    pub fn order(&self, phase: Phase) {
        let mut progress = self.progress.lock();
        progress.why = None;
        if phase == Phase::Running && progress.stops.iter().any(Option::is_some) {
            *progress = Progress::default();
            progress.resize(self.copies.len());
            *self.recent.lock() = AnswerIds::default();
            self.origins.lock().iter_mut().for_each(|origins| *origins = ArmOrigins::default());
            self.stopped.store(0, Ordering::Release);
        }
        self.set_phase(phase);
    }

    /// Whether requests of an arm are served as without the experiment.
    pub fn is_stopped(&self, arm: usize) -> bool {
        self.stopped.load(Ordering::Acquire) & (1 << arm) != 0
    }

    /// Whether an arm waits, because no ready backend serves the model.
    pub fn is_waiting(&self, arm: usize) -> bool {
        self.waiting.load(Ordering::Acquire) & (1 << arm) != 0
    }

    /// Whether requests must be served without the experiment, because `arm`, or any arm that they
    /// could be in, waits for a model. Compared arms must have requests of the same time.
    pub(super) fn holds(&self, plan: &ExperimentPlan, promoted: Option<usize>) -> bool {
        let waiting = self.waiting.load(Ordering::Acquire) & !self.stopped.load(Ordering::Acquire);
        waiting != 0
            && match promoted {
                Some(arm) => waiting & (1 << arm) != 0,
                None => (0..plan.arms.len()).any(|arm| waiting & (1 << arm) != 0 && plan.arms[arm].shadow.is_none()),
            }
    }

    /// Makes every arm with another model wait for [`ExperimentState::note_served`].
    pub(super) fn wait_for_models(&self, plan: &ExperimentPlan) {
        let own = plan.arms.iter().enumerate().filter(|(_, arm)| arm.model.is_some());
        self.waiting.fetch_or(own.map(|(arm, _)| 1 << arm).sum(), Ordering::AcqRel);
    }

    /// Notes whether a ready backend of an arm serves the arm's model; `None`: no backend is ready.
    /// With `None`, an arm whose model was served before does not wait. The engine has failed, so a
    /// guardrail must decide. Returns whether a wait has started or ended.
    pub fn note_served(&self, arm: usize, served: Option<bool>) -> bool {
        let bit = 1 << arm;
        let before = match served {
            Some(true) => {
                self.served.fetch_or(bit, Ordering::AcqRel);
                self.waiting.fetch_and(!bit, Ordering::AcqRel)
            }
            None if self.served.load(Ordering::Acquire) & bit != 0 => self.waiting.fetch_and(!bit, Ordering::AcqRel),
            Some(false) | None => self.waiting.fetch_or(bit, Ordering::AcqRel),
        };
        (before ^ self.waiting.load(Ordering::Acquire)) & bit != 0
    }

    pub(super) fn copies(&self, arm: usize) -> &Arc<ArmCopies> {
        &self.copies[arm]
    }

    /// The share of units that take part.
    pub fn exposure(&self) -> f64 {
        f64::from_bits(self.exposure.load(Ordering::Acquire))
    }

    /// Sets the share of units that take part.
    pub fn set_exposure(&self, share: f64) {
        self.exposure.store(share.to_bits(), Ordering::Release);
    }

    /// A copy of the measurements and conclusions.
    pub fn progress(&self) -> Progress {
        self.progress.lock().clone()
    }

    /// When the experiment was first started; sets it to `now` if it never was.
    pub fn since(&self, now: Timestamp) -> Timestamp {
        let since = *self.progress.lock().since.get_or_insert(now.as_millisecond());
        Timestamp::from_millisecond(since).unwrap_or(now)
    }

    /// Counts a request that is assigned to an arm.
    pub fn note_assigned(&self, arm: usize, cell: u16) {
        self.progress.lock().arms[arm].note_assigned(cell);
    }

    /// Adds a finished request of an arm, and stops the arm if the request breaks a guardrail.
    pub fn observe(&self, plan: &ExperimentPlan, arm: usize, observation: &Observation) {
        let mut progress = self.progress.lock();
        let mut observation = *observation;
        ArmOrigins::blame(&mut self.origins.lock(), arm, &mut observation);
        progress.arms[arm].add(&observation);
        let bad = observation.is_failure() || (observation.blamed && observation.missed == Some(true));
        if arm > 0
            && bad
            && progress.stops[arm].is_none()
            && self.phase() == Phase::Running
            && let Some(broken) = verdict::guard(plan, progress.measured(), arm)
        {
            self.stop_arm(plan, arm, broken, &mut progress);
        }
    }

    pub(super) fn note_answer(&self, request_id: &str, arm: usize, group: usize) {
        self.recent.lock().note(request_id, arm, group);
    }

    /// Adds a user's rating of an answer. Returns the arm; `None`: unknown.
    pub(super) fn rate(&self, request_id: &str, good: bool) -> Option<usize> {
        let (arm, group, before) = self.recent.lock().rate(request_id, good)?;
        self.progress.lock().arms.get_mut(arm)?.quality.rate(group, good, before);
        Some(arm)
    }

    /// Adds a look at engines to the arms whose adapters they serve.
    pub fn note_adapters(&self, plan: &ExperimentPlan, seen: &[EngineAdapters]) {
        let mut progress = self.progress.lock();
        for (arm, looks) in plan.arms.iter().zip(&mut progress.engines) {
            if let Some((adapter, _)) = &arm.model {
                seen.iter().for_each(|engine| EngineLooks::note(looks, adapter, engine));
            }
        }
    }

    fn stop_arm(&self, plan: &ExperimentPlan, arm: usize, broken: &str, progress: &mut Progress) {
        let (experiment, name, requests) = (&plan.name, &plan.arms[arm].name, progress.arms[arm].requests());
        let why = format!("{name} was stopped after {requests} requests: it broke guardrail.{broken}");
        let then = match plan.arms[arm].shadow {
            Some(_) => "it gets no more copies",
            None => "its requests are served as without the experiment",
        };
        tracing::warn!("experiment {experiment}: {why}; {then}");
        progress.stops[arm] = Some(why.clone());
        self.stopped.fetch_or(1 << arm, Ordering::AcqRel);
        if progress.stops[1..].iter().all(Option::is_some) {
            progress.why = Some(why);
            self.set_phase(Phase::Stopped);
        } else {
            progress.controls[arm] = Some(progress.arms[0].clone());
        }
    }

    /// Records conclusions and confidence sequences, and promotes an arm if that is configured.
    pub fn review(&self, plan: &ExperimentPlan, now: Timestamp) -> Vec<Comparison> {
        let mut progress = self.progress.lock();
        let comparisons = verdict::compare(plan, progress.measured());
        if self.phase() != Phase::Running {
            return comparisons;
        }
        for comparison in &comparisons {
            let (arm, conclusion) = (comparison.arm, comparison.conclusion);
            if let Some(broken) = comparison.broken.filter(|_| progress.stops[arm].is_none()) {
                self.stop_arm(plan, arm, broken, &mut progress);
            }
            if conclusion == Conclusion::NotYet || progress.decisions[arm].is_some() {
                continue;
            }
            let (sentence, requests) = (comparison.sentence(plan), progress.arms[arm].requests());
            tracing::info!("experiment {}: {sentence}", plan.name);
            progress.decisions[arm] =
                Some(Decision { conclusion, sentence: sentence.clone(), at: now.as_millisecond(), requests });
            // Copies run only while there is free room, so an operator decides whether they prove
            // enough. A faster arm with worse answers is not promoted either.
            let worse_answers = comparison.quality.iter().any(|(_, worse)| *worse);
            let may_promote = plan.rules.promote && plan.arms[arm].shadow.is_none() && !worse_answers;
            if conclusion == Conclusion::Better && may_promote && progress.stops[arm].is_none() {
                progress.why = Some(format!("{} was promoted: {sentence}", plan.arms[arm].name));
                self.set_phase(Phase::Promoted(arm));
            }
        }
        progress.note(moment(&comparisons, now));
        comparisons
    }
}

impl Progress {
    fn resize(&mut self, arms: usize) {
        self.arms.resize(arms, ArmLedger::default());
        self.controls.resize(arms, None);
        self.stops.resize(arms, None);
        self.decisions.resize(arms, None);
        self.engines.resize(arms, Vec::new());
    }

    /// The measurements of all arms.
    pub fn measured(&self) -> Measured<'_> {
        Measured { arms: &self.arms, controls: &self.controls }
    }

    /// Adds a [`Moment`], unless the last one is too recent.
    fn note(&mut self, moment: Moment) {
        let span = |history: &[Moment]| Some(history.last()?.at - history.first()?.at);
        let near = span(&self.history).unwrap_or_default() * 2 / HISTORY as i64;
        if self.history.last().is_some_and(|last| moment.at - last.at < near) {
            return;
        }
        self.history.push(moment);
        if self.history.len() > HISTORY {
            let mut number = 0;
            self.history.retain(|_| {
                number += 1;
                number % 2 == 1
            });
        }
    }
}

fn moment(comparisons: &[Comparison], at: Timestamp) -> Moment {
    let of = |comparison: &Comparison| {
        Quantity::JUDGED.map(|quantity| {
            let change = comparison.findings[quantity as usize].ratio.change;
            change.is_bounded().then_some([change.value, change.low, change.high])
        })
    };
    Moment { at: at.as_millisecond(), changes: comparisons.iter().map(of).collect() }
}
