//! The bytes of OpenAI-compatible requests and answers: read once, without trees, and edited in place.
//!
//! [`route`] paths that are served · [`scan`] pull scanner over JSON · [`request`] what a body says ·
//! [`prompt`], [`shape`] where the prompt is and what it looks like · [`multipart`] the audio routes ·
//! [`rewrite`] edits without copying · [`sse`] events of a stream · [`chunk`], [`fast`] what one event
//! means · [`answer`] usage and error of a whole answer · [`error`] the only table from refusals to HTTP.
//!
//! Pure functions of bytes: no clock, no I/O, no state beyond one stream's.

pub mod answer;
pub mod chunk;
pub mod error;
mod fast;
pub mod multipart;
pub mod prompt;
pub mod request;
pub mod rewrite;
pub mod route;
pub mod scan;
pub mod shape;
pub mod sse;

pub use answer::{StreamError, TokenUsage};
pub use chunk::{Dialect, Event, EventKind};
pub use error::{Refusal, ShedReason};
pub use request::{RequestError, RequestView};
pub use rewrite::{Body, EditPoints, Edits, Usage};
pub use route::Route;
pub use shape::{PromptShape, TextShape};
