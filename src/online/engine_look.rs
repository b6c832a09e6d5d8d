//! What the slow layer of the tuner sees and orders: plain data between [`EngineTuner`](crate::EngineTuner) and its caller.
//!
//! The caller looks about once a second, carries out every [`Order`], and reports what came of it: an answer for each
//! [`Order::Simulate`] and [`Order::SimulateLimits`], a [`Restarted`] for each [`Order::Restart`].

use std::time::Duration;

use crate::arms::Arms;
use crate::event::Acting;
use crate::flags::{EngineFlag, Flags};
use crate::forecast::{LimitsQuestion, Question};
use crate::limits::{Limits, PoolLimits};
use crate::proof::Load;
use crate::window::Score;

/// What it may do, from the configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineRules {
    /// Flags that it may change.
    pub flags: Vec<EngineFlag>,
    /// How long objectives must be missed.
    pub missed_for: Duration,
    /// Engines that it may restart in an hour.
    pub restarts_per_hour: u32,
    /// How long it rests after a change that did not help.
    pub cool_down: Duration,
    /// Share of the misses that the objectives allow in 30 days which changes may cause.
    pub error_budget: f64,
}

/// One engine as it is now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineState {
    /// Its pool.
    pub pool: String,
    /// Its backend.
    pub backend: String,
    /// Values of flags, defaults included, as far as they are known; `None`: the gateway cannot change them.
    pub flags: Option<Flags>,
    /// Whether it is in rotation.
    pub serves: bool,
    /// Requests that wait in the queue of its pool.
    pub waiting: usize,
    /// What requests use of it.
    pub used: Load,
    /// What copies of requests use of it beside that.
    pub copies: Load,
    /// How long its last start took, if that is known.
    pub started_in: Option<Duration>,
}

/// Pools that miss their objectives, as their controller sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Need {
    /// The pools, that with the largest loss first.
    pub pools: Vec<String>,
    /// Since when they miss their objectives and no change of limits helps.
    pub since: Option<Duration>,
    /// Since when the load is as it is.
    pub load_since: Duration,
    /// Their limits, without a change that is being tried.
    pub limits: Limits,
    /// Those of each of `pools`.
    pub in_force: Vec<PoolLimits>,
    /// Their requests so far, and those that missed an objective.
    pub totals: (f64, f64),
    /// What a request of each of `pools` loses.
    pub losses: Vec<f64>,
    /// For each of `pools`, other limits under which a change of flags may help.
    pub beside: Vec<Vec<PoolLimits>>,
    /// The most sequences that ran at once on one of their engines; 0: not known.
    pub running_peak: f64,
    /// The score of the last window under these limits.
    pub score: Score,
    /// The share of requests that shall meet their objectives.
    pub target: f64,
    /// The flag, whether up, and why, by the diagnosis.
    pub advice: Option<(EngineFlag, bool, String)>,
}

/// Everything that it looks at.
#[derive(Clone, Copy, Debug)]
pub struct Look<'a> {
    /// Now.
    pub now: Duration,
    /// All engines.
    pub engines: &'a [EngineState],
    /// Groups of pools.
    pub needs: &'a [Need],
    /// What it may do.
    pub acting: Acting,
    /// Why a change under way must be dropped, and none may begin.
    pub stands_back: Option<&'a str>,
    /// Why no engine may be restarted now.
    pub waits: Option<&'a str>,
    /// The arms of the experiment that runs.
    pub arms: &'a Arms,
    /// How long a request may take until it counts.
    pub horizon: Duration,
}

/// What the caller has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Simulate, with the requests of the last minutes put in.
    Simulate(Question),
    /// Simulate other limits.
    SimulateLimits(LimitsQuestion),
    /// Restart an engine with another value of a flag.
    Restart {
        /// `pool/backend`.
        engine: String,
        /// The flag.
        flag: EngineFlag,
        /// Its value.
        value: f64,
        /// Even if the other engines have no room for its requests: then they wait.
        crowded: bool,
    },
    /// [`EngineTuner::change`] wants another experiment or other limits, or none any more.
    Configure,
}

/// What came of a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Restarted {
    /// It serves.
    Done,
    /// It runs as before, or not at all.
    Failed(String),
    /// It may not begin now.
    Blocked(String),
}

impl Look<'_> {
    /// The group that a pool belongs to, if it has objectives.
    pub(crate) fn need_of(&self, pool: &String) -> Option<&Need> {
        self.needs.iter().find(|need| need.pools.contains(pool))
    }
}
