//! The fitted constants: the shares of a GPU's peaks that an engine reaches, and the costs of
//! vLLM's software on a host.
//!
//! ```text
//! constants.toml   [efficiency] [kernel] [step]   the GPU
//! host/*.toml      [host] [front_end]             the CPU: engine process and API server
//! ```
//!
//! The constants of the GPU were fitted on an H200; other GPUs get the same shares of their own
//! peaks, which was not measured. CPU costs differ by a factor of two between hosts with the same
//! GPU, so there is one file per host. `sluice sim fit` writes such files from your own
//! measurements; with `--server` it measures the host of a running engine in a minute. The file of
//! a GPU can override single constants.

use serde::{Deserialize, Serialize};

use super::preset::{ProfileError, find, parse};

const FITTED: &str = include_str!("constants.toml");
const HOSTS: &[(&str, &str)] = &[
    ("busy", include_str!("host/busy.toml")),
    ("pair", include_str!("host/pair.toml")),
    ("quiet", include_str!("host/quiet.toml")),
    ("trio", include_str!("host/trio.toml")),
];
const HOST: &str = "busy";

/// All fitted constants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constants {
    /// Shares of the peaks.
    pub efficiency: Efficiency,
    /// How kernels fill the GPU.
    pub kernel: KernelConstants,
    /// GPU costs of a step besides arithmetic.
    pub step: StepConstants,
    /// CPU costs of a step in the engine process.
    pub host: HostConstants,
    /// Costs of the API server.
    pub front_end: FrontEndRates,
}

/// Shares of the peaks, above 0 and at most 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Efficiency {
    /// Share of the bandwidth, when weights are read.
    pub bandwidth: f64,
    /// Share of the bandwidth, when the KV cache is read in a step that only decodes.
    pub kv_cache: f64,
    /// As `kv_cache`, in a step that also prefills, where one kernel does both.
    pub mixed_kv_cache: f64,
    /// Share of the FLOPs, in linear layers with many tokens.
    pub linear: f64,
    /// Share of the FLOPs in fp8, in linear layers with fp8 weights and many tokens.
    #[serde(default = "fp8_linear")]
    pub fp8_linear: f64,
    /// Share of the FLOPs, in the attention of prompts that are long enough to use all
    /// multiprocessors.
    pub attention: f64,
}

/// How kernels use the GPU. Matrices are multiplied in tiles of [`TILE`] rows; a tile that is not
/// full takes the same time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelConstants {
    /// Share of the linear layers' time that grows with whole tiles of tokens; the rest grows with
    /// tokens.
    pub tile_share: f64,
    /// Cost of an idle multiprocessor in the last wave of attention tiles, as a share of a busy
    /// one. With 0, a partly filled wave takes time in proportion to its tiles; with 1, as long as
    /// a full wave.
    pub idle_share: f64,
    /// Upper bound on the time of attention with idle multiprocessors, as a multiple of the time in
    /// proportion to tiles. It matters below a full wave, where contexts are split over idle
    /// multiprocessors.
    pub split_penalty: f64,
    /// Tokens for each multiprocessor whose time is added to linear layers with fp8 weights and
    /// more tokens than a tile, because fp8 kernels fill the GPU only with thousands of tokens.
    #[serde(default = "fp8_idle_tokens")]
    pub fp8_idle_tokens: f64,
}

fn fp8_linear() -> f64 {
    Constants::fitted().efficiency.fp8_linear
}

fn fp8_idle_tokens() -> f64 {
    Constants::fitted().kernel.fp8_idle_tokens
}

/// Defaults for hosts whose constants were fitted with token ids. Timed on an H200's host
/// (`grid/api.csv.gz`): a text of one word takes 3 ms longer than its ids, and one of 16,000 words
/// (about 25,000 tokens) 36 ms. The times leave out 2 ms in which vLLM 0.22.1 collected texts;
/// later versions do not collect.
fn text_us() -> f64 {
    1000.0
}

