//! Checks of a configuration, beyond the text, before the configuration is put in force.
//!
//! `sluice check`, `sluice serve` and a reload call [`check`]. A restart through the admin API
//! checks the engine in the same way ([`check_settings`]). Nothing is started or bound.
//!
//! A problem that the gateway may not meet when it runs is only a remark. At a [`Purpose::Look`],
//! the gateway's user is unknown, so a denied file or folder is a remark. If one of several
//! gateways leads, problems of the engines are remarks at a look, and problems of `fleet.state` at
//! a look and at a start.
//!
//! vLLM's program is run once for each version, to list the flags. A start waits
//! [`START_FLAGS_MAX`] for all programs together, and does not run a slow one again.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::Access;
use tokio::time::{Instant, timeout_at};

use crate::core::{StartError, load_counters};
use crate::engines;
use sluice_config::owner::{Untrusted, check_named_file, own_user};
use sluice_config::{ClusterLeader, Config, Loaded, LogTarget, Problem, Problems, Situation, Target};
use sluice_fleet::driver::{EngineFailure, EngineSettings, Notice, SharedDriver};
use sluice_fleet::{
    EngineSpec, InstalledDevices, JournalError, PortsError, check_devices, check_journal, check_settings, check_state,
    check_values, is_running, names_devices,
};
use sluice_gateway::flow::specs;
use sluice_gateway::pool::Admission;

/// Longest time that a start, which serves no client, waits for the flag lists of all programs.
/// Other flags are checked when the engine starts.
const START_FLAGS_MAX: Duration = Duration::from_secs(20);

const STATE: &str = "fleet.state";

/// The purpose of a check.
#[derive(Clone, Copy, Debug)]
pub enum Purpose<'c> {
    /// To see whether a gateway could use the configuration, without a start.
    Look,
    /// To start a gateway. A running engine is adopted. If one of several gateways leads, engines
    /// are left to the leader, because the others may have no program for them.
    Start,
    /// To replace the running configuration, without touching engines that do not change.
    Reload(&'c Config),
}

/// Checks a configuration whose text is valid. Returns remarks, each with the key that it is about.
///
/// # Errors
/// Every problem for which the configuration would be refused.
pub async fn check(loaded: &Loaded, purpose: Purpose<'_>) -> Result<Vec<String>, Problems> {
    let looks = matches!(purpose, Purpose::Look);
    let mut config = loaded.config.clone();
    let is_elected = config.cluster.as_ref().is_some_and(|cluster| cluster.leader != ClusterLeader::None);
    let others_lead = is_elected && !matches!(purpose, Purpose::Reload(_));
    let mut found = Found { loaded, looks, others_lead, errors: Vec::new(), remarks: Vec::new() };
    if looks {
        // A start and a reload load the tokenizers anyway.
        found.check_tokenizers();
    }
    found.check_written_files();
    found.check_pods();
    found.check_owner_of_state();
    if engines::any(&config) && !found.names(STATE) {
        found.check_state();
    }
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

struct Found<'l> {
    loaded: &'l Loaded,
    /// Nothing starts now, and the user may be another one.
    looks: bool,
    /// Only the elected leader starts the engines, perhaps on another machine.
    others_lead: bool,
    errors: Vec<Problem>,
    remarks: Vec<String>,
}

