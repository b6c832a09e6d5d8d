//! The meter of one response: a stream of events, or a body that arrives at once.
//!
//! One small enum, so that the pump has one path. Both kinds report in the same form; what a body does not have (TTFT,
//! ITL, TPOT) is absent.

use bytes::Bytes;
use tokio::time::Instant;

use sluice_core::meter::{BodyMeter, Forward, StreamMeter, StreamStage, StreamStats, Strip, UsageBounds};
use sluice_core::openai::{Dialect, Route, UpstreamError};

/// The meter of one response.
pub(super) enum ResponseMeter {
    /// `text/event-stream`.
    Stream(Box<StreamMeter>),
    /// Anything else.
    Body(Box<MeteredBody>),
}

/// A body, and its measurements once it is complete.
pub(super) struct MeteredBody {
    meter: BodyMeter,
    is_timed: bool,
    stats: Option<StreamStats>,
}

impl ResponseMeter {
    /// A meter for events of the route's dialect.
    pub(super) fn stream(route: Route, arrived: Instant, strip: Strip) -> Self {
        Self::Stream(Box::new(StreamMeter::new(Dialect::of(route), arrived, strip)))
    }

    /// A meter for a body that arrives at once.
    pub(super) fn body(arrived: Instant) -> Self {
        Self::Body(Box::new(MeteredBody { meter: BodyMeter::new(arrived), is_timed: true, stats: None }))
    }

    /// Believes the engine's usage within these bounds only: limits, records and metrics all have
    /// the believed usage.
    pub(super) fn within(mut self, bounds: UsageBounds) -> Self {
        match &mut self {
            Self::Stream(meter) => meter.set_bounds(bounds),
            Self::Body(body) => body.meter.set_bounds(bounds),
        }
        self
    }

    /// Whether it is a stream of events.
    pub(super) fn is_stream(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    /// Measures a chunk and returns what goes to the client.
    pub(super) fn feed(&mut self, chunk: Bytes, now: Instant) -> Forward {
        match self {
            Self::Stream(meter) => meter.feed(chunk, now),
            Self::Body(body) => {
                body.meter.feed(&chunk);
                let mut forward = Forward::new();
                forward.push(chunk);
                forward
            }
        }
    }

    /// From now on bytes arrive later than the engine sends them: there is no ITL, TPOT and E2EL.
    pub(super) fn stop_timing(&mut self) {
        match self {
            Self::Stream(meter) => meter.stop_timing(),
            Self::Body(body) => body.is_timed = false,
        }
    }

    /// The body has ended in order.
    pub(super) fn end_of_body(&mut self, now: Instant) {
        if let Self::Stream(meter) = self {
            meter.end_of_body(now);
        }
    }

    /// Ends the response; returns the bytes that were held back.
    pub(super) fn finish(&mut self, now: Instant) -> Forward {
        match self {
            Self::Stream(meter) => meter.finish(),
            Self::Body(body) => {
                let measured = body.meter.finish(now);
                body.stats = Some(StreamStats {
                    e2el: body.is_timed.then_some(measured.e2el),
                    usage: measured.usage,
                    token_events: measured.estimated,
                    error: measured.error,
                    answer: measured.answer,
                    ..StreamStats::default()
                });
                Forward::new()
            }
        }
    }

    /// How far the response has come. A body is open from its first byte on.
    pub(super) fn stage(&self) -> StreamStage {
        match self {
            Self::Stream(meter) => meter.stage(),
            Self::Body(_) => StreamStage::Open,
        }
    }

    /// Events of a stream that show work, and tokens that came, so far.
    pub(super) fn progress(&self) -> (u64, u64) {
        match self {
            Self::Stream(meter) => (meter.progress(), meter.tokens()),
            Self::Body(_) => (0, 0),
        }
    }

    /// Whether bytes of an event that is no comment came last, and its end did not.
    pub(super) fn is_inside_event(&self) -> bool {
        match self {
            Self::Stream(meter) => meter.is_inside_event(),
            Self::Body(_) => true,
        }
    }

    /// Events of a stream that are no pings so far, if no event is open.
    pub(super) fn events_between(&self) -> Option<u64> {
        match self {
            Self::Stream(meter) => meter.events_between(),
            Self::Body(_) => None,
        }
    }

    /// Whether the first token was seen. In a body that is its first byte.
    pub(super) fn has_content(&self) -> bool {
        match self {
            Self::Stream(meter) => meter.first_content_at().is_some(),
            Self::Body(_) => true,
        }
    }

    /// Prompt tokens that a stream has reported so far. A body reports them when it is over.
    pub(super) fn prompt_tokens(&self) -> Option<u64> {
        match self {
            Self::Stream(meter) => meter.prompt_tokens(),
            Self::Body(_) => None,
        }
    }

    /// The error that the response reports.
    pub(super) fn error(&self) -> Option<&UpstreamError> {
        match self {
            Self::Stream(meter) => meter.error(),
            Self::Body(body) => body.stats.as_ref().and_then(|stats| stats.error.as_ref()),
        }
    }

    /// Whether the response has marked its end.
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Stream(meter) => meter.is_done(),
            Self::Body(body) => body.stats.is_some(),
        }
    }

    /// The measurements.
    pub(super) fn stats(&self) -> StreamStats {
        match self {
            Self::Stream(meter) => meter.stats(),
            Self::Body(body) => body.stats.clone().unwrap_or_default(),
        }
    }
}

/// The engine's own admission control.
pub(super) fn is_busy(error: &UpstreamError) -> bool {
    error.code == Some(503)
}

/// An error that the client caused.
pub(super) fn is_client_error(error: &UpstreamError) -> bool {
    error.code.is_some_and(|code| (400..500).contains(&code))
}
