//! What a gateway wants of the limits of an API key, as it stands in the ledger.
//!
//! Plain data; how limits are divided by it: `keys.rs`. The meaning of the units is the caller's, and must be the same at all
//! gateways.

use serde::{Deserialize, Serialize};

/// Limits of a key.
pub const UNITS: usize = 5;

/// What a gateway wants of the limits of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyClaim {
    /// In use, and asked for.
    pub wanted: [u64; UNITS],
    /// The largest request.
    pub largest: [u64; UNITS],
    /// In use.
    pub used: [u64; UNITS],
}

impl KeyClaim {
    /// About how many bytes it takes in the ledger, with the name of its key.
    pub(crate) fn bytes(name: &str) -> usize {
        name.len() + 100
    }

    /// Whether it wants nothing, which need not be written.
    pub fn is_none(&self) -> bool {
        self.wanted == [0; UNITS]
    }
}
