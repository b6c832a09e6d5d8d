//! The life of one engine that we run, as a state machine without clock and without I/O.
//!
//! ```text
//!   Off --> Start --> Adapters --> Golden --> WarmUp --> Ramp --> Serve --change--> Drain --> Stop --> Start ..
//!             |  any of these fails, or the engine dies: Stop --> Start (back to what ran before a change)
//!             |                                          Stop --> Backoff --> Start (within the budget)
//!             |                                          Stop --> Hold (budget spent, or no retry can help)
//!   after a crash of the gateway: Adopt (like Start, but nothing is spawned), or Stop
//! ```
//!
//! Each step has one effect, which somebody else carries out; when it ends, [`Lifecycle::on`] says what comes next. Rules:
//! - nothing is started but after a stop that was confirmed: never two engines of one backend, never two on one device;
//! - a planned change stops an engine only when it is drained and others can stand in; past the deadline the change is
//!   given up, unless it was asked for with `cut`;
//! - settings are `good` once they served for the settling time. A change that fails goes back to what ran before it, a
//!   crash before that time to what was good;
//! - unplanned restarts: at most [`Rules::restarts`] per [`Rules::window_ms`], each after twice the wait of the one before,
//!   then `Hold` until somebody says `enable` or changes the settings.
//!
//! The whole of it is written to the journal before a step begins; [`Lifecycle::recover`] goes on from there. `S` are the
//! settings, opaque here.

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

/// What is being done, or waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Nothing runs and nothing is wanted.
    Off,
    /// An engine of an earlier gateway is taken over.
    Adopt,
    /// No new requests; those under way finish.
    Drain,
    /// The engine and everything it started is ended, and that is confirmed.
    Stop,
    /// A process is started and must become ready.
    Start,
    /// Adapters that should be there are loaded.
    Adapters,
    /// It must answer, and as the one before it did.
    Golden,
    /// Requests that count for nobody.
    WarmUp,
    /// Back in rotation, with a growing share of its slots.
    Ramp,
    /// In rotation.
    Serve,
    /// A wait before the next attempt.
    Backoff,
    /// No attempt before somebody asks for one.
    Hold,
}

impl Step {
    /// The name in the admin API and in the journal.
    pub fn label(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Adopt => "adopt",
            Self::Drain => "drain",
            Self::Stop => "stop",
            Self::Start => "start",
            Self::Adapters => "adapters",
            Self::Golden => "golden",
            Self::WarmUp => "warm_up",
            Self::Ramp => "ramp",
            Self::Serve => "serve",
            Self::Backoff => "backoff",
            Self::Hold => "hold",
        }
    }

    /// Whether requests may be sent to the engine.
    pub fn in_rotation(self) -> bool {
        matches!(self, Self::Ramp | Self::Serve)
    }

    /// Whether it is worth waiting for the engine: it is on its way back without anybody's help.
    pub fn is_coming(self) -> bool {
        !matches!(self, Self::Off | Self::Hold)
    }

    /// Whether there may be a process.
    pub fn may_run(self) -> bool {
        !matches!(self, Self::Off | Self::Backoff)
    }
}

/// A planned restart under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Change<S> {
    /// Which one; grows.
    pub id: u64,
    /// What ran before.
    pub from: S,
    /// What is to run.
    pub to: S,
    /// Requests that outlast the drain's deadline are cut, instead of the change being given up.
    pub cut: bool,
    /// It goes on although nobody can stand in.
    #[serde(default)]
    pub hold: bool,
    /// Why the new settings were given up, if they were.
    pub failed: Option<String>,
}

/// How a change ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome", content = "why")]
pub enum Outcome {
    /// The new settings serve.
    Done,
    /// Nothing was stopped; the old engine serves.
    Aborted(String),
    /// The new settings did not come up; the old ones serve again.
    RolledBack(String),
    /// Neither came up, so far; it is tried again with what was good, as after a crash.
    Failed(String),
    /// Neither came up; somebody has to look.
    Held(String),
}

/// The last change and how it ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ended {
    /// Which change.
    pub id: u64,
    /// How it ended.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Something went wrong with an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepFailure {
    /// What, and what to do about it, for people.
    pub why: String,
    /// The same settings would fail the same way: no use in trying again.
    pub permanent: bool,
}

impl StepFailure {
    /// One that another attempt may overcome.
    pub(crate) fn temporary(why: impl Into<String>) -> Self {
        Self { why: why.into(), permanent: false }
    }
}

/// How a step ended, or what ended it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// What the step is there for is done. In `Serve`: it has served for the settling time.
    Done,
    /// It could not be done.
    Failed(StepFailure),
    /// The engine died or hangs.
    Gone(StepFailure),
}

