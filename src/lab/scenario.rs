//! Turns a scenario file and a variant into a [`Lab`]: configuration, engines, traffic.
//!
//! Flags of vLLM come from three places, in order of precedence: the variant, `[[engine]]` of the
//! file, and `launch.args` or `control.args` of the backend. A secret that is not in the
//! environment gets a placeholder, because a simulation uses none.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use crate::error::LabError;
use crate::file::{EngineTable, LabFile, Variant};
use crate::forecast::{forecast, forecast_limits};
use crate::setup::{EngineChange, EngineSetup, Forecaster, Lab};
use crate::traffic::{TrafficDefaults, tenant};
use sluice_bench::RunPlan;
use sluice_config::{ArgValue, Backend, Config, Endpoint, Launch, Machine, Surroundings, Target, TunerMode};
use sluice_core::vllm::flags::table::setting;
use sluice_core::vllm::flags::write;

pub(crate) const GPU: &str = "h200";
const MODEL: &str = "llama-3.1-8b";
/// Placeholder addresses of engines begin here in a file without a configuration.
const FIRST_PORT: usize = 8000;
const MAX_ENGINES: usize = 4096;

/// A scenario file and the folder that contains it.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The content of the file.
    pub file: LabFile,
    /// The folder to which paths in the file are relative.
    pub folder: PathBuf,
}

