//! `[autoscale]` of a scenario: the policy that decides the number of engines.
//!
//! `autoscale` has the rules of each policy. Bounds are checked against the number of engines in
//! the scenario.

use std::time::Duration;

use serde::Deserialize;

use crate::error::LabError;
use sluice_core::base::Period;

/// `[autoscale]` of a scenario or a variant.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Autoscale {
    /// The policy that decides.
    pub policy: Policy,
    /// Engines at the start of the run. Default: `min`, at least one.
    pub start: Option<u32>,
    /// Minimum number of engines. Default 1.
    #[serde(default = "one")]
    pub min: u32,
    /// Maximum number of engines. Default: all engines of the scenario.
    pub max: Option<u32>,
    /// Target of the metric: requests per engine (default 8) or, for `busy`, the share of time in
    /// which an engine computes, at most 1 (default 0.7).
    pub target: Option<f64>,
    /// Time from the order of an engine to the first request. Default 2 min.
    pub cold_start: Option<Period>,
    /// Time for which fewer engines must suffice before any is stopped. Default 5 min.
    pub down_after: Option<Period>,
    /// `predicted`: requests per second that an engine serves within the objectives. Default:
    /// learned.
    pub rate: Option<f64>,
    /// `predicted`: whether the arrivals of the day before are known. They are the first traffic,
    /// drawn with another seed.
    #[serde(default)]
    pub day_before: bool,
}

fn one() -> u32 {
    1
}

/// The policy that decides the number of engines.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The number stays as at the start.
    Fixed,
    /// HPA or KEDA on the number of waiting requests.
    Queue,
    /// HPA or KEDA on the number of waiting and running requests.
    InFlight,
    /// HPA on the utilization of the engines.
    Busy,
    /// The gateway's own autoscaler.
    Predicted,
}

impl Autoscale {
    pub(crate) fn check(&self, pools: usize, engines: usize) -> Result<(), LabError> {
        let max = self.max.unwrap_or(engines as u32);
        let start = self.start.unwrap_or(self.min.max(1));
        let positive = |value: Option<f64>| value.is_none_or(|value| value.is_finite() && value > 0.0);
        let sound = pools == 1 && self.min <= max && (self.min..=max).contains(&start) && max as usize <= engines;
        let within = self.policy != Policy::Busy || self.target() <= 1.0;
        match sound && positive(self.target) && within && positive(self.rate) {
            true => Ok(()),
            false => Err(LabError::Autoscale(format!("{pools} pools, {engines} engines, {self:?}"))),
        }
    }

    pub(crate) fn target(&self) -> f64 {
        self.target.unwrap_or(if self.policy == Policy::Busy { 0.7 } else { 8.0 })
    }

    pub(crate) fn cold_start(&self) -> Duration {
        self.cold_start.map_or(Duration::from_secs(120), |period| period.0)
    }

    pub(crate) fn down_after(&self) -> Duration {
        self.down_after.map_or(Duration::from_secs(300), |period| period.0)
    }
}
