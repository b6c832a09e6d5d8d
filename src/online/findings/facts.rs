//! Facts about a running gateway at one moment: sums since the start, and the state of the pools.
//!
//! The difference between two moments gives the requests in between. Units: seconds and tokens.

use std::sync::Arc;
use std::time::Duration;

use sluice_gateway::telemetry::totals::Totals;

/// The values of an engine's metrics page that findings need; sums since the engine's start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineFacts {
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
    /// Tokens that the KV cache holds, if known.
    pub cache_tokens: Option<u64>,
    /// Adapters with requests, and slots for adapters.
    pub adapters: Option<(u64, u64)>,
}

/// One backend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackendFacts {
    /// The name.
    pub name: Arc<str>,
    /// Whether the backend takes requests.
    pub serves: bool,
    /// Whether an operator or the gateway has taken it out on purpose.
    pub is_put_aside: bool,
    /// The state as shown, such as `ejected`.
    pub state: &'static str,
    /// Requests in flight.
    pub in_flight: f64,
    /// Limit of sequences.
    pub slots: f64,
    /// For how long the backend has had requests in flight and sent nothing.
    pub silent: Option<Duration>,
    /// Sums over the requests.
    pub totals: Totals,
    /// The engine's own page, if it is readable.
    pub engine: Option<EngineFacts>,
    /// Flags with which the gateway started the engine; empty for an engine of another program.
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
    /// Differences between the engines that they reported themselves.
    pub differences: Option<String>,
}

/// The gateway at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// The pools.
    pub pools: Vec<PoolFacts>,
    /// Sums over the requests of each API key.
    pub keys: Vec<(Arc<str>, Totals)>,
}

impl Facts {
    /// The pool with this name.
    pub fn pool(&self, name: &str) -> Option<&PoolFacts> {
        self.pools.iter().find(|pool| *pool.name == *name)
    }

    /// The sums of the key with this name.
    pub fn key(&self, name: &str) -> Totals {
        self.keys.iter().find(|(key, _)| **key == *name).map(|(_, totals)| *totals).unwrap_or_default()
    }

    /// Seconds of engine time and waiting requests of the key in all fair pools; `None` if none has
    /// the key.
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
}
