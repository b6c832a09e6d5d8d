//! What an engine reaches of a GPU's peaks, and what its software costs: the fitted constants, one set for all.
//!
//! They were fitted on one GPU and carry over to others as shares of the peak (`sluice sim fit` makes such a file
//! from rows of your own). A GPU whose software behaves otherwise replaces single ones in its own file.

use serde::{Deserialize, Serialize};

use super::data::{Gpu, ProfileError, parse};

const FITTED: &str = include_str!("constants.toml");

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
    /// Of the bandwidth: weights and KV cache.
    pub bandwidth: f64,
    /// Of the FLOPs, in linear layers.
    pub linear: f64,
    /// Of the FLOPs, in the attention of prompts.
    pub attention: f64,
}

/// Costs of a step that do not follow from sizes, microseconds. Those per layer are gaps between kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepConstants {
    /// Each layer of any step.
    pub layer_us: f64,
    /// Each layer of a step with part of a prompt, on top: its attention runs outside the graphs.
    pub prompt_layer_us: f64,
    /// Each layer of a step too large for a graph takes the CPU this long to launch: such a step is not shorter.
    pub launch_layer_us: f64,
    /// The part of it that remains where graphs hold all but the attention of prompts.
    pub piecewise_launch_share: f64,
    /// The part of it that remains where one graph holds the whole step.
    pub graph_launch_share: f64,
    /// Each sequence in a step: sampler, block tables.
    pub sequence_us: f64,
    /// Each layer of a step with an adapter, on top.
    pub lora_layer_us: f64,
    /// Each layer and token of a step with an adapter, on top.
    pub lora_token_layer_us: f64,
    /// Each layer of a step with an adapter that is too large for a graph takes the CPU so much longer to launch.
    pub lora_launch_layer_us: f64,
    /// The share of such steps, when they begin several prompts, whose launch waits until the GPU has done them: what
    /// the step before produced is seen that much later. Seen, not explained; oftener while a server is young.
    pub stall_share: f64,
    /// The same with an adapter.
    pub lora_stall_share: f64,
    /// An adapter is read from disk at this rate, 10^9 bytes per second, while every sequence waits.
    pub adapter_read_gb_per_s: f64,
    /// An adapter is copied from the host into a slot at this rate, 10^9 bytes per second.
    pub adapter_copy_gb_per_s: f64,
    /// Standard deviation of the logarithm of a step's length.
    pub jitter: f64,
}

/// Costs of the API server, one thread that its requests and their tokens share, microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontEndRates {
    /// Thread time to take a request in.
    pub request_us: f64,
    /// Thread time for each token of its prompt.
    pub request_token_us: f64,
    /// Thread time to send one token.
    pub token_us: f64,
    /// Thread time for a first token, on top.
    pub first_us: f64,
    /// Thread time for each token of the prompt when the first token is sent.
    pub first_token_us: f64,
    /// From the client to the engine, whatever the load.
    pub in_us: f64,
    /// From the end of a step to the client, whatever the load.
    pub out_us: f64,
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
        let Efficiency { bandwidth, linear, attention } = constants.efficiency;
        if [bandwidth, linear, attention].iter().any(|share| !(*share > 0.0 && *share <= 1.0)) {
            let error = "efficiencies must be above 0 and at most 1".to_owned();
            return Err(ProfileError::Wrong { what: "constants", name: name.to_owned(), error });
        }
        let StepConstants { adapter_read_gb_per_s, adapter_copy_gb_per_s, .. } = constants.step;
        if !(adapter_read_gb_per_s > 0.0 && adapter_copy_gb_per_s > 0.0) {
            let error = "rates of adapters must be above 0".to_owned();
            return Err(ProfileError::Wrong { what: "constants", name: name.to_owned(), error });
        }
        Ok(constants)
    }

    /// This set as the tables of its file.
    ///
    /// # Panics
    /// Never: it holds numbers only.
    pub fn table(&self) -> toml::Table {
        toml::Table::try_from(self).expect("numbers in tables")
    }

    /// This set with what the file of `gpu` replaces; `name` is the file's, for errors.
    ///
    /// # Errors
    /// When a replacement has a key that does not exist or a value out of its range.
    pub fn on(&self, gpu: &Gpu, name: &str) -> Result<Self, ProfileError> {
        if gpu.efficiency.is_empty() && gpu.step.is_empty() && gpu.front_end.is_empty() {
            return Ok(self.clone());
        }
        let mut table = self.table();
        for (part, replaced) in [("efficiency", &gpu.efficiency), ("step", &gpu.step), ("front_end", &gpu.front_end)] {
            if let Some(toml::Value::Table(part)) = table.get_mut(part) {
                part.extend(replaced.clone());
            }
        }
        Self::parse(name, &table.to_string())
    }
}
