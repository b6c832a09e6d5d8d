//! The steps of an engine's life cycle, as the journal and the admin API name them.
//!
//! Each step has one effect (`engine::effects`); [`Lifecycle`](super::Lifecycle) decides the next
//! step. Names are stored in journals: steps may be added, but not renamed.

use serde::{Deserialize, Serialize};

sluice_core::labels! {
    /// The action or wait under way.
    #[derive(Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Step {
        /// The gateway looks for an engine of an earlier gateway. Never in the journal: nothing is
        /// known yet.
        Recover = "recover",
        /// No process runs, and none should.
        Off = "off",
        /// No process runs, because the engine is not wanted now. It starts when it is wanted.
        Idle = "idle",
        /// An engine of an earlier gateway is taken over and must become ready.
        Adopt = "adopt",
        /// No new requests; requests in flight finish.
        Drain = "drain",
        /// The engine and all its processes are ended, and that is confirmed.
        Stop = "stop",
        /// A process is started and must become ready.
        Start = "start",
        /// Missing adapters are loaded.
        Adapters = "adapters",
        /// The engine must generate, and the same text for golden prompts as before.
        Golden = "golden",
        /// Generations before a client's first request.
        WarmUp = "warm_up",
        /// In rotation with a growing share of its slots.
        Ramp = "ramp",
        /// In rotation.
        Serve = "serve",
        /// The engine frees the memory of its devices; the process goes on.
        Sleep = "sleep",
        /// A process runs without memory of devices. It wakes when it is wanted.
        Asleep = "asleep",
        /// The engine takes back the memory of its devices, and must serve again.
        Wake = "wake",
        /// The wait before the next attempt.
        Backoff = "backoff",
        /// No attempt until an operator requests one.
        Hold = "hold",
    }
}

impl Step {
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
        !matches!(self, Self::Off | Self::Idle | Self::Asleep | Self::Hold)
    }

    /// Whether the engine rests: it is not wanted now, and needs no replacement to be changed.
    pub fn is_at_rest(self) -> bool {
        matches!(self, Self::Idle | Self::Asleep)
    }

    /// Whether a process may run.
    pub fn may_run(self) -> bool {
        !matches!(self, Self::Off | Self::Idle | Self::Backoff)
    }
}
