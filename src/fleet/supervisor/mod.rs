//! The supervisor: every engine that we run, and what may be asked of them.
//!
//! One [`keeper`] per engine carries its life out; here is what concerns them together. At most one planned change is under
//! way in the whole fleet, and it begins only when the others can carry what the one carries ([`preflight`]). A reload
//! starts what is new, lets go of what is no longer configured, and takes changed engines through a restart one after
//! the other. What was under way when a gateway died is found in the [journal](super::journal) and continued.
//!
//! Bounds: one keeper per configured backend; [`COMMANDS`] waiting commands each.

mod effects;
mod engine;
mod keeper;
mod preflight;
mod roll;
mod scene;
mod view;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::driver::{AnyDriver, Failure, Settings};
use super::journal::{Journal, JournalError};
use super::life::{Life, Refused, Step};
use super::probe::Reported;
use crate::config::{ArgValue, OnStart};
use crate::pool::{Admission, BackendView, Cordon};
use keeper::{Command, keep};
use scene::{Kept, Scene};

pub use preflight::NotNow;
pub use scene::EngineSpec;
pub use view::{EngineView, LastChange};

/// Commands that may wait for one keeper; each is obeyed within moments.
const COMMANDS: usize = 16;

/// Makes the driver of an engine that is new.
pub type DriverMaker = Arc<dyn Fn(&EngineSpec) -> AnyDriver + Send + Sync>;

/// Why a restart does not begin. Nothing was touched.
#[derive(Debug, thiserror::Error)]
pub enum CannotRestart {
    /// The gateway does not run that engine.
    #[error(
        "{0} is run by somebody else (it has a url, no launch and no control): drain it here, restart it there, then enable it"
    )]
    NotOurs(String),
    /// One change at a time.
    #[error("{0} is being changed; one at a time: wait until it serves (sluice backend list)")]
    Another(String),
    /// The settings cannot work.
    #[error("these settings would not start: {0}")]
    Settings(#[from] Failure),
    /// The others cannot stand in.
    #[error(transparent)]
    NotNow(#[from] NotNow),
    /// The moment is wrong.
    #[error("{0}")]
    Refused(#[from] Refused),
}

/// What is asked for with a restart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RestartAsk {
    /// Flags that change; the others stay as they run now.
    pub set: BTreeMap<String, ArgValue>,
    /// Forget earlier changes: start from the configuration.
    pub reset: bool,
    /// Go on although nobody can stand in: requests wait in the queue.
    pub hold: bool,
    /// Requests that outlast the drain are cut.
    pub cut: bool,
}

/// One engine and its keeper.
#[derive(Debug)]
struct Hand {
    scene: Arc<Scene>,
    commands: mpsc::Sender<Command>,
    task: JoinHandle<()>,
}

/// All engines that this gateway runs.
pub struct Fleet {
    admission: Arc<Admission>,
    reported: Arc<Reported>,
    journal: Mutex<Option<Arc<Mutex<Journal>>>>,
    hands: Mutex<BTreeMap<String, Hand>>,
    /// Keepers that are on their way out, until they are.
    departing: TaskTracker,
    /// Held from the preflight of a change until the change has begun: two that pass it together would both begin.
    gate: tokio::sync::Mutex<()>,
    changes: AtomicU64,
    /// Nothing is started any more.
    closing: AtomicBool,
    maker: DriverMaker,
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fleet").field("hands", &self.hands).finish_non_exhaustive()
    }
}

