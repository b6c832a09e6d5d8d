//! Forecasts of losses by simulation, and questions about limits.
//!
//! The caller replays the requests of the last minutes through the gateway's request path to
//! simulated engines: once with the settings in force, once with each candidate.
//! [`crate::observe::loss`] defines the loss.

use serde::{Deserialize, Serialize};

use super::Limits;
use crate::observe::recent::RecentRequest;

pub(crate) const BOUND: f64 = 2.0;
/// A simulation with the settings in force is not believed below this share of the measured loss.
/// It shows less where clients wait for a response before they send the next request, because
/// faster engines would then get more requests.
const SHOWN: f64 = 1.0 / 3.0;

/// How requests would fare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Mean loss of a request.
    pub loss: f64,
    /// Standard error of the loss.
    pub error: f64,
    /// Share of the requests that meet their objectives.
    pub attainment: f64,
}

impl Forecast {
    pub(crate) fn unexplained(&self, measured: f64) -> Option<String> {
        let (shown, is_shown) = (self.loss, self.loss >= SHOWN * measured);
        (!is_shown).then(|| format!("a simulation does not show the loss that is measured ({shown:.3}, {measured:.3})"))
    }
}

/// A question about limits of one group of pools.
#[derive(Clone, Debug, PartialEq)]
pub struct LimitsQuestion {
    /// The pools.
    pub pools: Vec<String>,
    /// The present limits.
    pub now: Limits,
    /// The limits after each change.
    pub candidates: Vec<Limits>,
    /// The requests to replay.
    pub requests: Vec<RecentRequest>,
    /// How many of `requests`, from the first, already wait at the start. They do not count,
    /// because their earlier wait is not simulated.
    pub waiting: usize,
}

/// The answer to a [`LimitsQuestion`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LimitsAnswer {
    /// Forecast with the present limits; `None`: this deployment cannot be simulated.
    pub now: Option<Forecast>,
    /// Forecasts of the candidates, in the order of the question; `None`: the candidate cannot be
    /// simulated.
    pub candidates: Vec<Option<Forecast>>,
}
