//! The fitted constants: the share of a GPU's peaks that an engine reaches, and the costs of its software.
//!
//! They were fitted on one GPU and are applied to others as shares of the peak. `sluice sim fit` writes such a file from
//! your own measurements. A GPU whose software behaves differently overrides single constants in its own file.

use serde::{Deserialize, Serialize};

use super::preset::{ProfileError, parse};

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

/// Shares of the peaks, in (0, 1].
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
    /// CPU time to launch one layer of a step that is too large for a CUDA graph. Such a step takes at least this long.
    pub launch_layer_us: f64,
    /// The share of `launch_layer_us` that remains where graphs cover all but the attention of prompts.
    pub piecewise_launch_share: f64,
    /// The share of `launch_layer_us` that remains where one graph covers the whole step.
    pub graph_launch_share: f64,
    /// Each sequence in a step: sampler, block tables.
    pub sequence_us: f64,
    /// Each layer of a step with an adapter, on top.
    pub lora_layer_us: f64,
    /// Each layer and token of a step with an adapter, on top.
    pub lora_token_layer_us: f64,
    /// CPU time that an adapter adds to launching one layer of a step that is too large for a graph.
    pub lora_launch_layer_us: f64,
    /// Share of the steps without a graph and with several prompts whose launch blocks until the GPU has finished them,
    /// so that the results of the previous step are delivered late. Observed, cause unknown; more frequent soon after a
    /// server's start.
    pub stall_share: f64,
    /// The same with an adapter.
    pub lora_stall_share: f64,
    /// Rate at which an adapter is read from disk, 10^9 bytes per second. All sequences wait meanwhile.
    pub adapter_read_gb_per_s: f64,
    /// Rate at which an adapter is copied from host memory into a GPU slot, 10^9 bytes per second.
    pub adapter_copy_gb_per_s: f64,
    /// Standard deviation of the logarithm of a step's length.
    pub jitter: f64,
}

/// Costs of the API server, whose single thread handles requests and tokens; microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontEndRates {
    /// Thread time to accept a request.
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

/// Constants that a GPU's file replaces, by table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Overrides<'a> {
    pub(super) efficiency: &'a toml::Table,
    pub(super) step: &'a toml::Table,
    pub(super) front_end: &'a toml::Table,
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

    /// This set with some constants replaced; `name` is the file of the overrides, for errors.
    ///
    /// # Errors
    /// When an override has a key that does not exist or a value out of its range.
    pub(super) fn with_overrides(&self, overrides: Overrides<'_>, name: &str) -> Result<Self, ProfileError> {
        let Overrides { efficiency, step, front_end } = overrides;
        if efficiency.is_empty() && step.is_empty() && front_end.is_empty() {
            return Ok(self.clone());
        }
        let mut table = self.table();
        for (part, replaced) in [("efficiency", efficiency), ("step", step), ("front_end", front_end)] {
            if let Some(toml::Value::Table(part)) = table.get_mut(part) {
                part.extend(replaced.clone());
            }
        }
        Self::parse(name, &table.to_string())
    }
}
