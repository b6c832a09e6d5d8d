//! The supervisor: every engine that we run, and what may be asked of them.
//!
//! One [`keeper`] per engine carries its life out; here is what concerns them together. At most one planned change is under
//! way in the whole fleet, and it begins only when the others can carry what the one carries ([`preflight`]). A configuration
//! is what the [reconciler](reconcile) works towards: it starts what is new, lets go of what is no longer configured, and
//! takes changed engines through a restart one after the other ([`roll`]). What was under way when a gateway died is found
//! in the [journal](super::journal) and continued ([`recover`]).
//!
//! Bounds: one keeper per configured backend; [`COMMANDS`] waiting commands each.

mod leftovers;
mod reconcile;
mod rollout;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::driver::{EngineFailure, SharedDriver};
use super::engine::context::{EngineContext, EngineState};
use super::engine::engine_task::{self, ChangeRequest, Command, run_engine};
use super::engine::journal::{Journal, JournalError, Record, Setup};
use super::engine::lifecycle::{ChangeRefused, Lifecycle};
use super::engine::{preflight, recover, view};
use super::probe::ReportedModels;
use reconcile::Departing;
use sluice_core::base::BackendId;
use sluice_gateway::config::{ArgValue, Endpoint};
use sluice_gateway::pool::{Admission, Cordon};

pub use super::engine::context::EngineSpec;
pub use super::engine::preflight::RestartBlocked;
pub use super::engine::view::{EngineView, LastChange};
pub use leftovers::unattended;

/// Commands that may wait for one keeper; each is obeyed within moments.
const COMMANDS: usize = 16;

/// Makes the driver of an engine that is new.
pub type DriverMaker = Arc<dyn Fn(&EngineSpec) -> SharedDriver + Send + Sync>;

/// Why a restart does not begin. Nothing was touched.
#[derive(Debug, thiserror::Error)]
pub enum RestartError {
    /// The gateway does not run that engine.
    #[error(
        "{0} is not managed by sluice (it has a url, no launch and no control): drain it here, restart it where it runs, \
         then enable it"
    )]
    NotManaged(String),
    /// One change at a time.
    #[error(
        "{0} is being changed, and only one engine is changed at a time: wait until it serves (sluice backend list)"
    )]
    ChangeInProgress(String),
    /// The settings cannot work.
    #[error("these settings would not start: {0}")]
    InvalidSettings(#[from] EngineFailure),
    /// The other backends cannot carry its load.
    #[error(transparent)]
    Blocked(#[from] RestartBlocked),
    /// The engine takes no change now.
    #[error(transparent)]
    Refused(#[from] ChangeRefused),
    /// A newer configuration was applied meanwhile.
    #[error("the configuration has changed since")]
    Outdated,
}

/// What is asked for with a restart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RestartRequest {
    /// Flags that change; the others stay as they run now.
    pub set: BTreeMap<String, ArgValue>,
    /// Forget earlier changes: start from the configuration.
    pub reset: bool,
    /// Go on although nobody can stand in: requests wait in the queue.
    pub hold: bool,
    /// Requests that outlast the drain are cut.
    pub cut: bool,
}

/// A change that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeStarted {
    /// Its number: [`EngineView::change`] while it is under way, [`EngineView::last_change`] after it.
    pub change: u64,
    /// What is worth knowing about the settings.
    pub notices: Vec<String>,
}

/// One engine and its keeper.
#[derive(Debug)]
struct EngineHandle {
    context: Arc<EngineContext>,
    commands: mpsc::Sender<Command>,
    leave: CancellationToken,
    task: JoinHandle<()>,
}

/// What the configuration in force asks for.
#[derive(Debug, Default)]
struct Wanted {
    /// Grows with each configuration.
    number: u64,
    /// In the order of the configuration.
    engines: Vec<EngineSpec>,
    /// Backends that somebody else runs.
    others: Vec<ExternalBackend>,
}

/// A backend whose engine somebody else runs.
#[derive(Clone, Debug)]
pub struct ExternalBackend {
    /// Its place in admission.
    pub backend: BackendId,
    /// Where it is reached.
    pub endpoint: Endpoint,
}

/// All engines that this gateway runs.
pub struct Fleet {
    admission: Arc<Admission>,
    reported: Arc<ReportedModels>,
    journal: Mutex<Option<Arc<Mutex<Journal>>>>,
    /// What earlier gateways wrote last of each engine, until the first configuration is applied.
    earlier: Mutex<Vec<Record>>,
    handles: Mutex<BTreeMap<String, EngineHandle>>,
    wanted: Mutex<Wanted>,
    /// Engines that were let go and may still run.
    departing: Mutex<Vec<Departing>>,
    /// Something is to be looked at again.
    look: Notify,
    /// The reconciler runs.
    reconciling: AtomicBool,
    /// Everything that has to end before the gateway does.
    tasks: TaskTracker,
    /// Held from the preflight of a change until the change has begun: two that pass it together would both begin.
    gate: tokio::sync::Mutex<()>,
    changes: AtomicU64,
    /// Nothing is started any more.
    closing: AtomicBool,
    maker: DriverMaker,
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fleet").field("handles", &self.handles).finish_non_exhaustive()
    }
}

