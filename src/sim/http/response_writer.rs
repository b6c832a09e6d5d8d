//! Writes responses in one of three formats: OpenAI's chunks, OpenAI's responses, Anthropic's
//! messages.
//!
//! Each format has five operations: start of a choice, tokens, end, complete body, error inside a
//! stream. The writer is an enum, not a trait object, because every token passes through it.

use crate::http::anthropic;
use crate::http::choice::Choice;
use crate::http::error_body::ErrorBody;
use crate::http::responses;
use crate::http::wire::{ChunkWriter, CompleteChoice, Finish, Piece, UsageCounts};

#[derive(Debug)]
pub(crate) enum ResponseWriter {
    /// `/v1/chat/completions` and `/v1/completions`
    Chunks(ChunkWriter),
    Messages(anthropic::MessagesWriter),
    Responses(Box<responses::ResponsesWriter>),
}

impl ResponseWriter {
    pub(crate) fn open(&mut self, out: &mut String, index: usize, choice: &Choice, usage: UsageCounts) {
        match self {
            Self::Chunks(envelope) => envelope.role(out, index, choice.prompt_ids().as_deref(), usage),
            Self::Messages(writer) => writer.open(out, usage, choice.call()),
            Self::Responses(writer) => writer.open(out, choice.call()),
        }
    }

    pub(crate) fn content(&mut self, out: &mut String, index: usize, piece: &Piece, usage: UsageCounts) {
        match self {
            Self::Chunks(envelope) => envelope.content(out, index, piece, usage),
            Self::Messages(writer) => writer.content(out, piece),
            Self::Responses(writer) => writer.content(out, piece),
        }
    }

    pub(crate) fn end(&mut self, out: &mut String, usage: UsageCounts, finish: Finish) {
        match self {
            Self::Chunks(envelope) => envelope.end(out, usage),
            Self::Messages(writer) => writer.end(out, usage, finish),
            Self::Responses(writer) => writer.end(out, usage, finish),
        }
    }

    pub(crate) fn body(&self, choices: &[CompleteChoice], usage: UsageCounts) -> String {
        match self {
            Self::Chunks(envelope) => envelope.body(choices, usage),
            Self::Messages(writer) => writer.body(choices, usage),
            Self::Responses(writer) => writer.body(choices, usage),
        }
    }

    /// An error inside a stream; ends the stream.
    pub(crate) fn error(&self, error: &ErrorBody) -> String {
        match self {
            Self::Chunks(_) | Self::Responses(_) => error.event(),
            Self::Messages(_) => anthropic::error_event(error),
        }
    }
}
