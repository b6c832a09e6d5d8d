//! Rest: an engine that autoscaling does not want is stopped without a failure, and starts again when it is wanted.
//!
//! No request is lost by it: the engine leaves the rotation, is drained, and is stopped then. One that is wanted while it drains is
//! in rotation again at once.

use super::{AfterStop, ChangeRefused, Lifecycle, RestartBlocked, Step};

impl<S: Clone + PartialEq> Lifecycle<S> {
    /// Autoscaling wants fewer engines: drained, stopped, `Idle`. One that does not serve yet is stopped at once.
    ///
    /// # Errors
    /// It is being changed, stopped or taken over, or waits for an operator. Nothing has changed then.
    pub(crate) fn rest(&mut self) -> Result<(), ChangeRefused> {
        if self.leaving {
            return Err(ChangeRefused::ShuttingDown);
        }
        match self.step {
            Step::Idle => return Ok(()),
            // One that was taken over may have requests of others.
            _ if self.change.is_some() || self.withdrawn || (self.adopted && !self.step.in_rotation()) => {
                return Err(RestartBlocked::Busy(self.step).into());
            }
            Step::Ramp | Step::Serve => self.step = Step::Drain,
            Step::Start | Step::Adapters | Step::Golden | Step::WarmUp | Step::Backoff => {
                self.stop_then(AfterStop::Idle)
            }
            busy => return Err(RestartBlocked::Busy(busy).into()),
        }
        (self.resting, self.why) = (true, None);
        Ok(())
    }

    /// Autoscaling wants the engine: one that rests starts, one that drains for a rest serves on. No effect on others.
    pub(crate) fn wake(&mut self) {
        if !std::mem::replace(&mut self.resting, false) || self.leaving {
            return;
        }
        match self.step {
            Step::Drain => self.step = Step::Serve,
            // Whatever was found to run beside the record is stopped first.
            Step::Idle | Step::Stop => self.stop_then(AfterStop::Start),
            _ => {}
        }
    }

    /// It is to rest when nothing of it is found to run: it is new, and its pool may have enough engines.
    pub(crate) fn begin_at_rest(&mut self) {
        self.resting = true;
    }
}
