//! The answer: bytes from the backend to the client, metered as they go by and watched from both ends.
//!
//! What is ready is forwarded in one write and nothing is waited for; a chunk is looked at once. The
//! head is kept until the first body bytes are there: vLLM sends its 200 before a request has even been
//! queued, and an engine that fails between the two can still be replaced by another.
//!
//! At the first token the lease's prefill share goes back. An answer that breaks after bytes have
//! reached the client ends with an SSE `error` event and a closed connection; never with a fake finish.
//! A client that leaves makes the exchange drop, which closes the upstream connection and so tells the
//! engine to abort.
//!
//! Bounds: one chunk buffer of at most what the upstream side coalesces; the silence of the backend by
//! `timeouts.idle`; the patience with a client that does not read by the downstream side.

use std::pin::pin;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use tokio::time::{Instant, sleep_until};

use super::exchange::{ClientGone, Downstream, Exchange, ResponseHead, UpstreamRequest};
use super::forward::{AttemptResult, Failed};
use super::prepare::{Feedback, InjectedUsage};
use super::record::{Outcome, RecordGuard, Recorder, RetryReason, Stage, UpstreamFault};
use super::respond;
use super::response_meter::{self, ResponseMeter};
use crate::pool::{BackendFault, Lease};
use sluice_core::meter::{Forward, Objectives, Strip};
use sluice_core::openai::Route;
use sluice_core::openai::error::{StreamFailure, sse_error_event};

/// What the pump needs to know of its request.
#[derive(Clone, Copy)]
pub(super) struct ResponseContext<'a> {
    pub(super) route: Route,
    pub(super) arrived: Instant,
    /// When the request had been sent upstream.
    pub(super) sent: Instant,
    /// Where the first byte must have come.
    pub(super) deadline: Instant,
    pub(super) injected: InjectedUsage,
    pub(super) prompt_tokens: u64,
    pub(super) lesson: &'a Feedback,
    pub(super) idle: Duration,
    pub(super) objectives: &'a Objectives,
}

/// What came next from the backend, or instead of it.
enum Next {
    Bytes,
    End,
    Broken,
    ClientGone,
    Hung,
    Silent,
}

/// The state of one answer on its way.
pub(super) struct Pump<'a, 'r, D, R: Recorder> {
    passage: ResponseContext<'a>,
    answer: ResponseMeter,
    /// Not sent yet.
    head: Option<ResponseHead>,
    /// What was sent upstream; let go when it can no longer be sent again.
    call: &'a mut UpstreamRequest,
    status: StatusCode,
    lease: &'a mut Lease,
    down: &'a mut D,
    record: &'a mut RecordGuard<'r, R>,
    prefilling: bool,
}

fn strip(injected: InjectedUsage) -> Strip {
    match injected {
        InjectedUsage::Nothing => Strip::Nothing,
        InjectedUsage::Final => Strip::InjectedUsage,
        InjectedUsage::Continuous { keep_final } => Strip::Continuous { keep_final },
    }
}

impl<'a, 'r, D: Downstream, R: Recorder> Pump<'a, 'r, D, R> {
    pub(super) fn new(
        mut head: ResponseHead,
        passage: ResponseContext<'a>,
        call: &'a mut UpstreamRequest,
        lease: &'a mut Lease,
        down: &'a mut D,
        record: &'a mut RecordGuard<'r, R>,
    ) -> Self {
        let status = head.status;
        let kind = head.headers.get(CONTENT_TYPE);
        let events = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        let answer = if events && status.is_success() {
            if passage.injected != InjectedUsage::Nothing {
                head.headers.remove(CONTENT_LENGTH);
            }
            ResponseMeter::stream(passage.route, passage.arrived, strip(passage.injected))
        } else {
            ResponseMeter::body(passage.arrived)
        };
        lease.record_progress(Instant::now());
        Self { passage, answer, head: Some(head), call, status, lease, down, record, prefilling: true }
    }

