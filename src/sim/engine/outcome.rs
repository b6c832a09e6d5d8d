//! Results that the engine reports: the outcome of a step, and the counters of the prefix cache.
//!
//! [`Engine::step`](super::Engine::step) returns an outcome when the step starts. The caller
//! computes when the step ends, and then shows the outcome to clients.

use std::time::Duration;

use super::adapters::AdapterLoads;
use super::id::SequenceId;
use crate::machine::StepLoad;

/// The tokens that a step produced for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emitted {
    /// The sequence.
    pub id: SequenceId,
    /// Number of tokens: 1, and one for each accepted draft.
    pub tokens: u32,
    /// Whether the sequence's first token is among them.
    pub first: bool,
    /// Whether the sequence's last token is among them.
    pub last: bool,
}

/// A sequence that moved from the queue to the running list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// The sequence.
    pub id: SequenceId,
    /// Prompt tokens that were in the prefix cache.
    pub cached_tokens: u32,
    /// Whether the sequence was preempted before. Clients see only the cached tokens of the first
    /// admission.
    pub resumed: bool,
}

/// The results of a step, and the times that determine its end.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// GPU time. Like all times here it includes jitter, except `exposed`.
    pub gpu: Duration,
    /// CPU time before the first kernel can be launched.
    pub preparation: Duration,
    /// CPU time to launch the kernels. The GPU begins with the first kernel.
    pub launch: Duration,
    /// Time that overlaps with neither CPU nor GPU work
    /// ([`CostModel::exposed`](crate::machine::CostModel::exposed)).
    pub exposed: Duration,
    /// The computed load.
    pub load: StepLoad,
    /// Sequences that sampled tokens, in the order of the running list.
    pub emitted: Vec<Emitted>,
    /// Sequences admitted from the queue, in order. Some may have been aborted since the plan was
    /// made.
    pub admitted: Vec<Admitted>,
    /// Number of sequences that were preempted.
    pub preempted: u32,
    /// Adapters that had to be loaded first.
    pub adapter_loads: AdapterLoads,
}

impl StepOutcome {
    /// CPU time to prepare and launch the step.
    pub fn host(&self) -> Duration {
        self.preparation + self.launch
    }

    /// The time at which the step ends if the GPU is free at `free` and the CPU begins to prepare
    /// the step at `planned`. The step cannot end before the last kernel is launched.
    pub fn ends(&self, free: Duration, planned: Duration) -> Duration {
        let begins = free.max(planned + self.preparation);
        (begins + self.gpu).max(planned + self.host()) + self.exposed
    }
}

/// Lookups and hits of the prefix cache since the start, in tokens, as vLLM counts them. A sequence
/// is counted at its first admission and not again after a preemption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// `vllm:prefix_cache_queries`.
    pub queries: u64,
    /// `vllm:prefix_cache_hits`.
    pub hits: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end of a step with 20 ms of GPU time, 2 ms of preparation and 25 ms of launch; all times
    /// in ms.
    fn ends(free: u64, planned: u64) -> u128 {
        let ms = Duration::from_millis;
        let (gpu, preparation, launch, exposed) = (ms(20), ms(2), ms(25), Duration::ZERO);
        let (load, adapter_loads) = (StepLoad::default(), AdapterLoads::default());
        let (emitted, admitted) = (Vec::new(), Vec::new());
        let step =
            StepOutcome { gpu, preparation, launch, exposed, load, emitted, admitted, preempted: 0, adapter_loads };
        step.ends(ms(free), ms(planned)).as_millis()
    }

    #[test]
    fn a_launch_that_began_while_the_gpu_was_busy_does_not_make_the_step_longer() {
        assert_eq!(ends(114, 100), 134, "the GPU has the first kernels when it is free");
        assert_eq!(ends(103, 100), 127, "the last kernel is launched at 127");
        assert_eq!(ends(100, 100), 127, "nothing was under way");
    }
}
