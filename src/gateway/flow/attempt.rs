//! The results of one attempt on one backend, and the events that end a wait for the backend early.
//!
//! Shared by `forward.rs`, which decides about another attempt, and `pump.rs`, which passes a
//! response on. A failed attempt carries the backend's answer, which the client gets if no attempt
//! follows.

use std::fmt::Display;
use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::time::{Instant, sleep_until};

use super::exchange::{Downstream, Exchange, ExchangeError, ResponseHead};
use super::faults;
use super::record::{Outcome, RetryReason, Stage, UpstreamFault};
use super::refused_here::Refused;
use crate::pool::{BackendFault, Lease};
use sluice_core::openai::{NotContinued, Refusal};

pub(super) enum AttemptResult<X> {
    /// The request is over. The record has the outcome.
    Finished,
    /// The attempt failed. The request may be sent to another backend, or another engine may
    /// continue the stream. Boxed, because it is large and rare.
    Failed(Box<FailedAttempt<X>>),
}

/// An attempt that may be repeated on another backend.
pub(super) struct FailedAttempt<X> {
    pub(super) reason: RetryReason,
    /// The request's outcome if no attempt follows.
    pub(super) outcome: Outcome,
    /// The backend's response, passed on if no other backend can take the request.
    pub(super) response: Option<ResponseStart<X>>,
    /// The backend's refusal, if it came as the first event of a stream. It is passed on in the
    /// same case as `response`.
    pub(super) busy: Option<BusyBackend>,
    /// The model, route, length or rank that the engine lacks, as the first event of the stream
    /// says.
    pub(super) lacks: Option<Refused>,
    /// The beginning of a response that the pump has read but not passed on. `forward/pass_on.rs`
    /// turns it into the response of the attempt.
    pub(super) held: Option<HeldResponse>,
    /// The client has tokens of a stream, which another engine may continue.
    pub(super) continues: bool,
    /// Why no engine may continue the stream after this attempt to continue it.
    pub(super) why_not: Option<NotContinued>,
    /// Nothing has failed: the engine leaves service, and keeps serving the stream until another
    /// engine has room.
    pub(super) is_move: bool,
}

impl<X> FailedAttempt<X> {
    /// A failure without a response.
    pub(super) fn boxed(reason: RetryReason, outcome: Outcome) -> Box<Self> {
        Box::new(Self {
            reason,
            outcome,
            response: None,
            busy: None,
            lacks: None,
            held: None,
            continues: false,
            why_not: None,
            is_move: false,
        })
    }

    /// A failure in the middle of a stream that another engine may continue.
    pub(super) fn in_stream(reason: RetryReason, outcome: Outcome, why_not: Option<NotContinued>) -> Box<Self> {
        Box::new(Self { continues: true, why_not, ..*Self::boxed(reason, outcome) })
    }

    /// A stream that may move to another engine. The outcome applies only if the gateway stops
    /// before the move.
    pub(super) fn to_move() -> Box<Self> {
        let failed = Self::in_stream(RetryReason::Moved, Outcome::Timeout(Stage::Drain), None);
        Box::new(Self { is_move: true, ..*failed })
    }
}

/// The beginning of a response in which the engine says that it will not serve the request.
pub(super) struct HeldResponse {
    pub(super) head: Box<ResponseHead>,
    pub(super) read: Bytes,
}

/// A backend's own admission control, reported in a stream whose head was 200.
pub(super) struct BusyBackend {
    pub(super) message: String,
    pub(super) retry_after: Option<u64>,
}

/// A response that was not passed on.
pub(super) struct ResponseStart<X> {
    pub(super) exchange: X,
    pub(super) head: Box<ResponseHead>,
    /// When the request had been sent upstream.
    pub(super) sent: Instant,
    pub(super) read: Bytes,
}

impl<X> AttemptResult<X> {
    pub(super) fn failed(reason: RetryReason, outcome: Outcome) -> Self {
        Self::Failed(FailedAttempt::boxed(reason, outcome))
    }

    /// A failure of the backend of kind `fault`.
    pub(super) fn upstream_error(reason: RetryReason, fault: UpstreamFault) -> Self {
        Self::failed(reason, Outcome::UpstreamError(fault))
    }
}

impl<X> FailedAttempt<X> {
    /// The gateway's response if no other backend can take the request. `retry_after`: seconds
    /// until there may be room, used if the backend gave no time.
    pub(super) fn refusal(&self, retry_after: u64) -> Refusal {
        match (&self.busy, self.outcome) {
            (Some(busy), _) => Refusal::UpstreamBusy {
                message: busy.message.clone(),
                retry_after: busy.retry_after.unwrap_or(retry_after),
            },
            (None, Outcome::Timeout(_)) => Refusal::UpstreamTimeout,
            (None, Outcome::UpstreamError(UpstreamFault::Credentials)) => Refusal::UpstreamRefusedGateway,
            (None, _) => Refusal::UpstreamBroke,
        }
    }
}