impl Fleet {
    /// A fleet without engines. `maker` makes the driver of each that [`Fleet::apply`] brings.
    pub fn new(admission: Arc<Admission>, reported: Arc<ReportedModels>, maker: DriverMaker) -> Arc<Self> {
        Arc::new(Self {
            admission,
            reported,
            journal: Mutex::default(),
            earlier: Mutex::default(),
            handles: Mutex::default(),
            wanted: Mutex::default(),
            departing: Mutex::default(),
            look: Notify::new(),
            reconciling: AtomicBool::new(false),
            tasks: TaskTracker::new(),
            gate: tokio::sync::Mutex::default(),
            changes: AtomicU64::new(1),
            closing: AtomicBool::new(false),
            maker,
        })
    }

    /// Opens the journal, unless it is open. To be called before engines are applied for the first time.
    ///
    /// # Errors
    /// The folder cannot be used, or another gateway uses it.
    pub fn open(&self, folder: &Path) -> Result<(), JournalError> {
        let mut journal = self.journal.lock();
        if journal.is_none() {
            let opened = Journal::open(folder)?;
            let known = opened.last().values().flat_map(|record| {
                let change = record.life.change.as_ref().map(|change| change.id);
                change.into_iter().chain(record.life.ended.as_ref().map(|ended| ended.id))
            });
            self.changes.store(known.max().unwrap_or(0) + 1, Ordering::Relaxed);
            *self.earlier.lock() = opened.last().values().cloned().collect();
            *journal = Some(Arc::new(Mutex::new(opened)));
        }
        Ok(())
    }

    /// Takes over a configuration: new engines start, those that are gone leave, changed ones are restarted one after the
    /// other. Returns at once; the [reconciler](reconcile) does it. Needs an open journal where there is an engine.
    pub fn apply(self: &Arc<Self>, engines: Vec<EngineSpec>, others: Vec<ExternalBackend>) {
        if self.is_closing() {
            return;
        }
        {
            let mut wanted = self.wanted.lock();
            let number = wanted.number + 1;
            *wanted = Wanted { number, engines: engines.clone(), others };
        }
        // After that: an engine that is taken on meanwhile knows the new words already.
        engines.iter().for_each(|spec| self.describe(spec));
        let earlier = std::mem::take(&mut *self.earlier.lock());
        leftovers::clear(self, earlier);
        reconcile::tidy(self);
        self.look.notify_one();
        if !self.reconciling.swap(true, Ordering::Relaxed) {
            let fleet = Arc::clone(self);
            self.tasks.spawn(async move { reconcile::reconcile(fleet).await });
        }
    }

    /// Tells a keeper what is said of its engine now. One with another program is replaced: until then it is what it was.
    fn describe(&self, spec: &EngineSpec) {
        let handles = self.handles.lock();
        let Some(handle) = handles.get(&*spec.name) else { return };
        handle.context.state.lock().waits = None;
        if handle.context.identity == spec.identity {
            engine_task::describe(&handle.context, spec.clone());
        }
    }

    /// Starts to keep an engine, as the latest configuration describes it, unless somebody is in its way. Whether it is kept.
    fn take_on(self: &Arc<Self>, name: &str) -> bool {
        let Some(journal) = self.journal.lock().clone() else {
            tracing::error!(backend = name, "not started: there is no journal");
            return true;
        };
        let wanted = self.wanted.lock();
        let Some(spec) = wanted.engines.iter().find(|spec| *spec.name == *name).cloned() else { return true };
        let mut handles = self.handles.lock();
        // Whoever closes lists the handles after that.
        if self.is_closing() || handles.contains_key(name) {
            return true;
        }
        if reconcile::in_the_way(&wanted, &handles, &self.departing.lock(), &spec).is_some() {
            return false;
        }
        let state = EngineState {
            life: Lifecycle::new(spec.setup()),
            trace: None,
            golden: Vec::new(),
            recovered: false,
            since: Instant::now(),
            detail: String::new(),
            adopted: false,
            spared: false,
            waits: None,
            unwanted: Vec::new(),
        };
        let context = Arc::new(EngineContext {
            driver: (self.maker)(&spec),
            admission: Arc::clone(&self.admission),
            reported: Arc::clone(&self.reported),
            journal,
            state: Mutex::new(state),
            adapters: Notify::new(),
            identity: spec.identity.clone(),
            spec: ArcSwap::from_pointee(spec),
        });
        let (commands, inbox) = mpsc::channel(COMMANDS);
        let leave = CancellationToken::new();
        let (engine, leaves) = (Arc::clone(&context), leave.clone());
        let task = tokio::spawn(async move {
            recover::recover(&engine).await;
            run_engine(engine, inbox, leaves).await;
        });
        handles.insert(name.to_owned(), EngineHandle { context, commands, leave, task });
        true
    }

