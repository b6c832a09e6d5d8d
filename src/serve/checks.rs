//! The checks that a configuration passes before it is put in force, beyond those that its text alone allows.
//!
//! `sluice check`, `sluice serve` and a reload call [`check`]; a restart through the admin API passes the same checks of an
//! engine ([`check_settings`]). So nothing is called valid that is refused a moment later. Nothing is started or bound. A
//! program of vLLM is run once for each version, to list its flags. Bound of that at a start: [`START_FLAGS_MAX`].

use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::app::{StartError, load_counters};
use super::engines;
use crate::config::{ClusterLeader, Config, Loaded, LogTarget, Problem, Problems, Situation, Target};
use crate::fleet::driver::{EngineSettings, SharedDriver};
use crate::fleet::{EngineSpec, check_settings, check_state, check_values, is_running};
use crate::flow::specs;
use crate::owner::check_named_file;
use crate::pool::Admission;

/// The longest that a start waits for the list of flags of an engine's program; without it, the engine's own start checks them.
/// Clients are not served meanwhile.
const START_FLAGS_MAX: Duration = Duration::from_secs(20);

/// What a configuration is checked for.
#[derive(Clone, Copy, Debug)]
pub enum Purpose<'c> {
    /// To say whether it could be used. Nothing is written.
    Look,
    /// To start a gateway with it. An engine that runs already is adopted, whatever its configuration says. Where one of
    /// several gateways leads, engines are left to that one: the others may have no program for them.
    Start,
    /// To replace the configuration that runs. Engines that do not change are left alone.
    Reload(&'c Config),
}

/// Checks a configuration that is valid by itself. Returns remarks, each with the key that it is about.
///
/// # Errors
/// Everything that would be refused.
pub async fn check(loaded: &Loaded, purpose: Purpose<'_>) -> Result<Vec<String>, Problems> {
    let mut found = Found { loaded, errors: Vec::new(), remarks: Vec::new() };
    if let Purpose::Look = purpose {
        // A start and a reload load them anyway.
        found.check_tokenizers();
    }
    found.check_files();
    found.check_pods();
    let mut config = loaded.config.clone();
    let is_elected = config.cluster.as_ref().is_some_and(|cluster| cluster.leader != ClusterLeader::None);
    let runs_engines = engines::any(&config) && !(is_elected && matches!(purpose, Purpose::Start));
    if runs_engines {
        found.check_ports(&mut config, purpose);
        found.check_engines(&config, purpose).await;
    }
    let Found { errors, remarks, .. } = found;
    if errors.is_empty() {
        return Ok(remarks);
    }
    let mut problems = Problems { source: loaded.source.clone(), errors, warnings: Vec::new() };
    problems.errors.sort_by_key(Problem::origin);
    Err(problems)
}

/// What was found so far.
struct Found<'l> {
    loaded: &'l Loaded,
    errors: Vec<Problem>,
    remarks: Vec<String>,
}

