//! Data with known truth for the coverage tests: independent draws and waiting times of a queue.
//!
//! Of the intervals from many seeds, about the share c must contain the truth, where c is the
//! confidence.

use super::Estimate;
use crate::base::Rng;

/// Waiting times of `count` customers of an M/M/1 queue with service rate 1 and load `load`, from
/// the steady state on. P(W > x) = load exp(-(1 - load) x); mean load / (1 - load).
pub(super) fn waits(seed: u64, load: f64, count: usize) -> Vec<f64> {
    let mut rng = Rng::new(Rng::new(seed).next_u64());
    let mut wait = if rng.unit() < load { rng.exponential() / (1.0 - load) } else { 0.0 };
    let mut values = Vec::with_capacity(count);
    for _ in 0..count {
        values.push(wait);
        // Lindley's recursion.
        wait = (wait + rng.exponential() - rng.exponential() / load).max(0.0);
    }
    values
}

/// The quantile `q` of the waiting times from [`waits`].
pub(super) fn wait_quantile(load: f64, q: f64) -> f64 {
    ((load / (1.0 - q)).ln() / (1.0 - load)).max(0.0)
}

/// Independent exponential values with mean 1.
pub(super) fn exponentials(seed: u64, count: usize) -> Vec<f64> {
    let mut rng = Rng::new(Rng::new(seed).next_u64());
    (0..count).map(|_| rng.exponential()).collect()
}

/// The share of `rounds` seeds whose interval contains the truth.
pub(super) fn coverage(rounds: u64, truth: f64, estimate: impl Fn(u64) -> Estimate) -> f64 {
    (0..rounds).filter(|seed| estimate(*seed).contains(truth)).count() as f64 / rounds as f64
}
