//! The life cycle of one engine that the gateway runs: a state machine without clock and I/O.
//!
//! ```text
//!   Recover --> Adopt (as Start, for an engine that an earlier gateway left), or Stop
//!   Off --> Start --> Adapters --> Golden --> WarmUp --> Ramp --> Serve
//!     one of these fails, or the engine dies: Stop --> Start (the settings before a change)
//!                                             Stop --> Backoff --> Start (within the budget)
//!                                             Stop --> Hold (budget spent, or a retry cannot help)
//!   Serve --change--> Drain --> Stop --> Start ..
//!   Serve --change--> Drain --> Sleep --> Start ..   (the old engine is kept asleep)
//!     back to the old settings: Stop --> Wake --> Adapters ..
//!   Serve --rest--> Drain --> Stop --> Idle --wake--> Stop --> Start ..   (wake in Drain: Serve)
//!   Serve --rest--> Drain --> Sleep --> Asleep --wake--> Wake --> Serve   (if it can sleep)
//!                             Asleep for too long: Stop --> Idle
//! ```
//!
//! Each step has one effect (`engine::effects`); then [`Lifecycle::on`] decides the next step.
//! - An engine starts only after a confirmed stop: never two of one backend or on one device,
//!   except for one that is kept asleep ([`kept`]).
//! - A planned change stops an engine when it is drained and, except with `hold`, other backends
//!   serve the models. If the drain takes too long, the change is given up, except with `cut`.
//! - Settings are `good` once they served for the settling time. A failed change returns to the
//!   settings before the change. A crash before the settling time returns to the good settings.
//! - A rest stops an engine when it is drained. If the drain takes too long, the engine serves on.
//! - Unplanned restarts: [`RestartRules::restarts`] per [`RestartRules::window_ms`], each after
//!   twice the last wait. Then `Hold`, until an operator enables the engine or the settings change.

mod blocked;
mod change;
mod kept;
mod recovery;
mod rest;
mod step;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use sluice_gateway::pool::Cordon;

pub use blocked::RestartBlocked;
pub use change::ChangeRefused;
pub(crate) use change::{Change, ChangeRequest, EndedChange, Keep, Kept, Outcome, TakenBack};
pub(crate) use recovery::{Difference, Recovery, Survivor};
pub use step::Step;

/// Why a step failed or an engine was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StepFailure {
    /// The cause, and the remedy.
    pub why: String,
    /// Whether the same settings would fail again, so that they are not retried.
    pub permanent: bool,
}

impl StepFailure {
    /// A failure that a retry may overcome.
    pub(crate) fn temporary(why: impl Into<String>) -> Self {
        Self { why: why.into(), permanent: false }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The effect is complete. In `Serve`: the settling time has passed.
    Done,
    /// The effect failed.
    Failed(StepFailure),
    /// The engine died or hangs.
    EngineLost(StepFailure),
}

/// Limits of unplanned restarts, times in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RestartRules {
    /// Most unplanned restarts within the window.
    pub restarts: usize,
    /// Length of the window.
    pub window_ms: u64,
    /// The first wait before an unplanned restart; doubles with each.
    pub backoff_ms: u64,
    /// The longest wait.
    pub backoff_max_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AfterStop {
    Start,
    Backoff,
    Hold,
    Idle,
}

/// The state of an engine, with everything that decides the next step. `S`: the settings.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Lifecycle<S> {
    /// The step under way.
    pub step: Step,
    /// The settings that run, or are being brought up.
    pub wanted: S,
    /// The last settings that served for the settling time; until then, the configured ones.
    pub good: S,
    /// The planned change under way.
    pub change: Option<Change<S>>,
    /// How the last change ended.
    pub ended: Option<EndedChange>,
    /// The settings that the last change requested, if they are not in force.
    pub taken_back: Option<TakenBack<S>>,
    /// Whether the engine must end in `Off`.
    pub leaving: bool,
    /// Whether the engine must end in `Idle` or `Asleep`, because it is not wanted now.
    #[serde(default)]
    pub resting: bool,
    /// Whether the engine sleeps while it rests, instead of being stopped.
    #[serde(default)]
    sleeps: bool,
    /// The engine that sleeps next to the present one.
    #[serde(default)]
    pub kept: Option<Kept<S>>,
    /// The last failure, while it is relevant.
    pub why: Option<String>,
    then: AfterStop,
    /// Times of unplanned restarts, oldest first; at most one more than the budget.
    restarts: Vec<u64>,
    attempts: u32,
    /// Whether the settings came from a new configuration at a start, not from the last change.
    #[serde(default)]
    reconfigured: bool,
    /// Whether the running engine was taken over from an earlier gateway or woke, so that it is
    /// warm.
    #[serde(skip)]
    pub adopted: bool,
    /// Whether the engine is out of rotation, because another one is about to replace it.
    #[serde(skip)]
    pub withdrawn: bool,
    /// Why the configuration in force is not applied yet.
    #[serde(skip)]
    pub blocked: Option<RestartBlocked>,
}

