//! Applies a new configuration while requests run.
//!
//! Everything is read, checked ([`checks`]) and built first, so an error changes nothing. With many
//! keys this takes long, so reloads run on threads that may block. Then the core puts the
//! configuration in force in one step. Settings that only a restart can change (sockets, threads,
//! logs) keep their running values, and the list of changes names them.

mod added;
mod history;

use std::sync::Arc;

use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::checks::{self, Purpose};
use crate::core::{Core, Source, StartError, load_counters};
use crate::experiments::ExperimentService;
use crate::pods::Pods;
use crate::tuner::TunerService;
use crate::{certificates, engines};
use sluice_admin::status::LastReload;
use sluice_config::diff::{self, Change};
use sluice_config::limits::MAX_PROBLEMS;
use sluice_config::{Config, Problems};

use history::History;

/// Why a reload failed and changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The new configuration is not valid.
    #[error("{0}")]
    Config(#[from] Problems),
    /// A tokenizer, folder or port in the configuration cannot be used.
    #[error("{0}")]
    Unusable(#[from] StartError),
    /// The gateway was not started from a file.
    #[error("the gateway was started from flags, so there is no file to reload; start it with sluice serve FILE")]
    NoFile,
}

/// The service.
#[derive(Debug)]
pub struct Reloader {
    core: Arc<Core>,
    tuner: Arc<TunerService>,
    pods: Arc<Pods>,
    experiments: Arc<ExperimentService>,
    pub(crate) history: Mutex<History>,
}

impl Reloader {
    pub(crate) fn new(
        core: Arc<Core>,
        (tuner, pods, experiments): (Arc<TunerService>, Arc<Pods>, Arc<ExperimentService>),
    ) -> Self {
        Self { core, tuner, pods, experiments, history: Mutex::default() }
    }

    /// Reads the configuration again and applies it. Returns the changes.
    pub fn run(&self) -> Result<Vec<Change>, ReloadError> {
        let _alone = self.core.alone();
        let result = self.read().and_then(|config| self.apply(config));
        if let Err(refused @ ReloadError::NoFile) = &result {
            // This is not a failed reload, because nothing was tried.
            tracing::warn!("not reloaded: {refused}");
            return result;
        }
        self.core.telemetry.reloaded(result.is_ok());
        self.remember(&result);
        if result.is_ok() {
            self.history.lock().note(None);
        }
        match &result {
            Ok(changes) if changes.is_empty() => tracing::info!("reloaded: nothing changed"),
            Ok(changes) => changes.iter().for_each(|change| tracing::info!("reloaded: {change}")),
            Err(error) => tracing::error!("reload failed, the configuration is unchanged: {error}"),
        }
        result
    }

    /// Applies a configuration that is not in a file. `title` is its name on the live page. Blocks.
    pub fn apply_titled(&self, config: Config, title: &str) -> Result<(), ReloadError> {
        let _alone = self.core.alone();
        self.apply(config)?;
        self.history.lock().note(Some(title.to_owned()));
        Ok(())
    }

    fn read(&self) -> Result<Config, ReloadError> {
        let Source::File { path, sets } = &self.core.source else { return Err(ReloadError::NoFile) };
        let loaded = Config::load_with(path, sets, &self.experiments.added.lock().active)?;
        loaded.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        if !self.core.acts() {
            return Ok(loaded.config);
        }
        let running = self.core.config.load_full();
        let checked = tokio::task::block_in_place(|| {
            Handle::current().block_on(checks::check(&loaded, Purpose::Reload(&running)))
        });
        checked?.iter().for_each(|remark| tracing::warn!("{remark}"));
        Ok(loaded.config)
    }

    /// Applies a valid configuration. Returns the changes.
    pub fn apply(&self, mut config: Config) -> Result<Vec<Change>, ReloadError> {
        let running = self.core.config.load_full();
        let before = self.core.loaded.lock().counters.clone();
        let counters = load_counters(&config, Some((&running, &before)))?;
        let mut moved = false;
        self.core.put_kinds(&mut config);
        self.pods.put(&mut config);
        self.open_journal(&config)?;
        if engines::any(&config) {
            let state = std::mem::replace(&mut config.fleet.state, running.fleet.state.clone());
            moved = engines::settle_ports(&mut config, Some(&running), true).map_err(StartError::Ports)?;
            config.fleet.state = state;
        }
        self.tuner.state.configure(&mut config);
        let mut changes = diff::changes(&running, &config);
        changes.extend(moved.then_some(Change::after_restart("pool.backend.launch.port")));
        config.keep_until_restart(&running);
        certificates::warn(&config);
        self.core.switch(config, Some(counters));
        Ok(changes)
    }

    /// Opens the journal if this gateway manages engines.
    fn open_journal(&self, config: &Config) -> Result<(), ReloadError> {
        let is_ours = self.core.acts() && self.core.fleet.lead().is_held() && !self.core.fleet.is_given_away();
        if engines::any(config) && is_ours {
            self.core.fleet.open(&self.core.config.load().fleet.state).map_err(StartError::Journal)?;
        }
        Ok(())
    }

    fn remember(&self, result: &Result<Vec<Change>, ReloadError>) {
        let lines = match result {
            Ok(changes) => changes.iter().map(ToString::to_string).collect(),
            Err(error) => problem_lines(error),
        };
        let time = format!("{:.0}", Timestamp::now());
        self.history.lock().last = Some(LastReload { time, ok: result.is_ok(), lines });
    }
}

pub(crate) fn problem_lines(error: &ReloadError) -> Vec<String> {
    match error {
        ReloadError::Config(problems) => problems.lines().take(MAX_PROBLEMS).collect(),
        ReloadError::Unusable(_) | ReloadError::NoFile => vec![error.to_string()],
    }
}
