//! Divides a limit among gateways by demand, in whole units (max-min fairness with a floor).
//!
//! - Each gateway gets the amount that it demands, an eighth more, and an even part of the rest. If
//!   the sum exceeds the limit, all get the same amount, except gateways that want less: they get
//!   the amount that they want.
//! - If there is a unit for every gateway, each counts as wanting at least one unit, and at least
//!   an eighth of an even share. So an idle gateway can admit a first request at once.
//! - A gateway whose largest waiting request exceeds this amount gets the size of that request.
//!   Only one gateway gets this at a time: the first in the line.
//! - If there are fewer units than gateways that demand one, the first gateways in the line get one
//!   each.
//!
//! All gateways divide the same ledger alike, so their shares converge without overshooting.

/// One gateway's demand for one unit of one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Amount in use, plus the amount for which requests wait.
    pub wanted: u64,
    /// The size of the largest waiting request.
    pub need: u64,
    /// Place in the line; the smallest number is first.
    pub since: u64,
}

const FLOOR: u64 = 8;
const HEADROOM: u64 = 8;

/// One amount for each claim. The amounts sum to `capacity`, unless there are no claims.
pub fn divide(capacity: u64, claims: &[Claim]) -> Vec<u64> {
    let asking = claims.iter().filter(|claim| claim.wanted > 0).count() as u64;
    if capacity < asking {
        return one_each(capacity, claims);
    }
    let gateways = claims.len() as u64;
    let floor = if capacity >= gateways { (capacity / (FLOOR * gateways.max(1))).max(1) } else { 0 };
    let want = |claim: &Claim| claim.wanted.saturating_add(claim.wanted / HEADROOM).max(floor).min(capacity);
    let wants: Vec<Option<u64>> = claims.iter().map(|claim| Some(want(claim))).collect();
    let even = fill(capacity, &wants);
    let larger = |index: &usize| claims[*index].need.min(capacity) > even[*index];
    let Some(first) = (0..claims.len()).filter(larger).min_by_key(|index| (claims[*index].since, *index)) else {
        return even;
    };
    let own = claims[first].need.min(capacity);
    let others: Vec<Option<u64>> =
        wants.iter().enumerate().map(|(index, want)| want.filter(|_| index != first)).collect();
    let mut divided = fill(capacity - own, &others);
    divided[first] = own;
    divided
}

fn one_each(capacity: u64, claims: &[Claim]) -> Vec<u64> {
    let mut line: Vec<usize> = (0..claims.len()).filter(|index| claims[*index].wanted > 0).collect();
    line.sort_by_key(|index| (claims[*index].since, *index));
    let mut divided = vec![0; claims.len()];
    line.into_iter().take(capacity as usize).for_each(|index| divided[index] = 1);
    divided
}

/// Raises all amounts evenly, each up to the wanted amount, then adds the rest evenly. A claim with
/// `None` gets nothing.
fn fill(capacity: u64, wants: &[Option<u64>]) -> Vec<u64> {
    let mut open: Vec<usize> = (0..wants.len()).filter(|index| wants[*index].is_some()).collect();
    let mut divided = vec![0; wants.len()];
    let mut left = capacity;
    let want = |index: usize| wants[index].unwrap_or(0);
    // Each round settles the claims that want at most an even share of the rest.
    while let Some(level) = left.checked_div(open.len() as u64) {
        let (settled, rest): (Vec<usize>, Vec<usize>) = open.iter().partition(|index| want(**index) <= level);
        if settled.is_empty() {
            evenly(left, &open, &mut divided);
            return divided;
        }
        for index in settled {
            divided[index] = want(index);
            left -= divided[index];
        }
        open = rest;
    }
    let all: Vec<usize> = (0..wants.len()).filter(|index| wants[*index].is_some()).collect();
    evenly(left, &all, &mut divided);
    divided
}

/// Adds even parts of `amount`. If it cannot be divided evenly, the first claims get one more.
fn evenly(amount: u64, to: &[usize], divided: &mut [u64]) {
    let Some(each) = amount.checked_div(to.len() as u64) else { return };
    let more = amount % to.len() as u64;
    for (place, index) in to.iter().enumerate() {
        divided[*index] += each + u64::from((place as u64) < more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wants<const N: usize>(wanted: [u64; N]) -> [Claim; N] {
        wanted.map(|wanted| Claim { wanted, ..Claim::default() })
    }

    #[test]
    fn idle_gateways_share_evenly_and_a_busy_one_gets_what_it_wants() {
        assert_eq!(divide(10, &wants([0, 0, 0])), [4, 3, 3]);
        assert_eq!(divide(64, &wants([0, 100, 0])), [2, 60, 2]);
        assert_eq!(divide(64, &wants([16, 0])), [39, 25], "18 and 4, and half of the rest each");
        assert_eq!(divide(64, &wants([100, 100])), [32, 32]);
        assert_eq!(divide(64, &wants([100, 8])), [55, 9]);
        assert_eq!(divide(0, &wants([1, 0])), [0, 0]);
        assert!(divide(5, &[]).is_empty());
    }

    #[test]
    fn units_are_whole_and_the_first_in_the_line_gets_one() {
        let line = [(1, 30), (0, 0), (5, 10), (1, 20)].map(|(wanted, since)| Claim { wanted, need: wanted, since });
        assert_eq!(divide(1, &line), [0, 0, 1, 0]);
        assert_eq!(divide(2, &line), [0, 0, 1, 1]);
        assert_eq!(divide(0, &line), [0, 0, 0, 0]);
    }

    #[test]
    fn a_request_larger_than_a_share_gets_its_size_one_at_a_time() {
        let claim = |need, since| Claim { wanted: 50, need, since };
        assert_eq!(divide(64, &[claim(60, 9), claim(1, 1), claim(50, 8)]), [7, 7, 50]);
        assert_eq!(divide(64, &[claim(99, 3), claim(1, 1)]), [64, 0], "all of it");
    }

    /// If units are too few, each gateway gets at most one.
    #[test]
    fn a_division_neither_exceeds_the_capacity_nor_leaves_any() {
        let mut rng = sluice_core::base::Rng::new(7);
        for _ in 0..20_000 {
            let capacity = rng.below(200) as u64;
            let claim = |rng: &mut sluice_core::base::Rng| Claim {
                wanted: (rng.below(3) * rng.below(100)) as u64,
                need: (rng.below(2) * rng.below(120)) as u64,
                since: rng.below(5) as u64,
            };
            let claims: Vec<Claim> = (0..1 + rng.below(8)).map(|_| claim(&mut rng)).collect();
            let divided = divide(capacity, &claims);
            let asking = claims.iter().filter(|claim| claim.wanted > 0).count() as u64;
            assert_eq!(divided.iter().sum::<u64>(), capacity, "{claims:?}");
            if capacity < asking {
                assert!(divided.iter().all(|share| *share <= 1));
            }
        }
    }
}
