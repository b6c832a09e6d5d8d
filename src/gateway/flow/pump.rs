//! Forwards the response from the backend to the client, and measures it on the way.
//!
//! All bytes that are ready are forwarded in one write, and the pump never waits for more. Except at the beginning of a stream:
//! the head, and the preamble of events that are no output (comments, a role, `response.created`), are held until the first
//! token arrives and leave with it. vLLM sends its 200 before the request is even queued, and until the first token another
//! backend can still take over, without a trace of the first one in the response. Comments that keep the connection alive say
//! nothing of a response: they are passed on at once, behind the head of the first backend that sends one.
//!
//! At the first token the prefill share of the lease is returned. With several prompts, the first token of one says nothing
//! about the others, so the share is returned when the prefill of all should be over. A response that breaks after bytes
//! have reached the client ends with an SSE `error` event and a closed connection, never as if it were complete. When the
//! client disconnects, the exchange is dropped. That closes the upstream connection, and the engine aborts the request.
//!
//! Bounds: one chunk buffer, no larger than what the upstream side gathers; the preamble by [`PREAMBLE_MAX`] and the length of the
//! request, which engines repeat in it; how long a stream may be without a token by `stream_work.rs`; the downstream side limits
//! how long a client may not read.

mod before_token;

use std::fmt::Display;
use std::pin::{Pin, pin};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use super::attempt::AttemptResult;
use super::elsewhere::Credentials;
use super::exchange::{ClientGone, Downstream, Exchange, ExchangeError, ResponseHead, UpstreamRequest};
use super::faults;
use super::feedback::{Feedback, InjectedUsage};
use super::record::{Outcome, RecordGuard, Recorder, RetryReason, Stage, UpstreamFault, engine_refusal};
use super::respond;
use super::response_meter::{ResponseMeter, is_busy, is_client_error};
use super::stream_work::{SilenceLimits, SilenceTimer, WorkClock};
use crate::pool::{BackendFault, Lease};
use sluice_core::meter::{Forward, Objectives};
use sluice_core::openai::Route;
use sluice_core::openai::error::{StreamFailure, sse_error_event};

/// A client that takes longer to accept a chunk reads slower than the engine writes.
const CLIENT_WAIT: Duration = Duration::from_millis(20);

/// Bytes of a stream before its first token that are held, beside [`PREAMBLE_PER_REQUEST`] times those of the request. A longer
/// preamble is passed on, and no other backend takes over from then on.
const PREAMBLE_MAX: usize = 64 << 10;
/// `response.created` and `response.in_progress` repeat the request, whose text may grow by escapes.
const PREAMBLE_PER_REQUEST: usize = 4;

/// The request that a response belongs to, as far as the pump needs it.
#[derive(Clone, Copy)]
pub(super) struct ResponseContext<'a> {
    pub(super) route: Route,
    pub(super) arrived: Instant,
    /// When the request had been sent upstream.
    pub(super) sent: Instant,
    /// When the first token of a stream, or the first byte of another response, is due.
    pub(super) deadline: Instant,
    pub(super) injected: InjectedUsage,
    pub(super) prompt_tokens: u64,
    /// With several prompts: the first token of one may come long before the prefill of another.
    pub(super) prefilled: Option<Instant>,
    pub(super) feedback: &'a Feedback,
    pub(super) limits: SilenceLimits,
    pub(super) objectives: &'a Objectives,
    /// Whose credentials the engine has seen. `None`: no other engine can take the request, so that the response goes to the
    /// client whatever it says, and its fault was counted before.
    pub(super) credentials: Option<Credentials>,
    /// Cancelled when the gateway aborts all requests.
    pub(super) abort: &'a CancellationToken,
}

/// The next thing to happen to a response.
enum PumpEvent {
    Bytes,
    End,
    ClientGone,
    /// Nothing came for as long as was to be waited.
    Quiet,
    Interrupted(Interruption),
}

/// Why the backend does not complete a response.
enum Interruption {
    Broken(ExchangeError),
    /// The body ended in order, but a choice has no finish reason: the engine was stopped.
    Unfinished,
    Hung,
    Silent,
    /// The gateway stops, and its drain time is over.
    Stopping,
}

