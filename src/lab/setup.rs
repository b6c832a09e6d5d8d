//! The setup of a simulation: the gateway's configuration, an engine for each backend, traffic.
//!
//! A [`Lab`] is plain data. It can be run with many seeds, on several threads at once.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;

use crate::autoscale_rules::Autoscale;
use crate::error::LabError;
use sluice_bench::{RunConfig, RunPlan};
use sluice_config::{Config, Endpoint};
use sluice_core::vllm::args::ServeArgs;
use sluice_core::vllm::flags::write;
use sluice_online::engines::flags::{EngineFlag, Flags};
use sluice_online::engines::forecast::{EngineAnswer, EngineQuestion};
use sluice_online::limits::forecast::{LimitsAnswer, LimitsQuestion};
use sluice_sim::{Constants, Gpu, Layout, Model, Profile, SimConfig};

/// Virtual time after the last request at which a run ends, even with unfinished requests.
pub const GIVE_UP_AFTER: Duration = Duration::from_secs(3600);

/// The setup of a simulation.
#[derive(Clone, Debug)]
pub struct Lab {
    /// The gateway's configuration. Addresses only identify engines.
    pub config: Arc<Config>,
    /// One engine for each backend of the configuration.
    pub engines: Vec<EngineSetup>,
    /// Kinds of traffic, which are sent at the same time. Their seeds are derived from the seed of
    /// the run. The first kind uses that seed itself, so it sends the same requests as `sluice
    /// bench --seed`.
    pub traffic: Vec<RunPlan>,
    /// The tenant of each traffic; `None`, or a missing entry, names none.
    pub tenants: Vec<Option<HeaderValue>>,
    /// Time after which a client that has no complete response leaves.
    pub client_timeout: Option<Duration>,
    /// Virtual time after the last request was sent (in a closed loop also: after the last one
    /// ended) at which the run ends. Requests that have not ended by then are unfinished.
    pub give_up_after: Duration,
    /// Whether the gateway runs the engines. It then gives an engine no more sequences than
    /// `max-num-seqs`.
    pub launched: bool,
    /// Faults of engines with certain flags. The tuner does not know them.
    pub plants: Vec<Plant>,
    /// Simulates for the online tuner; `None`: the tuner acts without forecasts.
    pub forecaster: Option<Forecaster>,
    /// Starts and stops engines of the only pool; `None`: all engines run from the start to the
    /// end.
    pub autoscale: Option<Autoscale>,
}

/// Answers a question by simulation, with the configuration and engines of a lab and a seed.
#[derive(Clone, Copy, Debug)]
pub struct Forecaster {
    /// Answers questions about flags of engines.
    pub flags: fn(&Lab, &EngineQuestion, u64) -> EngineAnswer,
    /// Answers questions about limits; `None`: limits are tried without a simulation.
    pub limits: Option<fn(&Lab, &LimitsQuestion, u64) -> LimitsAnswer>,
}

/// The simulated engine of one backend.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    /// Name of the backend in the configuration. Backends of that name in several pools share the
    /// engine.
    pub backend: String,
    /// Settings of the engine. The seed in them is replaced.
    pub sim: SimConfig,
    /// Changes during the run, with their times from the start, in any order.
    pub changes: Vec<(Duration, EngineChange)>,
    /// The inputs from which the engine was made, for changes of flags.
    recipe: Option<Recipe>,
    pub(crate) fault: Option<PlantedFault>,
}

#[derive(Clone, Debug, PartialEq)]
struct Recipe {
    gpu: String,
    host: Option<String>,
    model: String,
    flags: Vec<String>,
}

/// A fault of engines that run with this value of a flag.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plant {
    /// The flag.
    pub flag: EngineFlag,
    /// The value.
    pub value: f64,
    /// The fault.
    pub fault: PlantedFault,
}

/// A fault of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PlantedFault {
    /// Everything takes this many times as long.
    Slower(f64),
    /// The engine crashes when a request arrives while the engine has this many.
    CrashesAt(usize),
    /// The engine hangs when a request arrives while the engine has this many.
    HangsAt(usize),
    /// Prompts with more tokens than this fail.
    FailsAbove(u32),
    /// The engine does not start.
    RefusesToStart,
}

