//! Sending a request to a backend, and to another one while the client has seen nothing.
//!
//! An attempt holds one lease. It may be repeated on another backend when no connection came about,
//! the connection broke or stayed silent before the first byte, the engine answered 502 or 503, sent a
//! 503-coded error event before any content, or was found hung. It is never repeated on a 4xx or
//! after a byte has reached the client, and at most `retry.attempts` times. When no other backend can
//! take it, the client gets what the last one said.
//!
//! A reused connection that dies before any byte is the keep-alive race (vLLM closes idle ones at 5 s)
//! and nobody's fault: once per attempt the request is sent again to the same backend on a fresh
//! connection, with its lease.
//!
//! An engine's 503 is its own admission control: a reason to go elsewhere, not a fault.

use std::pin::{Pin, pin};
use std::sync::Arc;

use http::StatusCode;
use http::header::HeaderValue;
use smallvec::SmallVec;
use tokio::time::{Instant, sleep_until};

use super::admit::{self, AdmitError, LeaseRequest};
use super::exchange::{Downstream, Exchange, ExchangeError, ResponseHead, Upstream, UpstreamRequest};
use super::prepare::PreparedRequest;
use super::pump::{Pump, ResponseContext};
use super::record::{Outcome, RecordGuard, Recorder, RetryReason, Stage, UpstreamFault};
use super::respond::{self, REQUEST_ID};
use super::routing_table::RoutingTable;
use super::{Flow, IncomingRequest};
use crate::pool::{BackendFault, Lease};
use sluice_core::base::BackendId;
use sluice_core::openai::Refusal;

/// All attempts of one request.
pub(super) struct Attempts<'a, U, R> {
    flow: &'a Flow<U, R>,
    plan: Arc<RoutingTable>,
    incoming: &'a IncomingRequest,
    admitted: PreparedRequest,
    /// What is sent; let go when it can no longer be sent again.
    call: UpstreamRequest,
    avoid: SmallVec<[BackendId; 2]>,
}

/// An attempt that may be repeated elsewhere.
pub(super) struct Failed<X> {
    pub(super) reason: RetryReason,
    /// What the request comes to if it is not repeated.
    pub(super) outcome: Outcome,
    /// The backend's own answer, to be passed on if nobody else takes over.
    pub(super) answer: Option<(X, ResponseHead)>,
}

impl<X> Failed<X> {
    fn new(reason: RetryReason, outcome: Outcome) -> Self {
        Self { reason, outcome, answer: None }
    }

    fn refusal(&self) -> Refusal {
        match self.outcome {
            Outcome::Timeout(_) => Refusal::UpstreamTimeout,
            _ => Refusal::UpstreamBroke,
        }
    }
}

/// How an attempt ended.
pub(super) enum AttemptResult<X> {
    /// The request is over; its record says how.
    Over,
    /// Nothing has reached the client: it may be repeated.
    Again(Failed<X>),
}

/// What ends a wait before what was waited for.
enum Interrupted {
    ClientGone,
    Hung,
    TimedOut,
}

impl<'a, U: Upstream, R: Recorder> Attempts<'a, U, R> {
    pub(super) fn new(
        flow: &'a Flow<U, R>,
        plan: Arc<RoutingTable>,
        incoming: &'a IncomingRequest,
        admitted: PreparedRequest,
        call: UpstreamRequest,
    ) -> Self {
        Self { flow, plan, incoming, admitted, call, avoid: SmallVec::new() }
    }

