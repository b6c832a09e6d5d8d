//! The right to use one backend, and a place in the queue for one.
//!
//! A request holds a [`Lease`] while it is on a backend. Dropping it, on any path, returns all that
//! it holds. Nothing else returns capacity, and no counter is ever repaired. A [`Ticket`] is a
//! waiter: a future that resolves to a lease. Dropping it leaves the queue and returns a grant that
//! was not taken yet.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::engine_load::DecodeStart;
use super::engine_work::SilenceWatch;
use super::fault_report::FaultReport;
use super::grant::{Grant, WaitResult};
use super::health::{BackendFault, RefusedGateway};
use super::liveness::ClientWait;
use super::queue::WaiterId;
use super::shared::SharedState;
use crate::origin::Origin;
use sluice_config::Address;
use sluice_core::base::{BackendId, PoolId};

/// The right to use one backend: slots, tokens, and prefill tokens until the first token.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<SharedState>,
    grant: Box<Grant>,
    /// Everything was returned; the backend id may refer to another backend by now.
    released: bool,
    decoding: Option<DecodeStart>,
    /// When the stream began to generate. `None` before that and after the stream's end.
    generates_since: Option<Instant>,
    origin: Origin,
    /// The serial of a copy. A copy holds no capacity of requests, and reports of copies are
    /// ignored.
    copy: Option<u64>,
}

impl Lease {
    pub(super) fn new(shared: Arc<SharedState>, grant: Box<Grant>) -> Self {
        Self {
            shared,
            grant,
            released: false,
            decoding: None,
            generates_since: None,
            origin: Origin::default(),
            copy: None,
        }
    }

    pub(super) fn of_copy(shared: Arc<SharedState>, grant: Box<Grant>, serial: u64) -> Self {
        Self {
            shared,
            grant,
            released: true,
            decoding: None,
            generates_since: None,
            origin: Origin::default(),
            copy: Some(serial),
        }
    }

    pub(super) fn shared(&self) -> &SharedState {
        &self.shared
    }

    /// The backend, and the other ranks of the same server. A request that failed on the backend
    /// counts as failed on all of them.
    pub fn server(&self) -> SmallVec<[BackendId; 4]> {
        match self.grant.address.rank {
            None => SmallVec::from_slice(&[self.grant.backend]),
            Some(_) => self.shared.lock().ranks_of(self.grant.backend),
        }
    }

    /// Sets the client of the request: the outcome counts for this origin.
    pub fn set_origin(&mut self, origin: Origin) {
        self.origin = origin;
    }

    /// Other requests in flight on the backend.
    pub fn others_in_flight(&self) -> u32 {
        let requests = self.shared.lock().backend(self.grant.backend).map_or(0, |found| found.used.requests);
        requests.saturating_sub(u32::from(!self.released))
    }

    /// The backend to use.
    pub fn backend(&self) -> BackendId {
        self.grant.backend
    }

    /// The pool of that backend: not the request's home if the request spilled.
    pub fn pool(&self) -> PoolId {
        self.grant.pool
    }

    /// That pool's name.
    pub fn pool_name(&self) -> &Arc<str> {
        &self.grant.pool_name
    }

    /// The backend's name.
    pub fn name(&self) -> &Arc<str> {
        &self.grant.name
    }

    /// Both names, of the pool and of the backend.
    pub fn place(&self) -> [Arc<str>; 2] {
        [Arc::clone(&self.grant.pool_name), Arc::clone(&self.grant.name)]
    }

    /// The backend's address.
    pub fn address(&self) -> &Arc<Address> {
        &self.grant.address
    }

    /// The name of the request in the engine's events, if these are followed.
    pub fn session(&self) -> Option<u64> {
        self.grant.session
    }

    /// Whether the engine schedules by priority.
    pub fn by_priority(&self) -> bool {
        self.grant.by_priority
    }

    /// The expected length of the prefill. A response that is not streamed returns the prefill
    /// share after this time.
    pub fn prefill_time(&self) -> Duration {
        self.grant.prefill_time
    }

