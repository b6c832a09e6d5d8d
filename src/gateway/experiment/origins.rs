//! How many of an arm's failures and missed objectives one client may contribute.
//!
//! A client may choose an arm by the user name that it sends, and may fail on purpose. While there
//! are several origins, the failures of one origin count only if others confirm them. They do if
//! its failure rate is at most [`CONFIRMED`] times the others' rate, or if it has at most one
//! failure more than all others together. So an arm that fails for every client is found, and an
//! arm that fails for a single client has one failure.
//!
//! Bound: [`ORIGINS_MAX`]; above this, a new origin replaces the one with the fewest requests,
//! which then count among the others'.

use super::ledger::{Ending, Observation};
use crate::origin::Origin;

/// Origins of an arm that are counted separately.
const ORIGINS_MAX: usize = 32;
/// An origin's failures count while its failure rate is at most this many times the rate of the
/// other origins.
const CONFIRMED: f64 = 4.0;

/// Ended requests, and the bad ones among them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Tally {
    all: u64,
    bad: u64,
}

impl Tally {
    fn rate(self) -> f64 {
        self.bad as f64 / self.all.max(1) as f64
    }
}

/// The requests of one arm by origin.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OriginShares {
    origins: Vec<(Origin, Tally)>,
    total: Tally,
}

impl OriginShares {
    /// Whether all requests are of this origin.
    pub fn is_only(&self, origin: Origin) -> bool {
        self.of(origin).all == self.total.all
    }

    fn of(&self, origin: Origin) -> Tally {
        self.origins.iter().find(|(known, _)| *known == origin).map_or(Tally::default(), |(_, tally)| *tally)
    }

    /// Counts an ended request. Returns whether it counts when there are several origins.
    pub fn note(&mut self, origin: Origin, bad: bool) -> bool {
        let own = self.of(origin);
        let others = Tally { all: self.total.all - own.all, bad: self.total.bad - own.bad };
        let own = Tally { all: own.all + 1, bad: own.bad + u64::from(bad) };
        let counts = !bad || own.bad <= others.bad + 1 || own.rate() <= CONFIRMED * others.rate();
        self.total = Tally { all: others.all + own.all, bad: others.bad + own.bad };
        match self.origins.iter_mut().find(|(known, _)| *known == origin) {
            Some((_, tally)) => *tally = own,
            None => self.insert(origin, own),
        }
        counts
    }

    fn insert(&mut self, origin: Origin, tally: Tally) {
        if self.origins.len() < ORIGINS_MAX {
            return self.origins.push((origin, tally));
        }
        if let Some(least) = self.origins.iter_mut().min_by_key(|(_, tally)| tally.all) {
            *least = (origin, tally);
        }
    }
}

/// The origins of one arm's requests; not saved, because each process hashes origins with a new
/// key.
#[derive(Debug, Default)]
pub(super) struct ArmOrigins {
    failing: OriginShares,
    missing: OriginShares,
}

impl ArmOrigins {
    /// Counts a finished request of one of `arms`, and blames a failure or miss on the arm only if
    /// other origins, if any, confirm it.
    pub(super) fn blame(arms: &mut [Self], arm: usize, observation: &mut Observation) {
        let says_nothing = observation.ending == Ending::Other && !observation.fell_back;
        if !observation.blamed || says_nothing {
            return;
        }
        let origin = observation.origin;
        let is_only = arms.iter().all(|arm| arm.failing.is_only(origin));
        let Some(own) = arms.get_mut(arm) else { return };
        let failure_counts = own.failing.note(origin, observation.is_failure());
        let miss_counts = observation.missed.is_none_or(|missed| own.missing.note(origin, missed));
        observation.blamed = is_only || (failure_counts && miss_counts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(number: u64) -> Origin {
        Origin::of_key(&number.to_string())
    }

    #[test]
    fn the_failures_of_one_client_count_once_while_others_are_served() {
        let mut shares = OriginShares::default();
        (0..100).for_each(|number| assert!(shares.note(origin(number % 5), false)));
        let counted = (0..1_000).filter(|_| shares.note(origin(9), true)).count();
        assert_eq!(counted, 1);
        assert!(shares.note(origin(1), true), "a second origin saw it");
        assert_eq!((0..1_000).filter(|_| shares.note(origin(9), true)).count(), 0);
    }

    #[test]
    fn failures_that_all_clients_have_count_in_full_however_unequal_the_clients_are() {
        let mut shares = OriginShares::default();
        // One client in twenty; a tenth of all requests fail.
        let counted = (0..10_000u64).filter(|number| {
            let bad = number % 10 == 0;
            shares.note(origin(u64::from(number % 19 == 0)), bad) && bad
        });
        assert!(counted.count() > 950);
    }

    #[test]
    fn origins_are_bounded_and_a_single_one_is_recognised() {
        let mut shares = OriginShares::default();
        assert!(shares.is_only(origin(0)));
        shares.note(origin(0), true);
        assert!(shares.is_only(origin(0)) && !shares.is_only(origin(1)));
        for number in 0..1_000 {
            shares.note(origin(number), number % 2 == 0);
            assert!(shares.origins.len() <= ORIGINS_MAX);
        }
    }
}
