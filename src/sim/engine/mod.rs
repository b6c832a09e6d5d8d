//! The engine: vLLM V1's step loop on virtual time.
//!
//! One call of [`Engine::step`] is one forward pass: choose what advances ([`schedule`]), price it
//! ([`CostModel`]), sample a token for every sequence whose computed tokens caught up, free what finished.
//! There are no prefill and decode phases: each step tries to advance `computed` up to prompt + generated.
//!
//! Asynchronous scheduling (vLLM's default): step N + 1 is planned when step N starts. So a request that arrives
//! while N runs is first considered for N + 2, and what ends in N keeps its place and its blocks through the plan of
//! N + 1: a limit is foreseen and nothing more is computed for it, a stop token or a client that leaves is not. An
//! idle engine plans at once. [`EngineConfig::async_scheduling`] turns that off.
//!
//! Pure: no clock, no I/O, no global chance. Whoever drives it decides what a duration means: a test adds it to a
//! number, the server sleeps. Bounds: the caller bounds the number of requests; a request must fit the KV cache
//! ([`Engine::add`] refuses it otherwise), so every admitted request ends exactly once.
//!
//! The rules were read in vLLM 0.32 and checked against its scheduler, step by step (`tests/traces.rs` here). Not here:
//! speculative decoding, encoders, KV transfer, sliding windows.

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
