//! The share of requests that would meet their objectives in the long run.
//!
//! Wilson's score interval: with p the share seen among n and z the normal quantile, (p + z^2/2n +-
//! z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n) (Wilson 1927; recommended by Brown, Cai, DasGupta
//! 2001). It stays inside 0..1 and is sensible at 0 of n and n of n, where the textbook interval
//! has no width.
//!
//! n may be a real number. For a series in time order, n is the number of values divided by their
//! design effect.

use super::dependence::{Dependence, design_effect};
use super::{Estimate, percentile, two_sided_z};

/// The long-run share that `hits` of `count` independent trials indicate; 0..1 without trials.
pub fn wilson(hits: f64, count: f64, confidence: f64) -> Estimate {
    if count <= 0.0 {
        return Estimate { value: 0.0, low: 0.0, high: 1.0 };
    }
    let (share, z2) = ((hits / count).clamp(0.0, 1.0), two_sided_z(confidence).powi(2));
    let middle = share + z2 / (2.0 * count);
    let reach = (z2 * (share * (1.0 - share) / count + z2 / (4.0 * count * count))).sqrt();
    let scale = 1.0 + z2 / count;
    // Rounding must not move an end of the interval past the observed share.
    let low = ((middle - reach) / scale).clamp(0.0, share);
    let high = ((middle + reach) / scale).clamp(share, 1.0);
    Estimate { value: share, low, high }
}

/// The long-run share for trials in time order.
pub fn of_series(hits: &[bool], confidence: f64) -> Estimate {
    with_dependence(hits, confidence, dependence(hits))
}

/// The long-run share for trials in time order that also have a value each, such as a latency,
/// which rises and falls with the chance of a miss.
///
/// A few misses do not show how they are correlated, but the values do. So the larger of two design
/// effects is used: the one of the hits, and the one of the series "value above the median".
pub fn of_series_with(hits: &[bool], values: &[f64], confidence: f64) -> Estimate {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = percentile(&sorted, 0.5);
    let above: Vec<f64> = values.iter().map(|value| f64::from(u8::from(*value > middle))).collect();
    let (own, bulk) = (dependence(hits), design_effect(&above));
    with_dependence(hits, confidence, if bulk.effect > own.effect { bulk } else { own })
}

/// The design effect of a series of hits and misses.
pub fn dependence(hits: &[bool]) -> Dependence {
    let values: Vec<f64> = hits.iter().map(|hit| f64::from(u8::from(*hit))).collect();
    design_effect(&values)
}

/// The number of independent trials that would give an interval as wide as `estimate` at this
/// confidence; 0 for an estimate without trials.
pub fn effective(estimate: &Estimate, confidence: f64) -> f64 {
    // An end of Wilson's interval is the share from which the observed share is z standard
    // deviations away.
    let end = if estimate.low > 0.0 { estimate.low } else { estimate.high };
    let distance = (estimate.value - end).abs();
    if distance > 0.0 { two_sided_z(confidence).powi(2) * end * (1.0 - end) / (distance * distance) } else { 0.0 }
}

fn with_dependence(hits: &[bool], confidence: f64, dependence: Dependence) -> Estimate {
    let total = hits.iter().filter(|hit| **hit).count() as f64;
    let inflation = dependence.inflation(confidence);
    wilson(total / inflation, hits.len() as f64 / inflation, confidence)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Rng;
    use crate::stats::testing::{coverage, waits};

    #[test]
    fn the_interval_is_that_of_the_literature() {
        // statsmodels: proportion_confint(90, 100, method="wilson"), and 0 and 10 of 10.
        let close = |estimate: Estimate, low: f64, high: f64| {
            assert!((estimate.low - low).abs() < 1e-6 && (estimate.high - high).abs() < 1e-6, "{estimate:?}");
        };
        close(wilson(90.0, 100.0, 0.95), 0.825634, 0.944771);
        close(wilson(0.0, 10.0, 0.95), 0.0, 0.277533);
        close(wilson(10.0, 10.0, 0.95), 0.722467, 1.0);
        assert_eq!(wilson(0.0, 0.0, 0.95), Estimate { value: 0.0, low: 0.0, high: 1.0 });
    }

    #[test]
    fn the_independent_trials_behind_an_interval_are_found_again() {
        for (hits, count) in [(90.0, 100.0), (100.0, 100.0), (0.0, 16.0), (12.5, 15.8)] {
            let found = effective(&wilson(hits, count, 0.95), 0.95);
            assert!((found - count).abs() < 1e-6, "{found} of {count}");
        }
        assert_eq!(effective(&wilson(0.0, 0.0, 0.95), 0.95), 0.0);
    }

    #[test]
    fn the_share_of_independent_hits_is_covered() {
        for (truth, count) in [(0.9, 200), (0.99, 1000)] {
            let share = coverage(1000, truth, |seed| {
                let mut rng = Rng::new(Rng::new(seed).next_u64());
                let hits: Vec<bool> = (0..count).map(|_| rng.unit() < truth).collect();
                of_series(&hits, 0.95)
            });
            assert!(share > 0.93, "{truth} of {count}: {share}");
        }
    }

    #[test]
    fn the_share_of_a_queue_that_waits_too_long_is_covered() {
        let (load, bound) = (0.8, 15.0);
        let truth = 1.0 - load * f64::exp(-(1.0 - load) * bound);
        let hits = |waits: &[f64]| waits.iter().map(|wait| *wait <= bound).collect::<Vec<_>>();
        let cover = |estimate: fn(&[bool], &[f64]) -> Estimate| {
            coverage(300, truth, |seed| {
                let waits = waits(seed, load, 4000);
                estimate(&hits(&waits), &waits)
            })
        };
        let share = cover(|hits, waits| of_series_with(hits, waits, 0.95));
        assert!(share > 0.85, "{share}");
        let by_hits = cover(|hits, _| of_series(hits, 0.95));
        assert!(by_hits > 0.6 && by_hits < share, "{by_hits} by the hits alone");
        let naive = cover(|hits, _| with_dependence(hits, 0.95, Dependence::NONE));
        assert!(naive < 0.65, "{naive} without the design effect");
    }
}