    /// Tries until the request is over. An error is a refusal that has not been sent.
    pub(super) async fn run<D: Downstream>(
        &mut self,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<(), Refusal> {
        let mut lease = match self.admit(down, record).await {
            Ok(lease) => lease,
            Err(AdmitError::ClientGone) => return Ok(()),
            Err(AdmitError::Shed(reason, pool)) => {
                let retry_after = self.flow.admission().retry_after(pool, Instant::now());
                return Err(respond::shed(reason, retry_after, record));
            }
        };
        for attempt in 1.. {
            let failed = match self.attempt(attempt, &mut lease, down, record).await {
                AttemptResult::Over => return Ok(()),
                AttemptResult::Again(failed) => failed,
            };
            self.avoid.push(lease.backend());
            // Whoever refused carries nothing; waiting for another while holding on to it would be half of a deadlock.
            lease.release();
            let held = failed.answer.is_some().then_some(lease);
            if attempt >= self.plan.config.retry.attempts {
                return Box::pin(self.give_up(failed, held, down, record)).await;
            }
            lease = match self.admit(down, record).await {
                Ok(other) => other,
                Err(AdmitError::ClientGone) => return Ok(()),
                Err(AdmitError::Shed(..)) => return Box::pin(self.give_up(failed, held, down, record)).await,
            };
            record.retries.push(failed.reason);
        }
        Ok(())
    }

    async fn admit<D: Downstream>(&self, down: &mut D, record: &mut RecordGuard<'_, R>) -> Result<Lease, AdmitError> {
        let asked = Instant::now();
        let wish = LeaseRequest {
            need: self.admitted.need,
            priority: self.admitted.priority,
            arrived: self.incoming.arrived,
            model: record.model.as_deref().unwrap_or_default(),
            avoid: &self.avoid,
        };
        let got = admit::admit(self.flow, &self.plan, &self.admitted.placement, wish, down).await;
        record.queue_wait += asked.elapsed();
        let lease = got?;
        record.pool = Some(Arc::clone(lease.pool_name()));
        record.backend = Some(Arc::clone(lease.name()));
        Ok(lease)
    }

    /// Nobody else takes over: the backend's own answer if it gave one, else a refusal of ours.
    async fn give_up<D: Downstream>(
        &self,
        failed: Failed<U::Exchange>,
        held: Option<Lease>,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<(), Refusal> {
        let refusal = failed.refusal();
        record.outcome = failed.outcome;
        let (Some((mut exchange, head)), Some(mut lease)) = (failed.answer, held) else { return Err(refusal) };
        let now = Instant::now();
        let passage = passage(self.incoming, &self.admitted, &self.plan, (now, now + self.plan.timeouts().idle));
        let mut call = UpstreamRequest::default();
        match Pump::new(head, passage, &mut call, &mut lease, down, record).run(&mut exchange).await {
            AttemptResult::Over => {
                keep(exchange).await;
                Ok(())
            }
            AttemptResult::Again(_) => Err(refusal),
        }
    }

    async fn attempt<D: Downstream>(
        &mut self,
        attempt: u32,
        lease: &mut Lease,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> AttemptResult<U::Exchange> {
        self.name(attempt);
        let begun = Instant::now();
        let deadline = begun + self.plan.first_byte(self.admitted.stream, self.admitted.need.prompt_tokens);
        let mut fresh = false;
        loop {
            let sent = {
                let sending = pin!(self.flow.upstream.send(lease.address(), &self.call, fresh));
                guarded(sending, down, lease, deadline).await
            };
            let mut exchange = match sent {
                Ok(Ok(exchange)) => exchange,
                Ok(Err(error)) if error.reused && !fresh => {
                    record.retries.push(RetryReason::StaleConnection);
                    fresh = true;
                    continue;
                }
                Ok(Err(error)) => return broken(&error.broken, lease),
                Err(interrupted) => return interruption(interrupted, lease),
            };
            record.connect_time += exchange.connect_time();
            let sent = Instant::now();
            match self.wait_for_head(&mut exchange, lease, down, sent, deadline).await {
                Ok(Ok(head)) if matches!(head.status, StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE) => {
                    if head.status == StatusCode::BAD_GATEWAY {
                        lease.failure(BackendFault::Response, Instant::now());
                    }
                    let outcome = Outcome::UpstreamError(UpstreamFault::Status);
                    return AttemptResult::Again(Failed {
                        reason: RetryReason::Status,
                        outcome,
                        answer: Some((exchange, head)),
                    });
                }
                Ok(Ok(head)) => {
                    let passage = passage(self.incoming, &self.admitted, &self.plan, (sent, deadline));
                    let mut pump = Pump::new(head, passage, &mut self.call, lease, down, record);
                    let tried = pump.run(&mut exchange).await;
                    if matches!(tried, AttemptResult::Over) {
                        keep(exchange).await;
                    }
                    return tried;
                }
                Ok(Err(ExchangeError::Closed(_))) if exchange.reused() && !fresh => {
                    record.retries.push(RetryReason::StaleConnection);
                    fresh = true;
                }
                Ok(Err(error)) => return broken(&error, lease),
                Err(interrupted) => return interruption(interrupted, lease),
            }
        }
    }

    /// Waits for the head. An answer that is not streamed shows no first token: its prefill share goes
    /// back when its prefill should be over.
    async fn wait_for_head<D: Downstream>(
        &self,
        exchange: &mut U::Exchange,
        lease: &mut Lease,
        down: &mut D,
        sent: Instant,
        deadline: Instant,
    ) -> Result<Result<ResponseHead, ExchangeError>, Interrupted> {
        if !self.admitted.stream {
            let prefilled = sent + lease.prefill_time();
            let early = guarded(pin!(exchange.head()), down, lease, prefilled.min(deadline)).await;
            match early {
                Err(Interrupted::TimedOut) if prefilled < deadline => lease.first_token(),
                other => return other,
            }
        }
        guarded(pin!(exchange.head()), down, lease, deadline).await
    }

    /// Each attempt has an id of its own: engines before 0.14 confuse two requests of one id.
    fn name(&mut self, attempt: u32) {
        let id = &self.incoming.request_id;
        let own = match attempt {
            1 => HeaderValue::from_str(id),
            _ => HeaderValue::from_str(&format!("{id}-r{attempt}")),
        };
        if let Ok(value) = own {
            self.call.headers.insert(REQUEST_ID, value);
        }
    }
}

/// What the pump needs to know of a request that was sent at `sent` and must show a first byte by `deadline`.
fn passage<'a>(
    incoming: &IncomingRequest,
    admitted: &'a PreparedRequest,
    plan: &'a RoutingTable,
    (sent, deadline): (Instant, Instant),
) -> ResponseContext<'a> {
    ResponseContext {
        route: incoming.route,
        arrived: incoming.arrived,
        sent,
        deadline,
        injected: admitted.injected,
        prompt_tokens: admitted.need.prompt_tokens,
        lesson: &admitted.lesson,
        idle: plan.timeouts().idle,
        objectives: &plan.pools[admitted.placement.home].objectives,
    }
}

/// An answer that was read to its end leaves a connection behind.
async fn keep<X: Exchange>(exchange: X) {
    if exchange.at_end() {
        exchange.keep().await;
    }
}

/// Waits for `wanted` until the client leaves, the backend is found hung, or the deadline.
async fn guarded<T, D: Downstream>(
    wanted: Pin<&mut impl Future<Output = T>>,
    down: &mut D,
    lease: &Lease,
    deadline: Instant,
) -> Result<T, Interrupted> {
    tokio::select! {
        biased;
        got = wanted => Ok(got),
        () = down.gone() => Err(Interrupted::ClientGone),
        () = lease.hang_token().cancelled() => Err(Interrupted::Hung),
        () = sleep_until(deadline) => Err(Interrupted::TimedOut),
    }
}

fn broken<X>(error: &ExchangeError, lease: &Lease) -> AttemptResult<X> {
    let (fault, reason, upstream) = match error {
        ExchangeError::Connect(_) => (BackendFault::Connect, RetryReason::Connect, UpstreamFault::Connect),
        ExchangeError::Closed(_) | ExchangeError::Malformed(_) => {
            (BackendFault::Response, RetryReason::Broken, UpstreamFault::Broken)
        }
    };
    tracing::debug!(backend = %lease.name(), %error, "attempt failed");
    lease.failure(fault, Instant::now());
    AttemptResult::Again(Failed::new(reason, Outcome::UpstreamError(upstream)))
}

fn interruption<X>(interrupted: Interrupted, lease: &Lease) -> AttemptResult<X> {
    match interrupted {
        Interrupted::ClientGone => AttemptResult::Over,
        Interrupted::Hung => {
            AttemptResult::Again(Failed::new(RetryReason::Hung, Outcome::UpstreamError(UpstreamFault::Hung)))
        }
        Interrupted::TimedOut => {
            lease.failure(BackendFault::Timeout, Instant::now());
            AttemptResult::Again(Failed::new(RetryReason::Timeout, Outcome::Timeout(Stage::FirstByte)))
        }
    }
}
