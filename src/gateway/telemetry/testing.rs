//! Records and pools for tests of telemetry and of the code that shows telemetry.
//!
//! The small fixture has two pools, "short" and "long", with one backend each. The large one has
//! the size of a big deployment, for benchmarks of the page.

#![allow(missing_docs, unreachable_pub, reason = "used by tests alone")]

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::estimate::{EstimateSource, PromptEstimate};
use crate::flow::{Outcome, Record};
use crate::pool::{Admission, BackendLimits, BackendSpec, HealthRules, LongPrefix, PoolRules, PoolSpec, QueueOrder};
use sluice_config::{Address, Endpoint, Policy};
use sluice_core::meter::{ItlHistogram, StreamStats};
use sluice_core::openai::Route;
use sluice_core::openai::response::TokenUsage;

/// A request at home in the short pool with this outcome and without measurements.
pub fn record(outcome: Outcome) -> Record {
    Record {
        upstream_id: "req-1".into(),
        request_id: "req-1".into(),
        trace: None,
        route: Some(Route::ChatCompletions),
        path: None,
        key: Some("team-a".into()),
        model: Some("llama".into()),
        refused_model: None,
        home: Some("short".into()),
        class: Some("short".into()),
        pool: None,
        backend: None,
        arm: None,
        assigned: None,
        copy: None,
        stream: true,
        estimate: Some(PromptEstimate { tokens: 110, spread: 0.1, source: EstimateSource::Learned }),
        status: Some(StatusCode::OK),
        outcome,
        refused: None,
        client: None,
        origin: crate::origin::Origin::default(),
        retries: SmallVec::new(),
        retried_on: SmallVec::new(),
        estimate_time: Duration::from_micros(40),
        queue_wait: Duration::from_millis(2),
        connect_time: Duration::from_micros(300),
        client_wait: Duration::ZERO,
        held_up: false,
        total: Duration::from_millis(800),
        stats: None,
        backend_ttft: None,
        expected_cached: 0,
        prefix: None,
        sequences: 1,
        has_objectives: false,
        slo_met: None,
    }
}

/// A completed stream of 100 prompt and 50 output tokens.
pub fn completed(ttft: Duration, tpot: Duration) -> Record {
    let mut itl = ItlHistogram::default();
    itl.record(tpot, 49);
    let stats = StreamStats {
        ttft: Some(ttft),
        tpot: Some(tpot),
        e2el: Some(ttft + 49 * tpot),
        itl,
        usage: TokenUsage { prompt: Some(100), completion: Some(50), cached: Some(64) },
        ..StreamStats::default()
    };
    Record {
        pool: Some("short".into()),
        backend: Some("gpu0".into()),
        stats: Some(stats),
        backend_ttft: Some(ttft),
        expected_cached: 48,
        slo_met: Some(true),
        ..record(Outcome::Completed)
    }
}

pub fn admission(now: Instant) -> Arc<Admission> {
    let rules = HealthRules {
        probe_failures: 1,
        request_failures: 3,
        eject_base: Duration::from_secs(1),
        eject_max: Duration::from_secs(30),
        max_ejected: 0.5,
    };
    let admission = Admission::new(now, rules, 1);
    let layout = admission.apply(&[spec("short", "gpu0", 8000), spec("long", "gpu1", 8001)], rules, now);
    admission.record_probe(layout.backends[0][0], true, now);
    admission
}

pub fn spec(name: &str, backend: &str, port: u16) -> PoolSpec {
    let endpoint = Endpoint { https: false, host: "127.0.0.1".to_owned(), port, prefix: String::new() };
    let address = Arc::new(Address::new(endpoint, None, None));
    PoolSpec {
        name: name.into(),
        rules: PoolRules {
            policy: Policy::LeastWork,
            limits: BackendLimits {
                slots: 64,
                tokens: Some(400_000),
                prefill_tokens: None,
                long_prefix: Some(LongPrefix { threshold: 5_000, slots: 1 }),
            },
            queue_length: 512,
            queue_timeout: Duration::from_secs(20),
            hold: None,
            order: QueueOrder { aging_per_token: Duration::ZERO },
            by_priority: None,
        },
        backends: vec![BackendSpec { name: backend.into(), address, weight: 1.0 }],
        spill: vec![],
    }
}

/// A large deployment of 200 backends and 50 models: pairs of a pool for short and a pool for long
/// prompts. The constants are the number of pairs, of backends in each pool, and of models that
/// each pair serves.
pub const PAIRS: usize = 25;
pub const BACKENDS_OF_A_POOL: usize = 4;
pub const MODELS_OF_A_PAIR: usize = 2;

/// The pools of the large deployment.
pub fn large_admission(now: Instant) -> Arc<Admission> {
    let rules = HealthRules {
        probe_failures: 1,
        request_failures: 3,
        eject_base: Duration::from_secs(1),
        eject_max: Duration::from_secs(30),
        max_ejected: 0.5,
    };
    let pool = |name: String| {
        let mut pool = spec(&name, "gpu0", 8000);
        let first = pool.backends.remove(0);
        pool.backends.extend((0..BACKENDS_OF_A_POOL).map(|index| BackendSpec {
            name: format!("{name}-gpu{index}").into(),
            address: Arc::clone(&first.address),
            ..first
        }));
        pool
    };
    let pools: Vec<PoolSpec> =
        (0..PAIRS).flat_map(|pair| ["short", "long"].map(|kind| pool(format!("{kind}-{pair}")))).collect();
    let admission = Admission::new(now, rules, 1);
    admission.apply(&pools, rules, now);
    admission
}

/// A request of each kind in the large deployment: short, long, and long in the short pool, of
/// every model.
pub fn large_traffic() -> Vec<Record> {
    let of_model = |model: usize| {
        let pool = |kind: &str| -> Arc<str> { format!("{kind}-{}", model / MODELS_OF_A_PAIR).into() };
        let placed = |home: &str, ran: &str| Record {
            model: Some(format!("model-{model}").into()),
            home: Some(pool(home)),
            pool: Some(pool(ran)),
            backend: Some(format!("{}-gpu0", pool(ran)).into()),
            ..completed(Duration::from_millis(30), Duration::from_millis(6))
        };
        [placed("short", "short"), placed("long", "long"), placed("long", "short")]
    };
    (0..PAIRS * MODELS_OF_A_PAIR).flat_map(of_model).collect()
}