impl<S: Clone + PartialEq> Lifecycle<S> {
    /// An engine of which only the configuration is known.
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
            sleeps: false,
            kept: None,
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
        let ChangeRequest { id, to, cut, hold, keep } = request;
        let from = self.wanted.clone();
        match self.step {
            Step::Serve => self.step = Step::Drain,
            // No engine serves, so there is nothing to drain or return to. An idle engine stays
            // stopped, and one that sleeps is stopped.
            Step::Hold | Step::Backoff | Step::Off | Step::Idle | Step::Asleep => {
                self.end(Outcome::Aborted("another change was requested".to_owned()));
                self.wanted = to.clone();
                self.reset_budget();
                self.stop_then(self.after_stop());
            }
            busy => return Err(RestartBlocked::Busy(busy).into()),
        }
        self.change = Some(Change { id, from, to, cut, hold, keep, failed: None });
        // Earlier failures are not the reason of this change.
        (self.blocked, self.taken_back, self.why) = (None, None, None);
        self.reconfigured = false;
        Ok(())
    }

    /// Retries now, with a fresh budget, in `Hold`, `Backoff` and `Off`; does nothing in other
    /// steps.
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

    /// Drains and stops the engine and ends in `Off`, or in `Hold` if the stop is not confirmed.
    pub(crate) fn leave(&mut self) {
        (self.leaving, self.why) = (true, None);
        self.forget_kept();
        if let Some(change) = &self.change {
            // The next start uses the settings that served.
            self.wanted = change.from.clone();
        }
        self.end(Outcome::Aborted("the gateway stops, or the backend is no longer configured".to_owned()));
        self.step = match self.step {
            Step::Serve | Step::Ramp | Step::Drain => Step::Drain,
            Step::Off | Step::Idle => Step::Off,
            Step::Sleep | Step::Asleep => {
                self.then = self.after_stop();
                Step::Stop
            }
            _ => Step::Stop,
        };
    }

    /// Decides the next step when the effect has ended or the engine was lost.
    pub(crate) fn on(&mut self, event: Event, rules: &RestartRules, now_ms: u64) {
        match (self.step, event) {
            (Step::Recover | Step::Off | Step::Idle | Step::Hold, _) => {}
            (Step::Drain, Event::Done) if self.resting && self.sleeps && !self.leaving => self.step = Step::Sleep,
            (Step::Drain, Event::Done) if self.keeps_old() => self.step = Step::Sleep,
            (Step::Drain, Event::Done | Event::EngineLost(_)) => self.drained(),
            (Step::Sleep, Event::Done) if self.change.is_some() => self.kept_old(),
            // An old engine that cannot sleep is stopped, as without `keep`.
            (Step::Sleep, Event::Failed(_) | Event::EngineLost(_)) if self.change.is_some() => self.drained(),
            (Step::Sleep, Event::Done) => self.step = if self.resting { Step::Asleep } else { Step::Wake },
            // An engine that cannot sleep is stopped, and so is one that slept too long, to free
            // the host's memory.
            (Step::Sleep, Event::Failed(failure) | Event::EngineLost(failure)) => {
                self.why = Some(failure.why);
                self.stop_then(self.after_stop());
            }
            (Step::Asleep, Event::Done | Event::Failed(_) | Event::EngineLost(_)) => self.stop_then(AfterStop::Idle),
            (Step::Wake, Event::Done) => self.woken(),
            (Step::Wake, Event::Failed(failure) | Event::EngineLost(failure)) if self.kept.is_some() => {
                self.did_not_wake(failure.why);
            }
            (Step::Drain, Event::Failed(failure)) => {
                // If no other backend serves the models, cutting requests does not help, and the
                // change is given up.
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
            (Step::Stop, Event::EngineLost(_)) => {}
            (Step::Stop, Event::Failed(failure)) => self.stop_trying(failure.why),
            (Step::Backoff, Event::Done) => self.bring_up(),
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

    /// Whether the running settings are good, without a recent failure.
    pub(crate) fn is_settled(&self) -> bool {
        self.wanted == self.good && self.attempts == 0
    }

    pub(crate) fn backoff_ms(&self, rules: &RestartRules) -> u64 {
        let doublings = self.attempts.saturating_sub(1).min(20);
        rules.backoff_ms.saturating_mul(1 << doublings).min(rules.backoff_max_ms)
    }

    /// How long an engine that failed and is being stopped waits for the next start; `None`: it is
    /// not started again.
    pub(crate) fn next_try_ms(&self, rules: &RestartRules) -> Option<u64> {
        match self.then {
            AfterStop::Start => Some(0),
            AfterStop::Backoff => Some(self.backoff_ms(rules)),
            AfterStop::Hold | AfterStop::Idle => None,
        }
    }

    pub(crate) fn restarts_within(&self, rules: &RestartRules, now_ms: u64) -> usize {
        self.restarts.iter().filter(|at| now_ms.saturating_sub(**at) < rules.window_ms).count()
    }

    /// Takes a serving engine out of rotation before the replacement.
    pub(crate) fn withdraw(&mut self) {
        self.withdrawn = true;
    }

    /// Undoes [`Lifecycle::withdraw`].
    pub(crate) fn reinstate(&mut self) {
        self.withdrawn = false;
    }

    /// Records why the configuration cannot be applied yet. Returns whether the reason is new.
    pub(crate) fn block(&mut self, reason: RestartBlocked) -> bool {
        let is_new = !self.blocked.as_ref().is_some_and(|before| before.is_same_reason(&reason));
        self.blocked = Some(reason);
        is_new
    }

    /// Notes that the configuration was applied, or is given up.
    pub(crate) fn unblock(&mut self) {
        self.blocked = None;
    }

    /// Notes that the engine is gone, after a failed stop.
    pub(crate) fn confirm_stopped(&mut self) {
        (self.step, self.leaving) = (Step::Off, true);
    }

    /// Notes that another attempt to stop the engine failed.
    pub(crate) fn stop_failed(&mut self, why: String) {
        self.why = Some(why);
    }

    /// Whether a ramp opens the backend. An engine that was withdrawn stays closed after a crash.
    pub(crate) fn opens_in_ramp(&self) -> bool {
        !self.withdrawn && !self.leaving
    }

    /// The cordon when the step begins; `None`: unchanged. A ramp opens the backend together with a
    /// limit on slots. The backend of an engine that is shut down may already have another engine.
    pub(crate) fn cordon(&self) -> Option<Cordon> {
        if self.leaving {
            return None;
        }
        match self.step {
            Step::Drain => Some(Cordon::Draining),
            Step::Serve | Step::Ramp if self.withdrawn => Some(Cordon::Draining),
            Step::Ramp => None,
            Step::Serve => Some(Cordon::Open),
            Step::Idle | Step::Stop | Step::Sleep | Step::Asleep if self.resting => Some(Cordon::Idle),
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

    /// The step after an engine was stopped without a failure.
    fn after_stop(&self) -> AfterStop {
        if self.resting { AfterStop::Idle } else { AfterStop::Start }
    }

    fn stopped(&mut self) {
        match self.then {
            AfterStop::Idle if self.resting => {
                self.step = Step::Idle;
                self.end_change();
            }
            // `Idle` without `resting` comes after an earlier stop that had failed.
            AfterStop::Start | AfterStop::Idle => self.bring_up(),
            AfterStop::Backoff => self.step = Step::Backoff,
            AfterStop::Hold => {
                let why = self.why.clone().unwrap_or_default();
                self.stop_trying(why);
            }
        }
    }

    fn stop_trying(&mut self, why: String) {
        self.forget_kept();
        (self.step, self.resting) = (Step::Hold, false);
        self.why = Some(why.clone());
        self.end(Outcome::Held(why));
    }

    /// Stops the engine, then starts the settings before the change, or the good ones after a wait.
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
        // From here this is an ordinary unplanned restart, and other changes need not wait for it.
        if self.change.as_ref().is_some_and(|change| change.failed.is_some()) || self.attempts > 1 {
            self.end(Outcome::Failed(failure.why));
        }
        self.stop_then(AfterStop::Backoff);
    }

    fn stop_then(&mut self, then: AfterStop) {
        if matches!(then, AfterStop::Hold | AfterStop::Idle) {
            self.forget_kept();
        }
        (self.step, self.then, self.adopted) = (Step::Stop, then, false);
    }

    /// Takes back settings that did not serve for the settling time. The change that brought them
    /// is rolled back, unless the configuration brought them at a start.
    fn take_back(&mut self, asked: S, why: String) {
        let is_change = !self.reconfigured;
        let ended = self.ended.as_mut().filter(|ended| is_change && ended.outcome == Outcome::Done);
        let id = ended.map_or(0, |ended| {
            ended.outcome = Outcome::RolledBack(why.clone());
            ended.id
        });
        self.taken_back = Some(TakenBack { id, asked, why });
    }

    /// Records requested settings that were refused before a change began.
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
