//! Which setting to try next: one interface, several methods.
//!
//! A search asks for a trial and is given its outcome. It reads no clock, and its randomness comes from the seed, so the same
//! outcomes lead to the same trials. That makes a tuning resumable.
//!
//! | method | asks for |
//! |---|---|
//! | `race` | every setting of the grid, against the best so far; leaves out what earlier trials exclude |
//! | `halving` | every setting with a few requests, the best third with three times as many, and so on |
//! | `random` | settings at random, against the best so far: for comparison |
//! | `model` | where a Gaussian process expects the largest gain, and the engine to start |
//! | `auto-tune` | what vLLM's `auto_tune.sh` tries: for comparison |

mod pruned;
mod ask;
mod prune;
mod race;
mod halving;
mod gaussian;
mod model;
mod script;
mod method;

pub(crate) use ask::{Ask, Known};
pub use ask::{best, score};
pub use method::Method;
pub use pruned::Pruned;
