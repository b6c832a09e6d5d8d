//! Backends that come and go: the pods of a Kubernetes cluster that a pool selects.
//!
//! [`follow`] watches the pods of one pool and publishes what it sees; [`Members`] decides from that, without clock and I/O, which
//! pods are backends, which have to be warmed up first and which get no new requests. A lost API server changes none of it: the
//! last that was seen stays in force, and [`Seen::trouble`] says so. Why a pod does not come up has the classes of any other engine
//! (`failure`). What needs the client of the cluster is behind the cargo feature `kubernetes`.
//!
//! Bounds: [`MAX_PODS`] pods of one pool; a watch is renewed every minute, and begun anew after a wait of up to 30 s.

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

/// The readiness gate that the gateway gives to a warm pod.
pub const GATE: &str = "sluice.dev/warm";
/// Pods of one pool that are followed; further ones are left out.
pub const MAX_PODS: usize = 1_024;

/// Which pods a pool has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodQuery {
    /// `None`: that of the gateway.
    pub namespace: Option<String>,
    /// Labels.
    pub selector: String,
    /// The container of the engine.
    pub container: String,
}

/// What was seen of the pods of a pool last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// By name.
    pub pods: BTreeMap<String, SeenPod>,
    /// Whether all pods were listed once.
    pub complete: bool,
    /// Why changes are not seen at present, and what to do about it.
    pub trouble: Option<String>,
}

/// One pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeenPod {
    /// Another pod of the same name has another one.
    pub uid: String,
    /// Its address, once it has one.
    pub ip: Option<String>,
    /// How often the container of its engine was restarted.
    pub restarts: i32,
    /// Its containers are ready and other gates than ours are given.
    pub ready: bool,
    /// Our readiness gate.
    pub gate: Gate,
    /// It is being deleted.
    pub leaving: bool,
    /// Why it does not come up, or why its engine ended last.
    pub failure: Option<EngineFailure>,
}

/// Our readiness gate of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gate {
    /// The pod does not have it.
    #[default]
    Absent,
    /// The pod waits for it.
    Missing,
    /// It was given.
    Given,
}

/// The pods of a pool as they are shown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodsView {
    /// The pool.
    pub pool: String,
    /// Why changes are not seen at present. Requests go on to the pods that are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// By name.
    pub pods: Vec<PodView>,
}

/// A pod as it is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodView {
    /// Its name.
    pub name: String,
    /// not_ready, cold, warming_up, in_use, cordoned, leaving or managed.
    pub state: String,
    /// Why, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}
