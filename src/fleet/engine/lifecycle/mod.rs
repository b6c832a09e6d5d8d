//! The life cycle of one engine that the gateway runs, as a state machine without clock and without I/O.
//!
//! ```text
//!   Recover --> Adopt (an engine of an earlier gateway: like Start, but nothing is spawned), or Stop
//!   Off --> Start --> Adapters --> Golden --> WarmUp --> Ramp --> Serve --change--> Drain --> Stop --> Start ..
//!             |  any of these fails, or the engine dies: Stop --> Start (back to what ran before a change)
//!             |                                          Stop --> Backoff --> Start (within the budget)
//!             |                                          Stop --> Hold (budget spent, or no retry can help)
//!   Serve --rest--> Drain --> Stop --> Idle --wake--> Stop --> Start ..     a wake during the drain: Serve again
//! ```
//!
//! Each step has one effect (`engine::effects`). When it ends, [`Lifecycle::on`] decides what comes next. Rules:
//! - an engine is started only after a confirmed stop: never two engines of one backend, never two on one device;
//! - a planned change stops an engine only when it is drained and other backends can serve its models; past the deadline of
//!   the drain the change is given up, unless it was requested with `cut`;
//! - settings are `good` once they served for the settling time. A change that fails returns to what ran before it, a
//!   crash before that time to what was good;
//! - an engine that is not wanted (autoscaling) is stopped only when it is drained; past the deadline of the drain it serves on.
//!   A change of one that is idle is in force with its next start;
//! - unplanned restarts: at most [`RestartRules::restarts`] per [`RestartRules::window_ms`], each after twice the wait of the
//!   one before, then `Hold` until an operator enables the engine or the settings change.
//!
//! The state is written to the journal before each step; [`Lifecycle::recover`] goes on from there. `S` are the settings,
//! opaque here. Fields are read by anyone and written here only.

mod blocked;
mod change;
mod recovery;
mod rest;
mod step;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use sluice_gateway::pool::Cordon;

pub use blocked::RestartBlocked;
pub use change::ChangeRefused;
pub(crate) use change::{Change, ChangeRequest, EndedChange, Outcome, TakenBack};
pub(crate) use recovery::{Difference, Recovery, Survivor};
pub use step::Step;

/// Why a step failed or an engine was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StepFailure {
    /// What happened, and what to do about it.
    pub why: String,
    /// The same settings would fail the same way: they are not tried again.
    pub permanent: bool,
}

impl StepFailure {
    /// One that another attempt may overcome.
    pub(crate) fn temporary(why: impl Into<String>) -> Self {
        Self { why: why.into(), permanent: false }
    }
}

/// How a step ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The effect is complete. In `Serve`: the engine has served for the settling time.
    Done,
    /// The effect failed.
    Failed(StepFailure),
    /// The engine died or hangs.
    EngineLost(StepFailure),
}

/// Limits of unplanned restarts. Times in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RestartRules {
    /// Unplanned restarts within the window.
    pub restarts: usize,
    /// The window.
    pub window_ms: u64,
    /// The first wait before an unplanned restart; doubles with each.
    pub backoff_ms: u64,
    /// The longest wait.
    pub backoff_max_ms: u64,
}

/// What follows a confirmed stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AfterStop {
    Start,
    Backoff,
    Hold,
    Idle,
}

/// Where an engine stands, with all that decides what follows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Lifecycle<S> {
    /// The step under way.
    pub step: Step,
    /// The settings that run, or are being brought up.
    pub wanted: S,
    /// The last that served for the settling time; before that, those of the configuration.
    pub good: S,
    /// The planned change under way.
    pub change: Option<Change<S>>,
    /// How the last one ended.
    pub ended: Option<EndedChange>,
    /// What the last one asked for, where that is not in force.
    pub taken_back: Option<TakenBack<S>>,
    /// It is to end in `Off`.
    pub leaving: bool,
    /// Autoscaling wants it to be stopped: it is to end in `Idle`.
    #[serde(default)]
    pub resting: bool,
    /// The last failure, while it still matters.
    pub why: Option<String>,
    then: AfterStop,
    /// When unplanned restarts were counted, oldest first; at most one more than the budget.
    restarts: Vec<u64>,
    /// Unplanned restarts in a row.
    attempts: u32,
    /// The running settings come from the configuration at a start, and not from the last change.
    #[serde(default)]
    reconfigured: bool,
    /// The engine that runs was taken over from an earlier gateway: it is warm.
    #[serde(skip)]
    pub adopted: bool,
    /// The engine serves, and is kept out of rotation because another one is about to replace it.
    #[serde(skip)]
    pub withdrawn: bool,
    /// Why the configuration in force has not been applied to the engine yet.
    #[serde(skip)]
    pub blocked: Option<RestartBlocked>,
}

