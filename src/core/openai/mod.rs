//! The bytes of OpenAI-compatible requests and responses: read once, without trees, edited in
//! place.
//!
//! [`route`] served paths · [`scan`] pull scanner over JSON · [`request`], [`request_error`] fields
//! of a request · [`prompt`], [`shape`] the prompt and its size · [`prefix`] hashes of its
//! beginnings · [`multipart`] the audio routes · [`invocation`] SageMaker's path · [`rewrite`]
//! edits without copying · [`sse`] events of a stream · [`event`] their meaning · [`chunk`],
//! [`fast`] read an event · [`condense`], [`long_event`] read any size piece by piece · [`choices`]
//! open choices of a stream · [`kept_text`] the answer so far · [`not_continued`] why another
//! engine cannot continue it · [`response`] usage, error and output bytes of a whole response ·
//! [`engine_times`] times that the engine reports ·
//! [`error`] refusals as HTTP, with [`limit`]s and a [`route_hint`] · [`kserve`] paths that name a
//! model · [`job_cost`] work that is not counted in tokens.
//!
//! Pure functions of bytes: no clock, no I/O, and no state except one stream's.

mod block;
pub mod choices;
pub mod engine_times;
pub mod response;
pub mod chunk;
pub mod condense;
pub mod limit;
pub mod long_event;
pub mod kserve;
pub mod route;
pub mod route_hint;
pub mod error;
pub mod event;
pub mod not_continued;
pub mod kept_text;
pub mod patch;
mod fast;
pub mod invocation;
pub mod multipart;
mod output_text;
pub mod prompt;
pub mod prefix;
pub mod request;
pub mod request_error;
pub mod rewrite;
pub mod scan;
pub mod job_cost;
pub mod shape;
pub mod sse;

pub use engine_times::EngineTimes;
pub use error::{Refusal, ShedReason, error_codes};
pub use event::{Dialect, EventKind, StreamEvent};
pub use kept_text::KeptText;
pub use limit::{KeyLimit, LimitUnit, TooLarge};
pub use not_continued::NotContinued;
pub use prefix::{Beginning, PromptParts, PromptPrefix};
pub use request::RequestView;
pub use request_error::RequestError;
pub use response::{Answer, FinishReason, TokenUsage, UpstreamError};
pub use rewrite::{EditPoints, EditedBody, Edits, UsageEdit};
pub use route::{ErrorFormat, Route};
pub use route_hint::RouteHint;
pub use shape::{PromptShape, TextShape};