/// A response that is being passed on.
pub(super) struct Pump<'a, 'r, D, R: Recorder> {
    context: ResponseContext<'a>,
    meter: ResponseMeter,
    /// Held until the first token of a stream, or the first bytes of another body.
    head: Option<ResponseHead>,
    /// Whether the client has a head already, for the comments of this backend or of one before it.
    is_head_sent: &'a mut bool,
    /// What came of the stream while the head is held.
    preamble: Vec<u8>,
    preamble_max: usize,
    /// Events that showed work, and tokens, that have been seen.
    seen: (u64, u64),
    /// Dropped when a retry is no longer possible.
    request: &'a mut UpstreamRequest,
    status: StatusCode,
    lease: &'a mut Lease,
    down: &'a mut D,
    record: &'a mut RecordGuard<'r, R>,
    prefilling: bool,
}

impl<'a, 'r, D: Downstream, R: Recorder> Pump<'a, 'r, D, R> {
    pub(super) fn new(
        mut head: ResponseHead,
        context: ResponseContext<'a>,
        request: &'a mut UpstreamRequest,
        lease: &'a mut Lease,
        down: &'a mut D,
        record: &'a mut RecordGuard<'r, R>,
        is_head_sent: &'a mut bool,
    ) -> Self {
        let status = head.status;
        let meter = if head.is_event_stream() && !head.is_coded() {
            if context.injected != InjectedUsage::Nothing {
                head.headers.remove(CONTENT_LENGTH);
            }
            ResponseMeter::stream(context.route, context.arrived, context.injected.strip())
        } else {
            ResponseMeter::body(context.arrived)
        };
        // The head of a stream says nothing of the engine: vLLM's API server sends it before the engine has begun.
        if !meter.is_stream() {
            lease.record_progress(Instant::now());
        }
        let preamble_max = PREAMBLE_MAX + PREAMBLE_PER_REQUEST * request.body.len();
        Self {
            context,
            meter,
            head: Some(head),
            is_head_sent,
            preamble: Vec::new(),
            preamble_max,
            seen: (0, 0),
            request,
            status,
            lease,
            down,
            record,
            prefilling: true,
        }
    }

    /// Passes the response on. `Failed` only while nothing has reached the client. `read`: bytes of the body that were read
    /// before.
    pub(super) async fn run<X: Exchange>(&mut self, exchange: &mut X, read: Bytes) -> AttemptResult<X> {
        let mut chunk = BytesMut::from(read);
        let mut silence =
            SilenceTimer { limit: self.context.deadline, timer: pin!(sleep_until(self.context.deadline)) };
        let mut clock = WorkClock::new(self.context.sent, self.context.deadline, self.context.limits);
        // One future for all chunks: a new one for each would enter and leave the token's list of waiters.
        let token = self.lease.abort_token().clone();
        let mut aborted = pin!(token.cancelled());
        loop {
            let event = match chunk.is_empty() {
                true => self.next_event(exchange, &mut chunk, aborted.as_mut(), &mut silence).await,
                false => PumpEvent::Bytes,
            };
            let now = Instant::now();
            match event {
                PumpEvent::Bytes => {
                    let events = if self.head.is_some() { self.meter.events_between() } else { None };
                    let (mut forward, progress) = self.measure(chunk.split().freeze(), now);
                    if events.is_some() && events == self.meter.events_between() && self.may_send_comments(&forward) {
                        if self.send_comments(forward).await == Err(ClientGone) {
                            return self.client_gone(now);
                        }
                        continue;
                    }
                    if self.head.is_some() {
                        forward = match self.hold(forward, now) {
                            Ok(forward) => forward,
                            Err(failed) => return AttemptResult::Failed(failed),
                        };
                    }
                    // Whether a stream without its end marker is complete is decided at its end.
                    let last = exchange.at_end() && (!self.meter.is_stream() || self.meter.is_done());
                    if !forward.is_empty() && self.send(forward, last).await == Err(ClientGone) {
                        return self.client_gone(now);
                    }
                    let sent = Instant::now();
                    if sent.saturating_duration_since(now) > CLIENT_WAIT {
                        self.lease.fell_behind();
                    }
                    // Counted from now: the time that the client took to read is not the backend's silence.
                    silence.set_limit(match self.meter.is_stream() {
                        true => clock.events(self.meter.stage(), progress, sent),
                        false => clock.bytes(sent),
                    });
                }
                PumpEvent::Quiet => match clock.look(now, || self.lease.watch_engine(now)) {
                    Some(next) => silence.set_limit(next),
                    None => return self.interrupted(Interruption::Silent, now).await,
                },
                PumpEvent::End => return self.end(now).await,
                PumpEvent::ClientGone => return self.client_gone(now),
                PumpEvent::Interrupted(why) => return self.interrupted(why, now).await,
            }
        }
    }

