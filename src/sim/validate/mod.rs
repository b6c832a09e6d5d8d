//! Validates the bodies of the generating routes as vLLM does.
//!
//! ```text
//! bytes -> RequestBody (JSON, rules, fields) -> model -> prompt (template, tokenizer, length)
//!       -> sampling -> GenerateRequest
//! ```
//!
//! Each stage refuses with vLLM's status, type and message. Stages and checks have vLLM's order, so
//! that the simulator and vLLM report the same one of two mistakes. The texts must stay word for
//! word: the conformance test compares them with a real server.

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
mod shape;
#[cfg(test)]
mod tests;

pub(super) use body::RequestBody;
pub use generate_request::GenerateRequest;
pub(crate) use generate_request::ServerLimits;
pub use prompt::{Prompt, TextModel};
pub use request_kind::RequestKind;
pub(crate) use shape::ShapedText;
pub use shape::{CalledTool, Shape};
