//! Percentiles and their confidence intervals.
//!
//! The percentile of a sample is numpy's default: sorted x, h = (n - 1) p, linear between the
//! neighbours of h.
//!
//! The interval is made of order statistics, so it holds for any distribution: of n independent
//! values, Binomial(n, q) are below the true quantile q. With l the largest rank with
//! `P(Bin <= l - 1) <= a/2` and u the smallest with `P(Bin <= u - 1) >= 1 - a/2`, the interval
//! [x_l, x_u] contains the quantile with probability 1 - a or more (Conover, *Practical
//! Nonparametric Statistics*, 3.2). If even u = n does not reach 1 - a/2, the end is infinite: at
//! 95 %, a P99 needs 368 independent values.
//!
//! In the tests, intervals of 95 % contain the truth in 95 % of the cases or more for independent
//! values. For the waits of a queue at 70 and 85 % load it is 89 to 95 %, and without the design
//! effect less than 75 %.

use statrs::function::beta::beta_reg;

use super::dependence::{BATCHES, Dependence, batches, design_effect};
use super::{Estimate, two_sided_t};

/// The factor by which sectioned intervals are widened, because the tails of short parts vary less
/// than the tail of the whole.
pub const CAUTION: f64 = 1.5;

/// The quantile `q` in 0..=1 of ascending `sorted`; 0 for no values.
pub fn percentile(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let position = last as f64 * q.clamp(0.0, 1.0);
    let below = (position.floor() as usize).min(last);
    let fraction = position - below as f64;
    let (low, high) = (sorted[below], sorted[(below + 1).min(last)]);
    if fraction < 0.5 { low + (high - low) * fraction } else { high - (high - low) * (1.0 - fraction) }
}

/// The quantile `q` in 0..1 of independent `sorted` values, with `confidence` in 0..1.
pub fn independent(sorted: &[f64], q: f64, confidence: f64) -> Estimate {
    estimate(sorted, q, confidence, Dependence::NONE)
}

/// The long-run quantile `q` in 0..1 of a series in time order, with `confidence` in 0..1.
///
/// n is divided by the design effect of the series 1{x <= quantile}, whose mean the binomial
/// counts, or of 1{x <= median} if that effect is larger, because a few values in the tail do not
/// show how strongly they cluster. The incomplete beta function extends the binomial to a real n.
pub fn of_series(values: &[f64], q: f64, confidence: f64) -> Estimate {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let effect_at = |q: f64| {
        let at = percentile(&sorted, q);
        let below: Vec<f64> = values.iter().map(|value| f64::from(u8::from(*value <= at))).collect();
        design_effect(&below)
    };
    let (here, middle) = (effect_at(q), effect_at(0.5));
    estimate(&sorted, q, confidence, if middle.effect > here.effect { middle } else { here })
}

/// The long-run quantile by sectioning (Asmussen and Glynn, *Stochastic Simulation*, III.5). The
/// interval is the spread of the quantiles of ten parts of the series around the quantile of the
/// whole, in logarithms, times [`CAUTION`].
///
/// The interval is bounded for 20 positive values or more, even if order statistics give no bound,
/// and unbounded for fewer. It needs long parts: for a P99 of few or clustered values, the coverage
/// is below the stated confidence (87 % or more at 99 % in the tests).
pub fn sectioned(values: &[f64], q: f64, confidence: f64) -> Estimate {
    let log_of = |values: &[f64]| {
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        percentile(&sorted, q).ln()
    };
    let whole = log_of(values);
    if values.len() < 2 * BATCHES || !whole.is_finite() {
        return Estimate { value: whole.exp(), low: f64::NEG_INFINITY, high: f64::INFINITY };
    }
    let freedom = (BATCHES - 1) as f64;
    let squares: f64 = batches(values).map(|part| (log_of(part) - whole).powi(2)).sum();
    let reach = CAUTION * two_sided_t(confidence, freedom) * (squares / freedom / BATCHES as f64).sqrt();
    Estimate { value: whole.exp(), low: (whole - reach).exp(), high: (whole + reach).exp() }
}

/// The number of independent values from which the upper end of the interval for quantile `q` is
/// finite.
pub fn needed(q: f64, confidence: f64) -> u64 {
    (((1.0 - confidence) / 2.0).ln() / q.ln()).ceil() as u64
}

fn estimate(sorted: &[f64], q: f64, confidence: f64, dependence: Dependence) -> Estimate {
    let (value, count) = (percentile(sorted, q), sorted.len() as f64);
    let worth = count / dependence.inflation(confidence);
    let tail = (1.0 - confidence) / 2.0;
    // A rank counts from 1. It is found among the `worth` independent values and scaled to all
    // values. The grain absorbs the error of the bisection.
    let grain = 1e-6;
    let low = binomial_root(worth, q, tail)
        .and_then(|root| sorted.get((((root + 1.0) * count / worth + grain).floor() as usize).checked_sub(1)?));
    let high = binomial_root(worth, q, 1.0 - tail)
        .and_then(|root| sorted.get((((root + 1.0) * count / worth - grain).ceil() as usize).checked_sub(1)?));
    Estimate {
        value,
        low: low.copied().unwrap_or(f64::NEG_INFINITY).min(value),
        high: high.copied().unwrap_or(f64::INFINITY).max(value),
    }
}

