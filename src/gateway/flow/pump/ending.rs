//! The end of a response, and the effects on record, backend and key.
//!
//! A response is settled once, when the engine has no more part in it: the outcome is noted, the
//! response is measured, and the lease and the count of the key are returned. Bytes may still be on
//! their way to the client.

use std::fmt::Display;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use tokio::time::Instant;

use super::super::attempt::FailedAttempt;
use super::super::exchange::ExchangeError;
use super::super::faults;
use super::super::record::{Outcome, Recorder, RetryReason, Stage, UpstreamFault, engine_refusal};
use super::super::response_meter::{is_busy, is_client_error};
use super::Pump;
use super::parts::{Delivery, Ending, Interruption};
use crate::pool::BackendFault;
use sluice_core::meter::Forward;
use sluice_core::openai::error::sse_error_event;

impl<R: Recorder> Pump<'_, '_, R> {
    /// Ends a response whose body the backend has ended properly.
    pub(super) fn end<X>(&mut self, now: Instant) -> Result<Delivery, Box<FailedAttempt<X>>> {
        self.meter.end_of_body(now);
        if self.head.is_some() && self.meter.is_stream() {
            let tail = self.meter.finish(now);
            tail.iter().for_each(|piece| self.preamble.extend_from_slice(piece));
            if let Some(failed) = self.answered_elsewhere(now) {
                return Err(failed);
            }
        }
        if self.meter.is_stream() && !self.meter.is_done() && self.meter.error().is_none() {
            return self.interrupted(Interruption::Unfinished, now);
        }
        let mut delivery = self.delivery(Forward::new());
        self.complete(&mut delivery, now);
        Ok(delivery)
    }

    /// Completes the response with this delivery and the bytes that were held back.
    pub(super) fn complete(&mut self, delivery: &mut Delivery, now: Instant) {
        self.meter.end_of_body(now);
        delivery.forward.extend(self.meter.finish(now));
        delivery.finish = true;
        self.ending = Some(Ending::Complete);
        self.settle(now);
    }

    /// Settles a response that the engine has sent completely. Called before the last bytes are
    /// sent, because the client may send its next request as soon as it has them. Idempotent.
    pub(super) fn settle(&mut self, now: Instant) {
        if !self.is_settled {
            self.note_outcome(now);
            self.release();
        }
    }

    fn release(&mut self) {
        self.is_settled = true;
        self.record_measurements();
        self.record.end_in_flight();
        // A copy keeps the lease, because a copy whose lease is returned counts as cut, and a copy
        // holds no room that a request could use.
        if self.record.copy.is_none() {
            self.lease.release();
        }
    }

    /// Ends a response whose client has left, or does not read any more. `in_a_write`: the client
    /// did not take the bytes of a write.
    pub(super) fn client_gone(&mut self, in_a_write: bool, now: Instant) {
        if self.ending == Some(Ending::Stopped) {
            return;
        }
        if self.is_settled {
            // A client that closes once it has the last event has received the whole stream.
            let has_all = self.meter.is_stream() && self.backlog.is_empty() && !in_a_write;
            if self.record.outcome == Outcome::Completed && !has_all {
                self.record.outcome = Outcome::ClientGone;
            }
        } else {
            let is_complete = self.meter.is_done();
            let _ = self.meter.finish(now);
            if is_complete {
                self.settle(now);
            } else {
                self.record.outcome = Outcome::ClientGone;
                self.release();
            }
        }
        self.ending = Some(Ending::ClientGone);
    }

    /// Handles a response that the backend cannot complete. If nothing was sent, another backend
    /// may serve the request. Otherwise another engine continues the stream, or it ends with an
    /// error event.
    pub(super) fn interrupted<X>(
        &mut self,
        why: Interruption,
        now: Instant,
    ) -> Result<Delivery, Box<FailedAttempt<X>>> {
        if self.is_settled {
            // The end of the response was seen before the interruption.
            let mut delivery = self.delivery(Forward::new());
            self.complete(&mut delivery, now);
            return Ok(delivery);
        }
        let nothing_sent = self.head.is_some();
        let (reason, outcome) = match &why {
            // The 4xx counts as the response, because an engine that refuses a body without reading
            // it may reset the connection.
            Interruption::Broken(_) | Interruption::Unfinished | Interruption::Silent
                if self.status.is_client_error() =>
            {
                return Ok(self.refused_without_body(now));
            }
            Interruption::Stopping => (RetryReason::Hung, Outcome::Timeout(Stage::Drain)),
            Interruption::Hung => (RetryReason::Hung, Outcome::UpstreamError(UpstreamFault::Hung)),
            Interruption::Silent => {
                let stage = if nothing_sent { Stage::FirstByte } else { Stage::Idle };
                let outcome = Outcome::Timeout(stage);
                let why = format_args!("timeout ({})", outcome.detail());
                let id = &self.record.request_id;
                faults::report(self.lease, BackendFault::Timeout, id, &why, now);
                (RetryReason::Timeout, outcome)
            }
            Interruption::Broken(error) => {
                self.record.is_lost = matches!(error, ExchangeError::Closed(_));
                self.fault(error, now);
                (RetryReason::Broken, Outcome::UpstreamError(UpstreamFault::Broken))
            }
            Interruption::Unfinished => {
                self.fault(&"the stream ended without its end marker", now);
                (RetryReason::Broken, Outcome::UpstreamError(UpstreamFault::Broken))
            }
            Interruption::InStream => (RetryReason::InStream, Outcome::UpstreamError(UpstreamFault::InStream)),
        };
        if nothing_sent {
            return Err(FailedAttempt::boxed(reason, outcome));
        }
        if self.may_continue(&why) {
            return Err(FailedAttempt::in_stream(reason, outcome, None));
        }
        self.record.outcome = outcome;
        let forward = self.error_event(&why, now);
        self.cut();
        Ok(Delivery { forward, ..Delivery::default() })
    }

