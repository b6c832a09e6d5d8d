//! What the steps of one engine's life work with: its description, its driver, its place in admission, and what is shown.
//!
//! Shared by the keeper, which decides, and the effects, which act. Locks are held for a moment and never across an await.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::journal::{Journal, Record, Setup};
use super::lifecycle::{self, Lifecycle, Step};
use crate::driver::{EngineIdentity, EngineSettings, SharedDriver, StopRules};
use crate::probe::ReportedModels;
use sluice_core::base::BackendId;
use sluice_gateway::config::{Fleet as Rules, Target};
use sluice_gateway::pool::{Address, Admission, BackendView, Cordon};

/// An engine that we run, as the configuration describes it.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// `pool/backend`.
    pub name: Arc<str>,
    /// Its place in admission.
    pub backend: BackendId,
    /// Where it is reached.
    pub address: Arc<Address>,
    /// How it is started and stopped, flags excepted.
    pub target: Target,
    /// Its flags as configured.
    pub settings: EngineSettings,
    /// Program, port, devices and environment, as a digest: what a driver is made for.
    pub identity: String,
    /// Everything about it that only a restart changes, as a digest.
    pub configured: String,
    /// The slots that its pool gives it.
    pub slots: u32,
    /// Pools that requests at home in its pool may spill to.
    pub spill: Vec<String>,
    /// Names that it must serve once it is ready, adapters that we load excepted.
    pub models: Vec<String>,
    /// Adapters that it must have, by name, with their folders.
    pub adapters: Vec<(String, PathBuf)>,
    /// Model and prompt; the answers must survive a restart.
    pub golden: Vec<(String, String)>,
    /// Patience.
    pub rules: Rules,
    /// Without a byte, a counter or an answer for this long it is taken for stuck.
    pub stall: Duration,
    /// How long one question to it may take.
    pub request_timeout: Duration,
}

impl EngineSpec {
    /// Its settings as configured.
    pub(crate) fn setup(&self) -> Setup {
        Setup { settings: self.settings.clone(), configured: self.configured.clone() }
    }

    /// The GPUs that it may see; `None`: any, or none of this machine's that is known of.
    fn devices(&self) -> Option<&[u16]> {
        match &self.target {
            Target::Launch(launch) if !launch.gpu.is_empty() => Some(&launch.gpu),
            Target::Launch(_) | Target::Url(_) | Target::Control(..) => None,
        }
    }

    /// Whether both are known to be on one device or at one place.
    pub(crate) fn is_where(&self, other: &Self) -> bool {
        let shared = match (self.devices(), other.devices()) {
            (Some(one), Some(two)) => one.iter().any(|gpu| two.contains(gpu)),
            _ => false,
        };
        shared || self.address.endpoint == other.address.endpoint
    }

    /// Whether they could be, where it is not known: then one must be gone before the other starts.
    pub(crate) fn is_in_the_way_of(&self, other: &Self) -> bool {
        let launched = |spec: &Self| matches!(spec.target, Target::Launch(_));
        let unknown = self.devices().is_none() || other.devices().is_none();
        (launched(self) && launched(other) && unknown) || self.is_where(other) || self.name == other.name
    }

    /// The rules of its life.
    pub(crate) fn life_rules(&self) -> lifecycle::Rules {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        lifecycle::Rules {
            restarts: self.rules.restarts as usize,
            window_ms: ms(self.rules.restart_window),
            backoff_ms: ms(self.rules.backoff),
            backoff_max_ms: ms(self.rules.backoff_max),
        }
    }

    pub(crate) fn stop_rules(&self) -> StopRules {
        StopRules { grace: self.rules.grace, ..StopRules::default() }
    }
}

/// What changes while an engine lives.
#[derive(Debug)]
pub(crate) struct EngineState {
    pub(crate) life: Lifecycle<Setup>,
    pub(crate) trace: Option<EngineIdentity>,
    pub(crate) golden: Vec<(String, String)>,
    /// What an earlier gateway left of it has been looked at; before that, `life` says nothing.
    pub(crate) recovered: bool,
    pub(crate) since: Instant,
    /// How far the step is, for people.
    pub(crate) detail: String,
    /// The engine was taken over, not started: it is warm.
    pub(crate) adopted: bool,
    /// It serves, and is kept out of rotation to be replaced.
    pub(crate) spared: bool,
    /// What the configuration asks for and the reason why it is not done yet.
    pub(crate) waits: Option<String>,
    /// Adapters that were taken out of the configuration and may still be loaded.
    pub(crate) unwanted: Vec<String>,
}

