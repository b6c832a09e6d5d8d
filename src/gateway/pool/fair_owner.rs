//! Whose share of a pool a request uses, and how much of it an owner has had.
//!
//! An owner is a keyed hash with a weight: names stay where they came from.

use std::cmp::Ordering;

use super::queue::OwnerIndex;

/// The owner of all requests that name none.
pub(super) const EVERYONE: OwnerIndex = 0;
/// Bounds of a weight, as in the configuration.
const WEIGHTS: (f64, f64) = (1e-3, 1e3);

/// Whose share of a pool a request uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FairOwner {
    /// A hash of the owner's name.
    pub id: u64,
    /// Its share, relative to other owners.
    pub weight: f64,
    /// The owners of one group, such as the users of a key, divide one weight evenly: more names
    /// are no more share.
    pub group: Option<u64>,
    /// Its place in the table of the home pool, and the prompt tokens that no engine is expected to
    /// have cached; set by admission.
    pub(super) index: OwnerIndex,
    pub(super) computed: u64,
}

impl FairOwner {
    /// The owner with this hash; the weight is clamped to 0.001 to 1,000.
    pub fn new(id: u64, weight: f64) -> Self {
        let weight = if weight.is_nan() { 1.0 } else { weight.clamp(WEIGHTS.0, WEIGHTS.1) };
        Self { id, weight, group: None, index: EVERYONE, computed: 0 }
    }

    /// The same as one of a group, which has the weight as a whole.
    pub fn of_group(self, group: u64) -> Self {
        Self { group: Some(group), ..self }
    }
}

/// Seconds of an engine divided by weight; ordered.
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
    /// The hash of its name.
    pub id: u64,
    /// Its weight.
    pub weight: f64,
    /// Seconds of engines that it has been charged since it came.
    pub work: f64,
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that hold room.
    pub running: u32,
}
