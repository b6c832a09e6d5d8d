//! Reads the settings of a server from the flags of `vllm serve`, group by group.
//!
//! The groups are read in vLLM's order, so that of several errors, the simulator reports the same
//! one as vLLM. `hardware` and `memory` have their own files.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::compilation::{CompilationConfig, pooling};
use super::flags::{allowed, at_least};
use super::hardware::{defaults, laid_out, model_of};
use super::{MAX_RANKS, SimConfig};
use crate::engine::Policy;
use crate::machine::Profile;
use crate::process::model_folder::check_adapter;
use crate::process::refusal::{Refusal, Stage};
use sluice_core::vllm::args::ServeArgs;

impl SimConfig {
    /// The settings for these flags on the GPU of `profile`. If the model is a folder, its sizes
    /// are read from the folder; otherwise they come from `profile`.
    pub fn from_args(args: &ServeArgs, profile: Profile) -> Result<Self, Refusal> {
        Self::with_occupied(args, profile, 0.0)
    }

    /// As [`SimConfig::from_args`], on a GPU on which other processes occupy `occupied` bytes.
    pub fn with_occupied(args: &ServeArgs, profile: Profile, occupied: f64) -> Result<Self, Refusal> {
        let compilation = CompilationConfig::read(args)?;
        let name = args.model().ok_or(Refusal::NoModel)?;
        let (texts, model) = model_of(name)?;
        let profile = laid_out(args, profile, model)?;
        let mut config = Self::new(name, profile);
        config.texts = Arc::new(texts);
        // A folder is served exactly as by vLLM. Other models have additional routes, for tests of
        // gateways.
        config.on_disk = Path::new(name).is_dir();
        config.embeddings = pooling(args) || !config.on_disk;
        let lora_env = std::env::var_os("VLLM_ALLOW_RUNTIME_LORA_UPDATING").is_some();
        config.runtime_lora = allowed("VLLM_ALLOW_RUNTIME_LORA_UPDATING") || !(lora_env || config.on_disk);
        config.dev_mode = allowed("VLLM_SERVER_DEV_MODE");
        if !args.texts("served-model-name").is_empty() {
            config.names = args.texts("served-model-name").to_vec();
        }
        config.read_frontend(args)?;
        config.read_adapters(args)?;
        let wanted = config.length(args)?;
        config.read_scheduler(args, wanted)?;
        config.read_speculation(args)?;
        config.read_graphs(args, &compilation)?;
        config.read_memory(args, wanted, occupied)?;
        Ok(config)
    }

    /// Valid settings close to flags that vLLM refuses, from which the log lines before the failure
    /// are made.
    pub fn sketch(args: &ServeArgs, profile: Profile) -> Self {
        let name = args.model().unwrap_or_default();
        let profile = laid_out(args, profile.clone(), None).unwrap_or(profile);
        let mut config = Self::new(name, profile);
        let most = config.profile.shape.max_model_len;
        config.max_model_len = match args.int("max-model-len") {
            Some(asked) if asked > 0 => u32::try_from(asked).unwrap_or(u32::MAX),
            _ => most,
        };
        // A group that cannot be read keeps its defaults.
        let _ = config.read_frontend(args);
        let _ = config.read_scheduler(args, Some(config.max_model_len));
        let _ = config.read_speculation(args);
        config.lora = args.switch("enable-lora").unwrap_or(false);
        let _ = config.read_graphs(args, &CompilationConfig::read(args).unwrap_or_default());
        config
    }

