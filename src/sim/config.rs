//! What a simulated server is: flags of `vllm serve` resolved against a profile.
//!
//! Valid by construction: [`SimConfig::from_args`] refuses what vLLM refuses at start-up, in its words. Defaults are
//! the profile's. Everything is public, so that a test or the demo can start from [`SimConfig::new`] and change a field.

use std::time::Duration;

use super::cost::{CostModel, Profile};
use super::engine::{BLOCK_TOKENS, Engine, EngineConfig};
use super::fault::Fault;
use super::lane::{FrontEnd, Lane};
use crate::vllm::args::ServeArgs;

/// Most adapters that can be loaded at once: an id is 16 bits wide, and nobody simulates more.
pub const MAX_ADAPTERS: usize = 1024;

/// Flags of vLLM that change something here, in alphabetical order; the others are accepted and have no effect.
const SIMULATED: &[&str] = &[
    "api-key",
    "async-scheduling",
    "enable-chunked-prefill",
    "enable-force-include-usage",
    "enable-lora",
    "enable-request-id-headers",
    "enable-server-load-tracking",
    "gpu-memory-utilization",
    "host",
    "kv-cache-dtype",
    "kv-cache-memory-bytes",
    "long-prefill-token-threshold",
    "lora-modules",
    "max-loras",
    "max-model-len",
    "max-num-active-seqs",
    "max-num-batched-tokens",
    "max-num-queued-reqs",
    "max-num-queued-tokens",
    "max-num-seqs",
    "num-gpu-blocks-override",
    "port",
    "served-model-name",
    "watermark",
];

/// Flags that were given and that the simulator does not act on, for a warning.
pub fn without_effect(args: &ServeArgs) -> Vec<&'static str> {
    args.flags().filter(|flag| !SIMULATED.contains(flag)).collect()
}

/// Everything that a server needs to know.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Names of the base model; the first one is shown in metrics.
    pub names: Vec<String>,
    /// What `root` says in `/v1/models`.
    pub root: String,
    /// Longest context, tokens.
    pub max_model_len: u32,
    /// Limits of the engine.
    pub engine: EngineConfig,
    /// GPU and model.
    pub profile: Profile,
    /// Adapters loaded at the start: name and path.
    pub adapters: Vec<(String, String)>,
    /// Whether `--enable-lora` was given.
    pub lora: bool,
    /// `--max-num-queued-reqs`.
    pub max_queued_requests: Option<u64>,
    /// `--max-num-queued-tokens`.
    pub max_queued_tokens: Option<u64>,
    /// `--api-key`.
    pub api_keys: Vec<String>,
    /// `--enable-server-load-tracking`.
    pub track_load: bool,
    /// `--enable-request-id-headers`.
    pub request_id_headers: bool,
    /// `--enable-force-include-usage`.
    pub force_usage: bool,
    /// Simulated seconds per real second.
    pub speed: f64,
    /// Seed of output lengths, words and jitter.
    pub seed: u64,
    /// A fault from the start.
    pub fault: Option<Fault>,
    /// How long the port stays closed at the start (real time).
    pub startup: Duration,
}

/// Why a server would not start. vLLM exits with code 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No model was named.
    #[error("no model was named; write `sluice sim MODEL`")]
    NoModel,
    /// A number is out of its range.
    #[error("ValueError: --{0} must be between {1} and {2}, got {3}")]
    Range(&'static str, i64, i64, i64),
    /// Fewer tokens than sequences.
    #[error("ValueError: max_num_batched_tokens ({0}) must be greater than or equal to max_num_seqs ({1}).")]
    BudgetBelowSeqs(u32, u32),
    /// Without chunked prefill a step must hold the longest prompt.
    #[error("ValueError: max_num_batched_tokens ({0}) is smaller than max_model_len ({1}); enable chunked prefill")]
    BudgetBelowLength(u32, u32),
    /// The longest context does not fit the cache.
    #[error(
        "ValueError: To serve at least one request with the model's max seq len ({wanted}), ({needed:.1} GiB KV cache \
         is needed, which is larger than the available KV cache memory ({available:.1} GiB). Based on the available \
         memory, the estimated maximum model length is {fits}. Try increasing `gpu_memory_utilization` or decreasing \
         `max_model_len` when initializing the engine.",
        needed = f64::from(*wanted) * *per_token / GIB, available = f64::from(*fits) * *per_token / GIB
    )]
    TooLongForCache {
        /// Asked for, tokens.
        wanted: u32,
        /// Fits, tokens.
        fits: u32,
        /// Bytes per token, as whole bytes.
        per_token: PerToken,
    },
    /// An adapter without a path.
    #[error("argument --lora-modules: '{0}' is not NAME=PATH")]
    LoraModule(String),
}

