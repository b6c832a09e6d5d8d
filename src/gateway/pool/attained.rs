//! The engine time that owners of requests have had here, for other gateways, and the engine time
//! that they have had there.
//!
//! Bounds: the [`SHARED`] owners of a pool with most work.

use std::sync::Arc;

use super::admission::Admission;

/// Owners of one pool of which other gateways learn.
const SHARED: usize = 64;

/// Sums of owners, by their hash.
type AttainedSums = Vec<(u64, f64)>;

impl Admission {
    /// Seconds of engines that owners have had here, by pool: sums that grow while an owner is
    /// known.
    pub fn attained(&self) -> Vec<(Arc<str>, AttainedSums)> {
        let state = self.shared.lock();
        let fair = state.pools.iter().filter(|pool| pool.queue.is_fair() && !pool.removed);
        fair.map(|pool| (Arc::clone(&pool.name), pool.queue.attained(SHARED))).collect()
    }

    /// An owner has had this many more seconds of engines of this pool through another gateway. It
    /// then waits here until others have had as much. Of one that has no request here nothing is
    /// kept.
    pub fn attained_elsewhere(&self, pool: &str, owner: u64, seconds: f64) {
        let mut state = self.shared.lock();
        if let Some(found) = state.pools.iter_mut().find(|found| *found.name == *pool) {
            found.queue.attained_elsewhere(owner, seconds);
        }
    }
}
