//! The right to use one backend, and a place in line for one.
//!
//! A [`Lease`] is held for as long as a request is on a backend; dropping it, on whatever path,
//! gives back what it holds. Nothing else gives capacity back, and no counter is ever repaired.
//! A [`Ticket`] is a waiter: a future that ends with a lease. Dropping it leaves the line; if a
//! grant was made but not yet picked up, the grant goes back too, so a client that leaves at the
//! very moment it is served cannot keep a slot.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::admission::Admission;
use super::backend::{ClientWait, Progress};
use super::capacity::Held;
use super::health::BackendFault;
use super::layout::Address;
use super::queue::WaiterId;
use sluice_core::base::{BackendId, PoolId};

/// What a grant hands over, besides the amounts.
#[derive(Debug)]
pub(super) struct Grant {
    pub(super) backend: BackendId,
    pub(super) pool: PoolId,
    pub(super) pool_name: Arc<str>,
    pub(super) name: Arc<str>,
    pub(super) address: Arc<Address>,
    pub(super) held: Held,
    pub(super) pulse: Arc<Progress>,
    pub(super) cut: CancellationToken,
    pub(super) prefill_time: Duration,
}

/// The right to use one backend: slots, tokens, and prefill tokens until the first token.
#[derive(Debug)]
pub struct Lease {
    admission: Arc<Admission>,
    grant: Grant,
    /// Everything has gone back: the id may mean another backend by now.
    released: bool,
}

impl Lease {
    pub(super) fn new(admission: Arc<Admission>, grant: Grant) -> Self {
        Self { admission, grant, released: false }
    }

    /// The backend to use.
    pub fn backend(&self) -> BackendId {
        self.grant.backend
    }

    /// The pool that backend belongs to; not the request's home when it spilled.
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

    /// Where the backend is reached.
    pub fn address(&self) -> &Arc<Address> {
        &self.grant.address
    }

    /// How long the prefill is expected to take: when the prefill share of an answer that is not
    /// streamed goes back.
    pub fn prefill_time(&self) -> Duration {
        self.grant.prefill_time
    }

    /// Bytes came from the backend.
    pub fn record_progress(&self, now: Instant) {
        self.grant.pulse.record_progress(now);
    }

    /// The request waits for its client, as long as what is returned lives: not the backend's silence.
    pub fn client_wait(&self) -> ClientWait<'_> {
        self.grant.pulse.client_wait()
    }

    /// Resolves when the backend was found hung: the exchange is to be given up.
    pub fn hang_token(&self) -> &CancellationToken {
        &self.grant.cut
    }

    /// The backend is done with the request, although its answer may still be on its way to the client: everything goes
    /// back now. What is reported afterwards is not taken in.
    pub fn release(&mut self) {
        if !std::mem::replace(&mut self.released, true) {
            self.admission.release(self.grant.backend, std::mem::take(&mut self.grant.held));
        }
    }

    /// The first token was seen: prefill tokens and the permit go back. Idempotent.
    pub fn first_token(&mut self) {
        if self.released {
            return;
        }
        self.admission.end_prefill(self.grant.backend, &mut self.grant.held);
    }

    /// Teaches the backend's prefill rate.
    pub fn observe_prefill(&self, prompt_tokens: u64, ttft: Duration) {
        if !self.released {
            self.admission.observe_prefill(self.grant.backend, prompt_tokens, ttft);
        }
    }

    /// Teaches the backend's decoding speed.
    pub fn observe_tpot(&self, tpot: Duration) {
        if !self.released {
            self.admission.observe_tpot(self.grant.backend, tpot);
        }
    }

    /// The backend did its part.
    pub fn success(&self) {
        if !self.released {
            self.admission.success(self.grant.backend);
        }
    }

    /// The backend failed this request.
    pub fn failure(&self, fault: BackendFault, now: Instant) {
        if !self.released {
            self.admission.failure(self.grant.backend, fault, now);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.release();
    }
}

/// How waiting ended.
#[derive(Debug)]
pub enum WaitResult {
    /// With the right to use a backend.
    Granted(Lease),
    /// The pool was removed by a reload: classify again and re-enter, keeping the arrival time.
    Reclassify,
}

/// A place in line.
#[derive(Debug)]
pub struct Ticket {
    admission: Arc<Admission>,
    /// `None` once the outcome was handed over.
    id: Option<WaiterId>,
}

impl Ticket {
    pub(super) fn new(admission: Arc<Admission>, id: WaiterId) -> Self {
        Self { admission, id: Some(id) }
    }
}

impl Future for Ticket {
    type Output = WaitResult;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<WaitResult> {
        let Some(id) = self.id else { return Poll::Pending };
        match self.admission.poll_waiter(id, cx.waker()) {
            None => Poll::Pending,
            Some(outcome) => {
                self.id = None;
                Poll::Ready(match outcome {
                    Some(grant) => WaitResult::Granted(Lease::new(Arc::clone(&self.admission), grant)),
                    None => WaitResult::Reclassify,
                })
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.admission.leave(id);
        }
    }
}
