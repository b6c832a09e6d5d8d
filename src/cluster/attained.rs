//! The engine work charged to owners of requests at each gateway. The fair queues of all gateways
//! use it.
//!
//! Each gateway writes the sum of each owner's work so far, and the others count the growth of each
//! sum, so a failed renewal loses no work. Bounds: the sums of all gateways take an eighth of an
//! object. Smaller sums are left out first, because owners with little work are served early
//! anyway.

use std::collections::BTreeMap;

use crate::ledger::BYTES_MAX;

/// Milliseconds of engine work, by pool and hash of the owner.
pub type Attained = BTreeMap<String, BTreeMap<u64, u64>>;

/// JSON bytes of an owner's hash and sum: two numbers of up to 20 digits and four marks.
const SUM: usize = 44;
/// JSON bytes around the name and the sums of a pool.
const POOL: usize = 6;

/// The largest sums that fit into the part of one of `gateways` gateways.
pub(crate) fn bounded(attained: &Attained, gateways: usize) -> Attained {
    let mut left = BYTES_MAX / 8 / gateways.max(1);
    let sums = attained.iter().flat_map(|(pool, owners)| owners.iter().map(move |(owner, sum)| (*sum, pool, *owner)));
    let mut sums: Vec<_> = sums.collect();
    sums.sort_unstable_by(|one, other| other.cmp(one));
    let mut kept = Attained::new();
    for (sum, pool, owner) in sums {
        let bytes = if kept.contains_key(pool) { SUM } else { SUM + POOL + pool.len() };
        let Some(rest) = left.checked_sub(bytes) else { break };
        left = rest;
        kept.entry(pool.clone()).or_default().insert(owner, sum);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Entry, GATEWAYS_MAX, Ledger};

    #[test]
    fn the_largest_sums_of_all_gateways_fit_into_an_eighth_of_an_object() {
        let owners =
            |pool: u64| (0..1_000u64).map(move |owner| (u64::MAX - owner, u64::MAX - owner * 64 - pool)).collect();
        let all: Attained = (0..64).map(|pool| (format!("pool-{pool:02}"), owners(pool))).collect();
        let mut ledger = Ledger::new("a".to_owned());
        for gateway in 0..GATEWAYS_MAX {
            let attained = bounded(&all, GATEWAYS_MAX);
            assert!(attained["pool-00"].contains_key(&u64::MAX), "the largest");
            ledger.gateways.insert(format!("g{gateway}"), Entry { attained, ..Entry::default() });
        }
        let bytes = ledger.to_bytes();
        assert!(bytes.len() < BYTES_MAX / 4, "{}", bytes.len());
        assert_eq!(Ledger::parse(&bytes).unwrap(), ledger);
        assert_eq!(bounded(&all, 1).values().map(BTreeMap::len).sum::<usize>() / 1_000, 2);
    }
}
