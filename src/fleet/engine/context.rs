//! State that the task of one engine shares with the effects of the engine's steps: description,
//! driver, admission.
//!
//! The coordinator also reads this state, to judge and to show the engine. Locks are held briefly,
//! never across an await.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::history::History;
use super::journal::{Journal, JournalLine, Setup};
use super::lifecycle::{Lifecycle, Step};
use super::spec::EngineSpec;
use crate::driver::{EngineIdentity, EngineSettings, SharedDriver};
use crate::lead::Lead;
use crate::models::ReportedModels;
use crate::other_gateways::OtherGateways;
use sluice_core::base::BackendId;
use sluice_gateway::pool::{Admission, BackendView, Bound, Cordon};

/// State that changes while an engine is managed.
#[derive(Debug)]
pub(crate) struct EngineState {
    /// The step under way, and everything that decides the next one.
    pub(crate) lifecycle: Lifecycle<Setup>,
    pub(crate) trace: Option<EngineIdentity>,
    /// The engine that sleeps next to the present one, and since when.
    pub(crate) aside: Option<(EngineIdentity, Instant)>,
    /// Golden prompts, and the texts generated before the restart.
    pub(crate) golden: Vec<(String, String)>,
    /// When the start began; `None` once the engine is in rotation.
    pub(crate) started: Option<Instant>,
    pub(crate) wake_took: Option<Duration>,
    pub(crate) start_took: Option<Duration>,
    pub(crate) since: Instant,
    /// Progress of the step.
    pub(crate) detail: String,
    /// Adapters that left the configuration and may still be loaded.
    pub(crate) unwanted: Vec<String>,
    pub(crate) history: History,
}

/// The driver of the present engine, and of one that sleeps next to it.
#[derive(Debug)]
pub(super) struct Drivers {
    pub(super) present: SharedDriver,
    pub(super) aside: Option<SharedDriver>,
}

/// State shared by one engine's task and effects.
#[derive(Debug)]
pub(crate) struct EngineContext {
    spec: ArcSwap<EngineSpec>,
    /// Locked after `state` by code that needs both locks.
    pub(super) drivers: Mutex<Drivers>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) reported: Arc<ReportedModels>,
    pub(crate) journal: Arc<Mutex<Journal>>,
    /// Cancelled when the gateway must shut down fast.
    pub(crate) fast_shutdown: CancellationToken,
    /// While the lead is not held, the engine must not be touched.
    pub(crate) lead: Arc<Lead>,
    /// Other gateways, which may have requests on the engine.
    pub(crate) others: Arc<OtherGateways>,
    pub(crate) state: Mutex<EngineState>,
    /// Notified when the configured adapters change.
    pub(crate) adapters_changed: Notify,
    /// Digest of the configuration that the driver was made for.
    pub(crate) identity: String,
}

impl EngineContext {
    pub(crate) fn new(
        spec: EngineSpec,
        driver: SharedDriver,
        admission: Arc<Admission>,
        reported: Arc<ReportedModels>,
        journal: Arc<Mutex<Journal>>,
        (fast_shutdown, lead, others): (CancellationToken, Arc<Lead>, Arc<OtherGateways>),
    ) -> Self {
        let state = EngineState {
            lifecycle: Lifecycle::new(spec.setup()),
            trace: None,
            aside: None,
            golden: Vec::new(),
            started: None,
            start_took: None,
            wake_took: None,
            since: Instant::now(),
            detail: String::new(),
            unwanted: Vec::new(),
            history: History::default(),
        };
        Self {
            drivers: Mutex::new(Drivers { present: driver, aside: None }),
            admission,
            reported,
            journal,
            fast_shutdown,
            lead,
            others,
            state: Mutex::new(state),
            adapters_changed: Notify::new(),
            identity: spec.identity.clone(),
            spec: ArcSwap::from_pointee(spec),
        }
    }

    /// The driver of the present engine.
    pub(crate) fn driver(&self) -> SharedDriver {
        Arc::clone(&self.drivers.lock().present)
    }

    /// The engine as the configuration in force describes it.
    pub(crate) fn spec(&self) -> Arc<EngineSpec> {
        self.spec.load_full()
    }

