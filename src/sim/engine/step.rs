//! The step loop: takes arrivals, carries out a plan, computes the duration, and removes sequences
//! that ended.
//!
//! [`schedule`](super::schedule) makes the plans. The header of `mod.rs` states the rules.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::time::Duration;

use super::adapters::{AdapterLoads, Adapters};
use super::blocks::{BlockChange, Blocks};
use super::content::Content;
use super::id::{IdHasher, SequenceId};
use super::outcome::{Emitted, PrefixStats, StepOutcome};
use super::request::{EngineConfig, EngineError, Pause, Request};
use super::sequence::{Ending, Place, Queue, Sequence, Slot};
use super::speculation::{DraftStats, Speculation};
use super::step_plan::StepPlan;
use crate::machine::{CostModel, StepLoad};
use sluice_core::base::Rng;

/// Distance of the seed of accepted drafts from the seed of the jitter.
const ACCEPTANCE: u64 = 0x6472_6166;

/// vLLM's engine core on virtual time: the sequences, their KV blocks, and the step loop.
#[derive(Debug)]
pub struct Engine {
    pub(super) config: EngineConfig,
    pub(super) cost: CostModel,
    pub(super) rng: Rng,
    pub(super) blocks: Blocks,
    /// Sequences by slot. In a vacant slot, `place` is `None`.
    pub(super) sequences: Vec<Sequence>,
    pub(super) vacant: Vec<Slot>,
    pub(super) slots: HashMap<SequenceId, Slot, BuildHasherDefault<IdHasher>>,
    pub(super) running: Vec<Slot>,
    pub(super) waiting: Queue,
    /// Requests that arrived during the current step.
    pub(super) fresh: Vec<Slot>,
    /// Requests that arrived during the step before.
    pub(super) staged: Vec<Slot>,
    /// Number of sequences in the running list that have ended.
    pub(super) ending: usize,
    /// Aborted sequences that must be removed.
    pub(super) leaving: Vec<Slot>,
    pub(super) deferred: usize,
    pub(super) adapters: Adapters,
    pub(super) prefix: PrefixStats,
    pub(super) drafts: DraftStats,
    /// Draws the accepted drafts. The jitter has another generator.
    pub(super) acceptance: Rng,
    pub(super) pause: Pause,
    /// Steps since the last one that carried prefill.
    pub(super) since_prefill: u32,
    /// Whether the last admission left requests in the queue for lack of room.
    pub(super) admission_was_short: bool,
    /// Number of sequences in the last step.
    pub(super) last_sequences: u32,
    /// For tests: free blocks when the step was planned, and the tokens by which each sequence
    /// advanced.
    #[cfg(test)]
    pub(super) observed: (u32, Vec<(SequenceId, u32)>),
}

impl Engine {
    /// An idle engine.
    pub fn new(config: EngineConfig, cost: CostModel) -> Self {
        let mut blocks = Blocks::new(config.num_blocks);
        if config.kv_events {
            blocks.record_changes();
        }
        Self {
            rng: Rng::new(config.seed),
            blocks,
            waiting: Queue::new(config.policy),
            adapters: Adapters::new(config.max_loras, config.max_cpu_loras),
            drafts: DraftStats::new(config.speculation.as_ref()),
            acceptance: Rng::new(config.seed.wrapping_add(ACCEPTANCE)),
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
            since_prefill: u32::MAX,
            admission_was_short: false,
            last_sequences: 0,
            #[cfg(test)]
            observed: Default::default(),
        }
    }

    /// Loads an adapter into host memory and a GPU slot before a request names it, as vLLM's start
    /// does for each of `--lora-modules`. Returns the time for which the engine is busy. The caller
    /// lets it pass. Does nothing without LoRA.
    pub fn load_adapter(&mut self, adapter: u16) -> Duration {
        if self.config.max_loras == 0 {
            return Duration::ZERO;
        }
        let AdapterLoads { from_disk, to_gpu } = self.adapters.prepare(&[adapter]);
        let load = StepLoad { adapter_loads: from_disk, adapter_activations: to_gpu, ..StepLoad::default() };
        self.cost.adapter_loading(&load)
    }