impl Scenario {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self, LabError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| LabError::File { path: name.clone(), reason: error.to_string() })?;
        let folder = path.parent().unwrap_or(Path::new(".")).to_owned();
        Ok(Self { file: LabFile::parse(&text, &name)?, folder })
    }

    /// The setup of one variant.
    pub fn lab(&self, variant: &Variant) -> Result<Lab, LabError> {
        let secret = |name: &str| std::env::var(name).ok().or_else(|| Some(stand_in(name)));
        let mut config = self.config(variant, &secret, Machine::with_cores(1))?;
        self.check_tables(&config, self.configured(variant) != (&None, &None))?;
        // A name is unknown only if no backend has it, neither before nor after the number of
        // engines changes.
        let mut unknown: Vec<&String> = variant.engine.keys().filter(|name| !has_backend(&config, name)).collect();
        let copies = variant.count.map(|count| set_engines(&mut config, count as usize)).transpose()?;
        unknown.retain(|name| !has_backend(&config, name));
        if let Some(name) = unknown.first() {
            return Err(LabError::NoBackend((*name).clone()));
        }
        assign_ports(&mut config);
        let engines = self.engines(&config, &copies.unwrap_or_default(), variant)?;
        let traffic = self.traffic(&config, variant)?;
        let client_timeout = self.file.client_timeout.map(|period| period.0);
        // The tuner may restart engines only if the gateway runs them.
        let launched = config.tuner.mode == TunerMode::Apply;
        let autoscale = variant.autoscale.as_ref().or(self.file.autoscale.as_ref()).cloned();
        if let Some(rules) = &autoscale {
            rules.check(config.pools.len(), engines.len())?;
        }
        let forecaster = Some(Forecaster { flags: forecast, limits: Some(forecast_limits) });
        let tenants = self.file.traffic.iter().map(tenant).collect::<Result<_, _>>()?;
        Ok(Lab { tenants, client_timeout, launched, forecaster, autoscale, ..Lab::new(config, engines, traffic) })
    }

    /// The configuration and traffic for real engines, with the secrets and the size of this
    /// machine.
    pub fn deployment(&self, variant: &Variant) -> Result<(Config, Vec<RunPlan>), LabError> {
        let secret = |name: &str| std::env::var(name).ok();
        let config = self.config(variant, &secret, Machine::of_process())?;
        let traffic = self.traffic(&config, variant)?;
        Ok((config, traffic))
    }

    fn traffic(&self, config: &Config, variant: &Variant) -> Result<Vec<RunPlan>, LabError> {
        let model = config.models.first().map_or_else(|| self.model(), |model| model.name.clone());
        let duration = self.file.duration.map(|period| period.0);
        let defaults = TrafficDefaults { folder: &self.folder, model, duration, load: variant.load };
        self.file.traffic.iter().map(|table| defaults.plan(table)).collect()
    }

    fn model(&self) -> String {
        self.file.engine.iter().find_map(|engine| engine.model.clone()).unwrap_or_else(|| MODEL.to_owned())
    }

    /// Path and text of the variant's configuration; if the variant has none, path and text of the
    /// file's configuration.
    fn configured<'a>(&'a self, variant: &'a Variant) -> (&'a Option<PathBuf>, &'a Option<String>) {
        match (&variant.config, &variant.gateway) {
            (None, None) => (&self.file.config, &self.file.gateway),
            own => own,
        }
    }

    fn config(
        &self,
        variant: &Variant,
        env: &dyn Fn(&str) -> Option<String>,
        machine: Machine,
    ) -> Result<Config, LabError> {
        let (text, source, folder) = match self.configured(variant) {
            (Some(_), Some(_)) => return Err(LabError::TwoConfigurations),
            (Some(path), None) => {
                let path = self.folder.join(path);
                let name = path.display().to_string();
                let text = std::fs::read_to_string(&path)
                    .map_err(|error| LabError::File { path: name.clone(), reason: error.to_string() })?;
                (text, name, path.parent().unwrap_or(Path::new(".")).to_owned())
            }
            (None, Some(text)) => (text.clone(), "gateway".to_owned(), self.folder.clone()),
            (None, None) => (self.one_pool()?, "one pool".to_owned(), self.folder.clone()),
        };
        let folder = std::path::absolute(&folder).unwrap_or(folder);
        let around = Surroundings { env, folder, machine };
        let sets = [&self.file.set[..], &variant.set].concat();
        let loaded = Config::parse(&text, &source, &sets, &around);
        loaded.map(|loaded| loaded.config).map_err(|problems| LabError::Config(problems.to_string()))
    }

    fn one_pool(&self) -> Result<String, LabError> {
        let mut text = format!("[[model]]\nname = \"{0}\"\n[[pool]]\nname = \"all\"\nmodels = [\"*\"]\n", self.model());
        let engines = self.unconfigured();
        if engines.is_empty() || engines.len() > MAX_ENGINES {
            return Err(LabError::EngineCount(engines.len(), MAX_ENGINES));
        }
        for (place, (name, _)) in engines.iter().enumerate() {
            let port = FIRST_PORT + place;
            text += &format!("[[pool.backend]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{port}\"\n");
        }
        Ok(text)
    }

    /// Engines of a file without a configuration, named as in the file or gpu0, gpu1, ..
    fn unconfigured(&self) -> Vec<(String, Option<&EngineTable>)> {
        if self.file.engine.is_empty() {
            return vec![("gpu0".to_owned(), None)];
        }
        let mut engines = Vec::new();
        for table in &self.file.engine {
            let count = table.count.unwrap_or(1) as usize;
            let from = engines.len();
            match table.backend.is_empty() {
                true => {
                    let places = from..from + count.min(MAX_ENGINES + 1);
                    engines.extend(places.map(|place| (format!("gpu{place}"), Some(table))));
                }
                false => engines.extend(table.backend.iter().map(|name| (name.clone(), Some(table)))),
            }
        }
        engines
    }

    /// The engines of all backends. `copies` maps a copied backend to the original.
    fn engines(
        &self,
        config: &Config,
        copies: &BTreeMap<String, String>,
        variant: &Variant,
    ) -> Result<Vec<EngineSetup>, LabError> {
        let mut backends: Vec<&Backend> = config.pools.iter().flat_map(|pool| &pool.backends).collect();
        let mut seen = BTreeSet::new();
        backends.retain(|backend| seen.insert(&backend.name));
        let unconfigured = if self.configured(variant) == (&None, &None) { self.unconfigured() } else { Vec::new() };
        let default = EngineTable::default();
        let setup = |backend: &Backend| {
            let name = copies.get(&backend.name).unwrap_or(&backend.name);
            let tables = &self.file.engine;
            let own = tables.iter().find(|table| table.backend.contains(name));
            let numbered = || unconfigured.iter().find(|(other, _)| other == name).and_then(|(_, table)| *table);
            let table = own.or_else(numbered).or_else(|| tables.iter().find(|table| table.backend.is_empty()));
            engine(backend, table.unwrap_or(&default), variant, &self.folder)
        };
        backends.into_iter().map(setup).collect()
    }

    /// Checks that every backend that the file names exists and has one `[[engine]]`. With a
    /// configuration of the gateway, also checks that at most one table names no backend and that
    /// none has a count.
    fn check_tables(&self, config: &Config, is_configured: bool) -> Result<(), LabError> {
        let mut named = BTreeSet::new();
        for name in self.file.engine.iter().flat_map(|table| &table.backend) {
            if !has_backend(config, name) {
                return Err(LabError::NoBackend(name.clone()));
            }
            if !named.insert(name) {
                return Err(LabError::TwoEngines(name.clone()));
            }
        }
        if !is_configured {
            return Ok(());
        }
        if let Some(count) = self.file.engine.iter().find_map(|table| table.count) {
            return Err(LabError::CountWithConfiguration(count));
        }
        match self.file.engine.iter().filter(|table| table.backend.is_empty()).count() {
            0 | 1 => Ok(()),
            defaults => Err(LabError::TwoDefaults(defaults)),
        }
    }
}

