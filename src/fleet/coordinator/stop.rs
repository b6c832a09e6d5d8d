//! Stops an engine for good: it is no longer configured, another one replaces it, or the gateway
//! stops.
//!
//! The engine task drains and stops it. If it cannot be stopped, it keeps blocking others, because
//! two engines must not share a device. The stop is repeated every [`RETRY`] until it succeeds or
//! the gateway stops.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::engine_table::StoppingEngine;
use super::registry::Registry;
use crate::driver::StopRules;
use crate::engine::context::EngineContext;
use crate::engine::effects::stop_by;
use crate::engine::lifecycle::Step;
use sluice_gateway::pool::Cordon;

pub(super) const RETRY: Duration = Duration::from_secs(10);

/// Begins to stop an engine, after which the engine task ends. With a `generation`, only while that
/// configuration is in force. Returns whether the stop has begun.
pub(super) fn begin_stop(registry: &Arc<Registry>, name: &str, generation: Option<u64>) -> bool {
    let engine = {
        let mut table = registry.table();
        if generation.is_some_and(|generation| table.wanted.generation != generation) {
            return false;
        }
        let Some(engine) = table.managed.remove(name) else { return false };
        // The cordon is set now, before a preflight counts on the engine. Requests that wait for
        // this backend are not refused because of the stop.
        engine.handle.context.set_cordon(Cordon::Draining);
        engine.leave.cancel();
        table.stopping.push(StoppingEngine::managed(&engine.handle.context));
        engine
    };
    let registry = Arc::clone(registry);
    registry.clone().tasks.spawn(async move {
        if let Err(error) = engine.task.await {
            tracing::error!(%error, "an engine task failed");
        }
        let context = engine.handle.context;
        retry_until_stopped(&registry, &context).await;
        forget(&registry, &context);
    });
    true
}

/// Repeats the stop after the end of the engine task. Returns when the engine is gone, or the
/// gateway stops.
async fn retry_until_stopped(registry: &Registry, context: &Arc<EngineContext>) {
    let name = context.spec().name.clone();
    while context.step() != Step::Off && !registry.is_closing() {
        tracing::error!(backend = %name, "its engine could not be stopped: {}; tried again every {} s", context.why(), RETRY.as_secs());
        sleep(RETRY).await;
        if registry.is_closing() {
            break;
        }
        let stopped = stop_by(context, StopRules::default()).await;
        {
            let mut state = context.state.lock();
            match stopped {
                Ok(_) => state.lifecycle.confirm_stopped(),
                Err(failure) => state.lifecycle.stop_failed(failure.to_string()),
            }
        }
        if let Err(error) = context.write_journal().await {
            tracing::error!(backend = %name, %error, "the journal cannot be written");
        }
    }
}

fn forget(registry: &Registry, context: &Arc<EngineContext>) {
    let name = context.spec().name.clone();
    let stopping = StoppingEngine::managed(context);
    registry.others.open(&name);
    {
        let mut table = registry.table();
        if context.step() == Step::Off && table.wanted.engine(&name).is_none() {
            context.journal.lock().forget(&name);
        }
        table.stopping.retain(|other| !other.is_same(&stopping));
    }
    registry.update_cordons();
    registry.wake.notify_one();
}
