//! The pump across engines: keeps the request and the text with which another engine continues a
//! stream, hands the answer over when the engine fails, and goes on with the answer.
//!
//! Meter and backlog travel from pump to pump, so the client sees one stream, and the answer is
//! measured and recorded as one. Until the first token of the new engine, the stream counts as
//! accepted only. Bounds: `continuation/limits.rs`.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use tokio::time::Instant;

use super::super::attempt::FailedAttempt;
use super::super::continuation::{Answer, Identity, KeptMemory, Seam, TEXT_MAX};
use super::super::exchange::{Downstream, Exchange, UpstreamRequest};
use super::super::record::{Outcome, RecordGuard, Recorder, RetryReason, UpstreamFault};
use super::super::response_meter::{ResponseMeter, is_client_error};
use super::parts::{Backlog, Delivery, Interruption};
use super::{Pump, ResponseContext};
use crate::pool::Lease;
use sluice_core::meter::{Forward, StreamMeter};
use sluice_core::openai::NotContinued;
use sluice_core::openai::error::{StreamFailure, sse_error_event};

/// Pause between two looks for room on another engine.
const MOVE_EVERY: Duration = Duration::from_millis(250);

/// An answer whose engine has failed or leaves in the middle.
pub(in crate::flow) struct Unfinished {
    meter: ResponseMeter,
    backlog: Backlog,
    is_held_up: bool,
    kept: Option<KeptMemory>,
    failure: StreamFailure,
    withheld: Option<Bytes>,
    /// The seam after an earlier engine's part. The next engine gets a new one.
    seam: Option<Box<Seam>>,
    may_move_at: Option<Instant>,
}

impl Unfinished {
    /// The measurements of the answer so far.
    pub(in crate::flow) fn meter(&self) -> Option<&StreamMeter> {
        self.meter.as_stream()
    }

    /// Forgets an unfinished event and the error of the engine that failed.
    pub(in crate::flow) fn go_on(&mut self) {
        (self.withheld, self.seam, self.may_move_at) = (None, None, None);
        if let Some(meter) = self.meter.as_stream_mut() {
            meter.resume();
        }
    }

    /// The gateway stops: the client gets an error about that instead of the engine's error.
    pub(in crate::flow) fn stopped(&mut self) {
        (self.failure, self.withheld) = (StreamFailure::ShuttingDown, None);
    }
}

impl<'a, 'r, R: Recorder> Pump<'a, 'r, R> {
    /// Begins to keep request and text, if another engine may continue the stream.
    pub(super) fn keep(&mut self) {
        self.why_not = self.context.prepared.continuation.err();
        // Without credentials of this attempt, the response goes to the client whatever it says.
        let is_stream = self.status.is_success() && self.context.credentials.is_some();
        let Some(meter) = self.meter.as_stream_mut().filter(|_| is_stream && self.why_not.is_none()) else { return };
        match self.context.continuations.keep(self.request.body.len()) {
            Some(kept) => {
                meter.keep_text(TEXT_MAX);
                self.kept = Some(kept);
            }
            None => self.why_not = Some(NotContinued::Memory),
        }
    }

    /// Takes memory for text that has grown, and keeps nothing more if the text cannot be used any
    /// more.
    #[inline]
    pub(super) fn watch_kept(&mut self) {
        let text = self.meter.as_stream().and_then(StreamMeter::kept);
        if let (Some(kept), Some(text)) = (&self.kept, text)
            && !text.is_within(kept.covered())
        {
            self.cover_text();
        }
    }

    #[cold]
    fn cover_text(&mut self) {
        let (Some(kept), Some(text)) = (&mut self.kept, self.meter.as_stream().and_then(StreamMeter::kept)) else {
            return;
        };
        let is_covered = kept.cover(text.len());
        if let Some(why) = text.why_not() {
            self.keep_nothing(why);
        } else if !is_covered {
            self.keep_nothing(NotContinued::Memory);
        }
    }

    fn keep_nothing(&mut self, why: NotContinued) {
        self.why_not = Some(why);
        self.kept = None;
        if let Some(meter) = self.meter.as_stream_mut() {
            meter.keep_nothing();
        }
        if self.head.is_none() {
            *self.request = UpstreamRequest::default();
        }
    }

    /// Whether the engine has been leaving service for so long that the stream should look for room
    /// on another one.
    pub(super) fn is_to_move(&mut self) -> bool {
        self.lease.is_leaving() && self.may_leave()
    }

    #[cold]
    fn may_leave(&mut self) -> bool {
        let now = Instant::now();
        let after = self.context.prepared.placed.table.config.drain.move_after;
        if now < *self.may_move_at.get_or_insert(now + after) || self.head.is_some() || !self.has_token() {
            return false;
        }
        self.may_move_at = Some(now + MOVE_EVERY);
        !self.is_settled && self.meter.as_stream().is_some_and(|meter| self.why_cut(meter).is_none())
    }

