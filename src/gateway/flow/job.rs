//! Work that is not counted in tokens: the cost of a request, and requests whose body is not read.
//!
//! A pool of serial engines, and every pool with `cost`, measures requests in a separate unit. The
//! cost then takes the place of the prompt tokens. The rule of the first pool that serves the model
//! counts, because the cost decides which pool is home. A job that lacks a field of the rule costs
//! `otherwise`, which is logged once per pool and configuration: a client could otherwise fill the
//! log.

use std::borrow::Cow;
use std::sync::atomic::Ordering;

use super::incoming::IncomingRequest;
use super::routing_table::{ModelRoute, PoolRoute, RoutingTable};
use sluice_core::openai::{RequestView, Route, kserve};

/// The cost of the request, if it is not counted in tokens.
pub(super) fn cost(table: &RoutingTable, model: &ModelRoute, incoming: &IncomingRequest) -> Option<u64> {
    let pool = &table.pools[*model.pools.first()?];
    match &pool.cost {
        Some(_) => Some(by_rule(pool, incoming)),
        None => (pool.engine.rules().does_jobs || incoming.route.is_job()).then_some(1),
    }
}

fn by_rule(pool: &PoolRoute, incoming: &IncomingRequest) -> u64 {
    let Some(cost) = &pool.cost else { return 1 };
    cost.rule.of(&incoming.body).unwrap_or_else(|field| {
        let (otherwise, unit) = (cost.rule.otherwise, &*cost.unit);
        if !cost.was_logged.swap(true, Ordering::Relaxed) {
            let (pool, route) = (&*pool.name, incoming.route.label());
            tracing::warn!(
                pool,
                route,
                field,
                "a request lacks the field that gives its cost: it counts as {otherwise} {unit}"
            );
        }
        otherwise
    })
}

/// A request whose body is not read. The path names the model, or the pool has one model.
pub(super) fn opaque(incoming: &IncomingRequest) -> RequestView<'_> {
    let bare = incoming.path.split('?').next().unwrap_or(&incoming.path);
    let model = match incoming.route {
        Route::Custom => incoming.routing.model_of_path(bare).map(|model| &*model.name),
        _ => kserve::model_and_verb(bare).map(|(model, _)| model),
    };
    RequestView {
        model: model.map(Cow::Borrowed),
        stream: incoming.route == Route::GenerateStream,
        ..RequestView::empty(incoming.route)
    }
}
