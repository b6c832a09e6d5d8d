//! Room for wide requests: a backend that is reserved for a waiter which needs more than is free
//! anywhere.
//!
//! A request that does not fit delays no others: they pass it wherever they fit. So that it is
//! still served, the backend on which the least capacity must become free is reserved for it:
//!
//! - From then on, other requests go to other backends as long as these have room.
//! - Once the wide request has reached the *overtaking limit* (`dispatch.rs`), later requests get
//!   no room there until it has slots and tokens. Of different owners in one pool, requests of an
//!   owner that has attained less still go first (`owners.rs`).
//!
//! So at most `overtakers_max` requests pass it, and then it waits for the requests that run there.
//! If another backend has room earlier, the wide request takes that one. Bounds: one reservation
//! per waiter, one reserved backend per pool. A reservation holds no capacity and is judged at each
//! use, so a reload or a change of health need not undo it.

use smallvec::SmallVec;

use super::backend::BackendState;
use super::capacity::{Fit, Need};
use super::queue::WaiterId;
use super::state::{AdmissionState, Reservation, Waiter};
use sluice_core::base::{BackendId, PoolId};

impl AdmissionState {
    /// The reservation of a pool, if it is valid: the waiter still waits, and the backend is in
    /// rotation and could take the waiter.
    pub(super) fn reservation(&self, pool: PoolId) -> Option<Reservation> {
        let reservation = self.pools.get(pool.index())?.reserved?;
        let waiter = self.waiting(reservation.waiter)?;
        let valid = waiter.key.serial() == reservation.serial && self.can_reserve(waiter, pool, reservation.backend);
        valid.then_some(reservation)
    }

    /// Whether `backend` is kept from a waiter, in favour of another waiter that is served first.
    pub(super) fn is_kept_from(&self, backend: BackendId, waiter: &Waiter) -> bool {
        let Some(pool) = self.backend(backend).map(|b| b.pool) else { return false };
        let before = |reservation: &Reservation| {
            reservation.backend == backend
                && reservation.serial != waiter.key.serial()
                && self.waiting(reservation.waiter).is_some_and(|reserved| self.is_served_before(reserved, waiter))
        };
        let Some(reserved) = self.reservation(pool).filter(before) else { return false };
        // A waiter that lacks only a permit keeps no slots idle.
        let lacks_room =
            |waiter: &Waiter| self.backend(backend).is_some_and(|b| b.fit(&waiter.request.need) == Fit::Full);
        self.has_reached_overtaking_limit(reserved.waiter) && self.waiting(reserved.waiter).is_some_and(lacks_room)
    }

    /// Whether a wide waiter is served before another one. Of two waiters of one owner, or of
    /// different pools, the one that entered first goes first. Of two waiters of different owners
    /// of a pool, the one whose owner has attained no more goes first, so that wide requests get no
    /// more than a fair share.
    fn is_served_before(&self, wide: &Waiter, other: &Waiter) -> bool {
        let (one, two) = (&wide.request, &other.request);
        match one.home == two.home && one.owner() != two.owner() {
            true => self.pools[one.home.index()].queue.is_before(one.owner(), two.owner()),
            false => wide.key.serial() < other.key.serial(),
        }
    }

    /// Reserves a backend for a waiter that others pass although it may use a backend with some
    /// room.
    pub(super) fn reserve_if_passed(&mut self, id: WaiterId) {
        let Some(waiter) = self.waiting(id) else { return };
        let pools: SmallVec<[PoolId; 4]> = waiter.request.pools().collect();
        if pools.into_iter().any(|pool| self.is_passed(id, pool)) {
            self.reserve(id);
        }
    }

    /// Whether a backend of this pool that the waiter may use has some room, but not enough.
    fn is_passed(&mut self, id: WaiterId, pool: PoolId) -> bool {
        let open = self.open_positions(pool, 0);
        let Some(waiter) = self.waiting(id) else { return false };
        open.iter().map(|position| self.members(pool)[position]).any(|backend| {
            let short = |found: &BackendState| found.fit(&waiter.request.need) == Fit::Full;
            self.backend(backend).is_some_and(short) && self.allows(&waiter.request, backend)
        })
    }

