//! A request for units of a shared resource.
//!
//! A demand names the units, and conditions that bound the owner or keep units free for others.

/// A demand for units.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Units to take.
    pub units: u64,
    /// Units that must still be free afterwards.
    pub spare: u64,
    /// The most that the owner may hold, whatever the fair share is.
    pub most: u64,
}

impl Demand {
    /// A demand for this many units without conditions.
    pub const fn of(units: u64) -> Self {
        Self { units, spare: 0, most: u64::MAX }
    }
}
