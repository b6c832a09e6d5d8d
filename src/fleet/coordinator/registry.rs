//! What all parts of the coordinator share: the table of engines, the journal, admission, and the tasks to wait for.
//!
//! One lock guards the [table](EngineTable), so that a configuration, the engines that run and the engines that are being
//! stopped are judged together. It is held for moments and never across an await. The lock of one engine's state may be
//! taken under it, never the other way round.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::engine_table::{EngineTable, ExternalBackend, Wanted};
use super::scales::Scales;
use crate::driver::SharedDriver;
use crate::engine::context::EngineContext;
use crate::engine::engine_task::{self, EngineHandle};
use crate::engine::journal::{Journal, JournalError, Record};
use crate::engine::lifecycle::RestartBlocked;
use crate::engine::spec::EngineSpec;
use crate::lead::Lead;
use crate::models::ReportedModels;
use crate::other_gateways::OtherGateways;
use crate::state_folder::{self, KEY_BYTES};
use sluice_gateway::config::OnStart;
use sluice_gateway::pool::{Admission, Cordon};

/// Between two looks at whether another gateway has ended.
const BESIDE_LOOK: Duration = Duration::from_millis(100);

/// Makes the driver of an engine that is new.
pub type DriverMaker = Arc<dyn Fn(&EngineSpec) -> SharedDriver + Send + Sync>;

/// The shared state of the coordinator.
pub(super) struct Registry {
    pub(super) admission: Arc<Admission>,
    pub(super) reported: Arc<ReportedModels>,
    pub(super) maker: DriverMaker,
    journal: Mutex<Option<Arc<Mutex<Journal>>>>,
    /// What digests are keyed with; zeros until the journal is open.
    digest_key: Mutex<[u8; KEY_BYTES]>,
    /// The last record of each engine of earlier gateways, until the first configuration is applied.
    earlier: Mutex<Vec<Record>>,
    table: Mutex<EngineTable>,
    /// The reconciler should look again now.
    pub(super) wake: Notify,
    /// Everything that has to end before the gateway does.
    pub(super) tasks: TaskTracker,
    /// Held from the preflight of a change until the change has begun: two that pass it together would both begin.
    pub(super) change_lock: tokio::sync::Mutex<()>,
    next_change: AtomicU64,
    /// Cancelled when a shutdown must be fast.
    pub(super) fast_shutdown: CancellationToken,
    /// Whether this gateway may act on engines.
    pub(super) lead: Arc<Lead>,
    pub(super) others: Arc<OtherGateways>,
    /// No engine is started any more.
    closing: AtomicBool,
    /// What autoscaling remembers between two looks.
    scales: Mutex<Scales>,
    /// Until then, at most, another gateway has requests on engines.
    beside: Mutex<Option<Instant>>,
    /// This gateway gave its engines away, and takes them back.
    took_back: AtomicBool,
    /// The engine that is being stopped to be replaced by another one in its place.
    replaced: Mutex<Option<Arc<str>>>,
}

/// An engine is being replaced until this is dropped.
pub(super) struct Replacing<'a>(&'a Registry);

impl Drop for Replacing<'_> {
    fn drop(&mut self) {
        *self.0.replaced.lock() = None;
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").field("table", &self.table).finish_non_exhaustive()
    }
}

impl Registry {
    pub(super) fn new(admission: Arc<Admission>, reported: Arc<ReportedModels>, maker: DriverMaker) -> Self {
        Self {
            admission,
            reported,
            maker,
            journal: Mutex::default(),
            digest_key: Mutex::default(),
            earlier: Mutex::default(),
            table: Mutex::default(),
            wake: Notify::new(),
            tasks: TaskTracker::new(),
            change_lock: tokio::sync::Mutex::default(),
            next_change: AtomicU64::new(1),
            fast_shutdown: CancellationToken::new(),
            lead: Arc::default(),
            others: Arc::default(),
            closing: AtomicBool::new(false),
            scales: Mutex::default(),
            beside: Mutex::default(),
            took_back: AtomicBool::new(false),
            replaced: Mutex::default(),
        }
    }

    /// Opens the journal, unless it is open. Numbers of changes go on from the highest in it.
    pub(super) fn open_journal(&self, folder: &Path) -> Result<(), JournalError> {
        let mut journal = self.journal.lock();
        if journal.is_none() {
            let opened = Journal::open(folder)?;
            let unusable = |source| JournalError::Unusable { path: folder.to_owned(), source };
            *self.digest_key.lock() = state_folder::key(folder).map_err(unusable)?;
            let known = opened.last().values().flat_map(|record| {
                let change = record.lifecycle.change.as_ref().map(|change| change.id);
                change.into_iter().chain(record.lifecycle.ended.as_ref().map(|ended| ended.id))
            });
            self.next_change.store(known.max().unwrap_or(0) + 1, Ordering::Relaxed);
            *self.earlier.lock() = opened.last().values().cloned().collect();
            *journal = Some(Arc::new(Mutex::new(opened)));
        }
        Ok(())
    }

    pub(super) fn digest_key(&self) -> [u8; KEY_BYTES] {
        *self.digest_key.lock()
    }

    pub(super) fn journal(&self) -> Option<Arc<Mutex<Journal>>> {
        self.journal.lock().clone()
    }

    /// The last records of earlier gateways; empty from the second call on.
    pub(super) fn take_earlier_records(&self) -> Vec<Record> {
        std::mem::take(&mut *self.earlier.lock())
    }

