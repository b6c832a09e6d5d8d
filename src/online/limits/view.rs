//! Read access to a [`Controller`], for reports and for the layer that changes engines.
//!
//! Nothing here affects the next decision.

use std::time::Duration;

use super::controller::{ClosedBy, Controller, State};
use super::moves::{Direction, Move, beside};
use super::{Limits, PoolLimits};
use crate::event::Event;
use crate::gate::Closing;
use crate::observe::diagnosis::Experience;
use crate::observe::window::Score;

impl Controller {
    /// The names of the pools.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    pub(crate) fn place_of(&self, pool: &str) -> Option<usize> {
        self.names.iter().position(|name| name == pool)
    }

    pub(crate) fn places_by_loss(&self) -> Vec<usize> {
        let mut places: Vec<usize> = (0..self.names.len()).collect();
        places.sort_by(|one, other| self.losses[*other].total_cmp(&self.losses[*one]));
        places
    }

    /// Time after arrival from which a request counts.
    pub fn horizon(&self) -> Duration {
        self.horizon
    }

    /// Share of requests that should meet their objectives.
    pub fn target(&self) -> f64 {
        self.target
    }

    /// The limits that should be in force.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn loss_of(&self, pool: usize) -> f64 {
        self.lost_by_request[pool]
    }

    /// Limits that may be better once the engines have other flags.
    pub fn limits_beside(&self, pool: usize, configured: &PoolLimits) -> Vec<PoolLimits> {
        beside(&self.kept_limits().0[pool], configured, &self.lengths[pool], &self.bounds)
    }

    /// Score and conclusion of the last judged window.
    pub fn belief(&self) -> (&Score, &str) {
        (&self.belief.0, &self.belief.1)
    }

    /// The score of the last window under the limits in force. It may be newer than
    /// [`belief`](Self::belief), so that no engine is restarted for a loss that is over.
    pub fn latest_score(&self) -> &Score {
        &self.latest_score
    }

    /// How requests fared in the last judged window.
    pub fn experience(&self) -> &Experience {
        &self.experience
    }

    /// The present activity.
    pub fn doing(&self) -> String {
        match &self.state {
            State::Watching => "watching".to_owned(),
            State::Settling(_, _, None) => "waiting until what changed last has no effect any more".to_owned(),
            State::Settling(_, _, Some(trial)) => {
                format!("tries {}: waiting for its effect", self.show(&trial.step, &trial.before))
            }
            State::Measuring(trial) => format!("tries {}: measuring", self.show(&trial.step, &trial.before)),
            State::Asking(_) => "simulates what may help".to_owned(),
        }
    }

    /// Closed changes: limit, whether it would be raised, reason, and seconds left.
    pub fn blocked(&self) -> Vec<(String, bool, String, f64)> {
        let shown = |&Closing { key: direction, why, until, .. }: &Closing<Direction, ClosedBy>| {
            let opposite = if direction.up { "lowering" } else { "raising" };
            let why = match why {
                ClosedBy::Failure => "it did not help".to_owned(),
                ClosedBy::OppositeHelped => format!("{opposite} it helped"),
                ClosedBy::Simulation => "a simulation promises no gain".to_owned(),
            };
            (self.key(direction), direction.up, why, until.saturating_sub(self.latest).as_secs_f64())
        };
        self.closed.in_force(self.latest).map(shown).collect()
    }

    pub(crate) fn key(&self, Direction { pool, knob, .. }: Direction) -> String {
        format!("pool.{}.{}", self.names[pool], knob.key())
    }

    pub(crate) fn show(&self, step: &Move, before: &Limits) -> String {
        let Direction { pool, knob, .. } = step.direction;
        format!("{} = {} (was {})", self.key(step.direction), step.to.0[pool].show(knob), before.0[pool].show(knob))
    }

    /// Since when objectives are missed and no change of limits is left.
    pub fn stuck_since(&self) -> Option<Duration> {
        self.stuck_since
    }

    /// Since when the load has not changed.
    pub fn load_since(&self) -> Duration {
        self.load_since
    }

    /// The events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Whether a change is on trial or simulated.
    pub fn is_trying(&self) -> bool {
        matches!(&self.state, State::Measuring(_) | State::Settling(_, _, Some(_)) | State::Asking(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Acting;
    use crate::observe::loss::{Cause, Judged};
    use crate::observe::window::{PoolWindow, Window};

    #[test]
    fn a_loss_that_is_over_is_no_longer_the_latest() {
        let seconds = Duration::from_secs;
        let limits = Limits(vec![PoolLimits { slots: 64, prefill_tokens: None, long: None, range: (0, None) }]);
        let mut controller = Controller::new(vec!["all".to_owned()], limits, 0.99, seconds(1), Acting::Proposes);
        let mut watch = |from: u64, lasted: u64, loss: f64| {
            let mut pool = PoolWindow::new(seconds(from));
            let cause = (loss > 0.0).then_some(Cause::Queue);
            let at = |number: u64| seconds(from) + Duration::from_millis(100 * number);
            (0..10 * lasted).for_each(|number| pool.add(at(number), 200, Judged { loss, cause, service: Some(1.0) }));
            controller.step(seconds(from + lasted), &Window { from: seconds(from), pools: vec![pool] });
            (controller.belief().0.loss, controller.latest_score().loss)
        };
        assert_eq!(watch(0, 60, 1.5), (1.5, 1.5));
        assert_eq!(watch(60, 20, 0.0), (1.5, 1.5), "too soon");
        assert_eq!(watch(60, 60, 0.0), (1.5, 0.0), "too soon for a change of limits");
        assert_eq!(watch(60, 130, 0.0), (0.0, 0.0));
    }
}
