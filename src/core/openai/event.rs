//! The meaning of one event of a stream: the types that both readers fill.
//!
//! [`chunk`](super::chunk) fills them by scanning, the fast path by matching a template; the meter consumes them. They have a
//! file of their own so that neither reader imports the other.

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
    /// Cohere's chat: typed events like `content-delta`, ended by `message-end` and `[DONE]`.
    Cohere,
}

impl Dialect {
    /// The dialect of a route's streams. Routes that never stream get [`Dialect::Choices`], whose errors have the same form.
    pub const fn of(route: Route) -> Self {
        match route {
            Route::Responses | Route::StoredResponse | Route::CancelResponse => Self::Responses,
            Route::Messages => Self::Messages,
            Route::CohereChat => Self::Cohere,
            _ => Self::Choices,
        }
    }
}

/// What kind of event it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventKind {
    /// Output: text, reasoning, tool call or (with choices) a finish reason.
    Content,
    /// The response has been accepted: `response.created`, `message_start`, an event without choices. Its engine may not have
    /// begun.
    Lifecycle,
    /// Part of the response, but without output: a role, an empty delta.
    Empty,
    /// The start or end of a part of the response: an item, a block, a call of a tool.
    Part,
    /// Usage and no choices: the event that `include_usage` causes.
    Usage,
    /// An error.
    Error,
    /// The end: `[DONE]`, `message_stop`.
    Done,
    /// It only keeps the connection alive: a comment, a ping.
    Ping,
    /// Anything else: unreadable events, events of a format that is not known.
    #[default]
    Other,
}

impl EventKind {
    /// Whether it shows that the engine works for this stream. A program that has lost its engine may go on to send the others.
    pub fn is_progress(self) -> bool {
        !matches!(self, Self::Lifecycle | Self::Empty | Self::Ping)
    }

    /// Whether it is part of the response without output: the end of the response is not before it.
    pub fn carries_choices(self) -> bool {
        matches!(self, Self::Lifecycle | Self::Empty | Self::Part)
    }

    /// Whether it may precede the first token: another engine's response can still take the place of this one.
    pub fn is_preamble(self) -> bool {
        matches!(self, Self::Lifecycle | Self::Empty | Self::Part | Self::Usage | Self::Ping)
    }
}

impl StreamEvent {
    /// Whether the event is output, and carries nothing else.
    pub fn is_text(&self) -> bool {
        let says_more = self.finish || self.aborted || self.usage.is_some() || self.answer != Answer::default();
        self.kind == EventKind::Content && !says_more
    }
}

/// What one event means.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamEvent {
    /// Its kind.
    pub kind: EventKind,
    /// Whether it carries a finish reason, a stop reason or a terminal response.
    pub finish: bool,
    /// Whether the finish reason is `abort`: the engine ended the request, as vLLM does when it shuts down.
    pub aborted: bool,
    /// Bytes of output as they are written in the event: texts, reasoning and tool calls.
    pub text: u64,
    /// What it says of the answer.
    pub answer: Answer,
    /// The usage it reports; on content events only with continuous usage.
    pub usage: Option<TokenUsage>,
    /// The error, on [`EventKind::Error`].
    pub error: Option<Box<UpstreamError>>,
}
