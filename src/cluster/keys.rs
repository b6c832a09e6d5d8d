//! Divides the limits of API keys among gateways, by stated demand.
//!
//! Once a renewal with a gateway's claims is written, the gateway uses its part of the
//! [division](crate::division), less the amounts that other gateways use above their parts. One
//! part may grow before another has shrunk. So while demand moves, the gateways may for one renewal
//! begin more than the limit, at most the sum of the parts before and after. The excess counts
//! until the requests end. After the lease of a silent gateway, the others no longer count the
//! gateway's requests. In mode `keep` that gateway goes on using the last part.
//!
//! Bounds: all claims take a quarter of an object. Claims with the smallest demand are left out
//! first, and count as no demand.

use std::collections::BTreeMap;

use crate::division::{Claim, divide};
use crate::key_claim::{KeyClaim, UNITS};
use crate::ledger::{BYTES_MAX, Entry, Ledger, is_gateway};

/// Writes by each gateway for which the order of gateways for a scarce unit stays the same.
const TURN: u64 = 4;

/// The largest claims that fit into the part of one of `gateways` gateways.
pub(crate) fn bounded(claims: &BTreeMap<String, KeyClaim>, gateways: usize) -> BTreeMap<String, KeyClaim> {
    let mut left = BYTES_MAX / 4 / gateways.max(1);
    let mut by_demand: Vec<(&String, &KeyClaim)> = claims.iter().collect();
    by_demand.sort_by_key(|(_, claim)| std::cmp::Reverse(claim.wanted));
    let fits = |(name, _): &(&String, &KeyClaim)| {
        let bytes = KeyClaim::bytes(name);
        let fits = bytes <= left;
        left = left.saturating_sub(bytes);
        fits
    };
    by_demand.into_iter().take_while(fits).map(|(name, claim)| (name.clone(), *claim)).collect()
}

/// A gateway's part of each limit of a key; `u64::MAX` for a unit without a limit.
pub fn parts(ledger: &Ledger, id: &str, key: &str, limits: &[Option<u64>; UNITS]) -> [u64; UNITS] {
    let gateways: Vec<_> = ledger.gateways.iter().filter(|(id, _)| is_gateway(id)).collect();
    let Some(own) = gateways.iter().position(|(other, _)| *other == id) else { return [0; UNITS] };
    let count = gateways.len() as u64;
    let turn = ledger.writes / (TURN * count);
    std::array::from_fn(|unit| {
        let Some(limit) = limits[unit] else { return u64::MAX };
        let claim = |(place, (_, entry)): (u64, &(&String, &Entry))| {
            let claim = entry.keys.get(key).copied().unwrap_or_default();
            Claim { wanted: claim.wanted[unit], need: claim.largest[unit], since: (place + turn) % count }
        };
        let claims: Vec<Claim> = (0..).zip(&gateways).map(claim).collect();
        let parts = divide(limit, &claims);
        let above = |(place, (_, entry)): (usize, &(&String, &Entry))| {
            let used = entry.keys.get(key).map_or(0, |claim| claim.used[unit]);
            if place == own { 0 } else { used.saturating_sub(parts[place]) }
        };
        parts[own].saturating_sub(gateways.iter().enumerate().map(above).sum())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::EARLIER;

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
    fn claims_take_a_quarter_of_an_object_at_most() {
        let claim = |key: u64| {
            let claim = KeyClaim { wanted: [key; UNITS], largest: [1; UNITS], used: [key; UNITS] };
            (format!("key-{key:05}"), claim)
        };
        let all: BTreeMap<_, _> = (0..10_000).map(claim).collect();
        let mut ledger = ledger(&[]);
        for gateway in 0..8 {
            let entry = Entry { keys: bounded(&all, 8), ..Entry::default() };
            assert!(entry.keys.contains_key("key-09999") && !entry.keys.contains_key("key-00000"));
            ledger.gateways.insert(format!("g{gateway}"), entry);
        }
        assert!(ledger.to_bytes().len() < BYTES_MAX / 2, "{}", ledger.to_bytes().len());
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
