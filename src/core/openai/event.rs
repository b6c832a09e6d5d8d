//! What an event of a stream can mean: the types that readers of events share.
//!
//! [`chunk`](super::chunk) fills them by scanning, [`fast`](super::fast) by matching a template, and the meter consumes
//! them. They stand apart so that neither reader imports the other.

use super::response::{TokenUsage, UpstreamError};
use super::route::Route;

/// The language in which a stream's events are written.
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
    /// The dialect of a route's streams. Routes that never stream get [`Dialect::Choices`], where errors look the same.
    pub const fn of(route: Route) -> Self {
        match route {
            Route::Responses => Self::Responses,
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
    /// Part of the answer, but without output: a role, an empty delta, the frame of a message.
    Empty,
    /// Usage and no choices: the event that `include_usage` causes.
    Usage,
    /// An error.
    Error,
    /// The end: `[DONE]`, `message_stop`.
    Done,
    /// Anything else: comments, pings, what cannot be read.
    #[default]
    Other,
}

/// One event, understood.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamEvent {
    /// Its kind.
    pub kind: EventKind,
    /// Whether it says why the answer ends (a finish reason, a stop reason, a terminal response).
    pub finish: bool,
    /// Whether the reason is that the engine gave the answer up: vLLM says `abort` when it is told to stop.
    pub aborted: bool,
    /// Usage that it reports; on content events only with continuous usage.
    pub usage: Option<TokenUsage>,
    /// The error, on [`EventKind::Error`].
    pub error: Option<Box<UpstreamError>>,
}
