//! What an earlier gateway left: engines that go on, and engines that nobody asks for any more.
//!
//! A gateway that is killed leaves its engines running. The next one reads in the journal what was under way and finds them
//! by their traces or marks. An engine that is configured as it was is taken over (`fleet.on_start`), and so is one whose
//! flags alone were changed meanwhile: it serves until a restart with the new flags, which is protected like any other, has
//! its turn. One with another program, port, device or environment is stopped and a new one started in its place; one that
//! is no longer configured is stopped, before anything else starts on its device.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::sleep;

use super::Fleet;
use super::keeper::shown;
use super::reconcile::{AGAIN, Departing};
use super::scene::Scene;
use crate::driver::ProcessDriver;
use crate::driver::process::is_running;
use crate::driver::{Driver, DriverKind, EngineFailure, EngineIdentity, EngineStatus, StopRules};
use crate::fetch;
use crate::journal::{Journal, Record};
use crate::life::Step;
use sluice_core::vllm::failure::FailureClass;
use sluice_gateway::config::{Launch, OnStart};

/// Finds what an earlier gateway left of this engine, and decides where its life goes on.
pub(super) async fn recover(scene: &Arc<Scene>) {
    let spec = scene.spec.load_full();
    let record = scene.journal.lock().last().get(&*spec.name).cloned();
    let found = find(scene, record.as_ref().and_then(|record| record.trace.as_ref())).await;
    let adopt = spec.rules.on_start == OnStart::Adopt;
    let mut kept = scene.kept.lock();
    kept.recovered = true;
    kept.trace = found.clone();
    let Some(record) = record else {
        if found.is_some() {
            // It may carry requests: it was in rotation until now, or is in use by others.
            (kept.life.step, kept.adopted) = if adopt { (Step::Adopt, true) } else { (Step::Drain, false) };
            tracing::info!(backend = %spec.name, step = kept.life.step.label(), "its engine runs already");
        }
        return;
    };
    let (same, alive) = (record.life.heads_for().configured == spec.configured, found.is_some());
    // Flags alone are no reason to stop an engine that serves: they have their turn while it does. Nor are they a reason to
    // forget what was good.
    let same_program = record.identity == spec.identity;
    let flags_only = same_program && alive && adopt;
    // Another program or model answers otherwise, and is meant to.
    kept.golden = if same || flags_only { record.golden } else { Vec::new() };
    kept.life = if same || flags_only {
        record.life.recover(alive, adopt)
    } else {
        record.life.anew(spec.setup(), same_program)
    };
    kept.adopted = kept.life.step == Step::Adopt;
    if same && kept.life.wanted.settings != spec.settings {
        let settings = shown(&kept.life.wanted.settings);
        tracing::info!(backend = %spec.name, settings, "flags were changed since the configuration (restart --reset undoes that)");
    }
    tracing::info!(backend = %spec.name, alive, step = kept.life.step.label(), "goes on where an earlier gateway left off");
}

/// An engine that runs and whose settings are known, now under command. One whose settings nobody knows is under command
/// too, to be stopped.
async fn find(scene: &Scene, written: Option<&EngineIdentity>) -> Option<EngineIdentity> {
    let name = Arc::clone(&scene.spec.load().name);
    if let Some(trace) = written {
        match scene.driver.adopt(trace).await {
            Ok(true) => return Some(trace.clone()),
            Ok(false) => {}
            Err(failure) => {
                tracing::error!(backend = %name, "an engine of an earlier gateway cannot be told: {failure}")
            }
        }
    }
    let trace = match scene.driver.find_running().await {
        Some(trace) => trace,
        // Nothing tells whether commands have brought it up, but it may answer.
        None if scene.driver.kind() == DriverKind::Command && answers(scene).await => EngineIdentity::Command,
        None => return None,
    };
    match scene.driver.adopt(&trace).await {
        // A command's engine is what its commands make it; there is no more to know.
        Ok(true) if trace == EngineIdentity::Command => Some(trace),
        Ok(_) => {
            tracing::warn!(backend = %name, "found what is left of an engine that the journal does not know");
            None
        }
        Err(failure) => {
            tracing::error!(backend = %name, "it cannot be taken over: {failure}");
            None
        }
    }
}

async fn answers(scene: &Scene) -> bool {
    let spec = scene.spec.load_full();
    let asked = fetch(&spec.address, "/health", spec.patience, 1 << 16).await;
    asked.is_ok_and(|(status, _)| status.is_success())
}

