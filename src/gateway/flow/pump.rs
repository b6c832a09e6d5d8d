//! Forwards the response from the backend to the client, and measures it on the way.
//!
//! All bytes that are ready are measured on arrival and forwarded in one write. While a client does
//! not take a write, the engine is read on into a bounded buffer (`delivery.rs`). When the engine
//! has ended, the lease and the count of the key are returned, and the rest is delivered from the
//! buffer.
//!
//! Until the first token of a stream, head and events without output (a role, `response.created`)
//! are held, so another backend can still take over unnoticed. vLLM sends 200 before the request is
//! even queued. Comments are passed on at once. A response that breaks after bytes have reached the
//! client ends with an SSE `error` event and a closed connection, unless another engine continues
//! it.
//!
//! Bounds: one chunk; the buffer (`parts.rs`); [`PREAMBLE_MAX`] plus [`PREAMBLE_PER_REQUEST`] times
//! the length of the request, which engines repeat before the first token; silence by
//! `stream_work.rs`.

mod parts;
mod engine_side;

mod before_token;
mod delivery;
mod ending;
mod resume;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use http::StatusCode;
use http::header::CONTENT_LENGTH;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::attempt::{AttemptResult, FailedAttempt};
use super::continuation::{ContinuationLimits, KeptMemory, Seam};
use super::elsewhere::Credentials;
use super::exchange::{ClientGone, Downstream, Exchange, ResponseHead, UpstreamRequest};
use super::incoming::IncomingRequest;
use super::prepare::PreparedRequest;
use super::record::{RecordGuard, Recorder};
use super::respond;
use super::response_meter::ResponseMeter;
use super::stream_work::{SilenceLimits, SilenceTimer, WorkClock};
use crate::pool::Lease;
use crate::shares::Shares;
use engine_side::{EngineEvent, EngineSide};
use parts::{Backlog, Delivery, Ending, Interruption, WaitingRoom, deliver};
pub(super) use resume::Unfinished;
use sluice_core::meter::{Forward, StreamMeter, StreamStage};
use sluice_core::openai::NotContinued;
use sluice_core::openai::error::StreamFailure;

/// Bytes of a stream that are held before the first token, in addition to [`PREAMBLE_PER_REQUEST`]
/// times the bytes of the request. A longer preamble is passed on; then no other backend takes
/// over.
const PREAMBLE_MAX: usize = 64 << 10;
/// `response.created` and `response.in_progress` repeat the request, whose text may grow by
/// escapes.
const PREAMBLE_PER_REQUEST: usize = 4;

/// The request of a response, and the times of the attempt.
#[derive(Clone, Copy)]
pub(super) struct ResponseContext<'a> {
    pub(super) incoming: &'a IncomingRequest,
    pub(super) prepared: &'a PreparedRequest,
    /// When the request had been sent upstream.
    pub(super) sent: Instant,
    /// When the first token of a stream, or the first byte of another response, is due.
    pub(super) deadline: Instant,
    pub(super) prompt_tokens: u64,
    /// When the prefill of all prompts should be over, if there are several, because the first
    /// token of one may come long before the prefill of another ends.
    pub(super) prefilled: Option<Instant>,
    /// The owner of the credentials that the engine has seen. `None` if no other engine can take
    /// the request. In that case the response goes to the client whatever it says, and a fault that
    /// it shows was counted before.
    pub(super) credentials: Option<Credentials>,
    pub(super) abort: &'a CancellationToken,
    /// Memory in which responses wait for slow clients.
    pub(super) memory: &'a Arc<Shares>,
    pub(super) continuations: &'a Arc<ContinuationLimits>,
}

impl<'a> ResponseContext<'a> {
    fn room(&self) -> WaitingRoom<'a> {
        WaitingRoom { memory: self.memory, incoming: self.incoming }
    }
}