    /// Reserves the backend on which the least capacity must become free before a waiter fits, in
    /// the first of the waiter's pools that can take it at all. Does nothing if that pool's
    /// reservation belongs to a waiter that is served before this one.
    pub(super) fn reserve(&mut self, id: WaiterId) {
        let Some(waiter) = self.waiting(id) else { return };
        let serial = waiter.key.serial();
        if waiter
            .request
            .pools()
            .any(|pool| self.reservation(pool).is_some_and(|reservation| reservation.serial == serial))
        {
            return;
        }
        let need = &waiter.request.need;
        let able = |pool, backend: &BackendId| self.can_reserve(waiter, pool, *backend);
        let first = waiter.request.pools().find(|pool| self.members(*pool).iter().any(|backend| able(*pool, backend)));
        let is_free = |pool: &PoolId| match self.reservation(*pool).and_then(|other| self.waiting(other.waiter)) {
            None => true,
            // The other waiter's owner has had its share.
            Some(other) => {
                other.request.home == waiter.request.home
                    && other.request.owner() != waiter.request.owner()
                    && !self.is_served_before(other, waiter)
            }
        };
        let best = first.filter(is_free).and_then(|pool| {
            let able = self.members(pool).iter().filter(|backend| able(pool, backend));
            let shortage = |backend: &&BackendId| self.backend(**backend).map(|found| found.shortage(need));
            Some((pool, *able.min_by_key(shortage)?))
        });
        if let Some((pool, backend)) = best {
            // An earlier reservation of this waiter may be void now, but become valid again.
            for other in waiter.request.pools().collect::<SmallVec<[PoolId; 4]>>() {
                self.pools[other.index()].reserved.take_if(|reservation| reservation.serial == serial);
            }
            self.pools[pool.index()].reserved = Some(Reservation { backend, waiter: id, serial });
        }
    }

    /// Ends the reservation of a waiter that no longer waits. Returns the reserved backend.
    pub(super) fn drop_reservation(&mut self, waiter: &Waiter) -> Option<BackendId> {
        let ended = waiter.request.pools().find_map(|pool| {
            let reserved = &mut self.pools.get_mut(pool.index())?.reserved;
            reserved.take_if(|reservation| reservation.serial == waiter.key.serial())
        });
        ended.map(|reservation| reservation.backend)
    }

    fn waiting(&self, id: WaiterId) -> Option<&Waiter> {
        self.waiters.get(id as usize)?.as_ref().filter(|waiter| waiter.outcome.is_none())
    }

    fn can_reserve(&self, waiter: &Waiter, pool: PoolId, backend: BackendId) -> bool {
        let able = |found: &BackendState| {
            found.pool == pool
                && found.in_rotation()
                && found.bounds.in_force().exceeded_by(&waiter.request.need).is_none()
        };
        self.backend(backend).is_some_and(able) && self.allows(&waiter.request, backend)
    }
}

impl BackendState {
    /// Whether the backend has no room for any request.
    pub(super) fn is_full(&self) -> bool {
        self.fit(&Need { slots: 1, prompt_tokens: 0, output_tokens: 0 }) == Fit::Full
    }

    /// The capacity that must be given back here before `need` fits: slots, then tokens.
    fn shortage(&self, need: &Need) -> (u64, u64) {
        let occupied = self.occupied();
        let slots = u64::from(occupied.slots) + u64::from(need.slots);
        let tokens = occupied.tokens.saturating_add(need.tokens());
        let limits = self.bounds.in_force();
        let short = tokens.saturating_sub(limits.tokens.unwrap_or(u64::MAX));
        let learned = need.tokens().saturating_sub(self.bounds.learned_room(&self.used)).min(self.used.tokens);
        (slots.saturating_sub(limits.slots.into()), short.max(learned))
    }
}
