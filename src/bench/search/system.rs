//! The system that a search puts under load: real servers, or a simulated server on virtual time.
//!
//! The search uses no sockets and no clock, so its code is the same for both. Trials run one after the other.

use super::judge::Judge;
use super::trial::{Trial, TrialStats};

/// A system that can run trials.
pub trait SystemUnderTest {
    /// Why a trial was not possible.
    type Error;

    /// Runs `trial` and records each request with `judge`, by its number in the order due: its SLO ratio when it has ended,
    /// or infinity as soon as it can no longer meet its objectives. Returns when all requests are recorded, or as soon as
    /// the judge has a verdict; requests still in flight are abandoned then.
    ///
    /// # Errors
    /// The load could not be sent at all. Requests that fail are recorded, they are not errors.
    fn run(&mut self, trial: &Trial, judge: &mut Judge) -> impl Future<Output = Result<TrialStats, Self::Error>>;
}
