//! Which sequences advance in a step, and by how many tokens: the scheduler of vLLM V1, rule by rule.
//!
//! 1. The budget is `max_num_batched_tokens`.
//! 2. The cap per request is `long_prefill_token_threshold`, off when one request is all there is; adaptive: at least
//!    budget / requests.
//! 3. Running first, in list order: chunk = min(tokens - computed, cap, budget). When blocks are missing the last of the
//!    running list (by priority: the least urgent, which may have been scheduled already and gives its budget back) loses
//!    all of its own and goes to the front of the queue, to be computed again.
//! 4. The queue only if nothing was preempted: in order, while budget and places last. A new adapter beyond `max_loras`
//!    is passed over and keeps its place. What is cached of a prompt, whole blocks and never its last token, is not
//!    computed. A prompt whose blocks are not all free (and, while something runs, the watermark) ends admission.
//! 5. Full blocks are published when they are scheduled, before they are computed: a second prompt of the same step
//!    already shares them. A generated token is published when it is known, which asynchronous scheduling learns late.
//! 6. With `prefill_schedule_interval` n, prefills are left out of all but every n-th step, as long as something decodes
//!    and the last admission emptied the queue.
//!
//! A long prompt that runs takes the budget before later short ones: that is the head-of-line blocking that the
//! product exists for, and the reason this order is kept exactly.

use super::blocks::{BLOCK_TOKENS, Blocks};
use super::content::Chain;
use super::outcome::Admitted;
use super::request::{Pause, Policy};
use super::sequence::{Ending, Place, Rank, Slot};
use super::step::Engine;
use super::step_plan::StepPlan;

/// What the plan under way may still use.
struct Limits {
    budget: u32,
    /// Most tokens for one request.
    cap: u32,
    /// Prefills are left out.
    decode_only: bool,
}

/// What of a sequence is in the prefix cache.
struct Found {
    blocks: Vec<u32>,
    chain: Chain,
    /// Blocks of it that nobody holds: they are taken from the free ones.
    unheld: u32,
}

impl Engine {
    /// Plans a step.
    pub(super) fn plan(&mut self) -> StepPlan {
        #[cfg(test)]
        {
            self.observed = (self.blocks.free(), Vec::new());
        }
        let mut plan = StepPlan::default();
        let whole = if self.pause == Pause::All { 0 } else { self.config.max_num_batched_tokens };
        let mut limits = Limits { budget: whole, cap: self.cap(), decode_only: self.decodes_only() };
        self.schedule_running(&mut plan, &mut limits);
        if plan.preempted == 0 && self.pause == Pause::No {
            self.schedule_waiting(&mut plan, &mut limits);
        }
        plan.tokens = whole - limits.budget;
        plan
    }

    /// Most tokens for one request.
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

    fn decodes_only(&self) -> bool {
        let interval = u64::from(self.config.prefill_schedule_interval.max(1));
        let decodes = |slot: &Slot| !self.sequences[*slot as usize].prefilling;
        !self.steps.is_multiple_of(interval) && !self.crowded && self.running.iter().any(decodes)
    }

    fn schedule_running(&mut self, plan: &mut StepPlan, limits: &mut Limits) {
        let mut at = 0;
        while at < self.running.len() && limits.budget > 0 {
            let slot = self.running[at];
            let sequence = &self.sequences[slot as usize];
            if sequence.ending == Some(Ending::AtLimit) || limits.decode_only && sequence.prefilling {
                at += 1;
                continue;
            }
            let chunk = (sequence.tokens() - sequence.computed).min(limits.cap).min(limits.budget);
            let end = sequence.computed + chunk;
            let missing = Blocks::needed(end).saturating_sub(sequence.blocks.len() as u32);
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
                    return;
                }
            }
            let sequence = &mut self.sequences[slot as usize];
            if missing > 0 {
                self.blocks.take(missing, &mut sequence.blocks);
            }
            sequence.chunk = chunk;
            let unknown = u32::from(self.config.async_scheduling && sequence.sampled);
            let known = sequence.tokens() - unknown;
            self.publish(slot, end.min(known));
            limits.budget -= chunk;
            at += 1;
        }
    }

    /// Where in the running list the sequence stands that is preempted next.
    fn victim(&self) -> usize {
        let last = self.running.len() - 1;
        if self.config.policy == Policy::Fcfs {
            return last;
        }
        let urgency = |at: usize| {
            let request = &self.sequences[self.running[at] as usize].request;
            (request.priority, request.arrived)
        };
        // The first among equals.
        (1..=last).fold(0, |worst, at| if urgency(at) > urgency(worst) { at } else { worst })
    }

    /// A sequence that left the running list loses its blocks and waits again, in front; one that is over just goes.
    pub(super) fn requeue(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot as usize];
        self.blocks.give(&mut sequence.blocks);
        (sequence.chunk, sequence.chain) = (0, sequence.root());
        (sequence.sampled, sequence.preempted) = (false, true);
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
            self.crowded = self.waiting.len() > self.deferred;
        }
    }

    /// Gives a waiting sequence its first chunk, or nothing when there is no room for it now.
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
        let new = Blocks::needed(cached + chunk) - hits;
        let reserved = if self.config.scheduler_reserve_full_isl { Blocks::needed(tokens) - hits } else { new };
        if reserved.saturating_add(found.unheld).saturating_add(self.kept_free()) > self.blocks.free() {
            return None;
        }
        found.blocks.iter().for_each(|id| self.blocks.share(*id));
        let sequence = &mut self.sequences[slot as usize];
        sequence.blocks.extend(found.blocks);
        self.blocks.take(new, &mut sequence.blocks);
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
        Some(admitted)
    }

    /// Blocks that admission leaves free while something runs.
    fn kept_free(&self) -> u32 {
        if self.running.is_empty() { 0 } else { (self.config.watermark * f64::from(self.config.num_blocks)) as u32 }
    }

    /// The longest beginning of a sequence that is cached, without its last token.
    fn find_cached(&self, slot: Slot) -> Found {
        let sequence = &self.sequences[slot as usize];
        let request = &sequence.request;
        let mut found = Found { blocks: Vec::new(), chain: sequence.root(), unheld: 0 };
        if !self.config.prefix_caching || request.skip_cached {
            return found;
        }
        for _ in 0..(sequence.tokens() - 1) / BLOCK_TOKENS {
            let (chain, hash) = found.chain.next(&request.content, request.id);
            let Some(id) = self.blocks.find(hash) else { break };
            found.chain = chain;
            found.unheld += u32::from(self.blocks.is_free(id));
            found.blocks.push(id);
        }
        found
    }

    /// Makes the full blocks among the first `tokens` tokens of a sequence findable.
    pub(super) fn publish(&mut self, slot: Slot, tokens: u32) {
        if !self.config.prefix_caching {
            return;
        }
        let sequence = &mut self.sequences[slot as usize];
        while (sequence.chain.blocks() + 1) * BLOCK_TOKENS <= tokens {
            let place = sequence.chain.blocks() as usize;
            let (longer, hash) = sequence.next_hash();
            self.blocks.publish(sequence.blocks[place], hash);
            sequence.chain = longer;
        }
    }
}
