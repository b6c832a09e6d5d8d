//! What the engine reports: the outcome of a step, and the counters of the prefix cache.
//!
//! An outcome is returned when its step starts. The caller makes it visible when the step's duration has passed.

use std::time::Duration;

use super::adapters::AdapterLoads;
use super::id::SequenceId;
use crate::machine::StepLoad;

/// A token that a step produced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emitted {
    /// Whose token it is.
    pub id: SequenceId,
    /// Whether it was the sequence's first token.
    pub first: bool,
    /// Whether it was the last one.
    pub last: bool,
}

/// A sequence that came from the queue into the running list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// Whose.
    pub id: SequenceId,
    /// Tokens it found in the prefix cache.
    pub cached_tokens: u32,
    /// It had been running before and was preempted: what a client is told about cached tokens is of the first time.
    pub resumed: bool,
}

/// What a step did. Everything in it becomes visible when `duration` has passed.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// How long the forward pass took.
    pub duration: Duration,
    /// What was computed.
    pub load: StepLoad,
    /// Tokens sampled, in running order.
    pub emitted: Vec<Emitted>,
    /// Sequences that were admitted from the waiting queue, in that order; one may have left since the plan was made.
    pub admitted: Vec<Admitted>,
    /// Sequences that lost their blocks to others.
    pub preempted: u32,
    /// Adapters that had to be loaded first.
    pub adapter_loads: AdapterLoads,
}

/// What the prefix cache was asked and what it knew, in tokens, since the start: vLLM's counters of these names. A sequence
/// is counted when it is admitted, and not again when it comes back from a preemption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// `vllm:prefix_cache_queries`.
    pub queries: u64,
    /// `vllm:prefix_cache_hits`.
    pub hits: u64,
}
