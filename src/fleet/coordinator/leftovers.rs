//! Stops *leftovers*: engines of an earlier gateway that are now configured differently, or not at
//! all.
//!
//! A killed gateway leaves engines running; the journal lists their processes. No engine starts on
//! the device of a leftover before the leftover has stopped. During an upgrade, leftovers run until
//! the old gateway has no requests. A failed stop is repeated until it succeeds or the gateway
//! stops.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::sleep;

use super::engine_table::StoppingEngine;
use super::registry::Registry;
use super::stop::RETRY;
use crate::driver::process::{ProcessDriver, is_running};
use crate::driver::{Driver, EngineFailure, EngineIdentity, EngineStatus, StopRules};
use crate::engine::journal::{Journal, JournalLine};
use crate::engine::lifecycle::Step;
use sluice_config::{Launch, Words};
use sluice_core::vllm::failure::FailureClass;

/// Running engines of an earlier gateway, for a gateway without engines. That gateway does not stop
/// them, because the folder may belong to another gateway.
pub fn unattended(folder: &Path) -> Vec<String> {
    let records = Journal::read_last(folder).into_values().filter(|record| record.lifecycle.step.may_run());
    records.map(|record| record.backend).filter(|name| is_running(folder, name)).collect()
}

/// Begins to stop the engines of an earlier gateway that are no longer configured, or now have
/// another program, port or device.
pub(super) fn stop_leftovers(registry: &Arc<Registry>) {
    for record in registry.take_earlier_records() {
        let Some(journal) = registry.journal() else { return };
        {
            let mut table = registry.table();
            // A configured engine is recovered by its own task, even if the commands have changed.
            let by_commands = matches!(record.trace, Some(EngineIdentity::Command));
            // A pod may not be discovered yet, and is never stopped.
            if matches!(record.trace, Some(EngineIdentity::Pod { .. })) {
                continue;
            }
            let configured = table.wanted.engine(&record.backend);
            if configured.is_some_and(|spec| by_commands || record.identity == spec.identity) {
                continue;
            }
            if !record.lifecycle.step.may_run() {
                journal.lock().forget(&record.backend);
                continue;
            }
            table.stopping.push(StoppingEngine::leftover(&record.backend));
        }
        let registry = Arc::clone(registry);
        registry.clone().tasks.spawn(async move {
            registry.until_alone().await;
            stop_until_gone(&registry, &journal, &record).await;
            let leftover = StoppingEngine::leftover(&record.backend);
            registry.table().stopping.retain(|other| !other.is_same(&leftover));
            registry.wake.notify_one();
        });
    }
}

/// Stops the engine. Returns when it is gone, the gateway stops, or only an operator can stop it.
async fn stop_until_gone(registry: &Registry, journal: &Arc<Mutex<Journal>>, record: &JournalLine) {
    let name = &record.backend;
    let engine = driver_of(name, journal.lock().folder());
    while !registry.is_closing() {
        match stop(&engine, record.trace.as_ref()).await {
            Ok(stopped) => {
                let (journal, record) = (Arc::clone(journal), record.clone());
                let written = tokio::task::spawn_blocking(move || write_stopped(&journal, record)).await;
                if let Ok(Err(error)) = written {
                    tracing::error!(backend = name, %error, "the journal cannot be written");
                }
                if stopped == Stopped::Running {
                    tracing::warn!(backend = name, "stopped: it ran, and is no longer configured as it was");
                }
                return;
            }
            Err(failure) => {
                tracing::error!(backend = name, "is no longer configured as it was, and may run: {failure}");
            }
        }
        if matches!(record.trace, Some(EngineIdentity::Command)) {
            return;
        }
        sleep(RETRY).await;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stopped {
    Running,
    Nothing,
}

async fn stop(engine: &ProcessDriver, trace: Option<&EngineIdentity>) -> Result<Stopped, EngineFailure> {
    if matches!(trace, Some(EngineIdentity::Command)) {
        return Err(EngineFailure::new(
            FailureClass::NotOurs,
            "a command started it, and its stop command is no longer configured; stop it where it runs",
        ));
    }
    // After a failed stop, the driver already controls the engine.
    let mut present = engine.status().await != EngineStatus::Absent;
    if let Some(trace) = trace.filter(|_| !present) {
        present = engine.adopt(trace).await?;
    }
    let mut stopped = Stopped::Nothing;
    loop {
        if !present && let Some(found) = engine.find_running(None).await {
            present = engine.adopt(&found).await?;
        }
        if !present {
            return Ok(stopped);
        }
        engine.stop(StopRules::default()).await?;
        // Another engine of this backend may be left, asleep.
        (stopped, present) = (Stopped::Running, false);
    }
}

fn write_stopped(journal: &Mutex<Journal>, mut record: JournalLine) -> std::io::Result<()> {
    let mut journal = journal.lock();
    let name = record.backend.clone();
    record.lifecycle.step = Step::Off;
    (record.trace, record.aside, record.at) = (None, None, jiff::Timestamp::now().to_string());
    journal.write(record)?;
    journal.forget(&name);
    Ok(())
}

/// A driver that finds and stops an engine by name.
fn driver_of(name: &str, folder: &Path) -> ProcessDriver {
    ProcessDriver::new(name, Launch::of(Words::default(), 0), folder)
}
