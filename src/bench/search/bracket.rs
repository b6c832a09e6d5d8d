//! The coarse part: a rate that holds and a higher one that fails, not far apart.
//!
//! Starts somewhere, goes up or down until there are both, then takes the geometric middle. Looks may be wrong by a few
//! percent near the boundary, so the bracket is not narrowed below [`COARSE`]; what is between its ends is for `curve`.

use super::Finding;

/// The ends of a bracket are at most this far apart, as a ratio.
pub(super) const COARSE: f64 = 1.15;
/// Upwards without a failure, the rate grows by this factor.
const UP: f64 = 1.4;
/// Downwards without a success, it shrinks at most by this.
const DOWN: f64 = 4.0;
/// Below this share of what one stream reaches the search gives up.
const GIVE_UP: f64 = 1.0 / 16.0;

/// The rates looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bracket {
    low: Option<f64>,
    high: Option<f64>,
    /// What one request after the other reaches, per second.
    alone: f64,
    first: f64,
}

impl Bracket {
    /// Starts at `first`, knowing that one stream alone reaches the rate `alone`; both above 0.
    pub(super) fn new(alone: f64, first: f64) -> Self {
        Self { low: None, high: None, alone, first }
    }

    /// The next rate to look at; nothing when the bracket is closed, or hopeless.
    pub(super) fn next(&self) -> Option<f64> {
        match (self.low, self.high) {
            (None, None) => Some(self.first),
            (Some(low), None) => Some(low * UP),
            (None, Some(high)) => {
                // One stream holds, so a rate near that of one stream is the natural other end.
                let rate = (self.alone * high).sqrt().clamp(high / DOWN, high / 1.3);
                (!self.is_hopeless()).then_some(rate)
            }
            (Some(low), Some(high)) => (high / low > COARSE).then_some((low * high).sqrt()),
        }
    }

    /// Adds what was found at a `rate` that [`Bracket::next`] gave.
    pub(super) fn learn(&mut self, rate: f64, finding: Finding) {
        match finding {
            Finding::Holds => self.low = Some(rate),
            Finding::Fails => self.high = Some(rate),
        }
    }

    /// The middle of a closed bracket.
    pub(super) fn middle(&self) -> Option<f64> {
        self.low.zip(self.high).map(|(low, high)| (low * high).sqrt())
    }

    /// Whether even a rate far below that of one stream fails.
    pub(super) fn is_hopeless(&self) -> bool {
        self.low.is_none() && self.high.is_some_and(|high| high < self.alone * GIVE_UP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Finding::{Fails, Holds};

    #[test]
    fn without_noise_it_closes_around_the_boundary() {
        for (alone, first, truth) in [(1.0, 80.0, 61.7), (1.0, 8.0, 61.7), (0.02, 0.01, 0.004), (50.0, 5000.0, 51.0)] {
            let mut bracket = Bracket::new(alone, first);
            let mut looks = 0;
            while let Some(rate) = bracket.next() {
                bracket.learn(rate, if rate <= truth { Holds } else { Fails });
                looks += 1;
                assert!(looks < 15, "{bracket:?}");
            }
            let middle = bracket.middle().unwrap();
            assert!((middle / truth).ln().abs() <= COARSE.ln(), "{middle} for {truth}");
        }
    }

    #[test]
    fn it_gives_up_far_below_one_stream() {
        let mut bracket = Bracket::new(1.0, 10.0);
        let mut looks = 0;
        while let Some(rate) = bracket.next() {
            bracket.learn(rate, Fails);
            looks += 1;
            assert!(looks < 20);
        }
        assert!(bracket.is_hopeless());
        assert_eq!(bracket.middle(), None);
    }
}
