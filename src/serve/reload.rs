//! Taking over another configuration while requests run.
//!
//! Read and check everything first; a problem changes nothing and is said in full. Then: objectives in telemetry, pools
//! and limits in admission together with the plan in the request path, in one step. Requests under way keep
//! the plan they began with; waiting ones keep their place. What only a restart can change (sockets,
//! threads, logs) keeps its running value, and the list of changes says so.
//!
//! The plan is also rebuilt, from the configuration in force, when backends report other models.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::time::Instant;

use super::{House, StartError, engines, load_counters, specs};
use crate::config::diff::{self, Change};
use crate::config::{Config, Problems};
use crate::estimate::ExactCounter;
use crate::flow::RoutingTable;
use crate::pool::PoolLayout;

/// Where a reload reads the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file, with what the command line changes in it.
    File {
        /// The file.
        path: PathBuf,
        /// `--set` texts.
        sets: Vec<String>,
    },
    /// Flags or code: there is nothing to read again.
    Fixed,
}

/// Why a reload changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The new configuration is wrong.
    #[error("{0}")]
    Config(#[from] Problems),
    /// A tokenizer or a folder it names cannot be used.
    #[error("{0}")]
    Unusable(#[from] StartError),
    /// The gateway was not started from a file.
    #[error("the gateway was started from flags, there is no file to read again; start it with --config FILE")]
    NoFile,
}

/// What of the last load is needed to build plans.
#[derive(Debug)]
pub(crate) struct Loaded {
    layout: PoolLayout,
    counters: Vec<Option<Arc<ExactCounter>>>,
}

impl Loaded {
    pub(super) fn new(layout: PoolLayout, counters: Vec<Option<Arc<ExactCounter>>>) -> Self {
        Self { layout, counters }
    }
}

impl House {
    /// Reads the configuration again and takes it over. Returns what changed.
    pub fn reload(&self) -> Result<Vec<Change>, ReloadError> {
        let _one = self.reloading.lock();
        let result = self.read_again().and_then(|config| self.take_over(config));
        self.telemetry.reloaded(result.is_ok());
        self.remember(&result);
        match &result {
            Ok(changes) if changes.is_empty() => tracing::info!("reloaded: nothing changed"),
            Ok(changes) => changes.iter().for_each(|change| tracing::info!("reloaded: {change}")),
            Err(error) => tracing::error!("reload refused, nothing changed: {error}"),
        }
        result
    }

    fn read_again(&self) -> Result<Config, ReloadError> {
        let Source::File { path, sets } = &self.source else { return Err(ReloadError::NoFile) };
        let loaded = Config::load(path, sets)?;
        loaded.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        Ok(loaded.config)
    }

    /// Takes over a configuration that is known to be valid.
    pub fn take_over(&self, mut config: Config) -> Result<Vec<Change>, ReloadError> {
        let running = self.config.load_full();
        let counters = load_counters(&config)?;
        let mut moved = false;
        if engines::any(&config) {
            self.fleet.open(&running.fleet.state).map_err(StartError::Journal)?;
            let state = std::mem::replace(&mut config.fleet.state, running.fleet.state.clone());
            moved = engines::settle_ports(&mut config, Some(&running)).map_err(StartError::Ports)?;
            config.fleet.state = state;
        }
        let mut changes = diff::changes(&running, &config);
        changes.extend(moved.then_some(Change::after_restart("pool.backend.launch.port")));
        // What only a restart changes keeps its running value, so that what is shown is what is true.
        config.keep_until_restart(&running);
        let config = Arc::new(config);
        let mut state = self.state.lock();
        let (pools, health, reported) =
            (specs::pools(&config), specs::health_rules(&config.health), self.reported.names());
        self.telemetry.configured(&config);
        let layout = self.admission.apply_with(&pools, health, Instant::now(), |layout| {
            self.flow.set_routing_table(RoutingTable::new(
                Arc::clone(&config),
                layout,
                &reported,
                &counters,
                &self.learned,
            ));
        });
        self.fleet.apply(engines::engines(&config, &layout), engines::external_backends(&config, &layout));
        *state = Loaded { layout, counters };
        self.flow.upstream().set_connect_timeout(config.timeouts.connect);
        self.config.store(config);
        self.probe_now.notify_one();
        Ok(changes)
    }

    /// Backends report other models than before.
    pub(super) fn replan(&self) {
        let state = self.state.lock();
        self.flow.set_routing_table(self.plan_of(self.config.load_full(), &state));
    }

    fn plan_of(&self, config: Arc<Config>, state: &Loaded) -> RoutingTable {
        RoutingTable::new(config, &state.layout, &self.reported.names(), &state.counters, &self.learned)
    }
}
