//! How many independent values a series in time order is worth.
//!
//! The mean of n independent values of variance s^2 has the variance s^2 / n. Waiting times are not
//! independent: the variance of their mean is D s^2 / n, with a *design effect* D > 1. So n values
//! are worth n / D.
//!
//! D comes from batch means. Divide the series into [`BATCHES`] runs of m values, and let S^2 be
//! the variance of their means; then D = m S^2 / s^2. A queue correlates neighbours positively, so
//! an estimate below 1 is chance and is raised to 1. S^2 has only BATCHES - 1 degrees of freedom,
//! so users of D replace the normal quantile by Student's t ([`Dependence::inflation`]).
//!
//! Limits: more than ten batches would be shorter than the waves of a busy queue, and D would come
//! out too small; with fewer batches, t grows. Correlation over more than a batch is seen only in
//! part. A run that ends with a growing queue has no long-run value; only [`trend`](super::trend)
//! detects that.

use super::{two_sided_t, two_sided_z};

/// Number of batches into which a series is divided.
pub const BATCHES: usize = 10;

/// The effect of dependence on the information in a series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dependence {
    /// D: the number of values that carry as much information as one independent value; 1 or more.
    pub effect: f64,
    /// Degrees of freedom of `effect`; infinite where independence is assumed.
    pub freedom: f64,
}

impl Dependence {
    /// Independence, for values drawn independently and for series too short to measure `effect`.
    pub const NONE: Self = Self { effect: 1.0, freedom: f64::INFINITY };

    /// D (t / z)^2, by which the number of values n is divided. An interval of this `confidence` is
    /// then computed as for independent values.
    pub fn inflation(&self, confidence: f64) -> f64 {
        if self.freedom.is_infinite() {
            return self.effect;
        }
        let ratio = two_sided_t(confidence, self.freedom) / two_sided_z(confidence);
        self.effect * ratio * ratio
    }
}

/// The design effect of `values`, which are in time order. A constant series, and a series of fewer
/// than two values per batch, count as independent.
pub fn design_effect(values: &[f64]) -> Dependence {
    let count = values.len();
    if count < 2 * BATCHES {
        return Dependence::NONE;
    }
    let mean = values.iter().sum::<f64>() / count as f64;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1) as f64;
    if !(variance > 0.0 && variance.is_finite()) {
        return Dependence::NONE;
    }
    let freedom = (BATCHES - 1) as f64;
    let spread: f64 = batches(values).map(|batch| batch.len() as f64 * (batch_mean(batch) - mean).powi(2)).sum();
    Dependence { effect: (spread / freedom / variance).max(1.0), freedom }
}

/// Divides the series into [`BATCHES`] runs whose lengths differ by at most one.
pub(super) fn batches(values: &[f64]) -> impl Iterator<Item = &[f64]> {
    let count = values.len();
    (0..BATCHES).map(move |batch| &values[batch * count / BATCHES..(batch + 1) * count / BATCHES])
}

pub(super) fn batch_mean(batch: &[f64]) -> f64 {
    batch.iter().sum::<f64>() / batch.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Rng;
    use crate::stats::testing::waits;

    #[test]
    fn independent_values_count_fully_and_copies_do_not() {
        let mut rng = Rng::new(3);
        let values: Vec<f64> = (0..4096).map(|_| rng.unit()).collect();
        let alone = design_effect(&values).effect;
        assert!(alone < 2.0, "{alone}");
        let copied: Vec<f64> = values.iter().flat_map(|value| [*value; 10]).collect();
        let ten = design_effect(&copied).effect;
        assert!((4.0..25.0).contains(&ten), "{ten} for ten copies of each");
    }

    #[test]
    fn a_queue_near_saturation_is_worth_a_small_part_of_its_requests() {
        let calm = design_effect(&waits(1, 0.3, 20_000)).effect;
        let busy = design_effect(&waits(1, 0.9, 20_000)).effect;
        assert!(calm < 10.0 && busy > 50.0, "{calm} {busy}");
    }

    #[test]
    fn short_and_constant_series_count_as_independent() {
        assert_eq!(design_effect(&[]), Dependence::NONE);
        assert_eq!(design_effect(&[1.0, 2.0, 3.0]), Dependence::NONE);
        assert_eq!(design_effect(&[5.0; 1000]), Dependence::NONE);
        assert_eq!(Dependence::NONE.inflation(0.95), 1.0);
        // t(15) / z at 95 %, squared.
        let inflation = Dependence { effect: 2.0, freedom: 15.0 }.inflation(0.95);
        assert!((inflation - 2.0 * (2.13145f64 / 1.95996).powi(2)).abs() < 1e-3, "{inflation}");
    }
}