    pub(super) fn cut(&mut self) {
        self.ending = Some(Ending::Cut);
        self.release();
    }

    fn refused_without_body(&mut self, now: Instant) -> Delivery {
        if let Some(head) = &mut self.head {
            head.headers.remove(CONTENT_TYPE);
            head.headers.insert(CONTENT_LENGTH, HeaderValue::from(0));
            let mut delivery = self.delivery(Forward::new());
            self.complete(&mut delivery, now);
            return delivery;
        }
        self.record.outcome = Outcome::Refused;
        self.note_refusal();
        self.lease.success(now);
        self.cut();
        Delivery::default()
    }

    /// The bytes that were held back, and the event that gives the reason for the end.
    fn error_event(&mut self, why: &Interruption, now: Instant) -> Forward {
        if !self.meter.is_stream() {
            return Forward::new();
        }
        let mut forward = self.meter.finish(now);
        let event = sse_error_event(why.failure(), self.context.incoming.route.error_format());
        forward.push(Bytes::from(event));
        forward
    }

    pub(super) fn why_aborted(&self) -> Interruption {
        match self.context.abort.is_cancelled() {
            true => Interruption::Stopping,
            false => Interruption::Hung,
        }
    }

    /// Notes the outcome of the response in the record, and reports it to the backend's health.
    fn note_outcome(&mut self, now: Instant) {
        self.record.outcome = self.outcome();
        self.note_refusal();
        if self.record.outcome == Outcome::UpstreamError(UpstreamFault::InStream) && self.meter.has_content() {
            self.record.not_continued = self.record.not_continued.or(self.why_not);
        }
        match self.record.outcome {
            Outcome::UpstreamError(_) if self.is_no_fault() => {}
            Outcome::UpstreamError(UpstreamFault::InStream) => {
                self.fault(&"an error event in the stream", now);
            }
            Outcome::UpstreamError(_) => {
                self.fault(&format_args!("status {}", self.status.as_u16()), now);
            }
            _ => self.lease.success(now),
        }
    }

    fn note_refusal(&mut self) {
        if self.record.outcome == Outcome::Refused {
            let code = self.meter.error().and_then(|error| error.code);
            let code = code.filter(|_| self.status.is_success());
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

    pub(super) fn fault(&self, why: &dyn Display, now: Instant) {
        faults::report(self.lease, BackendFault::Response, &self.record.request_id, why, now);
    }

    /// Whether an upstream error must not count against the backend: it is the backend's admission
    /// control, or a fault that was counted when the attempt failed.
    pub(super) fn is_no_fault(&self) -> bool {
        self.context.credentials.is_none() || self.meter.error().is_some_and(is_busy)
    }

    /// Writes the measurements into the record, and updates the estimator and the backend's speed
    /// with them.
    fn record_measurements(&mut self) {
        let mut stats = self.meter.stats();
        let sequences = self.context.prepared.feedback.sequences;
        stats.tpot = stats.tpot_of_one(sequences);
        let completed = self.record.outcome == Outcome::Completed;
        let now = Instant::now();
        // The pause at a seam says nothing about the engine.
        if completed
            && self.record.continued == 0
            && let Some(tpot) = stats.tpot
        {
            let tokens = stats.generated() / u64::from(sequences.max(1));
            self.lease.observe_decode(tokens, tpot, now);
        }
        if completed && let Some(prompt_tokens) = stats.usage.prompt {
            self.lease.observe_cached(prompt_tokens, stats.usage.cached);
        }
        self.lease.settle(stats.usage.prompt, stats.usage.cached, stats.generated());
        self.context.prepared.feedback.learn(stats.usage, completed, now);
        // If the engine was not read for a while, the engine's own times are not known.
        let is_judged = completed && !self.is_held_up && self.context.incoming.route.generates();
        let placed = &self.context.prepared.placed;
        if let Some(prompt_tokens) = stats.usage.prompt {
            self.record.correct_class(&placed.table.classes, prompt_tokens);
        }
        let objectives = self.record.objectives(&placed.home().objectives);
        if is_judged && !objectives.is_empty() {
            let estimate = self.record.estimate.map_or(0, |estimate| estimate.tokens);
            let prompt_tokens = stats.usage.prompt.unwrap_or(estimate);
            let met = objectives.met(true, prompt_tokens, &stats.timings());
            self.record.slo_met = Some(met);
        }
        self.record.stats = Some(stats);
    }
}
