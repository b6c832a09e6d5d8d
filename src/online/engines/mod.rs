//! The slow layer: changes flags by restarting engines one by one, where limits no longer help.
//!
//! A change begins if the certain gain ([`Trust`]) in a simulation is at least
//! [`verdict::ENGINE_GAIN`] of the loss. Over the time for which the load should last, the gain
//! must also exceed [`decide::PAYS`] times the cost of the restarts. A load should last as long
//! again as it has (Lindy's law), within [`decide::DWELL`]. [`phase`] has the stages of a change,
//! [`trial`] and [`verdict`] their rules. Two failures without a promotion in between freeze the
//! tuner.
//!
//! Pure: the caller simulates, restarts engines and reports the results. Bounds: one change at a
//! time.

pub mod flags;
pub mod forecast;
pub mod proof;
pub mod change;
pub mod look;
pub mod advice;
mod pooled;
pub mod saved;
pub(crate) mod phase;
mod verdict;
mod trial;
mod decide;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use self::change::{EngineChange, Stage};
use self::flags::EngineFlag;
use self::forecast::{Realised, Trust};
use self::look::{EngineLook, EngineRules, TunerOrder};
use self::phase::{EngineTrial, Phase, Restart, Step};
use self::pooled::Pooled;
use self::saved::{SavedChange, SavedClosing, SavedEngines};
use crate::event::{Acting, Event, EventKind};
use crate::gate::{Closing, Closings, Proposals};
use crate::limits::PoolLimits;
use sluice_config::{Config, Experiment};

/// A simulation without an answer after this time has failed.
const SIMULATED: Duration = Duration::from_secs(3_600);
/// A longer time between two looks shows that the gateway stood still and missed events.
const STOOD_STILL: Duration = Duration::from_secs(60);
/// How long a value that failed stays closed: the first time, and at most.
const CLOSED: (Duration, Duration) = (Duration::from_secs(6 * 3_600), Duration::from_secs(7 * 24 * 3_600));
const HOUR: Duration = Duration::from_secs(3_600);

/// Changes flags of engines, one change at a time.
#[derive(Debug)]
pub struct EngineTuner {
    rules: EngineRules,
    pub(crate) phase: Phase,
    pub(crate) proposals: Proposals<EngineChange>,
    trust: Trust,
    /// Number of changes so far, proposed ones included.
    numbers: u64,
    /// Values that failed, by pool and flag.
    closed: Closings<(String, EngineFlag, f64), ()>,
    /// The restarts of the last hour.
    restarts: VecDeque<Duration>,
    failures: u32,
    frozen: Option<String>,
    lasts: Option<Duration>,
    pooled: BTreeMap<String, Pooled>,
    asked_last: Option<String>,
    /// Misses that ended changes caused, decayed.
    spent: f64,
    /// When `spent` last decayed.
    spent_at: Duration,
    looked: Option<Duration>,
    /// The pool and limits of a promoted change, for the controller.
    pub(crate) adopted: Option<(String, PoolLimits)>,
    /// The pool, limits that a simulation found better without a change of engines, and why.
    pub(crate) suggested: Option<(String, PoolLimits, String)>,
    /// Suggestions, each with the moment until which it is not repeated.
    suggestions: Vec<(String, PoolLimits, Duration)>,
    belief: String,
    events: Vec<Event>,
}

impl EngineTuner {
    /// A tuner without a change under way.
    pub fn new(rules: EngineRules) -> Self {
        Self {
            rules,
            phase: Phase::Watching { from: Duration::ZERO },
            proposals: Proposals::NONE,
            trust: Trust::default(),
            numbers: 0,
            closed: Closings::new(CLOSED),
            restarts: VecDeque::new(),
            failures: 0,
            frozen: None,
            lasts: None,
            pooled: BTreeMap::new(),
            asked_last: None,
            spent: 0.0,
            spent_at: Duration::ZERO,
            looked: None,
            adopted: None,
            suggested: None,
            suggestions: Vec::new(),
            belief: "nothing was observed yet".to_owned(),
            events: Vec::new(),
        }
    }

    /// Replaces the rules.
    pub fn set_rules(&mut self, rules: EngineRules) {
        self.rules = rules;
    }

    fn trial(&self) -> Option<&EngineTrial> {
        if let Phase::Changing(trial) = &self.phase { Some(trial) } else { None }
    }

    fn trial_mut(&mut self) -> Option<&mut EngineTrial> {
        if let Phase::Changing(trial) = &mut self.phase { Some(trial) } else { None }
    }

