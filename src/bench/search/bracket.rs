//! The coarse phase of the search: from a given rate, it goes up or down until one rate holds and a
//! higher one fails. Then it tries the geometric middle of the two until the bracket is narrow.
//!
//! Short trials may be wrong by a few percent near the boundary, so the bracket is not narrowed
//! below [`COARSE`]. Bounds: the search gives up if even [`GIVE_UP`] of the rate of single requests
//! fails.

use super::trial::TrialVerdict;

/// Ratio of the ends of a narrow bracket.
pub(super) const COARSE: f64 = 1.15;
/// Factor by which the rate goes up while it holds.
const UP: f64 = 1.4;
/// Largest divisor by which the rate goes down after it failed.
const DOWN: f64 = 4.0;
const GIVE_UP: f64 = 1.0 / 16.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bracket {
    low: Option<f64>,
    high: Option<f64>,
    /// The rate of single requests, each after the previous one, per second.
    one_stream: f64,
    first: f64,
}

impl Bracket {
    /// A bracket that starts at the rate `first`. Both rates are above 0.
    pub(super) fn new(one_stream: f64, first: f64) -> Self {
        Self { low: None, high: None, one_stream, first }
    }

    /// The rate of the next trial. `None` if the bracket is narrow enough or the search gives up.
    pub(super) fn next(&self) -> Option<f64> {
        match (self.low, self.high) {
            (None, None) => Some(self.first),
            (Some(low), None) => Some(low * UP),
            (None, Some(high)) => {
                // Single requests meet the objectives, so `one_stream` is used as the lower end.
                let rate = (self.one_stream * high).sqrt().clamp(high / DOWN, high / 1.3);
                (!self.is_hopeless()).then_some(rate)
            }
            (Some(low), Some(high)) => (high / low > COARSE).then_some((low * high).sqrt()),
        }
    }

    pub(super) fn record(&mut self, rate: f64, verdict: TrialVerdict) {
        match verdict {
            TrialVerdict::Holds => self.low = Some(rate),
            TrialVerdict::Fails => self.high = Some(rate),
        }
    }

    pub(super) fn middle(&self) -> Option<f64> {
        self.low.zip(self.high).map(|(low, high)| (low * high).sqrt())
    }

    pub(super) fn is_hopeless(&self) -> bool {
        self.low.is_none() && self.high.is_some_and(|high| high < self.one_stream * GIVE_UP)
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
            let mut bracket = Bracket::new(one_stream, first);
            let mut trials_run = 0;
            while let Some(rate) = bracket.next() {
                bracket.record(rate, if rate <= truth { Holds } else { Fails });
                trials_run += 1;
                assert!(trials_run < 15, "{bracket:?}");
            }
            let middle = bracket.middle().unwrap();
            assert!((middle / truth).ln().abs() <= COARSE.ln(), "{middle} for {truth}");
        }
    }

    #[test]
    fn it_gives_up_far_below_one_stream() {
        let mut bracket = Bracket::new(1.0, 10.0);
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
