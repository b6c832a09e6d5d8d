//! Sends a request to a backend, and to another one if that fails before the client has a token.
//!
//! An attempt is one delivery of the request to one backend, under an attempt id. There are at most
//! `retry.attempts`. Another one follows when the connection failed or broke, or when the backend
//! stopped reading, was silent before the first token, was found hung, or gave an answer after
//! which another engine may serve the request (`elsewhere.rs`). Once the client has a token of a
//! stream, another engine may only continue it (`go_on.rs`); once it has a byte of another
//! response, no attempt follows. If no other backend can take the request, the client gets the last
//! response.
//!
//! A reused connection that closes before any byte is the keep-alive race (vLLM closes idle
//! connections after 5 s), not a fault: the next attempt uses a new connection to the same backend.
//! The first delivery still counts as an attempt, because the engine may have read the request and
//! died of it. The second does not count if no connection was established, because no engine has
//! seen it. Only a move to another engine (`moves.rs`), a continuation (`go_on.rs`) and a fall back
//! from an arm (`fall_back.rs`) may exceed `retry.attempts`.

mod address;
mod copy;
mod count_tokens;
mod deaths;
mod fall_back;
mod go_on;
mod moves;
mod pass_on;

use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::admit::{self, AdmitError};
use super::attempt::{AttemptResult, FailedAttempt, ResponseStart, WaitError, guarded, guarded_work};
use super::continuation::{ContinuationLimits, Seam};
use super::copies::{CopyQueue, PendingCopies};
use super::elsewhere::{Credentials, Elsewhere, EngineAnswer};
use super::exchange::{
    ClientGone, Connection, Downstream, Exchange, ExchangeError, ResponseHead, Upstream, UpstreamRequest,
};
use super::faults;
use super::incoming::IncomingRequest;
use super::prepare::PreparedRequest;
use super::pump::{Pump, ResponseContext, Unfinished};
use super::record::{Outcome, RecordGuard, Recorder, RetryReason, Stage, UpstreamFault};
use super::refused_here::Refused;
use super::respond;
use super::router::Router;
use super::suspects::{BodyHash, Suspects, TurnOf};
use crate::experiment::Assigned;
use crate::pool::{Admission, BackendFault, Lease, Need};
use crate::shares::Shares;
use sluice_core::openai::{EditedBody, NotContinued, Refusal};

pub(super) struct Backends<'a, U> {
    pub(super) admission: &'a Arc<Admission>,
    pub(super) router: &'a Router,
    pub(super) upstream: &'a U,
    /// Cancelled when the gateway aborts all requests.
    pub(super) abort: &'a CancellationToken,
    pub(super) copies: &'a CopyQueue,
    /// Memory in which responses wait for slow clients.
    pub(super) memory: &'a Arc<Shares>,
    pub(super) suspects: &'a Arc<Suspects>,
    pub(super) continuations: &'a Arc<ContinuationLimits>,
}

pub(super) struct Attempts<'a, U> {
    backends: Backends<'a, U>,
    incoming: &'a IncomingRequest,
    prepared: PreparedRequest,
    /// The hash by which a body that kills engines is recognised.
    body: BodyHash,
    /// Engines that died while they served this request.
    deaths: u32,
    /// The request as it is sent; dropped when it can no longer be sent again.
    request: UpstreamRequest,
    made: u32,
    /// Attempts after a stale connection that reached no engine.
    undelivered: u32,
    /// Attempts that ended because the engine does not serve such a request.
    moves: u32,
    /// The model, route or length that the engine of the last attempt does not serve.
    refused: Option<Refused>,
    /// The client has the head of a stream, because comments came before the response.
    is_head_sent: bool,
    /// Copies of the request, which begin when the request has a lease.
    copies: PendingCopies,
    /// The answer that another engine must continue.
    unfinished: Option<Box<Unfinished>>,
    /// The seam between that answer and the response to the next attempt.
    seam: Option<Box<Seam>>,
    first: Option<First>,
    /// The lease of the engine to which the stream moves.
    next: Option<Lease>,
}

/// The request that began an answer, kept for the requests that continue it.
struct First {
    body: EditedBody,
    need: Need,
    /// Tokens of the prompt, if an engine has counted them since.
    prompt: Option<u64>,
}