    /// The change under way.
    pub fn change(&self) -> Option<&EngineChange> {
        Some(&self.trial()?.change)
    }

    /// The stage of the change under way.
    pub fn stage(&self) -> Option<Stage> {
        Some(self.trial()?.stage())
    }

    /// The pool and limits of a change that are in force now.
    pub(crate) fn limits_in_force(&self) -> Option<(String, PoolLimits)> {
        let trial = self.trial()?;
        Some((trial.change.pool.clone(), trial.change.limits_at(trial.stage())?))
    }

    pub(crate) fn experiment(&self, config: &Config) -> Option<Experiment> {
        let trial = self.trial()?;
        trial.change.experiment(trial.stage(), config)
    }

    /// Resumes after the tuner froze itself.
    pub fn thaw(&mut self) {
        (self.frozen, self.failures) = (None, 0);
    }

    /// The events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Measured changes, the oldest first.
    pub fn measured(&self) -> &[Realised] {
        self.trust.all()
    }

    /// The conclusion of the last decision, in words.
    pub fn belief(&self) -> &str {
        &self.belief
    }

    /// The present activity, in words.
    pub fn doing(&self) -> String {
        let trial = match &self.phase {
            Phase::Watching { .. } => return "watching".to_owned(),
            Phase::Simulating { .. } => return "simulates what may help".to_owned(),
            Phase::Changing(trial) => trial,
        };
        let change = &trial.change;
        let what = match trial.stage() {
            Stage::Canary => format!("{} restarts with it", change.canary()),
            Stage::Copies => format!("{} gets copies of requests", change.canary()),
            Stage::Recovery => "requests that waited meanwhile are served".to_owned(),
            Stage::Compared => format!("{} is compared with {}", change.canary(), change.control()),
            Stage::Promotion => format!("{} of {} engines have it", change.changed.len(), change.backends.len()),
            Stage::Return => "taken back".to_owned(),
        };
        let (from, to) = (change.flag.show(change.from), change.flag.show(change.to));
        format!("{} = {to} (was {from}): {what}", change.key())
    }

    /// The state for a later gateway.
    pub fn saved(&self, now: Duration) -> SavedEngines {
        let saved = |trial: &EngineTrial| SavedChange { change: trial.change.clone(), stage: trial.stage() };
        let closed = |closing: &Closing<(String, EngineFlag, f64), ()>| {
            let (pool, flag, to) = closing.key.clone();
            let left = closing.until.saturating_sub(now).as_secs();
            (SavedClosing { pool, flag, to, failures: closing.before }, left)
        };
        SavedEngines {
            change: self.trial().map(saved),
            trust: self.trust.clone(),
            numbers: self.numbers,
            failures: self.failures,
            lasts: self.lasts.unwrap_or_default().as_secs(),
            closed: self.closed.all().iter().map(closed).collect(),
            frozen: self.frozen.clone(),
            spent: self.spent,
            missed_before: self.trial().map_or(0.0, |trial| trial.missed_before),
            restarts: self.restarts.iter().map(|at| now.saturating_sub(*at).as_secs()).collect(),
        }
    }

    /// Takes over the state of an earlier gateway. A promotion goes on, and any other change is
    /// taken back. `is_same`: pools and limits are unchanged.
    pub fn restore(&mut self, saved: SavedEngines, is_same: bool, now: Duration) {
        self.trust = saved.trust;
        (self.numbers, self.failures) = (saved.numbers, saved.failures);
        (self.frozen, self.spent, self.spent_at) = (saved.frozen, saved.spent, now);
        let since = |ago: u64| now.checked_sub(Duration::from_secs(ago));
        self.restarts = saved.restarts.into_iter().map(|ago| since(ago).unwrap_or_default()).collect();
        self.lasts = Some(Duration::from_secs(saved.lasts)).filter(|lasts| !lasts.is_zero());
        let closing = |(SavedClosing { pool, flag, to, failures }, left)| Closing {
            key: (pool, flag, to),
            why: (),
            until: now + Duration::from_secs(left),
            before: failures,
        };
        self.closed.restore(saved.closed.into_iter().map(closing).collect());
        let Some(SavedChange { mut change, stage }) = saved.change else {
            // Another gateway may have finished the change.
            self.phase = Phase::Watching { from: now };
            return;
        };
        change.limits = change.limits.filter(|_| is_same);
        let goes_on = stage == Stage::Promotion;
        let step = if goes_on { Step::Promotion } else { Step::Return };
        // Misses since the save do not count.
        let mut trial = EngineTrial::new(change, step(Restart::at(now)));
        trial.missed_before = saved.missed_before;
        self.phase = Phase::Changing(Box::new(trial));
        if !goes_on {
            self.note(now, EventKind::StoodBack, "the gateway was restarted while it was tried".to_owned());
        }
    }

