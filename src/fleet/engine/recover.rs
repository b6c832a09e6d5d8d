//! Finds the engine that an earlier gateway left, takes it over, and continues the life cycle.
//!
//! A killed gateway leaves engines running. The next one reads the steps under way in the journal,
//! and finds the engines by their identity or mark. It takes over an engine with the same
//! configuration (`fleet.on_start`), or with other flags only, which a planned change then applies.
//! It stops an engine with another program, port, device or environment, and replaces it by a new
//! one. [`Lifecycle`](super::lifecycle::Lifecycle) makes these decisions.

use std::time::Duration;

use super::context::EngineContext;
use super::journal::{JournalLine, Setup};
use super::kept;
use super::lifecycle::{Difference, Lifecycle, Recovery, Survivor};
use super::spec::EngineSpec;
use super::view::flag_line;
use crate::driver::{DriverKind, EngineIdentity};
use crate::read_health;
use sluice_config::OnStart;

/// Looks for an engine of an earlier gateway, and decides how the life cycle continues.
pub(super) async fn recover(context: &EngineContext) {
    let spec = context.spec();
    let record = context.journal.lock().last().get(&*spec.name).cloned();
    let (present, aside) =
        record.as_ref().map_or((None, None), |record| (record.trace.as_ref(), record.aside.as_ref()));
    let is_kept = kept::recover(context, present, aside).await && spec.rules.on_start == OnStart::Adopt;
    let found = find(context, present, aside).await;
    let survivor = match (&found, spec.rules.on_start) {
        (None, _) => Survivor::None,
        (Some(_), OnStart::Adopt) => Survivor::Adoptable,
        (Some(_), OnStart::Stop) => Survivor::ToStop,
    };
    let (record, difference) = match changed_elsewhere(context, &spec, record.as_ref()).filter(|_| found.is_some()) {
        Some(record) => (Some(record), Difference::Flags),
        None => {
            let difference = record.as_ref().map_or(Difference::None, |record| difference(record, &spec));
            (record, difference)
        }
    };
    let (mut record, is_warm) = (record, context.driver().is_warm());
    if let Some(record) = record.as_mut().filter(|_| !is_kept) {
        record.lifecycle.forget_kept();
    }
    let mut state = context.state.lock();
    if let Some(engine) = &found {
        state.history.running(engine);
    }
    state.trace = found;
    state.start_took = record.as_ref().and_then(|record| record.start_ms).map(Duration::from_millis);
    let (golden, previous) = match record {
        Some(record) => (record.golden, Some((record.lifecycle, difference))),
        None => (Vec::new(), None),
    };
    if spec.starts_on_demand {
        state.lifecycle.begin_at_rest();
    }
    context.show_start_time(state.start_took);
    let recovery = state.lifecycle.recover(previous, survivor);
    let step = state.lifecycle.step.label();
    match recovery {
        Recovery::New if survivor != Survivor::None => {
            tracing::info!(backend = %spec.name, step, "its engine runs already");
        }
        Recovery::New => {}
        Recovery::Resumed | Recovery::Reconfigured => {
            // Another program or model generates other text.
            state.golden = if recovery == Recovery::Resumed { golden } else { Vec::new() };
            let alive = survivor != Survivor::None;
            tracing::info!(backend = %spec.name, alive, step, "continues what an earlier gateway began");
        }
    }
    state.lifecycle.adopted &= is_warm;
    let settings = &state.lifecycle.wanted.settings;
    if recovery != Recovery::New && difference == Difference::None && *settings != spec.settings {
        let settings = flag_line(settings);
        tracing::info!(backend = %spec.name, settings, "flags were changed since the configuration (restart --reset undoes that)");
    }
}

/// A new record for an engine whose flags differ from the journal or, without a journal, from the
/// configuration.
fn changed_elsewhere(context: &EngineContext, spec: &EngineSpec, record: Option<&JournalLine>) -> Option<JournalLine> {
    let settings = context.driver().running_settings()?;
    if settings == *record.map_or(&spec.settings, |record| &record.lifecycle.wanted.settings) {
        return None;
    }
    tracing::info!(backend = %spec.name, settings = %flag_line(&settings), "its engine runs with other flags than expected");
    let setup = Setup { settings, configured: String::new() };
    let record = context.record();
    Some(JournalLine { lifecycle: Lifecycle::new(setup), ..record })
}

fn difference(record: &JournalLine, spec: &EngineSpec) -> Difference {
    if record.lifecycle.heads_for().configured == spec.configured {
        Difference::None
    } else if record.identity == spec.identity {
        Difference::Flags
    } else {
        Difference::Program
    }
}

/// A running engine whose settings are known, which the driver now controls. The driver also takes
/// control of an engine with unknown settings, to stop it.
async fn find(
    context: &EngineContext,
    recorded: Option<&EngineIdentity>,
    aside: Option<&EngineIdentity>,
) -> Option<EngineIdentity> {
    let name = context.spec().name.clone();
    if let Some(trace) = recorded {
        match context.driver().adopt(trace).await {
            Ok(true) => return Some(trace.clone()),
            Ok(false) => {}
            Err(failure) => {
                tracing::error!(backend = %name, "it is not known whether an engine of an earlier gateway runs: {failure}");
            }
        }
    }
    let trace = match context.driver().find_running(aside).await {
        Some(trace) => trace,
        // The commands may not show whether the engine was started, but the engine may respond.
        None if context.driver().kind() == DriverKind::Command && is_healthy(context).await => EngineIdentity::Command,
        None => return None,
    };
    match context.driver().adopt(&trace).await {
        // An engine of commands has no further settings, and a pod shows the actual ones.
        Ok(true) if matches!(trace, EngineIdentity::Command | EngineIdentity::Pod { .. }) => Some(trace),
        Ok(_) => {
            tracing::warn!(backend = %name, "found processes of an engine that is not in the journal; they are stopped");
            None
        }
        Err(failure) => {
            tracing::error!(backend = %name, "it cannot be taken over: {failure}");
            None
        }
    }
}

async fn is_healthy(context: &EngineContext) -> bool {
    let spec = context.spec();
    read_health(&spec.address, spec.request_timeout).await.is_ok()
}
