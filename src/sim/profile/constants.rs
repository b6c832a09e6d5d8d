//! What an engine reaches of a GPU's peaks, and what its software costs: the fitted constants, one set for all.
//!
//! They were fitted on one GPU and carry over to others as shares of the peak (`sluice sim fit` makes such a file
//! from rows of your own). A GPU whose software behaves otherwise replaces single ones in its own file.

use serde::{Deserialize, Serialize};

use super::data::{Gpu, ProfileError, parse};

const FITTED: &str = include_str!("../profiles/constants.toml");

/// All fitted constants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constants {
    /// Shares of the peaks.
    pub efficiency: Efficiency,
    /// Software of the engine.
    pub step: StepConstants,
    /// The API server in front of it.
    pub front_end: FrontEndRates,
}

/// Shares of the peaks, above 0 and at most 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Efficiency {
    /// Of the bandwidth, when weights are read.
    pub weights: f64,
    /// Of the bandwidth, when the KV cache is read.
    pub kv: f64,
    /// Of the FLOPs, in linear layers.
    pub linear: f64,
    /// Of the FLOPs, in the attention of prompts.
    pub attention: f64,
}

/// Costs of a step that do not follow from sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepConstants {
    /// Any step, microseconds.
    pub overhead_us: f64,
    /// Each sequence in a step, microseconds.
    pub per_sequence_us: f64,
    /// Factor on the weight and linear terms of a step with an adapter.
    pub lora_factor: f64,
    /// Standard deviation of the logarithm of a step's length.
    pub jitter: f64,
}

/// Costs of the API server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontEndRates {
    /// Serial work per request (one thread: requests queue for it), microseconds.
    pub serial_us: f64,
    /// Serial work to send one token, microseconds.
    pub token_us: f64,
    /// Latency that requests share in parallel, microseconds.
    pub latency_us: f64,
}

impl Constants {
    /// The built-in set.
    ///
    /// # Panics
    /// Never: a test reads it.
    pub fn fitted() -> Self {
        Self::parse("(built in)", FITTED).expect("the built-in constants are read by a test")
    }

    /// Reads a set that `sluice sim fit` wrote.
    ///
    /// # Errors
    /// Missing or wrong numbers, with their keys.
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileError> {
        let constants: Self = parse("constants", name, text, &["efficiency", "step", "front_end"])?;
        let Efficiency { weights, kv, linear, attention } = constants.efficiency;
        if [weights, kv, linear, attention].iter().any(|share| !(*share > 0.0 && *share <= 1.0)) {
            let error = "efficiencies must be above 0 and at most 1".to_owned();
            return Err(ProfileError::Wrong { what: "constants", name: name.to_owned(), error });
        }
        Ok(constants)
    }

    /// This set with what the file of `gpu` replaces; `name` is the file's, for errors.
    ///
    /// # Errors
    /// When a replacement has a key that does not exist or a value out of its range.
    pub fn on(&self, gpu: &Gpu, name: &str) -> Result<Self, ProfileError> {
        if gpu.efficiency.is_empty() && gpu.step.is_empty() && gpu.front_end.is_empty() {
            return Ok(self.clone());
        }
        let mut table = toml::Table::try_from(self).expect("numbers in tables");
        for (part, replaced) in [("efficiency", &gpu.efficiency), ("step", &gpu.step), ("front_end", &gpu.front_end)] {
            if let Some(toml::Value::Table(part)) = table.get_mut(part) {
                part.extend(replaced.clone());
            }
        }
        Self::parse(name, &table.to_string())
    }
}
