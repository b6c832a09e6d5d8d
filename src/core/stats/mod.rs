//! Statistics of measurements: how far a measured value may be from the true value.
//!
//! | file | question | answer |
//! |---|---|---|
//! | `dependence` | how many independent values is a series worth? | design effect |
//! | `quantile` | where is the true P99? | order statistics, for any distribution |
//! | `proportion` | what share of requests meets the objectives? | Wilson's interval |
//! | `mean` | what is the long-run mean? | batch means and Student's t |
//! | `compare` | is B better than A? | interval of the change, verdict with a margin |
//! | `sequential` | can the test stop already? | Wald's probability ratio test |
//! | `always_valid` | which interval holds at every look at a run? | confidence sequences |
//! | `trend` | does it still grow? | a line through batch means |
//!
//! Requests of one run wait in the same queues, so their latencies are correlated: 1,000 values may
//! carry no more information than 50 independent ones. Intervals for series in time order allow for
//! the correlation with a *design effect*; without it they would be several times too short near
//! saturation. Simulations in the tests show how often intervals contain the true value, for
//! independent and for queueing data.
//!
//! Pure: no clock, no global randomness. Values are `f64` in the caller's unit. NaN is a caller's
//! mistake and sorts last.

pub mod always_valid;
pub mod compare;
pub mod dependence;
pub mod mean;
pub mod proportion;
pub mod quantile;
pub mod sequential;
pub mod trend;
#[cfg(test)]
mod testing;

pub use compare::{Change, Sense, Verdict};
pub use dependence::{Dependence, design_effect};
pub use proportion::wilson;
pub use quantile::percentile;
pub use sequential::{RatioTest, TestState};
pub use trend::Trend;

use serde::{Deserialize, Deserializer, Serialize};

/// A measured value, and the range that contains the true value with the stated confidence.
///
/// An end that the data does not bound is infinite: the P99 of 50 values has no upper bound.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The measured value.
    pub value: f64,
    /// Lower end.
    #[serde(deserialize_with = "low_end")]
    pub low: f64,
    /// Upper end.
    #[serde(deserialize_with = "high_end")]
    pub high: f64,
}

/// JSON has no infinity, so an infinite end is written as null.
fn low_end<'de, D: Deserializer<'de>>(end: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(end)?.unwrap_or(f64::NEG_INFINITY))
}

fn high_end<'de, D: Deserializer<'de>>(end: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(end)?.unwrap_or(f64::INFINITY))
}

impl Estimate {
    /// Whether `value` lies in the range.
    pub fn contains(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }

    /// Whether both ends are finite.
    pub fn is_bounded(&self) -> bool {
        self.low.is_finite() && self.high.is_finite()
    }
}

/// The standard normal quantile of `probability` in (0, 1).
fn normal_quantile(probability: f64) -> f64 {
    // Phi^-1(p) = -sqrt(2) erfc^-1(2 p).
    -std::f64::consts::SQRT_2 * statrs::function::erf::erfc_inv(2.0 * probability)
}

/// z with P(|Z| <= z) = `confidence` for a standard normal Z.
fn two_sided_z(confidence: f64) -> f64 {
    normal_quantile(0.5 + confidence / 2.0)
}

/// t with P(|T| <= t) = `confidence` for Student's distribution with `freedom` >= 1 degrees.
fn two_sided_t(confidence: f64, freedom: f64) -> f64 {
    // P(|T| > t) = I_{v / (v + t^2)}(v / 2, 1 / 2), and the inverse of I gives v / (v + t^2).
    let x = statrs::function::beta::inv_beta_reg(freedom / 2.0, 0.5, 1.0 - confidence);
    (freedom * (1.0 - x) / x).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (confidence, z) in [(0.90, 1.6448536), (0.95, 1.9599640), (0.99, 2.5758293)] {
            assert!((two_sided_z(confidence) - z).abs() < 1e-6, "{confidence}: {}", two_sided_z(confidence));
        }
        for (confidence, freedom, t) in [(0.95, 1.0, 12.7062), (0.95, 15.0, 2.13145), (0.99, 10.0, 3.16927)] {
            let ours = two_sided_t(confidence, freedom);
            assert!((ours - t).abs() < 1e-4, "{confidence} {freedom}: {ours}");
        }
        assert!((normal_quantile(0.01) + 2.3263479).abs() < 1e-6);
    }
}
