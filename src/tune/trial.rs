//! A trial: one setting, how thoroughly it was tried, and what came of it.
//!
//! Trials are what searches learn from and what the journal holds. Rates are in requests per second, measures in their own
//! unit, times in seconds of the engines.

use serde::{Deserialize, Deserializer, Serialize};

use crate::setting::Setting;
use sluice_core::stats::Estimate;

/// How thoroughly a setting is tried.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effort {
    /// Compared with the value of the best so far, and ended once it cannot be better. `None`: there is no best yet.
    Race(Option<f64>),
    /// With this share of the usual number of requests or runs, without a comparison.
    Rung(f64),
    /// With loads that no earlier trial had, and verified: what the report states.
    Confirm,
    /// Roughly and by simulation alone, before any engine starts.
    Predict,
    /// As vLLM's `auto_tune.sh` does.
    Script,
    /// Started only, to see whether it starts.
    Start,
    /// Started and put under the worst load, to see whether it survives.
    Stress,
}

/// A value and its range; an end that is not known is `None`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Range {
    /// The value.
    pub value: f64,
    /// Lower end.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
}

impl From<Estimate> for Range {
    fn from(estimate: Estimate) -> Self {
        let finite = |value: f64| value.is_finite().then_some(value);
        Self { value: estimate.value, low: finite(estimate.low), high: finite(estimate.high) }
    }
}

impl From<Range> for Estimate {
    fn from(range: Range) -> Self {
        let (low, high) = (range.low.unwrap_or(f64::NEG_INFINITY), range.high.unwrap_or(f64::INFINITY));
        Self { value: range.value, low, high }
    }
}

/// A rate that was proven.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Certified {
    /// Requests per second.
    pub rate: f64,
    /// Share of the requests of the worst class and adapter that met their objectives, over all proofs.
    pub attainment: Range,
    /// Proofs that were run.
    pub proofs: usize,
    /// Requests that counted in them.
    pub requests: usize,
}

/// The ratio of [`Outcome::Unmet`] for requests that do not complete. Finite, because JSON has no infinity and a percentile
/// between two infinite values is NaN.
pub const NEVER: f64 = 1e9;
/// A ratio above this is a percentile between that of requests that do not complete and a measured one.
const SLOWEST: f64 = 1e6;

/// What came of a trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Outcome {
    /// The value of the objective.
    Measured {
        /// The value and its interval (90 % for a rate, 95 % for a measure).
        value: Range,
        /// Of each run, for a measure.
        runs: Vec<f64>,
        /// What was proven of it, for a rate.
        certified: Option<Certified>,
    },
    /// Not better than the best so far. The guess is a rough one.
    Worse {
        /// About where its value lies.
        guess: f64,
    },
    /// No rate meets the objectives: even single requests miss them.
    Unmet {
        /// The requests that miss them most.
        group: String,
        /// The objective that they miss by most.
        objective: String,
        /// By how much: 1.2 is 20 % beyond the bound.
        ratio: f64,
    },
    /// So many requests have no complete response that a percentile which is optimised is one of theirs.
    Lossy {
        /// The percentile.
        measure: String,
    },
    /// Too few prompt tokens came from the prefix caches, so what was measured is not the workload that was meant.
    ColdCache {
        /// The share that did.
        hit_rate: f64,
        /// The least share.
        wanted: f64,
    },
    /// It starts; nothing was measured.
    Starts,
    /// The engine does not start.
    Refused {
        /// What it says.
        reason: String,
        /// Whether that was known without a start.
        foreseen: bool,
    },
}

/// A trial. See the header of this file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// What was tried.
    pub setting: Setting,
    /// How thoroughly.
    pub effort: Effort,
    /// The seed of its loads.
    pub seed: u64,
    /// What came of it.
    pub outcome: Outcome,
    /// The runs of the second measure, for a front.
    #[serde(default, deserialize_with = "with_unknown")]
    pub against: Vec<f64>,
    /// Other measures, in the order of the file; NaN where a run has no data for one.
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
    /// What was seen besides: why it is not better.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// JSON has no NaN: it is written as null.
fn with_unknown<'de, D: Deserializer<'de>>(values: D) -> Result<Vec<f64>, D::Error> {
    let values = Vec::<Option<f64>>::deserialize(values)?;
    Ok(values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
}

impl Outcome {
    /// Whether the objectives are missed because requests do not complete.
    pub fn is_incomplete(&self) -> bool {
        matches!(self, Self::Unmet { ratio, .. } if *ratio > SLOWEST)
    }
}

impl Trial {
    /// A setting that does not start.
    pub(crate) fn refused(setting: &Setting, effort: Effort, reason: String, foreseen: bool) -> Self {
        Self { outcome: Outcome::Refused { reason, foreseen }, ..Self::new(setting, effort, 0) }
    }

    /// A trial of which nothing is known yet.
    pub fn new(setting: &Setting, effort: Effort, seed: u64) -> Self {
        Self {
            setting: setting.clone(),
            effort,
            seed,
            outcome: Outcome::Worse { guess: 0.0 },
            against: Vec::new(),
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

    /// The runs of a measure.
    pub fn runs(&self) -> &[f64] {
        match &self.outcome {
            Outcome::Measured { runs, .. } => runs,
            _ => &[],
        }
    }

    /// Whether it counts in the search, and not for the winner alone.
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