/// A change of an engine during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EngineChange {
    /// Every operation takes this many times as long. The factor is above 0; 1 restores the usual
    /// speed.
    Slower(f64),
    /// The engine stops at once: streams break, connections are refused and probes fail.
    Stop,
    /// The engine starts again, with empty caches.
    Start,
    /// No step ends any more. The API server still accepts requests and answers `/health`.
    Hang,
    /// Steps continue after a hang.
    Resume,
    /// Everything that the engine does next is delayed by this time.
    Stall(Duration),
}

impl Lab {
    /// A setup whose runs end [`GIVE_UP_AFTER`] after the last request was sent.
    pub fn new(config: Config, engines: Vec<EngineSetup>, traffic: Vec<RunPlan>) -> Self {
        Self {
            config: Arc::new(config),
            engines,
            traffic,
            tenants: Vec::new(),
            client_timeout: None,
            give_up_after: GIVE_UP_AFTER,
            launched: false,
            plants: Vec::new(),
            forecaster: None,
            autoscale: None,
        }
    }
}

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
        let mut addresses: Vec<Option<Endpoint>> = vec![None; self.engines.len()];
        for (address, engine) in self.addresses()? {
            if addresses[engine].get_or_insert_with(|| address.clone()) != &address {
                return Err(LabError::OneName(self.engines[engine].backend.clone()));
            }
        }
        Ok(())
    }

    /// Address of each backend and index of the backend's engine, pool by pool.
    pub(crate) fn addresses(&self) -> Result<Vec<(Endpoint, usize)>, LabError> {
        let backends = self.config.pools.iter().flat_map(|pool| &pool.backends);
        let engine = |backend: &sluice_config::Backend| {
            let found = self.engines.iter().position(|engine| engine.backend == backend.name);
            let found = found.ok_or_else(|| LabError::NoEngine(backend.name.clone()))?;
            Ok((backend.target.endpoint(), found))
        };
        backends.map(engine).collect()
    }

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

    /// The adapters of all traffic and of arms, by number.
    pub(crate) fn adapter_names(&self) -> Vec<String> {
        let mut names = self.adapters();
        for (name, _) in self.arm_models().into_iter().filter(|(_, number)| number.is_some()) {
            if !names.iter().any(|known| **known == *name) {
                names.push(name.to_string());
            }
        }
        names
    }

    /// Models that arms send, each with a number as an adapter; `None` if an engine serves the
    /// model as a base model.
    pub(crate) fn arm_models(&self) -> Vec<(Arc<str>, Option<u16>)> {
        let mut adapters = self.adapters();
        let mut models = Vec::new();
        let arms = self.config.experiments.iter().flat_map(|experiment| &experiment.arms);
        for name in arms.filter_map(|arm| arm.model.as_deref()) {
            let is_own = self.engines.iter().any(|engine| engine.sim.names.iter().any(|own| own == name));
            if !is_own && !adapters.iter().any(|known| known == name) {
                adapters.push(name.to_owned());
            }
            let number = adapters.iter().position(|known| known == name).and_then(|number| u16::try_from(number).ok());
            models.push((name.into(), number.filter(|_| !is_own)));
        }
        models
    }

    pub(crate) fn adapter_id(&self, traffic: usize, adapter: u32) -> u32 {
        let name = self.traffic[traffic].workload.adapters.names.get(adapter as usize);
        let all = self.adapters();
        name.and_then(|name| all.iter().position(|known| known == name)).unwrap_or(0) as u32
    }

    /// The place of one traffic's first class in the list of the classes of all traffic.
    pub(crate) fn class_offset(&self, traffic: usize) -> u32 {
        let before = &self.traffic[..traffic];
        before.iter().map(|traffic| traffic.workload.class_configs().len() as u32).sum()
    }

    pub(crate) fn run_config(&self) -> RunConfig {
        let urls = self.engines.iter().map(|engine| engine.backend.clone()).collect();
        let first = &self.traffic[0];
        let mut config = first.config(urls, first.workload.api.path());
        "sluice lab".clone_into(&mut config.backend);
        config.adapters = self.adapters();
        for other in &self.traffic[1..] {
            config.classes.extend(other.workload.class_configs());
            config.request_rate = config.request_rate.zip(other.arrival.rate()).map(|(one, two)| one + two);
            "mixed".clone_into(&mut config.arrival);
        }
        config
    }
}

