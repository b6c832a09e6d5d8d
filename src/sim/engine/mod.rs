//! The engine: vLLM V1's step loop on virtual time.
//!
//! One call of [`Engine::step`] is one forward pass: choose what advances ([`schedule`]), price it
//! ([`CostModel`]), sample a token for every sequence whose computed tokens caught up, free what finished.
//! There are no prefill and decode phases: each step tries to advance `computed` up to prompt + generated.
//!
//! Asynchronous scheduling (vLLM's default): step N + 1 is planned when step N starts. So a request that arrives
//! while N runs is first considered for N + 2, and what finishes in N keeps its slot and blocks through the
//! planning of N + 1. An idle engine plans at once. [`EngineConfig::async_scheduling`] turns that off.
//!
//! Pure: no clock, no I/O, no global chance. Whoever drives it decides what a duration means: a test adds it to a
//! number, the server sleeps. Bounds: the caller bounds the number of requests; a request must fit the KV cache
//! ([`Engine::add`] refuses it otherwise), so every admitted request ends exactly once.
//!
//! Not here: the prefix cache (its seat is [`Request::cached_prefix`]), priorities, speculative decoding.

mod blocks;
mod schedule;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

pub use blocks::{BLOCK_TOKENS, Blocks};

use super::cost::{CostModel, StepLoad};
use crate::base::Rng;

/// Names one sequence of the engine; the caller chooses it and must not reuse it while it lives.
pub type SequenceId = u64;

/// Hashes an id by one multiplication: ids are looked up for every token, and nobody chooses them to collide.
#[derive(Clone, Copy, Debug, Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        // The golden ratio in 64 bits; the table takes its bits from both ends.
        self.0 = (self.0 ^ id).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}

/// Limits of the engine, named as vLLM's flags.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Most sequences in the running list.
    pub max_num_seqs: u32,
    /// Token budget of a step.
    pub max_num_batched_tokens: u32,
    /// Most tokens one request gets in a step while it is not alone; 0 turns it off.
    pub long_prefill_token_threshold: u32,
    /// Whether a prompt may be split over steps.
    pub chunked_prefill: bool,
    /// KV blocks, the null block included.
    pub num_blocks: u32,
    /// Share of the blocks that admission keeps free while something runs.
    pub watermark: f64,
    /// Distinct adapters in the running list; 0 when LoRA is off (then no request names one).
    pub max_loras: u32,
    /// Plan one step ahead.
    pub async_scheduling: bool,
    /// Seed of the step jitter.
    pub seed: u64,
}

/// One sequence to generate (a request with `n` choices is `n` of these).
#[derive(Clone, Debug)]
pub struct Request {
    /// Its name.
    pub id: SequenceId,
    /// Prompt tokens, at least 1.
    pub prompt_tokens: u32,
    /// Tokens it will generate, at least 1.
    pub output_tokens: u32,
    /// Adapter in use.
    pub adapter: Option<u16>,
    /// Leading prompt tokens found in a prefix cache when it is admitted; whole blocks and at most
    /// `prompt_tokens - 1` of it count.
    pub cached_prefix: u32,
}

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

/// What a step did. Everything in it becomes visible when `duration` has passed.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// How long the forward pass took.
    pub duration: Duration,
    /// What was computed.
    pub load: StepLoad,
    /// Tokens sampled, in running order.
    pub emitted: Vec<Emitted>,
    /// Sequences that were admitted from the waiting queue.
    pub admitted: Vec<SequenceId>,
    /// Sequences that lost their blocks to others.
    pub preempted: u32,
}

/// Why a request cannot enter the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// It would never fit.
    #[error("the sequence needs {needed} KV blocks and the engine has {usable}; lower max_tokens or --max-model-len")]
    NeverFits {
        /// Blocks for prompt and output.
        needed: u32,
        /// Blocks there are.
        usable: u32,
    },
    /// Chunked prefill is off and the prompt is longer than a step.
    #[error("the prompt has {prompt} tokens and a step takes {budget} without chunked prefill; raise the budget")]
    PromptOverBudget {
        /// Prompt tokens.
        prompt: u32,
        /// Budget of a step.
        budget: u32,
    },
}

/// A sequence inside the engine.
#[derive(Debug)]
struct Sequence {
    request: Request,
    computed: u32,
    generated: u32,
    blocks: u32,
    /// Tokens scheduled in the step that runs now.
    chunk: u32,
}

impl Sequence {
    /// Tokens that exist: prompt and generated.
    fn tokens(&self) -> u32 {
        self.request.prompt_tokens + self.generated
    }
}

/// The engine. See the head of this file.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    cost: CostModel,
    rng: Rng,
    blocks: Blocks,
    sequences: HashMap<SequenceId, Sequence, BuildHasherDefault<IdHasher>>,
    running: Vec<SequenceId>,
    waiting: VecDeque<SequenceId>,
    /// Arrived while the step that runs now was under way, and while the one before it was.
    fresh: Vec<SequenceId>,
    staged: Vec<SequenceId>,
    /// Blocks and slots of what ended in the last step, held until the next plan was made.
    retiring_blocks: u32,
    retiring_slots: u32,
    deferred: u32,
}

