//! The simulated machine: how long a step takes on a GPU, and how much memory is left for the KV cache.
//!
//! Both are formulas over a [`crate::profile`]. They are pure and know no requests, only sizes and counts.

pub mod cost;
pub mod memory;
