//! Which pools may serve a request, in which order: a pure function of the plan and the estimate.
//!
//! The home is the pool that serves the model and whose range contains the estimated prompt length;
//! validation made sure that there is exactly one. The spill list follows, as far as those pools serve
//! the model too. The *class* of a request, used in metrics and later in experiments, is the name of
//! its home pool's length range: what length it has, not where it ran.
//!
//! An estimate is *near a boundary* when its spread reaches across one: a limit of the home range, or
//! the threshold above which a prompt needs a permit. Only then is an exact count worth its cost.

use smallvec::SmallVec;

use super::routing_table::{ModelRoute, PoolRoute, RoutingTable};
use sluice_core::base::{PoolId, Tokens};

/// The pools of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Position of the home pool in the plan.
    pub home: usize,
    /// Where else it may go, in order.
    pub spill: SmallVec<[PoolId; 2]>,
}

/// The placement of a prompt of `tokens` for `model`. `None` when no pool serves it, which the
/// configuration rules out for declared models.
pub fn place(plan: &RoutingTable, model: &ModelRoute, tokens: u64) -> Option<Placement> {
    let home = *model.pools.iter().find(|index| plan.pools[**index].range.contains(Tokens(tokens)))?;
    let serves = |index: &&usize| model.pools.contains(index);
    let spill = plan.pools[home].spill.iter().filter(serves).map(|index| plan.pools[*index].id).collect();
    Some(Placement { home, spill })
}

/// Whether a prompt of about `tokens`, give or take the share `spread`, could fall on either side of
/// something that decides where it runs.
pub fn near_boundary(plan: &RoutingTable, model: &ModelRoute, tokens: u64, spread: f64) -> bool {
    let margin = (tokens as f64 * spread.max(0.0)).min(1e15) as u64;
    let (low, high) = (tokens.saturating_sub(margin), tokens.saturating_add(margin));
    let between = |boundary: u64| low < boundary && boundary <= high;
    model.pools.iter().map(|index| &plan.pools[*index]).any(|pool| boundaries(pool).any(between))
}

fn boundaries(pool: &PoolRoute) -> impl Iterator<Item = u64> + '_ {
    let range = [Some(pool.range.min.0), pool.range.max.map(|max| max.0)];
    let permit = pool.limits.long_prefix.map(|long| long.threshold.saturating_add(1));
    range.into_iter().chain([permit]).flatten().filter(|boundary| *boundary > 0)
}