impl Engine {
    /// An idle engine.
    pub fn new(config: EngineConfig, cost: CostModel) -> Self {
        let (rng, blocks) = (Rng::new(config.seed), Blocks::new(config.num_blocks));
        Self {
            config,
            cost,
            rng,
            blocks,
            sequences: HashMap::default(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            fresh: Vec::new(),
            staged: Vec::new(),
            retiring_blocks: 0,
            retiring_slots: 0,
            deferred: 0,
        }
    }

    /// Takes a request; it is considered from the next plan on.
    ///
    /// # Errors
    /// When it could never be scheduled, whatever else runs.
    pub fn add(&mut self, request: Request) -> Result<(), EngineError> {
        let (prompt, output) = (request.prompt_tokens.max(1), request.output_tokens.max(1));
        // The last sampled token is never written to the cache.
        let needed = Blocks::needed(prompt.saturating_add(output - 1));
        if needed > self.blocks.usable() {
            return Err(EngineError::NeverFits { needed, usable: self.blocks.usable() });
        }
        let budget = self.config.max_num_batched_tokens;
        if !self.config.chunked_prefill && prompt.saturating_add(output) > budget {
            return Err(EngineError::PromptOverBudget { prompt, budget });
        }
        let request = Request { prompt_tokens: prompt, output_tokens: output, ..request };
        self.fresh.push(request.id);
        self.sequences.insert(request.id, Sequence { request, computed: 0, generated: 0, blocks: 0, chunk: 0 });
        Ok(())
    }

    /// Ends a request early; its blocks are free for the plan after the next. Says whether it was there.
    pub fn abort(&mut self, id: SequenceId) -> bool {
        let Some(sequence) = self.sequences.remove(&id) else { return false };
        if let Some(position) = self.running.iter().position(|other| *other == id) {
            self.running.remove(position);
            self.retire(sequence.blocks);
        } else {
            self.waiting.retain(|other| *other != id);
            self.staged.retain(|other| *other != id);
            self.fresh.retain(|other| *other != id);
        }
        true
    }

    /// Runs one step, or returns nothing when there is nothing to run.
    pub fn step(&mut self) -> Option<StepOutcome> {
        self.take_arrivals();
        let held = (std::mem::take(&mut self.retiring_blocks), std::mem::take(&mut self.retiring_slots));
        let mut plan = self.schedule(held.1);
        if plan.load.sequences == 0 && held != (0, 0) {
            // No pass is under way, so nothing is planned ahead of it: what ended is gone already.
            self.blocks.give(held.0);
            plan = self.schedule(0);
        } else {
            self.blocks.give(held.0);
        }
        if plan.load.sequences == 0 {
            debug_assert!(self.running.is_empty(), "running sequences always advance or are preempted");
            return None;
        }
        let duration = self.jittered(self.cost.duration(&plan.load));
        let emitted = self.sample();
        Some(StepOutcome { duration, load: plan.load, emitted, admitted: plan.admitted, preempted: plan.preempted })
    }

    /// Arrivals move up one stage per step, at once when no step is under way.
    fn take_arrivals(&mut self) {
        self.waiting.extend(self.staged.drain(..));
        std::mem::swap(&mut self.staged, &mut self.fresh);
        let idle = self.running.is_empty() && self.waiting.is_empty();
        if idle || !self.config.async_scheduling {
            self.waiting.extend(self.staged.drain(..));
        }
    }

    /// Advances what was scheduled; a sequence that caught up samples one token.
    fn sample(&mut self) -> Vec<Emitted> {
        let mut emitted = Vec::with_capacity(self.running.len());
        let (mut freed, mut ended) = (0, 0);
        let sequences = &mut self.sequences;
        self.running.retain(|&id| {
            let Some(sequence) = sequences.get_mut(&id) else { return false };
            let chunk = std::mem::take(&mut sequence.chunk);
            sequence.computed += chunk;
            if chunk == 0 || sequence.computed < sequence.tokens() {
                return true;
            }
            sequence.generated += 1;
            let last = sequence.generated >= sequence.request.output_tokens;
            emitted.push(Emitted { id, first: sequence.generated == 1, last });
            if last {
                freed += sequence.blocks;
                ended += 1;
                sequences.remove(&id);
            }
            !last
        });
        self.retiring_blocks += freed;
        self.retiring_slots += ended;
        self.settle_unless_async();
        emitted
    }

    fn retire(&mut self, blocks: u32) {
        self.retiring_blocks += blocks;
        self.retiring_slots += 1;
        self.settle_unless_async();
    }

    fn settle_unless_async(&mut self) {
        if !self.config.async_scheduling {
            self.blocks.give(std::mem::take(&mut self.retiring_blocks));
            self.retiring_slots = 0;
        }
    }

    /// Log-normal with mean 1 (Box-Muller), so that jitter leaves throughput alone.
    fn jittered(&mut self, duration: Duration) -> Duration {
        let sigma = self.cost.jitter();
        if sigma <= 0.0 {
            return duration;
        }
        let radius = (-2.0 * (1.0 - self.rng.unit()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.rng.unit()).cos();
        duration.mul_f64((sigma * normal - sigma * sigma / 2.0).exp())
    }

    /// Whether any sequence is inside.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Sequences in the running list.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that wait for admission, those deferred by the adapter limit included.
    pub fn waiting(&self) -> usize {
        self.sequences.len() - self.running.len()
    }

    /// Sequences that the last plan passed over because of the adapter limit.
    pub fn deferred(&self) -> usize {
        self.deferred as usize
    }

    /// The block pool, for gauges and tests.
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Adapters of the running and of the waiting sequences, each sorted and without repetition.
    pub fn adapters(&self) -> (Vec<u16>, Vec<u16>) {
        let running = self.distinct(self.running.iter());
        let waiting = self.distinct(self.waiting.iter().chain(&self.staged).chain(&self.fresh));
        (running, waiting)
    }

    fn distinct<'a>(&self, ids: impl Iterator<Item = &'a SequenceId>) -> Vec<u16> {
        let mut found: Vec<u16> = ids.filter_map(|id| self.sequences.get(id)?.request.adapter).collect();
        found.sort_unstable();
        found.dedup();
        found
    }
}
