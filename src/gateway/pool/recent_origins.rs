//! How the latest request of each recent origin ended on one backend.
//!
//! Each origin has one vote: the outcome of the latest request. A client that fails a thousand
//! times weighs as much as a client that was served once. Facts of the engine (refused connections,
//! hangs) are not votes.
//!
//! | votes within [`RECENT`] | the failures are caused by |
//! |---|---|
//! | one origin | the engine, as far as can be known |
//! | at least two origins failed, and at least half of all | the engine |
//! | otherwise | the failing clients: the engine serves the others |
//!
//! Bounds: [`ORIGINS_MAX`] origins. A further one replaces the origin whose latest request ended
//! first. Time is a parameter.

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::origin::Origin;

/// Origins that are remembered for each backend.
pub(super) const ORIGINS_MAX: usize = 8;
pub(super) const RECENT: Duration = Duration::from_secs(10);
/// How long an origin counts as a client of the backend: as long as the longest default ejection,
/// because no request ends during an ejection.
pub(super) const PRESENT: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug)]
struct Latest {
    origin: Origin,
    at: Instant,
    failed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Votes {
    /// Origins whose latest request failed.
    pub(super) failing: usize,
    pub(super) all: usize,
}

impl Votes {
    /// Whether the requests of some clients fail while other clients are served.
    pub(super) fn serves_others(self) -> bool {
        self.all > 1 && (self.failing < 2 || self.failing * 2 < self.all)
    }
}

/// The origins of one backend, in no particular order.
#[derive(Clone, Debug, Default)]
pub(super) struct RecentOrigins(SmallVec<[Latest; ORIGINS_MAX]>);

impl RecentOrigins {
    pub(super) fn note(&mut self, origin: Origin, failed: bool, now: Instant) {
        let latest = Latest { origin, at: now, failed };
        if let Some(known) = self.0.iter_mut().find(|known| known.origin == origin) {
            *known = latest;
        } else if self.0.len() < ORIGINS_MAX {
            self.0.push(latest);
        } else if let Some(oldest) = self.0.iter_mut().min_by_key(|known| known.at) {
            *oldest = latest;
        }
    }

    fn since(&self, time: Duration, now: Instant) -> impl Iterator<Item = &Latest> {
        self.0.iter().filter(move |known| now.saturating_duration_since(known.at) <= time)
    }

    pub(super) fn votes(&self, now: Instant) -> Votes {
        let failing = self.since(RECENT, now).filter(|known| known.failed).count();
        Votes { failing, all: self.since(RECENT, now).count() }
    }

    /// Whether the latest request of `origin` failed here.
    pub(super) fn fails(&self, origin: Origin, now: Instant) -> bool {
        self.since(RECENT, now).any(|known| known.origin == origin && known.failed)
    }

    /// Whether the latest request of another origin succeeded here.
    pub(super) fn serves_another(&self, origin: Origin, now: Instant) -> bool {
        self.since(RECENT, now).any(|known| known.origin != origin && !known.failed)
    }

    /// Whether another origin was here within [`PRESENT`].
    pub(super) fn knows_another(&self, origin: Origin, now: Instant) -> bool {
        self.since(PRESENT, now).any(|known| known.origin != origin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(number: usize) -> Origin {
        Origin::of_key(&number.to_string())
    }

    fn after(outcomes: &[(usize, bool)], now: Instant) -> RecentOrigins {
        let mut origins = RecentOrigins::default();
        outcomes.iter().for_each(|(number, failed)| origins.note(origin(*number), *failed, now));
        origins
    }

    #[test]
    fn an_origin_has_one_vote_however_often_it_fails() {
        let now = Instant::now();
        for (outcomes, serves_others) in [
            (vec![(1, true); 100], false),
            ([vec![(1, true); 100], vec![(2, false)]].concat(), true),
            (vec![(1, true), (2, true)], false),
            (vec![(1, true), (2, true), (3, false), (4, false)], false),
            (vec![(1, true), (2, true), (3, false), (4, false), (5, false)], true),
            (vec![(2, true), (1, true), (2, false)], true),
        ] {
            let votes = after(&outcomes, now).votes(now);
            assert_eq!(votes.serves_others(), serves_others, "{outcomes:?}: {votes:?}");
        }
    }

    #[test]
    fn votes_are_bounded_in_number_and_time() {
        let now = Instant::now();
        let mut origins = RecentOrigins::default();
        for number in 0..100 {
            origins.note(origin(number), number % 2 == 0, now + Duration::from_millis(number as u64));
            assert!(origins.0.len() <= ORIGINS_MAX);
        }
        let later = now + Duration::from_millis(99);
        assert_eq!(origins.votes(later), Votes { failing: 4, all: ORIGINS_MAX });
        assert!(origins.fails(origin(98), later) && !origins.fails(origin(0), later));
        assert!(origins.serves_another(origin(98), later));
        let quiet = later + RECENT + Duration::from_millis(1);
        assert_eq!(origins.votes(quiet), Votes::default());
        assert!(origins.knows_another(origin(98), quiet));
        assert!(!origins.knows_another(origin(98), later + PRESENT + Duration::from_millis(1)));
    }
}
