//! How a life cycle continues from the record and the process that an earlier gateway left.
//!
//! A change that had not reached the stop has touched nothing, and is given up. A change beyond
//! that is completed. An engine that rested because autoscaling wanted fewer stays stopped.

use super::{AfterStop, Lifecycle, Outcome, Step};

/// How the configuration differs from the one in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Difference {
    None,
    /// Only flags differ. The engine continues, and gets the new flags by a planned change.
    Flags,
    /// Program, port, devices or environment differ, so it is another engine.
    Program,
}

/// The engine that an earlier gateway left running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Survivor {
    None,
    /// An engine runs and may continue (`fleet.on_start = "adopt"`).
    Adoptable,
    /// An engine runs and must be stopped first (`fleet.on_start = "stop"`).
    ToStop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// There was no record.
    New,
    /// The recorded life cycle continues.
    Resumed,
    /// The engine is stopped, and started as now configured.
    Reconfigured,
}

impl<S: Clone + PartialEq> Lifecycle<S> {
    /// Ends `Recover`: continues from the record in the journal (`previous`) and the engine that
    /// still runs.
    pub(crate) fn recover(&mut self, previous: Option<(Self, Difference)>, survivor: Survivor) -> Recovery {
        let recovery = match previous {
            None => {
                match survivor {
                    // An engine may run that was not found, and a needless stop is harmless.
                    Survivor::None => self.stop_then(self.after_stop()),
                    Survivor::Adoptable => self.step = Step::Adopt,
                    // The engine may have requests, because it was in rotation until now, or has
                    // other clients.
                    Survivor::ToStop => self.step = Step::Drain,
                }
                self.resting &= survivor == Survivor::None;
                Recovery::New
            }
            Some((life, Difference::None)) => {
                *self = life.resumed(survivor);
                Recovery::Resumed
            }
            // Different flags are no reason to stop an engine that serves, or to forget the good
            // settings.
            Some((life, Difference::Flags)) if survivor == Survivor::Adoptable => {
                *self = life.resumed(survivor);
                Recovery::Resumed
            }
            Some((life, difference)) => {
                *self = life.reconfigured(self.wanted.clone(), difference);
                Recovery::Reconfigured
            }
        };
        // These fields describe the running engine, not the recorded one.
        (self.adopted, self.withdrawn, self.blocked) = (self.step == Step::Adopt, false, None);
        recovery
    }

    fn resumed(mut self, survivor: Survivor) -> Self {
        let before = self.step;
        self.leaving = false;
        if matches!(before, Step::Drain | Step::Sleep) {
            self.end(Outcome::Aborted("the gateway ended while the engine drained".to_owned()));
        }
        match before {
            Step::Hold => {}
            // The engine was shut down on request, so it starts as if new, unless it rested.
            Step::Off => {
                self.reset_budget();
                self.stop_then(self.after_stop());
            }
            // The stop may be incomplete; repeating it is harmless.
            Step::Stop | Step::Backoff => self.step = Step::Stop,
            // The step asks the engine whether it sleeps already.
            Step::Sleep | Step::Asleep if survivor == Survivor::Adoptable && self.resting => self.step = Step::Sleep,
            Step::Sleep | Step::Wake if survivor == Survivor::Adoptable && self.kept.is_none() => {
                self.step = Step::Wake
            }
            // An engine that runs is adopted, even if the journal says that it rested or drained
            // for a rest.
            _ if survivor == Survivor::Adoptable => (self.step, self.resting) = (Step::Adopt, false),
            Step::Idle | Step::Asleep => self.stop_then(AfterStop::Idle),
            Step::Sleep if self.resting => self.stop_then(AfterStop::Idle),
            // Without a drain: the requests ended with the earlier gateway, and an engine that
            // hangs would never be drained.
            _ => {
                self.resting = false;
                self.stop_then(AfterStop::Start);
            }
        }
        self
    }

    /// Stops the engine and starts other settings. The good settings remain a fallback unless the
    /// program differs.
    fn reconfigured(mut self, settings: S, difference: Difference) -> Self {
        self.end(Outcome::Aborted("the configuration of the engine has changed".to_owned()));
        // An earlier configuration requested these settings. The last change is kept, because
        // numbers continue from it.
        (self.taken_back, self.reconfigured) = (None, true);
        if difference == Difference::Program {
            self.good = settings.clone();
        }
        self.wanted = settings;
        // The earlier gateway may have been shutting it down.
        self.leaving = false;
        self.forget_kept();
        self.reset_budget();
        self.stop_then(self.after_stop());
        self
    }
}
