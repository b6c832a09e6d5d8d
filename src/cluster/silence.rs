//! Finds gateways that no longer renew: their beats stand still.
//!
//! A gateway may use a share for the lease, counted from when it sent the renewal; others see the
//! renewal later. The lease is over for sure when another gateway has seen the same beat for the
//! lease times [`DRIFT`] (clocks differ in speed), plus [`TRANSIT`] (requests admitted in time may
//! be on the way). The gateway with that beat is then *silent*.
//!
//! A time of more than half a lease in which a member read no ledger, such as an outage of the
//! store, does not count. After an outage all gateways return at about the same time, and the first
//! must not take shares that the others are about to renew.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ledger::{Entry, Ledger, is_gateway};

/// Tolerated ratio of the speeds of two clocks. It exceeds 11/9, for a clock a tenth too fast and
/// one a tenth too slow.
pub(crate) const DRIFT: (u32, u32) = (5, 4);
/// Longest time from a request's admission until the engine counts it.
pub(crate) const TRANSIT: Duration = Duration::from_secs(1);

/// Longest time from a request's end at the engine until the gateway sees it, if the process pauses
/// for at most [`PAUSE`], on the fastest clock. The end of a request that waits for its client may
/// be seen later.
pub const END_AGE: Duration = Duration::from_millis(500);
/// After a longer pause, a process may see ends later than [`END_AGE`].
pub const PAUSE: Duration = Duration::from_millis(200);
/// Time after a sequence's first token from which the engine has it for sure. It exceeds
/// [`END_AGE`] even on clocks that differ by [`DRIFT`], because a new sequence must not hide one
/// whose end is not seen yet.
pub const SURE_AGE: Duration = Duration::from_millis(800);

/// Time for which a member must see the same beat until the lease is over for sure.
pub(crate) fn still_after(lease: Duration) -> Duration {
    lease * DRIFT.0 / DRIFT.1 + TRANSIT
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    beat: u64,
    since: Duration,
    moved: bool,
}

/// The beats of all entries, as one member sees them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Silence {
    begun: String,
    seen: BTreeMap<String, Seen>,
    looked: Option<Duration>,
}

impl Silence {
    /// Notes the beats. Returns whether the ledger is another object than at the last call.
    pub(crate) fn observe(&mut self, now: Duration, ledger: &Ledger) -> bool {
        let is_other = self.begun != ledger.begun;
        if is_other {
            *self = Self { begun: ledger.begun.clone(), ..Self::default() };
        }
        let unseen = now.saturating_sub(self.looked.replace(now).unwrap_or(now));
        self.seen.retain(|id, _| ledger.gateways.contains_key(id));
        for (id, entry) in &ledger.gateways {
            match self.seen.get_mut(id) {
                None => {
                    self.seen.insert(id.clone(), Seen { beat: entry.beat, since: now, moved: false });
                }
                Some(seen) if seen.beat != entry.beat => *seen = Seen { beat: entry.beat, since: now, moved: true },
                Some(seen) if is_gateway(id) && unseen > Duration::from_millis(entry.lease_ms) / 2 => {
                    seen.since += unseen;
                }
                Some(_) => {}
            }
        }
        is_other
    }

    pub(crate) fn of(&self, now: Duration, id: &str) -> Duration {
        self.seen.get(id).map_or(Duration::ZERO, |seen| now.saturating_sub(seen.since))
    }

    pub(crate) fn is_over(&self, now: Duration, id: &str, entry: &Entry) -> bool {
        self.of(now, id) > still_after(Duration::from_millis(entry.lease_ms))
    }

    /// Whether a process renews the entry: the beat was seen to change.
    pub(crate) fn is_renewed(&self, id: &str) -> bool {
        self.seen.get(id).is_some_and(|seen| seen.moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_counts_only_when_the_ends_before_its_first_token_are_seen_on_any_clock() {
        assert!(SURE_AGE >= END_AGE * DRIFT.0 / DRIFT.1);
        assert!(END_AGE >= PAUSE * 2, "a pause leaves time to see the ends");
    }

    #[test]
    fn silence_is_counted_while_one_looks_and_not_while_the_store_is_gone() {
        let entry = Entry { beat: 1, lease_ms: 2_000, ..Entry::default() };
        let mut ledger = Ledger::new("a".to_owned());
        ledger.gateways.insert("g#1".to_owned(), entry.clone());
        let ms = Duration::from_millis;
        let over = |silence: &Silence, at| silence.is_over(ms(at), "g#1", &entry);
        let mut silence = Silence::default();
        for look in 0..=7 {
            silence.observe(ms(look * 500), &ledger);
        }
        assert!(!over(&silence, 3_500) && over(&silence, 3_501));
        let mut silence = Silence::default();
        silence.observe(ms(0), &ledger);
        silence.observe(ms(500), &ledger);
        silence.observe(ms(60_500), &ledger);
        assert!(!over(&silence, 60_500 + 3_000) && over(&silence, 60_500 + 3_001), "half a second of it had been seen");
    }
}
