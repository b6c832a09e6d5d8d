//! The steps of an engine's life cycle, as the journal and the admin API name them.
//!
//! Each step has one effect (`engine::effects`); [`Lifecycle`](super::Lifecycle) decides the next
//! step. Names are stored in journals: steps may be added, but not renamed.

use serde::{Deserialize, Serialize};

/// The action or wait under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The gateway looks for an engine of an earlier gateway. Never in the journal: nothing is
    /// known yet.
    Recover,
    /// Nothing runs, and nothing should.
    Off,
    /// Nothing runs, because autoscaling wants fewer engines. Starts when more are wanted.
    Idle,
    /// An engine of an earlier gateway is taken over and must become ready.
    Adopt,
    /// No new requests; requests in flight finish.
    Drain,
    /// The engine and all its processes are ended, and that is confirmed.
    Stop,
    /// A process is started and must become ready.
    Start,
    /// Missing adapters are loaded.
    Adapters,
    /// The engine must generate, and the same text for golden prompts as before.
    Golden,
    /// Generations before a client's first request.
    WarmUp,
    /// In rotation with a growing share of its slots.
    Ramp,
    /// In rotation.
    Serve,
    /// The wait before the next attempt.
    Backoff,
    /// No attempt until an operator requests one.
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

    /// The name in the admin API and the journal.
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

    /// The end of the step, as a clause after "wait until".
    pub(super) fn awaited(self) -> &'static str {
        // In a ramp the engine serves already.
        if self == Self::Ramp { "its ramp ends" } else { "it serves" }
    }

    /// Whether the engine may get requests.
    pub fn in_rotation(self) -> bool {
        matches!(self, Self::Ramp | Self::Serve)
    }

    /// Whether requests should wait, because the engine returns without an operator.
    pub fn is_coming(self) -> bool {
        !matches!(self, Self::Off | Self::Idle | Self::Hold)
    }

    /// Whether a process may run.
    pub fn may_run(self) -> bool {
        !matches!(self, Self::Off | Self::Idle | Self::Backoff)
    }
}