/// How patient a life is with its engine. Times in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Unplanned restarts within the window.
    pub restarts: usize,
    /// The window.
    pub window_ms: u64,
    /// The first wait before an unplanned restart; doubles with each.
    pub backoff_ms: u64,
    /// The longest wait.
    pub backoff_max_ms: u64,
}

/// What follows a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Then {
    Start,
    Backoff,
    Hold,
}

/// A command that does not fit the moment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefused {
    /// Something is under way.
    #[error("it is in step '{0}'; wait until it serves (sluice backend list), then try again")]
    Busy(&'static str),
    /// It is being taken out of the configuration, or the gateway stops.
    #[error("it is being shut down")]
    Leaving,
}

/// Where an engine stands, with all that is needed to go on from here.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lifecycle<S> {
    /// The step under way.
    pub step: Step,
    /// The settings that run, or are being brought up.
    pub wanted: S,
    /// The last that served for the settling time (at first: those of the configuration).
    pub good: S,
    /// The planned change under way.
    pub change: Option<Change<S>>,
    /// How the last one ended.
    pub ended: Option<Ended>,
    /// It is to end in `Off`.
    pub leaving: bool,
    /// What went wrong last, while it still matters.
    pub why: Option<String>,
    then: Then,
    /// When unplanned restarts were counted, oldest first; at most the budget and one.
    restarts: Vec<u64>,
    /// Unplanned restarts in a row.
    attempts: u32,
}

impl<S: Clone + PartialEq> Lifecycle<S> {
    /// An engine that is to be started for the first time.
    pub fn new(settings: S) -> Self {
        Self {
            // A stop where nothing runs does no harm, and what nobody remembers may run.
            step: Step::Stop,
            wanted: settings.clone(),
            good: settings,
            change: None,
            ended: None,
            leaving: false,
            why: None,
            then: Then::Start,
            restarts: Vec::new(),
            attempts: 0,
        }
    }

    /// Goes over to other settings, or starts anew with the same.
    pub fn change(&mut self, id: u64, to: S, cut: bool) -> Result<(), ChangeRefused> {
        if self.leaving {
            return Err(ChangeRefused::Leaving);
        }
        let from = self.wanted.clone();
        let change = Change { id, from, to, cut, hold: false, failed: None };
        match self.step {
            Step::Serve => self.step = Step::Drain,
            // Nothing serves: what ran before is no better than what is asked for.
            Step::Hold | Step::Backoff | Step::Off => {
                self.end(Outcome::Aborted("another change was asked for".to_owned()));
                self.wanted = change.to.clone();
                self.forgive();
                self.stop_and(Then::Start);
            }
            busy => return Err(ChangeRefused::Busy(busy.label())),
        }
        self.change = Some(change);
        Ok(())
    }

    /// Tries again now, with a fresh budget, where it holds or waits; elsewhere nothing.
    pub fn enable(&mut self) -> Result<(), ChangeRefused> {
        if self.leaving {
            return Err(ChangeRefused::Leaving);
        }
        if matches!(self.step, Step::Hold | Step::Backoff | Step::Off) {
            self.forgive();
            self.stop_and(Then::Start);
        }
        Ok(())
    }

    /// Ends in `Off`: out of rotation, drained, stopped; in `Hold` if the stop cannot be confirmed.
    pub fn leave(&mut self) {
        self.leaving = true;
        if let Some(change) = &self.change {
            // Whoever starts it next begins with what has served.
            self.wanted = change.from.clone();
        }
        self.end(Outcome::Aborted("the gateway stops, or the backend is no longer configured".to_owned()));
        self.step = match self.step {
            Step::Serve | Step::Ramp | Step::Drain => Step::Drain,
            Step::Off => Step::Off,
            _ => Step::Stop,
        };
    }

