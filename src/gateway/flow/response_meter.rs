//! The meter of one response: a stream of events, or a body that arrives at once.
//!
//! One small enum, so that the pump has one path. Both kinds report in the same form; a body has no
//! TTFT, ITL and TPOT, except that the first byte of a job counts as TTFT. Time is a parameter.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use sluice_core::meter::{BodyMeter, Forward, StreamMeter, StreamStage, StreamStats, Strip, UsageBounds};
use sluice_core::openai::{Dialect, Route, UpstreamError};

pub(super) enum ResponseMeter {
    /// `text/event-stream`.
    Stream(Box<StreamMeter>),
    /// Any other response.
    Body(Box<MeteredBody>),
}

/// A body, and the measurements once it is complete.
pub(super) struct MeteredBody {
    meter: BodyMeter,
    is_timed: bool,
    /// When the request arrived, if it is a job, and the time to the first byte.
    job: Option<(Instant, Option<Duration>)>,
    stats: Option<StreamStats>,
}

impl ResponseMeter {
    pub(super) fn stream(route: Route, arrived: Instant, strip: Strip) -> Self {
        Self::Stream(Box::new(StreamMeter::new(Dialect::of(route), arrived, strip)))
    }

    pub(super) fn body(route: Route, arrived: Instant) -> Self {
        let job = route.is_job().then_some((arrived, None));
        Self::Body(Box::new(MeteredBody { meter: BodyMeter::new(arrived), is_timed: true, job, stats: None }))
    }

    /// Believes the engine's usage within these bounds only. Limits, records and metrics all get
    /// the believed usage.
    pub(super) fn within(mut self, bounds: UsageBounds) -> Self {
        match &mut self {
            Self::Stream(meter) => meter.set_bounds(bounds),
            Self::Body(body) => body.meter.set_bounds(bounds),
        }
        self
    }

    pub(super) fn is_stream(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    pub(super) fn as_stream(&self) -> Option<&StreamMeter> {
        match self {
            Self::Stream(meter) => Some(meter),
            Self::Body(_) => None,
        }
    }

    pub(super) fn as_stream_mut(&mut self) -> Option<&mut StreamMeter> {
        match self {
            Self::Stream(meter) => Some(meter),
            Self::Body(_) => None,
        }
    }

    /// Measures a chunk. Returns the bytes that go to the client.
    pub(super) fn feed(&mut self, chunk: Bytes, now: Instant) -> Forward {
        match self {
            Self::Stream(meter) => meter.feed(chunk, now),
            Self::Body(body) => {
                body.meter.feed(&chunk);
                if let Some((arrived, first)) = &mut body.job {
                    first.get_or_insert_with(|| now.saturating_duration_since(*arrived));
                }
                let mut forward = Forward::new();
                forward.push(chunk);
                forward
            }
        }
    }

    /// Notes that from now on bytes arrive later than the engine sends them. The response then has
    /// no ITL, TPOT and E2EL.
    pub(super) fn stop_timing(&mut self) {
        match self {
            Self::Stream(meter) => meter.stop_timing(),
            Self::Body(body) => body.is_timed = false,
        }
    }

    pub(super) fn end_of_body(&mut self, now: Instant) {
        if let Self::Stream(meter) = self {
            meter.end_of_body(now);
        }
    }

    /// Ends the response. Returns the bytes that were held back.
    pub(super) fn finish(&mut self, now: Instant) -> Forward {
        match self {
            Self::Stream(meter) => meter.finish(),
            Self::Body(body) => {
                let measured = body.meter.finish(now);
                body.stats = Some(StreamStats {
                    ttft: body.job.and_then(|(_, first)| first),
                    e2el: body.is_timed.then_some(measured.e2el),
                    usage: measured.usage,
                    times: measured.times,
                    token_events: measured.estimated,
                    error: measured.error,
                    answer: measured.answer,
                    ..StreamStats::default()
                });
                Forward::new()
            }
        }
    }

    /// How far the response has come. A body is open from the first byte on.
    pub(super) fn stage(&self) -> StreamStage {
        match self {
            Self::Stream(meter) => meter.stage(),
            Self::Body(_) => StreamStage::Open,
        }
    }

    /// The number of events that show work, and of tokens, in a stream so far.
    pub(super) fn progress(&self) -> (u64, u64) {
        match self {
            Self::Stream(meter) => (meter.progress(), meter.tokens()),
            Self::Body(_) => (0, 0),
        }
    }

    /// Whether the last bytes belong to an event that has not ended and is no comment.
    pub(super) fn is_inside_event(&self) -> bool {
        match self {
            Self::Stream(meter) => meter.is_inside_event(),
            Self::Body(_) => true,
        }
    }

    /// The number of events in a stream so far, without pings; `None` while an event is open.
    pub(super) fn events_between(&self) -> Option<u64> {
        match self {
            Self::Stream(meter) => meter.events_between(),
            Self::Body(_) => None,
        }
    }

    /// Whether the first token was seen; for a body, the first byte.
    pub(super) fn has_content(&self) -> bool {
        match self {
            Self::Stream(meter) => meter.first_content_at().is_some(),
            Self::Body(_) => true,
        }
    }

    /// Prompt tokens that a stream has reported so far. A body reports them at the end.
    pub(super) fn prompt_tokens(&self) -> Option<u64> {
        match self {
            Self::Stream(meter) => meter.prompt_tokens(),
            Self::Body(_) => None,
        }
    }

    pub(super) fn error(&self) -> Option<&UpstreamError> {
        match self {
            Self::Stream(meter) => meter.error(),
            Self::Body(body) => body.stats.as_ref().and_then(|stats| stats.error.as_ref()),
        }
    }

    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Stream(meter) => meter.is_done(),
            Self::Body(body) => body.stats.is_some(),
        }
    }

    pub(super) fn stats(&self) -> StreamStats {
        match self {
            Self::Stream(meter) => meter.stats(),
            Self::Body(body) => body.stats.clone().unwrap_or_default(),
        }
    }
}

/// Whether the error comes from the engine's admission control.
pub(super) fn is_busy(error: &UpstreamError) -> bool {
    error.code == Some(503)
}

pub(super) fn is_client_error(error: &UpstreamError) -> bool {
    error.code.is_some_and(|code| (400..500).contains(&code))
}