impl Fleet {
    /// A fleet without engines. `maker` makes the driver of each that [`Fleet::apply`] brings.
    pub fn new(admission: Arc<Admission>, reported: Arc<Reported>, maker: DriverMaker) -> Arc<Self> {
        Arc::new(Self {
            admission,
            reported,
            journal: Mutex::default(),
            hands: Mutex::default(),
            departing: TaskTracker::new(),
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
            *journal = Some(Arc::new(Mutex::new(opened)));
        }
        Ok(())
    }

    /// Takes over the engines of a configuration: new ones start, those that are gone leave, changed ones are restarted
    /// one after the other. Returns at once. Needs an open journal where there is an engine.
    pub fn apply(self: &Arc<Self>, engines: Vec<EngineSpec>) {
        if self.closing.load(Ordering::Relaxed) {
            return;
        }
        let names: Vec<Arc<str>> = engines.iter().map(|spec| Arc::clone(&spec.name)).collect();
        let gone: Vec<String> = {
            let hands = self.hands.lock();
            hands.keys().filter(|name| !names.iter().any(|kept| **kept == ***name)).cloned().collect()
        };
        gone.iter().for_each(|name| self.let_go(name));
        let mut changed = Vec::new();
        let mut new = Vec::new();
        for spec in engines {
            match self.describe(&spec) {
                Some(false) => {}
                Some(true) => changed.push(spec),
                None => new.push(spec),
            }
        }
        // Before the prober can find another server on that port.
        for spec in &new {
            self.admission.set_cordon(spec.backend, Cordon::Coming);
        }
        if !new.is_empty() || !changed.is_empty() || !gone.is_empty() {
            tokio::spawn(roll::roll(Arc::clone(self), gone, new, changed));
        }
    }

    /// Tells a keeper what is said of its engine now; whether that takes a restart. `None`: there is no such keeper.
    fn describe(&self, spec: &EngineSpec) -> Option<bool> {
        let hands = self.hands.lock();
        let hand = hands.get(&*spec.name)?;
        let differs = hand.scene.spec.load().configured != spec.configured;
        // A full line means that the keeper has stopped listening, and then it is leaving.
        let _ = hand.commands.try_send(Command::Describe(Box::new(spec.clone())));
        Some(differs)
    }

    /// Starts to keep an engine.
    fn take_on(self: &Arc<Self>, spec: EngineSpec) {
        // A roll that was waiting when the gateway was told to stop.
        if self.closing.load(Ordering::Relaxed) {
            return;
        }
        let Some(journal) = self.journal.lock().clone() else {
            tracing::error!(backend = %spec.name, "not started: there is no journal");
            return;
        };
        let name = spec.name.to_string();
        let kept = Kept {
            life: Life::new(spec.settings.clone()),
            trace: None,
            golden: Vec::new(),
            configured: spec.configured.clone(),
            since: Instant::now(),
            detail: String::new(),
            adopted: false,
        };
        let driver = (self.maker)(&spec);
        let admission = Arc::clone(&self.admission);
        let (identity, kept) = (spec.identity.clone(), Mutex::new(kept));
        let scene = Arc::new(Scene { spec: ArcSwap::from_pointee(spec), driver, admission, journal, kept, identity });
        let (commands, inbox) = mpsc::channel(COMMANDS);
        let kept = Arc::clone(&scene);
        let task = tokio::spawn(async move {
            recover(&kept).await;
            keep(kept, inbox).await;
        });
        self.hands.lock().insert(name, Hand { scene, commands, task });
    }

    /// Lets an engine drain and stop; its keeper ends with it.
    fn let_go(&self, name: &str) {
        let Some(hand) = self.hands.lock().remove(name) else { return };
        let _ = hand.commands.try_send(Command::Leave);
        self.departing.spawn(async move {
            if let Err(error) = hand.task.await {
                tracing::error!(%error, "a keeper failed");
            }
        });
    }

    /// Returns when whoever was let go has stopped.
    async fn departed(&self) {
        self.departing.close();
        self.departing.wait().await;
    }

    /// What is no longer configured and has stopped need not be written again.
    fn forget(&self, names: &[String]) {
        let Some(journal) = self.journal.lock().clone() else { return };
        let mut journal = journal.lock();
        let stopped =
            |journal: &Journal, name: &str| journal.last().get(name).is_some_and(|r| r.life.step == Step::Off);
        for name in names {
            if stopped(&journal, name) {
                journal.forget(name);
            }
        }
    }

    /// Restarts an engine. Returns the number of the change once it has begun; [`Fleet::views`] shows how it goes on.
    ///
    /// # Errors
    /// It does not begin, and nothing was touched.
    pub async fn restart(&self, name: &str, ask: RestartAsk) -> Result<u64, CannotRestart> {
        let (scene, _) = self.hand(name).ok_or_else(|| CannotRestart::NotOurs(name.to_owned()))?;
        let base = if ask.reset { scene.spec.load().settings.clone() } else { scene.settings() };
        let to = base.with(&ask.set);
        self.change(name, to, ask).await
    }

    /// The same with all of its settings said. The keeper may not yet have read what was last said of its engine.
    async fn change(&self, name: &str, to: Settings, ask: RestartAsk) -> Result<u64, CannotRestart> {
        let (scene, commands) = self.hand(name).ok_or_else(|| CannotRestart::NotOurs(name.to_owned()))?;
        let spec = scene.spec.load_full();
        preflight::could_run(&scene, &to).await?;
        let _gate = self.gate.lock().await;
        if let Some(other) = self.views().into_iter().find(|view| view.change.is_some()) {
            return Err(CannotRestart::Another(other.backend));
        }
        if scene.step().in_rotation() && !ask.hold {
            self.may_go(&spec).await?;
        }
        let id = self.changes.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let told = commands.send(Command::Change { id, to, cut: ask.cut, answer }).await;
        told.map_err(|_| Refused::Leaving)?;
        answered.await.map_err(|_| Refused::Leaving)??;
        Ok(id)
    }

    /// Lets an engine that holds, or waits for its next attempt, try now. Nothing for one that somebody else runs.
    ///
    /// # Errors
    /// It is being shut down.
    pub async fn enable(&self, name: &str) -> Result<(), Refused> {
        let Some((_, commands)) = self.hand(name) else { return Ok(()) };
        let (answer, answered) = oneshot::channel();
        commands.send(Command::Enable { answer }).await.map_err(|_| Refused::Leaving)?;
        answered.await.map_err(|_| Refused::Leaving)?
    }

    /// Every engine as it stands, in the order of names.
    pub fn views(&self) -> Vec<EngineView> {
        self.hands.lock().values().map(|hand| view::of(&hand.scene)).collect()
    }

    /// Stops every engine and waits until they are gone. Nothing is started any more.
    pub async fn stop(&self) {
        self.closing.store(true, Ordering::Relaxed);
        let names: Vec<String> = self.hands.lock().keys().cloned().collect();
        names.iter().for_each(|name| self.let_go(name));
        self.departed().await;
    }

    /// Stops keeping them; the engines go on, and the journal says where they are.
    pub fn abandon(&self) {
        self.closing.store(true, Ordering::Relaxed);
        for hand in std::mem::take(&mut *self.hands.lock()).into_values() {
            hand.task.abort();
        }
    }

    fn hand(&self, name: &str) -> Option<(Arc<Scene>, mpsc::Sender<Command>)> {
        let hands = self.hands.lock();
        hands.get(name).map(|hand| (Arc::clone(&hand.scene), hand.commands.clone()))
    }

    /// Asks every engine what it serves now, because what probes report may be some seconds old, and judges.
    async fn may_go(&self, spec: &EngineSpec) -> Result<(), NotNow> {
        let mut asking = JoinSet::new();
        for backend in self.admission.view().into_iter().flat_map(|pool| pool.backends) {
            let patience = spec.patience;
            asking.spawn(async move { (backend.id, engine::names(&backend.address, patience).await) });
        }
        let mut now = BTreeMap::new();
        while let Some(asked) = asking.join_next().await {
            if let Ok((id, Ok((names, _)))) = asked {
                now.insert(id, names);
            }
        }
        let (pool, name) = spec.name.split_once('/').unwrap_or(("", &spec.name));
        // One that does not answer now is taken at its last word for what it serves; whether it is fit is admission's.
        let names =
            |backend: &BackendView| now.get(&backend.id).cloned().unwrap_or_else(|| self.reported.of(backend.id));
        preflight::may_go(&self.admission.view(), (pool, name), &spec.spill, names, spec.rules.headroom)
    }
}

/// Finds what an earlier gateway left of this engine, and decides where its life goes on.
async fn recover(scene: &Arc<Scene>) {
    let spec = scene.spec.load_full();
    let record = scene.journal.lock().last().get(&*spec.name).cloned();
    let written = record.as_ref().and_then(|record| record.trace.clone());
    let alive = match &written {
        Some(trace) => match scene.driver.adopt(trace).await {
            Ok(alive) => alive,
            Err(failure) => {
                tracing::error!(backend = %spec.name, "an engine of an earlier gateway cannot be told: {failure}");
                false
            }
        },
        None => false,
    };
    if !alive && let Some(trace) = scene.driver.find().await {
        // Without its line in the journal it is not known what it runs: it is there to be stopped.
        tracing::warn!(backend = %spec.name, "found what is left of an engine that the journal does not know");
        if let Err(failure) = scene.driver.adopt(&trace).await {
            tracing::error!(backend = %spec.name, "it cannot be taken over: {failure}");
        }
    }
    let Some(record) = record else { return };
    let adopt = spec.rules.on_start == OnStart::Adopt;
    let mut kept = scene.kept.lock();
    // Another program or model answers otherwise, and is meant to.
    kept.golden = if record.configured == spec.configured { record.golden } else { Vec::new() };
    kept.trace = written.filter(|_| alive);
    kept.life = if record.configured == spec.configured {
        record.life.recover(alive, adopt)
    } else {
        record.life.anew(spec.settings.clone())
    };
    kept.adopted = kept.life.step == Step::Adopt;
    if kept.life.wanted != spec.settings {
        let settings = keeper::shown(&kept.life.wanted);
        tracing::info!(backend = %spec.name, settings, "flags were changed since the configuration (restart --reset undoes that)");
    }
    tracing::info!(backend = %spec.name, alive, step = kept.life.step.label(), "goes on where an earlier gateway left off");
}
