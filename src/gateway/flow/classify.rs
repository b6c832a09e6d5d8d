//! Determines the pools that may serve a request, from the routing table and the estimate alone.
//!
//! The home is the pool that serves the model and whose range contains the estimated prompt length;
//! validation guarantees exactly one. The spill list follows, restricted to pools that serve the
//! model.
//!
//! A boundary is a limit of a pool's range, or the threshold above which a prompt needs a permit.
//! The prompt is counted exactly only if it could lie on either side of a boundary.

use std::sync::Arc;

use smallvec::SmallVec;

use super::routing_table::{ModelRoute, PoolRoute, RoutingTable};
use crate::pool::AdmissionRequest;
use sluice_core::base::{PoolId, Tokens};
use sluice_core::engines::EngineKind;
use sluice_core::openai::Route;

/// The pools of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Position of the home pool in the routing table.
    pub home: usize,
    /// Pools that the request may spill to, in order of preference.
    pub spill: SmallVec<[PoolId; 2]>,
}

/// The placement of a prompt of `tokens` for `model`. `None` when no pool serves it, which
/// validation rules out for declared models.
pub fn place(table: &RoutingTable, model: &ModelRoute, tokens: u64) -> Option<Placement> {
    let home = *model.pools.iter().find(|index| table.pools[**index].range.contains(Tokens(tokens)))?;
    let serves = |index: &&usize| model.pools.contains(index);
    let spill = table.pools[home].spill.iter().filter(serves).map(|index| table.pools[*index].id).collect();
    Some(Placement { home, spill })
}

/// Checks that the engines of the home pool have the route; if not, returns their kind. Pools to
/// which the request may spill, but whose engines lack the route, are dropped.
pub fn keep_serving(table: &RoutingTable, placement: &mut Placement, route: Route) -> Result<(), EngineKind> {
    let serves = |pool: &PoolRoute| (pool.engine.rules().serves)(route);
    placement.spill.retain(|id| table.pools.iter().any(|pool| pool.id == *id && serves(pool)));
    let home = &table.pools[placement.home];
    if serves(home) { Ok(()) } else { Err(home.engine) }
}

/// The placement of a request that only the pool `name` can serve. `None` if that pool does not
/// serve `model`.
pub fn place_in(table: &RoutingTable, model: &ModelRoute, name: &str) -> Option<Placement> {
    let home = *model.pools.iter().find(|index| *table.pools[**index].name == *name)?;
    Some(Placement { home, spill: SmallVec::new() })
}

/// A request for admission, and the routing table by which it was placed.
#[derive(Debug)]
pub(super) struct PlacedRequest {
    pub(super) table: Arc<RoutingTable>,
    pub(super) home: usize,
    /// The request, as it enters admission for each lease.
    pub(super) request: AdmissionRequest,
}

impl PlacedRequest {
    pub(super) fn home(&self) -> &PoolRoute {
        &self.table.pools[self.home]
    }

    /// Places the request by a newer table, or without the arm of an experiment.
    pub(super) fn move_to(&mut self, table: Arc<RoutingTable>, placement: Placement) {
        self.request.layout = table.layout;
        self.request.home = table.pools[placement.home].id;
        self.request.spill = placement.spill;
        (self.home, self.table) = (placement.home, table);
    }
}

/// The most tokens that one request may take on any backend of the placement's pools; `None` is no
/// limit.
pub fn tokens_limit(table: &RoutingTable, placement: &Placement) -> Option<u64> {
    let home = &table.pools[placement.home];
    let spill = table.pools.iter().filter(|pool| placement.spill.contains(&pool.id));
    let limits = std::iter::once(home).chain(spill).map(|pool| pool.limits.tokens);
    limits.reduce(|most, limit| most.zip(limit).map(|(most, limit)| most.max(limit))).flatten()
}

/// Whether a boundary lies above `low` and at or below `high` tokens.
pub fn boundary_between(table: &RoutingTable, model: &ModelRoute, low: u64, high: u64) -> bool {
    next_boundary(table, model, low) <= high
}

/// The lowest boundary above `tokens`, or `u64::MAX`. A prompt of that length belongs to another
/// pool, or needs a permit.
pub fn next_boundary(table: &RoutingTable, model: &ModelRoute, tokens: u64) -> u64 {
    let pools = model.pools.iter().map(|index| &table.pools[*index]);
    pools.flat_map(boundaries).filter(|boundary| *boundary > tokens).min().unwrap_or(u64::MAX)
}

fn boundaries(pool: &PoolRoute) -> impl Iterator<Item = u64> + '_ {
    let range = [Some(pool.range.min.0), pool.range.max.map(|max| max.0)];
    let permit = pool.limits.long_prefix.map(|long| long.threshold.saturating_add(1));
    range.into_iter().chain([permit]).flatten().filter(|boundary| *boundary > 0)
}
