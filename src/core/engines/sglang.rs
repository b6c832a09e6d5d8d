//! SGLang 0.5.
//!
//! `/health_generate` generates a token, or waits up to 20 s for a token of a running request. It
//! responds with 503 while the engine starts, stops or hangs. SGLang looks for the token once a
//! second, so every answer takes a second or more. Metrics exist with `--enable-metrics`. The token
//! counts move at the end of a request, except `realtime_tokens_total`, which moves every 40 steps.
//! That counter shows that the engine works, but cannot be compared with the tokens that streams
//! received. `/v1/loads` has one entry per data-parallel rank; the engine's limit is the sum over
//! the entries.
//!
//! If the queue is full (`--max-queued-requests`), SGLang responds with 503 and the text "The
//! request queue is full.", and another engine gets the request.

use std::time::Duration;

use serde::Deserialize;

use super::flag_table::{FlagForm, FlagTable};
use super::rules::{BATCH_SLOTS, EngineRules, Health, IdentityPage, MetricsPage, SlotsPage, has_members, translated};
use crate::openai::Route;
use crate::vllm::failure::{FailureClass, LogRules};
use crate::vllm::logs::{LogForm, StartPhase};
use crate::vllm::metrics::KV_TOKENS;

pub(super) const RULES: EngineRules = EngineRules {
    health: "/health_generate",
    health_takes: Duration::from_secs(5),
    answers_while_busy: true,
    judge: |status, _| if status == 503 { Health::Loading } else { Health::of_status(status) },
    lists_models: true,
    owners: &["sglang"],
    identity: Some(IdentityPage {
        path: "/get_model_info",
        is_own: |body| has_members(body, &["model_path", "is_generation"]),
    }),
    describes_routes: true,
    version: None,
    metrics: Some(MetricsPage {
        port: None,
        read: |page| translated(page, "sglang:", NAMES),
        shows_steps: true,
        counts_tokens: false,
    }),
    slots_page: Some(SlotsPage {
        path: "/v1/loads?include=core",
        read: |body| sum(body, |load| load.max_running_requests),
        tokens: |body| sum(body, |load| load.max_total_num_tokens),
    }),
    slots: BATCH_SLOTS,
    serves: |route| !route.is_job() && !matches!(route, Route::CohereChat | Route::CohereEmbed),
    limits_each_model: false,
    does_jobs: false,
    aborts: true,
    continues: false,
    flags: Some(&FLAGS),
    log: &LOG,
};

const NAMES: &[(&str, &str)] = &[
    ("num_running_reqs", "num_requests_running"),
    ("num_queue_reqs", "num_requests_waiting"),
    ("token_usage", "kv_cache_usage_perc"),
    ("max_total_num_tokens", KV_TOKENS),
    ("realtime_tokens_total", "iteration_tokens_total_count"),
    ("prompt_tokens_total", "prompt_tokens_total"),
    ("generation_tokens_total", "generation_tokens_total"),
    ("num_retracted_requests_total", "num_preemptions_total"),
    ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
    ("time_to_first_token_seconds_sum", "time_to_first_token_seconds_sum"),
    ("inter_token_latency_seconds_count", "inter_token_latency_seconds_count"),
    ("inter_token_latency_seconds_sum", "inter_token_latency_seconds_sum"),
];

#[derive(Deserialize)]
struct Loads {
    loads: Vec<Load>,
}

#[derive(Deserialize)]
struct Load {
    #[serde(default)]
    max_running_requests: u64,
    #[serde(default)]
    max_total_num_tokens: u64,
}

/// The sum of a value over all ranks; `None` if it is 0.
fn sum<N: TryFrom<u64>>(body: &[u8], value: fn(&Load) -> u64) -> Option<N> {
    let Loads { loads } = serde_json::from_slice(body).ok()?;
    let sum = loads.iter().fold(0u64, |sum, load| sum.saturating_add(value(load)));
    N::try_from(sum).ok().filter(|_| sum > 0)
}