    /// Passes the answer on. `Again` only while nothing has reached the client.
    pub(super) async fn run<X: Exchange>(&mut self, exchange: &mut X) -> AttemptResult<X> {
        let mut chunk = BytesMut::new();
        // The first byte has its own deadline; after it, silence is measured from byte to byte.
        let mut limit = self.passage.deadline;
        let mut timer = pin!(sleep_until(limit));
        loop {
            let next = tokio::select! {
                biased;
                read = exchange.body(&mut chunk) => match read {
                    Ok(true) => Next::Bytes,
                    Ok(false) => Next::End,
                    Err(error) => {
                        tracing::debug!(backend = %self.lease.name(), %error, "answer broke off");
                        Next::Broken
                    }
                },
                () = self.down.gone() => Next::ClientGone,
                () = self.lease.hang_token().cancelled() => Next::Hung,
                () = &mut timer => {
                    // The timer is set anew only when it fires: a chunk costs no timer operation.
                    if limit > Instant::now() {
                        timer.as_mut().reset(limit);
                        continue;
                    }
                    Next::Silent
                }
            };
            let now = Instant::now();
            match next {
                Next::Bytes => {
                    let Some((forward, last)) = self.look(chunk.split().freeze(), exchange.at_end(), now) else {
                        return self.again(RetryReason::InStream, UpstreamFault::InStream);
                    };
                    // Without bytes the head waits for them: until then another backend may take over.
                    if !forward.is_empty() && self.send(forward, last).await == Err(ClientGone) {
                        return self.client_gone(now);
                    }
                    // Time that the client takes to read is not the backend's silence.
                    limit = Instant::now() + self.passage.idle;
                    // Only the first byte's deadline can lie behind this one: at most one timer operation more.
                    if limit < timer.deadline() {
                        timer.as_mut().reset(limit);
                    }
                }
                Next::End => return self.end(now).await,
                Next::ClientGone => return self.client_gone(now),
                interrupted => return self.interrupted(interrupted, now).await,
            }
        }
    }

    /// Meters a chunk; returns what goes to the client of it, and whether that is the last of the answer. Nothing when
    /// the engine refused in the stream before anything was sent.
    fn look(&mut self, chunk: Bytes, last: bool, now: Instant) -> Option<(Forward, bool)> {
        self.lease.record_progress(now);
        let forward = self.answer.feed(chunk, now);
        if self.prefilling && self.answer.has_content() {
            self.first_token(now);
        }
        if self.head.is_some() && self.answer.is_busy_before_content() {
            return None;
        }
        // A stream that ends without saying so gets an error event behind its last bytes.
        Some((forward, last && (!self.answer.is_stream() || self.answer.is_done())))
    }

    fn first_token(&mut self, now: Instant) {
        self.prefilling = false;
        self.lease.first_token();
        if self.answer.is_stream() {
            let ttft = now.saturating_duration_since(self.passage.sent);
            self.record.backend_ttft = Some(ttft);
            self.lease.observe(Some((self.passage.prompt_tokens, ttft)), None);
        }
    }

    /// Sends what there is, behind the head if that has not been sent.
    async fn send(&mut self, forward: Forward, last: bool) -> Result<(), ClientGone> {
        let _not_the_backends_silence = self.lease.client_wait();
        if let Some(mut head) = self.head.take() {
            respond::add_ours(&mut head.headers, self.record);
            self.record.status = Some(head.status);
            self.down.head(head).await?;
            *self.call = UpstreamRequest::default();
        }
        let count = forward.len();
        for (index, piece) in forward.into_iter().enumerate() {
            self.down.body(piece, last && index + 1 == count).await?;
        }
        Ok(())
    }

