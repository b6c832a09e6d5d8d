//! The limits of one backend, and the capacity in use.
//!
//! Three amounts are counted at once, because each alone lets a different load through:
//! - **slots**: sequences that decode. A request takes one for each prompt times `n`, or one if it
//!   generates nothing, such as an embedding of 2,048 inputs.
//! - **tokens**: outstanding prompt and output tokens, in the KV cache of the backend.
//! - **prefill**: prompt tokens of requests without a first output token. A prompt above the
//!   `long_prefix` threshold also takes a *permit* until the first token. Permits bound long
//!   prefills, not decodes.
//!
//! An [`Allocation`] keeps the amounts that were taken, which are given back once. Under a lowered
//! limit, nothing is admitted until usage has fallen. A request above a whole limit of slots or
//! tokens is refused. A prompt above `prefill_tokens` runs when no other is in prefill, because the
//! engine computes it in pieces.

use super::bill::Bill;
use super::served::ModelKey;
use super::settled::Mark;
use sluice_config::limits::MAX_TOKENS;
use sluice_core::openai::{LimitUnit, TooLarge};

/// Prompts of at least this many tokens are large to policies, because their prefill takes more
/// than a few steps.
pub(super) const LARGE_PROMPT: u64 = 1_024;

/// The limits of one backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendLimits {
    /// Sequences in flight; at least 1.
    pub slots: u32,
    /// Outstanding prompt + output tokens; `None` is no limit.
    pub tokens: Option<u64>,
    /// Prompt tokens in prefill; `None` is no limit.
    pub prefill_tokens: Option<u64>,
    /// Bound on long prompts in prefill; `None` is no limit.
    pub long_prefix: Option<LongPrefix>,
}

/// At most `slots` prompts longer than `threshold` tokens in prefill at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongPrefix {
    /// Prompts of more than this many tokens need a permit.
    pub threshold: u64,
    /// Permits of one backend; 0 keeps long prompts away from it.
    pub slots: u32,
}

impl BackendLimits {
    /// Whether a prompt of this many tokens needs a permit here.
    pub fn is_long(&self, prompt_tokens: u64) -> bool {
        self.long_prefix.is_some_and(|long| prompt_tokens > long.threshold)
    }

    /// The limit that `need` exceeds even on an empty backend.
    pub fn exceeded_by(&self, need: &Need) -> Option<TooLarge> {
        let above = |unit, wanted: u64, limit: u64| (wanted > limit).then_some(TooLarge { unit, wanted, limit });
        above(LimitUnit::Sequences, need.slots.into(), self.slots.into())
            .or_else(|| self.tokens.and_then(|limit| above(LimitUnit::Tokens, need.tokens(), limit)))
    }
}

/// The capacity that a request needs on a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Sequences: prompts times `n`; 1 where nothing is generated.
    pub slots: u32,
    /// Estimated prompt tokens, all prompts together.
    pub prompt_tokens: u64,
    /// Estimated output tokens, all sequences together.
    pub output_tokens: u64,
}

impl Need {
    /// Prompt and output tokens together.
    pub fn tokens(&self) -> u64 {
        self.prompt_tokens.saturating_add(self.output_tokens)
    }
}

/// The capacity in use on a backend: the sum of all leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapacityUsage {
    /// Leases.
    pub requests: u32,
    /// Sequences in flight.
    pub slots: u32,
    /// Outstanding prompt + output tokens.
    pub tokens: u64,
    /// Prompt tokens whose first output token has not been seen.
    pub prefill_tokens: u64,
    /// Prompt tokens in prefill that the engine must compute, of prompts with at least 1,024 such
    /// tokens.
    pub large_prefill_tokens: u64,
    /// Prompt tokens in prefill that are expected in the prefix cache.
    pub cached_prefill_tokens: u64,
    /// Long prompts in prefill.
    pub long_prefills: u32,
}

/// The amounts that were taken for one lease. They go back when it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    slots: u32,
    tokens: u64,
    /// The prompt's part of `tokens`.
    prompt_tokens: u64,
    prefill_tokens: u64,
    /// Prompt tokens that are expected in the prefix cache.
    cached_tokens: u64,
    permit: bool,
    prefilling: bool,
    /// When the engine was seen to have the request; see `settled.rs`.
    pub(super) seen: Option<Mark>,
    pub(super) adapter: Option<ModelKey>,
    pub(super) bill: Option<Bill>,
}

impl Allocation {
    /// Whether a prefill permit was taken.
    pub fn permit(&self) -> bool {
        self.permit
    }

    pub(super) fn is_one_sequence(&self) -> bool {
        self.slots == 1
    }

    pub(super) fn is_prefilling(&self) -> bool {
        self.prefilling
    }

    /// Prompt tokens that are expected in the prefix cache.
    pub fn cached_tokens(&self) -> u64 {
        self.cached_tokens
    }

    fn cached_prefill_tokens(&self) -> u64 {
        self.cached_tokens.min(self.prefill_tokens)
    }

