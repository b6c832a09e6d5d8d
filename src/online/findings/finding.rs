//! One finding: the cause, a sentence, the evidence, and the next step for an operator.
//!
//! Names in metrics and JSON are in snake case.

use serde::{Deserialize, Serialize};

/// The kind of a finding, in order of severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// An engine has requests and sends nothing.
    SilentEngine,
    /// An engine is out of rotation although no one took it out.
    EngineDown,
    /// An engine is slower than the others of its pool.
    SlowEngine,
    /// The network path to one engine is slow.
    SlowNetwork,
    /// An engine preempts requests, because its KV cache is full.
    KvCacheFull,
    /// More adapters have requests than fit in a step of an engine.
    AdaptersWait,
    /// The engines of a pool have different settings.
    FlagsDiffer,
    /// One key uses most of a pool while requests wait.
    BusyKey,
    /// Prompts have become longer.
    LongerPrompts,
    /// More requests come than before.
    Burst,
    /// Requests wait for slots while the engines have room.
    SlotsTooSmall,
    /// Requests wait, and the engines are full.
    NearLimit,
    /// Estimated lengths of prompts are wrong.
    EstimatesOff,
}

impl Cause {
    /// Every cause.
    pub const ALL: [Self; 13] = [
        Self::SilentEngine,
        Self::EngineDown,
        Self::SlowEngine,
        Self::SlowNetwork,
        Self::KvCacheFull,
        Self::AdaptersWait,
        Self::FlagsDiffer,
        Self::BusyKey,
        Self::LongerPrompts,
        Self::Burst,
        Self::SlotsTooSmall,
        Self::NearLimit,
        Self::EstimatesOff,
    ];

    pub(super) fn is_change(self) -> bool {
        matches!(self, Self::BusyKey | Self::LongerPrompts | Self::Burst)
    }

    pub(super) fn is_load(self) -> bool {
        self.is_change() || matches!(self, Self::SlotsTooSmall | Self::NearLimit)
    }

    /// The name in metrics and JSON.
    pub fn label(self) -> &'static str {
        match self {
            Self::SilentEngine => "silent_engine",
            Self::EngineDown => "engine_down",
            Self::SlowEngine => "slow_engine",
            Self::SlowNetwork => "slow_network",
            Self::KvCacheFull => "kv_cache_full",
            Self::AdaptersWait => "adapters_wait",
            Self::FlagsDiffer => "flags_differ",
            Self::BusyKey => "busy_key",
            Self::LongerPrompts => "longer_prompts",
            Self::Burst => "burst",
            Self::SlotsTooSmall => "slots_too_small",
            Self::NearLimit => "near_limit",
            Self::EstimatesOff => "estimates_off",
        }
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The kind.
    pub cause: Cause,
    /// The pool.
    pub pool: String,
    /// The backend or key; empty: the whole pool.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// One sentence that names the fault and the place.
    pub sentence: String,
    /// The measurements.
    pub evidence: String,
    /// The next step for an operator.
    pub advice: String,
    /// Whether the cause is a change of the load.
    #[serde(skip)]
    pub is_change: bool,
    /// Seconds since the cause was first seen.
    #[serde(default)]
    pub since_seconds: f64,
}
