//! llama.cpp's `llama-server`.
//!
//! The server listens while it loads the model: `/health` then responds with 503 and the text
//! "Loading model". It runs as many sequences as it has slots (`--parallel`) and keeps other
//! requests inside, so the gateway sends no more than `total_slots` of `/props`. Metrics exist with
//! `--metrics`; tokens are counted when a sequence ends, and `n_decode_total` at every step.

use serde::Deserialize;

use super::rules::{BATCH_SLOTS, EngineRules, Health, MetricsPage, SlotsPage, translated};
use crate::openai::Route;

pub(super) const RULES: EngineRules = EngineRules {
    health: "/health",
    judge: |status, body| match status {
        503 if memchr::memmem::find(body, b"Loading model").is_some() => Health::Loading,
        _ => Health::of_status(status),
    },
    lists_models: true,
    owner: Some("llamacpp"),
    describes_routes: false,
    version: None,
    metrics: Some(MetricsPage {
        port: None,
        read: |page| translated(page, "llamacpp:", NAMES),
        shows_steps: true,
        counts_tokens: false,
    }),
    slots_page: Some(SlotsPage { path: "/props", read: total_slots }),
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
    does_jobs: false,
    continues: false,
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
