//! All engines of a run, with the requests in flight, behind one lock.
//!
//! The lock is never contended, because a run has one thread. It is there because the gateway's
//! traits require `Sync`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::engine::{Engine, EngineRequest, EngineStats};
use crate::setup::{EngineChange, EngineSetup};
use sluice_bench::Api;
use sluice_config::Endpoint;
use sluice_core::openai::{EditedBody, Route, request};
use sluice_gateway::experiment::EngineAdapters;
use sluice_online::findings::facts::PageFacts;
use sluice_online::observe::engines::EngineSample;

/// A request in flight, with the values that an engine would parse from the body.
#[derive(Clone, Debug)]
pub(crate) struct ParsedRequest {
    pub(crate) request: EngineRequest,
    pub(crate) model: Arc<str>,
    pub(crate) api: Api,
}

pub(crate) fn route(api: Api) -> Route {
    match api {
        Api::Completions => Route::Completions,
        Api::Chat => Route::ChatCompletions,
    }
}

#[derive(Debug, Default)]
pub(crate) struct ClusterState {
    pub(crate) engines: Vec<Engine>,
    pub(crate) requests: HashMap<u64, ParsedRequest>,
    /// Virtual time since the start of the run.
    pub(crate) now: Duration,
}

#[derive(Debug)]
pub(crate) struct Cluster {
    state: Mutex<ClusterState>,
    /// The engine at each address, few enough for a linear search.
    addresses: Vec<(Endpoint, usize)>,
    /// Model names that arms send. The number is set if the model is an adapter.
    arms: Vec<(Arc<str>, Option<u16>)>,
}

impl Cluster {
    /// A cluster of these engines. `addresses`: the index of the engine at each address. `arms`:
    /// the models of arms.
    pub(crate) fn new(
        engines: Vec<Engine>,
        addresses: Vec<(Endpoint, usize)>,
        arms: Vec<(Arc<str>, Option<u16>)>,
    ) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(ClusterState { engines, ..ClusterState::default() }), addresses, arms })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock()
    }

    pub(crate) fn at(&self, endpoint: &Endpoint) -> Option<usize> {
        self.addresses.iter().find(|(known, _)| known == endpoint).map(|(_, engine)| *engine)
    }

    pub(crate) fn arm_model(&self, api: Api, body: &EditedBody) -> Option<&(Arc<str>, Option<u16>)> {
        if self.arms.is_empty() {
            return None;
        }
        let body = body.to_bytes();
        let view = request::read(route(api), &body).ok()?;
        self.arms.iter().find(|(name, _)| view.model.as_deref() == Some(&**name))
    }

    /// The adapters of each engine as metrics show them. `traffic`: names of the traffic's
    /// adapters, by number.
    pub(crate) fn adapters(&self, traffic: &[String]) -> Vec<EngineAdapters> {
        let name_of = |id: u16| {
            let of_arm = || self.arms.iter().find(|(_, number)| *number == Some(id)).map(|(name, _)| name.to_string());
            traffic.get(usize::from(id)).cloned().or_else(of_arm)
        };
        self.lock().engines.iter().filter_map(|engine| engine.adapters(name_of)).collect()
    }

    pub(crate) fn next_at(&self) -> Option<Duration> {
        self.lock().engines.iter().filter_map(Engine::next_at).min()
    }

    /// Processes all events up to `now`. Returns whether a client sees any of them.
    pub(crate) fn run_due(&self, now: Duration) -> bool {
        let mut state = self.lock();
        state.now = now;
        state.engines.iter_mut().fold(false, |visible, engine| engine.run_due(now) | visible)
    }

    pub(crate) fn change(&self, now: Duration, engine: usize, change: EngineChange) {
        self.lock().engines[engine].change(now, change);
    }

    pub(crate) fn start_as(&self, now: Duration, engine: usize, setup: &EngineSetup) {
        self.lock().engines[engine].start_as(now, setup);
    }

    pub(crate) fn streams(&self, engine: usize) -> usize {
        self.lock().engines[engine].streams()
    }

    pub(crate) fn busy(&self, engine: usize) -> f64 {
        self.lock().engines[engine].busy()
    }

    pub(crate) fn is_up(&self, engine: usize) -> bool {
        self.lock().engines[engine].is_up()
    }

    pub(crate) fn is_hung(&self, engine: usize) -> bool {
        self.lock().engines[engine].is_hung()
    }

    /// The values of an engine's metrics page; `None` while it is down.
    pub(crate) fn sample(&self, engine: usize) -> Option<EngineSample> {
        let state = self.lock();
        Some(&state.engines[engine]).filter(|engine| engine.is_up()).map(Engine::sample)
    }

    /// The values of a metrics page for findings; `None` while the engine is down.
    pub(crate) fn facts(&self, engine: usize) -> Option<PageFacts> {
        let state = self.lock();
        Some(&state.engines[engine]).filter(|engine| engine.is_up()).map(Engine::facts)
    }

    pub(crate) fn take_stats(&self) -> Vec<EngineStats> {
        std::mem::take(&mut self.lock().engines).into_iter().map(Engine::into_stats).collect()
    }
}