    /// Adds a request. The next plan considers it. With asynchronous scheduling, the plan after the
    /// next.
    ///
    /// # Errors
    /// The request can never be scheduled.
    pub fn add(&mut self, request: Request) -> Result<(), EngineError> {
        let (prompt, output) = (request.prompt_tokens.max(1), request.output_tokens.max(1));
        // The last sampled token is never written to the cache.
        let reach = self.config.speculation.as_ref().map_or(0, |own| own.tokens + own.lookahead());
        let needed = Blocks::needed(prompt.saturating_add(output - 1).saturating_add(reach));
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
        // The list of blocks is kept to reuse its allocation.
        let blocks = std::mem::take(&mut sequence.blocks);
        *sequence = Sequence { request, blocks, place: Some(Place::Arriving), ..Sequence::default() };
        sequence.chain = sequence.root();
        self.fresh.push(slot);
        Ok(())
    }

    /// Ends a request early; returns whether it existed. Its blocks are free from the next step on.
    /// With asynchronous scheduling, that step is already planned and still computes the request.
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

    /// Runs one step; `None` if there is nothing to run.
    pub fn step(&mut self) -> Option<StepOutcome> {
        if !self.config.async_scheduling {
            // No step was planned ahead, so ended sequences can be removed at once.
            self.remove_ended();
        }
        self.take_arrivals();
        let mut plan = self.plan();
        if plan.tokens == 0 {
            // The plan can take all endings and arrivals into account.
            self.remove_ended();
            self.stage_all();
            let preempted = plan.preempted;
            plan = self.plan();
            plan.preempted += preempted;
        }
        if plan.tokens == 0 {
            debug_assert!(
                self.pause == Pause::All || self.running.is_empty(),
                "a running sequence advances or is preempted"
            );
            return None;
        }
        let adapter_loads = self.prepare_adapters();
        let (mut load, emitted) = self.advance();
        (load.adapter_activations, load.adapter_loads) = (adapter_loads.to_gpu, adapter_loads.from_disk);
        load.admitted = plan.admitted.len() as u32;
        load.is_changed = load.admitted > 0 || load.sequences != self.last_sequences;
        self.last_sequences = load.sequences;
        let (gpu, preparation, launch) = self.jittered(&load);
        let exposed = self.cost.exposed(&load);
        let StepPlan { admitted, preempted, .. } = plan;
        Some(StepOutcome { gpu, preparation, launch, exposed, load, emitted, admitted, preempted, adapter_loads })
    }

    /// Makes requests that were added since the last step began available to the next plan. This is
    /// for a caller that plans later than at the beginning of a step.
    pub fn stage_fresh(&mut self) {
        for slot in self.fresh.drain(..) {
            self.sequences[slot as usize].place = Some(Place::Staged);
            self.staged.push(slot);
        }
    }

    /// Whether a step is planned while the one before it runs (asynchronous scheduling).
    pub fn plans_ahead(&self) -> bool {
        self.config.async_scheduling
    }

    /// The cost model of the steps.
    pub fn cost(&self) -> &CostModel {
        &self.cost
    }