    /// Waits for bytes, the end of the response, or what ends it early.
    async fn next_event<X: Exchange>(
        &mut self,
        exchange: &mut X,
        chunk: &mut BytesMut,
        aborted: Pin<&mut WaitForCancellationFuture<'_>>,
        silence: &mut SilenceTimer<'_>,
    ) -> PumpEvent {
        tokio::select! {
            biased;
            read = exchange.body(chunk) => match read {
                Ok(true) => PumpEvent::Bytes,
                Ok(false) => PumpEvent::End,
                Err(error) => PumpEvent::Interrupted(Interruption::Broken(error)),
            },
            () = self.down.gone() => PumpEvent::ClientGone,
            () = aborted => PumpEvent::Interrupted(self.why_aborted()),
            () = silence.expired() => PumpEvent::Quiet,
        }
    }

    fn why_aborted(&self) -> Interruption {
        if self.context.abort.is_cancelled() { Interruption::Stopping } else { Interruption::Hung }
    }

    /// Meters a chunk; returns what goes to the client, and whether it shows that the engine works.
    fn measure(&mut self, chunk: Bytes, now: Instant) -> (Forward, bool) {
        let forward = self.meter.feed(chunk, now);
        let seen = self.meter.progress();
        // A long event may take longer than the silence that is allowed.
        let progress = seen.0 != self.seen.0 || self.meter.is_inside_event();
        if progress {
            self.lease.record_progress(now);
            self.lease.record_tokens(seen.1.saturating_sub(self.seen.1));
            self.seen = seen;
        }
        if let Some(tokens) = self.meter.prompt_tokens().filter(|tokens| *tokens > self.context.prompt_tokens) {
            // The prompt was longer than estimated: the lease is charged once, while the request still runs.
            self.context.prompt_tokens = tokens;
            self.lease.charge(tokens);
        }
        if self.prefilling && self.meter.has_content() {
            self.first_token(now);
        }
        (forward, progress)
    }

    fn first_token(&mut self, now: Instant) {
        if self.meter.is_stream() && self.record.backend_ttft.is_none() {
            let ttft = now.saturating_duration_since(self.context.sent);
            self.record.backend_ttft = Some(ttft);
            if self.context.prefilled.is_none() {
                self.lease.observe_prefill(self.context.prompt_tokens, ttft, now);
            }
        }
        if self.context.prefilled.is_none_or(|prefilled| prefilled <= now) {
            self.prefilling = false;
            if self.meter.is_stream() {
                self.lease.first_token_seen();
            } else {
                self.lease.first_token();
            }
        }
    }

    /// Sends bytes to the client, behind the head if that was not sent yet.
    async fn send(&mut self, forward: Forward, last: bool) -> Result<(), ClientGone> {
        let _client_wait = self.lease.client_wait();
        if last || self.meter.is_done() {
            self.record.end_in_flight();
        }
        if let Some(head) = self.head.take() {
            respond::send_head(head, self.is_head_sent, self.down, self.record).await?;
            *self.request = UpstreamRequest::default();
            if !self.preamble.is_empty() {
                let preamble = Bytes::from(std::mem::take(&mut self.preamble));
                self.down.body(preamble, last || !forward.is_empty()).await?;
            }
        }
        // The pieces leave in one write, as far as they are gathered below.
        let mut pieces = forward.into_iter().peekable();
        while let Some(piece) = pieces.next() {
            let more = last || pieces.peek().is_some();
            self.down.body(piece, more).await?;
        }
        Ok(())
    }

