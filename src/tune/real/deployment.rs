//! A setting on real engines: the flags of each engine, and the configuration of the gateway.
//!
//! Engines are the configured backends that have `launch`, with `launch.args` overridden by the
//! setting. The gateway is private to this program: on loopback ports that the system chooses,
//! without keys, TLS and access log, with all engines as external backends.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use crate::error::TuneError;
use crate::setting::{RestartCost, Setting, variant};
use crate::space::Space;
use sluice_bench::RunPlan;
use sluice_config::{Address, Auth, Config, ModelScope, Pool, Target};
use sluice_fleet::driver::EngineSettings;
use sluice_fleet::{TrialSpec, ports};
use sluice_lab::Scenario;

#[derive(Debug)]
pub(super) struct Deployment {
    config: Config,
    pub(super) settings: Vec<EngineSettings>,
    pub(super) traffic: Vec<RunPlan>,
}

impl Deployment {
    pub(super) fn new(scenario: &Scenario, setting: &Setting) -> Result<Self, TuneError> {
        let variant = variant(setting)?;
        let (config, mut traffic) = scenario.deployment(&variant)?;
        let mut settings = Vec::new();
        for backend in config.pools.iter().flat_map(|pool| &pool.backends) {
            let Target::Launch(_) = backend.target else { continue };
            let Some((_, args)) = backend.target.without_settings() else { continue };
            let own = variant.engine.get(&backend.name).cloned().unwrap_or_default();
            settings.push(EngineSettings { args }.with(&variant.args).with(&own));
        }
        for plan in &mut traffic {
            plan.scrape = Vec::new();
        }
        Ok(Self { config, settings, traffic })
    }

    /// Whether the tuning needs a gateway: for several engines, or for keys of the gateway in the
    /// space.
    pub(super) fn needs_gateway(&self, space: &Space) -> bool {
        let backends = self.config.pools.iter().map(|pool| pool.backends.len()).sum::<usize>();
        backends > 1 || space.keys().any(|key| RestartCost::of(key) == RestartCost::None)
    }

    /// Whether the configuration has models, by whose names clients send requests.
    pub(super) fn has_models(&self) -> bool {
        !self.config.models.is_empty()
    }

    /// The engines, each with a port; `folder` keeps the ports that are not configured.
    pub(super) fn engines(&self, folder: &Path) -> Result<Vec<TrialSpec>, TuneError> {
        let mut engines = Vec::new();
        for pool in &self.config.pools {
            for backend in &pool.backends {
                let name = format!("{}/{}", pool.name, backend.name);
                if let Target::Control(..) = backend.target {
                    return Err(TuneError::Deployment(format!(
                        "{name} has control; the tuner starts engines itself, so give it launch"
                    )));
                }
                let Some((Target::Launch(launch), _)) = backend.target.without_settings() else { continue };
                let address = Arc::new(Address::of(backend));
                let (models, fleet) = (self.served(pool), &self.config.fleet);
                let (grace, start_timeout_scale) = (fleet.grace, fleet.start_timeout_scale);
                engines.push(TrialSpec { name, address, launch, models, grace, start_timeout_scale });
            }
        }
        if engines.is_empty() {
            let text = "no backend of the configuration has launch: with --real the tuner starts the engines itself; write \
                        [pool.backend.launch] with the command that starts one";
            return Err(TuneError::Deployment(text.to_owned()));
        }
        let without: Vec<_> =
            engines.iter().filter(|spec| spec.launch.port == 0).map(|s| (s.name.clone(), None)).collect();
        let urls = self.config.pools.iter().flat_map(|pool| &pool.backends).map(|b| b.target.endpoint().port);
        let given = ports::assign(folder, &self.config.fleet.ports, &without, &urls.collect())?;
        for spec in &mut engines {
            if let Some(port) = given.get(&spec.name) {
                spec.launch.port = *port;
                let mut address = (*spec.address).clone();
                address.endpoint.port = *port;
                address.authority = address.endpoint.authority().into();
                spec.address = Arc::new(address);
            }
        }
        Ok(engines)
    }

    /// The models that the engines of a pool must serve, without adapters.
    fn served(&self, pool: &Pool) -> Vec<String> {
        let models = match &pool.models {
            ModelScope::All => self.config.models.iter().collect::<Vec<_>>(),
            ModelScope::Only(ids) => ids.iter().map(|id| &self.config.models[id.index()]).collect(),
        };
        models.into_iter().map(|model| model.name.clone()).collect()
    }

    pub(super) fn gateway(&self, engines: &[TrialSpec], folder: &Path) -> Config {
        let mut config = self.config.clone();
        for pool in &mut config.pools {
            for backend in &mut pool.backends {
                let name = format!("{}/{}", pool.name, backend.name);
                if let Some(spec) = engines.iter().find(|spec| spec.name == name) {
                    backend.target = Target::Url(spec.address.endpoint.clone());
                }
            }
        }
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        (config.server.listen, config.server.admin) = (any, any);
        config.auth = Auth { admin_token: None, keys: Vec::new() };
        config.server.tls = None;
        (config.access_log, config.tracing) = (None, None);
        // A gateway without engines writes nothing there.
        config.fleet.state = folder.join("gateway");
        config
    }
}
