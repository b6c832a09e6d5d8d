//! A trial: one setting, the effort, and the outcome.
//!
//! Rates are in requests per second, measures in their own unit, times in engine seconds.

use serde::{Deserialize, Deserializer, Serialize};

use crate::setting::Setting;
use sluice_core::stats::Estimate;

/// How thoroughly a setting is tried.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effort {
    /// The setting is compared with the best value so far, if any. The trial ends once the setting
    /// cannot win.
    Race(Option<f64>),
    /// The setting is measured with new loads and verified, which gives the reported values.
    Confirm,
    /// The setting is simulated roughly, before any engine starts.
    Predict,
    /// The setting is tried as vLLM's `auto_tune.sh` does.
    Script,
    /// The engines are only started.
    Start,
    /// The engines are started and put under the worst load.
    Stress,
}

/// A proven rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Certified {
    /// Requests per second.
    pub rate: f64,
    /// Attainment of the worst class and adapter, over all proofs.
    pub attainment: Estimate,
    /// Proofs that were run.
    pub proofs: usize,
    /// Requests that counted in the proofs.
    pub requests: usize,
}

/// The ratio of [`Outcome::Unmet`] for requests that do not complete. It is finite, because JSON
/// has no infinity, and a percentile between infinite values is NaN.
pub const NEVER: f64 = 1e9;
/// A larger ratio is a percentile between incomplete and measured requests.
const SLOWEST: f64 = 1e6;

/// The outcome of a trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Outcome {
    /// The objective has a value.
    Measured {
        /// The value and its interval (90 % for a rate, 95 % for a measure).
        value: Estimate,
        /// The value of each run, for a measure.
        runs: Vec<f64>,
        /// The proven rate, for a rate.
        certified: Option<Certified>,
    },
    /// The setting is not better than the best so far.
    Worse {
        /// A rough guess of the value.
        guess: f64,
    },
    /// No rate meets the objectives: even single requests miss them.
    Unmet {
        /// The requests that miss by most.
        group: String,
        /// The objective that they miss by most.
        objective: String,
        /// The ratio to the bound: 1.2 is 20 % above it.
        ratio: f64,
    },
    /// Too many requests have no complete response, so that an optimised percentile falls on one of
    /// them.
    Lossy {
        /// The percentile.
        measure: String,
    },
    /// A bound of the goal is not kept.
    Exceeds {
        /// The bound, such as `long.e2el.p99 <= 3300 ms`.
        bound: String,
        /// The value with its unit; `None`: requests fail, or there are none.
        value: Option<String>,
        /// The ratio to the bound: 1.2 is 20 % beyond it. [`NEVER`] without a value.
        ratio: f64,
    },
    /// The prefix caches held too few prompt tokens for the intended workload.
    ColdCache {
        /// The share that the caches held.
        hit_rate: f64,
        /// The least share.
        wanted: f64,
    },
    /// The engine starts; nothing was measured.
    Starts,
    /// The engine does not start.
    Refused {
        /// The engine's message.
        reason: String,
        /// Whether this was known without a start.
        foreseen: bool,
    },
}

/// One setting, the effort and the outcome.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The setting.
    pub setting: Setting,
    /// The effort.
    pub effort: Effort,
    /// The seed of the loads.
    pub seed: u64,
    /// The outcome.
    pub outcome: Outcome,
    /// The second measure of each run, for a front.
    #[serde(default, deserialize_with = "with_unknown")]
    pub against: Vec<f64>,
    /// The measures of the bounds, in the order of the file.
    #[serde(default, deserialize_with = "with_unknown")]
    pub bounded: Vec<f64>,
    /// Other measures, in the order of the file; NaN without data.
    #[serde(default, deserialize_with = "with_unknown")]
    pub beside: Vec<f64>,
    /// Seconds under load.
    pub seconds: f64,
    /// Seconds of starts.
    pub start_seconds: f64,
    /// Starts of the engines.
    pub starts: u32,
    /// Runs of the load generator.
    pub loads: u32,
    /// Requests sent.
    pub requests: u64,
    /// Whether the KV cache was full, so that more sequences do not help.
    #[serde(default)]
    pub kv_full: bool,
    /// Observations that explain the value.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// Reads values of which some may be NaN, which JSON writes as null.
fn with_unknown<'de, D: Deserializer<'de>>(values: D) -> Result<Vec<f64>, D::Error> {
    let values = Vec::<Option<f64>>::deserialize(values)?;
    Ok(values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
}

impl Outcome {
    /// How far a bound is exceeded, in words.
    pub fn exceeds(&self) -> Option<String> {
        let Self::Exceeds { bound, value, .. } = self else { return None };
        Some(match value {
            Some(value) => format!("{value} is beyond the bound {bound}"),
            None => format!("the bound {bound} has no value: its requests fail, or there are none"),
        })
    }

    /// Whether objectives are missed because requests do not complete.
    pub fn is_incomplete(&self) -> bool {
        matches!(self, Self::Unmet { ratio, .. } if *ratio > SLOWEST)
    }
}

impl Trial {
    pub(crate) fn refused(setting: &Setting, effort: Effort, reason: String, foreseen: bool) -> Self {
        Self { outcome: Outcome::Refused { reason, foreseen }, ..Self::new(setting, effort, 0) }
    }

    /// A trial without results.
    pub fn new(setting: &Setting, effort: Effort, seed: u64) -> Self {
        Self {
            setting: setting.clone(),
            effort,
            seed,
            outcome: Outcome::Worse { guess: 0.0 },
            against: Vec::new(),
            bounded: Vec::new(),
            beside: Vec::new(),
            seconds: 0.0,
            start_seconds: 0.0,
            starts: 0,
            loads: 0,
            requests: 0,
            kv_full: false,
            notes: Vec::new(),
        }
    }

    /// The measured value.
    pub fn value(&self) -> Option<f64> {
        match &self.outcome {
            Outcome::Measured { value, .. } => Some(value.value),
            _ => None,
        }
    }

    /// The values of a measure's runs.
    pub fn runs(&self) -> &[f64] {
        match &self.outcome {
            Outcome::Measured { runs, .. } => runs,
            _ => &[],
        }
    }

    /// Whether it is neither a prediction nor a confirmation.
    pub fn is_search(&self) -> bool {
        !matches!(self.effort, Effort::Confirm | Effort::Predict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measure_without_data_survives_the_journal() {
        let trial = Trial { beside: vec![1.5, f64::NAN], ..Trial::new(&Setting::new(), Effort::Confirm, 1) };
        let read: Trial = serde_json::from_str(&serde_json::to_string(&trial).unwrap()).unwrap();
        assert!(read.beside[0] == 1.5 && read.beside[1].is_nan() && read.against.is_empty(), "{read:?}");
    }
}
