//! The state that the parts of the coordinator share: the engine table, the journal, admission,
//! tasks.
//!
//! One lock guards the [table](EngineTable), so that the configuration, the running engines and the
//! engines being stopped are consistent. It is held briefly, never across an await. The lock of an
//! engine's state may be taken under it, never the other way round.

use std::collections::BTreeMap;
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
use super::turns::Turns;
use crate::driver::SharedDriver;
use crate::engine::context::EngineContext;
use crate::engine::engine_task::{self, EngineHandle};
use crate::engine::journal::{Journal, JournalError, JournalLine};
use crate::engine::lifecycle::RestartBlocked;
use crate::engine::spec::EngineSpec;
use crate::lead::Lead;
use crate::models::ReportedModels;
use crate::other_gateways::OtherGateways;
use crate::state_folder::{self, KEY_BYTES};
use sluice_config::OnStart;
use sluice_gateway::pool::{Admission, Bound, Cordon};

/// Pause between two checks whether another gateway has ended.
const BESIDE_LOOK: Duration = Duration::from_millis(100);

/// Makes the driver of a new engine.
pub type DriverMaker = Arc<dyn Fn(&EngineSpec) -> SharedDriver + Send + Sync>;

pub(super) struct Registry {
    pub(super) admission: Arc<Admission>,
    pub(super) reported: Arc<ReportedModels>,
    pub(super) maker: DriverMaker,
    journal: Mutex<Option<Arc<Mutex<Journal>>>>,
    /// The key of digests; zeros until the journal is open.
    digest_key: Mutex<[u8; KEY_BYTES]>,
    /// The last record of each engine of earlier gateways, until the first configuration.
    earlier: Mutex<Vec<JournalLine>>,
    table: Mutex<EngineTable>,
    /// Wakes the reconciler.
    pub(super) wake: Notify,
    /// Tasks that must end before the gateway does.
    pub(super) tasks: TaskTracker,
    /// Held from the preflight of a change until the change has begun, so that no two changes pass
    /// the preflight together.
    pub(super) change_lock: tokio::sync::Mutex<()>,
    next_change: AtomicU64,
    pub(super) fast_shutdown: CancellationToken,
    pub(super) lead: Arc<Lead>,
    pub(super) others: Arc<OtherGateways>,
    /// Whether no engine may be started any more.
    closing: AtomicBool,
    /// State of autoscaling between two calls.
    scales: Mutex<Scales>,
    /// Turns of engines that share a device.
    turns: Mutex<Turns>,
    /// The latest time until which another gateway may have requests on the engines.
    beside: Mutex<Option<Instant>>,
    /// Whether this gateway gave the engines away and took them back.
    took_back: AtomicBool,
    /// The engine that another one is about to replace.
    replaced: Mutex<Option<Arc<str>>>,
}

/// While this exists, an engine is being replaced.
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
            turns: Mutex::default(),
            beside: Mutex::default(),
            took_back: AtomicBool::new(false),
            replaced: Mutex::default(),
        }
    }

    /// Opens the journal, unless it is open. Numbers of changes continue after the highest in it.
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
    pub(super) fn take_earlier_records(&self) -> Vec<JournalLine> {
        std::mem::take(&mut *self.earlier.lock())
    }

    pub(super) fn table(&self) -> MutexGuard<'_, EngineTable> {
        self.table.lock()
    }

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

    /// Whether engines that run now, with requests on them, may come from an upgraded gateway, an
    /// earlier leader or this gateway itself.
    pub(super) fn is_handed_over(&self) -> bool {
        self.took_back.load(Ordering::Relaxed) || self.beside.lock().is_some() || self.lead.is_elected()
    }

    /// Records that an engine is being replaced. The caller holds the lock of changes.
    pub(super) fn replace(&self, name: &Arc<str>) -> Replacing<'_> {
        *self.replaced.lock() = Some(Arc::clone(name));
        Replacing(self)
    }

    pub(super) fn replaced(&self) -> Option<Arc<str>> {
        self.replaced.lock().clone()
    }

    /// Unlocks the journal for another gateway. This gateway writes nothing more to the journal.
    pub(super) fn close_journal(&self) {
        if let Some(journal) = self.journal.lock().take() {
            journal.lock().close();
        }
    }

    pub(super) fn set_beside(&self, until: Option<Instant>) {
        *self.beside.lock() = until;
    }

    /// Returns when no other gateway has requests on the engines, or this gateway stops.
    pub(super) async fn until_alone(&self) {
        while !self.is_closing() && self.beside.lock().is_some_and(|until| Instant::now() < until) {
            sleep(BESIDE_LOOK).await;
        }
    }

    /// Whether [`Registry::close`] was called.
    pub(super) fn is_closed(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Whether this gateway must not act on engines, because it stops or another gateway may lead.
    pub(super) fn is_closing(&self) -> bool {
        self.is_closed() || !self.lead.is_held()
    }

    /// Whether a newer configuration was applied, or the gateway stops.
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

    /// Engines with a task that share a device, by the name of the share.
    pub(super) fn sharing_engines(&self) -> BTreeMap<String, Vec<EngineHandle>> {
        let table = self.table();
        let managed = table.wanted.engines.iter().filter_map(|spec| table.managed.get(&*spec.name));
        let mut shares: BTreeMap<String, Vec<EngineHandle>> = BTreeMap::new();
        for handle in managed.map(|engine| &engine.handle) {
            if let Some(share) = handle.context.spec().share() {
                shares.entry(share.to_owned()).or_default().push(handle.clone());
            }
        }
        shares
    }

    pub(super) fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock()
    }

    pub(super) fn scales(&self) -> MutexGuard<'_, Scales> {
        self.scales.lock()
    }

    pub(super) fn context(&self, name: &str) -> Option<Arc<EngineContext>> {
        self.handle(name).map(|handle| handle.context)
    }

    pub(super) fn set_wanted(&self, engines: Vec<EngineSpec>, external: Vec<ExternalBackend>) {
        let mut table = self.table();
        let generation = table.wanted.generation + 1;
        table.wanted = Wanted { generation, engines, external };
        self.scales().retain(|pool| table.wanted.engines.iter().any(|spec| spec.pool() == pool));
        for spec in &table.wanted.engines {
            let Some(engine) = table.managed.get(&*spec.name) else { continue };
            let context = &engine.handle.context;
            context.state.lock().lifecycle.unblock();
            // An engine that gets another program is replaced. Until then the old description
            // stays.
            if context.identity == spec.identity {
                context.describe(spec.clone());
            }
        }
    }

    /// Starts the task of an engine, as the configuration in force describes it. If another engine
    /// blocks the start, returns the reason instead. Does nothing for an engine that has a task or
    /// is not configured.
    pub(super) fn start_engine(&self, name: &str) -> Option<RestartBlocked> {
        let Some(journal) = self.journal() else {
            tracing::error!(backend = name, "not started: the journal is not open");
            return None;
        };
        let mut table = self.table();
        // After `close` no engine may be added.
        if self.is_closing() || table.managed.contains_key(name) {
            return None;
        }
        let mut spec = table.wanted.engine(name)?.clone();
        if let Some(blocked) = table.blocker(&spec) {
            return Some(blocked);
        }
        // `fleet.on_start` concerns only engines that a crash left.
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
                // The cordon is set before the prober can find another server on that port.
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
            self.admission.set_bounds([(external.backend, Bound::Ceiling(None))]);
        }
    }
}
