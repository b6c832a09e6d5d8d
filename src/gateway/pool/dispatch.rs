//! Which waiter gets the room of a backend, and how many requests may overtake a waiter.
//!
//! The *candidates* of a backend are, in order: waiters at their *overtaking limit*, by entry; the
//! queue of the backend's pool, in the configured order; the queues of pools that spill into it. In
//! a fair pool this is the order within one owner; `owners.rs` picks the owner. An owner with a
//! waiter at the limit is served as if it had the best priority, so priorities starve no owner.
//!
//! Request `r` *overtakes* `w` when `r` entered later and is granted room in which `w` would have
//! fit. With `Q` the length and `T` the timeout of the queue of `w`, in every order:
//!
//! ```text
//!   overtakers(w) <= Q, and each of them arrived less than T / 4 after w
//! ```
//!
//! Grants to other owners of a fair pool do not count. A waiter that does not fit delays no others;
//! `reservation.rs` finds room for it. Bounds: one dispatch looks at [`SCAN_MAX`] waiters, and at
//! [`SCAN_OWNER`] of one owner if several wait.

use smallvec::{SmallVec, smallvec};

use super::bounds::Bound;
use super::capacity::Fit;
use super::grant::WaitResult;
use super::owners::{Cursor, Turn};
use super::queue::{Lane, OwnerIndex, Skip, WaiterId};
use super::state::{AdmissionState, Wakers};
use sluice_core::base::{BackendId, PoolId};

/// Waiters that one dispatch looks at: bounds the time under the lock.
const SCAN_MAX: usize = 1_024;
/// Waiters of one owner that a dispatch looks at while other owners wait, so that an owner whose
/// requests do not fit does not use up the dispatch.
const SCAN_OWNER: usize = 128;

/// One queue whose waiters are candidates of a backend.
struct Source {
    pool: PoolId,
    /// Lanes that are left out, because no permit is free.
    skip: Skip,
    /// The owner that was looked at last. The owners before it have no more waiters that could fit.
    turn: Option<Turn>,
}

/// The candidates of a backend that were not looked at yet.
struct Candidates {
    sources: SmallVec<[Source; 4]>,
    /// The number of this dispatch; cursors with another number are ignored.
    look: u64,
}

struct Next {
    id: WaiterId,
    owner: OwnerIndex,
    cursor: Cursor,
    /// The serial of a candidate that has reached the overtaking limit.
    at_limit: Option<u64>,
}

enum Offer {
    /// The waiter got the room. The field is the backend that was reserved for it.
    Granted(Option<BackendId>),
    /// There is not enough room.
    Blocked,
    NoPermit,
    /// There is room, but the owner's prefill share here is used up.
    Held,
    /// The waiter may not use the backend, or the backend is reserved for another waiter.
    Passed,
}

impl AdmissionState {
    /// Like [`Self::dispatch`], after the facts or limits of `backend` have changed: also sheds
    /// pinned requests that no backend can serve any more.
    pub(super) fn reconsider(&mut self, backend: BackendId, wakers: &mut Wakers) {
        if let Some(pool) = self.backend(backend).filter(|found| found.in_rotation()).map(|found| found.pool) {
            self.shed_pinned(pool, wakers);
        }
        self.dispatch(backend, wakers);
    }

    /// Sets one bound of a backend, and grants the room that it leaves. An unknown backend is
    /// ignored.
    pub(super) fn set_bound(&mut self, backend: BackendId, bound: Bound, wakers: &mut Wakers) {
        let Some(mut bounds) = self.backend(backend).map(|found| found.bounds) else { return };
        let before = bounds;
        bounds.set(bound);
        if bounds != before
            && let Some(found) = self.backend_mut(backend)
        {
            found.set_bound(bound);
            self.reconsider(backend, wakers);
        }
    }