    pub(super) fn table(&self) -> MutexGuard<'_, EngineTable> {
        self.table.lock()
    }

    /// The number of a new change.
    pub(super) fn next_change(&self) -> u64 {
        self.next_change.fetch_add(1, Ordering::Relaxed)
    }

    /// From now on no engine is started, and the reconciler ends.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }

    /// Undoes [`Registry::close`].
    pub(super) fn reopen(&self) {
        self.tasks.reopen();
        self.took_back.store(true, Ordering::Relaxed);
        self.closing.store(false, Ordering::Relaxed);
    }

    /// Whether engines that run were handed over, so that requests are on them: by a gateway that is upgraded or led before.
    pub(super) fn is_handed_over(&self) -> bool {
        self.took_back.load(Ordering::Relaxed) || self.beside.lock().is_some() || self.lead.is_elected()
    }

    /// Notes that an engine is being replaced. Call it under the lock of changes.
    pub(super) fn replace(&self, name: &Arc<str>) -> Replacing<'_> {
        *self.replaced.lock() = Some(Arc::clone(name));
        Replacing(self)
    }

    /// The engine that is being replaced.
    pub(super) fn replaced(&self) -> Option<Arc<str>> {
        self.replaced.lock().clone()
    }

    /// Unlocks the journal for another gateway. Nothing is written to it any more.
    pub(super) fn close_journal(&self) {
        if let Some(journal) = self.journal.lock().take() {
            journal.lock().close();
        }
    }

    pub(super) fn set_beside(&self, until: Option<Instant>) {
        *self.beside.lock() = until;
    }

    /// Returns when no other gateway has requests on engines, or when this one stops.
    pub(super) async fn until_alone(&self) {
        while !self.is_closing() && self.beside.lock().is_some_and(|until| Instant::now() < until) {
            sleep(BESIDE_LOOK).await;
        }
    }

    /// Whether [`Registry::close`] was called.
    pub(super) fn is_closed(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Whether nothing may be done to engines, since the gateway stops or another one may lead.
    pub(super) fn is_closing(&self) -> bool {
        self.is_closed() || !self.lead.is_held()
    }

    /// Whether a newer configuration than this was applied, or the gateway stops.
    pub(super) fn is_outdated(&self, generation: u64) -> bool {
        self.is_closing() || self.table().wanted.generation != generation
    }

    pub(super) fn handle(&self, name: &str) -> Option<EngineHandle> {
        self.table().managed.get(name).map(|engine| engine.handle.clone())
    }

    /// The engines of a pool that have a task, in the order of the configuration.
    pub(super) fn engines_of(&self, pool: &str) -> Vec<EngineHandle> {
        let table = self.table();
        let own = table.wanted.engines.iter().filter(|spec| spec.pool() == pool);
        own.filter_map(|spec| table.managed.get(&*spec.name)).map(|engine| engine.handle.clone()).collect()
    }

    pub(super) fn scales(&self) -> MutexGuard<'_, Scales> {
        self.scales.lock()
    }

    pub(super) fn context(&self, name: &str) -> Option<Arc<EngineContext>> {
        self.handle(name).map(|handle| handle.context)
    }

    /// Makes a configuration the one in force.
    pub(super) fn set_wanted(&self, engines: Vec<EngineSpec>, external: Vec<ExternalBackend>) {
        let mut table = self.table();
        let generation = table.wanted.generation + 1;
        table.wanted = Wanted { generation, engines, external };
        self.scales().retain(|pool| table.wanted.engines.iter().any(|spec| spec.pool() == pool));
        for spec in &table.wanted.engines {
            let Some(engine) = table.managed.get(&*spec.name) else { continue };
            let context = &engine.handle.context;
            context.state.lock().lifecycle.unblock();
            // An engine with another program is replaced; until then its description stays.
            if context.identity == spec.identity {
                context.describe(spec.clone());
            }
        }
    }

    /// Starts the task of an engine, as the latest configuration describes it. Returns what is in its way, if anything is;
    /// nothing happens for an engine that has a task or is no longer configured.
    pub(super) fn start_engine(&self, name: &str) -> Option<RestartBlocked> {
        let Some(journal) = self.journal() else {
            tracing::error!(backend = name, "not started: the journal is not open");
            return None;
        };
        let mut table = self.table();
        // After `close` the engines are listed to be stopped.
        if self.is_closing() || table.managed.contains_key(name) {
            return None;
        }
        let mut spec = table.wanted.engine(name)?.clone();
        if let Some(blocked) = table.blocker(&spec) {
            return Some(blocked);
        }
        // `fleet.on_start` is about engines that a crash has left.
        if self.is_handed_over() {
            spec.rules.on_start = OnStart::Adopt;
        }
        let driver = (self.maker)(&spec);
        let (admission, reported) = (Arc::clone(&self.admission), Arc::clone(&self.reported));
        let ends = (self.fast_shutdown.clone(), Arc::clone(&self.lead), Arc::clone(&self.others));
        let context = Arc::new(EngineContext::new(spec, driver, admission, reported, journal, ends));
        table.managed.insert(name.to_owned(), engine_task::spawn(context));
        None
    }

    /// Sets the cordons of backends without an engine task.
    pub(super) fn update_cordons(&self) {
        let table = self.table();
        for spec in &table.wanted.engines {
            let managed = table.managed.get(&*spec.name);
            if managed.is_none_or(|engine| engine.handle.context.spec().backend != spec.backend) {
                // Before the prober can find another server on that port.
                self.admission.set_cordon(spec.backend, Cordon::Starting);
            }
        }
        for external in &table.wanted.external {
            let occupied = table.is_occupied(&external.endpoint);
            let cordon = match (occupied, external.cordoned) {
                (true, _) => Cordon::Starting,
                (false, true) => Cordon::Draining,
                (false, false) => Cordon::Open,
            };
            self.admission.set_cordon(external.backend, cordon);
            self.admission.set_ceiling(external.backend, None);
        }
    }
}
