//! How an engine is found again after the gateway that started it is gone.
//!
//! The identity is written to the journal. A process id alone does not identify a process, since the system reuses ids:
//! the start time, the boot and a mark in the environment are kept with it.

use serde::{Deserialize, Serialize};

/// Identifies a started engine over restarts of the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "snake_case")]
pub enum EngineIdentity {
    /// A process that a gateway started.
    Process {
        /// The leader of its session and process group.
        pid: i32,
        /// When it started, clock ticks since boot.
        started: u64,
        /// The boot it belongs to: process ids and ticks start again with each boot.
        boot: String,
        /// The value of `SLUICE_ENGINE` in the environment of all its processes.
        mark: String,
        /// Memory in use on its devices before it started: device index and MiB. Missing where it could not be read.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        baseline: Option<Vec<(u16, u64)>>,
    },
    /// The operator's commands find the engine.
    Command,
    /// A pod, and how often its container had been restarted.
    Pod {
        /// Of the pod.
        uid: String,
        /// Of its container.
        restarts: i32,
    },
    /// The gateway does not start this engine.
    External,
}
