//! What a simulation of this deployment says about a change, and how far such forecasts can be trusted.
//!
//! The caller simulates: the requests of the last minutes through the gateway's request path to simulated engines, once with the
//! settings in force and once with each candidate. How much of a forecast gain was realised, for each change that was
//! measured, corrects later forecasts: the realised share is taken to be normal around an unknown mean, which begins as 1 and
//! counts as one measurement; the variance begins as that of [`SPREAD`] and counts as [`SPREAD_COUNTS`] (conjugate normal model,
//! its t distribution taken as normal).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::flags::{EngineFlag, Flags};
use crate::limits::{Limits, PoolLimits};
use crate::recent::RecentRequest;

/// Standard deviation of realised over forecast gains. The simulator's latencies on machines it was not fitted to are off by up to
/// 15 % (`.github/docs/measurements/simulator.md`).
const SPREAD: f64 = 0.2;
/// Measurements as which that counts.
const SPREAD_COUNTS: f64 = 4.0;
/// Standard deviations to the lower bound of a gain.
pub(crate) const BOUND: f64 = 2.0;
/// A simulation of the settings in force must show at least this share of the loss that is measured. It does not where clients
/// wait for one response before they send the next request: they would send more if the engines served more.
const SHOWN: f64 = 1.0 / 3.0;
/// The most changes that are remembered.
const REMEMBERED: usize = 100;

/// A change that may help.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The flag that changes.
    pub flag: EngineFlag,
    /// Its value.
    pub to: f64,
    /// Limits of the pool that change with it; `None`: those in force stay.
    pub limits: Option<PoolLimits>,
}

/// What shall be simulated.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// The pool whose engines would change.
    pub pool: String,
    /// Their flags now.
    pub flags: Flags,
    /// Pools whose limits belong to this, without a change of limits that is being tried.
    pub limits: Vec<(String, PoolLimits)>,
    /// The changes.
    pub candidates: Vec<Candidate>,
    /// How long an engine would be gone.
    pub absent: Duration,
    /// The requests.
    pub requests: Vec<RecentRequest>,
}

/// Other limits of pools that serve the same traffic, which shall be simulated. The answer needs [`Answer::now`] and
/// [`Answer::candidates`] only.
#[derive(Clone, Debug, PartialEq)]
pub struct LimitsQuestion {
    /// The pools.
    pub pools: Vec<String>,
    /// Their limits now.
    pub now: Limits,
    /// The same after each change.
    pub candidates: Vec<Limits>,
    /// The requests.
    pub requests: Vec<RecentRequest>,
    /// How many of them, the first ones, wait already when the simulation begins. They do not count: how long they waited before is not
    /// simulated.
    pub waiting: usize,
}

/// What requests would experience.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Mean loss of a request.
    pub loss: f64,
    /// Its standard error.
    pub error: f64,
    /// Share of the requests that meet their objectives.
    pub attainment: f64,
}

/// The result of a simulation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// With the settings in force; `None`: this deployment cannot be simulated.
    pub now: Option<Forecast>,
    /// By how much the mean loss would rise for the time of [`Question::absent`] with one engine less.
    pub absence: Option<f64>,
    /// The same if the other engines have the candidate at this position, the last one with the smallest loss.
    pub absence_with: Option<(usize, f64)>,
    /// The same with the flags in force and the limits that come with that candidate; `None` where these stay.
    pub absence_under: Option<(usize, f64)>,
    /// With each candidate, in their order; `None`: vLLM would refuse it.
    pub candidates: Vec<Option<Forecast>>,
    /// With the flags in force and the limits of each candidate, in their order; `None` where these stay.
    pub unchanged: Vec<Option<Forecast>>,
    /// The time in which the requests arrived.
    pub span: Duration,
}

impl Answer {
    /// In words that the simulation does not show the loss that is measured, if so.
    pub(crate) fn unexplained(&self, measured: f64) -> Option<String> {
        let shown = self.now?.loss;
        let is_shown = shown >= SHOWN * measured;
        (!is_shown).then(|| format!("a simulation does not show the loss that is measured ({shown:.3}, {measured:.3})"))
    }
}

/// A change that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Realised {
    /// The pool.
    pub pool: String,
    /// The flag.
    pub flag: EngineFlag,
    /// Its value before and after.
    pub values: (f64, f64),
    /// By how much the mean loss was to fall; absent where nothing was simulated.
    pub forecast: Option<f64>,
    /// By how much it fell, and the range of which that is certain.
    pub realised: f64,
    /// Lower and upper end.
    pub range: (f64, f64),
    /// `promoted` or `rolled_back`.
    pub verdict: String,
}

/// How much of forecast gains was realised.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trust(Vec<Realised>);

impl Trust {
    /// Adds a change that was measured.
    pub fn add(&mut self, realised: Realised) {
        self.0.push(realised);
        if self.0.len() > REMEMBERED {
            self.0.remove(0);
        }
    }

    /// All changes that were measured, the oldest first.
    pub fn all(&self) -> &[Realised] {
        &self.0
    }

    /// The gain that is certain enough to act on, of a forecast one with a standard error.
    pub fn certain(&self, gain: f64, error: f64) -> f64 {
        // A gain that was hardly forecast says nothing about the ratio.
        let shares = self.0.iter().filter_map(|one| {
            one.forecast.filter(|gain| *gain > 0.01).map(|gain| (one.realised / gain).clamp(-1.0, 2.0))
        });
        let shares: Vec<f64> = std::iter::once(1.0).chain(shares).collect();
        let count = shares.len() as f64;
        let mean = shares.iter().sum::<f64>() / count;
        let squares = shares.iter().map(|share| (share - mean).powi(2)).sum::<f64>();
        let variance = (SPREAD_COUNTS * SPREAD * SPREAD + squares) / (SPREAD_COUNTS + count - 1.0);
        let spread = (variance * (1.0 + 1.0 / count)).sqrt();
        gain * mean - BOUND * (gain * spread).hypot(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn realised(forecast: f64, realised: f64) -> Realised {
        Realised {
            pool: "all".into(),
            flag: EngineFlag::MaxNumSeqs,
            values: (16.0, 32.0),
            forecast: Some(forecast),
            realised,
            range: (0.0, 1.0),
            verdict: "promoted".into(),
        }
    }

    #[test]
    fn a_forecast_is_trusted_as_far_as_earlier_ones_came_true() {
        let mut trust = Trust::default();
        let first = trust.certain(0.4, 0.0);
        assert!((0.15..0.2).contains(&first), "{first}");
        (0..8).for_each(|_| trust.add(realised(0.4, 0.4)));
        assert!(trust.certain(0.4, 0.0) > first);
        (0..8).for_each(|_| trust.add(realised(0.4, 0.0)));
        assert!(trust.certain(0.4, 0.0) < 0.0);
        assert!(trust.certain(0.4, 0.1) < trust.certain(0.4, 0.0));
        (0..200).for_each(|_| trust.add(realised(0.0, 1.0)));
        assert_eq!(trust.all().len(), REMEMBERED);
        assert_eq!(trust.certain(0.4, 0.0), Trust::default().certain(0.4, 0.0), "no forecast gain, no ratio");
    }
}
