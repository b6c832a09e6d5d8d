//! SGLang 0.5.
//!
//! `/health_generate` generates a token, or waits for one of a running request, at most 20 s; it
//! responds with 503 while the engine starts or stops, or hangs. Metrics exist with
//! `--enable-metrics`. Their token counts move at the end of a request, except
//! `realtime_tokens_total`, which moves every 40 steps: enough to see that the engine works, and
//! not enough to compare with the tokens that streams received. `/v1/loads` has one entry per
//! data-parallel rank; the ranks together run the sum.
//!
//! A full queue (`--max-queued-requests`) is a 503 with the text "The request queue is full.", so
//! another engine gets the request.

use serde::Deserialize;

use super::rules::{BATCH_SLOTS, EngineRules, Health, MetricsPage, SlotsPage, translated};
use crate::openai::Route;
use crate::vllm::metrics::KV_TOKENS;

pub(super) const RULES: EngineRules = EngineRules {
    health: "/health_generate",
    judge: |status, _| if status == 503 { Health::Loading } else { Health::of_status(status) },
    lists_models: true,
    owner: Some("sglang"),
    describes_routes: true,
    version: None,
    metrics: Some(MetricsPage {
        port: None,
        read: |page| translated(page, "sglang:", NAMES),
        shows_steps: true,
        counts_tokens: false,
    }),
    slots_page: Some(SlotsPage { path: "/v1/loads?include=core", read: max_running }),
    slots: BATCH_SLOTS,
    serves: |route| !route.is_job() && !matches!(route, Route::CohereChat | Route::CohereEmbed),
    does_jobs: false,
    continues: false,
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

fn max_running(body: &[u8]) -> Option<u32> {
    #[derive(Deserialize)]
    struct Loads {
        loads: Vec<Load>,
    }
    #[derive(Deserialize)]
    struct Load {
        #[serde(default)]
        max_running_requests: u32,
    }
    let Loads { loads } = serde_json::from_slice(body).ok()?;
    let sum = loads.iter().fold(0u32, |sum, load| sum.saturating_add(load.max_running_requests));
    (sum > 0).then_some(sum)
}
