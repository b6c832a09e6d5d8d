//! Compares an engine with a changed flag and one without, at the same time and under the same
//! load.
//!
//! The gateway draws the engine for each request. Requests on one engine at the same time fare
//! alike, so the arms are compared in batches of [`ARM_BATCH`]. An event that hits both arms
//! cancels out. The difference of mean losses is a ratio estimate over batches, with an interval
//! that holds at all times together ([`always_valid::around`]), so it may be looked at every
//! second.
//!
//! Bounds: [`BATCHES_MAX`]; later arrivals are not counted.

use std::time::Duration;

use sluice_core::stats::{Estimate, always_valid};

/// Length of a batch, in which most effects of one event end.
pub const ARM_BATCH: Duration = Duration::from_secs(30);
/// Four hours of batches.
const BATCHES_MAX: usize = 480;
/// Batches before a difference is reported.
const BATCHES_MIN: usize = 4;
/// Least deviation assumed in a batch, because a few requests may be equal by chance.
const DEVIATION_MIN: f64 = 0.05;

/// The smallest difference that is looked for.
const EFFECT_MIN: f64 = 0.02;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Batch {
    requests: f64,
    loss: f64,
}

/// Counts of one arm since the comparison began.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ArmCounts {
    /// Requests.
    pub requests: u64,
    /// Requests that failed.
    pub failed: u64,
    /// End of the last request that did not fail.
    pub served: Option<Duration>,
    /// Arrival of the latest request that did not fail.
    pub begun: Option<Duration>,
}

/// The difference of two arms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArmDifference {
    /// Mean loss of the first arm.
    pub control: f64,
    /// Mean loss of the second arm minus mean loss of the first.
    pub change: Estimate,
    /// Number of batches in the difference.
    pub batches: usize,
}

/// Two arms: the control and the changed one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arms {
    from: Duration,
    batches: Vec<[Batch; 2]>,
    counts: [ArmCounts; 2],
}

impl Arms {
    /// A comparison from `from` on.
    pub fn new(from: Duration) -> Self {
        Self { from, ..Self::default() }
    }

    /// Adds a request of arm 0 or 1.
    pub fn add(&mut self, arm: usize, (at, ended): (Duration, Duration), loss: f64, failed: bool) {
        let Some(since) = at.checked_sub(self.from) else { return };
        let batch = (since.as_secs_f64() / ARM_BATCH.as_secs_f64()) as usize;
        if batch >= BATCHES_MAX {
            return;
        }
        if self.batches.len() <= batch {
            self.batches.resize(batch + 1, Default::default());
        }
        let (own, counts) = (&mut self.batches[batch][arm], &mut self.counts[arm]);
        (own.requests, own.loss) = (own.requests + 1.0, own.loss + loss);
        counts.requests += 1;
        counts.failed += u64::from(failed);
        if !failed {
            (counts.served, counts.begun) = (counts.served.max(Some(ended)), counts.begun.max(Some(at)));
        }
    }

    /// Counts of both arms, the control first.
    pub fn counts(&self) -> [ArmCounts; 2] {
        self.counts
    }

    /// The difference over the batches until `until`, if there are enough. `effect`: the difference
    /// that is found soonest, as a share of the first arm's loss.
    pub fn difference(&self, until: Duration, effect: f64, confidence: f64) -> Option<ArmDifference> {
        let whole = (until.saturating_sub(self.from).as_secs_f64() / ARM_BATCH.as_secs_f64()).floor() as usize;
        let used: Vec<_> = self.batches.iter().take(whole).collect();
        let total = |arm: usize, of: fn(&Batch) -> f64| used.iter().map(|batch| of(&batch[arm])).sum::<f64>();
        let requests = [0, 1].map(|arm| total(arm, |batch| batch.requests));
        let count = used.len();
        if count < BATCHES_MIN || requests.contains(&0.0) {
            return None;
        }
        let means = [0, 1].map(|arm| total(arm, |batch| batch.loss) / requests[arm]);
        let residual = |batch: &[Batch; 2]| {
            let part = |arm: usize| (batch[arm].loss - means[arm] * batch[arm].requests) / requests[arm];
            part(1) - part(0)
        };
        let freedom = count as f64 - 1.0;
        let squares = used.iter().map(|batch| residual(batch).powi(2)).sum::<f64>() * count as f64 / freedom;
        let variance = squares.max(DEVIATION_MIN * DEVIATION_MIN / count as f64);
        let effect = (effect * means[0]).max(EFFECT_MIN);
        let change = always_valid::around(means[1] - means[0], variance, freedom, effect, confidence);
        Some(ArmDifference { control: means[0], change, batches: count })
    }

    /// ln of the evidence, valid at all times, that the second arm fails more often.
    pub fn surge(&self) -> f64 {
        let [control, arm] = self.counts.map(|counts| (counts.failed as f64, counts.requests as f64));
        let expected = arm.1 / (control.1 + arm.1);
        always_valid::excess(arm.0, control.0 + arm.0, expected, (4.0 * expected / (3.0 * expected + 1.0)).min(0.999))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::base::Rng;

    /// One difference per minute between arms whose requests miss objectives with these
    /// probabilities. Waves of load change both.
    fn looks(seed: u64, misses: [f64; 2], minutes: u64) -> Vec<ArmDifference> {
        let (mut arms, mut rng) = (Arms::new(Duration::ZERO), Rng::new(seed));
        let (mut wave, mut found) = (1.0, Vec::new());
        for second in 0..60 * minutes {
            if second % 20 == 0 {
                wave = 2.0 * rng.unit();
            }
            for _ in 0..4 {
                let arm = usize::from(rng.unit() < 0.5);
                let loss = f64::from(u8::from(rng.unit() < misses[arm] * wave));
                arms.add(arm, (Duration::from_secs(second), Duration::from_secs(second)), loss, false);
            }
            if second % 60 == 59 {
                found.extend(arms.difference(Duration::from_secs(second + 1), 0.3, 0.99));
            }
        }
        found
    }

    #[test]
    fn arms_that_do_not_differ_are_seldom_called_different_however_often_they_are_looked_at() {
        let wrong = (0..300).filter(|seed| {
            looks(*seed, [0.3, 0.3], 45).iter().any(|look| look.change.low > 0.0 || look.change.high < 0.0)
        });
        let wrong = wrong.count();
        assert!(wrong <= 6, "{wrong} of 300");
    }

    #[test]
    fn a_difference_is_found_and_contained() {
        let minutes = |seed| {
            let all = looks(seed, [0.4, 0.2], 45);
            assert!(all.last().unwrap().change.contains(-0.2), "{seed}: {:?}", all.last());
            all.iter().position(|look| look.change.high < 0.0).expect("it is found")
        };
        let mut found: Vec<usize> = (0..50).map(minutes).collect();
        found.sort_unstable();
        assert!(found[25] <= 15, "{found:?}");
    }

    #[test]
    fn failures_of_the_changed_arm_alone_are_soon_evident() {
        let mut arms = Arms::new(Duration::ZERO);
        for second in 0..40 {
            let at = Duration::from_secs(second);
            arms.add(0, (at, at), 0.0, false);
            arms.add(1, (at, at), 3.0, second % 3 == 0);
        }
        assert!(arms.surge() > 100f64.ln(), "{}", arms.surge());
        assert_eq!(arms.counts()[1].failed, 14);
        let equal = Arms { counts: [arms.counts[1]; 2], ..Arms::default() };
        assert!(equal.surge() < 1.0, "{}", equal.surge());
    }
}
