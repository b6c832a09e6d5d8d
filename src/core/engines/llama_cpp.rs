//! llama.cpp's `llama-server`.
//!
//! The server listens while it loads the model: `/health` then responds with 503 and the text
//! "Loading model". It runs as many sequences as it has slots (`--parallel`) and queues other
//! requests inside, so the gateway sends at most as many requests at once as `total_slots` on
//! `/props` says. Metrics exist only with `--metrics`. The token counters move when a sequence
//! ends, but `n_decode_total` moves at every step.

use std::time::Duration;

use serde::Deserialize;

use super::flag_table::{FlagForm, FlagTable};
use super::rules::{BATCH_SLOTS, EngineRules, Health, IdentityPage, MetricsPage, SlotsPage, has_members, translated};
use crate::openai::Route;
use crate::vllm::failure::{FailureClass, LogRules};
use crate::vllm::logs::{LogForm, StartPhase};

pub(super) const RULES: EngineRules = EngineRules {
    health: "/health",
    health_takes: Duration::ZERO,
    answers_while_busy: true,
    judge: |status, body| match status {
        503 if memchr::memmem::find(body, b"Loading model").is_some() => Health::Loading,
        _ => Health::of_status(status),
    },
    lists_models: true,
    owners: &["llamacpp"],
    identity: Some(IdentityPage {
        path: "/props",
        is_own: |body| has_members(body, &["default_generation_settings", "total_slots"]),
    }),
    describes_routes: false,
    version: None,
    metrics: Some(MetricsPage {
        port: None,
        read: |page| translated(page, "llamacpp:", NAMES),
        shows_steps: true,
        counts_tokens: false,
    }),
    slots_page: Some(SlotsPage { path: "/props", read: total_slots, tokens: |_| None }),
    slots: BATCH_SLOTS,
    serves: |route| {
        matches!(
            route,
            Route::ChatCompletions
                | Route::Completions
                | Route::Embeddings
                | Route::Responses
                | Route::Messages
                | Route::CountTokens
                | Route::Rerank
                | Route::Tokenize
                | Route::Detokenize
                | Route::Transcriptions
        )
    },
    limits_each_model: false,
    does_jobs: false,
    aborts: true,
    continues: false,
    flags: Some(&FLAGS),
    log: &LOG,
};

const NAMES: &[(&str, &str)] = &[
    ("requests_processing", "num_requests_running"),
    ("requests_deferred", "num_requests_waiting"),
    ("kv_cache_usage_ratio", "kv_cache_usage_perc"),
    ("prompt_tokens_total", "prompt_tokens_total"),
    ("tokens_predicted_total", "generation_tokens_total"),
    ("n_decode_total", "iteration_tokens_total_count"),
];

fn total_slots(body: &[u8]) -> Option<u32> {
    #[derive(Deserialize)]
    struct Props {
        total_slots: u32,
    }
    serde_json::from_slice::<Props>(body).ok().map(|props| props.total_slots).filter(|slots| *slots > 0)
}

const FLAGS: FlagTable = FlagTable {
    engine: "llama.cpp",
    list: include_str!("llama_cpp_flags.txt"),
    form: FlagForm::Apart,
    program: Some("llama-server"),
    package: None,
    address: ("host", "port"),
    tls: &["ssl-key-file", "ssl-cert-file"],
    model: &["model"],
    sequences: Some("parallel"),
    devices: &[],
    tuned: &[("max-num-seqs", "parallel"), ("max-num-batched-tokens", "batch-size")],
};

const LOG: LogRules = LogRules {
    form: LogForm {
        // "0.00.014.973 I srv    load_model: ": time, level, component. Older versions log none of
        // the three.
        message: |line| match level(line) {
            Some((_, rest)) => rest,
            None => line.trim_end(),
        },
        is_remark: |line| level(line).is_some_and(|(level, _)| matches!(level, "I" | "W" | "D" | "T")),
        phases: &[
            ("loading model '", StartPhase::LoadingWeights),
            ("initializing, n_slots", StartPhase::SizingKvCache),
            ("initializing slots", StartPhase::SizingKvCache),
            ("model loaded", StartPhase::OpeningHttp),
            ("listening on http", StartPhase::Serving),
        ],
    },
    failures: &[
        ("error: invalid argument:", FailureClass::UnknownFlag),
        ("error while handling argument", FailureClass::BadArguments),
        ("couldn't bind HTTP server socket", FailureClass::PortInUse),
        ("(No such file or directory)", FailureClass::ModelNotFound),
        ("invalid magic characters", FailureClass::ModelNotFound),
        ("failed to allocate", FailureClass::OutOfMemory),
        ("ErrorOutOfDeviceMemory", FailureClass::OutOfMemory),
        ("cudaMalloc failed", FailureClass::OutOfMemory),
        ("CUDA driver version is insufficient", FailureClass::DeviceError),
        ("no CUDA-capable device", FailureClass::DeviceError),
        ("failed to initialize CUDA", FailureClass::DeviceError),
        ("failed to load model", FailureClass::ModelNotFound),
    ],
    healthy: &["print_timing: ", "log_server_r: request:", "all slots are idle"],
    shutdown: &["cleaning up before exit"],
    crashes: &["GGML_ASSERT(", "ggml_abort", "terminate called after throwing"],
    advice: &[
        (FailureClass::OutOfMemoryLoading, LESS_MEMORY),
        (FailureClass::OutOfMemoryWarmUp, LESS_MEMORY),
        (FailureClass::OutOfMemoryGraphs, LESS_MEMORY),
        (FailureClass::OutOfMemoryServing, LESS_MEMORY),
        (FailureClass::OutOfMemory, LESS_MEMORY),
        (FailureClass::UnknownFlag, "remove the flag; this llama-server does not have it (see its --help)"),
        (
            FailureClass::ModelNotFound,
            "correct args.model: a GGUF file that this user may read, or hf-repo in its place",
        ),
    ],
};
const LESS_MEMORY: &str = "lower ctx-size, parallel or gpu-layers, or use a model with fewer bits";

/// The level and the message of a line that has both.
fn level(line: &str) -> Option<(&str, &str)> {
    let (time, rest) = line.trim_end().split_once(' ')?;
    let (level, rest) = rest.split_once(' ')?;
    let is_time = time.len() > 8 && time.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    (is_time && level.len() == 1).then_some((level, rest))
}