    /// The step's effect has ended, or the engine has; decides what comes next.
    pub fn on(&mut self, event: Event, rules: &Rules, now_ms: u64) {
        match (self.step, event) {
            (Step::Off | Step::Hold, _) => {}
            (Step::Drain, Event::Done | Event::Gone(_)) => self.drained(),
            (Step::Drain, Event::Failed(failure)) => {
                // Nobody to stand in is no matter of time: cutting does not help, and the change is given up.
                let cut = self.change.as_ref().is_some_and(|change| change.cut) && !failure.permanent;
                if self.leaving || cut {
                    self.drained();
                } else {
                    self.end(Outcome::Aborted(failure.why));
                    self.step = Step::Serve;
                }
            }
            (Step::Stop, Event::Done | Event::Gone(_)) if self.leaving => self.step = Step::Off,
            (Step::Stop, Event::Done) => self.stopped(),
            // The stop goes on.
            (Step::Stop, Event::Gone(_)) => {}
            (Step::Stop, Event::Failed(failure)) => self.hold(failure.why),
            (Step::Backoff, Event::Done) => self.step = Step::Start,
            (Step::Backoff, Event::Failed(_) | Event::Gone(_)) => {}
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
                self.forgive();
            }
            (_, Event::Failed(failure) | Event::Gone(failure)) => self.broke(failure, rules, now_ms),
        }
    }

    /// Whether the settings that run are known to be good, and nothing went wrong lately.
    pub fn is_settled(&self) -> bool {
        self.wanted == self.good && self.attempts == 0
    }

    /// The same life with other settings, whatever was under way: the configuration says something else now. Begins with
    /// a stop of whatever runs. `fall_back`: what was good is gone back to when they do not come up.
    #[must_use]
    pub fn anew(mut self, settings: S, fall_back: bool) -> Self {
        self.end(Outcome::Aborted("the configuration of the engine has changed".to_owned()));
        if !fall_back {
            self.good = settings.clone();
        }
        self.wanted = settings;
        // The gateway before may have ended it in order.
        self.leaving = false;
        self.forgive();
        self.stop_and(Then::Start);
        self
    }

    /// The wait in `Backoff`.
    pub fn backoff_ms(&self, rules: &Rules) -> u64 {
        let doublings = self.attempts.saturating_sub(1).min(20);
        rules.backoff_ms.saturating_mul(1 << doublings).min(rules.backoff_max_ms)
    }

    /// Unplanned restarts within the window that ends now.
    pub fn restarts_within(&self, rules: &Rules, now_ms: u64) -> usize {
        self.restarts.iter().filter(|at| now_ms.saturating_sub(**at) < rules.window_ms).count()
    }

    /// What the gateway that starts makes of what the one before it wrote last. `alive`: that engine still runs.
    /// `adopt`: it may go on; else it is stopped first.
    ///
    /// Before the stop of a change nothing has been touched: the change is given up. From the stop on it is carried through.
    #[must_use]
    pub fn recover(mut self, alive: bool, adopt: bool) -> Self {
        let before = self.step;
        self.leaving = false;
        if before == Step::Drain {
            self.end(Outcome::Aborted("the gateway ended while the engine drained".to_owned()));
        }
        match before {
            Step::Hold => {}
            // It was asked to end, so it begins as if for the first time.
            Step::Off => {
                self.forgive();
                self.stop_and(Then::Start);
            }
            // Whether a stop was through is not known: it is repeated, which does no harm.
            Step::Stop | Step::Backoff => self.step = Step::Stop,
            _ if alive && adopt => self.step = Step::Adopt,
            _ => self.stop_and(Then::Start),
        }
        self
    }

    fn drained(&mut self) {
        if let Some(change) = &self.change {
            self.wanted = change.to.clone();
        }
        self.stop_and(Then::Start);
    }

    fn stopped(&mut self) {
        match self.then {
            Then::Start => self.step = Step::Start,
            Then::Backoff => self.step = Step::Backoff,
            Then::Hold => {
                let why = self.why.clone().unwrap_or_default();
                self.hold(why);
            }
        }
    }

    fn hold(&mut self, why: String) {
        self.step = Step::Hold;
        self.why = Some(why.clone());
        self.end(Outcome::Held(why));
    }

    /// Whatever ran is not to be trusted: it is stopped; then the settings before a change, or the good ones, after a wait.
    fn broke(&mut self, failure: StepFailure, rules: &Rules, now_ms: u64) {
        self.why = Some(failure.why.clone());
        if let Some(change) = self.change.as_mut()
            && change.failed.is_none()
            && change.from != change.to
        {
            change.failed = Some(failure.why);
            self.wanted = change.from.clone();
            return self.stop_and(Then::Start);
        }
        let settled = self.wanted == self.good;
        self.wanted = self.good.clone();
        self.restarts.retain(|at| now_ms.saturating_sub(*at) < rules.window_ms);
        self.restarts.push(now_ms);
        self.attempts = self.attempts.saturating_add(1);
        let spent = self.restarts.len() > rules.restarts;
        if spent || (settled && failure.permanent) {
            return self.stop_and(Then::Hold);
        }
        // From here on it is healed like any other, and other changes need not wait for it.
        if self.change.as_ref().is_some_and(|change| change.failed.is_some()) || self.attempts > 1 {
            self.end(Outcome::Failed(failure.why));
        }
        self.stop_and(Then::Backoff);
    }

    fn stop_and(&mut self, then: Then) {
        self.step = Step::Stop;
        self.then = then;
    }

    fn forgive(&mut self) {
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
        if let Some(change) = self.change.take() {
            self.ended = Some(Ended { id: change.id, outcome });
        }
    }
}
