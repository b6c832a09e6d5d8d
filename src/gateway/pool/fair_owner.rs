//! The owner of a request in a fair pool.
//!
//! An owner is a keyed hash with a weight; this folder never sees names.

use std::cmp::Ordering;

use super::queue::OwnerIndex;

/// The owner of all requests to which no other owner applies.
pub(super) const EVERYONE: OwnerIndex = 0;
/// Bounds of a weight, as in the configuration.
const WEIGHTS: (f64, f64) = (1e-3, 1e3);

/// The key or user whose share of a pool a request uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FairOwner {
    /// A hash of the owner's name.
    pub id: u64,
    /// The share relative to other owners.
    pub weight: f64,
    /// Owners of one group, such as the users of one key, divide one weight evenly, so more names
    /// get no larger share.
    pub group: Option<u64>,
    /// The owner's place in the table of the home pool. Set by admission.
    pub(super) index: OwnerIndex,
    /// Prompt tokens that even the engine with the longest expected prefix must compute. Set by
    /// admission.
    pub(super) computed: u64,
}

impl FairOwner {
    /// The owner with this hash. The weight is clamped to 0.001 to 1,000; NaN becomes 1.
    pub fn new(id: u64, weight: f64) -> Self {
        let weight = if weight.is_nan() { 1.0 } else { weight.clamp(WEIGHTS.0, WEIGHTS.1) };
        Self { id, weight, group: None, index: EVERYONE, computed: 0 }
    }

    /// The same owner as a member of a group; the weight is the group's total.
    pub fn of_group(self, group: u64) -> Self {
        Self { group: Some(group), ..self }
    }
}

/// Seconds of engine time divided by weight; ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Level(pub(super) f64);

impl Eq for Level {}

impl Ord for Level {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Level {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// One owner, for views.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OwnerView {
    /// The hash of the owner's name.
    pub id: u64,
    /// The weight; for a member of a group, a part of the group's weight.
    pub weight: f64,
    /// Seconds of engine time charged since the owner entered the table.
    pub work: f64,
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that hold room.
    pub running: u32,
}