/// The real k in 0..count - 1 with P(Binomial(count, q) <= k) = `probability`, if there is one.
fn binomial_root(count: f64, q: f64, probability: f64) -> Option<f64> {
    let at_most = |k: f64| beta_reg(count - k, k + 1.0, 1.0 - q);
    let (mut low, mut high) = (0.0, count - 1.0);
    if !(high > low && at_most(low) <= probability && probability <= at_most(high)) {
        return None;
    }
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if at_most(middle) < probability { low = middle } else { high = middle }
    }
    Some((low + high) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::testing::{coverage, exponentials, wait_quantile, waits};

    #[test]
    fn ranks_are_those_of_the_binomial() {
        // scipy: binom.ppf(0.025, 100, 0.5) = 40, binom.ppf(0.975, 100, 0.5) = 60; P(Bin <= 39) =
        // 0.0176 is the largest not above 0.025, so l = 40; P(Bin <= 60) = 0.9824 is the first not
        // below 0.975, so u = 61.
        let sorted: Vec<f64> = (1..=100).map(f64::from).collect();
        let median = independent(&sorted, 0.5, 0.95);
        assert_eq!((median.value, median.low, median.high), (50.5, 40.0, 61.0));
        // 1000 values, P99: P(Bin <= 982) = 0.0138, <= 983: 0.0264, <= 995: 0.9713, <= 996: 0.9899.
        let sorted: Vec<f64> = (1..=1000).map(f64::from).collect();
        let tail = independent(&sorted, 0.99, 0.95);
        assert_eq!((tail.low, tail.high), (983.0, 997.0));
    }

    #[test]
    fn a_tail_that_the_values_cannot_bound_has_no_upper_end() {
        assert_eq!(needed(0.99, 0.95), 368);
        let values: Vec<f64> = (0..368).map(f64::from).collect();
        assert!(independent(&values, 0.99, 0.95).is_bounded());
        let short = independent(&values[..367], 0.99, 0.95);
        assert_eq!(short.high, f64::INFINITY);
        assert!(short.low.is_finite());
        assert_eq!(independent(&[], 0.99, 0.95).high, f64::INFINITY);
        assert_eq!(independent(&[1.0], 0.5, 0.95).low, f64::NEG_INFINITY);
    }

    #[test]
    fn intervals_of_independent_values_cover() {
        for (count, q) in [(60, 0.5), (400, 0.9), (700, 0.99)] {
            let truth = -f64::ln(1.0 - q);
            let share = coverage(600, truth, |seed| {
                let mut values = exponentials(seed, count);
                values.sort_unstable_by(f64::total_cmp);
                independent(&values, q, 0.95)
            });
            // Three standard errors of 600 rounds below 0.95.
            assert!(share > 0.923, "{count} values, quantile {q}: {share}");
            let share = coverage(300, truth, |seed| of_series(&exponentials(seed, count), q, 0.95));
            assert!(share > 0.912, "{count} values in time order, quantile {q}: {share}");
        }
    }

    #[test]
    fn sections_bound_what_order_statistics_cannot() {
        let tail = -f64::ln(0.01);
        let share = coverage(300, tail, |seed| sectioned(&exponentials(seed, 100), 0.99, 0.99));
        assert!(share > 0.96, "{share} of 100 independent values");
        let share = coverage(300, 1.0 + wait_quantile(0.7, 0.99), |seed| {
            let times: Vec<f64> = waits(seed, 0.7, 1000).into_iter().map(|wait| wait + 1.0).collect();
            sectioned(&times, 0.99, 0.99)
        });
        assert!(share > 0.86, "{share} of 1000 in a queue");
        let ramp: Vec<f64> = (1..=200).map(f64::from).collect();
        assert!(sectioned(&ramp, 0.5, 0.99).is_bounded() && !of_series(&ramp, 0.99, 0.99).is_bounded());
        assert!(!sectioned(&ramp[..19], 0.5, 0.99).is_bounded() && !sectioned(&[0.0; 50], 0.5, 0.99).is_bounded());
    }

    #[test]
    fn intervals_of_a_queue_cover_and_those_that_ignore_it_do_not() {
        for (load, q, count) in [(0.7, 0.5, 2000), (0.7, 0.99, 4000), (0.85, 0.9, 4000)] {
            let truth = wait_quantile(load, q);
            let share = coverage(200, truth, |seed| of_series(&waits(seed, load, count), q, 0.95));
            assert!(share > 0.86, "load {load}, quantile {q}: {share}");
            let naive = coverage(200, truth, |seed| {
                let mut values = waits(seed, load, count);
                values.sort_unstable_by(f64::total_cmp);
                independent(&values, q, 0.95)
            });
            assert!(naive < 0.75, "load {load}, quantile {q}: {naive} without the design effect");
        }
    }
}
