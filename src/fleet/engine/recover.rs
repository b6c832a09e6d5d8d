//! What an earlier gateway left: engines that go on, and engines that nobody asks for any more.
//!
//! A gateway that is killed leaves its engines running. The next one reads in the journal what was under way and finds them
//! by their traces or marks. An engine that is configured as it was is taken over (`fleet.on_start`), and so is one whose
//! flags alone were changed meanwhile: it serves until a restart with the new flags, which is protected like any other, has
//! its turn. One with another program, port, device or environment is stopped and a new one started in its place; one that
//! is no longer configured is stopped, before anything else starts on its device.

use std::sync::Arc;

use super::context::EngineContext;
use super::engine_task::shown;
use super::lifecycle::Step;
use crate::driver::{DriverKind, EngineIdentity};
use crate::fetch;
use sluice_gateway::config::OnStart;

/// Finds what an earlier gateway left of this engine, and decides where its life goes on.
pub(crate) async fn recover(context: &Arc<EngineContext>) {
    let spec = context.spec.load_full();
    let record = context.journal.lock().last().get(&*spec.name).cloned();
    let found = find(context, record.as_ref().and_then(|record| record.trace.as_ref())).await;
    let adopt = spec.rules.on_start == OnStart::Adopt;
    let mut state = context.state.lock();
    state.recovered = true;
    state.trace = found.clone();
    let Some(record) = record else {
        if found.is_some() {
            // It may carry requests: it was in rotation until now, or is in use by others.
            (state.life.step, state.adopted) = if adopt { (Step::Adopt, true) } else { (Step::Drain, false) };
            tracing::info!(backend = %spec.name, step = state.life.step.label(), "its engine runs already");
        }
        return;
    };
    let (same, alive) = (record.life.heads_for().configured == spec.configured, found.is_some());
    // Flags alone are no reason to stop an engine that serves: they have their turn while it does. Nor are they a reason to
    // forget what was good.
    let same_program = record.identity == spec.identity;
    let flags_only = same_program && alive && adopt;
    // Another program or model answers otherwise, and is meant to.
    state.golden = if same || flags_only { record.golden } else { Vec::new() };
    state.life = if same || flags_only {
        record.life.recover(alive, adopt)
    } else {
        record.life.anew(spec.setup(), same_program)
    };
    state.adopted = state.life.step == Step::Adopt;
    if same && state.life.wanted.settings != spec.settings {
        let settings = shown(&state.life.wanted.settings);
        tracing::info!(backend = %spec.name, settings, "flags were changed since the configuration (restart --reset undoes that)");
    }
    tracing::info!(backend = %spec.name, alive, step = state.life.step.label(), "goes on where an earlier gateway left off");
}

/// An engine that runs and whose settings are known, now under command. One whose settings nobody knows is under command
/// too, to be stopped.
async fn find(context: &EngineContext, written: Option<&EngineIdentity>) -> Option<EngineIdentity> {
    let name = Arc::clone(&context.spec.load().name);
    if let Some(trace) = written {
        match context.driver.adopt(trace).await {
            Ok(true) => return Some(trace.clone()),
            Ok(false) => {}
            Err(failure) => {
                tracing::error!(backend = %name, "an engine of an earlier gateway cannot be told: {failure}")
            }
        }
    }
    let trace = match context.driver.find_running().await {
        Some(trace) => trace,
        // Nothing tells whether commands have brought it up, but it may answer.
        None if context.driver.kind() == DriverKind::Command && answers(context).await => EngineIdentity::Command,
        None => return None,
    };
    match context.driver.adopt(&trace).await {
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

async fn answers(context: &EngineContext) -> bool {
    let spec = context.spec.load_full();
    let asked = fetch(&spec.address, "/health", spec.request_timeout, 1 << 16).await;
    asked.is_ok_and(|(status, _)| status.is_success())
}
