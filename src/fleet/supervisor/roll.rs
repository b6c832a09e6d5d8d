//! What a reload brings: new engines, and changed ones through a restart each, one after the other.
//!
//! A change that only concerns flags is a change like one that somebody asks for, with everything that protects it. Another
//! program, device or environment needs another driver: the old engine leaves, the new one comes in its place. Either waits
//! until the others can carry its load, and the engine shows what it waits for; the first that does not come to serve ends
//! the roll, so that a mistake costs one engine. The roll of an older configuration ends as soon as a newer one is applied.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::sleep;

use super::preflight::{could_run, may_go_now};
use super::scene::Scene;
use super::{CannotRestart, EngineSpec, Fleet, RestartAsk};
use crate::fleet::life::{Outcome, Refused, Step};

/// Between two looks at whether the others can carry it, or whether it serves.
const LOOK: Duration = Duration::from_millis(200);

/// What a configuration changes.
pub(super) struct Work {
    /// Engines that were let go.
    pub(super) gone: Vec<Arc<Scene>>,
    pub(super) new: Vec<EngineSpec>,
    pub(super) changed: Vec<EngineSpec>,
}

/// Why a roll ends early.
enum End {
    /// A newer configuration was applied, or the gateway stops.
    Outdated,
    Failed(String),
}

impl<W: Into<String>> From<W> for End {
    fn from(why: W) -> Self {
        Self::Failed(why.into())
    }
}

pub(super) async fn roll(fleet: Arc<Fleet>, number: u64, work: Work) {
    let Work { gone, new, mut changed } = work;
    // They may leave the very devices and ports that the new ones are for.
    fleet.departed().await;
    fleet.forget(&gone);
    let roll = Roll { fleet: &fleet, number };
    if roll.is_outdated() {
        return;
    }
    let taken: Vec<_> = new.into_iter().map(|spec| (fleet.take_on(spec.clone()), spec)).collect();
    for (recovered, spec) in taken {
        let Some(recovered) = recovered else { continue };
        if recovered.await == Ok(true) {
            changed.push(spec);
        }
    }
    for spec in changed {
        let name = Arc::clone(&spec.name);
        match roll.one(spec).await {
            Ok(()) => tracing::info!(backend = %name, "runs with its new configuration"),
            Err(End::Outdated) => return,
            Err(End::Failed(why)) => {
                tracing::error!(backend = %name, "keeps its old configuration, as do those after it: {why}");
                return;
            }
        }
    }
}

struct Roll<'f> {
    fleet: &'f Arc<Fleet>,
    number: u64,
}

impl Roll<'_> {
    fn is_outdated(&self) -> bool {
        self.fleet.closing.load(Ordering::Relaxed) || self.fleet.rolls.load(Ordering::Relaxed) != self.number
    }

    async fn pause(&self) -> Result<(), End> {
        sleep(LOOK).await;
        if self.is_outdated() { Err(End::Outdated) } else { Ok(()) }
    }

    async fn one(&self, spec: EngineSpec) -> Result<(), End> {
        let name = spec.name.to_string();
        let (scene, _) = self.fleet.hand(&name).ok_or("it is gone")?;
        if scene.identity != spec.identity {
            return self.replace(&scene, spec).await;
        }
        let id = loop {
            let asked =
                self.fleet.change(&name, spec.settings.clone(), Some(spec.configured.clone()), RestartAsk::default());
            match asked.await {
                Ok(id) => break id,
                Err(error @ (CannotRestart::Settings(_) | CannotRestart::NotOurs(_))) => {
                    return Err(error.to_string().into());
                }
                Err(CannotRestart::Refused(Refused::Leaving)) => return Err("it is being shut down".into()),
                Err(wait) => note_wait(&scene, &wait.to_string()),
            }
            self.pause().await?;
        };
        loop {
            let (scene, _) = self.fleet.hand(&name).ok_or("it is gone")?;
            let ended = scene.kept.lock().life.ended.clone().filter(|ended| ended.id >= id);
            match ended.map(|ended| ended.outcome) {
                Some(Outcome::Done) => return Ok(()),
                Some(Outcome::Aborted(why) | Outcome::RolledBack(why) | Outcome::Held(why)) => return Err(why.into()),
                None => self.pause().await?,
            }
        }
    }

    /// Another engine in its place.
    async fn replace(&self, scene: &Scene, spec: EngineSpec) -> Result<(), End> {
        let name = spec.name.to_string();
        // What could never start is told while the old one still runs.
        let driver = (self.fleet.maker)(&spec);
        could_run(&*driver, &spec, &spec.settings).await.map_err(|failure| failure.to_string())?;
        // One that moves gets no requests where it is since the reload: nothing is gained by waiting.
        let moves = scene.spec.load().backend != spec.backend;
        while !moves && scene.step().in_rotation() {
            let _gate = self.fleet.gate.lock().await;
            let other = self.fleet.views().into_iter().find(|view| view.change.is_some());
            let wait = match other {
                Some(other) => CannotRestart::Another(other.backend).to_string(),
                None => match may_go_now(&self.fleet.admission, &self.fleet.reported, &spec).await {
                    Ok(()) => {
                        // Before the gate opens, so that nobody else counts on it.
                        self.fleet.let_go(&name);
                        break;
                    }
                    Err(wait) => wait.to_string(),
                },
            };
            drop(_gate);
            note_wait(scene, &wait);
            self.pause().await?;
        }
        self.fleet.let_go(&name);
        self.fleet.departed().await;
        if self.is_outdated() {
            return Err(End::Outdated);
        }
        self.fleet.take_on(spec);
        self.serves(&name).await
    }

    async fn serves(&self, name: &str) -> Result<(), End> {
        loop {
            let (scene, _) = self.fleet.hand(name).ok_or("it is gone")?;
            match scene.step() {
                Step::Serve => return Ok(()),
                Step::Hold | Step::Off => return Err(scene.kept.lock().life.why.clone().unwrap_or_default().into()),
                _ => self.pause().await?,
            }
        }
    }
}

/// Shows what a new configuration waits for; said in the log once for each reason.
fn note_wait(scene: &Scene, why: &str) {
    // Numbers of requests change all the time.
    let words = |text: &str| text.chars().filter(|letter| !letter.is_ascii_digit()).collect::<String>();
    let mut kept = scene.kept.lock();
    let said = kept.waits.as_deref().is_some_and(|before| words(before) == words(why));
    kept.waits = Some(why.to_owned());
    drop(kept);
    if !said {
        tracing::warn!(backend = %scene.spec.load().name, "its new configuration waits: {why}");
    }
}