impl Found<'_> {
    fn refuse(&mut self, path: String, situation: Situation) {
        self.errors.push(Problem::at(path, &self.loaded.origins, situation));
    }

    /// Reports a problem of an engine: as a remark if another gateway may start the engine,
    /// otherwise as an error.
    fn refuse_engine(&mut self, path: String, situation: Situation) {
        if self.others_lead {
            self.remarks.push(format!("{path}: {situation}; the gateway that leads must be able to start this engine"));
        } else {
            self.refuse(path, situation);
        }
    }

    /// Reports an unusable file or folder. It is a remark if a look was denied access, because the
    /// gateway may run as another user. It is also a remark if the folder is `fleet.state` and
    /// another gateway may lead.
    fn refuse_place(&mut self, key: &str, reason: String, error: &io::Error) {
        if self.looks && error.kind() == io::ErrorKind::PermissionDenied {
            self.remarks.push(format!(
                "{key}: {reason}; if the gateway runs as another user, run sluice check as that user (sudo -u USER)"
            ));
        } else if self.others_lead && key == STATE {
            self.remarks.push(format!("{key}: {reason}; this gateway needs it as soon as it leads"));
        } else {
            self.refuse(key.to_owned(), Situation::Unusable { reason });
        }
    }

    /// Reports a file or folder that another user controls. If it belongs to another user, a look
    /// by root finds an error, because root may not start the gateway on such files. A look by any
    /// other user finds a remark, because an operator may check the files of a service's user.
    fn refuse_untrusted(&mut self, key: &str, untrusted: &Untrusted) {
        let kind = match untrusted.is_foreign() && own_user() != 0 {
            true => io::ErrorKind::PermissionDenied,
            false => io::ErrorKind::Other,
        };
        self.refuse_place(key, untrusted.to_string(), &kind.into());
    }

    fn check_tokenizers(&mut self) {
        // Each model is loaded alone, so that each bad tokenizer is a separate problem.
        for (index, model) in self.loaded.config.models.iter().enumerate() {
            let alone = Config { models: vec![model.clone()], ..self.loaded.config.clone() };
            if let Err(StartError::Tokenizer { source, .. }) = load_counters(&alone, None) {
                let situation = Situation::Unusable { reason: source.to_string() };
                self.refuse(format!("model[{index}].tokenizer"), situation);
            }
        }
    }

    /// Checks that the access log and the file of records can be written, or made in their folders.
    fn check_written_files(&mut self) {
        let config = &self.loaded.config;
        let mut files = Vec::new();
        if let Some(LogTarget::File(file)) = config.access_log.as_ref().map(|log| &log.path) {
            files.push(("access_log.path", file));
        }
        files.extend(config.records.as_ref().map(|records| ("records.path", &records.path)));
        for (key, file) in files {
            let written = match file.is_file() {
                true => std::fs::OpenOptions::new().append(true).open(file).map(drop),
                // A pipe or device is not opened, because that may block until another program
                // reads it.
                false if file.exists() => Ok(()),
                false => can_make(file).map_err(|(_, error)| error),
            };
            if let Err(error) = written {
                self.refuse_place(key, format!("{} cannot be written: {error}", file.display()), &error);
            }
        }
        if let Some(records) = &config.records
            && let Err(untrusted) = check_named_file(&records.path)
        {
            self.refuse_untrusted("records.path", &untrusted);
        }
    }

    fn names(&self, key: &str) -> bool {
        let remark = |text: &String| text.strip_prefix(key).is_some_and(|rest| rest.starts_with(':'));
        self.errors.iter().any(|problem| problem.path() == key) || self.remarks.iter().any(remark)
    }

    /// Checks that no other user controls `fleet.state`, which also holds experiments, the tuner's
    /// limits and the socket for upgrades.
    fn check_owner_of_state(&mut self) {
        if let Err(untrusted) = check_state(&self.loaded.config.fleet.state) {
            self.refuse_untrusted(STATE, &untrusted);
        }
    }

    /// Checks that the folder and the files of the journal can be made or written.
    fn check_state(&mut self) {
        let state = &self.loaded.config.fleet.state;
        let place = std::path::absolute(state).unwrap_or_else(|_| state.clone());
        let usable = can_make(&place).and_then(|()| match check_journal(&place) {
            Err(JournalError::Unusable { path, source }) => Err((path, source)),
            // The start refuses a folder that another gateway uses. An untrusted one is reported
            // already.
            Ok(()) | Err(JournalError::Taken { .. } | JournalError::Untrusted(_)) => Ok(()),
        });
        if let Err((path, error)) = usable {
            let path = path.display();
            let reason = match error.kind() {
                io::ErrorKind::NotADirectory => {
                    format!("{path} is not a folder; name one that the gateway may write to")
                }
                _ => format!("{path}: {error}; name a folder that the gateway may write to"),
            };
            self.refuse_place(STATE, reason, &error);
        }
    }

    /// Checks the flags in `kubernetes.args`. The pods themselves are found after the start.
    fn check_pods(&mut self) {
        for (index, pool) in self.loaded.config.pools.iter().enumerate() {
            let Some(pods) = &pool.kubernetes else { continue };
            if let Err(failure) = check_values(*pool.engine, &EngineSettings { args: pods.args.clone() }) {
                let situation = Situation::EngineUnfit { reason: failure.to_string() };
                self.refuse(format!("pool[{index}].kubernetes.args"), situation);
            }
        }
    }

    fn check_ports(&mut self, config: &mut Config, purpose: Purpose<'_>) {
        let running = if let Purpose::Reload(running) = purpose { Some(running) } else { None };
        match engines::settle_ports(config, running, false) {
            Ok(_) => {}
            // The same folder has been reported already.
            Err(PortsError::Unusable { .. }) if self.names(STATE) => {}
            Err(PortsError::Unusable { path, source }) => {
                let reason = format!("{}: {source}; name a folder that the gateway may write to", path.display());
                self.refuse_place(STATE, reason, &source);
            }
            Err(error) => {
                let text = error.to_string();
                let reason = text.strip_prefix("fleet.ports: ").unwrap_or(&text).to_owned();
                self.refuse_engine("fleet.ports".to_owned(), Situation::Unusable { reason });
            }
        }
    }

    async fn check_engines(&mut self, config: &Config, purpose: Purpose<'_>) {
        let running = match purpose {
            Purpose::Reload(running) => specs_of(running),
            Purpose::Look | Purpose::Start => Vec::new(),
        };
        let mut flags = FlagLists::new(purpose);
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
            let checked = match flags.check(&spec, &driver).await {
                Some(checked) => checked,
                None => {
                    self.remarks.push(format!(
                        "{path}: its program has not listed its flags within {} s; they are checked when the engine starts",
                        START_FLAGS_MAX.as_secs()
                    ));
                    check_values(spec.address.engine, &spec.settings).map(|()| Vec::new())
                }
            };
            match checked {
                Ok(notices) => self.remarks.extend(notices.iter().map(|notice| format!("{path}: {notice}"))),
                Err(failure) => {
                    self.refuse_engine(path, Situation::EngineUnfit { reason: failure.to_string() });
                }
            }
        }
        self.check_devices(config).await;
    }

    /// Checks the devices of all engines together. At a start and a reload, the devices are listed
    /// only if engines name some, because the list may take seconds.
    async fn check_devices(&mut self, config: &Config) {
        let specs = specs_of(config);
        let installed = match self.looks || names_devices(&specs) {
            true => InstalledDevices::read().await,
            false => None,
        };
        let found = check_devices(&specs, installed.as_ref());
        let paths = paths(config);
        for (position, reason) in found.refused {
            self.refuse_engine(paths[position].clone(), Situation::EngineUnfit { reason });
        }
        self.remarks.extend(found.remarks);
    }
}

