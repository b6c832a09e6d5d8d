//! The state of a running gateway that reloads, probes and the admin port share.
//!
//! Request threads take snapshots: the configuration and the routing table are swapped whole. Only
//! reloads hold locks, and only one reload runs at a time.

use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::cluster;
use super::findings::Watch;
use super::pods::Pods;
use super::reloads::Reloads;
use super::saved_experiments::Added;
use super::scaling::Scaling;
use super::tuning::Tuning;
use super::upgrade::UpgradeError;
use crate::base::BackendId;
use crate::estimate::ExactCounter;
use crate::fleet::{Fleet, JournalError, PortsError, Prober, ReportedModels, watch_silent_streams};
use crate::flow::{LearnedState, RoutingTable};
use crate::pool::{Admission, PoolLayout};
use crate::proxy::{ClientLimits, ListenError, ProxyFlow};
use crate::telemetry::{AccessLogError, Telemetry, TelemetryError};
use sluice_config::Config;

/// Where a reload reads the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file, with changes from the command line.
    File {
        /// The file.
        path: PathBuf,
        /// The values of `--set`.
        sets: Vec<String>,
    },
    /// Flags or code: a reload is refused.
    Fixed,
}

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A socket could not be opened.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A tokenizer could not be loaded.
    #[error("model \"{model}\": {source}")]
    Tokenizer {
        /// The model.
        model: String,
        /// The cause.
        source: crate::estimate::ExactError,
    },
    /// The access log could not be opened, or traces cannot be sent.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The journal of the engines could not be opened.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// An engine could not get a port.
    #[error(transparent)]
    Ports(#[from] PortsError),
    /// A gateway that takes over got no share in the ledger.
    #[error("this gateway got no share of the ledger ({why}); the running gateway goes on")]
    NoShare {
        /// The reason.
        why: String,
    },
    /// The running gateway has not handed over.
    #[error(transparent)]
    Upgrade(#[from] UpgradeError),
}

impl StartError {
    /// Whether the configuration names something unusable, so that another start would fail in the
    /// same way.
    pub fn is_of_configuration(&self) -> bool {
        match self {
            Self::Tokenizer { .. } | Self::Ports(_) => true,
            Self::Journal(error) => matches!(error, JournalError::Unusable { .. } | JournalError::Untrusted(_)),
            Self::Telemetry(error) => matches!(error, TelemetryError::AccessLog(AccessLogError::Open { .. })),
            Self::Listen(_) | Self::NoShare { .. } | Self::Upgrade(_) => false,
        }
    }
}

/// The parts of a running gateway.
#[derive(Debug)]
pub struct App {
    pub(crate) flow: Arc<ProxyFlow>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) learned: LearnedState,
    pub(crate) reported: Arc<ReportedModels>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) clients: Arc<ClientLimits>,
    pub(crate) config: ArcSwap<Config>,
    pub(crate) source: Source,
    /// Experiments of the admin API. Only reloads change them.
    pub(crate) added: parking_lot::Mutex<Added>,
    pub(crate) loaded: parking_lot::Mutex<Loaded>,
    pub(crate) started: Instant,
    pub(crate) reloads: parking_lot::Mutex<Reloads>,
    /// Adapters that are being loaded for experiments, with the backend.
    pub(crate) loading: parking_lot::Mutex<Vec<(BackendId, Arc<str>)>>,
    /// Held by a reload from reading the file to the end, so that reloads run one after the other.
    pub(crate) reloading: parking_lot::Mutex<()>,
    pub(crate) tuning: Tuning,
    /// The scalers of pools.
    pub(crate) scaling: Scaling,
    pub(crate) pods: Pods,
    pub(crate) watch: Watch,
    /// This gateway's part in the ledger of several gateways.
    pub(crate) cluster: Option<Arc<cluster::View>>,
    /// The view of the leader; `None` if none is elected.
    pub(crate) leader: Option<Arc<cluster::LeaderView>>,
    /// Whether this gateway leads and has the journal.
    pub(crate) acts: parking_lot::Mutex<bool>,
    /// Starts a round of probes at once: requests may wait for backends that a reload added.
    pub(crate) probe_now: Notify,
}

/// The tokenizers of the models, in the order of the configuration; `None` for a model without one.
pub(super) type Counters = Vec<Option<Arc<ExactCounter>>>;

/// Parts loaded with the configuration, from which the routing table is rebuilt.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(super) layout: PoolLayout,
    pub(super) counters: Counters,
}