impl<S: Clone + PartialEq> Lifecycle<S> {
    /// An engine that is configured like this and of which nothing else is known yet.
    pub(crate) fn new(settings: S) -> Self {
        Self {
            step: Step::Recover,
            wanted: settings.clone(),
            good: settings,
            change: None,
            ended: None,
            taken_back: None,
            leaving: false,
            resting: false,
            why: None,
            then: AfterStop::Start,
            restarts: Vec::new(),
            attempts: 0,
            reconfigured: false,
            adopted: false,
            withdrawn: false,
            blocked: None,
        }
    }

    /// Starts a change to other settings, or a restart with the same.
    ///
    /// # Errors
    /// Another step is under way, or the engine is being shut down. Nothing has changed then.
    pub(crate) fn change(&mut self, request: ChangeRequest<S>) -> Result<(), ChangeRefused> {
        if self.leaving {
            return Err(ChangeRefused::ShuttingDown);
        }
        let ChangeRequest { id, to, cut, hold } = request;
        let from = self.wanted.clone();
        match self.step {
            Step::Serve => self.step = Step::Drain,
            // Nothing serves, so there is nothing to drain and nothing worth going back to. An idle engine stays stopped.
            Step::Hold | Step::Backoff | Step::Off | Step::Idle => {
                self.end(Outcome::Aborted("another change was requested".to_owned()));
                self.wanted = to.clone();
                self.reset_budget();
                self.stop_then(self.after_stop());
            }
            busy => return Err(RestartBlocked::Busy(busy).into()),
        }
        self.change = Some(Change { id, from, to, cut, hold, failed: None });
        // What went wrong before is not the reason of this change.
        (self.blocked, self.taken_back, self.why) = (None, None, None);
        self.reconfigured = false;
        Ok(())
    }

    /// Tries again now, with a fresh budget, in `Hold`, `Backoff` and `Off`; no effect in other steps.
    ///
    /// # Errors
    /// The engine is being shut down.
    pub(crate) fn enable(&mut self) -> Result<(), ChangeRefused> {
        if self.leaving {
            return Err(ChangeRefused::ShuttingDown);
        }
        if matches!(self.step, Step::Hold | Step::Backoff | Step::Off) {
            self.reset_budget();
            self.stop_then(AfterStop::Start);
        }
        Ok(())
    }

    /// Shuts the engine down: drained, stopped, `Off`; `Hold` if the stop cannot be confirmed.
    pub(crate) fn leave(&mut self) {
        (self.leaving, self.why) = (true, None);
        if let Some(change) = &self.change {
            // The next start begins with what has served.
            self.wanted = change.from.clone();
        }
        self.end(Outcome::Aborted("the gateway stops, or the backend is no longer configured".to_owned()));
        self.step = match self.step {
            Step::Serve | Step::Ramp | Step::Drain => Step::Drain,
            Step::Off | Step::Idle => Step::Off,
            _ => Step::Stop,
        };
    }

