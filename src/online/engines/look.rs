//! Input and orders of the slow layer: plain data between [`EngineTuner`](super::EngineTuner) and
//! the caller, who looks about once a second and carries out every [`TunerOrder`].
//!
//! A simulation returns an answer, a restart a [`Restarted`].

use std::time::Duration;

use super::flags::{EngineFlag, Flags};
use super::forecast::EngineQuestion;
use super::proof::Load;
use crate::event::Acting;
use crate::limits::forecast::LimitsQuestion;
use crate::limits::{Limits, PoolLimits};
use crate::observe::arms::Arms;
use crate::observe::window::Score;
use sluice_config::Config;
use sluice_gateway::pool::{BackendView, PoolView};

/// The tuner's bounds, from the configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineRules {
    /// Flags that may change.
    pub flags: Vec<EngineFlag>,
    /// How long objectives must be missed before a change.
    pub missed_for: Duration,
    /// Engines that may be restarted in an hour.
    pub restarts_per_hour: u32,
    /// Rest after a change that did not help.
    pub cool_down: Duration,
    /// The part of the misses allowed in 30 days that changes may cause.
    pub error_budget: f64,
}

impl EngineRules {
    /// The bounds of a configuration.
    pub fn of(config: &Config) -> Self {
        let tuner = &config.tuner;
        Self {
            flags: tuner.flags.iter().filter_map(|name| EngineFlag::named(name)).collect(),
            missed_for: tuner.missed_for,
            restarts_per_hour: tuner.restarts_per_hour,
            cool_down: tuner.cool_down,
            error_budget: tuner.error_budget,
        }
    }
}

/// The state of one engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineState {
    /// The pool.
    pub pool: String,
    /// The backend.
    pub backend: String,
    /// Known values of flags, defaults included; `None`: the gateway cannot change them.
    pub flags: Option<Flags>,
    /// Whether the backend is in rotation.
    pub serves: bool,
    /// Requests in the queue of the pool.
    pub waiting: usize,
    /// Load of requests on the engine.
    pub used: Load,
    /// Additional load of copies of requests.
    pub copies: Load,
    /// Duration of the last start, if known.
    pub started_in: Option<Duration>,
}

impl EngineState {
    /// The state of a backend whose engine is unknown.
    pub fn of(pool: &PoolView, backend: &BackendView) -> Self {
        Self {
            pool: pool.name.to_string(),
            backend: backend.name.to_string(),
            flags: None,
            serves: backend.in_rotation(),
            waiting: pool.queue_length,
            used: Load::new(backend.used.slots, backend.used.tokens),
            copies: Load::new(backend.copies.0, backend.copies.1),
            started_in: None,
        }
    }

    pub(super) fn flag(&self, flag: EngineFlag) -> Option<f64> {
        self.flags.as_ref()?.get(&flag).copied()
    }
}

/// How one pool fares.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolNeed {
    /// The name.
    pub name: String,
    /// The limits, without a change on trial.
    pub in_force: PoolLimits,
    /// Mean loss of a request.
    pub loss: f64,
    /// Other limits that may help with other flags.
    pub beside: Vec<PoolLimits>,
}

/// How the pools of one controller fare.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Need {
    /// The pools, the largest loss first.
    pub pools: Vec<PoolNeed>,
    /// Since when objectives are missed and no change of limits is left to try.
    pub since: Option<Duration>,
    /// Since when the load has not changed.
    pub load_since: Duration,
    /// Limits of all pools, without a change on trial.
    pub limits: Limits,
    /// Judged requests so far, and how many of them missed an objective.
    pub totals: (f64, f64),
    /// The most sequences that ran at once on one engine; 0: unknown.
    pub running_peak: f64,
    /// The score of the last window under these limits.
    pub score: Score,
    /// Share of requests that should meet their objectives.
    pub target: f64,
    /// The diagnosis: the flag, whether to raise it, and why.
    pub advice: Option<(EngineFlag, bool, String)>,
}

/// The facts for one decision.
#[derive(Clone, Copy, Debug)]
pub struct EngineLook<'a> {
    /// Now.
    pub now: Duration,
    /// All engines.
    pub engines: &'a [EngineState],
    /// Groups of pools.
    pub needs: &'a [Need],
    /// Whether changes may be made.
    pub acting: Acting,
    /// Why a change under way must be dropped and no change may begin, if so.
    pub stands_back: Option<&'a str>,
    /// Why no engine may be restarted now, if so.
    pub waits: Option<&'a str>,
    /// The arms of the running experiment.
    pub arms: &'a Arms,
    /// Time after arrival from which a request counts.
    pub horizon: Duration,
}

/// An order to the caller.
#[derive(Clone, Debug, PartialEq)]
pub enum TunerOrder {
    /// Simulate flags, with the requests of the last minutes.
    Simulate(EngineQuestion),
    /// Simulate other limits.
    SimulateLimits(LimitsQuestion),
    /// Restart an engine with another value of a flag.
    Restart {
        /// `pool/backend`.
        engine: String,
        /// The flag.
        flag: EngineFlag,
        /// The value.
        value: f64,
        /// Whether to restart even if requests then wait.
        crowded: bool,
    },
    /// Put the experiment and the limits of the change under way in force, or end them.
    Configure,
}

/// The result of a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Restarted {
    /// The engine serves.
    Done,
    /// The engine runs with the old flags, or not at all.
    Failed(String),
    /// The restart may not begin now.
    Blocked(String),
}

impl Need {
    pub(super) fn of(&self, pool: &str) -> Option<&PoolNeed> {
        self.pools.iter().find(|own| own.name == pool)
    }
}

impl EngineLook<'_> {
    /// The state of the pool's group, if the pool has objectives.
    pub(super) fn need_of(&self, pool: &str) -> Option<&Need> {
        self.needs.iter().find(|need| need.of(pool).is_some())
    }

    pub(super) fn engines_of(&self, pool: &str) -> impl Iterator<Item = &EngineState> {
        self.engines.iter().filter(move |engine| engine.pool == pool)
    }

    pub(super) fn engine(&self, pool: &str, backend: &str) -> Option<&EngineState> {
        self.engines_of(pool).find(|engine| engine.backend == backend)
    }
}