fn text_token_us() -> f64 {
    1.3
}

/// Defaults for speculative decoding with n-grams, fitted to steps of an H200
/// (`speculation_steps.csv`); `admit_share` is fitted to the total time of the same runs. CPU time
/// is a share of `step_us`, because the same process runs the same kind of code.
fn draft_us() -> f64 {
    6.9
}

fn verify_share() -> f64 {
    0.72
}

fn greedy_verify_share() -> f64 {
    0.5
}

fn draft_sequence_share() -> f64 {
    0.015
}

fn admit_share() -> f64 {
    1.07
}

fn unpinned_gb_per_s() -> f64 {
    1.4
}

/// Rows of a tile. A row is a token in linear layers, and a token of one query head in attention.
pub(super) const TILE: f64 = 128.0;

/// Fixed costs of a step on the GPU, in microseconds unless stated otherwise. Costs per layer are
/// gaps between kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepConstants {
    /// Per layer, in every step.
    pub layer_us: f64,
    /// Added per layer in a step that prefills, because its attention runs outside the CUDA graphs.
    pub prompt_layer_us: f64,
    /// Per sequence: sampler, block tables.
    pub sequence_us: f64,
    /// Added per layer in a step with an adapter.
    pub lora_layer_us: f64,
    /// Added per layer and token in a step with an adapter.
    pub lora_token_layer_us: f64,
    /// Rate at which an adapter is read from disk, 10^9 bytes per second. All sequences wait
    /// meanwhile.
    pub adapter_read_gb_per_s: f64,
    /// Rate at which an adapter is copied from host memory into a GPU slot, 10^9 bytes per second.
    pub adapter_copy_gb_per_s: f64,
    /// Per draft that is verified, for the draft's row of the vocabulary in the sampler. The
    /// draft's token is counted separately.
    #[serde(default = "draft_us")]
    pub draft_us: f64,
    /// Standard deviation of the logarithm of a step's GPU time.
    pub jitter: f64,
}

/// CPU time of the engine process per step, in microseconds unless stated otherwise. The process
/// prepares a step while the GPU computes the step before, so a step takes at least this long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostConstants {
    /// Per step: schedule, prepare inputs, sample, process results.
    pub step_us: f64,
    /// Per sequence.
    pub sequence_us: f64,
    /// Per layer in a step without a CUDA graph, whose kernels are launched one by one.
    pub launch_layer_us: f64,
    /// Added to `launch_layer_us` in a step with an adapter.
    pub lora_launch_layer_us: f64,
    /// Added to a step with a prompt, on top of the longer of GPU and CPU time. Measured only on
    /// machines with two engines, a gateway and a load generator; 0 on a machine with one engine.
    /// The cause is unknown. `sluice sim fit --server` keeps the value of the host from which it
    /// starts.
    #[serde(default)]
    pub prompt_step_us: f64,
    /// Added to a step that verifies drafts: indices and the kernels of the rejection sampler, as
    /// a share of `step_us`.
    #[serde(default = "verify_share")]
    pub verify_share: f64,
    /// As `verify_share`, where all requests have temperature 0.
    #[serde(default = "greedy_verify_share")]
    pub greedy_verify_share: f64,
    /// Per sequence whose drafts are looked up on the CPU, as a share of `step_us`.
    #[serde(default = "draft_sequence_share")]
    pub draft_sequence_share: f64,
    /// Per sequence that joins the batch of an engine that looks up drafts, as a share of
    /// `step_us`. The constants of engines that plan ahead were fitted without it.
    #[serde(default = "admit_share")]
    pub admit_share: f64,
    /// Rate at which the masks of `allowed_token_ids` are copied from memory that is not pinned,
    /// 10^9 bytes per second. Whenever the batch changes, the masks of all sequences of the batch
    /// are copied.
    #[serde(default = "unpinned_gb_per_s")]
    pub unpinned_gb_per_s: f64,
    /// Share of the launch cost that remains with piecewise graphs, which cover everything except
    /// the attention.
    pub piecewise_share: f64,
    /// Among steps with several prompts and without a graph, the share whose launch blocks until
    /// the GPU has finished, so that the results of the previous step are late. Such steps are more
    /// frequent soon after the start of a server; the cause is unknown.
    pub stall_share: f64,
    /// As `stall_share`, for steps with an adapter.
    pub lora_stall_share: f64,
    /// Standard deviation of the logarithm of a step's CPU time.
    pub jitter: f64,
}