    /// The context limit of the backend's engine, in tokens, if the engine has reported it.
    pub fn max_model_len(&self) -> Option<u64> {
        self.grant.max_model_len
    }

    /// Records that the backend sent bytes which show work.
    pub fn record_progress(&self, now: Instant) {
        self.grant.progress.record_progress(now);
    }

    /// Records that a stream received this many tokens.
    pub fn record_tokens(&self, tokens: u64) {
        self.grant.progress.work.received(tokens);
        if self.generates_since.is_some() {
            self.grant.progress.decoding.received(tokens);
        }
    }

    /// Called when the stream is silent. While the watch lives, the gateway reads the engine's
    /// counters.
    pub fn watch_engine(&self, now: Instant) -> SilenceWatch {
        SilenceWatch::new(Arc::clone(&self.grant.progress.work), self.shared.bell(), now)
    }

    /// Marks the request as waiting for the client until the guard is dropped. Meanwhile the
    /// silence is not the backend's fault.
    pub fn client_wait(&self) -> ClientWait<'_> {
        self.grant.progress.client_wait()
    }

    /// Whether the backend leaves service: it is drained or removed.
    pub fn is_leaving(&self) -> bool {
        self.grant.progress.is_leaving()
    }

    /// Cancelled when the backend is found hung, when all exchanges are aborted, and when a copy is
    /// cut.
    pub fn abort_token(&self) -> &CancellationToken {
        &self.grant.abort
    }

    /// Returns everything early: the backend has finished, although the client may not have the
    /// whole response yet. Later reports are ignored.
    pub fn release(&mut self) {
        self.end_generating();
        if !std::mem::replace(&mut self.released, true) {
            let allocation = std::mem::take(&mut self.grant.allocation);
            self.shared.update(|state, wakers| state.release(self.grant.backend, allocation, wakers));
        }
        if let Some(serial) = self.copy.take() {
            self.shared.change(self.grant.backend, |found| found.copies.remove(serial));
        }
    }

    /// Like [`Lease::release`], after a failed attempt, which is not charged to the request's
    /// owner.
    pub fn release_failed(&mut self) {
        self.release();
        self.settle(Some(0), Some(0), 0);
    }

    /// The prefill is over: returns the prefill tokens and the permit. Idempotent.
    pub fn first_token(&mut self) {
        self.end_prefill(false);
    }

    /// Like [`Lease::first_token`], for a stream whose first token was seen at `now`. The engine
    /// then surely has the request.
    pub fn first_token_seen(&mut self, now: Instant) {
        self.end_prefill(true);
        if !self.released && self.generates_since.is_none() {
            self.generates_since = Some(now);
            self.grant.progress.decoding.begin(now);
        }
    }

    fn end_generating(&mut self) {
        if let Some(since) = self.generates_since.take() {
            // The time of the backend's last byte stands for the time of this stream's last byte.
            self.grant.progress.decoding.end(since, self.grant.progress.last().max(since));
        }
    }

    /// The client kept the response waiting, so the end may be seen long after the engine has
    /// finished.
    pub fn fell_behind(&mut self) {
        self.end_generating();
        if let Some(seen) = self.grant.allocation.seen.take_if(|_| !self.released) {
            self.shared.change(self.grant.backend, |found| found.settled.end(Some(seen)));
        }
    }

    fn end_prefill(&mut self, seen: bool) {
        if let Some(serial) = self.copy {
            self.shared.change(self.grant.backend, |found| found.copies.end_prefill(serial));
        }
        if self.released {
            return;
        }
        let start = self.shared.end_prefill(self.grant.backend, &mut self.grant.allocation, seen);
        self.decoding = self.decoding.or(start);
    }

    /// The engine counted `prompt_tokens`. Takes the difference to a lower estimate, and until the
    /// first token also prefill tokens and the permit of a long prompt. Never waits: usage may then
    /// exceed a limit, and the backend admits nothing until usage has fallen.
    pub fn charge(&mut self, prompt_tokens: u64) {
        if !self.released {
            let allocation = &mut self.grant.allocation;
            self.shared.change(self.grant.backend, |found| {
                found.used.charge(found.bounds.in_force(), allocation, prompt_tokens);
            });
        }
    }

    /// Learns the prefill rate from the time to first token of one prompt.
    pub fn observe_prefill(&self, prompt_tokens: u64, ttft: Duration, now: Instant) {
        if !self.released {
            let computed = prompt_tokens.saturating_sub(self.expected_cached());
            self.shared.change(self.grant.backend, |found| {
                found.speed.prefill.observe(prompt_tokens, ttft, now);
                found.load.observe_first_token(computed, self.grant.ahead, ttft, now);
            });
        }
    }

    /// Prompt tokens that are expected in the engine's prefix cache.
    pub fn expected_cached(&self) -> u64 {
        self.grant.allocation.cached_tokens()
    }

    /// Learns from the prompt tokens that the engine reports as cached; `None`: it reported
    /// nothing.
    pub fn observe_cached(&self, prompt_tokens: u64, cached: Option<u64>) {
        if !self.released {
            self.shared.observe_cached(&self.grant, prompt_tokens, cached);
        }
    }

    /// Learns the decoding speed from a finished request with `tokens` tokens in each sequence.
    pub fn observe_decode(&self, tokens: u64, tpot: Duration, now: Instant) {
        if !self.released {
            self.shared.change(self.grant.backend, |found| {
                found.speed.observe_tpot(tpot);
                if let Some(start) = self.decoding {
                    found.load.observe_decode(start, tokens, tpot, &found.used, now);
                }
            });
        }
    }

    /// Charges the request's owner for actual tokens instead of the estimate: the prompt tokens
    /// except the `cached` ones, and the output tokens. `None`: the expected number counts. Only
    /// the first call counts, even after the release.
    pub fn settle(&mut self, prompt_tokens: Option<u64>, cached: Option<u64>, output_tokens: u64) {
        if let Some(mut bill) = self.grant.bill.take() {
            let cached = cached.unwrap_or(bill.cached);
            let computed = prompt_tokens.map_or(bill.computed, |prompt| prompt.saturating_sub(cached));
            if let Some(pool) = self.shared.lock().pools.get_mut(bill.pool.index()) {
                pool.queue.settle(&mut bill, computed, output_tokens);
            }
        }
    }

    /// Reports a success of the backend.
    pub fn success(&self, now: Instant) {
        if !self.released {
            self.shared.success(self.grant.backend, self.origin, now);
        }
    }

    /// Reports that the engine refuses the gateway's credentials. Returns whether that is new.
    pub fn refused_gateway(&self, status: u16, now: Instant) -> bool {
        let refused = RefusedGateway { status, by_probe: false };
        !self.released && self.shared.refused_gateway(self.grant.backend, refused, self.origin, now)
    }

    /// Reports a fault of the backend.
    pub fn failure(&self, fault: BackendFault, now: Instant) -> FaultReport {
        match self.released {
            true => FaultReport::default(),
            false => self.shared.failure(self.grant.backend, fault, self.origin, now),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.release();
        // The client left before usage was known: the prompt may have been computed, but no output
        // is charged.
        self.settle(None, None, 0);
    }
}

/// A place in a queue.
#[derive(Debug)]
pub struct Ticket {
    shared: Arc<SharedState>,
    /// `None` once the outcome was taken.
    id: Option<WaiterId>,
}

impl Ticket {
    pub(super) fn new(shared: Arc<SharedState>, id: WaiterId) -> Self {
        Self { shared, id: Some(id) }
    }
}

impl Future for Ticket {
    type Output = WaitResult<Lease>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<WaitResult<Lease>> {
        let Some(id) = self.id else { return Poll::Pending };
        let Some(outcome) = self.shared.lock().poll_waiter(id, cx.waker()) else { return Poll::Pending };
        self.id = None;
        Poll::Ready(outcome.map(|grant| Lease::new(Arc::clone(&self.shared), grant)))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.shared.update(|state, wakers| state.leave(id, wakers));
        }
    }
}