    /// The backend's answer is at its end.
    async fn end<X>(&mut self, now: Instant) -> AttemptResult<X> {
        if self.answer.is_stream() && !self.answer.is_done() && self.answer.error().is_none() {
            // The connection ended in order but the stream did not: the engine was stopped under it.
            return self.interrupted(Next::Broken, now).await;
        }
        let tail = self.answer.finish(now);
        let sent = match self.send(tail, true).await {
            Ok(()) => {
                let _not_the_backends_silence = self.lease.client_wait();
                self.down.finish().await
            }
            Err(gone) => Err(gone),
        };
        self.record.outcome = self.verdict();
        match self.record.outcome {
            Outcome::UpstreamError(_) if self.is_judged() => {}
            Outcome::UpstreamError(_) => self.lease.failure(BackendFault::Response, now),
            _ => self.lease.success(),
        }
        // A client that closes as soon as it has the last event has it all.
        if sent.is_err() && !self.answer.is_stream() {
            self.record.outcome = Outcome::ClientGone;
        }
        self.account();
        AttemptResult::Over
    }

    fn verdict(&self) -> Outcome {
        if self.status.is_client_error() {
            return Outcome::Refused;
        }
        if !self.status.is_success() {
            return Outcome::UpstreamError(UpstreamFault::Status);
        }
        match self.answer.error() {
            Some(error) if response_meter::is_clients_fault(error) => Outcome::Refused,
            Some(_) => Outcome::UpstreamError(UpstreamFault::InStream),
            None => Outcome::Completed,
        }
    }

    /// Not to be held against the backend here: its own admission control speaking, which is a reason to go elsewhere
    /// and no fault, or a 502, which was counted when it came.
    fn is_judged(&self) -> bool {
        matches!(self.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::BAD_GATEWAY)
            || self.answer.error().is_some_and(response_meter::is_busy)
    }

    fn client_gone<X>(&mut self, now: Instant) -> AttemptResult<X> {
        let whole = self.answer.is_done();
        let _ = self.answer.finish(now);
        self.record.outcome = if whole { Outcome::Completed } else { Outcome::ClientGone };
        self.account();
        AttemptResult::Over
    }

    fn again<X>(&self, reason: RetryReason, fault: UpstreamFault) -> AttemptResult<X> {
        AttemptResult::Again(Failed { reason, outcome: Outcome::UpstreamError(fault), answer: None })
    }

    /// The answer cannot be completed: elsewhere if nothing was sent, else said in the stream.
    async fn interrupted<X>(&mut self, why: Next, now: Instant) -> AttemptResult<X> {
        let first = self.head.is_some();
        let (reason, outcome, failure) = match why {
            Next::Hung => (RetryReason::Hung, Outcome::UpstreamError(UpstreamFault::Hung), StreamFailure::UpstreamIdle),
            Next::Silent => {
                self.lease.failure(BackendFault::Timeout, now);
                let stage = if first { Stage::FirstByte } else { Stage::Idle };
                (RetryReason::Timeout, Outcome::Timeout(stage), StreamFailure::UpstreamIdle)
            }
            _ => {
                self.lease.failure(BackendFault::Response, now);
                (RetryReason::Broken, Outcome::UpstreamError(UpstreamFault::Broken), StreamFailure::UpstreamBroke)
            }
        };
        if first {
            return AttemptResult::Again(Failed { reason, outcome, answer: None });
        }
        self.record.outcome = outcome;
        if self.answer.is_stream() {
            let tail = self.answer.finish(now);
            if self.send(tail, false).await.is_ok() {
                let event = sse_error_event(failure, self.passage.route.error_format());
                let _ = self.down.body(Bytes::from(event), false).await;
            }
        }
        self.down.abort();
        self.account();
        AttemptResult::Over
    }

    /// What was measured goes into the record, and what it teaches to those who learn.
    fn account(&mut self) {
        let stats = self.answer.stats();
        let completed = self.record.outcome == Outcome::Completed;
        if completed && let Some(tpot) = stats.tpot {
            self.lease.observe(None, Some(tpot));
        }
        if completed && let Some(prompt_tokens) = stats.usage.prompt {
            self.passage.lesson.learn(prompt_tokens, stats.usage.completion);
        }
        if !self.passage.objectives.is_empty() && self.record.outcome != Outcome::ClientGone {
            self.record.slo_met = Some(self.passage.objectives.met(completed, &stats.timings()));
        }
        self.record.stats = Some(stats);
    }
}