pub(super) struct Pump<'a, 'r, R: Recorder> {
    context: ResponseContext<'a>,
    meter: ResponseMeter,
    head: Option<Box<ResponseHead>>,
    /// Whether the client already has a head, because comments of this backend or an earlier one
    /// were passed on.
    is_head_sent: &'a mut bool,
    /// Bytes of the stream that are held together with the head.
    preamble: Vec<u8>,
    preamble_max: usize,
    /// Numbers so far: events that showed work, and tokens.
    seen: (u64, u64),
    /// The request, dropped when a retry is no longer possible.
    request: &'a mut UpstreamRequest,
    status: StatusCode,
    lease: &'a mut Lease,
    record: &'a mut RecordGuard<'r, R>,
    prefilling: bool,
    /// The bytes from the engine that the client has not taken yet.
    backlog: Backlog,
    /// The engine was not read for a while, because the backlog was full, so later times say
    /// nothing about the engine.
    is_held_up: bool,
    /// The response was judged and measured, and the lease was returned.
    is_settled: bool,
    /// How the response ends; set when the engine has no more part in it.
    ending: Option<Ending>,
    /// Memory for request and text, while another engine may continue the stream.
    kept: Option<KeptMemory>,
    why_not: Option<NotContinued>,
    /// Set while the engine continues the answer of another one.
    seam: Option<Box<Seam>>,
    /// When the stream may look for room on another engine, once this one leaves service.
    may_move_at: Option<Instant>,
    /// The error that the client gets if no other engine continues the stream and nothing is
    /// withheld.
    failure: StreamFailure,
    /// The bytes from the engine's own error event on, which replace `failure`.
    withheld: Option<Bytes>,
}

impl<'a, 'r, R: Recorder> Pump<'a, 'r, R> {
    pub(super) fn new(
        mut head: Box<ResponseHead>,
        context: ResponseContext<'a>,
        request: &'a mut UpstreamRequest,
        lease: &'a mut Lease,
        record: &'a mut RecordGuard<'r, R>,
        is_head_sent: &'a mut bool,
    ) -> Self {
        let status = head.status;
        let meter = if head.is_event_stream() && !head.is_coded() {
            if context.prepared.injected.is_some() {
                head.headers.remove(CONTENT_LENGTH);
            }
            ResponseMeter::stream(context.incoming.route, context.incoming.arrived, context.prepared.injected.strip())
        } else {
            ResponseMeter::body(context.incoming.route, context.incoming.arrived)
        };
        let meter = meter.within(context.prepared.feedback.bounds.at_engine(lease.max_model_len()));
        // The head of a stream says nothing about the engine: vLLM's API server sends it before the
        // engine has begun.
        if !meter.is_stream() {
            lease.record_progress(Instant::now());
        }
        let preamble_max = PREAMBLE_MAX + PREAMBLE_PER_REQUEST * request.body.len();
        let mut pump = Self {
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
            record,
            prefilling: true,
            backlog: Backlog::default(),
            is_held_up: false,
            is_settled: false,
            ending: None,
            kept: None,
            why_not: None,
            seam: None,
            may_move_at: None,
            failure: StreamFailure::UpstreamBroke,
            withheld: None,
        };
        pump.keep();
        pump
    }

