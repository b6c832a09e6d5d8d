//! An answer as the meters see it: a stream of events, or a body that comes at once.
//!
//! One small enum, so that the pump has one path. Both kinds report in the same form: what a body does
//! not have (TTFT, ITL, TPOT) is absent.

use bytes::Bytes;
use tokio::time::Instant;

use sluice_core::meter::{BodyMeter, Forward, StreamMeter, StreamStats, Strip};
use sluice_core::openai::{Dialect, Route, UpstreamError};

/// The meter of one answer.
pub(super) enum ResponseMeter {
    /// `text/event-stream`.
    Stream(Box<StreamMeter>),
    /// Anything else.
    Body(Box<(BodyMeter, Option<StreamStats>)>),
}

impl ResponseMeter {
    /// A meter for events of the route's dialect.
    pub(super) fn stream(route: Route, arrived: Instant, strip: Strip) -> Self {
        Self::Stream(Box::new(StreamMeter::new(Dialect::of(route), arrived, strip)))
    }

    /// A meter for a body that comes at once.
    pub(super) fn body(arrived: Instant) -> Self {
        Self::Body(Box::new((BodyMeter::new(arrived), None)))
    }

    /// Whether it is a stream of events.
    pub(super) fn is_stream(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    /// Looks at a chunk and returns what goes to the client.
    pub(super) fn feed(&mut self, chunk: Bytes, now: Instant) -> Forward {
        match self {
            Self::Stream(meter) => meter.feed(chunk, now),
            Self::Body(body) => {
                body.0.feed(&chunk);
                let mut forward = Forward::new();
                forward.push(chunk);
                forward
            }
        }
    }

    /// The answer is over; returns what was held back of it.
    pub(super) fn finish(&mut self, now: Instant) -> Forward {
        match self {
            Self::Stream(meter) => meter.finish(),
            Self::Body(answer) => {
                let body = answer.0.finish(now);
                answer.1 = Some(StreamStats {
                    e2el: Some(body.e2el),
                    usage: body.usage,
                    error: body.error,
                    ..StreamStats::default()
                });
                Forward::new()
            }
        }
    }

    /// The first token has been seen. In a body it is there when the body is.
    pub(super) fn has_content(&self) -> bool {
        match self {
            Self::Stream(meter) => meter.first_content_at().is_some(),
            Self::Body(_) => true,
        }
    }

    /// The engine said in the stream, before any content, that it is too busy.
    pub(super) fn is_busy_before_content(&self) -> bool {
        !self.has_content() && self.error().is_some_and(is_busy)
    }

    /// The error the answer reports.
    pub(super) fn error(&self) -> Option<&UpstreamError> {
        match self {
            Self::Stream(meter) => meter.error(),
            Self::Body(body) => body.1.as_ref().and_then(|stats| stats.error.as_ref()),
        }
    }

    /// The answer has said that it is complete.
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Stream(meter) => meter.is_done(),
            Self::Body(body) => body.1.is_some(),
        }
    }

    /// What was measured.
    pub(super) fn stats(&self) -> StreamStats {
        match self {
            Self::Stream(meter) => meter.stats(),
            Self::Body(body) => body.1.clone().unwrap_or_default(),
        }
    }
}

/// The engine's own admission control.
pub(super) fn is_busy(error: &UpstreamError) -> bool {
    error.code == Some(503)
}

/// An error the client brought about.
pub(super) fn is_clients_fault(error: &UpstreamError) -> bool {
    error.code.is_some_and(|code| (400..500).contains(&code))
}
