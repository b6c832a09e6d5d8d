//! Capacity taken on one backend, as the state behind the lock passes it to a lease; and how waits
//! end.
//!
//! Only dropping a [`super::Lease`] returns capacity, not dropping a grant. A grant is boxed,
//! because it is large and is passed on through many futures.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::bill::Bill;
use super::capacity::Allocation;
use super::liveness::Progress;
use sluice_config::Address;
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::{PromptPrefix, ShedReason, TooLarge};

#[derive(Debug)]
pub(super) struct Grant {
    pub(super) backend: BackendId,
    pub(super) pool: PoolId,
    pub(super) pool_name: Arc<str>,
    pub(super) name: Arc<str>,
    pub(super) address: Arc<Address>,
    pub(super) allocation: Allocation,
    /// The charge to the request's owner. Corrected once, even after the release.
    pub(super) bill: Option<Bill>,
    pub(super) progress: Arc<Progress>,
    pub(super) abort: CancellationToken,
    pub(super) prefill_time: Duration,
    pub(super) max_model_len: Option<u64>,
    /// Seconds of large prefills ahead of the request.
    pub(super) ahead: f64,
    pub(super) by_priority: bool,
    /// The hashed beginnings of the prompt.
    pub(super) prefix: Arc<PromptPrefix>,
    /// By which the engine's events name the request, if they are followed.
    pub(super) session: Option<u64>,
}

/// The decision on a request for admission. `L` is the lease, or the grant for it behind the lock;
/// `T` is the ticket of a waiter, or the waiter's id.
#[derive(Debug)]
pub enum AdmissionDecision<L, T> {
    /// A backend has room.
    Granted(L),
    /// No backend has room: wait on the ticket, at most until the deadline.
    Queued(T, Instant),
    /// The request exceeds the limits of an empty backend: the client's fault.
    Refused(TooLarge),
    /// The request is not served, for this reason.
    Shed(ShedReason),
    /// A reload has removed the home pool, or every backend there that may serve the request.
    /// Classify it by the next routing table and enter again.
    Reclassify,
}

/// How a wait ended. `L` is the lease, or the grant for it behind the lock.
#[derive(Debug)]
pub enum WaitResult<L> {
    /// The request has a lease.
    Granted(L),
    /// A reload removed the pool, or the request exceeds the new limits: classify it again and
    /// enter with the original arrival time.
    Reclassify,
    /// Not served, for this reason.
    Shed(ShedReason),
    /// No engine serves the model any more.
    Unserved,
}

impl<L> WaitResult<L> {
    pub(super) fn map<M>(self, map: impl FnOnce(L) -> M) -> WaitResult<M> {
        match self {
            Self::Granted(lease) => WaitResult::Granted(map(lease)),
            Self::Reclassify => WaitResult::Reclassify,
            Self::Shed(reason) => WaitResult::Shed(reason),
            Self::Unserved => WaitResult::Unserved,
        }
    }
}
