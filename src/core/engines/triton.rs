//! NVIDIA Triton with the HTTP protocol of KServe (v2).
//!
//! The path of a request names the model, and a stream of `generate_stream` ends with its body. The
//! metrics have a port of their own (8002). A batch may run for minutes without a change of a
//! counter, so counters never show that Triton hangs; the `deadline` of a pool does. Models are
//! loaded by the operator, and the gateway does not ask for them.

use super::rules::{BATCH_SLOTS, EngineRules, Health, MetricsPage, translated};
use crate::openai::Route;

pub(super) const RULES: EngineRules = EngineRules {
    health: "/v2/health/ready",
    judge: |status, _| Health::of_status(status),
    lists_models: false,
    owner: None,
    describes_routes: false,
    version: None,
    metrics: Some(MetricsPage {
        port: Some(8002),
        read: |page| translated(page, "nv_", NAMES),
        shows_steps: false,
        counts_tokens: false,
    }),
    slots_page: None,
    slots: BATCH_SLOTS,
    serves: Route::is_kserve,
    does_jobs: true,
    continues: false,
};

const NAMES: &[(&str, &str)] = &[
    ("inference_pending_request_count", "num_requests_waiting"),
    ("inference_exec_count", "iteration_tokens_total_count"),
    ("inference_request_success", "request_success_total"),
];
