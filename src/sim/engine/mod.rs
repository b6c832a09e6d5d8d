//! The engine: vLLM V1's step loop on virtual time.
//!
//! One call of [`Engine::step`] is one forward pass: decide which sequences advance ([`schedule`]), compute its duration
//! ([`CostModel`](crate::machine::CostModel)), sample a token for every sequence whose computed tokens caught up, and free
//! the finished ones. There are no prefill and decode phases: each step tries to advance `computed` up to prompt + generated.
//!
//! Asynchronous scheduling (vLLM's default): step N + 1 is planned when step N starts. A request that arrives while N runs
//! is first considered for N + 2. A sequence that ends in N keeps its place and its blocks until N + 1 has run: if it ends at
//! its token limit, nothing more is computed for it; after a stop token or an abort, one more token is. An idle engine plans
//! at once. [`EngineConfig::async_scheduling`] turns this off.
//!
//! Pure: no clock, no I/O, no global random state. The caller decides what a duration means: a test adds it to a
//! number, the server sleeps. The caller bounds the number of requests; [`Engine::add`] refuses a request that can
//! never fit the KV cache, so every admitted request ends exactly once.
//!
//! The rules follow vLLM 0.32 and are checked step by step against recordings of its scheduler (`tests/traces.rs`). Not
//! simulated: speculative decoding, encoders, KV transfer, sliding windows.

mod adapters;
mod blocks;
mod content;
mod id;
mod outcome;
mod request;
mod schedule;
mod sequence;
mod step;
mod step_plan;
#[cfg(test)]
mod tests;

pub use adapters::AdapterLoads;
pub use blocks::{BLOCK_TOKENS, Blocks};
pub use content::Content;
pub use id::SequenceId;
pub use outcome::{Admitted, Emitted, PrefixStats, StepOutcome};
pub use request::{EngineConfig, EngineError, Pause, Policy, Request};
pub use step::Engine;
