//! Decides which sequences advance in a step, and by how many tokens: the rules of vLLM V1's
//! scheduler.
//!
//! 1. The budget is `max_num_batched_tokens`, the cap per request `long_prefill_token_threshold`.
//! 2. Running sequences advance first, in list order: chunk = min(tokens - computed, cap, budget).
//!    If blocks are missing, a sequence is preempted.
//! 3. Then waiting sequences start in the order of the queue, unless a sequence was preempted,
//!    while budget and `max_num_seqs` allow. A request whose adapter would exceed `max_loras` keeps
//!    its place and is skipped. Admission stops at the first prompt for which too few blocks are
//!    free.
//!
//! `prefill_schedule_interval` N delays prefills, also of running sequences, while a sequence
//! decodes: after a step that carried prefill, the next N - 1 steps carry none. The delay ends
//! early if an admission leaves requests waiting for room. Without data parallelism, vLLM has this
//! rule since 0.33.
//!
//! With speculative decoding a running sequence also advances by its drafts, and reserves the
//! slots that the drafter needs.
//!
//! A running long prompt takes the budget before later short ones. The gateway works against this
//! head-of-line blocking, so the order must match vLLM's.

use super::blocks::{BLOCK_TOKENS, BlockChange, Blocks};
use super::content::Chain;
use super::outcome::Admitted;
use super::request::{Pause, Policy};
use super::sequence::{Ending, Place, Rank, Slot};
use super::speculation::Speculation;
use super::step::Engine;
use super::step_plan::StepPlan;

struct Limits {
    budget: u32,
    cap: u32,
    decode_only: bool,
    /// Whether the plan carries prefill.
    prefills: bool,
}

struct Found {
    blocks: Vec<u32>,
    chain: Chain,
    /// Number of the found blocks that have no owner. Sharing takes them from the free list.
    ownerless: u32,
}

impl Engine {
    pub(super) fn plan(&mut self) -> StepPlan {
        #[cfg(test)]
        {
            self.observed = (self.blocks.free(), Vec::new());
        }
        let mut plan = StepPlan::default();
        let whole = if self.pause == Pause::All { 0 } else { self.config.max_num_batched_tokens };
        let mut limits = Limits { budget: whole, cap: self.cap(), decode_only: self.holds_prefills(), prefills: false };
        self.schedule_running(&mut plan, &mut limits);
        if plan.preempted == 0 && self.pause == Pause::No {
            self.schedule_waiting(&mut plan, &mut limits);
        }
        plan.tokens = whole - limits.budget;
        self.since_prefill = match limits.prefills {
            true => 0,
            false => self.since_prefill.saturating_add(u32::from(plan.tokens > 0)),
        };
        plan
    }

    /// Maximum tokens for one request in this step. A request that is alone has no limit. An
    /// adaptive limit is at least budget / requests.
    fn cap(&self) -> u32 {
        let requests = (self.running.len() + self.waiting.len()) as u32;
        match self.config.long_prefill_token_threshold {
            0 => u32::MAX,
            _ if requests <= 1 => u32::MAX,
            threshold if self.config.long_prefill_token_threshold_adaptive => {
                threshold.max(self.config.max_num_batched_tokens / requests)
            }
            threshold => threshold,
        }
    }

    fn holds_prefills(&self) -> bool {
        let is_early = self.since_prefill.saturating_add(1) < self.config.prefill_schedule_interval;
        let decodes = |slot: &Slot| !self.sequences[*slot as usize].prefilling;
        is_early && !self.admission_was_short && self.running.iter().any(decodes)
    }