    /// Grants the room of `backend`, and of backends whose reservations end, to waiters. If
    /// `backend` has left the rotation, cuts the copies there and sheds requests that are pinned to
    /// it.
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
            if freed.is_empty() {
                freed.extend(self.loosened_beside(backend));
            }
        }
    }

    /// The members of the backend's pool, if waiters that were held because of their owner's share
    /// may have room now.
    fn loosened_beside(&mut self, backend: BackendId) -> SmallVec<[BackendId; 2]> {
        let Some(pool) = self.backend(backend).map(|found| found.pool) else { return SmallVec::new() };
        match self.pools[pool.index()].queue.take_loosened() {
            true => self.members(pool).iter().copied().collect(),
            false => SmallVec::new(),
        }
    }

    /// Serves the candidates of one backend. Returns the first candidate that does not fit.
    fn serve(
        &mut self,
        backend: BackendId,
        freed: &mut SmallVec<[BackendId; 2]>,
        wakers: &mut Wakers,
    ) -> Option<WaiterId> {
        let mut candidates = self.candidates_of(backend)?;
        let mut blocked = None;
        for _ in 0..SCAN_MAX {
            let Some((source, owner, id)) = self.next_candidate(&mut candidates) else { break };
            match self.offer(backend, id, wakers) {
                Offer::Granted(reserved) => {
                    freed.extend(reserved);
                    if self.backend(backend).is_none_or(|found| found.is_full()) {
                        break;
                    }
                }
                Offer::Blocked => blocked = blocked.or(Some(id)),
                Offer::NoPermit if self.is_lane_without_permit(id, backend) => {
                    candidates.sources[source].skip.add(Lane::Long);
                }
                Offer::Held => self.skip_held(candidates.sources[source].pool, owner, backend, candidates.look),
                Offer::NoPermit | Offer::Passed => {}
            }
        }
        blocked
    }

    /// An owner's prefill share on a backend is used up: skips the owner's large prompts, if the
    /// share bars them.
    fn skip_held(&mut self, home: PoolId, owner: OwnerIndex, backend: BackendId, look: u64) {
        let pool = &mut self.pools[home.index()];
        pool.queue.hold();
        if pool.queue.allowance(owner, backend, pool.members.len()).bars_large() {
            let mut cursor = pool.queue.cursor(owner, look);
            cursor.skip.add(Lane::Large);
            pool.queue.set_cursor(owner, cursor);
        }
    }

    /// The waiters that may get the backend's room; `None` if it has none.
    fn candidates_of(&mut self, backend: BackendId) -> Option<Candidates> {
        let home = self.backend(backend).filter(|found| !found.is_full())?.pool;
        let feeders = self.pools.get(home.index())?.fed_by.iter().copied();
        let sources =
            std::iter::once(home).chain(feeders).map(|pool| Source { pool, skip: Skip::default(), turn: None });
        let sources: SmallVec<[Source; 4]> = sources.collect();
        sources.iter().for_each(|source| self.promote_late(source.pool));
        self.looks += 1;
        Some(Candidates { sources, look: self.looks })
    }

    /// Owners with a waiter at the overtaking limit no longer wait behind owners of a better
    /// priority.
    fn promote_late(&mut self, pool: PoolId) {
        let queue = &self.pools[pool.index()].queue;
        let is_late = |owner: &OwnerIndex| {
            let oldest = queue.queue(*owner).entered_after(0, Skip::default());
            oldest.is_some_and(|(_, id)| self.has_reached_overtaking_limit(id))
        };
        let late: SmallVec<[OwnerIndex; 4]> = queue.behind().take(SCAN_MAX).filter(is_late).collect();
        late.into_iter().for_each(|owner| self.pools[pool.index()].queue.promote(owner));
    }

    /// The next candidate, with source and owner: the earliest waiter at the overtaking limit,
    /// otherwise the next waiter of the first source that has one.
    fn next_candidate(&mut self, candidates: &mut Candidates) -> Option<(usize, OwnerIndex, WaiterId)> {
        let mut best: Option<(usize, Next)> = None;
        for (index, source) in candidates.sources.iter_mut().enumerate() {
            let Some(next) = self.next_of(source, candidates.look) else { continue };
            let is_earlier = |known: &Next| match (next.at_limit, known.at_limit) {
                (Some(serial), Some(known)) => serial < known,
                (serial, _) => serial.is_some(),
            };
            if best.as_ref().is_none_or(|(_, known)| is_earlier(known)) {
                best = Some((index, next));
            }
        }
        let (index, next) = best?;
        self.pools[candidates.sources[index].pool.index()].queue.set_cursor(next.owner, next.cursor);
        Some((index, next.owner, next.id))
    }

    /// The next candidate of one source, from the owner whose turn it is.
    fn next_of(&self, source: &mut Source, look: u64) -> Option<Next> {
        let queue = &self.pools[source.pool.index()].queue;
        let mut turn = queue.turn(source.turn)?;
        loop {
            source.turn = Some(turn);
            let (owner, cursor) = (turn.owner, queue.cursor(turn.owner, look));
            if cursor.looked >= SCAN_OWNER && queue.is_contended() {
                turn = queue.turn_after(turn)?;
                continue;
            }
            let (waiters, skip) = (queue.queue(owner), cursor.skip.or(source.skip));
            if let Some((serial, id)) = waiters.entered_after(cursor.at_limit, skip)
                && self.has_reached_overtaking_limit(id)
            {
                return Some(Next { id, owner, cursor: cursor.at_limit(serial), at_limit: Some(serial) });
            }
            if let Some((key, id)) = waiters.next_after(cursor.after, skip) {
                return Some(Next { id, owner, cursor: cursor.after(key), at_limit: None });
            }
            turn = queue.turn_after(turn)?;
        }
    }

    /// Whether no later request may overtake this waiter any more. The time of the latest arrival
    /// serves as the clock. A reload that moves the waiter to another queue restarts the count.
    pub(super) fn has_reached_overtaking_limit(&self, id: WaiterId) -> bool {
        let Some(waiter) = self.waiters[id as usize].as_ref() else { return false };
        let pool = &self.pools[waiter.request.home.index()];
        let overtaken = pool.queue.grants(waiter.request.owner()).saturating_sub(waiter.grants_before);
        overtaken >= pool.rules.overtakers_max() || self.latest >= waiter.not_overtaken_after
    }

    fn offer(&mut self, backend: BackendId, id: WaiterId, wakers: &mut Wakers) -> Offer {
        let Some(waiter) = self.waiters[id as usize].as_ref() else { return Offer::Passed };
        if !self.allows(&waiter.request, backend) || self.is_kept_from(backend, waiter) {
            return Offer::Passed;
        }
        match self.backend(backend).map(|found| found.fit(&waiter.request.need)) {
            Some(Fit::Room) if self.is_held(&waiter.request, backend) => Offer::Held,
            Some(Fit::Room) => Offer::Granted(self.grant_to_waiter(backend, id, wakers)),
            Some(Fit::NoPermit) => Offer::NoPermit,
            Some(Fit::Full) => Offer::Blocked,
            None => Offer::Passed,
        }
    }

    /// Grants the room and takes the waiter out of the queue. Returns the backend that was reserved
    /// for it.
    fn grant_to_waiter(&mut self, backend: BackendId, id: WaiterId, wakers: &mut Wakers) -> Option<BackendId> {
        let pool = self.backend(backend)?.pool;
        let mut waiter = self.waiters[id as usize].take()?;
        let (allocation, ahead) = self.take(backend, &waiter.request)?;
        let (home, owner) = (waiter.request.home, waiter.request.owner());
        self.pools[home.index()].queue.remove(owner, waiter.lane, &waiter.key);
        self.pinned -= usize::from(waiter.request.pinned);
        let reserved = self.drop_reservation(&waiter);
        wakers.extend(waiter.waker.take());
        waiter.outcome = Some(WaitResult::Granted((backend, allocation, ahead)));
        self.waiters[id as usize] = Some(waiter);
        self.count_grant(pool, home, owner);
        reserved
    }

    /// Counts a grant on a backend of `pool` for every queue whose waiters may use it. In the queue
    /// of `home`, the grant counts only for waiters of the same owner: between owners, engine time
    /// decides whose turn it is.
    fn count_grant(&mut self, pool: PoolId, home: PoolId, owner: OwnerIndex) {
        for index in 0..=self.pools[pool.index()].fed_by.len() {
            let counting = index.checked_sub(1).map_or(pool, |feeder| self.pools[pool.index()].fed_by[feeder]);
            let queue = &mut self.pools[counting.index()].queue;
            if counting == home { queue.count_grant(owner) } else { queue.count_grant_of_others() }
        }
    }

    /// Whether a waiter that lacks a permit on `backend` is in a lane in which every waiter needs a
    /// permit there.
    fn is_lane_without_permit(&self, id: WaiterId, backend: BackendId) -> bool {
        let Some(waiter) = self.waiters[id as usize].as_ref().filter(|waiter| waiter.lane == Lane::Long) else {
            return false;
        };
        let here = self.backend(backend).and_then(|b| b.bounds.in_force().long_prefix).map(|long| long.threshold);
        let home = self.pools[waiter.request.home.index()].rules.limits.long_prefix.map(|long| long.threshold);
        matches!((here, home), (Some(here), Some(home)) if here <= home)
    }
}
