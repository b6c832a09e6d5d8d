//! When can a test of hits and misses stop? Wald's sequential probability ratio test.
//!
//! The test decides between two shares of misses: acceptable p0 and unacceptable p1 > p0. Each
//! trial adds to the logarithm of the likelihood ratio: ln(p1/p0) for a miss, ln((1 - p1)/(1 - p0))
//! for a hit. The test decides for p1 at ln((1 - b)/a) and for p0 at ln(b/(1 - a)), with a and b
//! the allowed errors (Wald 1945). With p0 = 0.5 %, p1 = 2 % and errors of 5 %, the test decides
//! for p0 after 194 hits in a row.
//!
//! The error rates hold for independent trials. Misses of one queue are correlated and end the test
//! too early, so the test may steer a search but does not certify the result.

/// The state of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestState {
    /// The share of misses is acceptable.
    Acceptable,
    /// The share of misses is too large.
    Unacceptable,
    /// More trials are needed.
    Open,
}

/// A test under way.
#[derive(Clone, Debug)]
pub struct RatioTest {
    sum: f64,
    per_miss: f64,
    per_hit: f64,
    accept: f64,
    reject: f64,
}

impl RatioTest {
    /// A test that separates the miss shares `acceptable` and `unacceptable` (0 < acceptable <
    /// unacceptable < 1), with probability `error` of a wrong decision either way (0 < error <
    /// 0.5). Values outside these ranges are moved to the nearest sensible value.
    pub fn new(acceptable: f64, unacceptable: f64, error: f64) -> Self {
        let p0 = acceptable.clamp(1e-9, 0.5);
        let p1 = unacceptable.clamp(p0 * 1.000_001, 1.0 - 1e-9);
        let bound = |error: f64| ((1.0 - error) / error).ln();
        let error = error.clamp(1e-9, 0.499);
        Self {
            sum: 0.0,
            per_miss: (p1 / p0).ln(),
            per_hit: ((1.0 - p1) / (1.0 - p0)).ln(),
            accept: -bound(error),
            reject: bound(error),
        }
    }

    /// Adds a trial.
    pub fn add(&mut self, hit: bool) {
        self.sum += if hit { self.per_hit } else { self.per_miss };
    }

    /// The state now. Only the present sum counts, not a bound that the sum crossed earlier and
    /// left again.
    pub fn state(&self) -> TestState {
        if self.sum >= self.reject {
            TestState::Unacceptable
        } else if self.sum <= self.accept {
            TestState::Acceptable
        } else {
            TestState::Open
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Rng;

    #[test]
    fn a_run_of_hits_accepts_after_194_and_misses_reject() {
        let mut test = RatioTest::new(0.005, 0.02, 0.05);
        for hit in 1..=193 {
            test.add(true);
            assert_eq!(test.state(), TestState::Open, "after {hit}");
        }
        test.add(true);
        assert_eq!(test.state(), TestState::Acceptable);
        let mut test = RatioTest::new(0.005, 0.02, 0.05);
        (0..3).for_each(|_| test.add(false));
        assert_eq!(test.state(), TestState::Unacceptable);
    }

    #[test]
    fn errors_are_as_promised_for_independent_trials() {
        let decide = |seed: u64, misses: f64| {
            let mut rng = Rng::new(Rng::new(seed).next_u64());
            let mut test = RatioTest::new(0.005, 0.02, 0.05);
            while test.state() == TestState::Open {
                test.add(rng.unit() >= misses);
            }
            test.state()
        };
        let wrong_rejects = (0..1000).filter(|seed| decide(*seed, 0.005) == TestState::Unacceptable).count();
        let wrong_accepts = (0..1000).filter(|seed| decide(*seed, 0.02) == TestState::Acceptable).count();
        assert!(wrong_rejects <= 70 && wrong_accepts <= 70, "{wrong_rejects} {wrong_accepts}");
    }
}