impl Found<'_> {
    fn refuse(&mut self, path: String, situation: Situation) {
        self.errors.push(Problem::at(path, &self.loaded.origins, situation));
    }

    fn check_tokenizers(&mut self) {
        // One after the other, so that each has its own problem.
        for (index, model) in self.loaded.config.models.iter().enumerate() {
            let alone = Config { models: vec![model.clone()], ..self.loaded.config.clone() };
            if let Err(StartError::Tokenizer { source, .. }) = load_counters(&alone, None) {
                let situation = Situation::Unusable { reason: source.to_string() };
                self.refuse(format!("model[{index}].tokenizer"), situation);
            }
        }
    }

    /// Files and folders that the gateway writes. That a missing file can be made is seen by making it only.
    fn check_files(&mut self) {
        let config = &self.loaded.config;
        let mut files = Vec::new();
        if let Some(LogTarget::File(file)) = config.access_log.as_ref().map(|log| &log.path) {
            files.push(("access_log.path", file.clone()));
        }
        files.extend(config.records.as_ref().map(|records| ("records.path", records.path.clone())));
        for (key, file) in files.iter().filter(|(_, file)| file.is_file()) {
            if let Err(error) = std::fs::OpenOptions::new().append(true).open(file) {
                let reason = format!("{} cannot be written: {error}", file.display());
                self.refuse((*key).to_owned(), Situation::Unusable { reason });
            }
        }
        if let Some(records) = &config.records
            && let Err(untrusted) = check_named_file(&records.path)
        {
            self.refuse("records.path".to_owned(), Situation::Unusable { reason: untrusted.to_string() });
        }
        let state = &self.loaded.config.fleet.state;
        // Also without engines: experiments, the tuner's limits and the socket for upgrades are
        // there.
        if let Err(untrusted) = check_state(state) {
            self.refuse("fleet.state".to_owned(), Situation::Unusable { reason: untrusted.to_string() });
        }
        let place = std::path::absolute(state).unwrap_or_else(|_| state.clone());
        let is_used = engines::any(&self.loaded.config);
        if let Some(blocking) = place.ancestors().find(|path| path.exists()).filter(|path| is_used && !path.is_dir()) {
            let reason = format!("{} is not a folder; name one that the gateway may write to", blocking.display());
            self.refuse("fleet.state".to_owned(), Situation::Unusable { reason });
        }
    }

    /// The pods are found later; their flags are known.
    fn check_pods(&mut self) {
        for (index, pool) in self.loaded.config.pools.iter().enumerate() {
            let Some(pods) = &pool.kubernetes else { continue };
            if let Err(failure) = check_values(&EngineSettings { args: pods.args.clone() }) {
                let situation = Situation::EngineUnfit { reason: failure.to_string() };
                self.refuse(format!("pool[{index}].kubernetes.args"), situation);
            }
        }
    }

    /// Gives each engine the port that it would get.
    fn check_ports(&mut self, config: &mut Config, purpose: Purpose<'_>) {
        let running = if let Purpose::Reload(running) = purpose { Some(running) } else { None };
        if let Err(error) = engines::settle_ports(config, running, false) {
            self.refuse("fleet.ports".to_owned(), Situation::Unusable { reason: error.to_string() });
        }
    }

    async fn check_engines(&mut self, config: &Config, purpose: Purpose<'_>) {
        let running = match purpose {
            Purpose::Reload(running) => specs_of(running),
            Purpose::Look | Purpose::Start => Vec::new(),
        };
        for (path, spec) in paths(config).into_iter().zip(specs_of(config)) {
            let is_same = |other: &EngineSpec| {
                (&other.name, &other.target, &other.settings) == (&spec.name, &spec.target, &spec.settings)
                    && other.adapters == spec.adapters
            };
            let adopted = matches!(purpose, Purpose::Start) && is_running(&spec.rules.state, &spec.name);
            if adopted || running.iter().any(is_same) {
                continue;
            }
            let driver = driver(&spec, purpose);
            let checked = check_settings(&*driver, &spec, &spec.settings);
            let limit = if matches!(purpose, Purpose::Start) { START_FLAGS_MAX } else { Duration::MAX };
            match timeout(limit, checked).await {
                Ok(Ok(notices)) => self.remarks.extend(notices.iter().map(|notice| format!("{path}: {notice}"))),
                Ok(Err(failure)) => self.refuse(path, Situation::EngineUnfit { reason: failure.to_string() }),
                Err(_) => self.remarks.push(format!(
                    "{path}: its program has not listed its flags within {} s; they are checked when the engine starts",
                    limit.as_secs()
                )),
            }
        }
    }
}

fn driver(spec: &EngineSpec, purpose: Purpose<'_>) -> SharedDriver {
    match purpose {
        Purpose::Look => engines::driver_for_checks(spec),
        Purpose::Start | Purpose::Reload(_) => engines::driver(spec),
    }
}

/// The engines of a configuration that is not in force.
fn specs_of(config: &Config) -> Vec<EngineSpec> {
    let health = specs::health_rules(&config.health);
    let now = Instant::now();
    let layout = Admission::new(now, health, 0).apply(&specs::pools(config), health, now);
    // Digests are for the journal.
    engines::engines(config, &layout, |_| String::new())
}

/// The keys of those engines, in the same order.
fn paths(config: &Config) -> Vec<String> {
    let mut paths = Vec::new();
    for (index, pool) in config.pools.iter().enumerate() {
        for (number, backend) in pool.backends.iter().enumerate() {
            let key = match &backend.target {
                Target::Url(_) => continue,
                Target::Launch(_) => "launch",
                Target::Control(..) => "control",
                Target::Pod(..) => "args",
            };
            paths.push(format!("pool[{index}].backend[{number}].{key}"));
        }
    }
    paths
}
