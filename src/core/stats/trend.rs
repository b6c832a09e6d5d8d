//! Does a series in time order rise?
//!
//! A straight line by least squares through the means of [`BATCHES`] runs. Batch means of a
//! stationary series are nearly independent, so the slope over its standard error is nearly
//! Student's t with BATCHES - 2 degrees of freedom. A test on single values would take every slow
//! wave for a trend.
//!
//! A wave longer than the series looks like a trend to any test, so a caller that acts on a rise
//! should check again later.

use super::dependence::{BATCHES, batch_mean, batches};

/// A line through a series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    /// The mean of the series, in the unit of the series.
    pub mean: f64,
    /// How much the line rises from the first batch to the last, in the unit of the series.
    pub rise: f64,
    /// Slope over its standard error; infinite for a perfect line that is not level.
    pub t: f64,
}

/// Student's t at 95 % one-sided with BATCHES - 2 degrees of freedom.
pub const SIGNIFICANT: f64 = 1.860;

impl Trend {
    /// The line through `values`; `None` for fewer than two values per batch.
    pub fn of_series(values: &[f64]) -> Option<Self> {
        if values.len() < 2 * BATCHES {
            return None;
        }
        let count = BATCHES as f64;
        let points: Vec<(f64, f64)> =
            (0..BATCHES).map(|batch| batch as f64 - (count - 1.0) / 2.0).zip(batches(values).map(batch_mean)).collect();
        let mean = points.iter().map(|(_, y)| y).sum::<f64>() / count;
        let sxx: f64 = points.iter().map(|(x, _)| x * x).sum();
        let slope = points.iter().map(|(x, y)| x * (y - mean)).sum::<f64>() / sxx;
        let left: f64 = points.iter().map(|(x, y)| (y - mean - slope * x).powi(2)).sum();
        let error = (left / (count - 2.0) / sxx).sqrt();
        let t = if slope == 0.0 { 0.0 } else { slope / error };
        Some(Self { mean, rise: slope * (count - 1.0), t })
    }

    /// Whether the rise is so large that a level series would show it by chance in less than 1 of
    /// 20 cases.
    pub fn is_rising(&self) -> bool {
        self.t > SIGNIFICANT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::testing::waits;

    #[test]
    fn a_line_is_found_and_a_level_series_is_not() {
        let line: Vec<f64> = (0..320).map(f64::from).collect();
        let trend = Trend::of_series(&line).unwrap();
        assert!((trend.mean - 159.5).abs() < 1e-9 && (trend.rise - 288.0).abs() < 1e-9, "{trend:?}");
        assert!(trend.is_rising());
        let falling: Vec<f64> = line.iter().rev().copied().collect();
        assert!(!Trend::of_series(&falling).unwrap().is_rising());
        assert!(!Trend::of_series(&[1.0; 320]).unwrap().is_rising());
        assert_eq!(Trend::of_series(&[1.0; 19]), None);
    }

    #[test]
    fn a_stable_queue_seldom_rises_and_an_overloaded_one_does() {
        let rising =
            |load| (0..200).filter(|seed| Trend::of_series(&waits(*seed, load, 8000)).unwrap().is_rising()).count();
        let stable = rising(0.7);
        assert!(stable <= 22, "{stable} of 200");
        // A queue with a load over 1 has no steady state in which `waits` could start, so here a
        // drift is added instead.
        let mut overloaded = 0;
        for seed in 0..50 {
            let drift: Vec<f64> =
                waits(seed, 0.7, 8000).iter().zip(0..).map(|(wait, n)| wait + 0.002 * f64::from(n)).collect();
            overloaded += usize::from(Trend::of_series(&drift).unwrap().is_rising());
        }
        assert_eq!(overloaded, 50);
    }
}