    fn schedule_running(&mut self, plan: &mut StepPlan, limits: &mut Limits) {
        let mut at = 0;
        let lookahead = self.lookahead();
        'sequences: while at < self.running.len() && limits.budget > 0 {
            let slot = self.running[at];
            let sequence = &self.sequences[slot as usize];
            if sequence.ending == Some(Ending::AtLimit) || limits.decode_only && sequence.prefilling {
                at += 1;
                continue;
            }
            let wanted = sequence.tokens() + sequence.drafts - sequence.computed;
            let chunk = wanted.min(limits.cap).min(limits.budget);
            let end = sequence.computed + chunk;
            let missing = Blocks::needed(end + lookahead).saturating_sub(sequence.blocks.len() as u32);
            while self.blocks.free() < missing {
                plan.preempted += 1;
                let victim = self.victim();
                let chosen = self.running.remove(victim);
                if victim < at {
                    at -= 1;
                }
                limits.budget += self.sequences[chosen as usize].chunk;
                self.requeue(chosen);
                if chosen == slot {
                    // With priorities, later sequences in the list may be more urgent, and may
                    // still fit.
                    match self.config.policy {
                        Policy::Fcfs => return,
                        Policy::Priority => continue 'sequences,
                    }
                }
            }
            let sequence = &mut self.sequences[slot as usize];
            if missing > 0 {
                self.blocks.allocate(missing, &mut sequence.blocks);
            }
            sequence.chunk = chunk;
            limits.prefills |= sequence.prefilling;
            let unknown = u32::from(self.config.async_scheduling && sequence.sampled);
            let known = sequence.tokens() - unknown;
            self.publish(slot, end.min(known));
            limits.budget -= chunk;
            at += 1;
        }
    }

    /// Index in the running list of the sequence to preempt next: the last, or with priorities the
    /// least urgent.
    fn victim(&self) -> usize {
        let last = self.running.len() - 1;
        if self.config.policy == Policy::Fcfs {
            return last;
        }
        let urgency = |at: usize| {
            let request = &self.sequences[self.running[at] as usize].request;
            (request.priority, request.arrived)
        };
        // Of equally urgent sequences, the first one in the list is chosen.
        (1..=last).fold(0, |worst, at| if urgency(at) > urgency(worst) { at } else { worst })
    }

    /// Preempts a sequence that was taken from the running list: releases its blocks and puts it at
    /// the front of the queue, or removes it if it has ended.
    pub(super) fn requeue(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot as usize];
        self.blocks.release(&mut sequence.blocks);
        (sequence.chunk, sequence.chain) = (0, sequence.root());
        (sequence.sampled, sequence.preempted, sequence.drafts) = (false, true, 0);
        if sequence.ending.is_some() {
            self.ending -= 1;
            self.vacate(slot);
        } else {
            self.waiting.push(slot, &mut self.sequences[slot as usize], true);
        }
    }

    fn schedule_waiting(&mut self, plan: &mut StepPlan, limits: &mut Limits) {
        let most = self.config.max_num_active_seqs.unwrap_or(u32::MAX).min(self.config.max_num_seqs) as usize;
        let lora = self.config.max_loras > 0;
        let mut adapters = if lora { self.distinct(self.running.iter().copied()) } else { Vec::new() };
        let mut passed: Option<Rank> = None;
        while limits.budget > 0 && self.running.len() < most {
            let Some((rank, slot)) = self.waiting.after(passed) else { break };
            let adapter = self.sequences[slot as usize].request.adapter;
            let new = adapter.filter(|adapter| !adapters.contains(adapter));
            if new.is_some() && adapters.len() >= self.config.max_loras.max(1) as usize {
                self.deferred += usize::from(!std::mem::replace(&mut self.sequences[slot as usize].deferred, true));
                passed = Some(rank);
                continue;
            }
            let Some(admitted) = self.admit(slot, limits) else { break };
            plan.admitted.push(admitted);
            adapters.extend(new);
            self.dequeue(slot);
            self.running.push(slot);
        }
        if !limits.decode_only {
            self.admission_was_short = self.waiting.len() > self.deferred;
        }
    }

    /// Schedules the first chunk of a waiting sequence. `None` if the budget does not suffice, or
    /// too few blocks are free (while a sequence runs, the watermark must stay free, too).
    fn admit(&mut self, slot: Slot, limits: &mut Limits) -> Option<Admitted> {
        let found = self.find_cached(slot);
        let hits = found.blocks.len() as u32;
        let cached = hits * BLOCK_TOKENS;
        let sequence = &self.sequences[slot as usize];
        let tokens = sequence.tokens();
        if limits.decode_only && cached < tokens - 1 {
            return None;
        }
        let chunk = (tokens - cached).min(limits.cap);
        if !self.config.chunked_prefill && chunk > limits.budget {
            return None;
        }
        let chunk = chunk.min(limits.budget);
        let new = Blocks::needed(cached + chunk + self.lookahead()) - hits;
        let whole = Blocks::needed(tokens + self.lookahead()) - hits;
        let reserved = if self.config.scheduler_reserve_full_isl { whole } else { new };
        if reserved.saturating_add(found.ownerless).saturating_add(self.watermark_blocks()) > self.blocks.free() {
            return None;
        }
        found.blocks.iter().for_each(|id| self.blocks.share(*id));
        let sequence = &mut self.sequences[slot as usize];
        sequence.blocks.extend(found.blocks);
        self.blocks.allocate(new, &mut sequence.blocks);
        sequence.chain = found.chain;
        (sequence.computed, sequence.chunk) = (cached, chunk);
        (sequence.place, sequence.prefilling) = (Some(Place::Running), true);
        self.ending += usize::from(sequence.ending.is_some());
        let admitted = Admitted { id: sequence.request.id, cached_tokens: cached, resumed: sequence.preempted };
        if self.config.prefix_caching && !sequence.preempted && !sequence.request.skip_cached {
            self.prefix.queries += u64::from(tokens);
            self.prefix.hits += u64::from(cached);
        }
        self.publish(slot, cached + chunk);
        limits.budget -= chunk;
        // A chunk of only the last token is a decode, not prefill.
        limits.prefills |= cached < tokens - 1;
        Some(admitted)
    }

    /// Slots of the KV cache that the drafter needs beyond the scheduled tokens.
    fn lookahead(&self) -> u32 {
        self.config.speculation.as_ref().map_or(0, Speculation::lookahead)
    }

    fn watermark_blocks(&self) -> u32 {
        if self.running.is_empty() { 0 } else { (self.config.watermark * f64::from(self.config.num_blocks)) as u32 }
    }

    /// The longest cached prefix of a sequence, in whole blocks and without the last token, which
    /// is always computed.
    fn find_cached(&self, slot: Slot) -> Found {
        let sequence = &self.sequences[slot as usize];
        let request = &sequence.request;
        let mut found = Found { blocks: Vec::new(), chain: sequence.root(), ownerless: 0 };
        if !self.config.prefix_caching || request.skip_cached {
            return found;
        }
        for _ in 0..(sequence.tokens() - 1) / BLOCK_TOKENS {
            let (chain, hash) = found.chain.next(&request.content, request.id);
            let Some(id) = self.blocks.find(hash) else { break };
            found.chain = chain;
            found.ownerless += u32::from(self.blocks.is_free(id));
            found.blocks.push(id);
        }
        found
    }

    /// Publishes the full blocks among the first `tokens` tokens of a sequence. Prompt blocks are
    /// published when they are scheduled, so that a second prompt in the same step shares them.
    /// Blocks with generated tokens are published once the tokens are known, which with
    /// asynchronous scheduling is a step later.
    pub(super) fn publish(&mut self, slot: Slot, tokens: u32) {
        if !self.config.prefix_caching {
            return;
        }
        let sequence = &mut self.sequences[slot as usize];
        let (id, parent, mut hashes) = (sequence.request.id, sequence.chain.last(), Vec::new());
        while (sequence.chain.blocks() + 1) * BLOCK_TOKENS <= tokens {
            let place = sequence.chain.blocks() as usize;
            let (longer, hash) = sequence.next_hash();
            self.blocks.publish(sequence.blocks[place], hash);
            sequence.chain = longer;
            if self.config.kv_events {
                hashes.push(hash);
            }
        }
        if !hashes.is_empty() {
            self.blocks.record(BlockChange::Stored { id, parent, hashes });
        }
    }
}