    /// Whether another engine may continue the stream. If not, the record gets the reason.
    pub(super) fn may_continue(&mut self, why: &Interruption) -> bool {
        if matches!(why, Interruption::Stopping) {
            return false;
        }
        self.failure = why.failure();
        let why_not = match self.meter.as_stream() {
            None => Some(NotContinued::NotStreamed),
            Some(_) if self.kept.is_none() => Some(self.why_not.unwrap_or(NotContinued::Route)),
            Some(meter) => self.why_cut(meter),
        };
        self.record.not_continued = why_not;
        why_not.is_none()
    }

    /// Why the answer so far cannot be sent to another engine.
    fn why_cut(&self, meter: &StreamMeter) -> Option<NotContinued> {
        if meter.has_sent_part() {
            return Some(NotContinued::InsideEvent);
        }
        if meter.have_choices_finished() {
            return None;
        }
        let kept = meter.kept()?;
        let route = self.context.incoming.route;
        let answer = Answer::of(kept, meter.text_tokens(), route);
        Identity::of(kept, route, meter.have_choices_begun()).and_then(|_| answer.map(drop)).err()
    }

    /// Decides about an error in the stream, whose bytes were `withheld`. Returns the bytes that go
    /// to the client now.
    pub(super) fn error_in_stream<X>(
        &mut self,
        mut forward: Forward,
        withheld: Bytes,
        now: Instant,
    ) -> Result<Forward, Box<FailedAttempt<X>>> {
        let is_the_clients = self.meter.error().is_some_and(is_client_error);
        if self.head.is_none() && !is_the_clients && self.may_continue(&Interruption::InStream) {
            if !self.is_no_fault() {
                self.fault(&"an error event in the stream", now);
            }
            self.backlog.push(&Delivery { forward, ..Delivery::default() }, self.context.room());
            self.withheld = Some(withheld);
            let outcome = Outcome::UpstreamError(UpstreamFault::InStream);
            return Err(FailedAttempt::in_stream(RetryReason::InStream, outcome, None));
        }
        self.keep_nothing(self.record.not_continued.unwrap_or(NotContinued::Refused));
        forward.push(withheld);
        Ok(forward)
    }

    /// A chunk of the engine as a part of the answer. An error: the engine's part does not fit.
    pub(super) fn behind_seam<X>(&mut self, chunk: Bytes) -> Result<Bytes, Box<FailedAttempt<X>>> {
        let Some(seam) = &mut self.seam else { return Ok(chunk) };
        seam.feed(&chunk).map_err(|why| {
            let outcome = Outcome::UpstreamError(UpstreamFault::Broken);
            FailedAttempt::in_stream(RetryReason::Broken, outcome, Some(why))
        })
    }

    /// The answer, for the pump of the next engine.
    pub(in crate::flow) fn into_unfinished(self) -> Box<Unfinished> {
        let Self { meter, backlog, is_held_up, kept, failure, withheld, seam, may_move_at, .. } = self;
        Box::new(Unfinished { meter, backlog, is_held_up, kept, failure, withheld, seam, may_move_at })
    }

    /// A pump that goes on with an answer. `seam`: set if a new engine continues it now.
    pub(in crate::flow) fn resume(
        unfinished: Unfinished,
        seam: Option<Box<Seam>>,
        context: ResponseContext<'a>,
        request: &'a mut UpstreamRequest,
        lease: &'a mut Lease,
        record: &'a mut RecordGuard<'r, R>,
        is_head_sent: &'a mut bool,
    ) -> Self {
        let Unfinished { meter, backlog, is_held_up, kept, failure, withheld, seam: same, may_move_at } = unfinished;
        let (seen, seam) = (meter.progress(), seam.or(same));
        Self {
            context,
            meter,
            head: None,
            is_head_sent,
            preamble: Vec::new(),
            preamble_max: 0,
            seen,
            request,
            status: StatusCode::OK,
            lease,
            record,
            prefilling: seam.is_some(),
            backlog,
            is_held_up,
            is_settled: false,
            ending: None,
            kept,
            why_not: None,
            seam,
            may_move_at,
            failure,
            withheld,
        }
    }

    /// Ends an answer that no engine continues. The client gets the same error as without
    /// continuation.
    pub(in crate::flow) async fn end_with_error<X: Exchange, D: Downstream>(&mut self, outcome: Outcome, down: &mut D) {
        self.record.outcome = outcome;
        let held = self.meter.finish(Instant::now());
        let forward = match self.withheld.take() {
            Some(withheld) => std::iter::once(withheld).collect(),
            None => {
                let event = sse_error_event(self.failure, self.context.incoming.route.error_format());
                held.into_iter().chain([Bytes::from(event)]).collect::<Forward>()
            }
        };
        self.backlog.push(&Delivery { forward, ..Delivery::default() }, self.context.room());
        self.cut();
        self.run::<X, D>(&mut None, Bytes::new(), down).await;
    }
}
