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

use super::Fleet;
use super::keeper::shown;
use super::scene::Scene;
use crate::config::{Launch, OnStart};
use crate::fleet::driver::{Driver, Failure, StopRules, Trace};
use crate::fleet::journal::{Journal, Record};
use crate::fleet::life::Step;
use crate::fleet::process::{ProcessDriver, is_running};
use crate::vllm::failure::Class;

/// Finds what an earlier gateway left of this engine, and decides where its life goes on. Whether it goes on with other
/// settings than the configuration's.
pub(super) async fn recover(scene: &Arc<Scene>) -> bool {
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
    let Some(record) = record else { return false };
    let same = record.configured == spec.configured;
    let adopt = spec.rules.on_start == OnStart::Adopt;
    let flags_only = !same && record.identity == spec.identity && alive && adopt;
    let mut kept = scene.kept.lock();
    // Another program or model answers otherwise, and is meant to.
    kept.golden = if same { record.golden } else { Vec::new() };
    kept.trace = written.filter(|_| alive);
    kept.life = if same || flags_only {
        kept.configured = record.configured;
        record.life.recover(alive, adopt)
    } else {
        record.life.anew(spec.settings.clone())
    };
    kept.adopted = kept.life.step == Step::Adopt;
    if same && kept.life.wanted != spec.settings {
        let settings = shown(&kept.life.wanted);
        tracing::info!(backend = %spec.name, settings, "flags were changed since the configuration (restart --reset undoes that)");
    }
    tracing::info!(backend = %spec.name, alive, step = kept.life.step.label(), "goes on where an earlier gateway left off");
    flags_only && kept.heads_for() != spec.configured
}

/// Engines of an earlier gateway that run although nobody looks after them. A gateway that runs no engines leaves them alone:
/// it may have been started beside the folder of another one.
pub fn unattended(folder: &Path) -> Vec<String> {
    let records = Journal::peek(folder).into_values().filter(|record| record.life.step.may_run());
    records.map(|record| record.backend).filter(|name| is_running(folder, name)).collect()
}

/// Stops, beside everything else, the engines of an earlier gateway that are no longer configured. [`Fleet::departed`]
/// waits for that.
pub(super) fn clear(fleet: &Arc<Fleet>, earlier: impl Iterator<Item = Record>) {
    for record in earlier {
        let Some(journal) = fleet.journal.lock().clone() else { return };
        if !record.life.step.may_run() {
            journal.lock().forget(&record.backend);
            continue;
        }
        fleet.departing.spawn(async move {
            let folder = journal.lock().folder().to_owned();
            let name = record.backend.clone();
            let engine = leftover(&name, &folder);
            match stop(&engine, record.trace.as_ref()).await {
                Ok(stopped) => {
                    let journal = Arc::clone(&journal);
                    let written = tokio::task::spawn_blocking(move || note_stopped(&journal, record)).await;
                    if let Ok(Err(error)) = written {
                        tracing::error!(backend = name, %error, "the journal cannot be written");
                    }
                    if stopped {
                        tracing::warn!(backend = name, "stopped: it ran, and is no longer configured");
                    }
                }
                Err(why) => tracing::error!(backend = name, "is no longer configured and may run: {why}"),
            }
        });
    }
}

/// Stops what is left of an engine; whether there was anything.
async fn stop(engine: &ProcessDriver, trace: Option<&Trace>) -> Result<bool, Failure> {
    if matches!(trace, Some(Trace::Command)) {
        return Err(Failure::new(
            Class::NotOurs,
            "it was started by a command, and its stop command is not known any more; stop it by hand",
        ));
    }
    let there = match trace {
        Some(trace) => engine.adopt(trace).await?,
        None => false,
    };
    let there = match engine.find().await {
        Some(found) if !there => engine.adopt(&found).await?,
        _ => there,
    };
    if there {
        engine.stop(StopRules::default()).await?;
    }
    Ok(there)
}

fn note_stopped(journal: &parking_lot::Mutex<Journal>, mut record: Record) -> std::io::Result<()> {
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
