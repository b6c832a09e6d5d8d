//! The meaning of one event of a stream.
//!
//! [`chunk`](super::chunk) makes these values by scanning, the fast path by matching a template;
//! the meter reads them. They are in a separate file so that the two readers do not import each
//! other.

use super::engine_times::EngineTimes;
use super::response::{Answer, TokenUsage, UpstreamError};
use super::route::Route;

/// The format of a stream's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `choices[].delta` or `choices[].text`, ended by `[DONE]`.
    Choices,
    /// OpenAI Responses: `event: response.*`.
    Responses,
    /// Anthropic Messages.
    Messages,
    /// Cohere's chat: typed events such as `content-delta`, ended by `message-end` and `[DONE]`.
    Cohere,
    /// Every event is output, and the body ends the stream: KServe's `generate_stream`, and streams
    /// of other jobs.
    Plain,
}

impl Dialect {
    /// The dialect of a route's streams. Routes that never stream get [`Dialect::Choices`], because
    /// their errors have the same form.
    pub const fn of(route: Route) -> Self {
        match route {
            Route::Responses | Route::StoredResponse | Route::CancelResponse => Self::Responses,
            Route::Messages => Self::Messages,
            Route::CohereChat => Self::Cohere,
            route if route.is_job() => Self::Plain,
            _ => Self::Choices,
        }
    }
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventKind {
    /// Output: text, reasoning, tool call or (with choices) a finish reason.
    Content,
    /// The response was accepted: `response.created`, `message_start`, an event without choices.
    /// The engine may not have begun.
    Lifecycle,
    /// Part of the response, but without output: a role, an empty delta.
    Empty,
    /// The start or end of a part of the response: an item, a block, a tool call.
    Part,
    /// Usage and no choices: the event that `include_usage` causes.
    Usage,
    /// An error.
    Error,
    /// The end: `[DONE]`, `message_stop`.
    Done,
    /// Keeps the connection alive: a comment, a ping.
    Ping,
    /// Any other event: unreadable, or of an unknown format.
    #[default]
    Other,
}

impl EventKind {
    /// Whether the event shows that the engine works for this stream. A server that has lost its
    /// engine may go on sending the other kinds.
    pub fn is_progress(self) -> bool {
        !matches!(self, Self::Lifecycle | Self::Empty | Self::Ping)
    }

    /// Whether the event belongs to the response but has no output. E2EL includes the time until
    /// such an event.
    pub fn carries_choices(self) -> bool {
        matches!(self, Self::Lifecycle | Self::Empty | Self::Part)
    }

    /// Whether the event may precede the first token. Before the first token, another engine's
    /// response can still replace this one.
    pub fn is_preamble(self) -> bool {
        matches!(self, Self::Lifecycle | Self::Empty | Self::Part | Self::Usage | Self::Ping)
    }
}

impl StreamEvent {
    /// Whether the event carries output and nothing else.
    pub fn is_text(&self) -> bool {
        let says_more = self.finish || self.aborted || self.usage.is_some() || self.answer != Answer::default();
        self.kind == EventKind::Content && !says_more
    }
}

/// The meaning of one event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamEvent {
    /// The kind.
    pub kind: EventKind,
    /// Whether the event carries a finish reason, a stop reason or a terminal response.
    pub finish: bool,
    /// Whether the finish reason is `abort`: the engine ended the request, as vLLM does at
    /// shutdown.
    pub aborted: bool,
    /// Bytes of output in the event, escapes included: texts, reasoning and tool calls.
    pub text: u64,
    /// The answer, as the event describes it.
    pub answer: Answer,
    /// The usage that the event reports. Content events report it only with continuous usage.
    pub usage: Option<TokenUsage>,
    /// The times that the engine measured. Only usage events have them.
    pub times: Option<EngineTimes>,
    /// The error, on [`EventKind::Error`].
    pub error: Option<Box<UpstreamError>>,
}