const GIB: f64 = (1u64 << 30) as f64;

/// Bytes of KV cache per token; whole, so that errors compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerToken(u64);

impl std::ops::Mul<PerToken> for f64 {
    type Output = f64;

    fn mul(self, bytes: PerToken) -> f64 {
        self * bytes.0 as f64
    }
}

impl SimConfig {
    /// A server of `model` on `profile` with all defaults.
    pub fn new(model: &str, profile: Profile) -> Self {
        let engine = EngineConfig {
            max_num_seqs: profile.memory.max_num_seqs,
            max_num_batched_tokens: profile.memory.max_num_batched_tokens,
            num_blocks: profile.memory.kv_tokens / BLOCK_TOKENS,
            ..EngineConfig::default()
        };
        Self {
            names: vec![model.to_owned()],
            root: model.to_owned(),
            max_model_len: profile.shape.max_model_len.min(profile.memory.kv_tokens),
            engine,
            profile,
            adapters: Vec::new(),
            lora: false,
            max_queued_requests: None,
            max_queued_tokens: None,
            api_keys: Vec::new(),
            track_load: false,
            request_id_headers: false,
            force_usage: false,
            speed: 1.0,
            seed: 0,
            fault: None,
            startup: Duration::ZERO,
        }
    }

    /// The server that these flags ask for.
    ///
    /// # Errors
    /// What vLLM would refuse at start-up.
    pub fn from_args(args: &ServeArgs, profile: Profile) -> Result<Self, ConfigError> {
        let mut config = Self::new(args.model().ok_or(ConfigError::NoModel)?, profile);
        if !args.texts("served-model-name").is_empty() {
            config.names = args.texts("served-model-name").to_vec();
        }
        let at_least_one = |flag, default| number(args, flag, 1, default);
        let seqs = at_least_one("max-num-seqs", config.engine.max_num_seqs)?;
        let engine = &mut config.engine;
        engine.max_num_batched_tokens = at_least_one("max-num-batched-tokens", engine.max_num_batched_tokens)?;
        if engine.max_num_batched_tokens < seqs {
            return Err(ConfigError::BudgetBelowSeqs(engine.max_num_batched_tokens, seqs));
        }
        engine.max_num_seqs = at_least_one("max-num-active-seqs", seqs)?.min(seqs);
        engine.long_prefill_token_threshold = number(args, "long-prefill-token-threshold", 0, 0)?;
        engine.chunked_prefill = args.switch("enable-chunked-prefill").unwrap_or(true);
        engine.async_scheduling = args.switch("async-scheduling").unwrap_or(true);
        engine.watermark = args.float("watermark").unwrap_or(0.0).clamp(0.0, 1.0);
        engine.num_blocks = match args.int("num-gpu-blocks-override") {
            Some(_) => number(args, "num-gpu-blocks-override", 2, 2)?,
            None => scaled_blocks(&config.profile, args),
        };
        config.lora = args.switch("enable-lora").unwrap_or(false);
        engine.max_loras = if config.lora { number(args, "max-loras", 1, 1)? } else { 0 };
        config.limit_length(args)?;
        for module in args.texts("lora-modules") {
            let (name, path) = module.split_once('=').ok_or_else(|| ConfigError::LoraModule(module.clone()))?;
            config.adapters.push((name.to_owned(), path.to_owned()));
        }
        let optional = |flag| args.int(flag).and_then(|value| u64::try_from(value).ok());
        config.max_queued_requests = optional("max-num-queued-reqs");
        config.max_queued_tokens = optional("max-num-queued-tokens");
        config.api_keys = args.texts("api-key").to_vec();
        config.track_load = args.switch("enable-server-load-tracking").unwrap_or(false);
        config.request_id_headers = args.switch("enable-request-id-headers").unwrap_or(false);
        config.force_usage = args.switch("enable-force-include-usage").unwrap_or(false);
        Ok(config)
    }

