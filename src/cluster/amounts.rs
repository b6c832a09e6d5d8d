//! The four units that a backend limits, and amounts of them.
//!
//! A [`Limit`] has no number for an unlimited unit, which gateways do not divide. [`Amounts`] and
//! limits are JSON arrays in the order of [`Unit::ALL`].

use serde::{Deserialize, Serialize};

sluice_core::labels! {
    /// A unit that a backend limits.
    pub enum Unit {
        /// Sequences in flight.
        Slots = "slots",
        /// Outstanding tokens of prompts and outputs.
        Tokens = "tokens",
        /// Prompt tokens in prefill.
        PrefillTokens = "prefill_tokens",
        /// Permits of long prompts in prefill.
        Permits = "permits",
    }
}

/// An amount of each unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Amounts([u64; 4]);

impl Amounts {
    /// In the order of [`Unit::ALL`].
    pub const fn new(amounts: [u64; 4]) -> Self {
        Self(amounts)
    }

    /// The amount of one unit.
    pub fn get(&self, unit: Unit) -> u64 {
        self.0[unit as usize]
    }

    /// Sets the amount of one unit.
    pub fn set(&mut self, unit: Unit, amount: u64) {
        self.0[unit as usize] = amount;
    }

    /// Calls `amount` for each unit.
    pub fn each(amount: impl FnMut(Unit) -> u64) -> Self {
        Self(Unit::ALL.map(amount))
    }

    /// The smaller of both, unit by unit.
    pub fn min(&self, other: &Self) -> Self {
        Self::each(|unit| self.get(unit).min(other.get(unit)))
    }

    /// The larger of both, unit by unit.
    pub fn max(&self, other: &Self) -> Self {
        Self::each(|unit| self.get(unit).max(other.get(unit)))
    }

    /// Whether every amount is 0.
    pub fn is_none(&self) -> bool {
        self.0 == [0; 4]
    }
}

/// The limit of each unit; `None` if the unit is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Limit([Option<u64>; 4]);

impl Limit {
    /// In the order of [`Unit::ALL`].
    pub const fn new(limit: [Option<u64>; 4]) -> Self {
        Self(limit)
    }

    /// The limit of one unit.
    pub fn get(&self, unit: Unit) -> Option<u64> {
        self.0[unit as usize]
    }

    /// The smaller of both, unit by unit.
    pub fn min(&self, other: &Self) -> Self {
        Self(Unit::ALL.map(|unit| match (self.get(unit), other.get(unit)) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }))
    }
}
