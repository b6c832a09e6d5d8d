//! Rest: an engine that is not wanted is stopped or sleeps, until it is wanted again. Autoscaling
//! decides which engines are wanted, or for engines that share a device, their turns.
//!
//! No request is lost: the engine leaves the rotation and is drained before the stop. If it is
//! wanted during the drain, it returns to rotation at once.

use super::{AfterStop, ChangeRefused, Lifecycle, RestartBlocked, Step};

impl<S: Clone + PartialEq> Lifecycle<S> {
    /// Drains the engine, which ends in `Idle`, or in `Asleep` if it `sleeps`. An engine that does
    /// not serve yet is stopped at once.
    ///
    /// # Errors
    /// The engine is being changed, stopped or taken over, or waits for an operator. Nothing has
    /// changed then.
    pub(crate) fn rest(&mut self, sleeps: bool) -> Result<(), ChangeRefused> {
        if self.leaving {
            return Err(ChangeRefused::ShuttingDown);
        }
        match self.step {
            Step::Idle | Step::Asleep => return Ok(()),
            // The engine was wanted for a moment, and goes on falling asleep.
            Step::Sleep if self.change.is_none() => {
                self.resting = true;
                return Ok(());
            }
            // An adopted engine may have requests of other clients.
            _ if self.change.is_some() || self.withdrawn || (self.adopted && !self.step.in_rotation()) => {
                return Err(RestartBlocked::Busy(self.step).into());
            }
            Step::Ramp | Step::Serve => self.step = Step::Drain,
            Step::Start | Step::Adapters | Step::Golden | Step::WarmUp | Step::Backoff => {
                self.stop_then(AfterStop::Idle)
            }
            busy => return Err(RestartBlocked::Busy(busy).into()),
        }
        // Next to a kept engine it does not sleep; a stop ends both.
        (self.resting, self.sleeps, self.why) = (true, sleeps && self.kept.is_none(), None);
        Ok(())
    }

    /// Starts a resting engine; one that drains for a rest serves on. Does nothing to other
    /// engines.
    pub(crate) fn wake(&mut self) {
        if !std::mem::replace(&mut self.resting, false) || self.leaving {
            return;
        }
        match self.step {
            Step::Drain => self.step = Step::Serve,
            Step::Asleep => self.step = Step::Wake,
            // An engine that runs against the record is stopped first.
            Step::Idle | Step::Stop => self.stop_then(AfterStop::Start),
            _ => {}
        }
    }

    /// Makes a new engine rest unless it is found to run, because the pool may have enough engines.
    pub(crate) fn begin_at_rest(&mut self) {
        self.resting = true;
    }
}
