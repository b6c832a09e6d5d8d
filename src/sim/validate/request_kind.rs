//! The two OpenAI routes that generate text.
//!
//! Chats and completions share the engine and most fields. Where they differ, the code matches on
//! this type.

/// One of the two generating routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}
