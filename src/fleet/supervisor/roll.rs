//! Takes one engine over to what a configuration says.
//!
//! A change that only concerns flags is a change like one that somebody asks for, with everything that protects it. Another
//! program, device or environment needs another driver: the old engine leaves, the new one comes in its place. Either waits
//! until the others can carry its load, and the engine shows what it waits for. Ends early, with nothing half done, when a
//! newer configuration is applied.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::preflight::{NotNow, could_run, may_go_now};
use super::scene::Scene;
use super::{CannotRestart, EngineSpec, Fleet, RestartAsk, reconcile};
use crate::life::{Outcome, Refused, Step};
use sluice_gateway::pool::Cordon;

/// Between two looks at whether the others can carry it, or whether it serves.
const LOOK: Duration = Duration::from_millis(200);

/// Why an engine was not taken over.
#[derive(Debug)]
pub(super) enum End {
    /// A newer configuration was applied, or the gateway stops.
    Outdated,
    /// It could not be done now, and nothing was touched.
    Again,
    Failed(String),
}

impl<W: Into<String>> From<W> for End {
    fn from(why: W) -> Self {
        Self::Failed(why.into())
    }
}

/// Carries it out, to its end.
pub(super) async fn one(fleet: Arc<Fleet>, number: u64, spec: EngineSpec) -> Result<(), End> {
    let roll = Roll { fleet: &fleet, number };
    let (scene, _) = fleet.hand(&spec.name).ok_or("it is gone")?;
    let done = if scene.identity == spec.identity {
        roll.change(&scene, &spec).await
    } else {
        roll.replace(&scene, &spec).await
    };
    if !matches!(done, Err(End::Again)) {
        scene.kept.lock().waits = None;
    }
    done
}

struct Roll<'f> {
    fleet: &'f Arc<Fleet>,
    number: u64,
}

impl Roll<'_> {
    async fn pause(&self) -> Result<(), End> {
        sleep(LOOK).await;
        if self.fleet.is_outdated(self.number) { Err(End::Outdated) } else { Ok(()) }
    }

    async fn change(&self, scene: &Scene, spec: &EngineSpec) -> Result<(), End> {
        let serves_it = || scene.kept.lock().life.heads_for().configured == spec.configured;
        let id = loop {
            // Somebody may have done it by hand meanwhile.
            if serves_it() && scene.step().in_rotation() {
                return Ok(());
            }
            let asked = self.fleet.change(&spec.name, spec.setup(), RestartAsk::default(), Some(self.number));
            match asked.await {
                Ok(begun) => break begun.change,
                Err(error @ (CannotRestart::Settings(_) | CannotRestart::NotOurs(_))) => {
                    return Err(error.to_string().into());
                }
                Err(CannotRestart::Refused(Refused::Leaving)) => return Err("it is being shut down".into()),
                Err(CannotRestart::Outdated) => return Err(End::Outdated),
                Err(wait) => note_wait(scene, &wait.to_string()),
            }
            self.pause().await?;
        };
        loop {
            let (scene, _) = self.fleet.hand(&spec.name).ok_or("it is gone")?;
            let ended = scene.kept.lock().life.ended.clone().filter(|ended| ended.id >= id);
            match ended.map(|ended| ended.outcome) {
                Some(Outcome::Done) => return Ok(()),
                Some(Outcome::Aborted(why) | Outcome::RolledBack(why) | Outcome::Failed(why) | Outcome::Held(why)) => {
                    return Err(why.into());
                }
                None => self.pause().await?,
            }
        }
    }

    /// Another engine in its place.
    async fn replace(&self, scene: &Arc<Scene>, spec: &EngineSpec) -> Result<(), End> {
        // What could never start is told while the old one still runs.
        let driver = (self.fleet.maker)(spec);
        could_run(&*driver, spec, &spec.settings).await.map_err(|failure| failure.to_string())?;
        // One that moves gets no requests where it is since the reload: nothing is gained by waiting.
        if scene.spec.load().backend == spec.backend {
            self.until_spared(scene).await?;
        }
        if !self.fleet.let_go(&spec.name, Some(self.number)) {
            back_in(scene);
            return Err(End::Outdated);
        }
        loop {
            self.pause().await?;
            // The reconciler takes the new one on once the old one is gone.
            let Some((scene, _)) = self.fleet.hand(&spec.name) else {
                if reconcile::waits_for_a_move(self.fleet, spec) {
                    // Whose turn must come first.
                    return Err(End::Again);
                }
                continue;
            };
            match scene.step() {
                _ if !scene.kept.lock().recovered => {}
                Step::Serve => return Ok(()),
                Step::Hold | Step::Off => return Err(scene.kept.lock().life.why.clone().unwrap_or_default().into()),
                _ => {}
            }
        }
    }

    /// Returns when it serves nobody and the others can do without it, or when it does not serve anyway.
    async fn until_spared(&self, scene: &Arc<Scene>) -> Result<(), End> {
        loop {
            match scene.step() {
                Step::Serve => match self.spare(scene).await {
                    Ok(()) => return Ok(()),
                    Err(wait) => note_wait(scene, &wait),
                },
                // Requests run on it, or are about to.
                step @ (Step::Ramp | Step::Drain) => note_wait(scene, &Refused::Busy(step.label()).to_string()),
                _ => return Ok(()),
            }
            self.pause().await?;
        }
    }

    /// Takes it out of rotation and waits until nothing runs on it; back in if that cannot be, or if nobody can stand in.
    /// Where another engine waits for its device, nobody is asked to stand in: requests wait in the queue.
    ///
    /// # Errors
    /// Why not now. It is in rotation as before.
    async fn spare(&self, scene: &Arc<Scene>) -> Result<(), String> {
        let spec = scene.spec.load_full();
        let may_go = async || match reconcile::is_waited_for(self.fleet, scene) {
            true => Ok(()),
            false => may_go_now(&self.fleet.admission, &self.fleet.reported, &spec).await,
        };
        {
            let _gate = self.fleet.gate.lock().await;
            if let Some(other) = self.fleet.views().into_iter().find(|view| view.change.is_some()) {
                return Err(CannotRestart::Another(other.backend).to_string());
            }
            may_go().await.map_err(|not_now| not_now.to_string())?;
            // Before the gate opens, so that nobody else counts on it.
            scene.kept.lock().spared = true;
            scene.set_cordon(Cordon::Draining);
        }
        let emptied = self.emptied(scene, spec.rules.drain).await;
        let spared = match emptied {
            Ok(()) => match may_go().await {
                Err(why @ NotNow::NoStandIn(_)) => Err(why.to_string()),
                _ => Ok(()),
            },
            Err(why) => Err(why),
        };
        if spared.is_err() {
            back_in(scene);
        }
        spared
    }

    async fn emptied(&self, scene: &Scene, limit: Duration) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        while scene.running() > 0 {
            if Instant::now() >= deadline {
                return Err(format!("{} requests were still running after the drain", scene.running()));
            }
            self.pause().await.map_err(|_| "the configuration has changed since".to_owned())?;
        }
        Ok(())
    }
}

/// It stays, and is given requests again.
fn back_in(scene: &Scene) {
    scene.kept.lock().spared = false;
    if scene.step().in_rotation() {
        scene.set_cordon(Cordon::Open);
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
