//! The two OpenAI routes that generate text.
//!
//! Chats and completions share the engine and most fields. The code matches on this type where
//! fields, limits or the bytes of the response differ.

/// One of the two generating routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}
