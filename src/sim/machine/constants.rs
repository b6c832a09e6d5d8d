//! The fitted constants: the share of a GPU's peaks that an engine reaches, and the costs of its software on a host.
//!
//! ```text
//! constants.toml   [efficiency] [kernel] [step]   what belongs to the GPU
//! host/*.toml      [host] [front_end]             what belongs to the CPU: the engine's process and the API server
//! ```
//!
//! Those of the GPU were fitted on an H200 and are applied to others as shares of the peak: no other GPU was measured. Hosts
//! with the same GPU differ twofold. `sluice sim fit` writes such files from your own measurements, and with `--server` the
//! host's from a running engine in a minute. A GPU whose software behaves differently overrides single constants in its file.

use serde::{Deserialize, Serialize};

use super::preset::{ProfileError, find, parse};

const FITTED: &str = include_str!("constants.toml");
const HOSTS: &[(&str, &str)] = &[("busy", include_str!("host/busy.toml")), ("quiet", include_str!("host/quiet.toml"))];
/// The host without another choice.
const HOST: &str = "busy";

/// All fitted constants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constants {
    /// Shares of the peaks.
    pub efficiency: Efficiency,
    /// How kernels fill the GPU.
    pub kernel: KernelConstants,
    /// What a step costs the GPU beside its arithmetic.
    pub step: StepConstants,
    /// What a step costs the engine's CPU.
    pub host: HostConstants,
    /// The API server in front of it.
    pub front_end: FrontEndRates,
}

/// Shares of the peaks, in (0, 1].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Efficiency {
    /// Of the bandwidth, reading weights.
    pub bandwidth: f64,
    /// Of the bandwidth, reading the KV cache in a step of decodes only.
    pub kv_cache: f64,
    /// The same beside part of a prompt, where one kernel serves both.
    pub mixed_kv_cache: f64,
    /// Of the FLOPs, in linear layers with many tokens.
    pub linear: f64,
    /// Of the FLOPs, in the attention of prompts that fill the GPU.
    pub attention: f64,
}

/// How kernels fill the GPU. Products are made in tiles of [`TILE`] rows, and a tile costs its time even if it is not full.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelConstants {
    /// Share of the linear layers' time that grows with whole tiles of tokens; the rest grows with tokens.
    pub tile_share: f64,
    /// Share of its time that a wave of attention tiles takes for the multiprocessors which it leaves idle.
    pub idle_share: f64,
    /// Most times that attention which fills less than one wave takes longer than its share of a full wave: then contexts are
    /// split over the idle multiprocessors.
    pub split_penalty: f64,
}

/// Rows of a tile: tokens in linear layers; tokens x query heads in attention.
pub(super) const TILE: f64 = 128.0;

/// Costs of a step that do not follow from sizes, microseconds. Those per layer are gaps between kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepConstants {
    /// Each layer of any step.
    pub layer_us: f64,
    /// Each layer of a step with part of a prompt, on top: its attention runs outside the graphs.
    pub prompt_layer_us: f64,
    /// Each sequence in a step: sampler, block tables.
    pub sequence_us: f64,
    /// Each layer of a step with an adapter, on top.
    pub lora_layer_us: f64,
    /// Each layer and token of a step with an adapter, on top.
    pub lora_token_layer_us: f64,
    /// Rate at which an adapter is read from disk, 10^9 bytes per second. All sequences wait meanwhile.
    pub adapter_read_gb_per_s: f64,
    /// Rate at which an adapter is copied from host memory into a GPU slot, 10^9 bytes per second.
    pub adapter_copy_gb_per_s: f64,
    /// Standard deviation of the logarithm of a step's GPU time.
    pub jitter: f64,
}

/// CPU time of the engine's process for a step, microseconds. It prepares a step while the GPU computes the one before, so
/// a step takes at least this long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostConstants {
    /// Any step: schedule, prepare inputs, sample, take results.
    pub step_us: f64,
    /// Each sequence in it.
    pub sequence_us: f64,
    /// To launch the kernels of one layer, one by one: a step that no graph covers.
    pub launch_layer_us: f64,
    /// What an adapter adds to that.
    pub lora_launch_layer_us: f64,
    /// The share of the launch that remains where graphs cover all but the attention.
    pub piecewise_share: f64,
    /// Share of the steps without a graph and with several prompts whose launch blocks until the GPU has finished them,
    /// so that the results of the previous step are delivered late. Observed, cause unknown; more frequent soon after a
    /// server's start.
    pub stall_share: f64,
    /// The same with an adapter.
    pub lora_stall_share: f64,
    /// Standard deviation of the logarithm of a step's CPU time.
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
    pub(super) kernel: &'a toml::Table,
    pub(super) step: &'a toml::Table,
    pub(super) host: &'a toml::Table,
    pub(super) front_end: &'a toml::Table,
}

impl Constants {
    /// The built-in set, on the default host.
    ///
    /// # Panics
    /// Never: a test reads it.
    pub fn fitted() -> Self {
        Self::on_host(HOST).expect("the built-in constants are read by a test")
    }

    /// Names of the built-in hosts.
    pub fn hosts() -> impl Iterator<Item = &'static str> {
        HOSTS.iter().map(|(name, _)| *name)
    }

    /// The built-in set on this host: a built-in one, or the path of a file that `sluice sim fit` wrote. The tables of the file
    /// replace the built-in ones.
    ///
    /// # Errors
    /// An unknown name, an unreadable file, missing or wrong numbers.
    pub fn on_host(host: &str) -> Result<Self, ProfileError> {
        let read = |name: &str, text: &str| parse::<toml::Table>("host", name, text, &[]);
        let mut table = read("(built in)", FITTED)?;
        table.extend(read(host, &find("host", host, HOSTS)?)?);
        Self::parse(host, &table.to_string())
    }

    /// Reads a set that `sluice sim fit` wrote.
    ///
    /// # Errors
    /// Missing or wrong numbers, with their keys.
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileError> {
        let constants: Self = parse("constants", name, text, &["efficiency", "kernel", "step", "host", "front_end"])?;
        let Efficiency { bandwidth, kv_cache, mixed_kv_cache, linear, attention } = constants.efficiency;
        if [bandwidth, kv_cache, mixed_kv_cache, linear, attention].iter().any(|share| !(*share > 0.0 && *share <= 1.0))
        {
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
        let Overrides { efficiency, kernel, step, host, front_end } = overrides;
        let parts =
            [("efficiency", efficiency), ("kernel", kernel), ("step", step), ("host", host), ("front_end", front_end)];
        if parts.iter().all(|(_, replaced)| replaced.is_empty()) {
            return Ok(self.clone());
        }
        let mut table = self.table();
        for (part, replaced) in parts {
            if let Some(toml::Value::Table(part)) = table.get_mut(part) {
                part.extend(replaced.clone());
            }
        }
        Self::parse(name, &table.to_string())
    }
}