    /// Applies a description that needs no restart.
    pub(crate) fn describe(&self, spec: EngineSpec) {
        let before = self.spec.swap(Arc::new(spec));
        let now = self.spec();
        if before.backend != now.backend {
            // A pod's address changes with each start. The cordon must also apply at the new
            // address.
            let cordon = self.state.lock().lifecycle.cordon();
            self.set_cordon(cordon.unwrap_or(Cordon::Starting));
        }
        if before.adapters == now.adapters {
            return;
        }
        let listed = |name: &String| now.adapters.iter().any(|(other, _)| other == name);
        let mut state = self.state.lock();
        state.unwanted.retain(|name| !listed(name));
        state.unwanted.extend(before.adapters.iter().map(|(name, _)| name.clone()).filter(|name| !listed(name)));
        self.adapters_changed.notify_one();
    }

    pub(crate) fn step(&self) -> Step {
        self.state.lock().lifecycle.step
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.state.lock().lifecycle.leaving
    }

    /// `pool/backend (pid 71)`, unless the engine is known to be stopped.
    pub(crate) fn describe_running(&self) -> Option<String> {
        let name = &self.spec().name;
        match self.state.lock().trace.as_ref()? {
            EngineIdentity::Process { pid, .. } => Some(format!("{name} (pid {pid})")),
            EngineIdentity::Command => Some(format!("{name} (started by command)")),
            // The cluster keeps such an engine running.
            EngineIdentity::Pod { .. } | EngineIdentity::External => None,
        }
    }

    /// The last failure while it is relevant, otherwise empty.
    pub(crate) fn why(&self) -> String {
        self.state.lock().lifecycle.why.clone().unwrap_or_default()
    }

    /// Whether the engine runs, or is being changed to, the configuration with this digest.
    pub(crate) fn heads_for(&self, configured: &str) -> bool {
        self.state.lock().lifecycle.heads_for().configured == configured
    }

    pub(crate) fn setup(&self) -> Setup {
        self.state.lock().lifecycle.wanted.clone()
    }

    pub(crate) fn settings(&self) -> EngineSettings {
        self.setup().settings
    }

    /// Requests at the engine's address: this gateway's, and the known ones of other gateways.
    /// Another backend may have this address in the configuration by now.
    pub(crate) fn running(&self) -> u32 {
        let spec = self.spec();
        let backends = self.admission.view().into_iter().flat_map(|pool| pool.backends);
        let there = backends.filter(|backend| backend.address.endpoint == spec.address.endpoint);
        there.map(|backend| backend.used.requests.saturating_add(backend.foreign.slots)).sum()
    }

    pub(crate) fn set_detail(&self, text: impl Into<String>) {
        self.state.lock().detail = text.into();
    }

    /// The engine's backend in admission; `None` when it is no longer configured and has no
    /// requests.
    pub(crate) fn backend(&self) -> Option<BackendView> {
        let id = self.backend_id()?;
        self.admission.view().into_iter().flat_map(|pool| pool.backends).find(|backend| backend.id == id)
    }

    /// The backend id, if it still means this engine: the id of a removed backend may be reused.
    fn backend_id(&self) -> Option<BackendId> {
        let spec = self.spec();
        let name = spec.name.split_once('/').map_or(&*spec.name, |(_, name)| name);
        self.admission.is_same_backend(spec.backend, name, &spec.address).then_some(spec.backend)
    }

    /// Sets the cordon here, and closes or opens the engine for other gateways.
    pub(crate) fn set_cordon(&self, cordon: Cordon) {
        self.others.follow(&self.spec().name, cordon);
        let Some(id) = self.backend_id() else { return };
        if cordon == Cordon::Open {
            // Set before the engine's first request.
            self.admission.set_by_priority(id, self.driver().schedules_by_priority(&self.settings()));
        }
        self.admission.set_cordon(id, cordon);
    }

    pub(crate) fn set_ceiling(&self, slots: Option<u32>) {
        self.admission.set_bounds(self.backend_id().map(|id| (id, Bound::Ceiling(slots))));
    }

