//! What a gateway makes of an engine of which an earlier one left a record, a process, or both.
//!
//! Before the stop of a change nothing was touched, so the change is given up; from the stop on it is completed. An engine that was
//! stopped because autoscaling wanted fewer stays so.

use super::{AfterStop, Lifecycle, Outcome, Step};

/// How the configuration now differs from what the journal's engine was started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Difference {
    /// Not at all.
    None,
    /// Flags only: the engine may go on, and gets the new flags by a planned change.
    Flags,
    /// Program, port, devices or environment: another engine.
    Program,
}

/// What an earlier gateway left running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Survivor {
    /// No process.
    None,
    /// An engine that may go on (`fleet.on_start = "adopt"`).
    Adoptable,
    /// An engine that is to be stopped first (`fleet.on_start = "stop"`).
    ToStop,
}

/// What [`Lifecycle::recover`] made of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// There was no record.
    New,
    /// The recorded life cycle goes on.
    Resumed,
    /// The engine is stopped and started as configured now.
    Reconfigured,
}

impl<S: Clone + PartialEq> Lifecycle<S> {
    /// Ends `Recover`: goes on from what the journal says (`previous`) and from what still runs.
    ///
    /// Before the stop of a change nothing has been touched: the change is given up. From the stop on it is completed.
    pub(crate) fn recover(&mut self, previous: Option<(Self, Difference)>, survivor: Survivor) -> Recovery {
        let recovery = match previous {
            None => {
                match survivor {
                    // Without a record there may be no engine, or one that is not known of: a stop is harmless.
                    Survivor::None => self.stop_then(self.after_stop()),
                    Survivor::Adoptable => self.step = Step::Adopt,
                    // It may carry requests: it was in rotation until now, or other clients use it.
                    Survivor::ToStop => self.step = Step::Drain,
                }
                self.resting &= survivor == Survivor::None;
                Recovery::New
            }
            Some((life, Difference::None)) => {
                *self = life.resumed(survivor);
                Recovery::Resumed
            }
            // Other flags are no reason to stop an engine that serves, or to forget what was good.
            Some((life, Difference::Flags)) if survivor == Survivor::Adoptable => {
                *self = life.resumed(survivor);
                Recovery::Resumed
            }
            Some((life, difference)) => {
                *self = life.reconfigured(self.wanted.clone(), difference);
                Recovery::Reconfigured
            }
        };
        // These belong to the engine that runs, not to the one of the record.
        (self.adopted, self.withdrawn, self.blocked) = (self.step == Step::Adopt, false, None);
        recovery
    }

    fn resumed(mut self, survivor: Survivor) -> Self {
        let before = self.step;
        self.leaving = false;
        if before == Step::Drain {
            self.end(Outcome::Aborted("the gateway ended while the engine drained".to_owned()));
        }
        match before {
            Step::Hold => {}
            // It was shut down on request, so it starts as if for the first time, unless it rested then.
            Step::Off => {
                self.reset_budget();
                self.stop_then(self.after_stop());
            }
            // It is not known whether the stop was complete: it is repeated, which is harmless.
            Step::Stop | Step::Backoff => self.step = Step::Stop,
            // An engine of others in the place of one that rests, and one that drained for a rest.
            _ if survivor == Survivor::Adoptable => (self.step, self.resting) = (Step::Adopt, false),
            Step::Idle => self.stop_then(AfterStop::Idle),
            _ => {
                self.resting = false;
                self.stop_then(AfterStop::Start);
            }
        }
        self
    }

    /// Stops whatever runs and starts with other settings. The good settings stay a fallback unless the program differs.
    fn reconfigured(mut self, settings: S, difference: Difference) -> Self {
        self.end(Outcome::Aborted("the configuration of the engine has changed".to_owned()));
        // An earlier configuration asked for these settings. The number and the outcome of the last
        // change stay: later changes are numbered from it.
        (self.taken_back, self.reconfigured) = (None, true);
        if difference == Difference::Program {
            self.good = settings.clone();
        }
        self.wanted = settings;
        // The earlier gateway may have shut it down.
        self.leaving = false;
        self.reset_budget();
        self.stop_then(self.after_stop());
        self
    }
}