/// One engine: everything that its keeper and its effects share.
#[derive(Debug)]
pub(crate) struct EngineContext {
    pub(crate) spec: ArcSwap<EngineSpec>,
    pub(crate) driver: SharedDriver,
    pub(crate) admission: Arc<Admission>,
    pub(crate) reported: Arc<ReportedModels>,
    pub(crate) journal: Arc<Mutex<Journal>>,
    pub(crate) state: Mutex<EngineState>,
    /// Which adapters there should be has changed.
    pub(crate) adapters: Notify,
    /// What the driver was made for.
    pub(crate) identity: String,
}

impl EngineContext {
    pub(crate) fn step(&self) -> Step {
        self.state.lock().life.step
    }

    pub(crate) fn setup(&self) -> Setup {
        self.state.lock().life.wanted.clone()
    }

    pub(crate) fn settings(&self) -> EngineSettings {
        self.setup().settings
    }

    /// Requests of ours that run on it. Another backend may have taken its place in the configuration meanwhile.
    pub(crate) fn running(&self) -> u32 {
        let spec = self.spec.load();
        let backends = self.admission.view().into_iter().flat_map(|pool| pool.backends);
        let there = backends.filter(|backend| backend.address.endpoint == spec.address.endpoint);
        there.map(|backend| backend.used.requests).sum()
    }

    /// Says how far the step is.
    pub(crate) fn detail(&self, text: impl Into<String>) {
        self.state.lock().detail = text.into();
    }

    /// Its place in admission as it is now; `None` when it is no longer configured and carries nothing.
    pub(crate) fn place(&self) -> Option<BackendView> {
        let id = self.here()?;
        self.admission.view().into_iter().flat_map(|pool| pool.backends).find(|backend| backend.id == id)
    }

    /// Its id in admission, while that means this engine: once it is no longer configured, the number may be given to
    /// another backend.
    fn here(&self) -> Option<BackendId> {
        let spec = self.spec.load();
        let name = spec.name.split_once('/').map_or(&*spec.name, |(_, name)| name);
        self.admission.is_same_backend(spec.backend, name, &spec.address).then_some(spec.backend)
    }

    pub(crate) fn set_cordon(&self, cordon: Cordon) {
        self.here().map(|id| self.admission.set_cordon(id, cordon));
    }

    pub(crate) fn set_ceiling(&self, slots: Option<u32>) {
        self.here().map(|id| self.admission.set_ceiling(id, slots));
    }

    /// Another engine stands there: its health begins anew.
    pub(crate) fn renew(&self) {
        self.here().map(|id| self.admission.reset_health(id, Instant::now()));
    }

    /// Sequences that the engine runs at once with these settings, where they say so.
    pub(crate) fn ceiling(&self, settings: &EngineSettings) -> Option<u32> {
        u32::try_from(self.driver.sequences(settings)?).ok().filter(|seqs| *seqs > 0)
    }

    /// Writes the present state to the journal. Returns once it is on the disk.
    pub(crate) async fn write(self: &Arc<Self>) -> std::io::Result<()> {
        let context = Arc::clone(self);
        let written = tokio::task::spawn_blocking(move || {
            let record = context.record();
            context.journal.lock().write(record)
        });
        written.await.unwrap_or_else(|panicked| Err(std::io::Error::other(panicked)))
    }

    fn record(&self) -> Record {
        let state = self.state.lock();
        Record {
            at: Timestamp::now().to_string(),
            backend: self.spec.load().name.to_string(),
            life: state.life.clone(),
            trace: state.trace.clone(),
            identity: self.identity.clone(),
            golden: state.golden.clone(),
        }
    }
}

/// Milliseconds since 1970: the clock of budgets, which a restart of the gateway must not set back.
pub(crate) fn now_ms() -> u64 {
    u64::try_from(Timestamp::now().as_millisecond()).unwrap_or(0)
}
