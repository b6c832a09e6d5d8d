//! The long-run mean of a series in time order, by batch means.
//!
//! The series is divided into [`BATCHES`] runs. The means of the runs are nearly independent and
//! nearly normal, so mean +- t s / sqrt(BATCHES) covers the true mean, with Student's t of
//! BATCHES - 1 degrees (Law, *Simulation Modeling and Analysis*, 9.5). If the series has fewer than
//! two values per batch, each value counts as a batch. For a throughput the values are counts in
//! windows of equal length.

use super::dependence::{BATCHES, batch_mean, batches};
use super::{Estimate, two_sided_t};

/// The mean of `values` in time order, with `confidence` in 0..1. Unbounded for fewer than two
/// values.
pub fn of_series(values: &[f64], confidence: f64) -> Estimate {
    if values.is_empty() {
        return Estimate { value: 0.0, low: f64::NEG_INFINITY, high: f64::INFINITY };
    }
    let value = batch_mean(values);
    let means: Vec<f64> =
        if values.len() < 2 * BATCHES { values.to_vec() } else { batches(values).map(batch_mean).collect() };
    let freedom = means.len() as f64 - 1.0;
    if freedom < 1.0 {
        return Estimate { value, low: f64::NEG_INFINITY, high: f64::INFINITY };
    }
    let middle = batch_mean(&means);
    let variance = means.iter().map(|mean| (mean - middle).powi(2)).sum::<f64>() / freedom;
    let reach = two_sided_t(confidence, freedom) * (variance / means.len() as f64).sqrt();
    Estimate { value, low: value - reach, high: value + reach }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::testing::{coverage, exponentials, waits};

    #[test]
    fn the_mean_of_independent_values_and_of_a_queue_is_covered() {
        let share = coverage(500, 1.0, |seed| of_series(&exponentials(seed, 400), 0.95));
        assert!(share > 0.92, "{share}");
        let load = 0.7;
        let share = coverage(200, load / (1.0 - load), |seed| of_series(&waits(seed, load, 6000), 0.95));
        assert!(share > 0.88, "{share}");
    }

    #[test]
    fn few_values_have_wide_intervals_or_none() {
        assert!(!of_series(&[], 0.95).is_bounded());
        assert!(!of_series(&[3.0], 0.95).is_bounded());
        // Two values: t(1) = 12.706 at 95 %, s / sqrt(2) = 1.
        let two = of_series(&[2.0, 4.0], 0.95);
        assert!((two.high - 15.706).abs() < 1e-3 && two.value == 3.0, "{two:?}");
    }
}
