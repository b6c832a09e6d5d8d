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

use super::exchange::{Broken, Downstream, Exchange, Gone, Head};
use super::forward::{Failed, Tried};
use super::gate::{Injected, Lesson};
use super::record::{Open, Outcome, Recorder, RetryReason, Stage, UpstreamFault};
use super::respond;
use crate::meter::slo::Objectives;
use crate::meter::{Forward, Meter, Strip};
use crate::openai::{Route, error};
use crate::pool::{Fault, Lease};

/// What the pump needs to know of its request.
#[derive(Clone, Copy)]
pub(super) struct Passage<'a> {
    pub(super) route: Route,
    pub(super) arrived: Instant,
    /// When the request had been sent upstream.
    pub(super) sent: Instant,
    pub(super) stream: bool,
    pub(super) injected: Injected,
    pub(super) prompt_tokens: u64,
    pub(super) lesson: &'a Lesson,
    pub(super) idle: Duration,
    pub(super) objectives: &'a Objectives,
}

/// What came next from the backend, or instead of it.
enum Next {
    Bytes,
    End,
    Broken(Broken),
    ClientGone,
    Hung,
    Silent,
}

/// The state of one answer on its way.
struct Pump<'a, 'r, D, R: Recorder> {
    passage: Passage<'a>,
    meter: Meter,
    /// Not sent yet.
    head: Option<Head>,
    sse: bool,
    status: StatusCode,
    lease: &'a mut Lease,
    down: &'a mut D,
    record: &'a mut Open<'r, R>,
    prefilling: bool,
}

/// Passes one answer on. `Again` only while nothing has reached the client.
pub(super) async fn pump<X, D, R>(
    mut exchange: X,
    mut head: Head,
    passage: Passage<'_>,
    lease: &mut Lease,
    down: &mut D,
    record: &mut Open<'_, R>,
) -> Tried<X>
where
    X: Exchange,
    D: Downstream,
    R: Recorder,
{
    let sse = head.headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    let meter = if sse && head.status.is_success() {
        Meter::stream(passage.route, passage.arrived, strip(passage.injected))
    } else {
        Meter::body(passage.route, passage.arrived)
    };
    if sse && passage.injected != Injected::Nothing {
        head.headers.remove(CONTENT_LENGTH);
    }
    let status = head.status;
    let mut pump = Pump { passage, meter, head: Some(head), sse, status, lease, down, record, prefilling: true };
    pump.lease.beat(Instant::now());
    let mut chunk = BytesMut::new();
    let mut idle = pin!(sleep_until(Instant::now() + passage.idle));
    let mut last = Instant::now();
    loop {
        let next = tokio::select! {
            biased;
            read = exchange.body(&mut chunk) => match read {
                Ok(true) => Next::Bytes,
                Ok(false) => Next::End,
                Err(broken) => Next::Broken(broken),
            },
            () = pump.down.gone() => Next::ClientGone,
            () = pump.lease.cut().cancelled() => Next::Hung,
            () = &mut idle => {
                // The timer is set anew only when it fires: a chunk costs no timer operation.
                if last + passage.idle > Instant::now() {
                    idle.as_mut().reset(last + passage.idle);
                    continue;
                }
                Next::Silent
            }
        };
        last = Instant::now();
        match next {
            Next::Bytes => match pump.forward(chunk.split().freeze(), last).await {
                Step::On => {}
                Step::Gone => return pump.client_gone(last),
                Step::Refused => return pump.again(RetryReason::InStream, UpstreamFault::InStream),
            },
            Next::End => return pump.end(exchange, last).await,
            Next::ClientGone => return pump.client_gone(last),
            Next::Broken(broken) => {
                tracing::debug!(backend = %pump.lease.name(), error = %broken, "answer broke off");
                pump.lease.failure(Fault::Answer, last);
                return pump.cut_off(RetryReason::Broken, Outcome::UpstreamError(UpstreamFault::Broken), last).await;
            }
            Next::Hung => {
                return pump.cut_off(RetryReason::Hung, Outcome::UpstreamError(UpstreamFault::Hung), last).await;
            }
            Next::Silent => {
                pump.lease.failure(Fault::Timeout, last);
                return pump.cut_off(RetryReason::Timeout, Outcome::Timeout(Stage::Idle), last).await;
            }
        }
    }
}

fn strip(injected: Injected) -> Strip {
    match injected {
        Injected::Nothing => Strip::Nothing,
        Injected::Final => Strip::InjectedUsage,
        Injected::Continuous { keep_final } => Strip::Continuous { keep_final },
    }
}

enum Step {
    On,
    /// The client is gone.
    Gone,
    /// The engine refused in the stream before anything was sent.
    Refused,
}

