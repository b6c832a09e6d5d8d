//! Goodput: whether one finished request met its objectives.
//!
//! A request is good when it completed and every objective that applies to it holds (at or below the bound). An objective
//! on a quantity that the request does not have counts as met: TPOT needs two tokens, and a response that is not streamed
//! has no TTFT. The caller decides whether a request completed; failures and shed requests are misses (contract), so they
//! pass `completed: false`.

use std::time::Duration;

/// Upper bounds; `None` is no objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Objectives {
    /// Time to first token.
    pub ttft: Option<Duration>,
    /// Time per output token.
    pub tpot: Option<Duration>,
    /// End-to-end latency.
    pub e2el: Option<Duration>,
}

/// What was measured of one request; `None` is what it does not have.
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
    /// Whether there is anything to meet.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a request with these timings counts as good.
    pub fn met(&self, completed: bool, timings: &Timings) -> bool {
        let holds = |bound: Option<Duration>, measured: Option<Duration>| match (bound, measured) {
            (Some(bound), Some(measured)) => measured <= bound,
            _ => true,
        };
        completed && holds(self.ttft, timings.ttft) && holds(self.tpot, timings.tpot) && holds(self.e2el, timings.e2el)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Option<Duration> = |ms| Some(Duration::from_millis(ms));

    #[test]
    fn every_objective_that_applies_must_hold() {
        let slo = Objectives { ttft: MS(200), tpot: MS(50), e2el: None };
        let timings = Timings { ttft: MS(200), tpot: MS(50), e2el: MS(99_000) };
        assert!(slo.met(true, &timings));
        assert!(!slo.met(true, &Timings { ttft: MS(201), ..timings }));
        assert!(!slo.met(true, &Timings { tpot: MS(51), ..timings }));
        assert!(slo.met(true, &Timings { tpot: None, ..timings }));
        assert!(!slo.met(false, &timings));
    }
}
