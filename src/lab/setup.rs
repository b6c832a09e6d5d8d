//! What a run consists of: a gateway's configuration, an engine for each of its backends, traffic.
//!
//! Plain data. A [`Lab`] can be run with any number of seeds, at once on several threads if wanted.

use std::sync::Arc;
use std::time::Duration;

use crate::error::LabError;
use sluice_bench::RunPlan;
use sluice_core::vllm::args::ServeArgs;
use sluice_gateway::config::{Config, Endpoint};
use sluice_sim::{Constants, Gpu, Layout, Model, Profile, SimConfig};

/// Virtual time after the last arrival at which a run ends, whatever still waits.
pub const GIVE_UP_AFTER: Duration = Duration::from_secs(3600);

/// A gateway, its engines and their traffic.
#[derive(Clone, Debug)]
pub struct Lab {
    /// The gateway's configuration. Addresses are names here: no connection is made.
    pub config: Arc<Config>,
    /// One engine for each backend of the configuration.
    pub engines: Vec<EngineSetup>,
    /// Kinds of traffic, side by side. The seeds in them are replaced by that of the run: the first has it unchanged and so
    /// sends what `sluice bench` sends with this seed.
    pub traffic: Vec<RunPlan>,
    /// Virtual time after the last arrival at which requests that still wait or run are given up as unfinished.
    pub give_up_after: Duration,
}

/// The simulated engine of one backend.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    /// The backend's name in the configuration. If several pools have a backend of that name, they share the engine only if
    /// they share the address.
    pub backend: String,
    /// Its settings; the seed in them is replaced.
    pub sim: SimConfig,
    /// What happens to it, at times from the start of the run, in any order.
    pub changes: Vec<(Duration, EngineChange)>,
}

/// Something that happens to an engine during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EngineChange {
    /// From now on everything takes so many times as long as usual; above 0, and 1 ends it.
    Slower(f64),
    /// It stops at once: its streams break, connections are refused and probes fail.
    Stop,
    /// It runs again, with empty caches.
    Start,
}

impl Lab {
    /// A laboratory without changes, in which runs end [`GIVE_UP_AFTER`] after the last arrival.
    pub fn new(config: Config, engines: Vec<EngineSetup>, traffic: Vec<RunPlan>) -> Self {
        Self { config: Arc::new(config), engines, traffic, give_up_after: GIVE_UP_AFTER }
    }
}

/// What the parts of a setup say about each other.
impl Lab {
    /// Checks that every backend has an engine and every engine a backend.
    pub(crate) fn check_engines(&self) -> Result<(), LabError> {
        let names: Vec<&str> = self.engines.iter().map(|engine| engine.backend.as_str()).collect();
        let backends = || self.config.pools.iter().flat_map(|pool| &pool.backends);
        for (place, engine) in self.engines.iter().enumerate() {
            if names[..place].contains(&engine.backend.as_str()) {
                return Err(LabError::TwoEngines(engine.backend.clone()));
            }
            if !backends().any(|backend| backend.name == engine.backend) {
                return Err(LabError::NoBackend(engine.backend.clone()));
            }
            for (_, change) in &engine.changes {
                if let EngineChange::Slower(factor) = change
                    && !(factor.is_finite() && *factor > 0.0)
                {
                    return Err(LabError::BadFactor(engine.backend.clone(), *factor));
                }
            }
        }
        self.addresses().map(drop)
    }

    /// The address of each backend, pool by pool, with its engine.
    pub(crate) fn addresses(&self) -> Result<Vec<(Endpoint, usize)>, LabError> {
        let backends = self.config.pools.iter().flat_map(|pool| &pool.backends);
        let engine = |backend: &sluice_gateway::config::Backend| {
            let found = self.engines.iter().position(|engine| engine.backend == backend.name);
            let found = found.ok_or_else(|| LabError::NoEngine(backend.name.clone()))?;
            Ok((backend.target.endpoint(), found))
        };
        backends.map(engine).collect()
    }

    /// The names that engines report as their models.
    pub(crate) fn model_names(&self) -> Vec<String> {
        let own = self.engines.iter().flat_map(|engine| engine.sim.names.iter().cloned());
        let mut names: Vec<String> = own.chain(self.adapters()).collect();
        names.sort();
        names.dedup();
        names
    }

    /// The adapters of all traffic, in order of first use.
    pub(crate) fn adapters(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for name in self.traffic.iter().flat_map(|traffic| &traffic.workload.adapters.names) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }

    /// The number, among all adapters, of adapter `adapter` of one kind of traffic.
    pub(crate) fn adapter_id(&self, traffic: usize, adapter: u32) -> u32 {
        let name = self.traffic[traffic].workload.adapters.names.get(adapter as usize);
        let all = self.adapters();
        name.and_then(|name| all.iter().position(|known| known == name)).unwrap_or(0) as u32
    }

    /// The number, among all classes, of the first class of one kind of traffic.
    pub(crate) fn class_offset(&self, traffic: usize) -> u32 {
        let before = &self.traffic[..traffic];
        before.iter().map(|traffic| traffic.workload.class_configs().len() as u32).sum()
    }
}

impl EngineSetup {
    /// vLLM with these flags (`MODEL --flag value ..`) serving `model` on `gpu`, which are names of presets or paths of their
    /// files.
    ///
    /// # Errors
    /// Flags that cannot be read or that vLLM would refuse; an unknown GPU or model.
    pub fn vllm<S: AsRef<str>>(backend: &str, gpu: &str, model: &str, flags: &[S]) -> Result<Self, LabError> {
        let name = || backend.to_owned();
        let profile = || Profile::new(Gpu::load(gpu)?, Model::load(model)?, Layout::default(), &Constants::fitted());
        let profile = profile().map_err(|source| LabError::Profile { backend: name(), source })?;
        let args = ServeArgs::parse(flags).map_err(|source| LabError::Flags { backend: name(), source })?;
        let sim = SimConfig::from_args(&args, profile);
        let sim = sim.map_err(|source| LabError::Engine { backend: name(), source: Box::new(source) })?;
        Ok(Self { backend: name(), sim, changes: Vec::new() })
    }

    /// The same engine, to which `change` happens at `at`.
    #[must_use]
    pub fn changing(mut self, at: Duration, change: EngineChange) -> Self {
        self.changes.push((at, change));
        self
    }
}
