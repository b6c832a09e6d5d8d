//! vLLM, the kind of engine for which the gateway was made.
//!
//! The facts about flags, logs and metrics are in [`vllm`](crate::vllm); this file has the constant
//! that every kind has. vLLM's API server answers `/health` without asking the engine core, so only
//! the counters show whether the engine works. vLLM-Omni has routes for speech, images and videos,
//! so its kind is `openai`.

use std::time::Duration;

use super::rules::{BATCH_SLOTS, EngineRules, Health, IdentityPage, MetricsPage};
use crate::vllm::failure;
use crate::vllm::metrics::MetricsSnapshot;

pub(super) const RULES: EngineRules = EngineRules {
    health: "/health",
    health_takes: Duration::ZERO,
    answers_while_busy: true,
    judge: |status, _| Health::of_status(status),
    lists_models: true,
    owners: &["vllm", "vllm-frontend-rs"],
    identity: Some(IdentityPage { path: "/metrics", is_own: has_own_metrics }),
    describes_routes: true,
    version: Some("/version"),
    metrics: Some(MetricsPage { port: None, read: MetricsSnapshot::parse, shows_steps: true, counts_tokens: true }),
    slots_page: None,
    slots: BATCH_SLOTS,
    serves: |route| !route.is_job(),
    limits_each_model: false,
    does_jobs: false,
    aborts: true,
    continues: true,
    flags: None,
    log: &failure::LOG,
};

fn has_own_metrics(body: &[u8]) -> bool {
    std::str::from_utf8(body).is_ok_and(|page| MetricsSnapshot::parse(page).samples > 0)
}
