//! The pump before the first token of a stream.
//!
//! It holds head and preamble, so that the response of another engine can still replace them;
//! passes comments on; and returns the request for another attempt if the engine's answer says that
//! another engine may serve it. Bounds: [`super::PREAMBLE_MAX`].

use bytes::Bytes;
use http::header::RETRY_AFTER;
use tokio::time::Instant;

use super::super::attempt::{BusyBackend, FailedAttempt, HeldResponse};
use super::super::elsewhere::{Elsewhere, EngineAnswer};
use super::super::record::{Outcome, Recorder, RetryReason, UpstreamFault};
use super::Pump;
use super::parts::Delivery;
use sluice_core::meter::{Forward, StreamStage};
use sluice_core::openai::{Route, UpstreamError};

impl<R: Recorder> Pump<'_, '_, R> {
    /// Whether a chunk of comments may be sent before the response. Not for `/v1/responses`, where
    /// the head decides who owns the response.
    pub(super) fn may_send_comments(&self, forward: &Forward) -> bool {
        self.context.incoming.route != Route::Responses && forward.first().is_some_and(|piece| piece.starts_with(b":"))
    }

    /// A delivery of comments, which are passed on while the preamble is held.
    pub(super) fn comments(&mut self, forward: Forward) -> Delivery {
        let head = match &self.head {
            Some(head) if !*self.is_head_sent => self.take_head(head.clone()),
            _ => None,
        };
        Delivery { head, forward, ..Delivery::default() }
    }

    /// Holds the preamble of a stream until it has a token or is too long. Returns the bytes that
    /// go to the client now. An error means that another engine may serve the request.
    pub(super) fn hold<X>(&mut self, forward: Forward, now: Instant) -> Result<Forward, Box<FailedAttempt<X>>> {
        let is_open = self.meter.stage() == StreamStage::Open;
        if is_open && self.preamble.is_empty() && self.meter.error().is_none() {
            return Ok(forward);
        }
        forward.iter().for_each(|piece| self.preamble.extend_from_slice(piece));
        if let Some(failed) = self.answered_elsewhere(now) {
            return Err(failed);
        }
        if !is_open && self.preamble.len() <= self.preamble_max {
            return Ok(Forward::new());
        }
        Ok(std::iter::once(Bytes::from(std::mem::take(&mut self.preamble))).collect())
    }

    /// The failed attempt, if the first event says that another engine may serve the request.
    pub(super) fn answered_elsewhere<X>(&mut self, now: Instant) -> Option<Box<FailedAttempt<X>>> {
        let credentials = self.context.credentials?;
        let error = self.meter.error().filter(|_| !self.meter.has_content())?;
        let answer = EngineAnswer { status: self.status, read: None, error: Some(error), credentials };
        let (elsewhere, reason) = (answer.elsewhere()?, answer.retry_reason());
        let busy = (elsewhere == Elsewhere::Busy).then(|| self.busy_backend(error));
        if elsewhere.is_fault() {
            self.fault(&"an error event in the stream", now);
        }
        let (reason, lacks) = match elsewhere {
            Elsewhere::NotServed(lacks) => (RetryReason::NotServed, Some(lacks)),
            _ => (reason, None),
        };
        let outcome = match elsewhere {
            Elsewhere::Limited | Elsewhere::NotServed(_) => Outcome::Refused,
            _ => Outcome::UpstreamError(UpstreamFault::InStream),
        };
        let head = if busy.is_none() { self.head.take() } else { None };
        // The meter may hold the beginning of an event whose end came together with the refusal.
        // These bytes belong to the response.
        self.meter.finish(now).iter().for_each(|piece| self.preamble.extend_from_slice(piece));
        let read = Bytes::from(std::mem::take(&mut self.preamble));
        let held = head.map(|head| HeldResponse { head, read });
        Some(Box::new(FailedAttempt { busy, lacks, held, ..*FailedAttempt::boxed(reason, outcome) }))
    }

    /// The refusal of an overloaded backend, in a stream of which nothing was passed on.
    fn busy_backend(&self, error: &UpstreamError) -> BusyBackend {
        let message = match error.message.is_empty() {
            true => "the backend is overloaded; try again later".to_owned(),
            false => error.message.clone(),
        };
        let sent = self.head.as_ref().and_then(|head| head.headers.get(RETRY_AFTER));
        let retry_after = sent.and_then(|value| value.to_str().ok()?.parse().ok());
        BusyBackend { message, retry_after }
    }
}
