//! Bounds on measures beside the objective: `subject_to = ["long.e2el.p99 <= 3.3s"]`.
//!
//! ```text
//! bound = MEASURE OPERATOR VALUE     OPERATOR: <= where low is good, >= where high is good
//! ```
//!
//! VALUE is in the unit of the measure: a duration such as `3.3s` for a latency, otherwise a
//! number. A setting keeps a bound if the mean over the setting's runs is within the bound. A race
//! ends as soon as the interval of the mean lies beyond the bound, corrected for all looks and
//! bounds together. A request without a complete response is infinitely slow, as in an objective.
//! At most [`MOST_BOUNDS`] bounds.

use crate::error::TuneError;
use sluice_core::base::units::Period;
use sluice_core::stats::compare::each_of;
use sluice_core::stats::{Sense, mean};
use sluice_lab::Measure;
use sluice_lab::table::number;

/// The most bounds of a goal.
pub const MOST_BOUNDS: usize = 8;
const CONFIDENCE: f64 = 0.95;

/// The largest or smallest value that a measure may have.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// The measure.
    pub measure: Measure,
    /// The last allowed value, in the measure's unit.
    pub value: f64,
}

/// A bound that a setting does not keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Exceeded {
    /// The place of the bound in the goal.
    pub(crate) bound: usize,
    /// The mean of the runs. `None`: requests fail, or there are no requests.
    pub(crate) value: Option<f64>,
}

impl Bound {
    /// Reads a bound.
    pub fn parse(text: &str) -> Result<Self, TuneError> {
        let bad = |why: String| TuneError::Bound { text: text.to_owned(), why };
        let (at, operator) = ["<=", ">="]
            .iter()
            .find_map(|operator| Some((text.find(operator)?, *operator)))
            .ok_or_else(|| bad("it has no operator; write <= or >=, as in \"long.e2el.p99 <= 3.3s\"".to_owned()))?;
        let measure: Measure = text[..at].trim().parse()?;
        let (wanted, why) = match measure.sense() {
            Sense::LowerIsBetter => ("<=", "lower is better"),
            Sense::HigherIsBetter => (">=", "higher is better"),
        };
        if operator != wanted {
            return Err(bad(format!("of {measure} {why}: write {wanted}")));
        }
        let value = text[at + operator.len()..].trim();
        let value = match measure.unit() {
            "ms" => {
                value.parse::<Period>().map(|Period(time)| time.as_secs_f64() * 1e3).map_err(|e| bad(e.to_string()))?
            }
            unit => {
                let value = value.strip_suffix(unit).unwrap_or(value).trim_end();
                let number = value.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
                number.ok_or_else(|| bad(format!("'{value}' is not a number of at least 0")))?
            }
        };
        Ok(Self { measure: measure.counting_lost(), value })
    }

    /// Whether a value breaks the bound. An unknown value does.
    fn is_exceeded(&self, value: f64) -> bool {
        match self.measure.sense() {
            Sense::LowerIsBetter => value.is_nan() || value > self.value,
            Sense::HigherIsBetter => value.is_nan() || value < self.value,
        }
    }

    /// The bound in words.
    pub fn text(&self) -> String {
        let operator = match self.measure.sense() {
            Sense::LowerIsBetter => "<=",
            Sense::HigherIsBetter => ">=",
        };
        format!("{} {operator} {}", self.measure, self.with_unit(self.value))
    }

    /// A value of the measure with its unit.
    pub fn with_unit(&self, value: f64) -> String {
        format!("{} {}", number(value), self.measure.unit()).trim_end().to_owned()
    }
}

/// The first bound that the runs do not keep. `values`: the series of each bound's measure.
/// `looks`: how often a race looks at the values; `None` outside a race. In a race, a bound counts
/// as not kept only if that is certain.
pub(crate) fn exceeded(bounds: &[Bound], values: &[Vec<f64>], looks: Option<usize>) -> Option<Exceeded> {
    bounds.iter().zip(values).enumerate().find_map(|(at, (bound, values))| {
        // If a request is infinitely slow, the mean has no interval.
        if values.iter().any(|value| !value.is_finite()) {
            return Some(Exceeded { bound: at, value: None });
        }
        let value = match looks {
            None => mean::of_series(values, CONFIDENCE).value,
            Some(looks) => {
                let estimate = mean::of_series(values, each_of(looks * bounds.len(), CONFIDENCE));
                match bound.measure.sense() {
                    Sense::LowerIsBetter => estimate.low,
                    Sense::HigherIsBetter => estimate.high,
                }
            }
        };
        let mean = mean::of_series(values, CONFIDENCE).value;
        bound.is_exceeded(value).then_some(Exceeded { bound: at, value: Some(mean) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bounds_are_read_in_the_unit_of_their_measure_and_written_back() {
        for (text, value, written) in [
            ("long.e2el.p99 <= 3.3s", 3300.0, "long.e2el.p99 <= 3,300 ms"),
            ("short.ttft.p99<=80ms", 80.0, "short.ttft.p99 <= 80.0 ms"),
            ("all.attainment >= 99 %", 99.0, "all.attainment >= 99.0 %"),
            ("all.failed <= 0", 0.0, "all.failed <= 0 %"),
            ("all.tokens >= 5000", 5000.0, "all.tokens >= 5,000 /s"),
        ] {
            let bound = Bound::parse(text).unwrap();
            assert_eq!((bound.value, bound.text()), (value, written.replace(',', "")), "{text}");
        }
    }

    #[test]
    fn a_bound_that_cannot_be_meant_is_refused_with_the_repair() {
        for (text, reason) in [
            ("long.e2el.p99", "write <= or >="),
            ("long.e2el.p99 < 3s", "write <= or >="),
            ("long.e2el.p99 >= 3s", "lower is better: write <="),
            ("all.tokens <= 3", "higher is better: write >="),
            ("long.e2el.p99 <= 3", "3s"),
            ("long.e2el.p99 <= fast", "duration"),
            ("all.tokens >= many", "not a number"),
            ("long.e2el.q99 <= 3s", "long.e2el.q99"),
        ] {
            let error = Bound::parse(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    proptest! {
        /// In a race, a bound counts as exceeded only if that is certain. Lost requests exceed
        /// every bound.
        #[test]
        fn what_is_certainly_exceeded_is_exceeded(
            values in proptest::collection::vec(1.0f64..100.0, 2..9), limit in 1.0f64..100.0, looks in 1usize..5,
        ) {
            let bound = Bound { value: limit, ..Bound::parse("a.e2el.p99 <= 1ms").unwrap() };
            let of = |values: &[f64], looks| exceeded(std::slice::from_ref(&bound), &[values.to_vec()], looks);
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            prop_assert_eq!(of(&values, None).is_some(), mean > limit);
            prop_assert!(of(&values, Some(looks)).is_none() || of(&values, None).is_some());
            let mut lost = values.clone();
            lost[0] = f64::INFINITY;
            prop_assert_eq!(of(&lost, Some(looks)), Some(Exceeded { bound: 0, value: None }));
        }
    }
}
