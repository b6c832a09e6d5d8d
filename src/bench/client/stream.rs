//! Reads one response stream and measures it.
//!
//! All events in one read from the network share the time of that read. A response is complete when it had at least one
//! token event, no error message, and `[DONE]` at its end. Everything else is a [`RequestFailure`] without a timing, because
//! fast refusals would improve percentiles. Bounds: [`MAX_EVENTS`] token events.

use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::Instant;

use crate::client::events::{EventReader, Message, StreamError};
use crate::client::failure::RequestFailure;
use crate::client::target::HttpConnection;
use crate::load::body::Api;
use crate::load::workload::LoadRequest;

/// The most token events of one response. A stream with more counts as one that never ends.
const MAX_EVENTS: usize = 1 << 20;

/// What the client measured of a completed response.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// Start to first token event.
    pub ttft: Duration,
    /// Start to last token event.
    pub e2el: Duration,
    /// Gaps between successive token events: one fewer than there were events.
    pub gaps: Vec<Duration>,
    /// Completion tokens by the server's usage; without one, the number of events.
    pub output_tokens: u64,
    /// Prompt tokens by the server's usage, when it sent one.
    pub prompt_tokens: Option<u64>,
    /// Prompt tokens found in the prefix cache, if the server reports it.
    pub cached_tokens: Option<u64>,
    /// The text, when the request asked for it.
    pub text: Option<String>,
}

/// Reads the response stream of `request` to its end.
///
/// # Errors
/// The stream is incomplete, malformed or reports an error; or the client left as the request specifies.
pub(super) async fn read_stream(
    api: Api,
    connection: &mut HttpConnection,
    mut body: Incoming,
    request: &LoadRequest,
    start: Instant,
) -> Result<Timing, RequestFailure> {
    let mut reader = EventReader::new(api);
    if request.keep_text {
        reader = reader.keeping_text();
    }
    let mut state = StreamState::default();
    let mut last = start;
    while let Some(frame) = connection.drive(body.frame()).await {
        let Ok(frame) = frame else { return Err(state.failure().unwrap_or(RequestFailure::Truncated)) };
        let Some(piece) = frame.data_ref() else { continue };
        let now = Instant::now();
        last = now;
        let fed = reader.feed(piece, |message| state.record(message, now));
        if let Some(failure) = state.failure() {
            return Err(failure);
        }
        fed.map_err(|_| RequestFailure::Malformed)?;
        if request.leave_after.is_some_and(|events| state.events() >= events as usize && !state.done) {
            return Err(RequestFailure::ClientLeft);
        }
    }
    // A last line without a newline counts, as in `vllm bench serve`. If it is not a message the stream was cut, which
    // `finish` reports.
    let _ = reader.feed(b"\n", |message| state.record(message, last));
    if let Some(failure) = state.failure() {
        return Err(failure);
    }
    Ok(Timing { text: reader.into_text(), ..state.finish(start)? })
}

/// The state of a stream so far.
#[derive(Default)]
struct StreamState {
    first: Option<Instant>,
    last: Option<Instant>,
    gaps: Vec<Duration>,
    output_tokens: Option<u64>,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    error: Option<StreamError>,
    endless: bool,
    done: bool,
    aborted: bool,
}

impl StreamState {
    fn record(&mut self, message: Message, now: Instant) {
        self.done |= message.done;
        self.aborted |= message.aborted;
        if let Some(error) = message.error {
            self.error.get_or_insert(error);
        }
        if let Some(usage) = message.usage {
            self.output_tokens = Some(usage.completion_tokens);
            self.prompt_tokens = Some(usage.prompt_tokens);
            self.cached_tokens = usage.cached_tokens;
        }
        if !message.token {
            return;
        }
        match self.last.replace(now) {
            None => self.first = Some(now),
            Some(_) if self.gaps.len() + 1 >= MAX_EVENTS => self.endless = true,
            Some(previous) => self.gaps.push(now - previous),
        }
    }

    fn events(&self) -> usize {
        self.first.map_or(0, |_| self.gaps.len() + 1)
    }

    fn failure(&self) -> Option<RequestFailure> {
        let failed = self
            .error
            .map(|error| RequestFailure::InStream(error.code))
            .or(self.aborted.then_some(RequestFailure::Aborted));
        failed.or(self.endless.then_some(RequestFailure::TooManyEvents))
    }

    fn finish(self, start: Instant) -> Result<Timing, RequestFailure> {
        if !self.done {
            return Err(RequestFailure::Truncated);
        }
        let (Some(first), Some(last)) = (self.first, self.last) else { return Err(RequestFailure::Empty) };
        Ok(Timing {
            ttft: first.saturating_duration_since(start),
            e2el: last.saturating_duration_since(start),
            output_tokens: self.output_tokens.unwrap_or(self.gaps.len() as u64 + 1),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            text: None,
            gaps: self.gaps,
        })
    }
}