/// Engines of an earlier gateway that run although nobody looks after them. A gateway that runs no engines leaves them alone:
/// it may have been started beside the folder of another one.
pub fn unattended(folder: &Path) -> Vec<String> {
    let records = Journal::peek(folder).into_values().filter(|record| record.life.step.may_run());
    records.map(|record| record.backend).filter(|name| is_running(folder, name)).collect()
}

/// Stops the engines of an earlier gateway that are no longer configured, or have another program, port or device now,
/// beside everything else; until that is done nothing starts that could be on their devices.
pub(super) fn clear(fleet: &Arc<Fleet>, earlier: Vec<Record>) {
    let wanted = fleet.wanted.lock().engines.clone();
    let goes_on = |record: &Record| {
        let spec = wanted.iter().find(|spec| *spec.name == *record.backend);
        // Other commands for an engine that commands run are its keeper's matter.
        let commands = matches!(record.trace, Some(EngineIdentity::Command));
        spec.is_some_and(|spec| commands || record.identity == spec.identity)
    };
    for record in earlier.into_iter().filter(|record| !goes_on(record)) {
        let Some(journal) = fleet.journal.lock().clone() else { return };
        if !record.life.step.may_run() {
            journal.lock().forget(&record.backend);
            continue;
        }
        fleet.departing.lock().push(Departing::unknown(&record.backend));
        let fleet = Arc::clone(fleet);
        fleet.clone().tasks.spawn(async move {
            end(&fleet, &journal, &record).await;
            fleet.departing.lock().retain(|departing| !departing.is_unknown(&record.backend));
            fleet.look.notify_one();
        });
    }
}

/// Ends what is left of an engine, however often that takes; gives up only with the gateway, or where it cannot be done
/// from here.
async fn end(fleet: &Fleet, journal: &Arc<Mutex<Journal>>, record: &Record) {
    let name = &record.backend;
    let engine = leftover(name, journal.lock().folder());
    while !fleet.is_closing() {
        match stop(&engine, record.trace.as_ref()).await {
            Ok(stopped) => {
                let (journal, record) = (Arc::clone(journal), record.clone());
                let written = tokio::task::spawn_blocking(move || note_stopped(&journal, record)).await;
                if let Ok(Err(error)) = written {
                    tracing::error!(backend = name, %error, "the journal cannot be written");
                }
                if stopped {
                    tracing::warn!(backend = name, "stopped: it ran, and is no longer configured as it was");
                }
                return;
            }
            Err(failure) => {
                tracing::error!(backend = name, "is no longer configured as it was, and may run: {failure}")
            }
        }
        if matches!(record.trace, Some(EngineIdentity::Command)) {
            return;
        }
        sleep(AGAIN).await;
    }
}

/// Stops what is left of an engine; whether there was anything.
async fn stop(engine: &ProcessDriver, trace: Option<&EngineIdentity>) -> Result<bool, EngineFailure> {
    if matches!(trace, Some(EngineIdentity::Command)) {
        return Err(EngineFailure::new(
            FailureClass::NotOurs,
            "it was started by a command, and its stop command is not known any more; stop it by hand",
        ));
    }
    // One that could not be ended is under command already.
    let mut there = engine.status().await != EngineStatus::Absent;
    if let Some(trace) = trace.filter(|_| !there) {
        there = engine.adopt(trace).await?;
    }
    if !there && let Some(found) = engine.find_running().await {
        there = engine.adopt(&found).await?;
    }
    if there {
        engine.stop(StopRules::default()).await?;
    }
    Ok(there)
}

fn note_stopped(journal: &Mutex<Journal>, mut record: Record) -> std::io::Result<()> {
    let mut journal = journal.lock();
    let name = record.backend.clone();
    (record.life.step, record.trace, record.at) = (Step::Off, None, jiff::Timestamp::now().to_string());
    journal.write(record)?;
    journal.forget(&name);
    Ok(())
}

/// A driver that can find and stop an engine of which no more than its name is known.
fn leftover(name: &str, folder: &Path) -> ProcessDriver {
    let (command, gpu) = (Vec::new(), Vec::new());
    ProcessDriver::new(name, Launch { command, port: 0, gpu, env: BTreeMap::new(), args: BTreeMap::new() }, folder)
}