impl App {
    /// Pools, backends and leases.
    pub fn admission(&self) -> &Arc<Admission> {
        &self.admission
    }

    /// Probes every `health.probe_interval` until `end` is true.
    pub(super) async fn keep_probing(self: Arc<Self>, mut prober: Prober, mut end: watch::Receiver<bool>) {
        loop {
            let interval = self.config.load().health.probe_interval;
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = self.probe_now.notified() => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            self.probe(&mut prober).await;
        }
    }

    /// Checks the engines of silent streams until `end` is true.
    pub(super) async fn keep_watching_silent_streams(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        let limit = || self.config.load().health.probe_timeout;
        tokio::select! {
            () = watch_silent_streams(Arc::clone(&self.admission), limit) => {}
            _ = end.wait_for(|ending| *ending) => {}
        }
    }

    /// Probes every backend once. Slow work (many keys) runs on a thread that may block.
    pub(super) async fn probe(self: &Arc<Self>, prober: &mut Prober) {
        let rules = self.config.load().health.clone();
        prober.forwards_keys = !self.flow.routing_table().keys.is_required();
        prober.await_models = self.learned.experiments.is_any_waiting();
        let changed = prober.probe_all(&rules).await;
        self.note_served_models();
        if !changed && !self.flow.has_replaced_tables() {
            return;
        }
        let app = Arc::clone(self);
        let rebuilt = tokio::task::spawn_blocking(move || {
            if changed {
                app.rebuild_routing();
            }
            app.flow.drop_unused_tables();
        });
        if let Err(error) = rebuilt.await {
            tracing::error!(%error, "the routing table could not be rebuilt");
        }
    }

    /// Rebuilds the routing table after the models reported by backends changed.
    fn rebuild_routing(&self) {
        let loaded = self.loaded.lock();
        let (config, reported) = (self.config.load_full(), self.reported.names());
        self.learned.set_adapters(self.reported.adapters());
        self.flow.set_routing_table(RoutingTable::new(
            config,
            &loaded.layout,
            &reported,
            &loaded.counters,
            &self.learned,
        ));
    }
}

/// Loads the models' tokenizers, in the order of the models. `running`: the configuration in force
/// with counters. All counters share one bound on concurrent counts, and keep the knowledge of a
/// model's template.
pub(super) fn load_counters(config: &Config, running: Option<(&Config, &Counters)>) -> Result<Counters, StartError> {
    let known = || running.into_iter().flat_map(|(config, counters)| config.models.iter().zip(counters));
    let permits = known().find_map(|(_, counter)| Some(counter.as_ref()?.permits()));
    let permits = permits.unwrap_or_else(ExactCounter::new_permits);
    let load = |model: &sluice_config::Model| {
        let Some(path) = &model.tokenizer else { return Ok(None) };
        let loaded = ExactCounter::load(path, Arc::clone(&permits))
            .map_err(|source| StartError::Tokenizer { model: model.name.clone(), source })?;
        let before = known().find(|(one, _)| one.name == model.name && one.tokenizer == model.tokenizer);
        Ok(Some(Arc::new(match before.and_then(|(_, counter)| counter.as_deref()) {
            Some(before) => loaded.continuing(before),
            None => loaded,
        })))
    };
    config.models.iter().map(load).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_config::{Machine, Surroundings};

    #[test]
    fn counters_share_a_bound_and_a_reload_keeps_what_was_learned() {
        let config = |models: &[&str]| {
            let model =
                |name| format!("[[model]]\nname = \"{name}\"\ntokenizer = \"tests/fixtures/tiny/tokenizer.json\"\n");
            let text = models.iter().map(model).collect::<String>();
            let pool = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:9\"\n";
            let folder = env!("CARGO_MANIFEST_DIR").into();
            let around = Surroundings { env: &|_| None, folder, machine: Machine::with_cores(1) };
            Config::parse(&(text + pool), "test", &[], &around).unwrap().config
        };
        let (first, second) = (config(&["a", "b"]), config(&["c", "b"]));
        let before = load_counters(&first, None).unwrap();
        let after = load_counters(&second, Some((&first, &before))).unwrap();
        let counters: Vec<_> = before.iter().chain(&after).flatten().collect();
        assert_eq!(counters.len(), 4);
        assert!(counters.iter().all(|one| Arc::ptr_eq(&one.permits(), &counters[0].permits())));
        assert!(after[1].as_ref().unwrap().has_template_of(before[1].as_ref().unwrap()));
        assert!(!after[0].as_ref().unwrap().has_template_of(before[0].as_ref().unwrap()));
    }
}
