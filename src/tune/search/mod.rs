//! Chooses the next setting to try: one interface, several methods.
//!
//! A search reads no clock, and its randomness comes from the seed: the same outcomes lead to the
//! same trials, and a tuning can resume.
//!
//! | method | asks for |
//! |---|---|
//! | `race` | every setting of the grid against the best so far, unless earlier trials exclude it |
//! | `random` | settings at random against the best so far, for comparison |
//! | `model` | the largest gain that a Gaussian process expects, if the engine is likely to start |
//! | `auto-tune` | the grid of vLLM's `auto_tune.sh`, for comparison |

mod pruned;
mod ask;
mod prune;
mod race;
mod gaussian;
mod model;
mod script;
mod method;

pub(crate) use ask::{Ask, Known};
pub use ask::{best, score};
pub use method::Method;
pub use pruned::Pruned;
