//! Which pools may serve a request, from the routing table and the estimate alone.
//!
//! The home is the pool that serves the model and whose range contains the estimated prompt length; validation
//! guarantees exactly one. The spill list follows, restricted to pools that serve the model. The *class* of a request,
//! a label of metrics, is the name of its home pool: it describes the prompt's length, not where the request ran.
//!
//! An estimate is *near a boundary* when its spread reaches across a limit of the home range or the threshold above
//! which a prompt needs a permit. Only then is an exact count worth its cost.

use smallvec::SmallVec;

use super::routing_table::{ModelRoute, PoolRoute, RoutingTable};
use sluice_core::base::{PoolId, Tokens};

/// The pools of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Position of the home pool in the routing table.
    pub home: usize,
    /// Pools that it may spill to, in order of preference.
    pub spill: SmallVec<[PoolId; 2]>,
}

/// The placement of a prompt of `tokens` for `model`. `None` when no pool serves it, which validation rules out for
/// declared models.
pub fn place(table: &RoutingTable, model: &ModelRoute, tokens: u64) -> Option<Placement> {
    let home = *model.pools.iter().find(|index| table.pools[**index].range.contains(Tokens(tokens)))?;
    let serves = |index: &&usize| model.pools.contains(index);
    let spill = table.pools[home].spill.iter().filter(serves).map(|index| table.pools[*index].id).collect();
    Some(Placement { home, spill })
}

/// Whether a prompt of `tokens`, give or take the share `spread`, could lie on either side of a boundary.
pub fn near_boundary(table: &RoutingTable, model: &ModelRoute, tokens: u64, spread: f64) -> bool {
    let margin = (tokens as f64 * spread.max(0.0)).min(1e15) as u64;
    let (low, high) = (tokens.saturating_sub(margin), tokens.saturating_add(margin));
    let between = |boundary: u64| low < boundary && boundary <= high;
    model.pools.iter().map(|index| &table.pools[*index]).any(|pool| boundaries(pool).any(between))
}

fn boundaries(pool: &PoolRoute) -> impl Iterator<Item = u64> + '_ {
    let range = [Some(pool.range.min.0), pool.range.max.map(|max| max.0)];
    let permit = pool.limits.long_prefix.map(|long| long.threshold.saturating_add(1));
    range.into_iter().chain([permit]).flatten().filter(|boundary| *boundary > 0)
}
