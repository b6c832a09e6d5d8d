//! The supervisor: every engine that we run, and what may be asked of them.
//!
//! One [`keeper`] per engine carries its life out; here is what concerns them together. At most one planned change is under
//! way in the whole fleet, and it begins only when the others can carry what the one carries ([`preflight`]). A reload
//! starts what is new, lets go of what is no longer configured, and takes changed engines through a restart one after
//! the other ([`roll`]). What was under way when a gateway died is found in the [journal](super::journal) and continued
//! ([`recover`]).
//!
//! Bounds: one keeper per configured backend; [`COMMANDS`] waiting commands each.

mod adapters;
mod effects;
mod engine;
mod keeper;
mod preflight;
mod recover;
mod roll;
mod scene;
mod view;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::driver::{AnyDriver, Failure, Settings};
use super::journal::{Journal, JournalError, Record};
use super::life::{Life, Refused, Step};
use super::probe::Reported;
use crate::config::ArgValue;
use crate::pool::{Admission, Cordon};
use keeper::{Command, Wish, keep};
use scene::{Kept, Scene};

pub use preflight::NotNow;
pub use recover::unattended;
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
    /// What earlier gateways wrote last of each engine, until the first configuration is applied.
    earlier: Mutex<Vec<Record>>,
    hands: Mutex<BTreeMap<String, Hand>>,
    /// Keepers that are on their way out, until they are.
    departing: TaskTracker,
    /// Held from the preflight of a change until the change has begun: two that pass it together would both begin.
    gate: tokio::sync::Mutex<()>,
    changes: AtomicU64,
    /// How many configurations were applied: the roll of an earlier one ends where it stands.
    rolls: AtomicU64,
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
            earlier: Mutex::default(),
            hands: Mutex::default(),
            departing: TaskTracker::new(),
            gate: tokio::sync::Mutex::default(),
            changes: AtomicU64::new(1),
            rolls: AtomicU64::new(0),
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

    /// Takes over the engines of a configuration: new ones start, those that are gone leave, changed ones are restarted
    /// one after the other. Returns at once. Needs an open journal where there is an engine.
    pub fn apply(self: &Arc<Self>, engines: Vec<EngineSpec>) {
        if self.closing.load(Ordering::Relaxed) {
            return;
        }
        let number = self.rolls.fetch_add(1, Ordering::Relaxed) + 1;
        let is_listed = |name: &str| engines.iter().any(|spec| *spec.name == *name);
        let earlier = std::mem::take(&mut *self.earlier.lock());
        recover::clear(self, earlier.into_iter().filter(|record| !is_listed(&record.backend)));
        let gone: Vec<String> = self.hands.lock().keys().filter(|name| !is_listed(name)).cloned().collect();
        let gone: Vec<Arc<Scene>> = gone.iter().filter_map(|name| self.let_go(name)).collect();
        let (mut new, mut changed) = (Vec::new(), Vec::new());
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
        tokio::spawn(roll::roll(Arc::clone(self), number, roll::Work { gone, new, changed }));
    }

    /// Tells a keeper what is said of its engine now; whether that takes a restart. `None`: there is no such keeper.
    fn describe(&self, spec: &EngineSpec) -> Option<bool> {
        let hands = self.hands.lock();
        let hand = hands.get(&*spec.name)?;
        let scene = &hand.scene;
        if scene.identity != spec.identity {
            // Until it is replaced the engine is what it was, and where it was.
            if scene.spec.load().backend != spec.backend {
                self.admission.set_cordon(spec.backend, Cordon::Coming);
            }
            return Some(true);
        }
        // A full line means that the keeper has stopped listening, and then it is leaving.
        let _ = hand.commands.try_send(Command::Describe(Box::new(spec.clone())));
        let mut kept = scene.kept.lock();
        kept.waits = None;
        Some(kept.heads_for() != spec.configured)
    }

    /// Starts to keep an engine. The answer, once what an earlier gateway left of it was looked at: whether it runs with
    /// other settings than these.
    fn take_on(self: &Arc<Self>, spec: EngineSpec) -> Option<oneshot::Receiver<bool>> {
        // A roll that was waiting when the gateway was told to stop.
        if self.closing.load(Ordering::Relaxed) {
            return None;
        }
        let Some(journal) = self.journal.lock().clone() else {
            tracing::error!(backend = %spec.name, "not started: there is no journal");
            return None;
        };
        let mut hands = self.hands.lock();
        let name = spec.name.to_string();
        if hands.contains_key(&name) {
            return None;
        }
        let kept = Kept {
            life: Life::new(spec.settings.clone()),
            trace: None,
            golden: Vec::new(),
            configured: spec.configured.clone(),
            since: Instant::now(),
            detail: String::new(),
            adopted: false,
            waits: None,
            unwanted: Vec::new(),
        };
        let scene = Arc::new(Scene {
            driver: (self.maker)(&spec),
            admission: Arc::clone(&self.admission),
            reported: Arc::clone(&self.reported),
            journal,
            kept: Mutex::new(kept),
            adapters: Notify::new(),
            identity: spec.identity.clone(),
            spec: ArcSwap::from_pointee(spec),
        });
        let (commands, inbox) = mpsc::channel(COMMANDS);
        let (recovered, answer) = oneshot::channel();
        let kept = Arc::clone(&scene);
        let task = tokio::spawn(async move {
            // Nobody may wait for it any more.
            let _ = recovered.send(recover::recover(&kept).await);
            keep(kept, inbox).await;
        });
        hands.insert(name, Hand { scene, commands, task });
        Some(answer)
    }

    /// Lets an engine drain and stop; its keeper ends with it.
    fn let_go(&self, name: &str) -> Option<Arc<Scene>> {
        let hand = self.hands.lock().remove(name)?;
        let _ = hand.commands.try_send(Command::Leave);
        self.departing.spawn(async move {
            if let Err(error) = hand.task.await {
                tracing::error!(%error, "a keeper failed");
            }
        });
        Some(hand.scene)
    }

    /// Returns when whoever was let go has stopped.
    async fn departed(&self) {
        self.departing.close();
        self.departing.wait().await;
    }

    /// What is no longer configured and has stopped need not be written again, and who took its place, if anybody, may have
    /// requests: its port may now be that of an engine that somebody else runs.
    fn forget(&self, gone: &[Arc<Scene>]) {
        let hands = self.hands.lock();
        for scene in gone {
            let spec = scene.spec.load();
            if hands.contains_key(&*spec.name) || scene.step() != Step::Off {
                continue;
            }
            scene.journal.lock().forget(&spec.name);
            if hands.values().all(|hand| hand.scene.spec.load().backend != spec.backend) {
                scene.set_cordon(Cordon::Open);
            }
        }
    }

    /// Restarts an engine. Returns the number of the change once it has begun; [`Fleet::views`] shows how it goes on.
    ///
    /// # Errors
    /// It does not begin, and nothing was touched.
    pub async fn restart(&self, name: &str, ask: RestartAsk) -> Result<u64, CannotRestart> {
        let (scene, _) = self.hand(name).ok_or_else(|| CannotRestart::NotOurs(name.to_owned()))?;
        let spec = scene.spec.load_full();
        let base = if ask.reset { spec.settings.clone() } else { scene.settings() };
        let to = base.with(&ask.set);
        self.change(name, to, ask.reset.then(|| spec.configured.clone()), ask).await
    }

    /// The same with all of its settings said, and what they were configured as. The keeper may not yet have read what was
    /// last said of its engine.
    async fn change(
        &self,
        name: &str,
        to: Settings,
        configured: Option<String>,
        ask: RestartAsk,
    ) -> Result<u64, CannotRestart> {
        let (scene, commands) = self.hand(name).ok_or_else(|| CannotRestart::NotOurs(name.to_owned()))?;
        let spec = scene.spec.load_full();
        preflight::could_run(&*scene.driver, &spec, &to).await?;
        let _gate = self.gate.lock().await;
        if let Some(other) = self.views().into_iter().find(|view| view.change.is_some()) {
            return Err(CannotRestart::Another(other.backend));
        }
        if scene.step().in_rotation() && !ask.hold {
            preflight::may_go_now(&self.admission, &self.reported, &spec).await?;
        }
        let id = self.changes.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let wish = Wish { id, to, cut: ask.cut, hold: ask.hold, configured };
        let told = commands.send(Command::Change { wish, answer }).await;
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
        names.iter().for_each(|name| drop(self.let_go(name)));
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
}
