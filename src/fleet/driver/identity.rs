//! How a gateway finds an engine of an earlier gateway.
//!
//! The identity is in the journal. The system reuses process ids, so an id is kept with the start
//! time, the boot and a mark in the environment.

use serde::{Deserialize, Serialize};

/// Identifies a started engine across restarts of the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "snake_case")]
pub enum EngineIdentity {
    /// A process that a gateway started.
    Process {
        /// The leader of session and process group.
        pid: i32,
        /// Start time, clock ticks since boot.
        started: u64,
        /// Id of the boot: process ids and ticks begin again with each boot.
        boot: String,
        /// The value of `SLUICE_ENGINE` in the environment of all processes.
        mark: String,
        /// Memory in use on the devices before the start: device index and MiB. Absent if it could
        /// not be read.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        baseline: Option<Vec<(u16, u64)>>,
        /// The port on which the engine listens; absent in journals of earlier versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        port: Option<u16>,
    },
    /// Only the operator's commands find the engine.
    Command,
    /// A pod, with the restarts of the container.
    Pod {
        /// The uid of the pod.
        uid: String,
        /// Restarts of the container when the engine was started or adopted.
        restarts: i32,
    },
    /// An engine that the gateway does not start.
    External,
}
