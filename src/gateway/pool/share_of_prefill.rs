//! An owner's share of the prefill of a pool, while it shares the pool with other owners.
//!
//! An engine computes prompts in the order of arrival, so all prompts that one owner has sent
//! precede the next prompt of another owner, even if the gateway's queue is fair. For an owner with
//! the share `s` by weight, in a pool of `N` engines:
//!
//! - On one engine it has at most `s x` [`AHEAD`] prompt tokens to compute, or a single prompt.
//! - Its large prompts are on at most `max(1, floor(s x N))` engines at a time.
//! - While the small prompts of all owners on one engine come to [`QUEUED`] tokens, only owners
//!   that have less than their share `s` of all running requests send further prompts to that
//!   engine.
//!
//! With two owners and two engines, one engine is always free of the large prompts of either, and
//! `least_work` places the other owner's small prompts there. One prompt keeps an engine busy, so
//! this costs little throughput. Room for prefill is kept only for owners that had requests a
//! moment ago (`owners/presence.rs`). An owner alone has no bound. Bound: one entry per engine with
//! a prompt in prefill.

use smallvec::SmallVec;

use super::capacity::LARGE_PROMPT;
use sluice_core::base::BackendId;

/// Prompt tokens without a first token that all owners together may have on one engine: about as
/// many as vLLM computes in one step.
const AHEAD: f64 = 8_192.0;

/// Tokens of small prompts without a first token on one engine, of all owners, from which owners
/// that use their share wait in the gateway.
const QUEUED: u64 = 2_048;

/// The prompts that an owner may send to an engine now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allowance {
    tokens: u64,
    /// Whether a large prompt may be among them.
    large: bool,
}

impl Allowance {
    pub(super) const ALL: Self = Self { tokens: u64::MAX, large: true };
    pub(super) const NONE: Self = Self { tokens: 0, large: false };

    /// Whether a prompt with this many tokens to compute may go there.
    pub(super) fn allows(self, computed: u64) -> bool {
        computed <= self.tokens && (self.large || computed < LARGE_PROMPT)
    }

    /// Whether no large prompt may go there.
    pub(super) fn bars_large(self) -> bool {
        !self.large || self.tokens < LARGE_PROMPT
    }
}

/// The prompts of an owner on one engine that have no first token yet.
#[derive(Clone, Copy, Debug)]
struct OnEngine {
    backend: BackendId,
    tokens: u64,
    /// The part of `tokens` in prompts that are not large.
    small: u64,
    prompts: u32,
    large: u32,
}

/// The engines on which an owner has prompts in prefill.
#[derive(Debug, Default)]
pub(super) struct PrefillUse(SmallVec<[OnEngine; 2]>);

impl PrefillUse {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn begin(&mut self, backend: BackendId, computed: u64) {
        let large = u32::from(computed >= LARGE_PROMPT);
        let small = if large == 0 { computed } else { 0 };
        match self.0.iter_mut().find(|on| on.backend == backend) {
            Some(on) => {
                (on.tokens, on.small) = (on.tokens + computed, on.small + small);
                (on.prompts, on.large) = (on.prompts + 1, on.large + large);
            }
            None => self.0.push(OnEngine { backend, tokens: computed, small, prompts: 1, large }),
        }
    }

    pub(super) fn end(&mut self, backend: BackendId, computed: u64) {
        let Some(at) = self.0.iter().position(|on| on.backend == backend) else { return };
        let on = &mut self.0[at];
        on.tokens = on.tokens.saturating_sub(computed);
        if computed < LARGE_PROMPT {
            on.small = on.small.saturating_sub(computed);
        }
        on.prompts = on.prompts.saturating_sub(1);
        on.large = on.large.saturating_sub(u32::from(computed >= LARGE_PROMPT));
        if on.prompts == 0 {
            self.0.swap_remove(at);
        }
    }

    /// Whether the small prompts on `backend` fill the engine's queue.
    pub(super) fn is_queue_full(&self, backend: BackendId) -> bool {
        self.0.iter().any(|on| on.backend == backend && on.small >= QUEUED)
    }

    /// The prompts that may go to `backend`, given the owner's share of a pool of `engines`.
    pub(super) fn allowance(&self, backend: BackendId, share: f64, engines: usize) -> Allowance {
        let here = self.0.iter().find(|on| on.backend == backend);
        let tokens = here.map_or(u64::MAX, |on| ((share * AHEAD) as u64).max(LARGE_PROMPT).saturating_sub(on.tokens));
        let with_large = self.0.iter().filter(|on| on.large > 0).count();
        // A third of three engines is one engine, despite the rounding of the product.
        let most = ((share * engines as f64 + 1e-9) as usize).max(1);
        Allowance { tokens, large: here.is_some_and(|on| on.large > 0) || with_large < most }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_prompts_of_an_owner_keep_to_its_share_of_the_engines_one_at_a_time() {
        let [first, second] = [BackendId::new(0), BackendId::new(1)];
        let mut owner = PrefillUse::default();
        assert!(owner.allowance(first, 0.5, 2).allows(23_600), "a single prompt, however long");
        owner.begin(first, 4_500);
        for (backend, computed, allowed) in
            [(first, 4_500, false), (second, 4_500, false), (second, 200, true), (first, 200, false)]
        {
            assert_eq!(owner.allowance(backend, 0.5, 2).allows(computed), allowed, "{backend:?} {computed}");
        }
        assert!(owner.allowance(second, 0.5, 4).allows(4_500), "two of four engines");
        assert!(owner.allowance(first, 0.5, 2).bars_large() && owner.allowance(second, 0.5, 2).bars_large());
        owner.end(first, 4_500);
        assert!(owner.is_empty() && owner.allowance(second, 0.5, 2).allows(4_500));
    }

    #[test]
    fn small_prompts_go_several_at_a_time_to_every_engine() {
        let mut owner = PrefillUse::default();
        let sent = (0..100).take_while(|_| {
            let allowed = owner.allowance(BackendId::new(0), 0.5, 2).allows(200);
            owner.begin(BackendId::new(0), 200);
            allowed
        });
        assert_eq!(sent.count(), 20);
        assert!(owner.allowance(BackendId::new(1), 0.5, 2).allows(200));
    }
}