    /// Passes the response on. `Failed`: another engine may serve the request, or continue the
    /// stream if the client has tokens. `read`: bytes of the body that were read before.
    pub(super) async fn run<X: Exchange, D: Downstream>(
        &mut self,
        exchange: &mut Option<X>,
        read: Bytes,
        down: &mut D,
    ) -> AttemptResult<X> {
        let due = self.context.deadline;
        let timer = pin!(sleep_until(due));
        let silence = SilenceTimer { limit: due, timer };
        let timeouts = self.context.prepared.placed.table.timeouts();
        let limits = SilenceLimits { idle: timeouts.idle, silent: timeouts.silent };
        let clock = WorkClock::new(self.context.sent, due, limits);
        // One future for all chunks: a new one for each chunk would enter and leave the token's
        // list of waiters.
        let token = self.lease.abort_token().clone();
        let aborted = pin!(token.cancelled());
        let mut engine = EngineSide::new(exchange, read, clock, silence, aborted);
        loop {
            let delivery = match self.backlog.next(self.ending) {
                Some(delivery) => delivery,
                None if self.ending.is_some() => {
                    down.abort();
                    return AttemptResult::Finished;
                }
                None if self.kept.is_some() && self.is_to_move() => {
                    return AttemptResult::Failed(FailedAttempt::to_move());
                }
                None => {
                    let event = engine.next(pin!(down.gone())).await;
                    match self.take(event, &mut engine, Instant::now()) {
                        Ok(delivery) => delivery,
                        Err(failed) => return AttemptResult::Failed(failed),
                    }
                }
            };
            if self.ending == Some(Ending::ClientGone) {
                return AttemptResult::Finished;
            }
            if let Err(result) = self.send(delivery, &mut engine, down).await {
                return result;
            }
        }
    }

    /// Whether this engine has generated a token.
    fn has_token(&self) -> bool {
        self.seam.as_ref().map_or_else(|| self.meter.has_content(), |seam| seam.has_token())
    }

    /// How far the engine has come with its own part of the response.
    fn stage(&self) -> StreamStage {
        match self.has_token() || self.seam.is_none() {
            true => self.meter.stage(),
            false => StreamStage::Accepted,
        }
    }

    /// Sends bytes to the client. If the client does not take them, the engine is read meanwhile,
    /// and bytes that have not been written yet join the backlog. An error is the end of the
    /// attempt.
    async fn send<X: Exchange, D: Downstream>(
        &mut self,
        mut delivery: Delivery,
        engine: &mut EngineSide<'_, '_, X>,
        down: &mut D,
    ) -> Result<(), AttemptResult<X>> {
        while !delivery.is_empty() {
            let write = delivery.next_write();
            let (is_last, has_bytes) = (write.finish, write.has_bytes());
            let sent = {
                let mut sending = pin!(deliver(down, write, !delivery.is_empty()));
                match poll_fn(|cx| Poll::Ready(sending.as_mut().poll(cx))).await {
                    Poll::Ready(sent) => sent,
                    Poll::Pending => {
                        self.backlog.push(&std::mem::take(&mut delivery), self.context.room());
                        Box::pin(self.wait_for_client(engine, sending)).await.map_err(AttemptResult::Failed)?
                    }
                }
            };
            if sent == Err(ClientGone) {
                self.client_gone(has_bytes, Instant::now());
                if self.ending == Some(Ending::Stopped) {
                    down.abort();
                }
                return Err(AttemptResult::Finished);
            }
            if is_last {
                engine.reuse().await;
                return Err(AttemptResult::Finished);
            }
        }
        Ok(())
    }

    /// Applies an event to the response. Returns the bytes that go to the client now. An error
    /// means that another engine may serve the request or continue the stream.
    fn take<X: Exchange>(
        &mut self,
        event: EngineEvent,
        engine: &mut EngineSide<'_, '_, X>,
        now: Instant,
    ) -> Result<Delivery, Box<FailedAttempt<X>>> {
        let ended = match event {
            EngineEvent::Bytes => return self.bytes(engine, now),
            EngineEvent::Quiet => match engine.clock.look(now, || self.lease.watch_engine(now)) {
                Some(next) => {
                    engine.silence.set_limit(next);
                    return Ok(Delivery::default());
                }
                None => self.interrupted(Interruption::Silent, now),
            },
            EngineEvent::End => self.end(now),
            EngineEvent::Broken(error) => self.interrupted(Interruption::Broken(error), now),
            EngineEvent::Aborted => self.interrupted(self.why_aborted(), now),
            EngineEvent::ClientGone => {
                self.client_gone(false, now);
                Ok(Delivery::default())
            }
        };
        // Dropping the exchange closes the connection, so that the engine aborts the request.
        if ended.is_ok() && self.ending != Some(Ending::Complete) {
            engine.close();
        }
        ended
    }

