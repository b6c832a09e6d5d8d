//! Work that is not counted in tokens: the cost of a request, and requests whose body is not read.
//!
//! A pool of serial engines, and every pool with `cost`, measures requests in a separate unit. The
//! cost then takes the place of the prompt tokens. The rule of the first pool that serves the model
//! applies, because the cost must be known before the home pool is chosen. A job that lacks a field
//! of the rule costs `otherwise`, which is logged only once per pool and configuration, because a
//! client could fill the log.

use std::borrow::Cow;
use std::sync::atomic::Ordering;

use super::incoming::IncomingRequest;
use super::routing_table::{ModelRoute, PoolRoute, RoutingTable};
use sluice_core::openai::{RequestView, Route, kserve};

/// The cost of the request, if it is not counted in tokens.
pub(super) fn cost(table: &RoutingTable, model: &ModelRoute, incoming: &IncomingRequest) -> Option<u64> {
    let pool = &table.pools[*model.pools.first()?];
    if incoming.route.is_tunnel() {
        return Some(1);
    }
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

/// The view of a request for a WebSocket: the query names the model.
pub(super) fn tunnel(incoming: &IncomingRequest) -> RequestView<'_> {
    let query = incoming.path.split_once('?').map_or("", |(_, query)| query);
    let model = query.split('&').find_map(model_in);
    RequestView { model, ..RequestView::empty(incoming.route) }
}

/// The model, if this pair of a query names it. A server decodes names as well as values,
/// so `mod%65l` is `model`.
pub(super) fn model_in(pair: &str) -> Option<Cow<'_, str>> {
    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
    (decoded(name) == "model").then(|| decoded(value))
}

/// A part of a query, decoded as far as it is UTF-8.
fn decoded(value: &str) -> Cow<'_, str> {
    if !value.contains(['%', '+']) {
        return value.into();
    }
    let (mut bytes, mut rest) = (Vec::with_capacity(value.len()), value.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let hex = after.get(..2).filter(|_| *first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(if *first == b'+' { b' ' } else { *first });
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned().into()
}

#[cfg(test)]
mod tests {
    use super::decoded;

    #[test]
    fn values_of_a_query_are_decoded() {
        for (value, wanted) in [("a", "a"), ("a%2Fb+c", "a/b c"), ("%zz%4", "%zz%4"), ("%ff", "\u{fffd}"), ("", "")] {
            assert_eq!(decoded(value), wanted);
        }
    }
}
