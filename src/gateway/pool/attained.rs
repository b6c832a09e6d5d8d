//! The engine time that each owner of requests has used, exchanged between gateways.
//!
//! Each gateway adds the time at other gateways to the owners' levels. Bound: the [`SHARED`] owners
//! of a pool with the most work.

use std::sync::Arc;

use super::admission::Admission;

/// The most owners of one pool that are reported to other gateways.
const SHARED: usize = 64;

type AttainedSums = Vec<(u64, f64)>;

impl Admission {
    /// For each fair pool, the seconds of engine time that owners used through this gateway. An
    /// owner's sum grows while the owner is in the table.
    pub fn attained(&self) -> Vec<(Arc<str>, AttainedSums)> {
        let state = self.shared.lock();
        let fair = state.pools.iter().filter(|pool| pool.queue.is_fair() && !pool.removed);
        fair.map(|pool| (Arc::clone(&pool.name), pool.queue.attained(SHARED))).collect()
    }

    /// An owner has had this many more seconds in this pool through another gateway, so the owner
    /// waits here until others have had as much. Ignored if the owner is not in the table.
    pub fn attained_elsewhere(&self, pool: &str, owner: u64, seconds: f64) {
        let mut state = self.shared.lock();
        if let Some(found) = state.pools.iter_mut().find(|found| *found.name == *pool) {
            found.queue.attained_elsewhere(owner, seconds);
        }
    }
}
