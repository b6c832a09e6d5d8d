//! The settings of a simulated server: flags of `vllm serve`, resolved against a GPU and a model.
//!
//! [`SimConfig::from_args`] refuses settings that vLLM refuses at start-up, with vLLM's messages
//! ([`Refusal`]). Defaults are vLLM's for the GPU. All fields are public, so a test or the demo can
//! change the result of [`SimConfig::new`].
//!
//! [`Refusal`]: crate::process::refusal::Refusal

use std::sync::Arc;
use std::time::Duration;

use crate::engine::{BLOCK_TOKENS, Engine, EngineConfig};
use crate::machine::{CostModel, GIB, Graphs, KvBudget, MemorySettings, Profile};
use crate::observe::log::Log;
use crate::process::fault::Fault;
use crate::validate::TextModel;
use crate::virtual_server::{FrontEnd, VirtualServer};
use sluice_core::vllm::version::Version;

mod compilation;
mod flags;
mod from_args;
mod graphs;
mod hardware;
mod memory;
mod speculation;
#[cfg(test)]
mod tests;

pub use compilation::Compilation;
pub use flags::without_effect;

/// Maximum adapters that one process can load, including adapters that were unloaded. Their ids are
/// 16 bits wide.
pub const MAX_ADAPTERS: usize = 1024;
/// Maximum data-parallel ranks of one process.
pub const MAX_RANKS: u32 = 256;

/// Settings of a server that behaves like SGLang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sglang {
    /// Whether `/metrics` exists (`--enable-metrics`).
    pub metrics: bool,
}

/// All settings of a server.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The version of vLLM that the server imitates.
    pub version: Version,
    /// Served names of the base model; responses and metrics show the first one.
    pub names: Vec<String>,
    /// `root` in `/v1/models`.
    pub root: String,
    /// Tokenizer and chat template.
    pub texts: Arc<TextModel>,
    /// Longest context, tokens.
    pub max_model_len: u32,
    /// Limits of the engine.
    pub engine: EngineConfig,
    /// GPU and model.
    pub profile: Profile,
    /// The parts of the memory; `None` if it was not computed.
    pub budget: Option<KvBudget>,
    /// `--gpu-memory-utilization`.
    pub utilisation: f64,
    /// `--enforce-eager`.
    pub eager: bool,
    /// The compiler of steps. `None` with `--enforce-eager`, and with `-O0` unless the compilation
    /// config overrides it.
    pub compilation: Compilation,
    /// CUDA graphs.
    pub graphs: Graphs,
    /// `--api-server-count`.
    pub api_servers: u32,
    /// `--data-parallel-size`: engines behind the same address.
    pub data_parallel: u32,
    /// Adapters loaded at the start: name and path.
    pub adapters: Vec<(String, String)>,
    /// Whether `--enable-lora` was given.
    pub lora: bool,
    /// `--max-lora-rank`.
    pub max_lora_rank: i64,
    /// Whether the model is a folder. If so, adapters must be folders too.
    pub on_disk: bool,
    /// Whether adapters can be loaded and unloaded over HTTP (`VLLM_ALLOW_RUNTIME_LORA_UPDATING`).
    pub runtime_lora: bool,
    /// Whether `/v1/embeddings` exists. A vLLM that generates does not have it.
    pub embeddings: bool,
    /// Whether routes for development exist (`VLLM_SERVER_DEV_MODE`).
    pub dev_mode: bool,
    /// Whether `/start_profile` and `/stop_profile` exist.
    pub profiler: bool,
    /// `--max-num-queued-reqs`.
    pub max_queued_requests: Option<u64>,
    /// `--max-num-queued-tokens`.
    pub max_queued_tokens: Option<u64>,
    /// `--api-key`.
    pub api_keys: Vec<String>,
    /// `--max-logprobs`.
    pub max_logprobs: i64,
    /// Whether a tool may be called that the request does not demand by name
    /// (`--enable-auto-tool-choice`).
    pub auto_tools: bool,
    /// `--stream-interval`, tokens.
    pub stream_interval: u32,
    /// `--sse-keep-alive-interval`.
    pub keep_alive: Option<Duration>,
    /// Time for which a connection may idle: `VLLM_HTTP_TIMEOUT_KEEP_ALIVE`.
    pub http_keep_alive: Duration,
    /// Whether `/metrics` has the engine's families (not with `--disable-log-stats`).
    pub log_stats: bool,
    /// `--enable-server-load-tracking`.
    pub track_load: bool,
    /// `--enable-request-id-headers`.
    pub request_id_headers: bool,
    /// `--enable-force-include-usage`.
    pub force_usage: bool,
    /// `--enable-prompt-tokens-details`.
    pub prompt_details: bool,
    /// `--enable-per-request-metrics`.
    pub request_metrics: bool,
    /// The port on which KV events are published (`--kv-events-config`); `None`: they are not.
    pub kv_events: Option<u16>,
    /// `--enable-scale-out`.
    pub scale_out: bool,
    /// Whether `--show-hidden-metrics-for-version` was given.
    pub show_hidden: bool,
    /// Time for which a shutdown waits for requests in flight; zero ends them at once.
    pub shutdown_timeout: Duration,
    /// Simulated seconds per real second.
    pub speed: f64,
    /// Seed of output lengths, words and jitter.
    pub seed: u64,
    /// Real time that the engine takes to fall asleep or to wake.
    pub wake: Duration,
    /// A fault that is injected at the start.
    pub fault: Option<Fault>,
    /// Set if the server has SGLang's pages; `None`: vLLM's pages.
    pub sglang: Option<Sglang>,
    /// Whether the process writes vLLM's log to stdout.
    pub log: Log,
}

