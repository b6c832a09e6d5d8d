//! How the limits of API keys are divided among gateways: by what each says that it wants of them.
//!
//! Each gateway writes what it wants with its renewal, and uses its part of the [division](crate::division) as soon as that is
//! written, less what others have in use above theirs. All compute the same division of the same ledger, so the parts sum to the
//! limit. No part is taken back from a gateway before another uses it: while demand moves, a key may use more for as long as one
//! renewal takes, at most what the gateways had before and after. What a gateway has in flight that no longer renews is not counted after its lease.
//! A gateway without a share in the ledger has no part.
//!
//! Where there are fewer units than gateways that want one, each has its turn for some writes of the ledger.

use serde::{Deserialize, Serialize};

use crate::division::{Claim, divide};
use crate::ledger::{Ledger, is_gateway};

/// Limits of a key.
pub const UNITS: usize = 5;
/// Writes of each gateway for which the first of those that want a unit that is too rare stays the first.
const TURN: u64 = 4;

/// What a gateway wants of the limits of a key. The meaning of the units is the caller's; it must be the same at all gateways.
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
    /// Whether it wants nothing, which need not be written.
    pub fn is_none(&self) -> bool {
        self.wanted == [0; UNITS]
    }
}

/// The parts of a gateway of the limits of a key; a unit without a limit is not divided.
pub fn parts(ledger: &Ledger, id: &str, key: &str, limits: &[Option<u64>; UNITS]) -> [u64; UNITS] {
    let gateways: Vec<_> = ledger.gateways.iter().filter(|(id, _)| is_gateway(id)).collect();
    let Some(own) = gateways.iter().position(|(other, _)| *other == id) else { return [0; UNITS] };
    let count = gateways.len() as u64;
    let turn = ledger.writes / (TURN * count);
    std::array::from_fn(|unit| {
        let Some(limit) = limits[unit] else { return u64::MAX };
        let claim = |(place, (_, entry)): (u64, &(&String, &crate::ledger::Entry))| {
            let claim = entry.keys.get(key).copied().unwrap_or_default();
            Claim { wanted: claim.wanted[unit], need: claim.largest[unit], since: (place + turn) % count }
        };
        let claims: Vec<Claim> = (0..).zip(&gateways).map(claim).collect();
        let parts = divide(limit, &claims);
        let above = |(place, (_, entry)): (usize, &(&String, &crate::ledger::Entry))| {
            let used = entry.keys.get(key).map_or(0, |claim| claim.used[unit]);
            if place == own { 0 } else { used.saturating_sub(parts[place]) }
        };
        parts[own].saturating_sub(gateways.iter().enumerate().map(above).sum())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{EARLIER, Entry};

    fn ledger(wanted: &[u64]) -> Ledger {
        let mut ledger = Ledger::new("a".to_owned());
        ledger.gateways.insert(EARLIER.to_owned(), Entry::default());
        for (gateway, wanted) in wanted.iter().enumerate() {
            let claim = KeyClaim { wanted: [*wanted; UNITS], largest: [1; UNITS], used: [0; UNITS] };
            let keys = [("k".to_owned(), claim)].into_iter().filter(|(_, claim)| !claim.is_none()).collect();
            ledger.gateways.insert(format!("g{gateway}"), Entry { keys, ..Entry::default() });
        }
        ledger
    }

    fn of_all(ledger: &Ledger, limit: u64) -> Vec<u64> {
        let ids: Vec<&String> = ledger.gateways.keys().filter(|id| is_gateway(id)).collect();
        ids.into_iter().map(|id| parts(ledger, id, "k", &[Some(limit); UNITS])[0]).collect()
    }

    #[test]
    fn the_parts_sum_to_the_limit_and_follow_demand() {
        for (wanted, least) in
            [(vec![0, 0, 0], vec![3, 3, 3]), (vec![10, 0, 0], vec![8, 1, 1]), (vec![5, 5, 0], vec![4, 4, 1])]
        {
            let found = of_all(&ledger(&wanted), 10);
            assert_eq!(found.iter().sum::<u64>(), 10, "{wanted:?}");
            assert!(found.iter().zip(&least).all(|(part, least)| part >= least), "{wanted:?}: {found:?}");
        }
    }

    #[test]
    fn what_runs_elsewhere_above_its_part_is_not_used_a_second_time() {
        let mut ledger = ledger(&[9, 9]);
        ledger.gateways.get_mut("g1").unwrap().keys.get_mut("k").unwrap().used = [8; UNITS];
        assert_eq!(of_all(&ledger, 10), [2, 5]);
    }

    #[test]
    fn a_unit_that_is_too_rare_goes_round() {
        let mut ledger = ledger(&[3, 3, 3]);
        let mut had = [0; 3];
        for write in 0..36 {
            ledger.writes = write;
            let found = of_all(&ledger, 1);
            assert_eq!(found.iter().sum::<u64>(), 1);
            had.iter_mut().zip(&found).for_each(|(had, part)| *had += part);
        }
        assert_eq!(had, [12; 3]);
    }

    #[test]
    fn a_large_request_gets_a_part_of_its_size_and_what_has_no_limit_is_not_divided() {
        let mut ledger = ledger(&[100, 100]);
        ledger.gateways.get_mut("g1").unwrap().keys.get_mut("k").unwrap().largest = [80; UNITS];
        assert_eq!(of_all(&ledger, 100), [20, 80]);
        assert_eq!(parts(&ledger, "g0", "k", &[None; UNITS]), [u64::MAX; UNITS]);
        assert_eq!(parts(&ledger, "g9", "k", &[Some(9); UNITS]), [0; UNITS], "not in the ledger");
        let text = String::from_utf8(ledger.to_bytes()).unwrap();
        assert_eq!(Ledger::parse(text.as_bytes()).unwrap(), ledger);
    }
}
