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
mod request;
mod schedule;
mod sequence;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

pub use adapters::AdapterLoads;
pub use blocks::{BLOCK_TOKENS, Blocks};
pub use content::Content;
pub use request::{EngineConfig, EngineError, Policy, Request, SequenceId};

use crate::machine::cost::{CostModel, StepLoad};
use adapters::Adapters;
use schedule::Plan;
use sequence::{Ending, Place, Queue, Sequence, Slot};
use sluice_core::base::Rng;

/// Hashes an id by one multiplication: nobody chooses ids to collide.
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

/// What a paused engine still does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pause {
    /// Everything: it is not paused.
    #[default]
    No,
    /// Go on with what runs; admit nothing.
    Admission,
    /// Nothing.
    All,
}

/// The engine. See the head of this file.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    cost: CostModel,
    rng: Rng,
    blocks: Blocks,
    /// By slot; a vacant one has no place.
    sequences: Vec<Sequence>,
    vacant: Vec<Slot>,
    slots: HashMap<SequenceId, Slot, BuildHasherDefault<IdHasher>>,
    running: Vec<Slot>,
    waiting: Queue,
    /// Arrived while the step that runs now was under way, and while the one before it was.
    fresh: Vec<Slot>,
    staged: Vec<Slot>,
    /// Sequences in the running list that are over, and those before it that are.
    ending: usize,
    leaving: Vec<Slot>,
    deferred: usize,
    adapters: Adapters,
    prefix: PrefixStats,
    pause: Pause,
    /// Steps since the engine was idle, and whether the last admission left requests behind for want of room.
    steps: u64,
    crowded: bool,
    /// What tests want to know of a step: free blocks when it was planned, and who advanced by how many tokens.
    #[cfg(test)]
    observed: (u32, Vec<(SequenceId, u32)>),
}

