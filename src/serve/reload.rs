//! Applies a new configuration while requests run.
//!
//! Everything is read, checked ([`checks`]) and built first, so an error changes nothing. This
//! takes long with many keys, so reloads run on threads that may block, and only swap under the
//! lock of admission. Then objectives change in telemetry, and pools, limits and routing change in
//! one step. Requests in flight keep their routing table, and waiting requests their place in the
//! queue. Settings that only a restart can change (sockets, threads, logs) keep their running
//! values, and the list of changes names them.

use std::sync::Arc;

use jiff::Timestamp;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::app::{App, Counters, Source, StartError, load_counters};
use super::checks::{self, Purpose};
use super::{certificates, engines};
use crate::admin::status::LastReload;
use crate::estimate::ExactCounter;
use crate::flow::{RoutingTable, specs};
use crate::pool::PoolLayout;
use sluice_config::diff::{self, Change};
use sluice_config::limits::MAX_PROBLEMS;
use sluice_config::{Config, Problems};

/// Why a reload failed. Nothing has changed.
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

impl App {
    /// Reads the configuration again and applies it. Returns the changes.
    pub fn reload(&self) -> Result<Vec<Change>, ReloadError> {
        let _guard = self.reloading.lock();
        let result = self.read().and_then(|config| self.apply(config));
        if let Err(refused @ ReloadError::NoFile) = &result {
            // Nothing was tried, so this is not a failed reload.
            tracing::warn!("not reloaded: {refused}");
            return result;
        }
        self.telemetry.reloaded(result.is_ok());
        self.remember(&result);
        if result.is_ok() {
            self.reloads.lock().note(None);
        }
        match &result {
            Ok(changes) if changes.is_empty() => tracing::info!("reloaded: nothing changed"),
            Ok(changes) => changes.iter().for_each(|change| tracing::info!("reloaded: {change}")),
            Err(error) => tracing::error!("reload failed, the configuration is unchanged: {error}"),
        }
        result
    }

    /// Applies a configuration that is not in a file. `title`: the name on the live page. Blocks.
    pub fn apply_titled(&self, config: Config, title: &str) -> Result<(), ReloadError> {
        let _guard = self.reloading.lock();
        self.apply(config)?;
        self.reloads.lock().note(Some(title.to_owned()));
        Ok(())
    }

    fn read(&self) -> Result<Config, ReloadError> {
        let Source::File { path, sets } = &self.source else { return Err(ReloadError::NoFile) };
        let loaded = Config::load_with(path, sets, &self.added.lock().active)?;
        loaded.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        if !self.acts() {
            // The leader checks the engines.
            return Ok(loaded.config);
        }
        let running = self.config.load_full();
        let checked = tokio::task::block_in_place(|| {
            Handle::current().block_on(checks::check(&loaded, Purpose::Reload(&running)))
        });
        checked?.iter().for_each(|remark| tracing::warn!("{remark}"));
        Ok(loaded.config)
    }

    /// Applies a valid configuration. Returns the changes.
    pub fn apply(&self, mut config: Config) -> Result<Vec<Change>, ReloadError> {
        let running = self.config.load_full();
        let before = self.loaded.lock().counters.clone();
        let counters = load_counters(&config, Some((&running, &before)))?;
        let mut moved = false;
        self.pods.put(&mut config);
        self.open_journal(&config)?;
        if engines::any(&config) {
            let state = std::mem::replace(&mut config.fleet.state, running.fleet.state.clone());
            moved = engines::settle_ports(&mut config, Some(&running), true).map_err(StartError::Ports)?;
            config.fleet.state = state;
        }
        self.tuning.configure(&mut config);
        let mut changes = diff::changes(&running, &config);
        changes.extend(moved.then_some(Change::after_restart("pool.backend.launch.port")));
        // Running values also appear in `/admin/status`.
        config.keep_until_restart(&running);
        certificates::warn(&config);
        self.switch(config, Some(counters));
        Ok(changes)
    }

    /// Puts a configuration in force. Without `counters`, the running ones stay. The caller holds
    /// the lock of reloads.
    pub(super) fn switch(&self, config: Config, counters: Option<Counters>) {
        let config = Arc::new(config);
        let mut loaded = self.loaded.lock();
        self.telemetry.configured(&config);
        if let Some(counters) = counters {
            loaded.counters = counters;
        }
        loaded.layout = self.enforce(&config, &loaded.counters);
        let layout = &loaded.layout;
        self.apply_engines(&config, layout);
        self.flow.upstream().set_timeouts(&config.timeouts);
        self.clients.configure(&config.server);
        self.flow.set_response_memory(config.server.max_response_memory.0);
        self.config.store(config);
        self.note_served_models();
        self.probe_now.notify_one();
    }

    /// Opens the journal if the configuration has engines that this gateway manages.
    fn open_journal(&self, config: &Config) -> Result<(), ReloadError> {
        let is_ours = self.acts() && self.fleet.lead().is_held() && !self.fleet.is_given_away();
        if engines::any(config) && is_ours {
            self.fleet.open(&self.config.load().fleet.state).map_err(StartError::Journal)?;
        }
        Ok(())
    }

    /// Makes the pods that were found the backends of their pools. Blocks.
    #[cfg(feature = "kubernetes")]
    pub(super) fn put_pods(&self) {
        let _guard = self.reloading.lock();
        let running = self.config.load_full();
        let mut config = Config::clone(&running);
        self.pods.put(&mut config);
        for change in diff::changes(&running, &config) {
            tracing::info!("pods: {change}");
        }
        self.switch(config, None);
    }

    /// Changes limits of pools, and nothing else.
    pub(super) fn put_limits(&self, change: impl FnOnce(&mut Config)) {
        let _guard = self.reloading.lock();
        let mut config = Config::clone(&self.config.load());
        change(&mut config);
        let config = Arc::new(config);
        let mut loaded = self.loaded.lock();
        loaded.layout = self.enforce(&config, &loaded.counters);
        self.config.store(config);
    }

    /// Puts pools, limits and routing of a configuration in force.
    fn enforce(&self, config: &Arc<Config>, counters: &[Option<Arc<ExactCounter>>]) -> PoolLayout {
        let (pools, health) = (specs::pools(config), specs::health_rules(&config.health));
        let draft = RoutingTable::draft(Arc::clone(config), &self.reported.names(), counters, &self.learned);
        let layout = self.admission.apply_with(&pools, health, Instant::now(), |layout| {
            self.flow.set_routing_table(draft.placed(layout));
        });
        self.flow.drop_unused_tables();
        layout
    }

    /// Keeps the result of a reload for `/admin/status`.
    fn remember(&self, result: &Result<Vec<Change>, ReloadError>) {
        let lines = match result {
            Ok(changes) => changes.iter().map(ToString::to_string).collect(),
            Err(error) => problem_lines(error),
        };
        let time = format!("{:.0}", Timestamp::now());
        self.reloads.lock().last = Some(LastReload { time, ok: result.is_ok(), lines });
    }
}

/// The problems, one per line.
pub(super) fn problem_lines(error: &ReloadError) -> Vec<String> {
    match error {
        ReloadError::Config(problems) => problems.lines().take(MAX_PROBLEMS).collect(),
        ReloadError::Unusable(_) | ReloadError::NoFile => vec![error.to_string()],
    }
}
