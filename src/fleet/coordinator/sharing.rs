//! Carries out the turns of engines that share a device ([`turns`](super::turns)).
//!
//! Called several times a second. Demand comes from the queues. A waiting request waits for the
//! sharing engines of a pool if no backend of the pool is in rotation. An engine that an operator
//! drained, or another change of engines, delays a turn. Bounds: the configured engines.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::change::ensure_no_change;
use super::registry::Registry;
use super::turns::{Hold, Order, Sharer};
use crate::engine::context::EngineContext;
use crate::engine::engine_task::EngineHandle;
use crate::engine::lifecycle::{ChangeRefused, Step};
use sluice_core::base::BackendId;
use sluice_gateway::pool::Cordon;

fn hold(context: &EngineContext) -> Hold {
    let state = context.state.lock();
    let life = &state.lifecycle;
    match life.step {
        _ if life.leaving && state.trace.is_none() => Hold::Away,
        _ if life.leaving => Hold::Stuck,
        Step::Idle | Step::Asleep => Hold::Asleep,
        Step::Hold | Step::Off if state.trace.is_some() => Hold::Stuck,
        Step::Hold | Step::Off => Hold::Away,
        Step::Drain if life.resting => Hold::Draining,
        Step::Stop | Step::Sleep if life.resting => Hold::Leaving,
        Step::Ramp | Step::Serve => Hold::Awake,
        Step::Backoff => Hold::Failing,
        _ => Hold::Coming,
    }
}

/// One look at all engines that share a device. `begun`: the zero of the clock of the turns.
pub(super) async fn take_turns(registry: &Registry, begun: Instant) {
    if registry.is_closing() {
        return;
    }
    let engines = registry.sharing_engines();
    registry.turns().retain(|share, _| engines.contains_key(share));
    if engines.is_empty() {
        return;
    }
    let waits = waiting(registry, begun);
    for (share, engines) in engines {
        let sharer = |engine: &EngineHandle| {
            let spec = engine.context.spec();
            let waits_since = waits.get(&spec.backend).copied();
            Sharer { name: Arc::clone(&spec.name), hold: hold(&engine.context), waits_since }
        };
        let sharers: Vec<_> = engines.iter().map(sharer).collect();
        let (now, stay) = (begun.elapsed(), engines[0].context.spec().rules.share_stay);
        let order = registry.turns().entry(share.clone()).or_default().decide(&sharers, now, stay);
        let Some((name, wakes)) = order.map(|order| match order {
            Order::Wake(name) => (name, true),
            Order::Rest(name) => (name, false),
        }) else {
            continue;
        };
        let Some(engine) = engines.iter().find(|engine| engine.context.spec().name == name) else { continue };
        let obeyed = if wakes { engine.wake().await } else { rest(registry, engine).await };
        if obeyed.is_ok() {
            let next = if wakes { "it is its turn" } else { "requests wait for another engine" };
            tracing::info!(backend = %name, share, "{next}");
        }
    }
}

async fn rest(registry: &Registry, engine: &EngineHandle) -> Result<(), ChangeRefused> {
    let context = &engine.context;
    let _one_at_a_time = registry.change_lock.lock().await;
    ensure_no_change(registry, None)?;
    let serves = context.step().in_rotation();
    engine.rest().await?;
    if serves {
        context.set_cordon(Cordon::Draining);
    }
    Ok(())
}

/// For each engine that could serve a waiting request, when the oldest such request arrived.
fn waiting(registry: &Registry, begun: Instant) -> BTreeMap<BackendId, Duration> {
    let oldest = registry.admission.oldest_waiting();
    let mut waits = BTreeMap::new();
    for pool in registry.admission.view() {
        let Some((_, arrived)) = oldest.iter().find(|(id, _)| *id == pool.id) else { continue };
        if pool.backends.iter().any(|backend| backend.in_rotation()) {
            continue;
        }
        let open = pool.backends.iter().filter(|backend| !backend.draining && !backend.removed);
        waits.extend(open.map(|backend| (backend.id, arrived.saturating_duration_since(begun))));
    }
    waits
}
