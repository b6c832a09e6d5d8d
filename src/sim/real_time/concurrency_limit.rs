//! vLLM's own admission limits: `--max-num-queued-reqs` and `--max-num-queued-tokens`, counted in
//! the API server.
//!
//! The first limit refuses a request that would raise the number of sequences (waiting or running,
//! all choices counted) above it. The second limit refuses every request while the prompt tokens in
//! prefill have reached it; below it, a request of any length is admitted. A prompt counts in full
//! until its first token, cached or not. Both refuse with 503, as in vLLM 0.32. A third limit,
//! [`MAX_IN_FLIGHT`], bounds the memory of the process and refuses like the first one.

/// Maximum sequences in one server: more than any load needs, few enough for memory.
pub(crate) const MAX_IN_FLIGHT: u64 = 65_536;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitReached {
    /// `max_num_queued_reqs`
    Requests,
    /// `max_num_queued_tokens`
    Tokens,
}

/// The amounts that count against the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConcurrencyLimit {
    pub(crate) in_flight: u64,
    /// Prompt tokens of sequences without a first token.
    pub(crate) prefill_tokens: u64,
}

impl ConcurrencyLimit {
    /// Admits `sequences` sequences with `prompt_tokens` prompt tokens in all.
    ///
    /// # Errors
    /// The limit that was reached. In that case nothing is counted.
    pub(crate) fn enter(
        &mut self,
        sequences: u64,
        prompt_tokens: u64,
        max_requests: Option<u64>,
        max_tokens: Option<u64>,
    ) -> Result<(), LimitReached> {
        if self.in_flight + sequences > max_requests.unwrap_or(MAX_IN_FLIGHT).min(MAX_IN_FLIGHT) {
            return Err(LimitReached::Requests);
        }
        if max_tokens.is_some_and(|most| self.prefill_tokens >= most) {
            return Err(LimitReached::Tokens);
        }
        self.in_flight += sequences;
        self.prefill_tokens += prompt_tokens;
        Ok(())
    }

    pub(crate) fn prefilled(&mut self, prompt_tokens: u32) {
        self.prefill_tokens -= u64::from(prompt_tokens);
    }

    /// Records that a sequence has ended. `still_prefilling`: the prompt tokens if it had no first
    /// token, otherwise 0.
    pub(crate) fn leave(&mut self, still_prefilling: u32) {
        self.in_flight -= 1;
        self.prefill_tokens -= u64::from(still_prefilling);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_choices_of_a_request_count_and_are_admitted_together() {
        let mut limit = ConcurrencyLimit::default();
        assert_eq!(limit.enter(2, 20, Some(3), None), Ok(()));
        assert_eq!(limit.enter(2, 20, Some(3), None), Err(LimitReached::Requests));
        assert_eq!((limit.in_flight, limit.prefill_tokens), (2, 20));
        assert_eq!(limit.enter(1, 10, Some(3), None), Ok(()));
        limit.leave(10);
        assert_eq!(limit.enter(1, 10, Some(3), None), Ok(()));
        assert_eq!(
            ConcurrencyLimit::default().enter(1, 1, Some(0), None),
            Err(LimitReached::Requests),
            "0 closes the server"
        );
    }

    #[test]
    fn a_long_prompt_is_admitted_below_the_token_limit_and_no_other_until_it_is_prefilled() {
        let mut limit = ConcurrencyLimit::default();
        assert_eq!(limit.enter(1, 10_000, None, Some(100)), Ok(()));
        assert_eq!(limit.enter(1, 1, None, Some(100)), Err(LimitReached::Tokens));
        limit.prefilled(10_000);
        assert_eq!(limit.enter(1, 1, None, Some(100)), Ok(()));
        limit.leave(0);
        limit.leave(1);
        assert_eq!(limit, ConcurrencyLimit::default());
    }

    #[test]
    fn without_configured_limits_the_built_in_one_applies() {
        assert_eq!(ConcurrencyLimit::default().enter(MAX_IN_FLIGHT + 1, 0, None, None), Err(LimitReached::Requests));
        assert_eq!(
            ConcurrencyLimit::default().enter(MAX_IN_FLIGHT + 1, 0, Some(u64::MAX), None),
            Err(LimitReached::Requests)
        );
    }
}
