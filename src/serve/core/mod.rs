//! The parts of a running gateway that all services share.
//!
//! Request threads take snapshots, because configuration and routing table are swapped whole
//! (`in_force.rs`). Only changes of the configuration hold locks.
//!
//! A service ([`tuner`](crate::tuner), [`scaler`](crate::scaler), and others) has a reference to
//! the core, which knows no service.

mod error;
mod counters;
mod in_force;
mod kinds;
mod served;
mod probing;

use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::cluster;
use sluice_config::Config;
use sluice_core::base::BackendId;
use sluice_fleet::{Fleet, FoundKinds, ReportedModels};
use sluice_gateway::flow::LearnedState;
use sluice_gateway::pool::{Admission, PoolLayout};
use sluice_gateway::proxy::{ClientLimits, ProxyFlow};
use sluice_gateway::telemetry::Telemetry;

pub(crate) use counters::{Counters, load_counters};
pub use error::StartError;
pub(crate) use served::backends_of;

/// Where a reload reads the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file, with changes from the command line.
    File {
        /// The file.
        path: PathBuf,
        /// The values of `--set`.
        sets: Vec<String>,
    },
    /// The configuration comes from flags or code, so a reload is refused.
    Fixed,
}

/// The shared parts of a running gateway.
#[derive(Debug)]
pub struct Core {
    /// The request path.
    pub flow: Arc<ProxyFlow>,
    /// Pools, backends and leases.
    pub admission: Arc<Admission>,
    /// The engines.
    pub fleet: Arc<Fleet>,
    /// Metrics, logs and records.
    pub telemetry: Arc<Telemetry>,
    pub(crate) config: ArcSwap<Config>,
    pub(crate) source: Source,
    pub(crate) learned: LearnedState,
    pub(crate) reported: Arc<ReportedModels>,
    pub(crate) kinds: Arc<FoundKinds>,
    pub(crate) clients: Arc<ClientLimits>,
    pub(crate) started: Instant,
    pub(crate) cluster: Option<Arc<cluster::View>>,
    /// `None` if no leader is elected.
    pub(crate) leader: Option<Arc<cluster::LeaderView>>,
    /// Whether this gateway leads and has the journal.
    pub(crate) acts: Mutex<bool>,
    pub(crate) loaded: Mutex<Loaded>,
    /// Held from reading the file until the configuration is in force.
    pub(crate) replacing: Mutex<()>,
    /// Adapters that are being loaded for experiments.
    pub(crate) loading: Mutex<Vec<(BackendId, Arc<str>)>>,
    /// Starts a round of probes at once, because requests may wait for backends that a reload
    /// added.
    pub(crate) probe_now: Notify,
}

/// Parts loaded with the configuration, for rebuilding the routing table.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) layout: PoolLayout,
    pub(crate) counters: Counters,
}

impl Core {
    /// Waits until this caller alone may replace the configuration in force.
    pub(crate) fn alone(&self) -> MutexGuard<'_, ()> {
        self.replacing.lock()
    }

    pub(crate) fn acts(&self) -> bool {
        self.leader.as_ref().is_none_or(|_| *self.acts.lock())
    }
}
