//! Which waiter gets the room of a backend: the line, and how many may overtake a request in it.
//!
//! The line of a backend: first the waiters that are *due*, in the order in which they entered, then the queue of its
//! pool in its configured order, then the queues of the pools that spill into it. A waiter is due when it has been
//! overtaken often or long enough.
//!
//! A request `w` is *overtaken* by `r` when `r` entered after it and is granted room in which `w` would have fit. With
//! `Q` the length and `T` the timeout of w's queue, for every order, priority and length, and beside reservations:
//!
//! ```text
//!   overtakers(w) <= Q, and each of them arrived less than T / 4 after w
//! ```
//!
//! because all grants on the backends of w's pools count towards `Q`, a due waiter is before all that entered after it,
//! and the latest arrival is the clock. The count begins again when a reload moves `w` to another queue.
//!
//! A waiter for which there is no room here is passed and holds up no others: either it lacks only a permit, which others
//! do not take from it, or it is wide, and a backend is reserved for it (`reservation.rs`).
//!
//! Bounds: one dispatch looks at [`SCAN_MAX`] waiters.

use smallvec::{SmallVec, smallvec};

use super::capacity::Fit;
use super::queue::{Lane, QueuePosition, WaiterId};
use super::state::{AdmissionState, WaiterState, Wakers};
use sluice_core::base::{BackendId, PoolId};

/// Waiters that one dispatch looks at: bounds the time under the lock where many do not fit.
const SCAN_MAX: usize = 1_024;

/// One queue in the line of a backend.
struct Source {
    pool: PoolId,
    /// Its long lane is left out: there is no permit.
    skip_long: bool,
    /// The serial of its last due waiter that was looked at. One for each queue: a waiter of one may become due after a
    /// later one of another.
    due: u64,
}

/// A place in the line of a backend.
struct Line {
    /// The backend's own pool and those that spill into it.
    sources: SmallVec<[Source; 4]>,
    /// The source of the last other waiter, and its position there.
    source: usize,
    after: Option<QueuePosition>,
}

/// What became of a waiter that was offered the room of a backend.
enum Offer {
    /// It has room now; the second backend was reserved for it.
    Granted(Option<BackendId>),
    /// There is not enough room.
    Blocked,
    /// There is no permit.
    NoPermit,
    /// The backend is not for this waiter.
    Passed,
}

impl AdmissionState {
    /// Grants the room of `backend` to the requests that wait for it, and of those that were reserved for them.
    pub(super) fn dispatch(&mut self, backend: BackendId, wakers: &mut Wakers) {
        let mut freed: SmallVec<[BackendId; 2]> = smallvec![backend];
        while let Some(backend) = freed.pop() {
            if let Some(blocked) = self.serve(backend, &mut freed, wakers) {
                self.reserve(blocked);
            }
        }
    }

    /// Serves the line of one backend; the first waiter that does not fit.
    fn serve(
        &mut self,
        backend: BackendId,
        freed: &mut SmallVec<[BackendId; 2]>,
        wakers: &mut Wakers,
    ) -> Option<WaiterId> {
        let mut line = self.line_of(backend)?;
        let mut blocked = None;
        for _ in 0..SCAN_MAX {
            let Some((source, id)) = self.next_in_line(&mut line) else { break };
            match self.offer(backend, id, wakers) {
                Offer::Granted(reserved) => {
                    freed.extend(reserved);
                    if self.backend(backend).is_none_or(|found| found.is_full()) {
                        break;
                    }
                }
                Offer::Blocked => blocked = blocked.or(Some(id)),
                Offer::NoPermit => line.sources[source].skip_long |= self.is_lane_without_permit(id, backend),
                Offer::Passed => {}
            }
        }
        blocked
    }

    /// The line of a backend that has room.
    fn line_of(&self, backend: BackendId) -> Option<Line> {
        let home = self.backend(backend).filter(|found| !found.is_full())?.pool;
        let feeders = self.pools.get(home.index())?.fed_by.iter().copied();
        let sources = std::iter::once(home).chain(feeders).map(|pool| Source { pool, skip_long: false, due: 0 });
        Some(Line { sources: sources.collect(), source: 0, after: None })
    }

