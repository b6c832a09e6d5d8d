//! How much an owner asks for, and under which conditions.
//!
//! The conditions bound one owner, or keep units free for others.

/// A demand for units.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Units that are asked for.
    pub units: u64,
    /// Units that must still be free afterwards.
    pub spare: u64,
    /// The most that the owner may hold, whatever its share is.
    pub most: u64,
}

impl Demand {
    /// A demand for this many units without further conditions.
    pub const fn of(units: u64) -> Self {
        Self { units, spare: 0, most: u64::MAX }
    }
}