/// Reads the flag lists of programs. At a start, all programs together have one time limit.
struct FlagLists {
    until: Option<Instant>,
    /// Programs that did not answer in time, with the `PATH` of the engine.
    slow: BTreeSet<(String, Option<String>)>,
}

impl FlagLists {
    fn new(purpose: Purpose<'_>) -> Self {
        let until = matches!(purpose, Purpose::Start).then(|| Instant::now() + START_FLAGS_MAX);
        Self { until, slow: BTreeSet::new() }
    }

    /// Checks the settings of an engine. `None`: the program has not listed its flags in time.
    async fn check(&mut self, spec: &EngineSpec, driver: &SharedDriver) -> Option<Result<Vec<Notice>, EngineFailure>> {
        let program = program(&spec.target);
        if program.as_ref().is_some_and(|program| self.slow.contains(program)) {
            return None;
        }
        let checked = check_settings(&**driver, spec, &spec.settings);
        let Some(until) = self.until else { return Some(checked.await) };
        // A list that was read before is used even after `until`.
        let checked = timeout_at(until, checked).await.ok();
        if checked.is_none() {
            self.slow.extend(program);
        }
        checked
    }
}

fn program(target: &Target) -> Option<(String, Option<String>)> {
    let Target::Launch(launch) = target else { return None };
    let path = launch.env.get("PATH").map(|path| path.expose().to_owned());
    Some((launch.command.first()?.clone(), path))
}

/// Whether this user may write a folder, or make it in the nearest folder that exists. An error has
/// the path of the obstacle.
fn can_make(place: &Path) -> Result<(), (PathBuf, io::Error)> {
    let place = std::path::absolute(place).unwrap_or_else(|_| place.to_owned());
    let Some(nearest) = place.ancestors().find(|path| path.exists()) else { return Ok(()) };
    let failed = |error: io::Error| (nearest.to_owned(), error);
    if !nearest.is_dir() {
        return Err(failed(io::ErrorKind::NotADirectory.into()));
    }
    let mut access = Access::WRITE_OK | Access::EXEC_OK;
    if nearest == place {
        access |= Access::READ_OK;
    }
    rustix::fs::access(nearest, access).map_err(|error| failed(error.into()))
}

fn driver(spec: &EngineSpec, purpose: Purpose<'_>) -> SharedDriver {
    match purpose {
        Purpose::Look => engines::driver_for_checks(spec),
        Purpose::Start | Purpose::Reload(_) => engines::driver(spec),
    }
}

fn specs_of(config: &Config) -> Vec<EngineSpec> {
    let health = specs::health_rules(&config.health);
    let now = Instant::now();
    let layout = Admission::new(now, health, 0).apply(&specs::pools(config), health, now);
    // The digests are empty, because only the journal needs them.
    engines::engines(config, &layout, |_| String::new())
}

/// The configuration key of each engine, in the order of `specs_of`.
fn paths(config: &Config) -> Vec<String> {
    let mut paths = Vec::new();
    for (index, pool) in config.pools.iter().enumerate() {
        for (number, backend) in pool.backends.iter().enumerate() {
            let key = match &backend.target {
                _ if backend.follows() => continue,
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

#[cfg(test)]
mod tests;
