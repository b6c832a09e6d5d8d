//! Questions about flags, the answers by simulation, and how far the answers can be trusted.
//!
//! The caller replays the requests of the last minutes, as for limits. Measured changes correct
//! later forecasts. The realised share of a forecast gain is taken to be normal around an unknown
//! mean. The mean starts at 1 and counts as one measurement. The variance starts at the square of
//! [`SPREAD`] and counts as [`SPREAD_COUNTS`] measurements (conjugate normal model, with a normal
//! in place of the t distribution). Bounds: [`REMEMBERED`].

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::flags::{EngineFlag, Flags};
use crate::limits::PoolLimits;
use crate::limits::forecast::{BOUND, Forecast};
use crate::observe::recent::RecentRequest;

/// Standard deviation of the ratio of realised to forecast gains. Latencies in the simulator are
/// off by up to 15 % on machines to which the simulator was not fitted
/// (`.github/docs/measurements/simulator.md`).
const SPREAD: f64 = 0.2;
const SPREAD_COUNTS: f64 = 4.0;
const REMEMBERED: usize = 100;

/// A change that may help.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineCandidate {
    /// The flag that changes.
    pub flag: EngineFlag,
    /// The new value.
    pub to: f64,
    /// Limits of the pool that change together with the flag, if any.
    pub limits: Option<PoolLimits>,
}

/// A question about flags of the engines of a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineQuestion {
    /// The pool whose engines would change.
    pub pool: String,
    /// The engines' present flags.
    pub flags: Flags,
    /// Pools of the group and their limits, without a change on trial.
    pub limits: Vec<(String, PoolLimits)>,
    /// The changes to simulate.
    pub candidates: Vec<EngineCandidate>,
    /// How long each engine would be absent for the restart.
    pub absent: Duration,
    /// The requests to replay.
    pub requests: Vec<RecentRequest>,
}

/// The answer to an [`EngineQuestion`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineAnswer {
    /// Forecast with the settings in force; `None`: this deployment cannot be simulated.
    pub now: Option<Forecast>,
    /// Rise of the mean loss during [`EngineQuestion::absent`] with one engine less.
    pub absence: Option<f64>,
    /// Forecasts of the candidates, in the order of the question.
    pub candidates: Vec<CandidateForecast>,
    /// Time between the first and the last arrival.
    pub span: Duration,
}

/// How requests would fare with a candidate. `absence_with` and `absence_under` are simulated for
/// one candidate only: the one with the smallest loss, or the last of several such.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CandidateForecast {
    /// Forecast with flag and limits; `None`: vLLM would refuse the flag.
    pub forecast: Option<Forecast>,
    /// Forecast with the candidate's limits and the flags in force; `None`: the candidate changes
    /// no limits.
    pub unchanged: Option<Forecast>,
    /// [`EngineAnswer::absence`] if the other engines have the candidate's flag and limits.
    pub absence_with: Option<f64>,
    /// [`EngineAnswer::absence`] with the candidate's limits and the flags in force.
    pub absence_under: Option<f64>,
}

impl EngineAnswer {
    pub(super) fn unexplained(&self, measured: f64) -> Option<String> {
        self.now?.unexplained(measured)
    }
}

/// A measured change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Realised {
    /// The pool.
    pub pool: String,
    /// The flag.
    pub flag: EngineFlag,
    /// The values before and after.
    pub values: (f64, f64),
    /// Forecast fall of the mean loss, if simulated.
    pub forecast: Option<f64>,
    /// Measured fall of the mean loss.
    pub realised: f64,
    /// Range in which `realised` certainly lies.
    pub range: (f64, f64),
    /// `promoted` or `rolled_back`.
    pub verdict: String,
}

/// Measured changes, with forecast and realised gains.
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

    /// All measured changes, the oldest first.
    pub fn all(&self) -> &[Realised] {
        &self.0
    }

    /// The part of a forecast gain with this standard `error` that is certain enough to act on.
    pub fn certain(&self, gain: f64, error: f64) -> f64 {
        // A tiny forecast gives no useful ratio.
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
