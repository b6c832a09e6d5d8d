//! Counts of events, by the group of the unit that they belong to (see [`unit`](super::unit)).
//!
//! The spread between groups shows how far events of one unit come together. Bounds: one number for each group.

use serde::{Deserialize, Serialize};

use super::unit::GROUPS;

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

    /// Groups that have any.
    pub(super) fn groups(&self) -> usize {
        self.0.iter().filter(|count| **count > 0.0).count()
    }
}
