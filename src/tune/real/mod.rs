//! Real engines as a backend: run by the fleet, measured by the load generator.
//!
//! A trial restarts only engines with changed flags. Changes of the gateway's keys are reloads. A
//! start may last as long as the engine's log shows progress. A failure because of the setting is
//! an outcome. A failure because of the machine (a taken port, a missing program, memory of another
//! process) ends the tuning, because all later trials would be worthless.
//!
//! After a killed tuner, the next tuner finds the engines by the journal and by a mark in their
//! environment, and uses or stops them.

mod deployment;
mod system;
mod in_place;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use tokio::sync::Mutex;

use crate::backend::{Backend, Started, search_goal};
use crate::error::TuneError;
use crate::setting::Setting;
use crate::space::Space;
use deployment::Deployment;
pub use in_place::{BenchEngine, Flags, InPlace};
use sluice_bench::LoadClient;
use sluice_bench::search::SearchGoal;
use sluice_config::Config;
use sluice_core::vllm::failure::FailureClass;
use sluice_fleet::{TrialEngines, TrialFailure, TrialSpec};
use sluice_lab::{Measure, Scenario};
use system::OwnEngines;
pub use system::{RealSystem, Watch};

/// Unmeasured requests to fresh engines, and the most at once.
const WARM_UP: (u64, u32) = (16, 8);
/// Time limit of a request, unless the file has a `client_timeout`.
const REQUEST_LIMIT: Duration = Duration::from_secs(600);

/// The gateway of this program. The caller provides it, because the code that starts a gateway is
/// in a crate above this one.
pub trait OwnGateway {
    /// Starts the gateway with a configuration, or gives the running gateway this configuration.
    /// Returns the address, `http://host:port`, once every backend is ready.
    fn serve(&mut self, config: Config) -> impl Future<Output = Result<String, String>>;

    /// Stops the gateway if it runs.
    fn stop(&mut self) -> impl Future<Output = ()>;
}

/// Real engines as a backend.
#[derive(Debug)]
pub struct RealEngines<G> {
    scenario: Scenario,
    measures: Vec<Measure>,
    folder: PathBuf,
    specs: Vec<TrialSpec>,
    engines: Arc<Mutex<TrialEngines>>,
    /// `None`: clients reach the only engine directly.
    gateway: Option<G>,
    runs: Arc<AtomicU32>,
}

impl<G: OwnGateway> RealEngines<G> {
    /// The engines of a scenario's configuration, with logs and journal in `folder`. Starts
    /// nothing.
    pub fn open(
        scenario: Scenario,
        space: &Space,
        measures: Vec<Measure>,
        folder: &Path,
        gateway: G,
    ) -> Result<Self, TuneError> {
        let defaults = Deployment::new(&scenario, &Setting::new())?;
        if let Some(measure) = measures.iter().find(|measure| measure.is_simulated()) {
            let text = format!("{measure} is known of simulated engines only; leave it out, or leave out --real");
            return Err(TuneError::Goal(text));
        }
        let [_] = &defaults.traffic[..] else {
            let text = "with --real give one [[traffic]]; several kinds of requests are classes of it";
            return Err(TuneError::Goal(text.to_owned()));
        };
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let specs = defaults.engines(&folder)?;
        if let Some(spec) = specs.iter().find(|spec| spec.address.endpoint.https) {
            let text = format!("{}: the load generator has no TLS; leave out ssl-certfile", spec.name);
            return Err(TuneError::Deployment(text));
        }
        let engines = Arc::new(Mutex::new(TrialEngines::open(&folder, specs.clone())?));
        let gateway = defaults.needs_gateway(space).then_some(gateway);
        Ok(Self { scenario, measures, folder, specs, engines, gateway, runs: Arc::default() })
    }

    /// Uses or stops engines of a killed tuner. Returns a line about each.
    pub async fn adopt_leftovers(&mut self) -> Result<Vec<String>, TuneError> {
        self.engines.lock().await.adopt_leftovers().await.map_err(|failure| TuneError::Engine(failure.to_string()))
    }

    /// Stops the gateway and every engine.
    pub async fn stop(&mut self) -> Result<(), TuneError> {
        if let Some(gateway) = &mut self.gateway {
            gateway.stop().await;
        }
        self.engines.lock().await.stop().await.map_err(|failure| TuneError::Engine(failure.to_string()))
    }

