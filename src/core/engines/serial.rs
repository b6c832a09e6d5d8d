//! A process that does one job at a time: speech, images, a Flask or FastAPI program.
//!
//! A second job would wait inside the process, unordered, so a backend gets one job, and other jobs
//! wait in the pool's queue. A process with one thread answers nothing while it works, so the
//! gateway does not probe it then. Configure several processes as several backends. Such a server
//! may have no health page: any answer below 500 shows that it accepts requests. It has no
//! counters, so only the `deadline` of the pool shows that it hangs. The process does not notice
//! that a client has left, so the slot stays in use until the process answers.

use std::time::Duration;

use super::flag_table::NO_FLAGS;
use super::rules::{EngineRules, Health, PLAIN_LOG};
use crate::openai::Route;

pub(super) const RULES: EngineRules = EngineRules {
    health: "/health",
    health_takes: Duration::ZERO,
    answers_while_busy: false,
    judge: |status, _| if status < 500 { Health::Up } else { Health::Down },
    lists_models: false,
    owners: &[],
    identity: None,
    describes_routes: false,
    version: None,
    metrics: None,
    slots_page: None,
    slots: 1,
    serves: |route| {
        route.makes_media()
            || matches!(route, Route::Transcriptions | Route::Translations | Route::Custom | Route::Realtime)
    },
    limits_each_model: false,
    does_jobs: true,
    aborts: false,
    continues: false,
    flags: Some(&NO_FLAGS),
    log: &PLAIN_LOG,
};