    /// Moves arrivals one stage on per step, or all at once when no step is under way.
    fn take_arrivals(&mut self) {
        if !self.config.async_scheduling {
            return self.stage_all();
        }
        if self.running.is_empty() && self.waiting.is_empty() && self.staged.is_empty() {
            // Nothing was planned ahead.
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

    /// Removes the sequences that were aborted before this step, and adds the tokens that the plan
    /// still has for them to `load`. Their blocks are released before the blocks of sequences that
    /// ended by themselves.
    fn remove_aborted(&mut self, load: &mut StepLoad) {
        for slot in std::mem::take(&mut self.leaving) {
            let sequence = &self.sequences[slot as usize];
            match sequence.place {
                Some(Place::Waiting) => self.dequeue(slot),
                Some(Place::Staged) => self.staged.retain(|other| *other != slot),
                // The next iteration over the running list drops the sequence.
                Some(Place::Running) => {
                    self.ending -= 1;
                    self.compute(slot, load);
                }
                // It was preempted, which removed it.
                Some(Place::Arriving) | None => continue,
            }
            self.vacate(slot);
        }
    }

    pub(super) fn dequeue(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot as usize];
        self.waiting.remove(sequence.rank);
        self.deferred -= usize::from(std::mem::take(&mut sequence.deferred));
    }

    /// Adds the scheduled tokens of a sequence to the load; returns their number.
    fn compute(&mut self, slot: Slot, load: &mut StepLoad) -> u32 {
        let sequence = &mut self.sequences[slot as usize];
        let chunk = std::mem::take(&mut sequence.chunk);
        if chunk > 0 {
            let (computed, adapter) = (sequence.computed, sequence.request.adapter.is_some());
            match sequence.drafts_in(chunk) {
                0 => load.add(computed, chunk, adapter),
                drafts => load.verify(computed, drafts, adapter),
            }
            #[cfg(test)]
            self.observed.1.push((sequence.request.id, chunk));
        }
        chunk
    }

    fn stage_all(&mut self) {
        for slot in self.staged.drain(..).chain(self.fresh.drain(..)) {
            self.waiting.push(slot, &mut self.sequences[slot as usize], false);
        }
    }

    /// Carries out the plan: computes the scheduled tokens, samples a token for each sequence that
    /// caught up and one for each of its accepted drafts, and removes the sequences that had ended
    /// before the step.
    fn advance(&mut self) -> (StepLoad, Vec<Emitted>) {
        let mut load = StepLoad::default();
        self.remove_aborted(&mut load);
        let mut emitted = Vec::with_capacity(self.running.len());
        let mut kept = 0;
        for at in 0..self.running.len() {
            let slot = self.running[at];
            let drafted = self.sequences[slot as usize].drafts_in(self.sequences[slot as usize].chunk);
            let chunk = self.compute(slot, &mut load);
            let sequence = &mut self.sequences[slot as usize];
            sequence.drafts = 0;
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
                let Request { id, output_tokens, stops, .. } = sequence.request;
                let accepted = match &self.config.speculation {
                    Some(speculation) if drafted > 0 => {
                        let accepted = speculation.accept(id, drafted, &mut self.acceptance);
                        self.drafts.add(drafted, accepted);
                        accepted
                    }
                    _ => 0,
                };
                let (first, tokens) = (sequence.generated == 0, (1 + accepted).min(output_tokens - sequence.generated));
                sequence.generated += tokens;
                // The last sampled token is not computed yet, and neither are rejected drafts.
                sequence.computed = sequence.tokens() - 1;
                let last = sequence.generated >= output_tokens;
                emitted.push(Emitted { id, tokens, first, last });
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
        if let Some(speculation) = &self.config.speculation {
            let (running, sequences) = (&self.running, &mut self.sequences);
            Self::propose(speculation, running, sequences, &mut self.acceptance, &mut load);
        }
        (load, emitted)
    }

    /// Gives drafts to the sequences that sampled a token in this step.
    fn propose(
        speculation: &Speculation,
        running: &[Slot],
        sequences: &mut [Sequence],
        rng: &mut Rng,
        load: &mut StepLoad,
    ) {
        let scheduled = load.sequences;
        load.drafting = speculation.most(scheduled);
        if load.drafting == 0 {
            return;
        }
        for slot in running {
            let sequence = &mut sequences[*slot as usize];
            if sequence.sampled && sequence.ending.is_none() {
                sequence.drafts = speculation.propose(scheduled, rng);
                load.proposed += 1;
            }
        }
    }

    fn remove_ended(&mut self) {
        let none_ended = self.ending == 0;
        self.remove_aborted(&mut StepLoad::default());
        if none_ended {
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

    /// Publishes the blocks of a sequence that has ended, including generated tokens, and releases
    /// them.
    fn finish(&mut self, slot: Slot) {
        self.ending -= 1;
        self.publish(slot, self.sequences[slot as usize].computed);
        self.vacate(slot);
    }

    /// Frees the slot and the blocks of a sequence that is in no list any more.
    pub(super) fn vacate(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot as usize];
        self.blocks.release(&mut sequence.blocks);
        sequence.place = None;
        sequence.request.content = Content::default();
        self.vacant.push(slot);
    }

    /// GPU time, preparation time and launch time of the step, with log-normal jitter (Box-Muller).
    /// The jitter has mean 1, so it does not change the means.
    fn jittered(&mut self, load: &StepLoad) -> (Duration, Duration, Duration) {
        let radius = (-2.0 * (1.0 - self.rng.unit()).ln()).sqrt();
        let (sine, cosine) = (std::f64::consts::TAU * self.rng.unit()).sin_cos();
        let factor = |sigma: f64, normal: f64| (sigma * radius * normal - sigma * sigma / 2.0).exp();
        let (gpu, host) = self.cost.jitter();
        let (gpu, host) = (factor(gpu, cosine), factor(host, sine));
        let cost = &self.cost;
        (cost.gpu(load).mul_f64(gpu), cost.preparation(load).mul_f64(host), cost.launch(load).mul_f64(host))
    }

    /// Pauses or resumes, from the next plan on.
    pub fn pause(&mut self, pause: Pause) {
        self.pause = pause;
    }

    /// Forgets all cached blocks. With `preempt`, preempts all running sequences first. Returns
    /// whether it was done: as in vLLM, not while a block is held.
    pub fn reset_prefix_cache(&mut self, preempt: bool) -> bool {
        if preempt {
            self.remove_ended();
            while let Some(slot) = self.running.pop() {
                self.requeue(slot);
            }
        }
        self.blocks.forget_all()
    }

    /// The changes of the prefix cache since the last call.
    pub fn take_block_changes(&mut self) -> Vec<BlockChange> {
        self.blocks.take_changes()
    }

    /// Whether no sequence is left, except sequences that are ending.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Sequences in the running list, except sequences that are ending.
    pub fn running(&self) -> usize {
        self.running.len() - self.ending
    }

    /// Sequences that wait for admission, including sequences that the adapter limit defers.
    pub fn waiting(&self) -> usize {
        self.slots.len() - self.running()
    }

    /// Waiting sequences that admission skipped because of the adapter limit.
    pub fn deferred(&self) -> usize {
        self.deferred
    }

    /// The block pool, for gauges and tests.
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Counters of speculative decoding.
    pub fn drafts(&self) -> &DraftStats {
        &self.drafts
    }

    /// Counters of the prefix cache.
    pub fn prefix(&self) -> PrefixStats {
        self.prefix
    }

    /// The adapters that vLLM's metrics list, sorted: the adapters of sequences with an output
    /// token.
    pub fn adapters(&self) -> Vec<u16> {
        let sequences = self.running.iter().copied().chain(self.waiting.slots());
        self.distinct(sequences.filter(|slot| self.sequences[*slot as usize].generated > 0))
    }

    pub(super) fn distinct(&self, slots: impl Iterator<Item = Slot>) -> Vec<u16> {
        let mut found: Vec<u16> = slots.filter_map(|slot| self.sequences[slot as usize].request.adapter).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    fn prepare_adapters(&mut self) -> AdapterLoads {
        if self.config.max_loras == 0 {
            return AdapterLoads::default();
        }
        let scheduled = self.running.iter().copied().filter(|slot| self.sequences[*slot as usize].chunk > 0);
        let used = self.distinct(scheduled);
        self.adapters.prepare(&used)
    }
}