    /// The backend's response has ended in order.
    async fn end<X>(&mut self, now: Instant) -> AttemptResult<X> {
        self.meter.end_of_body(now);
        if self.head.is_some() && self.meter.is_stream() {
            let tail = self.meter.finish(now);
            tail.iter().for_each(|piece| self.preamble.extend_from_slice(piece));
            if let Some(failed) = self.answered_elsewhere(now) {
                return AttemptResult::Failed(failed);
            }
        }
        if self.meter.is_stream() && !self.meter.is_done() && self.meter.error().is_none() {
            return self.interrupted(Interruption::Unfinished, now).await;
        }
        self.complete(now).await
    }

    /// Sends what is left to the client, and judges the response.
    async fn complete<X>(&mut self, now: Instant) -> AttemptResult<X> {
        let tail = self.meter.finish(now);
        let sent = self.send_last(tail).await;
        self.note_outcome(now);
        // A client that closes as soon as it has the last event has received the whole stream.
        if sent.is_err() && !self.meter.is_stream() {
            self.record.outcome = Outcome::ClientGone;
        }
        self.record_measurements();
        AttemptResult::Finished
    }

    async fn send_last(&mut self, tail: Forward) -> Result<(), ClientGone> {
        self.send(tail, true).await?;
        let _client_wait = self.lease.client_wait();
        self.down.finish().await
    }

    /// Notes how the response of the backend ended, in the record and for the backend's health.
    fn note_outcome(&mut self, now: Instant) {
        self.record.outcome = self.outcome();
        self.note_refusal();
        match self.record.outcome {
            Outcome::UpstreamError(_) if self.is_no_fault() => {}
            Outcome::UpstreamError(UpstreamFault::InStream) => self.fault(&"an error event in the stream", now),
            Outcome::UpstreamError(_) => self.fault(&format_args!("status {}", self.status.as_u16()), now),
            _ => self.lease.success(),
        }
    }

    /// Notes why the engine refused the request, if it did.
    fn note_refusal(&mut self) {
        if self.record.outcome == Outcome::Refused {
            let code = self.meter.error().and_then(|error| error.code).filter(|_| self.status.is_success());
            self.record.refused = Some(engine_refusal(code.unwrap_or(self.status.as_u16())));
        }
    }

    fn outcome(&self) -> Outcome {
        if self.status.is_client_error() {
            return Outcome::Refused;
        }
        if !self.status.is_success() {
            return Outcome::UpstreamError(UpstreamFault::Status);
        }
        match self.meter.error() {
            Some(error) if is_client_error(error) => Outcome::Refused,
            Some(_) => Outcome::UpstreamError(UpstreamFault::InStream),
            None => Outcome::Completed,
        }
    }

    /// Reports a failed response.
    fn fault(&self, why: &dyn Display, now: Instant) {
        faults::report(self.lease, BackendFault::Response, &self.record.request_id, why, now);
    }

    /// Whether an upstream error does not count against the backend here: its own admission control, which is no fault,
    /// or a fault that was counted when the attempt failed.
    fn is_no_fault(&self) -> bool {
        self.context.credentials.is_none() || self.meter.error().is_some_and(is_busy)
    }

    fn client_gone<X>(&mut self, now: Instant) -> AttemptResult<X> {
        let complete = self.meter.is_done();
        let _ = self.meter.finish(now);
        if complete {
            self.note_outcome(now);
        } else {
            self.record.outcome = Outcome::ClientGone;
        }
        self.record_measurements();
        AttemptResult::Finished
    }

