//! The words the rest of the house is written in: sizes with units, dense ids, a small
//! deterministic generator.
//!
//! Nothing here reads a clock, opens a file or draws from global randomness: time and chance are
//! parameters everywhere, which is what lets whole-system tests run on virtual time from a seed.

pub mod ids;
pub mod rng;
pub mod units;

pub use ids::{BackendId, ModelId, PoolId};
pub use rng::Rng;
pub use units::{ByteSize, Period, Tokens};
