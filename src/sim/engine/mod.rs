//! The engine: vLLM V1's step loop on virtual time.
//!
//! One call of [`Engine::step`] is one forward pass: it chooses the sequences that advance
//! ([`schedule`]), computes the duration ([`CostModel`](crate::machine::CostModel)), samples a
//! token for every sequence whose tokens are all computed, and frees finished sequences.
//!
//! Asynchronous scheduling ([`EngineConfig::async_scheduling`], vLLM's default): step N + 1 is
//! planned when step N starts. A request that arrives during N is first considered for N + 2. A
//! sequence that ends in N keeps its place and its blocks until N + 1 has run. An idle engine plans
//! at once.
//!
//! Pure: no clock, no I/O. The caller bounds the number of requests. Every admitted request ends
//! exactly once. The rules follow vLLM 0.33 and are checked against recordings of its scheduler
//! (`tests/traces.rs`). Speculative decoding is in [`speculation`]. Not simulated: encoders, KV
//! transfer, sliding windows.

mod adapters;
mod blocks;
mod content;
mod id;
mod outcome;
mod request;
mod schedule;
mod sequence;
mod speculation;
mod step;
mod step_plan;
mod timing;
#[cfg(test)]
mod tests;

pub use adapters::AdapterLoads;
pub use blocks::{BLOCK_TOKENS, BlockChange, Blocks};
pub use content::Content;
pub use id::SequenceId;
pub use outcome::{Admitted, Emitted, PrefixStats, StepOutcome};
pub use request::{EngineConfig, EngineError, Pause, Policy, Request};
pub use speculation::{DraftStats, Drafter, MAX_DRAFTS, Speculation};
pub use step::Engine;
pub use timing::Timing;
