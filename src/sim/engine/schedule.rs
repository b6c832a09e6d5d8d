//! Which sequences advance in a step, and by how many tokens: the scheduler of vLLM V1, rule by rule.
//!
//! 1. The budget is `max_num_batched_tokens`.
//! 2. The cap per request is `long_prefill_token_threshold`, off when one request is all there is.
//! 3. Running first, in list order: chunk = min(tokens - computed, cap, budget). When blocks are missing the last
//!    of the running list loses all of its own and goes to the front of the queue, to be computed again.
//! 4. The queue only if nothing was preempted: in order, while budget and slots last. A new adapter beyond
//!    `max_loras` is passed over and keeps its place; a prompt whose blocks are not all free ends admission.
//!
//! A long prompt that runs takes the budget before later short ones: that is the head-of-line blocking that the
//! product exists for, and the reason this order is kept exactly.

use super::{Blocks, Engine, SequenceId};
use crate::sim::cost::StepLoad;

/// What a step will do.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// The work of the step.
    pub(super) load: StepLoad,
    /// Admitted from the queue.
    pub(super) admitted: Vec<SequenceId>,
    /// Preempted for blocks.
    pub(super) preempted: u32,
}

impl Engine {
    /// Plans a step; `held_slots` are slots of sequences that ended but are still in the step under way.
    pub(super) fn schedule(&mut self, held_slots: u32) -> Plan {
        let mut plan = Plan::default();
        let mut budget = self.config.max_num_batched_tokens;
        let alone = self.running.len() + self.waiting.len() <= 1;
        let cap = match self.config.long_prefill_token_threshold {
            0 => u32::MAX,
            _ if alone => u32::MAX,
            threshold => threshold,
        };
        self.schedule_running(&mut plan, &mut budget, cap);
        if plan.preempted == 0 {
            self.schedule_waiting(&mut plan, &mut budget, cap, held_slots);
        }
        plan
    }

    fn schedule_running(&mut self, plan: &mut Plan, budget: &mut u32, cap: u32) {
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let id = self.running[at];
            let Some(sequence) = self.sequences.get(&id) else { break };
            let chunk = (sequence.tokens() - sequence.computed).min(cap).min(*budget);
            let missing = Blocks::needed(sequence.computed + chunk).saturating_sub(sequence.blocks);
            while !self.blocks.take(missing) {
                plan.preempted += 1;
                // The victim was not scheduled yet: it stands at or behind `at`.
                if self.preempt_last() == Some(id) {
                    return;
                }
            }
            let Some(sequence) = self.sequences.get_mut(&id) else { break };
            sequence.blocks += missing;
            sequence.chunk = chunk;
            plan.load.add(sequence.computed, chunk, sequence.request.adapter.is_some());
            *budget -= chunk;
            at += 1;
        }
    }

    /// Takes all blocks from the last running sequence and queues it again, in front.
    fn preempt_last(&mut self) -> Option<SequenceId> {
        let id = self.running.pop()?;
        let sequence = self.sequences.get_mut(&id)?;
        self.blocks.give(std::mem::take(&mut sequence.blocks));
        sequence.computed = 0;
        self.waiting.push_front(id);
        Some(id)
    }

    fn schedule_waiting(&mut self, plan: &mut Plan, budget: &mut u32, cap: u32, held_slots: u32) {
        self.deferred = 0;
        if self.waiting.is_empty() {
            return;
        }
        let mut adapters = if self.config.max_loras > 0 { self.distinct(self.running.iter()) } else { Vec::new() };
        let mut position = 0;
        while *budget > 0 && position < self.waiting.len() {
            if self.running.len() + held_slots as usize >= self.config.max_num_seqs as usize {
                break;
            }
            let id = self.waiting[position];
            let Some(sequence) = self.sequences.get(&id) else { break };
            let adapter = sequence.request.adapter;
            if let Some(adapter) = adapter
                && !adapters.contains(&adapter)
                && adapters.len() >= self.config.max_loras.max(1) as usize
            {
                self.deferred += 1;
                position += 1;
                continue;
            }
            let tokens = sequence.tokens();
            let cached = whole_blocks(sequence.request.cached_prefix.min(tokens - 1));
            let chunk = (tokens - cached).min(cap);
            if !self.config.chunked_prefill && chunk > *budget {
                break;
            }
            let chunk = chunk.min(*budget);
            if !self.has_room_for(tokens) || !self.blocks.take(Blocks::needed(cached + chunk)) {
                break;
            }
            let Some(sequence) = self.sequences.get_mut(&id) else { break };
            sequence.computed = cached;
            sequence.blocks = Blocks::needed(cached + chunk);
            sequence.chunk = chunk;
            plan.load.add(cached, chunk, adapter.is_some());
            plan.admitted.push(id);
            *budget -= chunk;
            adapters.extend(adapter.filter(|adapter| !adapters.contains(adapter)));
            self.waiting.remove(position);
            self.running.push(id);
        }
    }

    /// The whole prompt must fit in the free blocks, and leave the watermark while something runs.
    fn has_room_for(&self, tokens: u32) -> bool {
        let keep = if self.running.is_empty() {
            0
        } else {
            (self.config.watermark * f64::from(self.blocks.usable())).ceil() as u32
        };
        Blocks::needed(tokens).saturating_add(keep) <= self.blocks.free()
    }
}

fn whole_blocks(tokens: u32) -> u32 {
    tokens - tokens % super::BLOCK_TOKENS
}