    fn large_prefill_tokens(&self) -> u64 {
        let computed = self.prefill_tokens - self.cached_prefill_tokens();
        if computed >= LARGE_PROMPT { computed } else { 0 }
    }
}

/// Whether a backend has room for a need now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// There is room.
    Room,
    /// Only a prefill permit is missing. Later requests that need no permit may go first without
    /// delaying this one.
    NoPermit,
    /// Slots, tokens or prefill tokens are short.
    Full,
}

impl CapacityUsage {
    /// Whether `need` fits under `limits` on top of the current usage.
    pub fn fit(&self, limits: &BackendLimits, need: &Need) -> Fit {
        let above = |used: u64, wanted: u64, limit: u64| used.saturating_add(wanted) > limit;
        if above(self.slots.into(), need.slots.into(), limits.slots.into()) {
            return Fit::Full;
        }
        if limits.tokens.is_some_and(|limit| above(self.tokens, need.tokens(), limit)) {
            return Fit::Full;
        }
        if limits.long_prefix.is_some_and(|long| limits.is_long(need.prompt_tokens) && self.long_prefills >= long.slots)
        {
            return Fit::NoPermit;
        }
        let paced = |limit| self.prefill_tokens > 0 && above(self.prefill_tokens, need.prompt_tokens, limit);
        if limits.prefill_tokens.is_some_and(paced) {
            return Fit::Full;
        }
        Fit::Room
    }

    /// Takes `need`. The caller has checked [`CapacityUsage::fit`].
    pub fn take(&mut self, limits: &BackendLimits, need: &Need) -> Allocation {
        let allocation = Allocation {
            slots: need.slots,
            tokens: need.tokens(),
            prompt_tokens: need.prompt_tokens,
            prefill_tokens: need.prompt_tokens,
            cached_tokens: 0,
            permit: limits.is_long(need.prompt_tokens),
            prefilling: true,
            seen: None,
            adapter: None,
            bill: None,
        };
        self.requests += 1;
        self.slots += allocation.slots;
        self.tokens += allocation.tokens;
        self.prefill_tokens += allocation.prefill_tokens;
        self.large_prefill_tokens += allocation.large_prefill_tokens();
        self.long_prefills += u32::from(allocation.permit);
        allocation
    }

    /// Notes that `cached` tokens of the prompt of an allocation are expected in the engine's
    /// prefix cache.
    pub fn expect_cached(&mut self, allocation: &mut Allocation, cached: u64) {
        self.large_prefill_tokens -= allocation.large_prefill_tokens();
        allocation.cached_tokens = cached.min(allocation.prompt_tokens);
        self.cached_prefill_tokens += allocation.cached_prefill_tokens();
        self.large_prefill_tokens += allocation.large_prefill_tokens();
    }

    /// Prompt tokens in prefill that the engine must compute.
    pub(super) fn computed_prefill_tokens(&self) -> u64 {
        self.prefill_tokens - self.cached_prefill_tokens
    }

    /// The prompt has more tokens than estimated: takes the difference, and during prefill a permit
    /// for a long prompt, even without room. Never takes less than before.
    pub fn charge(&mut self, limits: &BackendLimits, allocation: &mut Allocation, prompt_tokens: u64) {
        let more = prompt_tokens.min(MAX_TOKENS.0).saturating_sub(allocation.prompt_tokens);
        allocation.prompt_tokens += more;
        allocation.tokens += more;
        self.tokens += more;
        if allocation.prefilling {
            self.large_prefill_tokens -= allocation.large_prefill_tokens();
            allocation.prefill_tokens += more;
            self.prefill_tokens += more;
            self.large_prefill_tokens += allocation.large_prefill_tokens();
            let permit = !allocation.permit && limits.is_long(allocation.prompt_tokens);
            allocation.permit |= permit;
            self.long_prefills += u32::from(permit);
        }
    }

    /// The first token was seen: returns the prefill share of `allocation`. Idempotent.
    pub fn end_prefill(&mut self, allocation: &mut Allocation) {
        allocation.prefilling = false;
        self.large_prefill_tokens -= allocation.large_prefill_tokens();
        self.cached_prefill_tokens -= allocation.cached_prefill_tokens();
        self.prefill_tokens -= std::mem::take(&mut allocation.prefill_tokens);
        self.long_prefills -= u32::from(std::mem::take(&mut allocation.permit));
    }

