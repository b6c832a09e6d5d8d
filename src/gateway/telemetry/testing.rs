//! Records and pools for tests of telemetry and of the code that shows telemetry.
//!
//! The small fixture has two pools, "short" and "long", with one backend each. The large ones have
//! the size of a big deployment: 200 backends and 50 models, in many pools or in few.

#![allow(missing_docs, unreachable_pub, reason = "used by tests alone")]

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::estimate::{EstimateSource, PromptEstimate};
use crate::flow::{Outcome, Record};
use crate::pool::{Admission, BackendLimits, BackendSpec, HealthRules, LongPrefix, PoolRules, PoolSpec, QueueOrder};
use sluice_config::{Address, Config, Endpoint, Machine, Policy, Surroundings};
use sluice_core::meter::{ItlHistogram, StreamStats};
use sluice_core::openai::Route;
use sluice_core::openai::response::TokenUsage;

/// A request whose home is the short pool, without measurements.
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
        continued: 0,
        prefilled_again: 0,
        not_continued: None,
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

const RULES: HealthRules = HealthRules {
    probe_failures: 1,
    request_failures: 3,
    eject_base: Duration::from_secs(1),
    eject_max: Duration::from_secs(30),
    max_ejected: 0.5,
};

pub fn admission(now: Instant) -> Arc<Admission> {
    let admission = Admission::new(now, RULES, 1);
    let layout = admission.apply(&[spec("short", "gpu0", 8000), spec("long", "gpu1", 8001)], RULES, now);
    admission.record_probe(layout.backends[0][0], true, now);
    admission.follow_events(layout.backends[0][0], &spec("short", "gpu0", 8000).backends[0].address).unwrap();
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

#[derive(Clone, Copy, Debug)]
pub struct Large {
    pub pairs: usize,
    pub backends_of_a_pool: usize,
    pub models_of_a_pair: usize,
}

pub const CLASSES: usize = 8;
pub const KEYS: usize = 100;

pub const MANY_POOLS: Large = Large { pairs: 25, backends_of_a_pool: 4, models_of_a_pair: 2 };
pub const FEW_POOLS: Large = Large { pairs: 1, backends_of_a_pool: 100, models_of_a_pair: 50 };

impl Large {
    fn pools(&self) -> impl Iterator<Item = (usize, String)> {
        (0..self.pairs).flat_map(|pair| ["short", "long"].map(|kind| (pair, format!("{kind}-{pair}"))))
    }

    fn backend(pool: &str, index: usize) -> Arc<str> {
        format!("{pool}-gpu{index}").into()
    }

    pub fn admission(&self, now: Instant) -> Arc<Admission> {
        let pool = |(_, name): (usize, String)| {
            let mut pool = spec(&name, "gpu0", 8000);
            let first = pool.backends.remove(0);
            pool.backends.extend((0..self.backends_of_a_pool).map(|index| BackendSpec {
                name: Self::backend(&name, index),
                address: Arc::clone(&first.address),
                ..first
            }));
            pool
        };
        let pools: Vec<PoolSpec> = self.pools().map(pool).collect();
        let admission = Admission::new(now, RULES, 1);
        admission.apply(&pools, RULES, now);
        admission
    }

    pub fn config(&self) -> Config {
        let mut text = "[slo]\nttft = \"1s\"\n".to_owned();
        for model in 0..self.pairs * self.models_of_a_pair {
            text += &format!("[[model]]\nname = \"model-{model}\"\n");
        }
        for class in 0..CLASSES {
            text += &format!("[[class]]\nname = \"class-{class}\"\nprompt_tokens = {{ min = {} }}\n", 1_000 * class);
        }
        for key in 0..KEYS {
            text += &format!("[[auth.keys]]\nname = \"key-{key}\"\nsha256 = \"{key:064x}\"\n");
        }
        for (pair, name) in self.pools() {
            let first = pair * self.models_of_a_pair;
            let models: Vec<String> =
                (first..first + self.models_of_a_pair).map(|model| format!("model-{model}")).collect();
            let lengths = if name.starts_with("short") { "max" } else { "min" };
            text +=
                &format!("[[pool]]\nname = \"{name}\"\nmodels = {models:?}\nprompt_tokens = {{ {lengths} = 4000 }}\n");
            for index in 0..self.backends_of_a_pool {
                let backend = Self::backend(&name, index);
                let host = format!("10.0.{pair}.{index}");
                text += &format!("[[pool.backend]]\nname = \"{backend}\"\nurl = \"http://{host}:80{}\"\n", name.len());
            }
        }
        let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
        Config::parse(&text, "test", &[], &around).unwrap_or_else(|problems| panic!("{problems}")).config
    }

    /// Requests of every model, class, backend and key. They are short, long, and long in the short
    /// pool.
    pub fn traffic(&self) -> Vec<Record> {
        let mut records = Vec::new();
        for model in 0..self.pairs * self.models_of_a_pair {
            let pool = |kind: &str| -> Arc<str> { format!("{kind}-{}", model / self.models_of_a_pair).into() };
            for class in 0..CLASSES {
                for (home, ran) in [("short", "short"), ("long", "long"), ("long", "short")] {
                    let number = records.len();
                    records.push(Record {
                        model: Some(format!("model-{model}").into()),
                        class: Some(format!("class-{class}").into()),
                        key: Some(format!("key-{}", number % KEYS).into()),
                        home: Some(pool(home)),
                        pool: Some(pool(ran)),
                        backend: Some(Self::backend(&pool(ran), number / 3 % self.backends_of_a_pool)),
                        ..completed(Duration::from_millis(30), Duration::from_millis(6))
                    });
                }
            }
        }
        records
    }
}