    /// The next waiter and the position of its queue among the sources.
    fn next_in_line(&self, line: &mut Line) -> Option<(usize, WaiterId)> {
        let first = |(index, source): (usize, &Source)| {
            let (serial, id) = self.pools[source.pool.index()].queue.entered_after(source.due, source.skip_long)?;
            self.is_due(id).then_some((serial, index, id))
        };
        if let Some((serial, index, id)) = line.sources.iter().enumerate().filter_map(first).min() {
            line.sources[index].due = serial;
            return Some((index, id));
        }
        while let Some(Source { pool, skip_long, .. }) = line.sources.get(line.source) {
            if let Some((key, id)) = self.pools[pool.index()].queue.next_after(line.after, *skip_long) {
                line.after = Some(key);
                return Some((line.source, id));
            }
            (line.source, line.after) = (line.source + 1, None);
        }
        None
    }

    /// Whether a waiter has been overtaken often or long enough.
    pub(super) fn is_due(&self, id: WaiterId) -> bool {
        let Some(waiter) = self.waiters[id as usize].as_ref() else { return false };
        let pool = &self.pools[waiter.request.home.index()];
        let overtaken = pool.queue.grants().saturating_sub(waiter.grants_before);
        overtaken >= pool.rules.overtakers_max() || self.latest >= waiter.due_at
    }

    fn offer(&mut self, backend: BackendId, id: WaiterId, wakers: &mut Wakers) -> Offer {
        let Some(waiter) = self.waiters[id as usize].as_ref() else { return Offer::Passed };
        if !self.allows(&waiter.request, backend) || self.is_kept_from(backend, waiter.key.serial()) {
            return Offer::Passed;
        }
        match self.backend(backend).map(|found| found.fit(&waiter.request.need)) {
            Some(Fit::Room) => Offer::Granted(self.grant_to_waiter(backend, id, wakers)),
            Some(Fit::NoPermit) => Offer::NoPermit,
            Some(Fit::Full) => Offer::Blocked,
            None => Offer::Passed,
        }
    }

    /// Takes the waiter out of its queue; the backend that was reserved for it.
    fn grant_to_waiter(&mut self, backend: BackendId, id: WaiterId, wakers: &mut Wakers) -> Option<BackendId> {
        let pool = self.backend(backend)?.pool;
        let mut waiter = self.waiters[id as usize].take()?;
        let (held, ahead) = self.take(backend, &waiter.request)?;
        self.pools[waiter.request.home.index()].queue.remove(waiter.lane, &waiter.key);
        let reserved = self.drop_reservation(&waiter);
        wakers.extend(waiter.waker.take());
        waiter.state = WaiterState::Granted(backend, held, ahead);
        self.waiters[id as usize] = Some(waiter);
        self.count_grant(pool);
        reserved
    }

    /// Counts a grant on a backend of `pool` for every queue whose waiters may use it.
    fn count_grant(&mut self, pool: PoolId) {
        self.pools[pool.index()].queue.count_grant();
        for index in 0..self.pools[pool.index()].fed_by.len() {
            let feeder = self.pools[pool.index()].fed_by[index];
            self.pools[feeder.index()].queue.count_grant();
        }
    }

    /// Whether a waiter that lacks a permit on `backend` is in a lane whose every waiter needs one there too.
    fn is_lane_without_permit(&self, id: WaiterId, backend: BackendId) -> bool {
        let Some(waiter) = self.waiters[id as usize].as_ref().filter(|waiter| waiter.lane == Lane::Long) else {
            return false;
        };
        let here = self.backend(backend).and_then(|b| b.limits.long_prefix).map(|long| long.threshold);
        let home = self.pools[waiter.request.home.index()].rules.limits.long_prefix.map(|long| long.threshold);
        matches!((here, home), (Some(here), Some(home)) if here <= home)
    }
}