    fn limit_length(&mut self, args: &ServeArgs) -> Result<(), ConfigError> {
        let fits = self.engine.num_blocks.saturating_sub(1).saturating_mul(BLOCK_TOKENS);
        let model = self.profile.shape.max_model_len;
        let wanted = match args.int("max-model-len") {
            Some(-1) => model.min(fits),
            Some(_) => number(args, "max-model-len", 2, model)?,
            None => model,
        };
        if wanted > fits {
            let per_token = PerToken(self.profile.shape.kv_bytes_per_token as u64);
            return Err(ConfigError::TooLongForCache { wanted, fits, per_token });
        }
        let budget = self.engine.max_num_batched_tokens;
        if !self.engine.chunked_prefill && budget < wanted {
            return Err(ConfigError::BudgetBelowLength(budget, wanted));
        }
        self.max_model_len = wanted;
        Ok(())
    }

    /// The lane that this server drives.
    pub(super) fn lane(&self) -> Lane {
        let engine = EngineConfig { seed: self.seed, ..self.engine.clone() };
        let cost = CostModel::new(&self.profile, engine.max_num_seqs, engine.max_num_batched_tokens);
        Lane::new(Engine::new(engine, cost), FrontEnd::new(&self.profile.front_end))
    }
}

fn number(args: &ServeArgs, flag: &'static str, least: i64, default: u32) -> Result<u32, ConfigError> {
    let value = args.int(flag).unwrap_or(i64::from(default));
    u32::try_from(value).ok().filter(|_| value >= least).ok_or(ConfigError::Range(
        flag,
        least,
        i64::from(u32::MAX),
        value,
    ))
}

/// Blocks at the utilisation asked for; the profile's count belongs to 0.92 of the memory less weights and overhead.
fn scaled_blocks(profile: &Profile, args: &ServeArgs) -> u32 {
    const PROFILED_AT: f64 = 0.92;
    let per_token = profile.shape.kv_bytes_per_token;
    let at_profile = f64::from(profile.memory.kv_tokens) * per_token;
    let bytes = match (args.int("kv-cache-memory-bytes"), args.float("gpu-memory-utilization")) {
        (Some(bytes), _) => bytes as f64,
        (None, Some(share)) => {
            let fixed = profile.shape.weight_bytes;
            (at_profile + fixed) * share / PROFILED_AT - fixed
        }
        (None, None) => at_profile,
    };
    let fp8 = args.text("kv-cache-dtype").is_some_and(|dtype| dtype.starts_with("fp8"));
    let per_token = if fp8 { per_token / 2.0 } else { per_token };
    (bytes.max(0.0) / per_token / f64::from(BLOCK_TOKENS)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(flags: &[&str]) -> Result<SimConfig, ConfigError> {
        let profile = Profile::named("h200-llama-8b").unwrap();
        SimConfig::from_args(&ServeArgs::parse(flags).unwrap(), profile)
    }

    #[test]
    fn defaults_are_those_of_the_measured_server() {
        let config = config(&["m"]).unwrap();
        assert_eq!((config.engine.max_num_seqs, config.engine.max_num_batched_tokens), (256, 8192));
        assert_eq!((config.engine.num_blocks, config.max_model_len), (57_301, 131_072));
    }

    #[test]
    fn what_vllm_refuses_is_refused_in_its_words() {
        let text = |flags: &[&str]| config(flags).unwrap_err().to_string();
        assert_eq!(
            text(&["m", "--max-num-batched-tokens", "512", "--max-num-seqs", "1024"]),
            "ValueError: max_num_batched_tokens (512) must be greater than or equal to max_num_seqs (1024)."
        );
        assert!(
            text(&["m", "--num-gpu-blocks-override", "1001"])
                .contains("the estimated maximum model length is 16000. Try")
        );
        assert!(matches!(config(&[] as &[&str]), Err(ConfigError::NoModel)));
    }

    #[test]
    fn flags_that_change_nothing_are_named() {
        let args = ServeArgs::parse(&["m", "--port", "1", "--stream-interval", "4", "--load-format", "dummy"]).unwrap();
        assert_eq!(without_effect(&args), ["load-format", "stream-interval"]);
    }

    #[test]
    fn auto_length_fits_the_cache() {
        let config = config(&["m", "--num-gpu-blocks-override", "1001", "--max-model-len", "auto"]).unwrap();
        assert_eq!(config.max_model_len, 16_000);
    }

    #[test]
    fn half_the_memory_leaves_fewer_blocks() {
        let config = config(&["m", "--gpu-memory-utilization", "0.5"]).unwrap();
        assert!((20_000..30_000).contains(&config.engine.num_blocks), "{}", config.engine.num_blocks);
    }
}