    /// The step's effect has ended, or the engine was lost: decides what comes next.
    pub(crate) fn on(&mut self, event: Event, rules: &RestartRules, now_ms: u64) {
        match (self.step, event) {
            (Step::Recover | Step::Off | Step::Idle | Step::Hold, _) => {}
            (Step::Drain, Event::Done | Event::EngineLost(_)) => self.drained(),
            (Step::Drain, Event::Failed(failure)) => {
                // Without replacement capacity cutting does not help: the change is given up.
                let cut = self.change.as_ref().is_some_and(|change| change.cut) && !failure.permanent;
                if self.leaving || cut {
                    self.drained();
                } else {
                    self.end(Outcome::Aborted(failure.why));
                    (self.step, self.resting) = (Step::Serve, false);
                }
            }
            (Step::Stop, Event::Done | Event::EngineLost(_)) if self.leaving => self.step = Step::Off,
            (Step::Stop, Event::Done) => self.stopped(),
            // The stop goes on.
            (Step::Stop, Event::EngineLost(_)) => {}
            (Step::Stop, Event::Failed(failure)) => self.stop_trying(failure.why),
            (Step::Backoff, Event::Done) => self.step = Step::Start,
            (Step::Backoff, Event::Failed(_) | Event::EngineLost(_)) => {}
            (Step::Start | Step::Adopt, Event::Done) => self.step = Step::Adapters,
            (Step::Adapters, Event::Done) => self.step = Step::Golden,
            (Step::Golden, Event::Done) => self.step = Step::WarmUp,
            (Step::WarmUp, Event::Done) => self.step = Step::Ramp,
            (Step::Ramp, Event::Done) => {
                self.step = Step::Serve;
                self.end_change();
            }
            (Step::Serve, Event::Done) => {
                self.good = self.wanted.clone();
                self.reset_budget();
            }
            (_, Event::Failed(failure) | Event::EngineLost(failure)) => self.recover_from(failure, rules, now_ms),
        }
    }

    /// Whether the settings that run are known to be good, and nothing went wrong lately.
    pub(crate) fn is_settled(&self) -> bool {
        self.wanted == self.good && self.attempts == 0
    }

    /// The wait in `Backoff`.
    pub(crate) fn backoff_ms(&self, rules: &RestartRules) -> u64 {
        let doublings = self.attempts.saturating_sub(1).min(20);
        rules.backoff_ms.saturating_mul(1 << doublings).min(rules.backoff_max_ms)
    }

    /// How long an engine that is being stopped after a failure waits for its next start; `None`: it is not started again.
    pub(crate) fn next_try_ms(&self, rules: &RestartRules) -> Option<u64> {
        match self.then {
            AfterStop::Start => Some(0),
            AfterStop::Backoff => Some(self.backoff_ms(rules)),
            AfterStop::Hold | AfterStop::Idle => None,
        }
    }

    /// Unplanned restarts within the window that ends now.
    pub(crate) fn restarts_within(&self, rules: &RestartRules, now_ms: u64) -> usize {
        self.restarts.iter().filter(|at| now_ms.saturating_sub(**at) < rules.window_ms).count()
    }

    /// Takes a serving engine out of rotation, to be replaced.
    pub(crate) fn withdraw(&mut self) {
        self.withdrawn = true;
    }

    /// It is not replaced after all.
    pub(crate) fn reinstate(&mut self) {
        self.withdrawn = false;
    }

    /// Notes why the configuration cannot be applied yet. Whether that is another reason than before.
    pub(crate) fn block(&mut self, reason: RestartBlocked) -> bool {
        let is_new = !self.blocked.as_ref().is_some_and(|before| before.is_same_reason(&reason));
        self.blocked = Some(reason);
        is_new
    }

    /// The configuration is applied, or is not tried any more.
    pub(crate) fn unblock(&mut self) {
        self.blocked = None;
    }

    /// An engine that could not be stopped in order is known to be gone.
    pub(crate) fn confirm_stopped(&mut self) {
        (self.step, self.leaving) = (Step::Off, true);
    }

    /// An engine that could not be stopped in order still cannot.
    pub(crate) fn stop_failed(&mut self, why: String) {
        self.why = Some(why);
    }

    /// Whether a ramp opens the backend: not one that came back after it was withdrawn.
    pub(crate) fn opens_in_ramp(&self) -> bool {
        !self.withdrawn && !self.leaving
    }

    /// The cordon set in admission when the step begins; `None`: no change. A ramp opens the backend itself, together with a
    /// limit on slots; the place of an engine that is shut down may belong to another one by now.
    pub(crate) fn cordon(&self) -> Option<Cordon> {
        if self.leaving {
            return None;
        }
        match self.step {
            Step::Drain => Some(Cordon::Draining),
            Step::Serve | Step::Ramp if self.withdrawn => Some(Cordon::Draining),
            Step::Ramp => None,
            Step::Serve => Some(Cordon::Open),
            Step::Idle | Step::Stop if self.resting => Some(Cordon::Idle),
            step if !step.is_coming() => Some(Cordon::Down),
            _ => Some(Cordon::Starting),
        }
    }