impl EngineSetup {
    /// vLLM with these flags (`MODEL --flag value ..`), serving `model` on `gpu` of a machine like
    /// `host` (default: `busy`). GPU, host and model are presets or paths of files.
    pub fn vllm<S: AsRef<str>>(
        backend: &str,
        gpu: &str,
        host: Option<&str>,
        model: &str,
        flags: &[S],
    ) -> Result<Self, LabError> {
        let name = || backend.to_owned();
        let profile = || {
            let constants = host.map_or_else(|| Ok(Constants::fitted()), Constants::on_host)?;
            Profile::new(Gpu::load(gpu)?, Model::load(model)?, Layout::default(), &constants)
        };
        let profile = profile().map_err(|source| LabError::Profile { backend: name(), source })?;
        let args = ServeArgs::parse(flags).map_err(|source| LabError::Flags { backend: name(), source })?;
        let sim = SimConfig::from_args(&args, profile);
        let sim = sim.map_err(|source| LabError::Engine { backend: name(), source: Box::new(source) })?;
        let flags = flags.iter().map(|flag| flag.as_ref().to_owned()).collect();
        let recipe = Recipe { gpu: gpu.to_owned(), host: host.map(str::to_owned), model: model.to_owned(), flags };
        Ok(Self { backend: name(), sim, changes: Vec::new(), recipe: Some(recipe), fault: None })
    }

    /// The same engine with the acceptance of drafts of another engine, because a change of flags
    /// keeps the acceptance.
    fn with_acceptance_of(mut self, other: &Self) -> Self {
        let known = other.sim.engine.speculation.as_ref().map(|own| own.acceptance.clone());
        if let (Some(own), Some(known)) = (&mut self.sim.engine.speculation, known) {
            own.acceptance = known;
        }
        self
    }

    /// Sets the acceptance of drafts by position.
    ///
    /// # Errors
    /// The rates cannot be shares of the same drafts.
    pub fn set_acceptance(&mut self, acceptance: &[f64]) -> Result<(), LabError> {
        let set = self.sim.set_acceptance(acceptance);
        set.map_err(|reason| LabError::Acceptance { backend: self.backend.clone(), reason })
    }

    /// The name or the path of the GPU, if the engine was made from flags.
    pub fn gpu(&self) -> Option<&str> {
        self.recipe.as_ref().map(|recipe| recipe.gpu.as_str())
    }

    /// Whether the flags can be changed, because the engine was made from flags.
    pub fn can_change(&self) -> bool {
        self.recipe.is_some()
    }

    /// The same engine with another value of a flag.
    pub fn with_flag(&self, flag: EngineFlag, value: f64) -> Result<Self, LabError> {
        let Some(Recipe { gpu, host, model, flags }) = &self.recipe else {
            return Err(LabError::NoEngine(self.backend.clone()));
        };
        let mut flags = flags.clone();
        write::write(flag.name(), &flag.written::<Infallible>(value), &mut flags);
        let made = Self::vllm(&self.backend, gpu, host.as_deref(), model, &flags)?;
        Ok(Self { changes: self.changes.clone(), ..made.with_acceptance_of(self) })
    }

    /// Values of the flags that the tuner may change, with defaults.
    pub fn flags(&self) -> Flags {
        let (engine, sim) = (&self.sim.engine, &self.sim);
        Flags::from([
            (EngineFlag::MaxNumSeqs, f64::from(engine.max_num_seqs)),
            (EngineFlag::MaxNumBatchedTokens, f64::from(engine.max_num_batched_tokens)),
            (EngineFlag::LongPrefillTokenThreshold, f64::from(engine.long_prefill_token_threshold)),
            (EngineFlag::PrefillScheduleInterval, f64::from(engine.prefill_schedule_interval)),
            (EngineFlag::MaxCudagraphCaptureSize, f64::from(sim.graphs.largest())),
            (EngineFlag::GpuMemoryUtilization, (sim.utilisation * 100.0).round() / 100.0),
        ])
    }

    pub(crate) fn planted(&self, plants: &[Plant]) -> Self {
        let flags = self.flags();
        let found = plants.iter().find(|plant| flags.get(&plant.flag) == Some(&plant.value));
        Self { fault: found.map(|plant| plant.fault), ..self.clone() }
    }

    /// Adds a change at time `at` from the start of the run.
    #[must_use]
    pub fn changing(mut self, at: Duration, change: EngineChange) -> Self {
        self.changes.push((at, change));
        self
    }
}