impl SimConfig {
    /// A server of `model` on `profile` with the limits of the measured server.
    pub fn new(model: &str, profile: Profile) -> Self {
        let engine = EngineConfig {
            max_num_seqs: profile.memory.max_num_seqs,
            max_num_batched_tokens: profile.memory.max_num_batched_tokens,
            num_blocks: profile.memory.kv_tokens / BLOCK_TOKENS,
            ..EngineConfig::default()
        };
        let graphs = Graphs::chosen(engine.max_num_seqs, engine.max_num_batched_tokens, None);
        Self {
            version: Version::COMPARED,
            names: vec![model.to_owned()],
            root: model.to_owned(),
            texts: Arc::new(TextModel::made_up()),
            max_model_len: profile.shape.max_model_len.min(profile.memory.kv_tokens),
            engine,
            profile,
            budget: None,
            utilisation: MemorySettings::default().utilisation,
            eager: false,
            compilation: Compilation::Vllm,
            graphs,
            api_servers: 1,
            data_parallel: 1,
            adapters: Vec::new(),
            lora: false,
            max_lora_rank: 16,
            on_disk: false,
            runtime_lora: true,
            embeddings: true,
            dev_mode: false,
            profiler: false,
            max_queued_requests: None,
            max_queued_tokens: None,
            api_keys: Vec::new(),
            max_logprobs: 20,
            auto_tools: false,
            stream_interval: 1,
            keep_alive: None,
            http_keep_alive: Duration::from_secs(5),
            log_stats: true,
            track_load: false,
            request_id_headers: false,
            force_usage: false,
            prompt_details: false,
            request_metrics: false,
            kv_events: None,
            scale_out: false,
            show_hidden: false,
            shutdown_timeout: Duration::ZERO,
            speed: 1.0,
            seed: 0,
            wake: Duration::ZERO,
            fault: None,
            sglang: None,
            log: Log::Off,
        }
    }

    /// The same settings on a server of `version`. Before 0.33, `--prefill-schedule-interval` has
    /// no effect without data parallelism.
    #[must_use]
    pub fn imitating(mut self, version: Version) -> Self {
        self.version = version;
        if !version.since(33) {
            self.engine.prefill_schedule_interval = 1;
        }
        self
    }

    /// The virtual server of one rank with these settings. The id of an adapter is its index in
    /// `adapters`.
    pub fn virtual_server(&self) -> VirtualServer {
        self.virtual_server_with((0..).take(self.adapters.len()))
    }

    /// As [`SimConfig::virtual_server`], with the adapters loaded under these ids.
    pub fn virtual_server_with(&self, adapters: impl IntoIterator<Item = u16>) -> VirtualServer {
        let kv_events = self.kv_events.is_some();
        let engine = EngineConfig { seed: self.seed, kv_events, ..self.engine.clone() };
        let cost = CostModel::new(&self.profile, engine.max_num_seqs, engine.max_num_batched_tokens);
        // Slots have the size of the largest rank, whichever adapter they hold.
        let cost = cost.with_rank(u32::try_from(self.max_lora_rank).unwrap_or(16));
        let cost = cost.with_graphs(self.graphs.clone()).with_speculation(engine.speculation.as_ref());
        let mut engine = Engine::new(engine, cost);
        for adapter in adapters {
            // This time is part of the start, before the server exists.
            let _ = engine.load_adapter(adapter);
        }
        // Requests and tokens of all ranks share the API servers.
        let servers = (self.api_servers / self.data_parallel.max(1)).max(1);
        VirtualServer::new(engine, FrontEnd::with_servers(&self.profile.front_end, servers))
    }

    /// Weights on one GPU, GiB.
    pub fn weights_gib(&self) -> f64 {
        self.budget.map_or(self.profile.shape.weight_bytes, |budget| budget.weights) / GIB
    }
}