const FLAGS: FlagTable = FlagTable {
    engine: "SGLang",
    list: include_str!("sglang_flags.txt"),
    form: FlagForm::Joined,
    program: None,
    package: Some("sglang"),
    address: ("host", "port"),
    tls: &["ssl-keyfile", "ssl-certfile"],
    model: &["model-path"],
    sequences: Some("max-running-requests"),
    devices: &["tp-size", "pp-size"],
    tuned: &[
        ("max-num-seqs", "max-running-requests"),
        ("max-num-batched-tokens", "chunked-prefill-size"),
        ("gpu-memory-utilization", "mem-fraction-static"),
    ],
};

const LOG: LogRules = LogRules {
    form: LogForm {
        // "[2026-11-30 09:17:33 TP0] ", or "[2026-11-30 09:17:33] ". Lines have no level.
        message: |line| match line.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
            Some((time, rest)) if time.len() <= 40 && time.as_bytes().first().is_some_and(u8::is_ascii_digit) => rest,
            _ => line.trim_end(),
        },
        is_remark: |line| ["INFO:", "WARNING:"].iter().any(|level| line.starts_with(level)),
        phases: &[
            ("server_args=", StartPhase::Configuring),
            ("Init torch distributed", StartPhase::EngineStarting),
            ("Load weight begin", StartPhase::LoadingWeights),
            ("Loading safetensors checkpoint shards", StartPhase::LoadingWeights),
            ("Load weight end", StartPhase::SizingKvCache),
            ("KV Cache is allocated", StartPhase::SizingKvCache),
            ("Memory pool end", StartPhase::SizingKvCache),
            ("CUDA graph begin", StartPhase::CapturingGraphs),
            ("Capture cuda graph begin", StartPhase::CapturingGraphs),
            ("CUDA graph end", StartPhase::OpeningHttp),
            ("Capture cuda graph end", StartPhase::OpeningHttp),
            ("max_total_num_tokens=", StartPhase::OpeningHttp),
            ("Uvicorn running on", StartPhase::OpeningHttp),
            ("The server is fired up", StartPhase::Serving),
        ],
    },
    failures: &[
        ("Not enough memory. Please try to increase --mem-fraction-static", FailureClass::NoKvMemory),
        ("Not enough space for mamba", FailureClass::NoKvMemory),
        (" is used by a process already", FailureClass::PortInUse),
        ("is not available in ", FailureClass::PortInUse),
        ("cuda graph failed", FailureClass::OutOfMemoryGraphs),
        ("CUDA graph failed", FailureClass::OutOfMemoryGraphs),
        ("No module named 'sglang", FailureClass::ProgramMissing),
        ("watchdog timeout", FailureClass::Timeout),
    ],
    healthy: &["HTTP/1.1\" 200", "Prefill batch", "Decode batch", "fired up and ready"],
    shutdown: &["Gracefully exiting", "INFO:     Shutting down"],
    crashes: &["Received sigquit from a child process", "SIGQUIT received", "Scheduler hit an exception"],
    advice: &[
        (FailureClass::NoKvMemory, "raise mem-fraction-static, or use more devices (tp-size)"),
        (FailureClass::OutOfMemoryLoading, "use more devices (tp-size), quantization, or a device with more memory"),
        (FailureClass::OutOfMemoryWarmUp, LESS_MEMORY),
        (FailureClass::OutOfMemoryGraphs, "lower mem-fraction-static or cuda-graph-max-bs-decode"),
        (FailureClass::OutOfMemoryServing, LESS_MEMORY),
        (FailureClass::OutOfMemory, LESS_MEMORY),
        (FailureClass::UnknownFlag, "remove the flag; this version of SGLang does not have it (see its --help)"),
        (FailureClass::LoraRank, "raise max-lora-rank to the adapter's rank, or do not load the adapter"),
    ],
};
const LESS_MEMORY: &str = "lower mem-fraction-static, chunked-prefill-size or max-running-requests";
