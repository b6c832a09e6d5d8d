//! How one attempt on one backend can end, and what ends a wait for it early.
//!
//! Shared by `forward.rs`, which decides about another attempt, and `pump.rs`, which passes a response on.

use std::future::Future;
use std::pin::Pin;

use tokio::time::{Instant, sleep_until};

use super::exchange::{Downstream, ExchangeError, ResponseHead};
use super::record::{Outcome, RetryReason, Stage, UpstreamFault};
use crate::pool::{BackendFault, Lease};
use sluice_core::openai::Refusal;

/// How an attempt ended.
pub(super) enum AttemptResult<X> {
    /// The request is over; its record says how.
    Finished,
    /// Nothing has reached the client: the request may be sent to another backend.
    Failed(FailedAttempt<X>),
}

/// An attempt that may be repeated on another backend.
pub(super) struct FailedAttempt<X> {
    pub(super) reason: RetryReason,
    /// The request's outcome if it is not repeated.
    pub(super) outcome: Outcome,
    /// The backend's own response, passed on if no other backend can take the request.
    pub(super) response: Option<ResponseStart<X>>,
}

/// A response whose body has not been read.
pub(super) struct ResponseStart<X> {
    pub(super) exchange: X,
    pub(super) head: ResponseHead,
    /// When the request had been sent upstream.
    pub(super) sent: Instant,
}

impl<X> AttemptResult<X> {
    /// A failure without a response.
    pub(super) fn failed(reason: RetryReason, outcome: Outcome) -> Self {
        Self::Failed(FailedAttempt { reason, outcome, response: None })
    }

    /// The backend failed in `fault`'s way.
    pub(super) fn upstream_error(reason: RetryReason, fault: UpstreamFault) -> Self {
        Self::failed(reason, Outcome::UpstreamError(fault))
    }
}

impl<X> FailedAttempt<X> {
    /// The response of the gateway if no other backend can take the request.
    pub(super) fn refusal(&self) -> Refusal {
        match self.outcome {
            Outcome::Timeout(_) => Refusal::UpstreamTimeout,
            _ => Refusal::UpstreamBroke,
        }
    }
}

/// Why there is no response head.
pub(super) enum WaitError {
    /// A reused connection was closed before any byte of a response.
    Stale(ExchangeError),
    /// The exchange failed.
    Broken(ExchangeError),
    ClientGone,
    /// The backend was found hung.
    Hung,
    TimedOut,
}

impl WaitError {
    /// What it means for the request, after reporting what the backend is to blame for to its health.
    pub(super) fn into_result<X>(self, lease: &Lease) -> AttemptResult<X> {
        match self {
            Self::Stale(error) | Self::Broken(error) => {
                let (fault, reason, upstream) = match error {
                    ExchangeError::Connect(_) => (BackendFault::Connect, RetryReason::Connect, UpstreamFault::Connect),
                    ExchangeError::Closed(_) | ExchangeError::Malformed(_) => {
                        (BackendFault::Response, RetryReason::Broken, UpstreamFault::Broken)
                    }
                };
                tracing::debug!(backend = %lease.name(), %error, "attempt failed");
                lease.failure(fault, Instant::now());
                AttemptResult::upstream_error(reason, upstream)
            }
            Self::ClientGone => AttemptResult::Finished,
            Self::Hung => AttemptResult::upstream_error(RetryReason::Hung, UpstreamFault::Hung),
            Self::TimedOut => {
                lease.failure(BackendFault::Timeout, Instant::now());
                AttemptResult::failed(RetryReason::Timeout, Outcome::Timeout(Stage::FirstByte))
            }
        }
    }
}

/// Waits for `wanted` until the client leaves, the backend is found hung, or the deadline passes.
pub(super) async fn guarded<T, D: Downstream>(
    wanted: Pin<&mut impl Future<Output = Result<T, WaitError>>>,
    down: &mut D,
    lease: &Lease,
    deadline: Instant,
) -> Result<T, WaitError> {
    tokio::select! {
        biased;
        result = wanted => result,
        () = down.gone() => Err(WaitError::ClientGone),
        () = lease.hang_token().cancelled() => Err(WaitError::Hung),
        () = sleep_until(deadline) => Err(WaitError::TimedOut),
    }
}
