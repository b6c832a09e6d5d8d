//! The smallest types: sizes with units, dense ids, trace ids, a deterministic random generator.
//!
//! Nothing here reads a clock, opens a file or draws from global randomness: time and chance are
//! parameters, so that whole-system tests can run on virtual time from a seed.

pub mod hash;
pub mod ids;
#[macro_use]
mod labels;
pub mod rng;
pub mod units;
pub mod trace_context;

pub use hash::hash_two;
pub use ids::{BackendId, ModelId, PoolId};
pub use rng::Rng;
pub use trace_context::TraceParent;
pub use units::{ByteSize, Period, Tokens};
