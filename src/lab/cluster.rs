//! All engines of a run behind one lock, with the requests that are under way.
//!
//! The lock is never contended: a run has one thread. It exists because the gateway's traits are made for several.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::engine::{Engine, EngineRequest, EngineStats};
use crate::setup::EngineChange;
use sluice_bench::Api;
use sluice_gateway::config::Endpoint;

/// A request under way: what an engine would read in its body.
#[derive(Clone, Debug)]
pub(crate) struct PlannedRequest {
    pub(crate) request: EngineRequest,
    pub(crate) model: Arc<str>,
    pub(crate) api: Api,
}

/// What is behind the lock.
#[derive(Debug, Default)]
pub(crate) struct ClusterState {
    pub(crate) engines: Vec<Engine>,
    /// By number of the request.
    pub(crate) planned: HashMap<u64, PlannedRequest>,
    /// The time of the run.
    pub(crate) now: Duration,
}

/// All engines. See the header of this file.
#[derive(Debug)]
pub(crate) struct Cluster {
    state: Mutex<ClusterState>,
    /// The engine at each address. Few: a search is as fast as a map.
    addresses: Vec<(Endpoint, usize)>,
}

impl Cluster {
    /// Engines, and which of them is reached at which address.
    pub(crate) fn new(engines: Vec<Engine>, addresses: Vec<(Endpoint, usize)>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(ClusterState { engines, ..ClusterState::default() }), addresses })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock()
    }

    /// The engine at an address.
    pub(crate) fn at(&self, endpoint: &Endpoint) -> Option<usize> {
        self.addresses.iter().find(|(known, _)| known == endpoint).map(|(_, engine)| *engine)
    }

    /// When any engine does something next.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        self.lock().engines.iter().filter_map(Engine::next_at).min()
    }

    /// Processes what is due at `now`; returns whether a client can see some of it.
    pub(crate) fn run_due(&self, now: Duration) -> bool {
        let mut state = self.lock();
        state.now = now;
        state.engines.iter_mut().fold(false, |visible, engine| engine.run_due(now) | visible)
    }

    pub(crate) fn change(&self, now: Duration, engine: usize, change: EngineChange) {
        self.lock().engines[engine].change(now, change);
    }

    pub(crate) fn is_up(&self, engine: usize) -> bool {
        self.lock().engines[engine].is_up()
    }

    /// What the engines did, in their order.
    pub(crate) fn take_stats(&self) -> Vec<EngineStats> {
        std::mem::take(&mut self.lock().engines).into_iter().map(Engine::into_stats).collect()
    }
}
