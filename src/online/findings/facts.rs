//! Facts about a running gateway at one moment: sums since the start, and the state of the pools.
//!
//! The difference of two moments gives the requests in between. Units: seconds and tokens.

use std::sync::Arc;
use std::time::Duration;

use sluice_core::vllm::metrics::{MetricsSnapshot, STEP_TOKENS};
use sluice_gateway::pool::{BackendView, Cordon, DecodeSums, PoolView};
use sluice_gateway::telemetry::totals::{Totals, TotalsView};

/// Values of an engine's metrics page. Sums count from the engine's start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PageFacts {
    /// Requests that run.
    pub running: f64,
    /// Requests that wait.
    pub waiting: f64,
    /// Requests that wait for an adapter slot.
    pub deferred: f64,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_usage: f64,
    /// Preemptions.
    pub preemptions: f64,
    /// TTFT as the engine measures it: sum in seconds, and number.
    pub ttft: (f64, f64),
    /// Inter-token latency, likewise.
    pub itl: (f64, f64),
    /// Prompt tokens, and generated tokens.
    pub tokens: [f64; 2],
    /// A number that grows only while the engine works.
    pub progress: f64,
    /// For each of [`STEP_TOKENS`], the steps with more tokens.
    pub large_steps: [f64; STEP_TOKENS.len()],
    /// For each of [`STEP_TOKENS`], the prompts of which more tokens were computed.
    pub large_prompts: [f64; STEP_TOKENS.len()],
    /// Tokens looked up in the prefix cache, and found.
    pub prefix: [f64; 2],
    /// Tokens that the KV cache holds, if known.
    pub cache_tokens: Option<u64>,
    /// Tokens in the KV caches of all ranks, if known.
    pub kv_tokens: Option<u64>,
    /// Adapters with requests, and slots for adapters.
    pub adapters: Option<(u64, u64)>,
}

impl From<&MetricsSnapshot> for PageFacts {
    fn from(page: &MetricsSnapshot) -> Self {
        Self {
            running: page.running,
            waiting: page.waiting,
            deferred: page.deferred.unwrap_or(0.0),
            kv_usage: page.kv_usage,
            preemptions: page.preemptions,
            ttft: (page.ttft.1, page.ttft.0),
            itl: (page.itl.1, page.itl.0),
            tokens: [page.prompt_tokens, page.generation_tokens],
            progress: page.progress(),
            large_steps: page.steps_above.counts(),
            large_prompts: page.computed_above.counts(),
            prefix: [page.prefix_queries, page.prefix_hits],
            cache_tokens: page.cache_tokens,
            kv_tokens: page.kv_tokens,
            adapters: page.adapters.as_ref().map(|adapters| (adapters.names.len() as u64, adapters.slots)),
        }
    }
}

/// One backend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackendFacts {
    /// The name.
    pub name: Arc<str>,
    /// Whether the backend takes requests.
    pub serves: bool,
    /// Whether an operator or the gateway has put the backend aside on purpose.
    pub is_put_aside: bool,
    /// The state as shown to operators, such as `ejected`.
    pub state: &'static str,
    /// Requests in flight.
    pub in_flight: f64,
    /// Limit of sequences.
    pub slots: f64,
    /// Seconds for which streams of this backend generated, and their tokens, as the gateway saw
    /// them.
    pub decoding: DecodeSums,
    /// How long the backend has been silent with requests in flight.
    pub silent: Option<Duration>,
    /// Sums over the requests.
    pub totals: Totals,
    /// The engine's metrics page, if it is readable.
    pub engine: Option<PageFacts>,
    /// Flags of an engine that the gateway started, otherwise empty.
    pub flags: Vec<String>,
}

/// One pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolFacts {
    /// The name.
    pub name: Arc<str>,
    /// Requests that wait.
    pub queue: f64,
    /// Sums over the requests of the pool.
    pub totals: Totals,
    /// The backends.
    pub backends: Vec<BackendFacts>,
    /// Keys of a fair pool: name, seconds of engine time, waiting requests.
    pub keys: Vec<(Arc<str>, f64, f64)>,
    /// Differences of settings between the engines, from the engines' own reports.
    pub differences: Option<String>,
}