impl<D: Downstream, R: Recorder> Pump<'_, '_, D, R> {
    async fn forward(&mut self, chunk: Bytes, now: Instant) -> Step {
        self.lease.beat(now);
        let forward = self.meter.feed(chunk, now);
        if self.prefilling && self.meter.first_content_at().is_some() {
            self.first_token(now);
        }
        if self.head.is_some() && self.meter.refused_before_content() {
            return Step::Refused;
        }
        match self.send(forward).await {
            Ok(()) => Step::On,
            Err(Gone) => Step::Gone,
        }
    }

    fn first_token(&mut self, now: Instant) {
        self.prefilling = false;
        self.lease.first_token();
        let ttft = now.saturating_duration_since(self.passage.sent);
        if self.passage.stream {
            self.record.backend_ttft = Some(ttft);
            self.lease.observe(Some((self.passage.prompt_tokens, ttft)), None);
        }
    }

    async fn send(&mut self, forward: Forward) -> Result<(), Gone> {
        if let Some(mut head) = self.head.take() {
            respond::add_ours(&mut head.headers, self.record);
            self.record.status = Some(head.status);
            self.down.head(head).await?;
        }
        for piece in forward {
            self.down.body(piece).await?;
        }
        Ok(())
    }

    /// The backend's answer is complete.
    async fn end<X: Exchange>(&mut self, exchange: X, now: Instant) -> Tried<X> {
        let tail = self.meter.finish(now);
        let whole = !self.sse || self.meter.saw_end() || self.meter.error().is_some();
        if !whole {
            // The connection ended in order, the stream did not: the engine was stopped under it.
            self.lease.failure(Fault::Answer, now);
            let _ = self.send(tail).await;
            return self.cut_off(RetryReason::Broken, Outcome::UpstreamError(UpstreamFault::Broken), now).await;
        }
        let sent = match self.send(tail).await {
            Ok(()) => self.down.finish().await,
            Err(gone) => Err(gone),
        };
        exchange.keep().await;
        self.record.outcome = self.verdict();
        match self.record.outcome {
            Outcome::UpstreamError(_) if !self.is_engine_refusal() => self.lease.failure(Fault::Answer, now),
            Outcome::UpstreamError(_) => {}
            _ => self.lease.success(),
        }
        // A client that closes as soon as it has the last event has it all.
        if sent.is_err() && !self.meter.saw_end() {
            self.record.outcome = Outcome::ClientGone;
        }
        self.account(now);
        Tried::Over
    }

    fn verdict(&self) -> Outcome {
        if respond::is_clients_fault(self.status) {
            return Outcome::Refused;
        }
        if !self.status.is_success() {
            return Outcome::UpstreamError(UpstreamFault::Status);
        }
        match self.meter.error() {
            Some(error) if error.is_clients_fault() => Outcome::Refused,
            Some(_) => Outcome::UpstreamError(UpstreamFault::InStream),
            None => Outcome::Completed,
        }
    }

    /// The engine's own admission control speaking: a reason to go elsewhere, not a fault.
    fn is_engine_refusal(&self) -> bool {
        self.status == StatusCode::SERVICE_UNAVAILABLE || self.meter.error().is_some_and(|error| error.is_busy())
    }

    fn client_gone<X>(&mut self, now: Instant) -> Tried<X> {
        let _ = self.meter.finish(now);
        self.record.outcome = if self.meter.saw_end() { Outcome::Completed } else { Outcome::ClientGone };
        self.account(now);
        Tried::Over
    }

    fn again<X>(&mut self, reason: RetryReason, fault: UpstreamFault) -> Tried<X> {
        Tried::Again(Failed { reason, outcome: Outcome::UpstreamError(fault), answer: None })
    }

    /// The answer cannot be completed: elsewhere if nothing was sent, else said in the stream.
    async fn cut_off<X>(&mut self, reason: RetryReason, outcome: Outcome, now: Instant) -> Tried<X> {
        if self.head.is_some() {
            return Tried::Again(Failed { reason, outcome, answer: None });
        }
        let tail = self.meter.finish(now);
        self.record.outcome = outcome;
        if self.sse && self.send(tail).await.is_ok() {
            let event = error::sse_error_event(self.passage.route.is_anthropic(), outcome.detail());
            let _ = self.down.body(Bytes::from(event)).await;
        }
        self.down.abort();
        self.account(now);
        Tried::Over
    }

    /// What was measured goes into the record, and what it teaches to those who learn.
    fn account(&mut self, _now: Instant) {
        let stats = self.meter.stats();
        let lesson = self.passage.lesson;
        let completed = self.record.outcome == Outcome::Completed;
        if completed && let Some(tpot) = stats.tpot {
            self.lease.observe(None, Some(tpot));
        }
        if completed && lesson.usable && let Some(prompt_tokens) = stats.prompt_tokens {
            let each = stats.completion_tokens.map(|tokens| tokens / u64::from(lesson.sequences.max(1)));
            lesson.estimator.learn(&lesson.shape, prompt_tokens, each);
        }
        if !self.passage.objectives.is_empty() {
            self.record.slo_met = Some(completed && self.passage.objectives.met(&stats));
        }
        self.record.stats = Some(stats);
    }
}
