//! Backends that come and go: the pods of a Kubernetes cluster that a pool selects.
//!
//! [`follow`] watches the pods of one pool and publishes them. From that [`Members`] decides,
//! without clock and I/O, which pods are backends, which must be warmed up, and which get no new
//! requests. While the API server is away nothing changes: the last state stays in force, and
//! [`Seen::trouble`] gives the reason. `failure` classifies the failures of pods like other
//! engines' failures. Code that needs the client is behind the cargo feature `kubernetes`.
//!
//! Bounds: [`MAX_PODS`] per pool; a watch is renewed every minute, and restarted after up to 30 s.

#[cfg(feature = "kubernetes")]
pub(crate) mod client;
#[cfg(feature = "kubernetes")]
pub(crate) mod failure;
mod members;
#[cfg(feature = "kubernetes")]
mod object;
#[cfg(feature = "kubernetes")]
pub(crate) mod read;
#[cfg(feature = "kubernetes")]
mod replicas;
#[cfg(feature = "kubernetes")]
mod watch;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::driver::EngineFailure;

#[cfg(feature = "kubernetes")]
pub use client::give_gate;
pub use members::{Job, Members};
#[cfg(feature = "kubernetes")]
pub use object::{ObjectWritten, read_lease, read_object, write_lease, write_object};
#[cfg(feature = "kubernetes")]
pub use replicas::{apply_replicas, read_replicas};
#[cfg(feature = "kubernetes")]
pub use watch::follow;

/// The readiness gate that the gateway sets on warm pods.
pub const GATE: &str = "sluice.dev/warm";
/// Pods followed per pool; more are left out.
pub const MAX_PODS: usize = 1_024;

/// Which pods belong to a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodQuery {
    /// `None`: the gateway's own.
    pub namespace: Option<String>,
    /// A label selector.
    pub selector: String,
    /// The engine's container.
    pub container: String,
}

/// The last known pods of a pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// The pods, by name.
    pub pods: BTreeMap<String, SeenPod>,
    /// Whether all pods were listed once since the gateway began.
    pub complete: bool,
    /// Why changes are not seen now, and the remedy.
    pub trouble: Option<String>,
}

/// One pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeenPod {
    /// Distinguishes pods of the same name.
    pub uid: String,
    /// The address, once assigned.
    pub ip: Option<String>,
    /// Restarts of the engine's container.
    pub restarts: i32,
    /// Whether the containers are ready and all other gates are set.
    pub ready: bool,
    /// Our readiness gate.
    pub gate: Gate,
    /// Whether the pod is being deleted.
    pub leaving: bool,
    /// Why the pod does not come up, or why the engine in it last ended.
    pub failure: Option<EngineFailure>,
}

/// Our readiness gate on a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gate {
    /// The pod has no such gate.
    #[default]
    Absent,
    /// The pod waits for the gate.
    Missing,
    /// The gate was set.
    Given,
}

/// The pods of a pool, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodsView {
    /// The pool.
    pub pool: String,
    /// Why changes are not seen now. Known pods still get requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// The pods, by name.
    pub pods: Vec<PodView>,
}

/// A pod, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodView {
    /// The pod's name.
    pub name: String,
    /// `not_ready`, `cold`, `warming_up`, `in_use`, `cordoned`, `leaving` or `managed`.
    pub state: String,
    /// Why the pod is in this state, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}