    fn read_frontend(&mut self, args: &ServeArgs) -> Result<(), Refusal> {
        let on = |flag| args.switch(flag).unwrap_or(false);
        let optional = |flag| args.int(flag).and_then(|value| u64::try_from(value).ok());
        self.max_queued_requests = optional("max-num-queued-reqs");
        self.max_queued_tokens = optional("max-num-queued-tokens");
        self.api_keys = args.texts("api-key").to_vec();
        if self.api_keys.is_empty() {
            self.api_keys.extend(std::env::var("VLLM_API_KEY").ok().filter(|key| !key.is_empty()));
        }
        self.log_stats = !on("disable-log-stats");
        if let Some(seconds) =
            std::env::var("VLLM_HTTP_TIMEOUT_KEEP_ALIVE").ok().and_then(|text| text.trim().parse().ok())
        {
            self.http_keep_alive = Duration::from_secs(seconds);
        }
        self.max_logprobs = args.int("max-logprobs").unwrap_or(self.max_logprobs);
        self.auto_tools = on("enable-auto-tool-choice");
        if self.auto_tools && args.text("tool-call-parser").is_none() {
            let text = "Error: --enable-auto-tool-choice requires --tool-call-parser".to_owned();
            return Err(Refusal::Other { kind: "TypeError", text, stage: Stage::Settings });
        }
        self.stream_interval = at_least(args, "SchedulerConfig", "stream_interval", 1, 1)?;
        self.data_parallel = at_least(args, "ParallelConfig", "data_parallel_size", 1, 1)?;
        if self.data_parallel > MAX_RANKS {
            let text = format!("the simulator runs at most {MAX_RANKS} data-parallel ranks in one process");
            return Err(Refusal::Other { kind: "ValueError", text, stage: Stage::Settings });
        }
        let servers = args.int("api-server-count").and_then(|count| u32::try_from(count).ok());
        self.api_servers = servers.unwrap_or(self.data_parallel).max(1);
        self.request_metrics = on("enable-per-request-metrics");
        self.kv_events = kv_events_port(args)?;
        let seconds = args.int("sse-keep-alive-interval").unwrap_or(0);
        self.keep_alive = u64::try_from(seconds).ok().filter(|every| *every > 0).map(Duration::from_secs);
        self.track_load = on("enable-server-load-tracking");
        self.request_id_headers = on("enable-request-id-headers");
        self.force_usage = on("enable-force-include-usage");
        self.prompt_details = on("enable-prompt-tokens-details");
        self.scale_out = on("enable-scale-out");
        self.profiler = args.text("profiler-config").is_some();
        self.show_hidden = args.text("show-hidden-metrics-for-version").is_some();
        let timeout = at_least(args, "VllmConfig", "shutdown_timeout", 0, 0)?;
        self.shutdown_timeout = Duration::from_secs(u64::from(timeout));
        Ok(())
    }

    fn read_adapters(&mut self, args: &ServeArgs) -> Result<(), Refusal> {
        self.lora = args.switch("enable-lora").unwrap_or(false);
        let most = at_least(args, "LoRAConfig", "max_loras", 1, 1)?;
        let host = match args.int("max-cpu-loras") {
            Some(_) => at_least(args, "LoRAConfig", "max_cpu_loras", 1, most)?,
            None => most,
        };
        if self.lora && host < most {
            let text = format!("max_cpu_loras ({host}) must be >= max_loras ({most}).");
            return Err(Refusal::Together { class: "LoRAConfig", text });
        }
        (self.engine.max_loras, self.engine.max_cpu_loras) = if self.lora { (most, host) } else { (0, 0) };
        self.adapters = args.adapters();
        let stage = Stage::Adapters;
        if !self.adapters.is_empty() && !self.lora {
            let text = "LoRA is not enabled. Use --enable-lora to enable LoRA.";
            let text = format!(
                "Call to add_lora method failed: Worker failed with error '{text}', please check the stack trace above for \
                 the root cause"
            );
            return Err(Refusal::Other { kind: "ValueError", text, stage });
        }
        let rank = args.int("max-lora-rank").unwrap_or(16);
        self.max_lora_rank = rank;
        for (name, path) in self.adapters.iter().filter(|_| self.on_disk) {
            check_adapter(name, path, rank).map_err(|text| Refusal::Other { kind: "ValueError", text, stage })?;
        }
        Ok(())
    }

    /// The configured context length; `None` means the longest that fits the memory.
    fn length(&self, args: &ServeArgs) -> Result<Option<u32>, Refusal> {
        let most = self.profile.shape.max_model_len;
        match args.int("max-model-len") {
            Some(-1) => Ok(None),
            Some(asked) if asked > i64::from(most) && !allowed("VLLM_ALLOW_LONG_MAX_MODEL_LEN") => {
                let text = format!(
                    "User-specified max_model_len ({asked}) is greater than the derived max_model_len \
                     (max_position_embeddings={most}.0 or model_max_length=None in model's config.json). To allow \
                     overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. \
                     VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution. If the model uses relative position \
                     encoding (RoPE), positions exceeding derived_max_model_len lead to nan. If the model uses absolute \
                     position encoding, positions exceeding derived_max_model_len will cause a CUDA array out-of-bounds \
                     error."
                );
                Err(Refusal::Together { class: "ModelConfig", text })
            }
            Some(_) => Ok(Some(at_least(args, "ModelConfig", "max_model_len", 1, most)?)),
            None => Ok(Some(most)),
        }
    }

