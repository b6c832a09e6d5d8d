//! Whose beat stands still.
//!
//! A gateway may use its share for its lease, counted from when it sent its renewal. Another sees the renewal later than it was
//! sent; so when it has seen the same beat for the lease, times [`DRIFT`] for clocks that run at different speeds, the owner's
//! lease is over. [`TRANSIT`] is for requests that were admitted in time and are still on their way to the engine.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ledger::{Entry, Ledger};

/// Two clocks that are wrong by a tenth in opposite directions differ by 11 / 9; this is more.
pub(crate) const DRIFT: (u32, u32) = (5, 4);
/// The longest time from a request's admission until its engine counts it.
pub(crate) const TRANSIT: Duration = Duration::from_secs(1);

/// A gateway sees the end of a request so long after its engine, at most, apart from requests that wait for their client.
/// Pauses of its process are included, up to [`PAUSE`].
pub const END_AGE: Duration = Duration::from_millis(500);
/// A process that did not run for longer may see ends later than [`END_AGE`].
pub const PAUSE: Duration = Duration::from_millis(200);
/// A sequence counts as known to be at its engine so long after its first token was seen. It is more than [`END_AGE`] and
/// [`PAUSE`], on clocks that differ: a sequence that begins must not hide one whose end is not seen yet.
pub const SURE_AGE: Duration = Duration::from_millis(800);

/// For how long the beat of an entry must stand still until its lease is over for sure.
pub(crate) fn still_after(lease: Duration) -> Duration {
    lease * DRIFT.0 / DRIFT.1 + TRANSIT
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    beat: u64,
    since: Duration,
    /// It was seen to change.
    moved: bool,
}

/// The beats of all entries, as one member sees them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Silence {
    /// The object that they are of.
    begun: String,
    seen: BTreeMap<String, Seen>,
}

impl Silence {
    /// Notes the beats of a ledger that was read. Returns whether it is another object than the one before.
    pub(crate) fn observe(&mut self, now: Duration, ledger: &Ledger) -> bool {
        let is_other = self.begun != ledger.begun;
        if is_other {
            *self = Self { begun: ledger.begun.clone(), ..Self::default() };
        }
        self.seen.retain(|id, _| ledger.gateways.contains_key(id));
        for (id, entry) in &ledger.gateways {
            let seen = self.seen.entry(id.clone()).or_insert(Seen { beat: entry.beat, since: now, moved: false });
            if seen.beat != entry.beat {
                *seen = Seen { beat: entry.beat, since: now, moved: true };
            }
        }
        is_other
    }

    /// For how long the beat of an entry has stood still.
    pub(crate) fn of(&self, now: Duration, id: &str) -> Duration {
        self.seen.get(id).map_or(Duration::ZERO, |seen| now.saturating_sub(seen.since))
    }

    /// Whether the lease of an entry is over for sure.
    pub(crate) fn is_over(&self, now: Duration, id: &str, entry: &Entry) -> bool {
        self.of(now, id) > still_after(Duration::from_millis(entry.lease_ms))
    }

    /// Whether its beat was seen to change: a process renews it.
    pub(crate) fn is_renewed(&self, id: &str) -> bool {
        self.seen.get(id).is_some_and(|seen| seen.moved)
    }
}
