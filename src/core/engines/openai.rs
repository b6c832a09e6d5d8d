//! Any server with the API of OpenAI: `trtllm-serve`, vLLM-Omni, a proxy, a service.
//!
//! The gateway asks only for `/health`, `/v1/models` and `/openapi.json`. There are no counters
//! that could show a hang, and only the pool's configuration limits the requests at once. The
//! gateway passes on every route of the API. If the server lacks a route, the client gets the
//! server's refusal.

use std::time::Duration;

use super::flag_table::NO_FLAGS;
use super::rules::{BATCH_SLOTS, EngineRules, Health, PLAIN_LOG};

pub(super) const RULES: EngineRules = EngineRules {
    health: "/health",
    health_takes: Duration::ZERO,
    answers_while_busy: true,
    judge: |status, _| Health::of_status(status),
    lists_models: true,
    owners: &[],
    identity: None,
    describes_routes: true,
    version: None,
    metrics: None,
    slots_page: None,
    slots: BATCH_SLOTS,
    serves: |route| !route.is_opaque(),
    limits_each_model: false,
    does_jobs: false,
    aborts: true,
    continues: false,
    flags: Some(&NO_FLAGS),
    log: &PLAIN_LOG,
};
