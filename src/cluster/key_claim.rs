//! A gateway's claim to the limits of an API key, as the ledger stores it.
//!
//! `keys.rs` divides the limits. The limits are counted in units, in the same order at all
//! gateways. The last unit is a separate JSON member, absent if 0, so that earlier versions can
//! read the other units.

use serde::{Deserialize, Serialize};

/// Number of limits of a key.
pub const UNITS: usize = 6;

/// A gateway's demand for the limits of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Wire", into = "Wire")]
pub struct KeyClaim {
    /// Amount in use, plus the amount for which requests wait.
    pub wanted: [u64; UNITS],
    /// The largest request.
    pub largest: [u64; UNITS],
    /// In use.
    pub used: [u64; UNITS],
}

const FIRST: usize = UNITS - 1;

#[derive(Serialize, Deserialize)]
struct Wire {
    wanted: [u64; FIRST],
    largest: [u64; FIRST],
    used: [u64; FIRST],
    /// Wanted, largest and used amount of the last unit.
    #[serde(default, skip_serializing_if = "is_zero")]
    day: [u64; 3],
}

fn is_zero(day: &[u64; 3]) -> bool {
    *day == [0; 3]
}

impl From<Wire> for KeyClaim {
    fn from(wire: Wire) -> Self {
        let all = |first: [u64; FIRST], last| std::array::from_fn(|at| first.get(at).copied().unwrap_or(last));
        let [wanted, largest, used] = wire.day;
        Self { wanted: all(wire.wanted, wanted), largest: all(wire.largest, largest), used: all(wire.used, used) }
    }
}

impl From<KeyClaim> for Wire {
    fn from(claim: KeyClaim) -> Self {
        let first = |all: [u64; UNITS]| std::array::from_fn(|at| all[at]);
        let last = |all: [u64; UNITS]| all[FIRST];
        let KeyClaim { wanted, largest, used } = claim;
        let day = [last(wanted), last(largest), last(used)];
        Self { wanted: first(wanted), largest: first(largest), used: first(used), day }
    }
}

impl KeyClaim {
    pub(crate) fn bytes(name: &str) -> usize {
        name.len() + 120
    }

    /// Whether the claim wants nothing. Such a claim is not written.
    pub fn is_none(&self) -> bool {
        self.wanted == [0; UNITS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_of_before_are_read_and_read_there_where_the_last_unit_is_not_used() {
        let text = r#"{"wanted":[1,2,3,4,5],"largest":[1,1,1,1,1],"used":[1,0,0,0,0]}"#;
        let before: KeyClaim = serde_json::from_str(text).unwrap();
        assert_eq!(before.wanted, [1, 2, 3, 4, 5, 0]);
        assert_eq!(serde_json::to_string(&before).unwrap(), text);
        let now = KeyClaim { wanted: [0, 0, 0, 0, 0, 9], largest: [0, 0, 0, 0, 0, 2], used: [0, 0, 0, 0, 0, 7] };
        assert_eq!(serde_json::from_str::<KeyClaim>(&serde_json::to_string(&now).unwrap()).unwrap(), now);
    }
}