    fn read_scheduler(&mut self, args: &ServeArgs, wanted: Option<u32>) -> Result<(), Refusal> {
        const CLASS: &str = "SchedulerConfig";
        let (seqs, budget) = defaults(&self.profile, args.text("performance-mode"));
        let engine = &mut self.engine;
        // Defaults adapt to the given flags: no more sequences than tokens in a step, no more
        // tokens than all sequences together can have.
        let length = wanted.unwrap_or(self.profile.shape.max_model_len);
        let chosen = args.int("max-num-batched-tokens").and_then(|tokens| u32::try_from(tokens).ok());
        let seqs = seqs.min(chosen.unwrap_or(u32::MAX).max(1));
        engine.max_num_seqs = at_least(args, CLASS, "max_num_seqs", 1, seqs)?;
        engine.chunked_prefill = args.switch("enable-chunked-prefill").unwrap_or(true);
        let budget = if engine.chunked_prefill { budget } else { budget.max(length) };
        let budget = budget.min(engine.max_num_seqs.saturating_mul(length)).max(engine.max_num_seqs);
        engine.max_num_batched_tokens = at_least(args, CLASS, "max_num_batched_tokens", 1, budget)?;
        let (tokens, seqs) = (engine.max_num_batched_tokens, engine.max_num_seqs);
        let together = |text: String| Err(Refusal::Together { class: CLASS, text });
        if !engine.chunked_prefill && tokens < length {
            return together(format!(
                "max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}). This effectively limits the \
                 maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please increase \
                 max_num_batched_tokens or decrease max_model_len."
            ));
        }
        if tokens < seqs {
            return together(format!(
                "max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs})."
            ));
        }
        engine.max_num_active_seqs = match args.int("max-num-active-seqs") {
            Some(_) => Some(at_least(args, CLASS, "max_num_active_seqs", 1, seqs)?),
            None => None,
        };
        engine.long_prefill_token_threshold = at_least(args, CLASS, "long_prefill_token_threshold", 0, 0)?;
        if engine.long_prefill_token_threshold > length {
            let threshold = engine.long_prefill_token_threshold;
            return together(format!(
                "long_prefill_token_threshold ({threshold}) cannot be greater than the max_model_len ({length})."
            ));
        }
        engine.long_prefill_token_threshold_adaptive =
            args.switch("long-prefill-token-threshold-adaptive").unwrap_or(false);
        engine.prefill_schedule_interval = at_least(args, CLASS, "prefill_schedule_interval", 1, 1)?;
        engine.scheduler_reserve_full_isl = args.switch("scheduler-reserve-full-isl").unwrap_or(true);
        engine.prefix_caching = args.switch("enable-prefix-caching").unwrap_or(true);
        engine.policy =
            if args.text("scheduling-policy") == Some("priority") { Policy::Priority } else { Policy::Fcfs };
        engine.async_scheduling = args.switch("async-scheduling").unwrap_or(true);
        engine.watermark = args.float("watermark").unwrap_or(0.0);
        if !(0.0..1.0).contains(&engine.watermark) {
            let (bound, kind) = match engine.watermark >= 1.0 {
                true => ("less than 1", "less_than"),
                false => ("greater than or equal to 0", "greater_than_equal"),
            };
            let value = format!("{:?}", engine.watermark);
            let (bound, value_type) = (bound.to_owned(), "float");
            return Err(Refusal::Bound { class: CLASS, field: "watermark", bound, kind, value, value_type });
        }
        Ok(())
    }
}

/// The port of `--kv-events-config`; `None`: no events are published.
fn kv_events_port(args: &ServeArgs) -> Result<Option<u16>, Refusal> {
    #[derive(serde::Deserialize)]
    #[serde(default)]
    struct KvEvents {
        enable_kv_cache_events: bool,
        publisher: Option<String>,
        endpoint: String,
    }
    impl Default for KvEvents {
        fn default() -> Self {
            Self { enable_kv_cache_events: false, publisher: None, endpoint: "tcp://*:5557".to_owned() }
        }
    }
    let Some(text) = args.text("kv-events-config") else { return Ok(None) };
    let refused = |text: String| Refusal::Other { kind: "ValueError", text, stage: Stage::Settings };
    let config: KvEvents =
        serde_json::from_str(text).map_err(|error| refused(format!("--kv-events-config: {error}")))?;
    if !config.enable_kv_cache_events || config.publisher.is_some_and(|publisher| publisher != "zmq") {
        return Ok(None);
    }
    let port = config.endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')?.1.parse().ok());
    port.map(Some)
        .ok_or_else(|| refused(format!("the simulator publishes KV events on tcp only, not on {}", config.endpoint)))
}
