//! Reads one response stream and measures it.
//!
//! All events in one read from the network share the time of that read. A response is complete if
//! the body ended properly, had a token event and no error, and marked the end: by `[DONE]`, by a
//! finish reason for every choice, or by usage without choices. Everything else is a
//! [`RequestFailure`] without a timing, because fast refusals would improve percentiles. (`vllm
//! bench serve` does not require that the end is marked.)
//!
//! Chunks never count as tokens. Bounds: [`MAX_EVENTS`] token events.

use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::Instant;

use crate::client::events::{ChoiceText, EventReader, Message, StreamError};
use crate::client::failure::RequestFailure;
use crate::client::target::HttpConnection;
use crate::load::body::Api;
use crate::load::workload::LoadRequest;

/// A stream with more token events counts as endless.
const MAX_EVENTS: usize = 1 << 20;

/// Measurements of a completed response.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// Time from the start to the first token event.
    pub ttft: Duration,
    /// Time from the start to the last token event.
    pub e2el: Duration,
    /// Gaps between successive token events.
    pub gaps: Vec<Duration>,
    /// Completion tokens that the server reported.
    pub output_tokens: Option<u64>,
    /// Prompt tokens that the server reported.
    pub prompt_tokens: Option<u64>,
    /// Prompt tokens that the server reported as found in the prefix cache.
    pub cached_tokens: Option<u64>,
    /// The texts of the choices, if requested.
    pub texts: Option<Vec<ChoiceText>>,
}

impl Timing {
    /// The text of the first choice, if requested.
    pub fn text(&self) -> Option<&str> {
        let texts = self.texts.as_ref()?;
        Some(texts.first().map_or("", |first| first.text.as_str()))
    }
}

/// Reads the response stream of `request`.
///
/// # Errors
/// The stream is incomplete, malformed or reports an error; or the client left on purpose.
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
    // An error of `finish` is ignored: if the last line is not a message, `state` reports a cut
    // stream.
    let _ = reader.finish(|message| state.record(message, last));
    if let Some(failure) = state.failure() {
        return Err(failure);
    }
    if !reader.any_data() {
        return Err(RequestFailure::Malformed);
    }
    Ok(Timing { texts: reader.into_texts(), ..state.finish(start)? })
}

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
    choices: u64,
    finished: u64,
}

impl StreamState {
    fn record(&mut self, message: Message, now: Instant) {
        self.done |= message.done || message.summary && self.first.is_some();
        self.choices |= message.choices;
        self.finished |= message.finished;
        self.aborted |= message.aborted;
        if let Some(error) = message.error {
            self.error.get_or_insert(error);
        }
        if let Some(usage) = message.usage {
            self.output_tokens = usage.completion_tokens.or(self.output_tokens);
            self.prompt_tokens = usage.prompt_tokens.or(self.prompt_tokens);
            self.cached_tokens = usage.cached_tokens.or(self.cached_tokens);
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
        let all_finished = self.choices != 0 && self.choices == self.finished;
        if !self.done && !all_finished {
            return Err(RequestFailure::Truncated);
        }
        let (Some(first), Some(last)) = (self.first, self.last) else { return Err(RequestFailure::Empty) };
        Ok(Timing {
            ttft: first.saturating_duration_since(start),
            e2el: last.saturating_duration_since(start),
            // As in `vllm bench serve`, 0 means that there is no count.
            output_tokens: self.output_tokens.filter(|tokens| *tokens > 0),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            texts: None,
            gaps: self.gaps,
        })
    }
}