    fn drained(&mut self) {
        if let Some(change) = &self.change {
            self.wanted = change.to.clone();
        }
        self.stop_then(self.after_stop());
    }

    /// What follows the stop of an engine that did not fail.
    fn after_stop(&self) -> AfterStop {
        if self.resting { AfterStop::Idle } else { AfterStop::Start }
    }

    fn stopped(&mut self) {
        match self.then {
            AfterStop::Idle if self.resting => {
                self.step = Step::Idle;
                self.end_change();
            }
            // Its stop had failed before.
            AfterStop::Start | AfterStop::Idle => self.step = Step::Start,
            AfterStop::Backoff => self.step = Step::Backoff,
            AfterStop::Hold => {
                let why = self.why.clone().unwrap_or_default();
                self.stop_trying(why);
            }
        }
    }

    fn stop_trying(&mut self, why: String) {
        (self.step, self.resting) = (Step::Hold, false);
        self.why = Some(why.clone());
        self.end(Outcome::Held(why));
    }

    /// Stops whatever ran; then starts the settings before a change, or the good ones after a wait.
    fn recover_from(&mut self, failure: StepFailure, rules: &RestartRules, now_ms: u64) {
        self.why = Some(failure.why.clone());
        if let Some(change) = self.change.as_mut()
            && change.failed.is_none()
            && change.from != change.to
        {
            change.failed = Some(failure.why);
            self.wanted = change.from.clone();
            return self.stop_then(AfterStop::Start);
        }
        let settled = self.wanted == self.good;
        let asked = std::mem::replace(&mut self.wanted, self.good.clone());
        if !settled && self.change.is_none() {
            self.take_back(asked, format!("it did not serve for fleet.settle: {}", failure.why));
        }
        self.restarts.retain(|at| now_ms.saturating_sub(*at) < rules.window_ms);
        self.restarts.push(now_ms);
        self.attempts = self.attempts.saturating_add(1);
        let spent = self.restarts.len() > rules.restarts;
        if spent || (settled && failure.permanent) {
            return self.stop_then(AfterStop::Hold);
        }
        // From here on it is an unplanned restart like any other, and other changes need not wait for it.
        if self.change.as_ref().is_some_and(|change| change.failed.is_some()) || self.attempts > 1 {
            self.end(Outcome::Failed(failure.why));
        }
        self.stop_then(AfterStop::Backoff);
    }

    fn stop_then(&mut self, then: AfterStop) {
        (self.step, self.then, self.adopted) = (Step::Stop, then, false);
    }

    /// Settings that served, but for less than the settling time, are no longer in force: the
    /// change that brought the settings is rolled back. If the configuration brought them at a
    /// start, no change is rolled back.
    fn take_back(&mut self, asked: S, why: String) {
        let is_change = !self.reconfigured;
        let ended = self.ended.as_mut().filter(|ended| is_change && ended.outcome == Outcome::Done);
        let id = ended.map_or(0, |ended| {
            ended.outcome = Outcome::RolledBack(why.clone());
            ended.id
        });
        self.taken_back = Some(TakenBack { id, asked, why });
    }

    /// Settings that were asked for were refused before a change to them began.
    pub(crate) fn refuse(&mut self, asked: S, why: String) {
        if self.taken_back.is_none() && self.wanted != asked {
            self.taken_back = Some(TakenBack { id: 0, asked, why });
        }
    }

    fn reset_budget(&mut self) {
        self.attempts = 0;
        self.restarts.clear();
        self.why = None;
    }

    fn end_change(&mut self) {
        let Some(change) = &self.change else { return };
        let outcome = match &change.failed {
            Some(why) => Outcome::RolledBack(why.clone()),
            None if self.wanted == change.to => Outcome::Done,
            None => Outcome::RolledBack(self.why.clone().unwrap_or_default()),
        };
        self.end(outcome);
    }

    fn end(&mut self, outcome: Outcome) {
        let Some(Change { id, from, to, .. }) = self.change.take() else { return };
        self.taken_back = match &outcome {
            Outcome::Done => None,
            Outcome::Aborted(why) | Outcome::RolledBack(why) | Outcome::Failed(why) | Outcome::Held(why) => {
                (from != to).then(|| TakenBack { id, asked: to, why: why.clone() })
            }
        };
        self.ended = Some(EndedChange { id, outcome });
    }
}