    async fn client(&mut self, deployment: &Deployment) -> Result<LoadClient, TuneError> {
        let limit = self.scenario.file.client_timeout.map_or(REQUEST_LIMIT, |period| period.0);
        let api = deployment.traffic[0].workload.api;
        let Some(gateway) = &mut self.gateway else {
            let address = &self.specs[0].address;
            let client = LoadClient::new(&[format!("http://{}", address.authority)], api, limit)?;
            let mut headers = HeaderMap::new();
            if let Some(key) = &address.api_key {
                let value = HeaderValue::from_str(&format!("Bearer {}", key.expose()));
                let mut value = value.map_err(|error| TuneError::Deployment(format!("api_key: {error}")))?;
                value.set_sensitive(true);
                headers.insert(AUTHORIZATION, value);
            }
            return Ok(client.with_headers(headers));
        };
        let config = deployment.gateway(&self.specs, &self.folder);
        let url = gateway.serve(config).await.map_err(TuneError::Deployment)?;
        Ok(LoadClient::new(&[url], api, limit)?)
    }

    async fn system(&mut self, deployment: &Deployment) -> Result<RealSystem, TuneError> {
        let client = self.client(deployment).await?;
        let mut plan = deployment.traffic[0].clone();
        plan.scrape = self.specs.iter().map(|spec| format!("http://{}", spec.address.authority)).collect();
        let served = self.engines.lock().await.models();
        if !deployment.has_models() && !served.contains(&plan.workload.model) {
            plan.workload.model = served.into_iter().next().unwrap_or_default();
        }
        Ok(RealSystem::new(OwnEngines(self.engines.clone()), plan, client, &self.measures, &self.runs))
    }
}

impl<G: OwnGateway> Backend for RealEngines<G> {
    type System = RealSystem;

    const REAL: bool = true;

    async fn start(&mut self, setting: &Setting) -> Result<Started<RealSystem>, TuneError> {
        let began = Instant::now();
        let deployment = Deployment::new(&self.scenario, setting)?;
        let engines = self.engines.clone();
        let mut engines = engines.lock().await;
        if let Err(failure) = engines.check(&deployment.settings).await {
            return refused(&failure, 0.0, true);
        }
        let changed = engines.changed(&deployment.settings).await;
        if changed > 0 {
            if let Some(gateway) = &mut self.gateway {
                gateway.stop().await;
            }
            if let Err(failure) = engines.run(&deployment.settings).await {
                return refused(&failure, began.elapsed().as_secs_f64(), false);
            }
        }
        drop(engines);
        let system = self.system(&deployment).await?;
        if changed > 0
            && let Err(error) = system.warm_up(WARM_UP.0, WARM_UP.1).await
        {
            return match error {
                TuneError::Died(reason) => {
                    Ok(Started::Refused { reason, seconds: began.elapsed().as_secs_f64(), foreseen: false })
                }
                error => Err(error),
            };
        }
        let seconds = if changed > 0 { began.elapsed().as_secs_f64() } else { 0.0 };
        Ok(Started::Up { system, seconds })
    }

    fn search_goal(&self, attainment: f64, requests: usize, seed: u64) -> Result<SearchGoal, TuneError> {
        let deployment = Deployment::new(&self.scenario, &Setting::new())?;
        search_goal(&deployment.traffic, attainment, requests, seed)
    }
}

/// The refusal of a setting, or an error if the failure has another reason than the setting.
fn refused(failure: &TrialFailure, seconds: f64, foreseen: bool) -> Result<Started<RealSystem>, TuneError> {
    match failure.failure.class {
        FailureClass::PortInUse
        | FailureClass::ProgramMissing
        | FailureClass::MemoryTaken
        | FailureClass::DeviceError
        | FailureClass::ModelNotFound
        | FailureClass::Network
        | FailureClass::WrongEngine
        | FailureClass::WrongModels
        | FailureClass::WontDie
        | FailureClass::MemoryKept
        | FailureClass::CommandFailed
        | FailureClass::NotOurs => Err(TuneError::Engine(failure.to_string())),
        _ => Ok(Started::Refused { reason: failure.to_string(), seconds, foreseen }),
    }
}
