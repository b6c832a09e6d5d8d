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
}

impl Dialect {
    /// The dialect of a route's streams. Routes that never stream get [`Dialect::Choices`], whose errors have the same form.
    pub const fn of(route: Route) -> Self {
        match route {
            Route::Responses | Route::StoredResponse | Route::CancelResponse => Self::Responses,
            Route::Messages => Self::Messages,
            _ => Self::Choices,
        }
    }
}

/// What kind of event it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventKind {
    /// Output: text, reasoning, tool call or (with choices) a finish reason.
    Content,
    /// Part of the response, but without output: a role, an empty delta, the start or end of a message.
    Empty,
    /// Usage and no choices: the event that `include_usage` causes.
    Usage,
    /// An error.
    Error,
    /// The end: `[DONE]`, `message_stop`.
    Done,
    /// Anything else: comments, pings, unreadable events.
    #[default]
    Other,
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
    /// What it says of the answer.
    pub answer: Answer,
    /// The usage it reports; on content events only with continuous usage.
    pub usage: Option<TokenUsage>,
    /// The error, on [`EventKind::Error`].
    pub error: Option<Box<UpstreamError>>,
}
