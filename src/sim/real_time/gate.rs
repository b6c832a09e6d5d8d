//! vLLM's own admission limits: `--max-num-queued-reqs` and `--max-num-queued-tokens`, counted in the API server.
//!
//! The first refuses a request that would bring the sequences inside (waiting or running, all choices counted) over the
//! limit. The second refuses every request while the prompt tokens still in prefill have reached the limit, however small
//! it is, and lets one in below it, however long it is. A prompt counts in full until its first token, cached or not.
//! Both answer 503. Read in vLLM 0.32.
//!
//! Pure. A third limit, [`MAX_IN_FLIGHT`], is ours: it bounds the memory of the process and answers as the first one does.

/// Sequences inside one server: far beyond what any load here needs, small enough for memory.
pub(crate) const MAX_IN_FLIGHT: u64 = 65_536;

/// Which limit was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// `max_num_queued_reqs`
    Requests,
    /// `max_num_queued_tokens`
    Tokens,
}

/// What counts against the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gate {
    /// Sequences that wait or run.
    pub(crate) in_flight: u64,
    /// Prompt tokens of those without a first token.
    pub(crate) prefill_tokens: u64,
}

impl Gate {
    /// Lets `sequences` sequences with `prompt_tokens` tokens together in.
    ///
    /// # Errors
    /// Which limit stands against it; nothing is counted then.
    pub(crate) fn enter(
        &mut self,
        sequences: u64,
        prompt_tokens: u64,
        max_requests: Option<u64>,
        max_tokens: Option<u64>,
    ) -> Result<(), Full> {
        if self.in_flight + sequences > max_requests.unwrap_or(MAX_IN_FLIGHT).min(MAX_IN_FLIGHT) {
            return Err(Full::Requests);
        }
        if max_tokens.is_some_and(|most| self.prefill_tokens >= most) {
            return Err(Full::Tokens);
        }
        self.in_flight += sequences;
        self.prefill_tokens += prompt_tokens;
        Ok(())
    }

    /// A sequence has its first token.
    pub(crate) fn prefilled(&mut self, prompt_tokens: u32) {
        self.prefill_tokens -= u64::from(prompt_tokens);
    }

    /// A sequence is gone; `still_prefilling` are the prompt tokens of one that never had a token.
    pub(crate) fn leave(&mut self, still_prefilling: u32) {
        self.in_flight -= 1;
        self.prefill_tokens -= u64::from(still_prefilling);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_choices_of_a_request_count_and_all_or_none_come_in() {
        let mut gate = Gate::default();
        assert_eq!(gate.enter(2, 20, Some(3), None), Ok(()));
        assert_eq!(gate.enter(2, 20, Some(3), None), Err(Full::Requests));
        assert_eq!((gate.in_flight, gate.prefill_tokens), (2, 20));
        assert_eq!(gate.enter(1, 10, Some(3), None), Ok(()));
        gate.leave(10);
        assert_eq!(gate.enter(1, 10, Some(3), None), Ok(()));
        assert_eq!(Gate::default().enter(1, 1, Some(0), None), Err(Full::Requests), "0 closes the server");
    }

    #[test]
    fn a_long_prompt_comes_in_below_the_token_limit_and_then_nobody_until_it_is_prefilled() {
        let mut gate = Gate::default();
        assert_eq!(gate.enter(1, 10_000, None, Some(100)), Ok(()));
        assert_eq!(gate.enter(1, 1, None, Some(100)), Err(Full::Tokens));
        gate.prefilled(10_000);
        assert_eq!(gate.enter(1, 1, None, Some(100)), Ok(()));
        gate.leave(0);
        gate.leave(1);
        assert_eq!(gate, Gate::default());
    }

    #[test]
    fn without_limits_ours_bounds_the_process() {
        assert_eq!(Gate::default().enter(MAX_IN_FLIGHT + 1, 0, None, None), Err(Full::Requests));
        assert_eq!(Gate::default().enter(MAX_IN_FLIGHT + 1, 0, Some(u64::MAX), None), Err(Full::Requests));
    }
}
