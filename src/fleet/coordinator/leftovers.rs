//! Engines of an earlier gateway that are no longer configured: they are stopped before anything else starts on their
//! devices.
//!
//! A gateway that is killed leaves its engines running, and the journal names them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::sleep;

use super::Fleet;
use super::reconcile::{AGAIN, Departing};
use crate::driver::process::{ProcessDriver, is_running};
use crate::driver::{Driver, EngineFailure, EngineIdentity, EngineStatus, StopRules};
use crate::engine::journal::{Journal, Record};
use crate::engine::lifecycle::Step;
use sluice_core::vllm::failure::FailureClass;
use sluice_gateway::config::Launch;

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
            "it was started by a command, and its stop command is not known any more; stop it by handle",
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
