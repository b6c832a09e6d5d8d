//! The steps of an engine's life cycle, as the journal and the admin API name them.
//!
//! Each step has one effect (`engine::effects`). Which step follows is decided by [`Lifecycle`](super::Lifecycle). Names are
//! stored in journals: a step may be added, and none renamed.

use serde::{Deserialize, Serialize};

/// What is being done, or waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The gateway looks for an engine that an earlier gateway left. Never in the journal: nothing is known yet.
    Recover,
    /// Nothing runs and nothing is to run.
    Off,
    /// Nothing runs, because autoscaling wants fewer engines in its pool. It starts when more are wanted.
    Idle,
    /// An engine of an earlier gateway is taken over and must be ready.
    Adopt,
    /// No new requests; requests in flight finish.
    Drain,
    /// The engine and every process that it started are ended, and that is confirmed.
    Stop,
    /// A process is started and must become ready.
    Start,
    /// Configured adapters that are missing are loaded.
    Adapters,
    /// The engine must generate, and golden prompts must give the same text as before.
    Golden,
    /// Generations before the first request of a client.
    WarmUp,
    /// In rotation with a growing share of its slots.
    Ramp,
    /// In rotation.
    Serve,
    /// A wait before the next attempt.
    Backoff,
    /// No further attempt until an operator asks for one.
    Hold,
}

impl Step {
    /// Every step.
    pub const ALL: [Self; 14] = [
        Self::Recover,
        Self::Off,
        Self::Idle,
        Self::Adopt,
        Self::Drain,
        Self::Stop,
        Self::Start,
        Self::Adapters,
        Self::Golden,
        Self::WarmUp,
        Self::Ramp,
        Self::Serve,
        Self::Backoff,
        Self::Hold,
    ];

    /// The name in the admin API and in the journal.
    pub fn label(self) -> &'static str {
        match self {
            Self::Recover => "recover",
            Self::Off => "off",
            Self::Idle => "idle",
            Self::Adopt => "adopt",
            Self::Drain => "drain",
            Self::Stop => "stop",
            Self::Start => "start",
            Self::Adapters => "adapters",
            Self::Golden => "golden",
            Self::WarmUp => "warm_up",
            Self::Ramp => "ramp",
            Self::Serve => "serve",
            Self::Backoff => "backoff",
            Self::Hold => "hold",
        }
    }

    /// Whether requests may be sent to the engine.
    pub fn in_rotation(self) -> bool {
        matches!(self, Self::Ramp | Self::Serve)
    }

    /// Whether requests should wait for the engine: it comes back without an operator.
    pub fn is_coming(self) -> bool {
        !matches!(self, Self::Off | Self::Idle | Self::Hold)
    }

    /// Whether there may be a process.
    pub fn may_run(self) -> bool {
        !matches!(self, Self::Off | Self::Idle | Self::Backoff)
    }
}