impl<X: Exchange> ResponseStart<X> {
    /// Reads the body to the end, within limits on bytes and time. Returns whether the end was
    /// reached.
    pub(super) async fn read_ahead<D: Downstream>(
        &mut self,
        (bytes, time): (usize, Duration),
        down: &mut D,
        lease: &Lease,
    ) -> Result<bool, WaitError> {
        let (mut read, deadline) = (BytesMut::from(std::mem::take(&mut self.read)), Instant::now() + time);
        let result = {
            let reading = pin!(async {
                while read.len() < bytes && !self.exchange.at_end() {
                    if !self.exchange.body(&mut read).await.map_err(WaitError::Broken)? {
                        return Ok(true);
                    }
                }
                Ok(self.exchange.at_end())
            });
            guarded(reading, down, lease, (deadline, Stage::FirstByte)).await
        };
        self.read = read.freeze();
        result
    }
}

/// The reasons why a wait for a part of the response ended without it.
pub(super) enum WaitError {
    /// A reused connection was closed before any byte of a response.
    Stale,
    Broken(ExchangeError),
    ClientGone,
    Hung,
    TimedOut(Stage),
}

impl WaitError {
    /// Converts the failure into the result of the attempt. Reports it to the backend's health if
    /// the backend is to blame.
    pub(super) fn into_result<X>(self, lease: &Lease, request_id: &str) -> AttemptResult<X> {
        let failure = |fault, why: &dyn Display| faults::report(lease, fault, request_id, why, Instant::now());
        match self {
            // The keep-alive race is no fault of the backend.
            Self::Stale => AttemptResult::upstream_error(RetryReason::StaleConnection, UpstreamFault::Broken),
            Self::Broken(ExchangeError::NotTaken) => Self::TimedOut(Stage::Send).into_result(lease, request_id),
            Self::Broken(error) => {
                if matches!(error, ExchangeError::Connect(_)) {
                    failure(BackendFault::Connect, &error);
                    return AttemptResult::upstream_error(RetryReason::Connect, UpstreamFault::Connect);
                }
                failure(BackendFault::Response, &error);
                AttemptResult::upstream_error(RetryReason::Broken, UpstreamFault::Broken)
            }
            Self::ClientGone => AttemptResult::Finished,
            Self::Hung => AttemptResult::upstream_error(RetryReason::Hung, UpstreamFault::Hung),
            Self::TimedOut(stage) => {
                let outcome = Outcome::Timeout(stage);
                failure(BackendFault::Timeout, &format_args!("timeout ({})", outcome.detail()));
                AttemptResult::failed(RetryReason::Timeout, outcome)
            }
        }
    }
}

/// Resolves when the client leaves, if the engine then aborts the request. Otherwise it never
/// resolves, because an engine that works on keeps the lease until it answers.
pub(super) async fn left<D: Downstream>(down: &mut D, lease: &Lease) {
    match lease.address().engine.rules().aborts {
        true => down.gone().await,
        false => std::future::pending().await,
    }
}

/// Like [`guarded`], for the head of a response, but a client that leaves ends the wait early only
/// as [`left`] says. If the engine works on, it has finished when the head is there, and only then
/// the client's leaving counts.
pub(super) async fn guarded_work<T, D: Downstream>(
    wanted: Pin<&mut impl Future<Output = Result<T, WaitError>>>,
    down: &mut D,
    lease: &Lease,
    deadline: Instant,
) -> Result<T, WaitError> {
    let result = tokio::select! {
        biased;
        result = wanted => result,
        () = left(down, lease) => Err(WaitError::ClientGone),
        () = lease.abort_token().cancelled() => Err(WaitError::Hung),
        () = sleep_until(deadline) => Err(WaitError::TimedOut(Stage::FirstByte)),
    };
    if lease.address().engine.rules().aborts || matches!(result, Err(WaitError::TimedOut(_))) {
        return result;
    }
    tokio::select! {
        biased;
        () = down.gone() => Err(WaitError::ClientGone),
        () = std::future::ready(()) => result,
    }
}

/// Waits for `wanted` until the client leaves, the backend is found hung (or the gateway aborts all
/// requests), or the stage's deadline passes.
pub(super) async fn guarded<T, D: Downstream>(
    wanted: Pin<&mut impl Future<Output = Result<T, WaitError>>>,
    down: &mut D,
    lease: &Lease,
    (deadline, stage): (Instant, Stage),
) -> Result<T, WaitError> {
    tokio::select! {
        biased;
        result = wanted => result,
        () = down.gone() => Err(WaitError::ClientGone),
        () = lease.abort_token().cancelled() => Err(WaitError::Hung),
        () = sleep_until(deadline) => Err(WaitError::TimedOut(stage)),
    }
}