/// Costs of the API server, in microseconds. One thread handles requests and tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontEndRates {
    /// Thread time per request, when it is received.
    pub request_us: f64,
    /// Thread time per prompt token, when the request is received.
    pub request_token_us: f64,
    /// Thread time per token sent.
    pub token_us: f64,
    /// Added thread time for the first token of a request.
    pub first_us: f64,
    /// Thread time per prompt token, when the first token is sent.
    pub first_token_us: f64,
    /// Delay of a prompt that comes as text, which is handed to another thread.
    #[serde(default = "text_us")]
    pub text_us: f64,
    /// Time per token of the other thread, which tokenizes one text after the other.
    #[serde(default = "text_token_us")]
    pub text_token_us: f64,
    /// Delay from the client to the engine, independent of load.
    pub in_us: f64,
    /// Delay from the end of a step to the client, independent of load.
    pub out_us: f64,
}

impl Constants {
    /// The built-in constants, with the default host.
    ///
    /// # Panics
    /// Never: a test parses them.
    pub fn fitted() -> Self {
        Self::on_host(HOST).expect("the built-in constants are read by a test")
    }

    /// Names of the built-in hosts.
    pub fn hosts() -> impl Iterator<Item = &'static str> {
        HOSTS.iter().map(|(name, _)| *name)
    }

    /// The built-in constants with the tables of a host: the name of a built-in host, or the path
    /// of a file that `sluice sim fit` wrote.
    pub fn on_host(host: &str) -> Result<Self, ProfileError> {
        let read = |name: &str, text: &str| parse::<toml::Table>("host", name, text, &[]);
        let mut table = read("(built in)", FITTED)?;
        table.extend(read(host, &find("host", host, HOSTS)?)?);
        Self::parse(host, &table.to_string())
    }

    /// Parses constants that `sluice sim fit` wrote.
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileError> {
        let constants: Self = parse("constants", name, text, &["efficiency", "kernel", "step", "host", "front_end"])?;
        let Efficiency { bandwidth, kv_cache, mixed_kv_cache, linear, fp8_linear, attention } = constants.efficiency;
        let shares = [bandwidth, kv_cache, mixed_kv_cache, linear, fp8_linear, attention];
        if shares.iter().any(|share| !(*share > 0.0 && *share <= 1.0)) {
            let error = "efficiencies must be above 0 and at most 1".to_owned();
            return Err(ProfileError::Wrong { what: "constants", name: name.to_owned(), error });
        }
        let StepConstants { adapter_read_gb_per_s, adapter_copy_gb_per_s, .. } = constants.step;
        let copies = [adapter_read_gb_per_s, adapter_copy_gb_per_s, constants.host.unpinned_gb_per_s];
        if !copies.iter().all(|rate| *rate > 0.0) {
            let error = "rates at which adapters and masks are read and copied must be above 0".to_owned();
            return Err(ProfileError::Wrong { what: "constants", name: name.to_owned(), error });
        }
        Ok(constants)
    }

    /// The constants as TOML tables.
    ///
    /// # Panics
    /// Never: there are only numbers.
    pub fn table(&self) -> toml::Table {
        toml::Table::try_from(self).expect("numbers in tables")
    }

    /// Replaces some constants, by table. `name` is the file of the overrides, for error messages.
    pub(super) fn with_overrides(&self, parts: [(&str, &toml::Table); 5], name: &str) -> Result<Self, ProfileError> {
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
