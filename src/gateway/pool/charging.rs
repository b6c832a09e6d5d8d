//! The owners of requests, charges to them, and whether an owner's prefill share is used up.
//!
//! Without fair pools, requests have no owner and this file does nothing. A request of a fair pool
//! costs one look-up by hash.

use smallvec::SmallVec;
use tokio::time::Instant;

use super::bill::{Bill, Price};
use super::capacity::{Allocation, Fit, LARGE_PROMPT};
use super::grant::WaitResult;
use super::policy::cost::{SEQUENCE, STEP};
use super::queue::WaiterId;
use super::request::AdmissionRequest;
use super::state::{AdmissionState, Wakers};
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::ShedReason;

/// A request that waits only because the owner's prefill share is used up waits up to this many
/// times `queue.timeout`.
const WAIT_MAX: u32 = 4;

impl AdmissionState {
    /// Looks up the owner of a request that enters.
    pub(super) fn find_owner(&mut self, request: &mut AdmissionRequest, wakers: &mut Wakers) {
        let Some(mut fair) = request.fair else { return };
        fair.computed = self.computed_tokens(request);
        self.expire_owners(request.home);
        self.serve_loosened(request.home, wakers);
        fair.index = self.pools[request.home.index()].queue.enter(&fair);
        request.fair = Some(fair);
    }

    /// Prompt tokens that remain to be computed by the engine with the most of the prompt in its
    /// prefix cache. A prompt below [`LARGE_PROMPT`] counts in full.
    fn computed_tokens(&self, request: &AdmissionRequest) -> u64 {
        let prompt = request.need.prompt_tokens;
        if prompt < LARGE_PROMPT {
            return prompt;
        }
        let cached = self.cached_bytes(request.home, request);
        let engines = cached.owners().chain(self.members(request.home).first().copied());
        let tokens = engines.filter_map(|id| {
            let candidate = self.backend(id)?.candidate(id, self.epoch);
            Some(cached.tokens_on(&candidate, request))
        });
        prompt - tokens.max().unwrap_or(0).min(prompt)
    }

    /// Charges the owner of a request that was granted room on `backend`. `cached`: prompt tokens
    /// expected in the prefix cache.
    pub(super) fn charge(&mut self, backend: BackendId, request: &AdmissionRequest, cached: u64) -> Option<Bill> {
        let (home, owner) = (request.home, request.owner());
        if request.fair.is_none() && !self.pools[home.index()].queue.is_fair() {
            return None;
        }
        let found = self.backend(backend)?;
        let (prompt, tpot, sequences) =
            (found.load.seconds_per_prompt_token(), found.speed.seconds_per_token, found.used.slots);
        let price = |crowd: f64| Price::new(prompt, tpot.unwrap_or(STEP + SEQUENCE * crowd) / crowd);
        let computed = request.need.prompt_tokens.saturating_sub(cached);
        let queue = &mut self.pools[home.index()].queue;
        let bill = queue.charge((home, owner), (computed, request.need.output_tokens), price, sequences);
        queue.begin_prefill(owner, backend, computed);
        Some(Bill { cached, ..bill })
    }

    pub(super) fn end_charged_prefill(&mut self, backend: BackendId, allocation: &Allocation) {
        if let Some(bill) = allocation.bill.filter(|_| allocation.is_prefilling())
            && let Some(pool) = self.pools.get_mut(bill.pool.index())
        {
            pool.queue.end_prefill(bill.owner, backend, bill.computed);
        }
    }

    pub(super) fn end_charge(&mut self, backend: BackendId, allocation: &Allocation) {
        self.end_charged_prefill(backend, allocation);
        if let Some(bill) = &allocation.bill
            && let Some(pool) = self.pools.get_mut(bill.pool.index())
        {
            pool.queue.end(bill);
            self.expire_owners(bill.pool);
        }
    }

    fn expire_owners(&mut self, pool: PoolId) {
        let found = &mut self.pools[pool.index()];
        found.queue.expire(found.members.len());
    }

    /// Whether the owner's prefill share on `backend` is used up. Always false outside the home
    /// pool.
    pub(super) fn is_held(&self, request: &AdmissionRequest, backend: BackendId) -> bool {
        let Some(fair) = &request.fair else { return false };
        let pool = &self.pools[request.home.index()];
        pool.queue.is_shared()
            && self.backend(backend).is_some_and(|found| found.pool == request.home)
            && !pool.queue.allowance(fair.index, backend, pool.members.len()).allows(fair.computed)
    }

    /// Whether a request waits although a backend has room for it, because the owner's prefill
    /// share is used up.
    pub(super) fn waits_for_share(&self, request: &AdmissionRequest) -> bool {
        let held = |backend: &BackendId| {
            let room = self.backend(*backend).is_some_and(|found| found.fit(&request.need) == Fit::Room);
            room && self.allows(request, *backend) && self.is_held(request, *backend)
        };
        request.fair.is_some() && self.members(request.home).iter().any(held)
    }

    /// The deadline of a request that waits for its owner's share: later than `queue.timeout`,
    /// because inside the engine the request would not time out either.
    pub(super) fn patient(&self, request: &AdmissionRequest, deadline: Instant) -> Instant {
        let timeout = self.pools[request.home.index()].rules.queue_timeout;
        deadline.max(request.since + timeout.saturating_mul(WAIT_MAX))
    }

    /// Serves waiters that were held because of their owner's share, if a share may have changed.
    pub(super) fn serve_loosened(&mut self, pool: PoolId, wakers: &mut Wakers) {
        if self.pools[pool.index()].queue.take_loosened() {
            let members: SmallVec<[BackendId; 8]> = self.members(pool).iter().copied().collect();
            members.into_iter().for_each(|backend| self.dispatch(backend, wakers));
        }
    }

    /// Serves held waiters of a request's home pool. The request may have run in another pool.
    pub(super) fn serve_home_of(&mut self, bill: Option<Bill>, wakers: &mut Wakers) {
        if let Some(pool) = bill.map(|bill| bill.pool).filter(|pool| pool.index() < self.pools.len()) {
            self.serve_loosened(pool, wakers);
        }
    }

    /// Makes room in a full queue for the waiter `id`: sheds the last waiter of the owner with the
    /// most waiters by weight. False if no owner has more than the owner of `id`.
    pub(super) fn displace(&mut self, pool: PoolId, id: WaiterId, wakers: &mut Wakers) -> bool {
        let Some(owner) = self.waiters[id as usize].as_ref().map(|waiter| waiter.request.owner()) else { return false };
        let Some(last) = self.pools[pool.index()].queue.displaced_by(owner) else { return false };
        self.end_wait(last, WaitResult::Shed(ShedReason::QueueFull), wakers);
        true
    }
}