impl Engine {
    /// An idle engine.
    pub fn new(config: EngineConfig, cost: CostModel) -> Self {
        Self {
            rng: Rng::new(config.seed),
            blocks: Blocks::new(config.num_blocks),
            waiting: Queue::new(config.policy),
            adapters: Adapters::new(config.max_loras, config.max_cpu_loras),
            config,
            cost,
            sequences: Vec::new(),
            vacant: Vec::new(),
            slots: HashMap::default(),
            running: Vec::new(),
            fresh: Vec::new(),
            staged: Vec::new(),
            ending: 0,
            leaving: Vec::new(),
            deferred: 0,
            prefix: PrefixStats::default(),
            pause: Pause::No,
            steps: 0,
            crowded: false,
            #[cfg(test)]
            observed: Default::default(),
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
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.sequences.push(Sequence::default());
            self.sequences.len() as Slot - 1
        });
        self.slots.insert(request.id, slot);
        let sequence = &mut self.sequences[slot as usize];
        // The list of blocks is kept for its memory.
        let blocks = std::mem::take(&mut sequence.blocks);
        *sequence = Sequence { request, blocks, place: Some(Place::Arriving), ..Sequence::default() };
        sequence.chain = sequence.root();
        self.fresh.push(slot);
        Ok(())
    }

    /// Ends a request early. Says whether it was there. Its blocks are free from the next step on; with asynchronous
    /// scheduling that step is already planned: the request has its part in it and is computed in vain.
    pub fn abort(&mut self, id: SequenceId) -> bool {
        let Some(slot) = self.slots.remove(&id) else { return false };
        let sequence = &mut self.sequences[slot as usize];
        match sequence.place {
            Some(Place::Arriving) | None => {
                self.fresh.retain(|other| *other != slot);
                self.vacate(slot);
                return true;
            }
            Some(Place::Running) => self.ending += 1,
            Some(Place::Waiting | Place::Staged) => {}
        }
        sequence.ending = Some(Ending::Aborted);
        self.leaving.push(slot);
        true
    }

    /// Runs one step, or returns nothing when there is nothing to run.
    pub fn step(&mut self) -> Option<StepOutcome> {
        if !self.config.async_scheduling {
            // Nothing was planned ahead of what ended.
            self.settle();
        }
        self.take_arrivals();
        let mut plan = self.plan();
        if plan.tokens == 0 {
            // No pass is under way, so nothing is planned ahead of it: what ended is gone, what came is there.
            self.settle();
            self.steps = 0;
            self.stage_all();
            let preempted = plan.preempted;
            plan = self.plan();
            plan.preempted += preempted;
        }
        if plan.tokens == 0 {
            debug_assert!(self.pause == Pause::All || self.running.is_empty(), "what runs advances or is preempted");
            return None;
        }
        self.steps += 1;
        let adapter_loads = self.prepare_adapters();
        let (mut load, emitted) = self.advance();
        (load.adapter_activations, load.adapter_loads) = (adapter_loads.to_gpu, adapter_loads.from_disk);
        let duration = self.jittered(self.cost.duration(&load));
        let Plan { admitted, preempted, .. } = plan;
        Some(StepOutcome { duration, load, emitted, admitted, preempted, adapter_loads })
    }

    /// What was added since the last step began is considered by the next one: its plan is made later than that step began.
    pub fn stage_fresh(&mut self) {
        for slot in self.fresh.drain(..) {
            self.sequences[slot as usize].place = Some(Place::Staged);
            self.staged.push(slot);
        }
    }

    /// What steps cost.
    pub fn cost(&self) -> &CostModel {
        &self.cost
    }

    /// Arrivals move up one stage per step, at once when no step is under way.
    fn take_arrivals(&mut self) {
        if !self.config.async_scheduling {
            return self.stage_all();
        }
        if self.running.is_empty() && self.waiting.is_empty() && self.staged.is_empty() {
            // The plan that was made ahead is empty.
            self.steps = 0;
            return self.stage_all();
        }
        for slot in self.staged.drain(..) {
            self.waiting.push(slot, &mut self.sequences[slot as usize], false);
        }
        std::mem::swap(&mut self.staged, &mut self.fresh);
        for slot in &self.staged {
            self.sequences[*slot as usize].place = Some(Place::Staged);
        }
    }

    /// Those go whose clients went away before the plan that was just made; what it has them compute is added to `load`.
    /// They free their blocks before those that ended by themselves.
    fn leave(&mut self, load: &mut StepLoad) {
        for slot in std::mem::take(&mut self.leaving) {
            let sequence = &self.sequences[slot as usize];
            match sequence.place {
                Some(Place::Waiting) => self.dequeue(slot),
                Some(Place::Staged) => self.staged.retain(|other| *other != slot),
                // Its place in the list goes with the next walk over that.
                Some(Place::Running) => {
                    self.ending -= 1;
                    self.compute(slot, load);
                }
                // It was preempted.
                Some(Place::Arriving) | None => continue,
            }
            self.vacate(slot);
        }
    }

    /// Takes a sequence out of the queue.
    fn dequeue(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot as usize];
        self.waiting.remove(sequence.rank);
        self.deferred -= usize::from(std::mem::take(&mut sequence.deferred));
    }

    /// Adds what is scheduled for a sequence to the load, and says how many tokens that is.
    fn compute(&mut self, slot: Slot, load: &mut StepLoad) -> u32 {
        let sequence = &mut self.sequences[slot as usize];
        let chunk = std::mem::take(&mut sequence.chunk);
        if chunk > 0 {
            load.add(sequence.computed, chunk, sequence.request.adapter.is_some());
            #[cfg(test)]
            self.observed.1.push((sequence.request.id, chunk));
        }
        chunk
    }

    /// Everything that arrived is in the queue.
    fn stage_all(&mut self) {
        for slot in self.staged.drain(..).chain(self.fresh.drain(..)) {
            self.waiting.push(slot, &mut self.sequences[slot as usize], false);
        }
    }

    /// Carries the plan out: what was scheduled is computed, a sequence that caught up samples one token, and what was over
    /// when the step began goes.
    fn advance(&mut self) -> (StepLoad, Vec<Emitted>) {
        let mut load = StepLoad::default();
        self.leave(&mut load);
        let mut emitted = Vec::with_capacity(self.running.len());
        let mut kept = 0;
        for at in 0..self.running.len() {
            let slot = self.running[at];
            let chunk = self.compute(slot, &mut load);
            let sequence = &mut self.sequences[slot as usize];
            if sequence.place.is_none() {
                continue;
            }
            if sequence.ending.is_some() {
                self.finish(slot);
                continue;
            }
            sequence.computed += chunk;
            sequence.sampled = chunk > 0 && sequence.computed >= sequence.tokens();
            if sequence.sampled {
                sequence.prefilling = false;
                sequence.generated += 1;
                let Request { id, output_tokens, stops, .. } = sequence.request;
                let last = sequence.generated >= output_tokens;
                emitted.push(Emitted { id, first: sequence.generated == 1, last });
                if last {
                    sequence.ending = Some(if stops { Ending::Stopped } else { Ending::AtLimit });
                    self.slots.remove(&id);
                    self.ending += 1;
                }
            }
            self.running[kept] = slot;
            kept += 1;
        }
        self.running.truncate(kept);
        (load, emitted)
    }

    /// Lets go of what is over.
    fn settle(&mut self) {
        let nobody = self.ending == 0;
        self.leave(&mut StepLoad::default());
        if nobody {
            return;
        }
        let running = std::mem::take(&mut self.running);
        for slot in running {
            let sequence = &self.sequences[slot as usize];
            match (sequence.place, sequence.ending) {
                (None, _) => {}
                (_, Some(_)) => self.finish(slot),
                (_, None) => self.running.push(slot),
            }
        }
    }

    /// A sequence that is over frees what it held. Its own blocks stay findable, the generated ones too.
    fn finish(&mut self, slot: Slot) {
        self.ending -= 1;
        self.publish(slot, self.sequences[slot as usize].computed);
        self.vacate(slot);
    }

    /// Frees the place of a sequence that is in no list any more, and its blocks.
    fn vacate(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot as usize];
        self.blocks.give(&mut sequence.blocks);
        sequence.place = None;
        sequence.request.content = Content::default();
        self.vacant.push(slot);
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

    /// Stops admission or everything, from the next plan on; [`Pause::No`] goes on.
    pub fn pause(&mut self, pause: Pause) {
        self.pause = pause;
    }

    /// Forgets all cached blocks; `preempt` puts what runs back into the queue first. Says whether it was done: as in vLLM
    /// it is refused while any block is held.
    pub fn reset_prefix_cache(&mut self, preempt: bool) -> bool {
        if preempt {
            self.settle();
            while let Some(slot) = self.running.pop() {
                self.requeue(slot);
            }
        }
        self.blocks.forget_all()
    }

    /// An adapter was unloaded.
    pub fn forget_adapter(&mut self, adapter: u16) {
        self.adapters.remove(adapter);
    }

    /// Whether any sequence is inside that was not told to end.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Sequences in the running list that go on.
    pub fn running(&self) -> usize {
        self.running.len() - self.ending
    }

    /// Sequences that wait for admission, those deferred by the adapter limit included.
    pub fn waiting(&self) -> usize {
        self.slots.len() - self.running()
    }

    /// Waiting sequences that admission passed over because of the adapter limit.
    pub fn deferred(&self) -> usize {
        self.deferred
    }

    /// The block pool, for gauges and tests.
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Counters of the prefix cache.
    pub fn prefix(&self) -> PrefixStats {
        self.prefix
    }

    /// Adapters of the running and of the waiting sequences, each sorted and without repetition.
    pub fn adapters(&self) -> (Vec<u16>, Vec<u16>) {
        let running = self.distinct(self.running.iter().copied());
        let waiting = self.waiting.slots().chain(self.staged.iter().copied()).chain(self.fresh.iter().copied());
        (running, self.distinct(waiting))
    }

    fn distinct(&self, slots: impl Iterator<Item = Slot>) -> Vec<u16> {
        let mut found: Vec<u16> = slots.filter_map(|slot| self.sequences[slot as usize].request.adapter).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Loads the adapters that the planned step uses.
    fn prepare_adapters(&mut self) -> AdapterLoads {
        if self.config.max_loras == 0 {
            return AdapterLoads::default();
        }
        let scheduled = self.running.iter().copied().filter(|slot| self.sequences[*slot as usize].chunk > 0);
        let used = self.distinct(scheduled);
        self.adapters.prepare(&used)
    }
}