    /// Notes that a start begins. It should take as long as the last one, which `Retry-After` of
    /// refusals reflects.
    pub(crate) fn expect_ready(&self) {
        let now = Instant::now();
        let took = {
            let mut state = self.state.lock();
            state.started = Some(now);
            state.start_took
        };
        if let (Some(took), Some(id)) = (took, self.backend_id()) {
            self.admission.set_ready_at(id, now + took);
        }
    }

    /// Notes that a start failed; the next attempt begins after `next_try` (`None`: never), which
    /// `Retry-After` of refusals reflects.
    pub(crate) fn start_failed(&self, next_try: Option<Duration>) {
        let Some(id) = self.backend_id() else { return };
        let took = self.state.lock().start_took;
        match next_try {
            None => self.set_cordon(Cordon::Down),
            Some(wait) => {
                if let Some(took) = took {
                    self.admission.set_ready_at(id, Instant::now() + wait + took);
                }
            }
        }
        self.admission.start_failed(id);
    }

    /// Notes that the engine enters rotation.
    pub(crate) fn note_ready(&self) {
        let took = {
            let mut state = self.state.lock();
            if let Some(started) = state.started.take() {
                let took = started.elapsed();
                state.start_took = Some(took);
                tracing::info!(backend = %self.spec().name, "engine: it serves after {:.1} s", took.as_secs_f64());
            }
            state.start_took
        };
        self.show_start_time(took);
    }

    /// Notes that the engine wakes, which should take as long as the last time.
    pub(crate) fn expect_awake(&self) {
        let took = self.state.lock().wake_took;
        if let (Some(took), Some(id)) = (took, self.backend_id()) {
            self.admission.set_ready_at(id, Instant::now() + took);
        }
    }

    /// Notes that the engine woke, and how long that took.
    pub(crate) fn note_awake(&self, took: Duration) {
        {
            let mut state = self.state.lock();
            state.wake_took = Some(took);
            state.history.wakes += 1;
        }
        tracing::info!(backend = %self.spec().name, "engine: it is awake after {:.1} s", took.as_secs_f64());
        self.show_start_time(Some(took));
    }

    /// Records how long a start takes, for `Retry-After` while the engine is stopped.
    pub(crate) fn show_start_time(&self, took: Option<Duration>) {
        if let (Some(took), Some(id)) = (took, self.backend_id()) {
            self.admission.set_start_takes(id, took);
        }
    }

    /// Forgets health and speed of the engine that ran at this address before.
    pub(crate) fn renew(&self) {
        if let Some(id) = self.backend_id() {
            self.admission.engine_replaced(id, Instant::now());
        }
    }

    /// Sequences that the engine runs at once, if the settings give them.
    pub(crate) fn ceiling(&self, settings: &EngineSettings) -> Option<u32> {
        u32::try_from(self.driver().sequences(settings)?).ok().filter(|seqs| *seqs > 0)
    }

    /// Writes the state to the journal. Returns once it is on the disk.
    pub(crate) async fn write_journal(self: &Arc<Self>) -> std::io::Result<()> {
        let context = Arc::clone(self);
        let written = tokio::task::spawn_blocking(move || {
            let record = context.record();
            context.journal.lock().write(record)
        });
        written.await.unwrap_or_else(|panicked| Err(std::io::Error::other(panicked)))
    }

    pub(super) fn record(&self) -> JournalLine {
        let state = self.state.lock();
        JournalLine {
            at: Timestamp::now().to_string(),
            backend: self.spec().name.to_string(),
            lifecycle: state.lifecycle.clone(),
            trace: state.trace.clone(),
            aside: state.aside.as_ref().map(|(engine, _)| engine.clone()),
            identity: self.identity.clone(),
            golden: state.golden.clone(),
            start_ms: state.start_took.and_then(|took| u64::try_from(took.as_millis()).ok()),
        }
    }
}

/// Milliseconds since 1970. Restart budgets use this clock because they outlive the gateway.
pub(crate) fn now_ms() -> u64 {
    u64::try_from(Timestamp::now().as_millisecond()).unwrap_or(0)
}
