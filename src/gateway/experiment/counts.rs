//! Counts of events by the group of the event's unit (see [`unit`](super::unit)), and counts of
//! units.
//!
//! The spread between groups shows how far events come in clusters, several of one unit. Bounds:
//! one number for each group; one bit for each cell of units.

use serde::{Deserialize, Serialize};

use super::unit::{CELLS, GROUPS};

/// Counts of one kind of event, by group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Counts(pub(super) Vec<f64>);

impl Default for Counts {
    fn default() -> Self {
        Self(vec![0.0; GROUPS])
    }
}

impl Counts {
    pub(super) fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    pub(super) fn groups_with(&self, other: &Self) -> usize {
        self.0.iter().zip(&other.0).filter(|(one, other)| **one + **other > 0.0).count()
    }

    pub(super) fn groups(&self) -> usize {
        self.0.iter().filter(|count| **count > 0.0).count()
    }
}

/// The cells with a unit of some kind. Units that share a cell count once: of `n` units in
/// [`CELLS`] cells, about the share n / (2 CELLS) is missed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct UnitCells(Vec<u64>);

impl UnitCells {
    pub(super) fn insert(&mut self, cell: u16) {
        // The bits are allocated late, because most experiments never need them.
        self.0.resize(CELLS / 64, 0);
        self.0[usize::from(cell) / 64] |= 1 << (cell % 64);
    }

    pub(super) fn count(&self) -> f64 {
        self.0.iter().map(|word| word.count_ones()).sum::<u32>().into()
    }
}