    fn bytes<X: Exchange>(
        &mut self,
        engine: &mut EngineSide<'_, '_, X>,
        now: Instant,
    ) -> Result<Delivery, Box<FailedAttempt<X>>> {
        let events = if self.head.is_some() { self.meter.events_between() } else { None };
        let chunk = self.behind_seam(engine.chunk.split().freeze())?;
        let (mut forward, progress) = self.measure(chunk, now);
        engine.silence.set_limit(match self.meter.is_stream() {
            true => engine.clock.events(self.stage(), progress, now),
            false => engine.clock.bytes(now),
        });
        if let Some(withheld) = self.meter.as_stream_mut().and_then(StreamMeter::take_withheld) {
            forward = self.error_in_stream(forward, withheld, now)?;
        }
        let is_between = events.is_some() && events == self.meter.events_between();
        if is_between && self.may_send_comments(&forward) {
            return Ok(self.comments(forward));
        }
        if self.head.is_some() {
            forward = self.hold(forward, now)?;
        }
        if forward.is_empty() {
            return Ok(Delivery::default());
        }
        let mut delivery = self.delivery(forward);
        let is_done = self.meter.is_done();
        // A stream whose end marker has not come is not completed here, even if the body has ended:
        // `end` decides whether it is whole or was cut.
        if engine.at_end() && (is_done || !self.meter.is_stream()) {
            self.complete(&mut delivery, now);
        } else if is_done {
            self.settle(now);
        }
        Ok(delivery)
    }

    /// Measures a chunk. Returns the bytes for the client, and whether the chunk shows that the
    /// engine works.
    fn measure(&mut self, chunk: Bytes, now: Instant) -> (Forward, bool) {
        let forward = self.meter.feed(chunk, now);
        let seen = self.meter.progress();
        // Parts of an event count as work: a long event may take longer than the silence that is
        // allowed.
        let progress = seen.0 != self.seen.0 || self.meter.is_inside_event();
        if progress {
            self.lease.record_progress(now);
            self.lease.record_tokens(seen.1.saturating_sub(self.seen.1));
            self.record.note_tokens(seen.1);
            self.seen = seen;
        }
        let more = |tokens: &u64| *tokens > self.context.prompt_tokens;
        if let Some(tokens) = self.meter.prompt_tokens().filter(more) {
            // The prompt was longer than estimated, so the lease is charged for it while the
            // request still runs.
            self.context.prompt_tokens = tokens;
            self.lease.charge(tokens);
        }
        if self.prefilling && self.has_token() {
            self.first_token(now);
        }
        self.watch_kept();
        (forward, progress)
    }

    fn first_token(&mut self, now: Instant) {
        self.record.first_token_seen();
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
                self.lease.first_token_seen(now);
            } else {
                self.lease.first_token();
            }
        }
    }

    /// Bytes for the client, after head and preamble if these were not sent yet. From here on no
    /// other backend can take the request.
    fn delivery(&mut self, forward: Forward) -> Delivery {
        let Some(head) = self.head.take() else {
            return Delivery { forward, ..Delivery::default() };
        };
        let request = std::mem::take(self.request);
        if self.kept.is_some() {
            // The kept request has a copy of the body, because the received buffer counts as the
            // memory of requests that wait.
            *self.request = UpstreamRequest { body: request.body.detached(), body_without_arm: None, ..request };
        }
        let preamble = Bytes::from(std::mem::take(&mut self.preamble));
        Delivery { head: self.take_head(head), preamble, forward, finish: false }
    }

    /// The head as it is sent to the client; `None` if the client already has one.
    fn take_head(&mut self, mut head: Box<ResponseHead>) -> Option<Box<ResponseHead>> {
        if std::mem::replace(self.is_head_sent, true) {
            return None;
        }
        respond::complete_head(&mut head, self.record);
        Some(head)
    }
}
