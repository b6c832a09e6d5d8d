//! Which waiter gets the room of a backend, and how many requests may overtake a waiter.
//!
//! The *candidates* of a backend are its waiters in the order in which they are served: first those that have reached their
//! *overtaking limit*, in the order in which they entered; then the queue of the backend's pool in its configured order;
//! then the queues of the pools that spill into it.
//!
//! A request `w` is *overtaken* by `r` when `r` entered after it and is granted room in which `w` would have fit. With
//! `Q` the length and `T` the timeout of w's queue, for every order, priority and length, and beside reservations:
//!
//! ```text
//!   overtakers(w) <= Q, and each of them arrived less than T / 4 after w
//! ```
//!
//! `Q` and `T / 4` are the overtaking limit. It holds because all grants on the backends of w's pools count towards `Q`, a
//! waiter at the limit is served before all that entered after it, and the latest arrival is the clock. The count begins
//! again when a reload moves `w` to another queue.
//!
//! A waiter for which there is no room here is skipped and delays no others: either it lacks only a permit, which others
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

/// One queue whose waiters are candidates of a backend.
struct Source {
    pool: PoolId,
    /// Its long lane is left out: there is no permit.
    skip_long: bool,
    /// The serial of its last waiter at the overtaking limit that was looked at. One for each queue: a waiter of one queue
    /// may reach the limit after a later one of another.
    last_at_limit: u64,
}

/// The candidates of a backend, and how many of them have been looked at.
struct Candidates {
    /// The backend's own pool and those that spill into it.
    sources: SmallVec<[Source; 4]>,
    /// The source of the last candidate below the limit, and its position there.
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
    /// This waiter may not use the backend, or it is reserved for an earlier one.
    Passed,
}

impl AdmissionState {
    /// What `backend` may serve has changed: the same as [`Self::dispatch`], for requests that are pinned to it, too.
    pub(super) fn reconsider(&mut self, backend: BackendId, wakers: &mut Wakers) {
        if let Some(pool) = self.backend(backend).filter(|found| found.in_rotation()).map(|found| found.pool) {
            self.shed_pinned(pool, wakers);
        }
        self.dispatch(backend, wakers);
    }

    /// Grants the room of `backend` to the requests that wait for it, and of those that were reserved for them. Cuts the copies
    /// on a backend that has left the rotation, and sheds the requests that are pinned to it.
    pub(super) fn dispatch(&mut self, backend: BackendId, wakers: &mut Wakers) {
        if let Some(pool) = self.backend(backend).filter(|found| !found.in_rotation()).map(|found| found.pool) {
            self.cut_copies_on(backend);
            self.shed_pinned(pool, wakers);
        }
        if self.backend(backend).is_none_or(|found| self.has_no_waiters(found.pool)) {
            return;
        }
        let mut freed: SmallVec<[BackendId; 2]> = smallvec![backend];
        while let Some(backend) = freed.pop() {
            if let Some(blocked) = self.serve(backend, &mut freed, wakers) {
                self.reserve(blocked);
            }
        }
    }

    /// Serves the candidates of one backend. Returns the first that does not fit.
    fn serve(
        &mut self,
        backend: BackendId,
        freed: &mut SmallVec<[BackendId; 2]>,
        wakers: &mut Wakers,
    ) -> Option<WaiterId> {
        let mut candidates = self.candidates_of(backend)?;
        let mut blocked = None;
        for _ in 0..SCAN_MAX {
            let Some((source, id)) = self.next_candidate(&mut candidates) else { break };
            match self.offer(backend, id, wakers) {
                Offer::Granted(reserved) => {
                    freed.extend(reserved);
                    if self.backend(backend).is_none_or(|found| found.is_full()) {
                        break;
                    }
                }
                Offer::Blocked => blocked = blocked.or(Some(id)),
                Offer::NoPermit => candidates.sources[source].skip_long |= self.is_lane_without_permit(id, backend),
                Offer::Passed => {}
            }
        }
        blocked
    }

    /// The candidates of a backend; `None` if it has no room.
    fn candidates_of(&self, backend: BackendId) -> Option<Candidates> {
        let home = self.backend(backend).filter(|found| !found.is_full())?.pool;
        let feeders = self.pools.get(home.index())?.fed_by.iter().copied();
        let sources =
            std::iter::once(home).chain(feeders).map(|pool| Source { pool, skip_long: false, last_at_limit: 0 });
        Some(Candidates { sources: sources.collect(), source: 0, after: None })
    }

    /// The next candidate, with the position of its queue among the sources.
    fn next_candidate(&self, candidates: &mut Candidates) -> Option<(usize, WaiterId)> {
        let first = |(index, source): (usize, &Source)| {
            let (serial, id) =
                self.pools[source.pool.index()].queue.entered_after(source.last_at_limit, source.skip_long)?;
            self.has_reached_overtaking_limit(id).then_some((serial, index, id))
        };
        if let Some((serial, index, id)) = candidates.sources.iter().enumerate().filter_map(first).min() {
            candidates.sources[index].last_at_limit = serial;
            return Some((index, id));
        }
        while let Some(Source { pool, skip_long, .. }) = candidates.sources.get(candidates.source) {
            if let Some((key, id)) = self.pools[pool.index()].queue.next_after(candidates.after, *skip_long) {
                candidates.after = Some(key);
                return Some((candidates.source, id));
            }
            (candidates.source, candidates.after) = (candidates.source + 1, None);
        }
        None
    }

    /// Whether no request that entered later may overtake this waiter any more.
    pub(super) fn has_reached_overtaking_limit(&self, id: WaiterId) -> bool {
        let Some(waiter) = self.waiters[id as usize].as_ref() else { return false };
        let pool = &self.pools[waiter.request.home.index()];
        let overtaken = pool.queue.grants().saturating_sub(waiter.grants_before);
        overtaken >= pool.rules.overtakers_max() || self.latest >= waiter.not_overtaken_after
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

    /// Takes the waiter out of its queue. Returns the backend that was reserved for it.
    fn grant_to_waiter(&mut self, backend: BackendId, id: WaiterId, wakers: &mut Wakers) -> Option<BackendId> {
        let pool = self.backend(backend)?.pool;
        let mut waiter = self.waiters[id as usize].take()?;
        let (allocation, ahead) = self.take(backend, &waiter.request)?;
        self.pools[waiter.request.home.index()].queue.remove(waiter.lane, &waiter.key);
        self.pinned -= usize::from(waiter.request.pinned);
        let reserved = self.drop_reservation(&waiter);
        wakers.extend(waiter.waker.take());
        waiter.state = WaiterState::Granted(backend, allocation, ahead);
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