    /// Lets an engine drain and stop; its keeper ends with it. `number`: only if no newer configuration was applied.
    fn let_go(self: &Arc<Self>, name: &str, number: Option<u64>) -> bool {
        // In this order everywhere: what is wanted, who is kept, who departs.
        let wanted = self.wanted.lock();
        if number.is_some_and(|number| wanted.number != number) {
            return false;
        }
        let Some(handle) = self.handles.lock().remove(name) else { return false };
        // At once, before anybody counts on it. Who waits for its place may go on waiting.
        handle.context.set_cordon(Cordon::Draining);
        handle.leave.cancel();
        self.departing.lock().push(Departing::of(&handle.context));
        let fleet = Arc::clone(self);
        self.tasks.spawn(async move {
            if let Err(error) = handle.task.await {
                tracing::error!(%error, "a keeper failed");
            }
            reconcile::see_off(&fleet, &handle.context).await;
        });
        true
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Whether a newer configuration than this was applied, or the gateway stops.
    fn is_outdated(&self, number: u64) -> bool {
        self.is_closing() || self.wanted.lock().number != number
    }

    /// Restarts an engine. Returns once the change has begun; [`Fleet::views`] shows how it goes on.
    ///
    /// # Errors
    /// It does not begin, and nothing was touched.
    pub async fn restart(&self, name: &str, ask: RestartRequest) -> Result<ChangeStarted, RestartError> {
        let (context, _) = self.handle(name).ok_or_else(|| RestartError::NotManaged(name.to_owned()))?;
        let Setup { settings, configured } = if ask.reset { context.spec.load().setup() } else { context.setup() };
        let to = Setup { settings: settings.with(&ask.set), configured };
        self.change(name, to, ask, None).await
    }

    /// The same with all of its settings said. The keeper may not yet have read what was last said of its engine.
    /// `number`: only if no newer configuration was applied.
    async fn change(
        &self,
        name: &str,
        to: Setup,
        ask: RestartRequest,
        number: Option<u64>,
    ) -> Result<ChangeStarted, RestartError> {
        let (context, commands) = self.handle(name).ok_or_else(|| RestartError::NotManaged(name.to_owned()))?;
        let spec = context.spec.load_full();
        let notices = preflight::could_run(&*context.driver, &spec, &to.settings).await?;
        let _gate = self.gate.lock().await;
        if let Some(other) = self.views().into_iter().find(|view| view.change.is_some()) {
            return Err(RestartError::ChangeInProgress(other.backend));
        }
        if context.step().in_rotation() && !ask.hold {
            preflight::may_go_now(&self.admission, &self.reported, &spec).await?;
        }
        if number.is_some_and(|number| self.is_outdated(number)) {
            return Err(RestartError::Outdated);
        }
        let id = self.changes.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let wish = ChangeRequest { id, to, cut: ask.cut, hold: ask.hold };
        let told = commands.send(Command::Change { wish, answer }).await;
        told.map_err(|_| ChangeRefused::Leaving)?;
        answered.await.map_err(|_| ChangeRefused::Leaving)??;
        Ok(ChangeStarted { change: id, notices: notices.iter().map(ToString::to_string).collect() })
    }

    /// Lets an engine that holds, or waits for its next attempt, try now. Nothing for one that somebody else runs.
    ///
    /// # Errors
    /// It is being shut down.
    pub async fn enable(&self, name: &str) -> Result<(), ChangeRefused> {
        let Some((_, commands)) = self.handle(name) else { return Ok(()) };
        let (answer, answered) = oneshot::channel();
        commands.send(Command::Enable { answer }).await.map_err(|_| ChangeRefused::Leaving)?;
        answered.await.map_err(|_| ChangeRefused::Leaving)?
    }

    /// Every engine as it stands, in the order of names: those that are kept, those that are on their way out, and those
    /// that wait for them.
    pub fn views(&self) -> Vec<EngineView> {
        let mut views: BTreeMap<String, EngineView> = BTreeMap::new();
        for (name, waits) in reconcile::waiting(self) {
            views.insert(
                name.clone(),
                EngineView { backend: name, step: "off".to_owned(), waits: Some(waits), ..EngineView::default() },
            );
        }
        for departing in self.departing.lock().iter() {
            views.extend(departing.view().map(|view| (view.backend.clone(), view)));
        }
        for (name, handle) in self.handles.lock().iter() {
            views.insert(name.clone(), view::of(&handle.context));
        }
        views.into_values().collect()
    }

    /// Stops every engine and waits until they are gone. Nothing is started any more.
    pub async fn stop(self: &Arc<Self>) {
        self.closing.store(true, Ordering::Relaxed);
        self.look.notify_one();
        let names: Vec<String> = self.handles.lock().keys().cloned().collect();
        for name in names {
            self.let_go(&name, None);
        }
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Stops keeping them; the engines go on, and the journal says where they are.
    pub fn abandon(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.look.notify_one();
        for handle in std::mem::take(&mut *self.handles.lock()).into_values() {
            handle.task.abort();
        }
    }

    fn handle(&self, name: &str) -> Option<(Arc<EngineContext>, mpsc::Sender<Command>)> {
        let handles = self.handles.lock();
        handles.get(name).map(|handle| (Arc::clone(&handle.context), handle.commands.clone()))
    }
}