    /// The response cannot be completed: another backend if nothing was sent, otherwise an error event in the stream.
    async fn interrupted<X>(&mut self, why: Interruption, now: Instant) -> AttemptResult<X> {
        let nothing_sent = self.head.is_some();
        let (reason, outcome) = match &why {
            // The 4xx counts as the response. An engine that refuses a body without reading it may reset the connection.
            Interruption::Broken(_) | Interruption::Unfinished | Interruption::Silent
                if self.status.is_client_error() =>
            {
                return self.refused_without_body(now).await;
            }
            Interruption::Stopping => (RetryReason::Hung, Outcome::Timeout(Stage::Drain)),
            Interruption::Hung => (RetryReason::Hung, Outcome::UpstreamError(UpstreamFault::Hung)),
            Interruption::Silent => {
                let outcome = Outcome::Timeout(if nothing_sent { Stage::FirstByte } else { Stage::Idle });
                let why = format_args!("timeout ({})", outcome.detail());
                faults::report(self.lease, BackendFault::Timeout, &self.record.request_id, &why, now);
                (RetryReason::Timeout, outcome)
            }
            Interruption::Broken(error) => {
                self.fault(error, now);
                (RetryReason::Broken, Outcome::UpstreamError(UpstreamFault::Broken))
            }
            Interruption::Unfinished => {
                self.fault(&"the stream ended without its end marker", now);
                (RetryReason::Broken, Outcome::UpstreamError(UpstreamFault::Broken))
            }
        };
        if nothing_sent {
            return AttemptResult::failed(reason, outcome);
        }
        self.record.outcome = outcome;
        self.send_error_event(why, now).await;
        self.down.abort();
        self.record_measurements();
        AttemptResult::Finished
    }

    /// Handles a 4xx whose body is incomplete: the status is forwarded, with an empty body if no byte was forwarded yet.
    async fn refused_without_body<X>(&mut self, now: Instant) -> AttemptResult<X> {
        if let Some(head) = &mut self.head {
            head.headers.remove(CONTENT_TYPE);
            head.headers.insert(CONTENT_LENGTH, HeaderValue::from(0));
            return self.complete(now).await;
        }
        self.record.outcome = Outcome::Refused;
        self.note_refusal();
        self.lease.success();
        self.down.abort();
        self.record_measurements();
        AttemptResult::Finished
    }

    async fn send_error_event(&mut self, why: Interruption, now: Instant) {
        if !self.meter.is_stream() {
            return;
        }
        let failure = match why {
            Interruption::Hung | Interruption::Silent => StreamFailure::UpstreamIdle,
            Interruption::Broken(_) | Interruption::Unfinished => StreamFailure::UpstreamBroke,
            Interruption::Stopping => StreamFailure::ShuttingDown,
        };
        let tail = self.meter.finish(now);
        if self.send(tail, false).await.is_ok() {
            let event = sse_error_event(failure, self.context.route.error_format());
            let _ = self.down.body(Bytes::from(event), false).await;
        }
    }

    /// Writes the measurements into the record; the backend's speed and the estimator learn from them.
    fn record_measurements(&mut self) {
        let mut stats = self.meter.stats();
        stats.tpot = stats.tpot_of_one(self.context.feedback.sequences);
        let completed = self.record.outcome == Outcome::Completed;
        let now = Instant::now();
        if completed && let Some(tpot) = stats.tpot {
            let tokens = stats.generated() / u64::from(self.context.feedback.sequences.max(1));
            self.lease.observe_decode(tokens, tpot, now);
        }
        if completed && let Some(prompt_tokens) = stats.usage.prompt {
            self.lease.observe_cached(prompt_tokens, stats.usage.cached);
        }
        self.lease.settle(stats.usage.prompt, stats.usage.cached, stats.generated());
        self.context.feedback.learn(stats.usage, completed, now);
        if completed && self.context.route.generates() && !self.context.objectives.is_empty() {
            let estimate = self.record.estimate.map_or(0, |estimate| estimate.tokens);
            let prompt_tokens = stats.usage.prompt.unwrap_or(estimate);
            self.record.slo_met = Some(self.context.objectives.met(true, prompt_tokens, &stats.timings()));
        }
        self.record.stats = Some(stats);
    }
}
