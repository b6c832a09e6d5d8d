//! Requests as clients write them: bodies of the generating routes -> what to generate, or vLLM's refusal.
//!
//! ```text
//! bytes -> body (JSON, rules, fields) -> model -> prompt (template, tokenizer, length) -> sampling -> GenerateRequest
//! ```
//!
//! Each stage refuses in vLLM's words and in its order, so that of two mistakes the same one is told. Defaults are
//! vLLM's: `max_tokens` is 16 for completions and the rest of the context for chats; `max_completion_tokens` wins; what
//! does not fit the context is clamped; a prompt that is longer than it is refused; a list of prompts fans out.

mod body;
mod generate_request;
pub(super) mod json;
mod messages;
pub mod prompt;
pub(super) mod pydantic;
mod request_kind;
mod rules;
mod sampling;
pub(super) mod schema;
#[cfg(test)]
mod tests;

pub(super) use body::RequestBody;
pub use generate_request::GenerateRequest;
pub(crate) use generate_request::ServerLimits;
pub use prompt::{Prompt, TextModel};
pub use request_kind::RequestKind;
