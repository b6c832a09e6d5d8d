//! Any server with the API of OpenAI: `trtllm-serve`, vLLM-Omni, a proxy, a service.
//!
//! Only `/health` and `/v1/models` are asked. Such a server never counts as hung by counters, and
//! only the pool limits it. Every route of the API is passed on; a route that the server
//! lacks is learned from the refusal.

use super::rules::{BATCH_SLOTS, EngineRules, Health};

pub(super) const RULES: EngineRules = EngineRules {
    health: "/health",
    judge: |status, _| Health::of_status(status),
    lists_models: true,
    owner: None,
    describes_routes: true,
    version: None,
    metrics: None,
    slots_page: None,
    slots: BATCH_SLOTS,
    serves: |route| !route.is_opaque(),
    does_jobs: false,
    continues: false,
};
