//! The bytes of OpenAI-compatible requests and answers: read once, without trees, and edited in place.
//!
//! [`route`] paths that are served · [`scan`] pull scanner over JSON · [`request`] what a body says ·
//! [`prompt`], [`shape`] where the prompt is and what it looks like · [`multipart`] the audio routes ·
//! [`rewrite`] edits without copying · [`sse`] events of a stream · [`chunk`], [`fast`] what one event
//! means · [`response`] usage and error of a whole answer · [`error`] the only table from refusals to HTTP.
//!
//! Pure functions of bytes: no clock, no I/O, no state beyond one stream's.

pub mod response;
pub mod chunk;
pub mod error;
pub mod event;
mod fast;
pub mod multipart;
pub mod prompt;
pub mod request;
pub mod request_error;
pub mod rewrite;
pub mod route;
pub mod scan;
pub mod shape;
pub mod sse;

pub use error::{ErrorFormat, Refusal, ShedReason};
pub use event::{Dialect, EventKind, StreamEvent};
pub use request::RequestView;
pub use request_error::RequestError;
pub use response::{TokenUsage, UpstreamError};
pub use rewrite::{EditPoints, EditedBody, Edits, UsageEdit};
pub use route::Route;
pub use shape::{PromptShape, TextShape};