    /// Returns everything that is still held.
    pub fn release(&mut self, mut allocation: Allocation) {
        self.end_prefill(&mut allocation);
        self.requests -= 1;
        self.slots -= allocation.slots;
        self.tokens -= allocation.tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: BackendLimits = BackendLimits {
        slots: 4,
        tokens: Some(1_000),
        prefill_tokens: None,
        long_prefix: Some(LongPrefix { threshold: 100, slots: 1 }),
    };

    fn need(slots: u32, prompt_tokens: u64, output_tokens: u64) -> Need {
        Need { slots, prompt_tokens, output_tokens }
    }

    #[test]
    fn a_long_prompt_takes_the_permit_and_returns_it_at_the_first_token() {
        let mut used = CapacityUsage::default();
        let mut allocation = used.take(&LIMITS, &need(1, 101, 10));
        assert_eq!(used.fit(&LIMITS, &need(1, 101, 10)), Fit::NoPermit);
        assert_eq!(used.fit(&LIMITS, &need(1, 100, 10)), Fit::Room);
        used.end_prefill(&mut allocation);
        assert_eq!(used.fit(&LIMITS, &need(1, 101, 10)), Fit::Room);
        assert_eq!((used.slots, used.tokens, used.prefill_tokens), (1, 111, 0));
        used.end_prefill(&mut allocation);
        used.release(allocation);
        assert_eq!(used, CapacityUsage::default());
    }

    #[test]
    fn a_prompt_found_to_be_long_is_charged_as_long_from_then_on() {
        let mut used = CapacityUsage::default();
        let mut allocation = used.take(&LIMITS, &need(1, 50, 10));
        used.charge(&LIMITS, &mut allocation, 40);
        assert_eq!((used.tokens, used.prefill_tokens, used.long_prefills), (60, 50, 0), "never less than before");
        used.charge(&LIMITS, &mut allocation, 5_000);
        used.charge(&LIMITS, &mut allocation, 5_000);
        assert_eq!((used.tokens, used.prefill_tokens, used.long_prefills), (5_010, 5_000, 1), "room or not");
        assert_eq!(used.fit(&LIMITS, &need(1, 1, 1)), Fit::Full);
        used.end_prefill(&mut allocation);
        used.charge(&LIMITS, &mut allocation, u64::MAX);
        assert_eq!((used.tokens, used.prefill_tokens, used.long_prefills), (MAX_TOKENS.0 + 10, 0, 0));
        used.release(allocation);
        assert_eq!(used, CapacityUsage::default());
    }

    #[test]
    fn slots_and_tokens_are_bounds() {
        let mut used = CapacityUsage::default();
        used.take(&LIMITS, &need(3, 50, 50));
        assert_eq!(used.fit(&LIMITS, &need(2, 1, 1)), Fit::Full);
        assert_eq!(used.fit(&LIMITS, &need(1, 50, 851)), Fit::Full);
        assert_eq!(used.fit(&LIMITS, &need(1, 50, 850)), Fit::Room);
    }

    #[test]
    fn a_need_beyond_a_whole_limit_fits_on_no_backend_and_names_the_limit() {
        let empty = CapacityUsage::default();
        for (huge, unit, wanted, limit) in
            [(need(5, 1, 1), LimitUnit::Sequences, 5, 4), (need(4, 1, 1_000), LimitUnit::Tokens, 1_001, 1_000)]
        {
            assert_eq!(LIMITS.exceeded_by(&huge), Some(TooLarge { unit, wanted, limit }));
            assert_eq!(empty.fit(&LIMITS, &huge), Fit::Full);
        }
        let widest = need(4, 100, 900);
        assert_eq!((LIMITS.exceeded_by(&widest), empty.fit(&LIMITS, &widest)), (None, Fit::Room));
    }

    #[test]
    fn a_prompt_above_the_pace_of_prefill_runs_when_no_other_is_in_prefill() {
        let limits = BackendLimits { prefill_tokens: Some(50), ..LIMITS };
        let mut used = CapacityUsage::default();
        assert_eq!((limits.exceeded_by(&need(1, 90, 1)), used.fit(&limits, &need(1, 90, 1))), (None, Fit::Room));
        let mut allocation = used.take(&limits, &need(1, 10, 1));
        assert_eq!(used.fit(&limits, &need(1, 90, 1)), Fit::Full);
        assert_eq!(used.fit(&limits, &need(1, 40, 1)), Fit::Room);
        used.end_prefill(&mut allocation);
        assert_eq!(used.fit(&limits, &need(1, 90, 1)), Fit::Room);
    }

    #[test]
    fn zero_permits_keep_long_prompts_away() {
        let limits = BackendLimits { long_prefix: Some(LongPrefix { threshold: 100, slots: 0 }), ..LIMITS };
        assert_eq!(CapacityUsage::default().fit(&limits, &need(1, 101, 1)), Fit::NoPermit);
    }

    #[test]
    fn a_limit_lowered_under_load_admits_nothing_until_usage_has_fallen() {
        let mut used = CapacityUsage::default();
        let first = used.take(&LIMITS, &need(2, 10, 10));
        let _second = used.take(&LIMITS, &need(2, 10, 10));
        let lowered = BackendLimits { slots: 2, ..LIMITS };
        assert_eq!(used.fit(&lowered, &need(1, 1, 1)), Fit::Full);
        used.release(first);
        assert_eq!(used.fit(&lowered, &need(1, 1, 1)), Fit::Full);
        assert_eq!(used.fit(&BackendLimits { slots: 3, ..LIMITS }, &need(1, 1, 1)), Fit::Room);
    }
}