/// The gateway at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// The pools.
    pub pools: Vec<PoolFacts>,
    /// Sums over the requests of each API key.
    pub keys: Vec<(Arc<str>, Totals)>,
    /// Requests that wait or run, and their tokens, by API key.
    pub in_flight: Vec<(Arc<str>, f64, f64)>,
}

impl Facts {
    /// Facts of these pools. `engine` returns how long a backend has been silent, the engine's
    /// page, and the seconds and tokens of the streams there. Leaves flags, keys of pools, requests
    /// in flight and reported differences empty.
    pub fn of(
        view: &[PoolView],
        totals: TotalsView,
        engine: impl Fn(&BackendView) -> (Option<Duration>, Option<PageFacts>, DecodeSums),
    ) -> Self {
        let backend = |pool: &PoolView, backend: &BackendView| {
            let own = totals.backends.iter().find(|([of, name], _)| *of == pool.name && *name == backend.name);
            let (silent, engine, decoding) = engine(backend);
            BackendFacts {
                name: Arc::clone(&backend.name),
                serves: backend.in_rotation(),
                is_put_aside: backend.draining || backend.removed || backend.closed || backend.cordon != Cordon::Open,
                state: backend.state(),
                in_flight: f64::from(backend.used.requests),
                slots: f64::from(backend.limits.slots),
                decoding,
                silent,
                totals: own.map(|(_, totals)| *totals).unwrap_or_default(),
                engine,
                flags: Vec::new(),
            }
        };
        let pools = view.iter().map(|pool| PoolFacts {
            name: Arc::clone(&pool.name),
            queue: pool.queue_length as f64,
            totals: totals.pools.iter().find(|(name, _)| *name == pool.name).map(|(_, sums)| *sums).unwrap_or_default(),
            backends: pool.backends.iter().map(|of| backend(pool, of)).collect(),
            ..PoolFacts::default()
        });
        Self { pools: pools.collect(), keys: totals.keys, in_flight: Vec::new() }
    }

    /// The pool with this name.
    pub fn pool(&self, name: &str) -> Option<&PoolFacts> {
        self.pools.iter().find(|pool| *pool.name == *name)
    }

    /// The sums of the key with this name.
    pub fn key(&self, name: &str) -> Totals {
        self.keys.iter().find(|(key, _)| **key == *name).map(|(_, totals)| *totals).unwrap_or_default()
    }

    /// Requests of the key since `before`, and their tokens.
    pub(super) fn arrived(&self, before: &Self, name: &str) -> (f64, f64) {
        let in_flight = |facts: &Self| {
            let own = facts.in_flight.iter().find(|(key, ..)| **key == *name);
            own.map_or((0.0, 0.0), |(_, requests, tokens)| (*requests, *tokens))
        };
        let (ended, now, then) = (self.key(name).since(&before.key(name)), in_flight(self), in_flight(before));
        ((ended.ended + now.0 - then.0).max(0.0), (ended.tokens + now.1 - then.1).max(0.0))
    }

    /// Seconds of engine time and waiting requests of the key, over all fair pools.
    pub fn work(&self, name: &str) -> Option<(f64, f64)> {
        let own = self.pools.iter().flat_map(|pool| &pool.keys).filter(|(key, ..)| **key == *name);
        own.map(|(_, seconds, waiting)| (*seconds, *waiting)).reduce(|one, other| (one.0 + other.0, one.1 + other.1))
    }
}

impl PoolFacts {
    /// The backend with this name.
    pub fn backend(&self, name: &str) -> Option<&BackendFacts> {
        self.backends.iter().find(|backend| *backend.name == *name)
    }

    /// Whether the pages of all engines that serve are known and `is` holds.
    pub(super) fn all_engines(&self, is: impl Fn(&PageFacts) -> bool) -> bool {
        let mut pages = self.backends.iter().filter(|backend| backend.serves).filter_map(|own| own.engine).peekable();
        pages.peek().is_some() && pages.all(|engine| is(&engine))
    }
}