    /// Decides about once a second. Returns orders.
    pub fn step(&mut self, look: &EngineLook<'_>) -> Vec<TunerOrder> {
        let mut orders = Vec::new();
        let now = look.now;
        let looked = self.looked.replace(now).unwrap_or(now);
        let jumped = (now < looked).then(|| "the clock went backwards".to_owned());
        let gap = (now > looked + STOOD_STILL)
            .then(|| format!("the gateway stood still for {:.0} s", (now - looked).as_secs_f64()));
        if let Some(why) = self.interference(look).or(jumped).or(gap) {
            orders = self.stand_back(&why, now);
        }
        self.forget_misses(look);
        self.raise_bound(look);
        match &self.phase {
            Phase::Watching { from } if now >= *from => self.watch(look, &mut orders),
            Phase::Simulating { since, .. } if now >= *since + SIMULATED => {
                self.phase.enter(Phase::Watching { from: now });
            }
            Phase::Watching { .. } | Phase::Simulating { .. } => {}
            Phase::Changing(trial) => match trial.step().clone() {
                Step::Canary(own) | Step::Promotion(own) | Step::Return(own) => self.restart(look, own, &mut orders),
                Step::Copies(own) | Step::Recovery(own) | Step::Compared(own) | Step::Watched(own) => {
                    self.measure(look, own, &mut orders);
                }
            },
        }
        orders
    }

    pub(crate) fn forget(&mut self) {
        self.proposals.withdraw();
        self.suggested = None;
        self.suggestions.clear();
        self.pooled.clear();
        match &mut self.phase {
            Phase::Watching { .. } => {}
            Phase::Simulating { question, .. } => *question = None,
            // Engines return under the configured limits.
            Phase::Changing(trial) => trial.change.limits = None,
        }
    }

    /// Takes the change under way back.
    pub fn stand_back(&mut self, why: &str, now: Duration) -> Vec<TunerOrder> {
        let mut orders = Vec::new();
        if self.stage().is_some_and(|stage| stage != Stage::Return) {
            self.note(now, EventKind::StoodBack, why.to_owned());
            self.take_back(now, &mut orders);
        }
        orders
    }

    /// Why the change under way must be dropped.
    fn interference(&mut self, look: &EngineLook<'_>) -> Option<String> {
        let trial = self.trial_mut().filter(|trial| trial.stage() != Stage::Return)?;
        if look.acting == Acting::Proposes {
            return Some("the tuner may no longer make changes".to_owned());
        }
        if let Some(why) = look.stands_back {
            return Some(why.to_owned());
        }
        trial.measure()?;
        let change = &mut trial.change;
        let is_other = |backend: &&String| {
            let wanted = if change.changed.contains(*backend) { change.to } else { change.from };
            look.engine(&change.pool, backend).and_then(|engine| engine.flag(change.flag)) != Some(wanted)
        };
        let other = change.backends.iter().find(is_other)?.clone();
        change.leave_out(&other);
        Some(format!("{other} runs with other flags than the tuner gave it"))
    }

    fn restarts_left(&mut self, now: Duration) -> u32 {
        while self.restarts.front().is_some_and(|at| *at + HOUR <= now) {
            self.restarts.pop_front();
        }
        self.rules.restarts_per_hour.saturating_sub(u32::try_from(self.restarts.len()).unwrap_or(u32::MAX))
    }

    fn take_back(&mut self, now: Duration, orders: &mut Vec<TunerOrder>) {
        if let Some(trial) = self.trial_mut() {
            trial.enter(Step::Return(Restart::at(now)));
            orders.push(TunerOrder::Configure);
        }
    }

    fn note(&mut self, now: Duration, kind: EventKind, why: String) {
        let Some(change) = self.change() else { return };
        let (from, to) = (change.flag.show(change.from), change.flag.show(change.to));
        let values = if matches!(kind, EventKind::Undone | EventKind::StoodBack) { (to, from) } else { (from, to) };
        let event = Event { at: now.as_secs_f64(), kind, key: change.key(), values, why };
        self.events.push(event);
    }
}
