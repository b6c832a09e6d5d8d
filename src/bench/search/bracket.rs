//! The coarse phase: finds a rate that holds and a slightly higher one that fails.
//!
//! It starts at a given rate and goes up or down until one rate holds and one fails; then it tries the geometric middle. Where the
//! boundary is expected, the first steps are small ([`FIRST_STEP`]) and double. Looks may be wrong by a few percent near the
//! boundary, so the bracket is not narrowed below a given ratio; `curve` finds the boundary inside it. Bounds: it gives up far
//! below the rate of single requests, one after the other, or far below the expected one ([`GIVE_UP`]).

use super::trial::TrialVerdict;

/// The first step from a rate that was expected.
const FIRST_STEP: f64 = 0.07;
/// Without a failure so far, the rate grows by this factor.
const UP: f64 = 1.4;
/// Without a success so far, it shrinks at most by this factor.
const DOWN: f64 = 4.0;
/// The search gives up below this share of the rate of single requests, or of the expected rate.
const GIVE_UP: f64 = 1.0 / 16.0;

/// The highest rate that holds and the lowest that fails.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bracket {
    low: Option<f64>,
    high: Option<f64>,
    /// Requests per second when each is sent after the one before it has ended; `None` if the boundary is expected at `first`.
    one_stream: Option<f64>,
    first: f64,
    /// Rates that were recorded.
    steps: i32,
    /// The ends are at most this far apart, as a ratio.
    width: f64,
}

impl Bracket {
    /// Starts at the rate `first`. `one_stream` is the rate of single requests, one after the other. Both are above 0.
    pub(super) fn new(one_stream: f64, first: f64, width: f64) -> Self {
        Self { low: None, high: None, one_stream: Some(one_stream), first, steps: 0, width }
    }

    /// Starts at the rate `first`, near which the boundary is expected.
    pub(super) fn near(first: f64, width: f64) -> Self {
        Self { low: None, high: None, one_stream: None, first, steps: 0, width }
    }

    /// The same with a rate that is known to hold, or with one that is known to fail.
    #[must_use]
    pub(super) fn with(self, low: Option<f64>, high: Option<f64>) -> Self {
        Self { low, high, ..self }
    }

    /// The next rate to try; `None` when the bracket is narrow enough, or the search gives up.
    pub(super) fn next(&self) -> Option<f64> {
        // Small steps first where the boundary is expected.
        let step = 1.0 + FIRST_STEP * 2f64.powi(self.steps.clamp(1, 8) - 1);
        let inside = |rate: f64| {
            self.low.is_none_or(|low| rate > low * self.width.sqrt()) && self.high.is_none_or(|high| rate < high)
        };
        match (self.low, self.high) {
            _ if self.steps == 0 && inside(self.first) => Some(self.first),
            (None, None) => Some(self.first),
            (Some(low), None) => Some(low * if self.one_stream.is_some() { UP } else { step.min(UP) }),
            (None, Some(high)) => {
                let rate = match self.one_stream {
                    // Single requests meet the objectives, so their rate is the lower end.
                    Some(one_stream) => (one_stream * high).sqrt().clamp(high / DOWN, high / 1.3),
                    None => high / step.min(DOWN),
                };
                (!self.is_hopeless()).then_some(rate)
            }
            (Some(low), Some(high)) => (high / low > self.width * 1.0001).then_some((low * high).sqrt()),
        }
    }

    /// Records the verdict at a `rate` that [`Bracket::next`] returned.
    pub(super) fn record(&mut self, rate: f64, verdict: TrialVerdict) {
        self.steps += 1;
        match verdict {
            TrialVerdict::Holds => self.low = Some(rate),
            TrialVerdict::Fails => self.high = Some(rate),
        }
    }

    /// The geometric middle, once both ends are known.
    pub(super) fn middle(&self) -> Option<f64> {
        self.low.zip(self.high).map(|(low, high)| (low * high).sqrt())
    }

    /// Whether a rate fails that is far below that of single requests, or below the expected one.
    pub(super) fn is_hopeless(&self) -> bool {
        let most = self.one_stream.unwrap_or(self.first);
        self.low.is_none() && self.high.is_some_and(|high| high < most * GIVE_UP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TrialVerdict::{Fails, Holds};

    #[test]
    fn without_noise_it_closes_around_the_boundary() {
        for (one_stream, first, truth) in
            [(1.0, 80.0, 61.7), (1.0, 8.0, 61.7), (0.02, 0.01, 0.004), (50.0, 5000.0, 51.0)]
        {
            let unknown = Bracket::new(one_stream, first, 1.15);
            for mut bracket in [unknown, Bracket::near(first, 1.15), unknown.with(Some(truth / 9.0), Some(truth * 9.0))]
            {
                let mut trials_run = 0;
                while let Some(rate) = bracket.next() {
                    bracket.record(rate, if rate <= truth { Holds } else { Fails });
                    trials_run += 1;
                    assert!(trials_run < 25, "{bracket:?}");
                }
                let Some(middle) = bracket.middle() else {
                    assert!(bracket.is_hopeless() && truth < first / 16.0, "{bracket:?}");
                    continue;
                };
                assert!((middle / truth).ln().abs() <= 1.15f64.ln(), "{middle} for {truth}");
            }
        }
    }

    #[test]
    fn near_an_expected_boundary_three_rates_suffice() {
        for truth in [9.5, 10.5] {
            let mut bracket = Bracket::near(10.0, 1.08);
            let mut tried = Vec::new();
            while let Some(rate) = bracket.next() {
                tried.push(rate);
                bracket.record(rate, if rate <= truth { Holds } else { Fails });
            }
            assert!(tried[0] == 10.0 && tried.len() <= 3, "{tried:?}");
        }
    }

    #[test]
    fn it_gives_up_far_below_one_stream() {
        let mut bracket = Bracket::new(1.0, 10.0, 1.15);
        let mut trials_run = 0;
        while let Some(rate) = bracket.next() {
            bracket.record(rate, Fails);
            trials_run += 1;
            assert!(trials_run < 20);
        }
        assert!(bracket.is_hopeless());
        assert_eq!(bracket.middle(), None);
    }
}