impl<'a, U: Upstream> Attempts<'a, U> {
    /// Moves path, headers and body out of `incoming`: from here on only the upstream request has
    /// them.
    pub(super) fn new(
        backends: Backends<'a, U>,
        incoming: &'a mut IncomingRequest,
        mut prepared: PreparedRequest,
        assigned: Option<&Assigned>,
    ) -> Self {
        let copies = backends.copies.copies_of(incoming, assigned);
        let body = backends.suspects.hash(&incoming.body);
        incoming.body = Bytes::new();
        let request = UpstreamRequest {
            method: incoming.method.clone(),
            path: prepared.path.take().unwrap_or_else(|| std::mem::take(&mut incoming.path)),
            headers: std::mem::take(&mut incoming.headers),
            body: std::mem::take(&mut prepared.body),
            session: None,
            body_without_arm: prepared.body_without_arm.take(),
        };
        Self {
            backends,
            incoming,
            prepared,
            body,
            deaths: 0,
            request,
            made: 0,
            undelivered: 0,
            moves: 0,
            refused: None,
            is_head_sent: false,
            copies,
            unfinished: None,
            seam: None,
            first: None,
            next: None,
        }
    }

    /// Makes attempts until the request is over. An error is a refusal that has not been sent.
    pub(super) async fn run<D: Downstream, R: Recorder>(
        &mut self,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<(), Refusal> {
        self.check_body(record)?;
        if self.wait_for_turn(TurnOf::Whole, down, record).await == Err(ClientGone) {
            return Ok(());
        }
        let mut lease = match self.lease(down, record).await {
            Ok(lease) => lease,
            Err(AdmitError::ClientGone) => return Ok(()),
            Err(AdmitError::Refused(limit)) => return Err(Refusal::ExceedsBackend(limit)),
            Err(AdmitError::Unserved) => return Err(self.unserved(record)),
            Err(AdmitError::Shed { reason, home }) => {
                let room_in = self.backends.admission.retry_after(home, Instant::now());
                return Err(respond::shed(reason, room_in, record));
            }
        };
        self.backends.copies.send(&mut self.copies);
        loop {
            let result = self.attempt(&mut lease, down, record).await;
            self.note_end(&result, &lease, record).await;
            let failed = match result {
                AttemptResult::Finished => return Ok(()),
                AttemptResult::Failed(failed) => failed,
            };
            if self.unfinished.is_some() {
                match Box::pin(self.go_on(*failed, lease, down, record)).await {
                    Some(next) => lease = next,
                    None => return Ok(()),
                }
                continue;
            }
            if self.backends.abort.is_cancelled() {
                return Err(respond::shut_down(record));
            }
            self.refused = self.refused.or(failed.lacks);
            let unknown_model = is_unknown_model(&failed);
            // The same engine may serve the request under the client's model name.
            let has_other_model = self.prepared.arm.as_ref().is_some_and(|arm| arm.model.is_some());
            if !(unknown_model && has_other_model) {
                self.avoid(&lease);
            }
            // Released before the next wait, because two requests that each kept a slot while
            // waiting for the other's backend would deadlock.
            let refused = self.refused.take();
            let goes_on = match refused {
                Some(refused) => self.moves_on(refused, &lease),
                None => self.may_try_again(),
            };
            let place = lease.place();
            lease.release_failed();
            let released = failed.response.is_some().then_some(lease);
            // Falling back is one more attempt, so a request in an arm fails only if it also fails
            // without the arm.
            let in_arm = self.prepared.arm.is_some();
            let is_over = (unknown_model && in_arm) || !goes_on;
            if self.is_suspended() || (is_over && !self.fall_back(record)) {
                return Box::pin(self.give_up(*failed, released, down, record)).await;
            }
            if self.wait_for_turn(TurnOf::Whole, down, record).await == Err(ClientGone) {
                return Ok(());
            }
            lease = match self.lease(down, record).await {
                Ok(lease) => lease,
                Err(AdmitError::ClientGone) => return Ok(()),
                Err(error) => {
                    if let Some(refusal) = self.shed_until_later(refused, error, record) {
                        return Err(refusal);
                    }
                    return Box::pin(self.give_up(*failed, released, down, record)).await;
                }
            };
            record.retried(failed.reason, place);
        }
    }

    /// Later attempts leave out all ranks of the leased backend's server, or only the leased
    /// backend if the server lacks its rank.
    fn avoid(&mut self, lease: &Lease) {
        let avoid = &mut self.prepared.placed.request.avoid;
        match self.refused {
            Some(Refused::Rank) => avoid.push(lease.backend()),
            _ => avoid.extend(lease.server()),
        }
    }

    fn may_try_again(&self) -> bool {
        self.made - self.moves - self.undelivered < self.prepared.placed.table.config.retry.attempts
    }

    /// Waits for a lease on a backend that has not failed this request, in the pools where the
    /// request is placed.
    async fn lease_as_placed<D: Downstream, R: Recorder>(
        &mut self,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<Lease, AdmitError> {
        let begun = Instant::now();
        record.begin_wait();
        let placed = &mut self.prepared.placed;
        if self.made > 0 {
            placed.request.since = begun;
        }
        let model = record.model.as_deref().filter(|_| self.prepared.arm.is_none());
        let Backends { admission, router, abort, .. } = self.backends;
        let admitted = admit::admit(admission, router, abort, placed, model, down).await;
        record.queue_wait += begun.elapsed();
        // A reload may have moved the request.
        record.set_home(self.prepared.placed.home());
        let mut lease = admitted?;
        note_lease(&mut lease, record);
        Ok(lease)
    }

    /// One attempt on the leased backend; two if the first one met a stale connection.
    async fn attempt<D: Downstream, R: Recorder>(
        &mut self,
        lease: &mut Lease,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> AttemptResult<U::Exchange> {
        let PreparedRequest { placed, stream, .. } = &self.prepared;
        let timeout = placed.table.first_byte(*stream, placed.request.need.prompt_tokens);
        let deadline = Instant::now() + timeout;
        // A continuation must not meet a stale connection, because a client waits in the middle of
        // an answer.
        let mut connection = if self.unfinished.is_some() { Connection::New } else { Connection::Any };
        record.is_lost = false;
        let mut response = loop {
            self.made += 1;
            self.address_to(lease);
            record.begin_attempt(self.made, &mut self.request.headers);
            self.request.session = lease.session();
            match self.send(connection, deadline, lease, down, record).await {
                Ok(response) => {
                    record.is_lost = false;
                    break response;
                }
                Err(WaitError::Stale) if connection == Connection::Any && self.may_try_again() => {
                    record.is_lost = true;
                    record.retried(RetryReason::StaleConnection, lease.place());
                    connection = Connection::New;
                }
                Err(error) => {
                    let is_refused = matches!(error, WaitError::Broken(ExchangeError::Connect(_)));
                    self.undelivered += u32::from(record.is_lost && is_refused);
                    record.is_lost |= matches!(error, WaitError::Broken(ExchangeError::Closed(_)));
                    return error.into_result(lease, &record.request_id);
                }
            }
        };
        let is_read = match self.read_refusal(&mut response, down, lease).await {
            Ok(is_read) => is_read,
            Err(error) => return error.into_result(lease, &record.request_id),
        };
        let (status, credentials) = (response.head.status, self.credentials(lease));
        let elsewhere =
            EngineAnswer { status, read: is_read.then_some(&*response.read), error: None, credentials }.elsewhere();
        if elsewhere.is_some() || self.lacks_model(status) {
            let (reason, outcome) = self.note_elsewhere(elsewhere, status, lease, &record.request_id);
            // A client with a valid key must not get a 401 that is about the gateway's key.
            let kept = elsewhere != Some(Elsewhere::GatewayRefused) && !self.is_head_sent;
            let response = kept.then_some(*response);
            return AttemptResult::Failed(Box::new(FailedAttempt {
                response,
                ..*FailedAttempt::boxed(reason, outcome)
            }));
        }
        // After the head of a stream only another stream can follow.
        if self.is_head_sent && (!response.head.is_event_stream() || response.head.is_coded()) {
            let why_not = status.is_client_error().then_some(NotContinued::Refused);
            let outcome = Outcome::UpstreamError(UpstreamFault::Status);
            let failed = FailedAttempt { why_not, ..*FailedAttempt::boxed(RetryReason::Status, outcome) };
            return AttemptResult::Failed(Box::new(failed));
        }
        // The usage that the gateway requested could not be removed from a compressed stream.
        if response.head.is_event_stream() && response.head.is_coded() && self.prepared.injected.is_some() {
            let error =
                ExchangeError::Malformed("the stream is compressed, although Accept-Encoding was identity".to_owned());
            return WaitError::Broken(error).into_result(lease, &record.request_id);
        }
        self.pass_on(response, (deadline, credentials), lease, down, record).await
    }

    /// Reports to the backend's health what the answer shows. Returns the reason for another
    /// attempt, and the outcome if there is none.
    fn note_elsewhere(
        &mut self,
        elsewhere: Option<Elsewhere>,
        status: StatusCode,
        lease: &Lease,
        request_id: &str,
    ) -> (RetryReason, Outcome) {
        if elsewhere.is_some_and(Elsewhere::is_fault) {
            let why = format_args!("status {}", status.as_u16());
            faults::report(lease, BackendFault::Response, request_id, &why, Instant::now());
        }
        match elsewhere {
            Some(Elsewhere::NotServed(refused)) => {
                self.refused = Some(refused);
                (RetryReason::NotServed, Outcome::Refused)
            }
            Some(Elsewhere::Limited | Elsewhere::Forbidden) => (RetryReason::Status, Outcome::Refused),
            Some(Elsewhere::GatewayRefused) => {
                faults::report_refused(lease, status.as_u16(), request_id, Instant::now());
                (RetryReason::Status, Outcome::UpstreamError(UpstreamFault::Credentials))
            }
            _ => (RetryReason::Status, Outcome::UpstreamError(UpstreamFault::Status)),
        }
    }

    fn credentials(&self, lease: &Lease) -> Credentials {
        let replaced = lease.address().api_key.is_some() || self.incoming.key.is_some();
        if replaced { Credentials::Gateway } else { Credentials::Client }
    }

    async fn send<D: Downstream, R: Recorder>(
        &self,
        connection: Connection,
        deadline: Instant,
        lease: &mut Lease,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<Box<ResponseStart<U::Exchange>>, WaitError> {
        let mut exchange = {
            let sending = pin!(async {
                let sent = self.backends.upstream.send(lease.address(), &self.request, connection).await;
                sent.map_err(WaitError::Broken)
            });
            guarded(sending, down, lease, (deadline, Stage::Send)).await?
        };
        record.connect_time += exchange.connect_time();
        record.sent();
        let sent = Instant::now();
        let head = self.wait_for_head(&mut exchange, lease, down, sent, deadline).await?;
        // Boxed: it would be in the state of three futures.
        Ok(Box::new(ResponseStart { exchange, head, sent, read: Bytes::new() }))
    }

    /// Waits for the head. A response that is not streamed shows no first token, so the prefill
    /// share of the lease is returned at the time at which the prefill should be over.
    async fn wait_for_head<D: Downstream>(
        &self,
        exchange: &mut U::Exchange,
        lease: &mut Lease,
        down: &mut D,
        sent: Instant,
        deadline: Instant,
    ) -> Result<Box<ResponseHead>, WaitError> {
        let prefilled = sent + lease.prefill_time();
        if !self.prepared.stream && prefilled < deadline {
            match guarded_work(pin!(head_of(exchange)), down, lease, prefilled).await {
                Err(WaitError::TimedOut(_)) => lease.first_token(),
                other => return other,
            }
        }
        guarded_work(pin!(head_of(exchange)), down, lease, deadline).await
    }

    /// Ends a request that no other backend can take: passes on the last backend's response, or
    /// refuses if there is none.
    async fn give_up<D: Downstream, R: Recorder>(
        &self,
        failed: FailedAttempt<U::Exchange>,
        released: Option<Lease>,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<(), Refusal> {
        let retry_after = self.backends.admission.retry_after(self.prepared.placed.home().id, Instant::now());
        let refusal = failed.refusal(respond::whole_seconds(retry_after));
        record.outcome = failed.outcome;
        let (Some(response), Some(mut lease)) = (failed.response, released) else { return Err(refusal) };
        let now = Instant::now();
        let deadline = now + self.prepared.placed.table.timeouts().idle;
        let times = (now, deadline);
        let context = response_context(self.incoming, &self.prepared, &self.backends, &lease, times);
        let mut request = UpstreamRequest::default();
        let mut is_head_sent = self.is_head_sent;
        let ResponseStart { exchange, head, read, .. } = response;
        let mut pump = Pump::new(head, context, &mut request, &mut lease, record, &mut is_head_sent);
        match pump.run(&mut Some(exchange), read, down).await {
            AttemptResult::Finished => Ok(()),
            AttemptResult::Failed(_) => Err(refusal),
        }
    }
}

fn note_lease<R: Recorder>(lease: &mut Lease, record: &mut RecordGuard<'_, R>) {
    lease.set_origin(record.origin);
    if let Some(trial) = &record.trial {
        trial.delivered(lease.backend(), Instant::now());
    }
    record.pool = Some(Arc::clone(lease.pool_name()));
    record.backend = Some(Arc::clone(lease.name()));
    record.expected_cached = lease.expected_cached();
}

/// Whether the engine does not know the model name that was sent.
fn is_unknown_model<X>(failed: &FailedAttempt<X>) -> bool {
    failed.response.as_ref().is_some_and(|response| response.head.status == StatusCode::NOT_FOUND)
}

async fn head_of<X: Exchange>(exchange: &mut X) -> Result<Box<ResponseHead>, WaitError> {
    match exchange.head().await {
        Ok(head) => Ok(Box::new(head)),
        Err(ExchangeError::Closed(_)) if exchange.reused() => Err(WaitError::Stale),
        Err(error) => Err(WaitError::Broken(error)),
    }
}

fn response_context<'a, U>(
    incoming: &'a IncomingRequest,
    prepared: &'a PreparedRequest,
    backends: &Backends<'a, U>,
    lease: &Lease,
    (sent, deadline): (Instant, Instant),
) -> ResponseContext<'a> {
    ResponseContext {
        incoming,
        prepared,
        sent,
        deadline,
        prompt_tokens: prepared.placed.request.need.prompt_tokens,
        prefilled: (prepared.prompts > 1).then(|| sent + lease.prefill_time()),
        credentials: None,
        abort: backends.abort,
        memory: backends.memory,
        continuations: backends.continuations,
    }
}
