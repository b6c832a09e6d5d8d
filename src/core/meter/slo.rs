//! Goodput: whether one finished request met its objectives.
//!
//! A request is good if it completed and every objective that applies to it holds (at or below the
//! bound). An objective on a quantity that the request lacks counts as met: TPOT needs two tokens,
//! and a response that is not streamed has no TTFT. The bound of TTFT may grow with the prompt,
//! since a prefill takes time in proportion to it.
//!
//! The caller passes `completed: false` for failures and shed requests, which are misses.

use std::time::Duration;

/// Upper bounds; `None` if there is no objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Objectives {
    /// Time to first token, of an empty prompt.
    pub ttft: Option<Duration>,
    /// Time that is added to the bound of TTFT for each 1,000 prompt tokens.
    pub ttft_per_1k: Duration,
    /// Time per output token.
    pub tpot: Option<Duration>,
    /// End-to-end latency.
    pub e2el: Option<Duration>,
}

/// Measurements of one request; `None` for a quantity that the request does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// Time to first token.
    pub ttft: Option<Duration>,
    /// Time per output token.
    pub tpot: Option<Duration>,
    /// End-to-end latency.
    pub e2el: Option<Duration>,
}

impl Objectives {
    /// Whether there is no objective.
    pub fn is_empty(&self) -> bool {
        self.ttft.or(self.tpot).or(self.e2el).is_none()
    }

    /// The objectives for a prompt of this many tokens. Their TTFT bound includes `ttft_per_1k`.
    pub fn of_prompt(&self, tokens: u64) -> Self {
        let grown = self.ttft_per_1k.mul_f64(tokens as f64 / 1e3);
        Self { ttft: self.ttft.map(|ttft| ttft.saturating_add(grown)), ttft_per_1k: Duration::ZERO, ..*self }
    }

    /// Whether a request with a prompt of this many tokens and these timings counts as good.
    pub fn met(&self, completed: bool, prompt_tokens: u64, timings: &Timings) -> bool {
        let bounds = self.of_prompt(prompt_tokens);
        let holds = |bound: Option<Duration>, measured: Option<Duration>| match (bound, measured) {
            (Some(bound), Some(measured)) => measured <= bound,
            _ => true,
        };
        let in_time = holds(bounds.ttft, timings.ttft);
        completed && in_time && holds(bounds.tpot, timings.tpot) && holds(bounds.e2el, timings.e2el)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Option<Duration> = |ms| Some(Duration::from_millis(ms));

    #[test]
    fn every_objective_that_applies_must_hold() {
        let slo = Objectives { ttft: MS(200), tpot: MS(50), ..Objectives::default() };
        let timings = Timings { ttft: MS(200), tpot: MS(50), e2el: MS(99_000) };
        assert!(slo.met(true, 900, &timings));
        assert!(!slo.met(true, 900, &Timings { ttft: MS(201), ..timings }));
        assert!(!slo.met(true, 900, &Timings { tpot: MS(51), ..timings }));
        assert!(slo.met(true, 900, &Timings { tpot: None, ..timings }));
        assert!(!slo.met(false, 900, &timings));
    }

    #[test]
    fn the_bound_of_ttft_grows_with_the_prompt() {
        let slo = Objectives { ttft: MS(200), ttft_per_1k: Duration::from_millis(100), ..Objectives::default() };
        let timings = Timings { ttft: MS(1_800), ..Timings::default() };
        assert_eq!([15_999, 16_000].map(|tokens| slo.met(true, tokens, &timings)), [false, true]);
        assert_eq!(slo.of_prompt(500), Objectives { ttft: MS(250), ..Objectives::default() });
        assert!(Objectives { ttft: None, ..slo }.is_empty(), "there is nothing that it could grow");
    }
}