/// Gives the only pool `count` backends: the given ones, then copies in turn. Returns the original
/// of each copy.
fn set_engines(config: &mut Config, count: usize) -> Result<BTreeMap<String, String>, LabError> {
    let [pool] = &mut config.pools[..] else { return Err(LabError::PoolCount(config.pools.len())) };
    if count == 0 || count > MAX_ENGINES {
        return Err(LabError::EngineCount(count, MAX_ENGINES));
    }
    let given = pool.backends.clone();
    if given.is_empty() {
        return Err(LabError::OnlyPods(pool.name.clone()));
    }
    let mut copies = BTreeMap::new();
    pool.backends.truncate(count);
    for place in given.len()..count {
        let (of, port) = (&given[place % given.len()], FIRST_PORT + place);
        let name = format!("{}-{}", of.name, place / given.len() + 1);
        let host = format!("copy-{port}.invalid");
        let endpoint = Endpoint { https: false, host, port: 1, prefix: String::new() };
        copies.insert(name.clone(), of.name.clone());
        pool.backends.push(Backend { name, target: moved(&of.target, endpoint), ..of.clone() });
    }
    Ok(copies)
}

/// A placeholder for a secret that is not set. It is also valid as the SHA-256 of a key.
fn stand_in(name: &str) -> String {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    format!("{:064x}", hasher.finish())
}

fn has_backend(config: &Config, name: &str) -> bool {
    config.pools.iter().flat_map(|pool| &pool.backends).any(|backend| backend.name == name)
}

/// Gives each launched engine without a port a unique one.
fn assign_ports(config: &mut Config) {
    let backends = config.pools.iter_mut().flat_map(|pool| &mut pool.backends);
    for (port, backend) in (1..=u16::MAX).zip(backends) {
        if let Target::Launch(launch) = &mut backend.target
            && launch.port == 0
        {
            launch.port = port;
        }
    }
}

fn moved(target: &Target, endpoint: Endpoint) -> Target {
    match target {
        Target::Url(_) => Target::Url(endpoint),
        Target::Pod(_, engine) => Target::Pod(endpoint, engine.clone()),
        Target::Control(_, control) => Target::Control(endpoint, control.clone()),
        Target::Launch(launch) => Target::Launch(Launch { port: 0, ..launch.clone() }),
    }
}

/// A preset, or a path with the scenario's folder in front.
pub(crate) fn preset(name: &str, folder: &Path) -> String {
    let is_path = name.contains('/') || name.ends_with(".toml");
    if is_path { folder.join(name).display().to_string() } else { name.to_owned() }
}

fn engine(backend: &Backend, table: &EngineTable, variant: &Variant, folder: &Path) -> Result<EngineSetup, LabError> {
    let none = BTreeMap::new();
    let configured = backend.target.args().unwrap_or(&none);
    let mut flags: BTreeMap<String, ArgValue> = BTreeMap::new();
    let of_backend = variant.engine.get(&backend.name).unwrap_or(&none);
    for (name, value) in [configured, &table.args, &variant.args, of_backend].into_iter().flatten() {
        // All spellings of a flag (`no-`, `_`, abbreviations) are one key here, so that each
        // overrides every other.
        let (name, on) = setting(name);
        let value = if let ArgValue::Flag(given) = value { ArgValue::Flag(*given == on) } else { value.clone() };
        flags.insert(name, value);
    }
    let gpu = variant.gpu.as_ref().or(table.gpu.as_ref());
    let [gpu, host, model] = [gpu, table.host.as_ref(), table.model.as_ref()].map(|name| Some(preset(name?, folder)));
    let model = model.unwrap_or_else(|| MODEL.to_owned());
    let gpu = gpu.unwrap_or_else(|| GPU.to_owned());
    let argv = argv(&model, &flags);
    let mut setup = EngineSetup::vllm(&backend.name, &gpu, host.as_deref(), &model, &argv)?;
    if !table.acceptance.is_empty() {
        setup.set_acceptance(&table.acceptance)?;
    }
    for change in &table.change {
        let stated = [
            change.slower.map(EngineChange::Slower),
            change.stop.then_some(EngineChange::Stop),
            change.start.then_some(EngineChange::Start),
            change.hang.then_some(EngineChange::Hang),
            change.resume.then_some(EngineChange::Resume),
            change.stall.map(|period| EngineChange::Stall(period.0)),
        ];
        let mut stated = stated.into_iter().flatten();
        let (Some(what), None) = (stated.next(), stated.next()) else {
            return Err(LabError::BadChange(backend.name.clone()));
        };
        setup = setup.changing(change.at.0, what);
    }
    Ok(setup)
}

/// The words after `vllm serve`, without secrets, which no server needs.
pub fn argv(model: &str, flags: &BTreeMap<String, ArgValue>) -> Vec<String> {
    let plain = flags.iter().filter(|(_, value)| !matches!(value, ArgValue::Secret(_)));
    [vec![model.to_owned()], write::words(plain)].concat()
}
