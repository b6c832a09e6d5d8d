//! The system that a search puts under load.
//!
//! The system consists of real servers, or of a simulated server on virtual time. Trials run one
//! after the other.

use super::judge::Judge;
use super::trial::{Trial, TrialStats};

/// A system that can run trials.
pub trait SystemUnderTest {
    /// Why a trial was not possible.
    type Error;

    /// Runs `trial`. Records each request with `judge`, by number in the order due: with the SLO
    /// ratio when it has ended, or with infinity as soon as the objectives cannot be met. Returns
    /// when all requests are recorded, or when the judge has a verdict; requests in flight are then
    /// abandoned.
    ///
    /// # Errors
    /// The load could not be sent at all. A request that fails is no such error; it is recorded.
    fn run(&mut self, trial: &Trial, judge: &mut Judge) -> impl Future<Output = Result<TrialStats, Self::Error>>;
}
