//! What a reload brings: new engines, and changed ones through a restart each, one after the other.
//!
//! A change that only concerns flags is a change like one that somebody asks for, with everything that protects it. Another
//! program, port, device or environment needs another driver: the old engine leaves, the new one comes in its place.
//! Either waits until the others can carry its load; the first that does not come to serve ends the roll, so that a mistake
//! costs one engine.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::{CannotRestart, EngineSpec, Fleet, RestartAsk};
use crate::fleet::life::{Outcome, Refused, Step};

/// Between two looks at whether the others can carry it, or whether it serves.
const LOOK: Duration = Duration::from_millis(200);

pub(super) async fn roll(fleet: Arc<Fleet>, gone: Vec<String>, new: Vec<EngineSpec>, changed: Vec<EngineSpec>) {
    // They may leave the very devices and ports that the new ones are for.
    fleet.departed().await;
    fleet.forget(&gone);
    new.into_iter().for_each(|spec| fleet.take_on(spec));
    for spec in changed {
        let name = Arc::clone(&spec.name);
        match one(&fleet, spec).await {
            Ok(()) => tracing::info!(backend = %name, "runs with its new configuration"),
            Err(why) => {
                tracing::error!(backend = %name, "keeps its old configuration, as do those after it: {why}");
                return;
            }
        }
    }
}

async fn one(fleet: &Arc<Fleet>, spec: EngineSpec) -> Result<(), String> {
    let name = spec.name.to_string();
    let Some((scene, _)) = fleet.hand(&name) else { return Err("it is gone".to_owned()) };
    if scene.identity != spec.identity {
        // What could never start is told while the old one still runs.
        (fleet.maker)(&spec).check(&spec.settings).await.map_err(|failure| failure.to_string())?;
        while scene.step().in_rotation() && fleet.may_go(&spec).await.is_err() {
            sleep(LOOK).await;
        }
        fleet.let_go(&name);
        fleet.departed().await;
        fleet.take_on(spec);
        return serves(fleet, &name).await;
    }
    let mut said = false;
    let id = loop {
        match fleet.change(&name, spec.settings.clone(), RestartAsk::default()).await {
            Ok(id) => break id,
            Err(error @ (CannotRestart::Settings(_) | CannotRestart::NotOurs(_))) => return Err(error.to_string()),
            Err(CannotRestart::Refused(Refused::Leaving)) => return Err("it is being shut down".to_owned()),
            Err(wait) => {
                if !std::mem::replace(&mut said, true) {
                    tracing::warn!(backend = %name, "its new configuration waits: {wait}");
                }
                sleep(LOOK).await;
            }
        }
    };
    loop {
        let Some((scene, _)) = fleet.hand(&name) else { return Err("it is gone".to_owned()) };
        let ended = scene.kept.lock().life.ended.clone().filter(|ended| ended.id >= id);
        match ended.map(|ended| ended.outcome) {
            Some(Outcome::Done) => return Ok(()),
            Some(Outcome::Aborted(why) | Outcome::RolledBack(why) | Outcome::Held(why)) => return Err(why),
            None => sleep(LOOK).await,
        }
    }
}

async fn serves(fleet: &Fleet, name: &str) -> Result<(), String> {
    loop {
        let Some((scene, _)) = fleet.hand(name) else { return Err("it is gone".to_owned()) };
        match scene.step() {
            Step::Serve => return Ok(()),
            Step::Hold | Step::Off => return Err(scene.kept.lock().life.why.clone().unwrap_or_default()),
            _ => sleep(LOOK).await,
        }
    }
}
