//! Is B better than A? An interval for the change, and a verdict that may be "no difference".
//!
//! The interval of a difference comes from the intervals of its parts (MOVER, Zou and Donner 2008):
//! with a in [la, ua] and b in [lb, ub], b - a lies between d - sqrt((b - lb)^2 + (ua - a)^2) and
//! d + sqrt((ub - b)^2 + (a - la)^2), where d is the difference of the estimates. With Wilson's
//! intervals this is Newcombe's interval for two shares; on logarithms it is the interval of a
//! ratio. An unbounded part makes the change unbounded.
//!
//! A verdict has a *margin*, the largest change that is too small to matter. If the interval lies
//! inside the margin, the verdict is "no difference", even if the change is certain. Otherwise, if
//! the interval excludes zero, it is better or worse. If not, it is undecided.

use super::Estimate;

/// Whether a low or a high value is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sense {
    /// Latencies, failures.
    LowerIsBetter,
    /// Throughput, attainment.
    HigherIsBetter,
}

/// The conclusion from the interval of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// B is better than A.
    Better,
    /// B is worse than A.
    Worse,
    /// The true change, of either sign, is inside the margin.
    NoDifference,
    /// The interval contains zero and also changes that matter.
    Undecided,
}

/// The change from A to B: a fraction of A for ratios (0.1 is 10 % more), a difference for shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change(pub Estimate);

impl Change {
    /// b / a - 1. Unbounded where an end of an interval is 0 or below.
    pub fn ratio(a: &Estimate, b: &Estimate) -> Self {
        if a.value == b.value && a.low == a.high && b.low == b.high {
            return Self(Estimate { value: 0.0, low: 0.0, high: 0.0 });
        }
        let log = |estimate: &Estimate| {
            let ln = |value: f64, bottom: f64| if value > 0.0 { value.ln() } else { bottom };
            Estimate {
                value: ln(estimate.value, f64::NAN),
                low: ln(estimate.low, f64::NEG_INFINITY),
                high: ln(estimate.high, f64::INFINITY),
            }
        };
        let Estimate { value, low, high } = difference(&log(a), &log(b));
        if value.is_nan() {
            return Self(Estimate { value: f64::NAN, low: f64::NEG_INFINITY, high: f64::INFINITY });
        }
        Self(Estimate { value: value.exp_m1(), low: low.exp_m1(), high: high.exp_m1() })
    }

    /// b / a - 1 of pairs, where both values of a pair were measured under the same conditions. It
    /// is computed from the mean of the logarithms, so that a halving and a doubling cancel.
    /// Unbounded for fewer than two pairs, or if a value is not above 0.
    pub fn of_pairs(a: &[f64], b: &[f64], confidence: f64) -> Self {
        if a == b && a.len() > 1 {
            return Self(Estimate { value: 0.0, low: 0.0, high: 0.0 });
        }
        let logs: Vec<f64> = a.iter().zip(b).map(|(a, b)| (b / a).ln()).collect();
        if logs.is_empty() || logs.iter().any(|log| !log.is_finite()) {
            return Self(Estimate { value: f64::NAN, low: f64::NEG_INFINITY, high: f64::INFINITY });
        }
        let Estimate { value, low, high } = super::mean::of_series(&logs, confidence);
        Self(Estimate { value: value.exp_m1(), low: low.exp_m1(), high: high.exp_m1() })
    }

    /// b - a.
    pub fn difference(a: &Estimate, b: &Estimate) -> Self {
        Self(difference(a, b))
    }

    /// The verdict, with the `margin` in the unit of the change.
    pub fn verdict(&self, sense: Sense, margin: f64) -> Verdict {
        let Estimate { low, high, .. } = self.0;
        // The margin is symmetric, as users expect, although in a ratio a rise by the margin does
        // not quite undo a fall by the margin.
        if -margin <= low && high <= margin {
            Verdict::NoDifference
        } else if low > 0.0 {
            if sense == Sense::HigherIsBetter { Verdict::Better } else { Verdict::Worse }
        } else if high < 0.0 {
            if sense == Sense::HigherIsBetter { Verdict::Worse } else { Verdict::Better }
        } else {
            Verdict::Undecided
        }
    }
}

/// The confidence that each of `count` intervals needs so that all hold at once with `confidence`
/// (Bonferroni).
pub fn each_of(count: usize, confidence: f64) -> f64 {
    1.0 - (1.0 - confidence) / count.max(1) as f64
}

fn difference(a: &Estimate, b: &Estimate) -> Estimate {
    let value = b.value - a.value;
    let low = value - (b.value - b.low).hypot(a.high - a.value);
    let high = value + (b.high - b.value).hypot(a.value - a.low);
    Estimate { value, low, high }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::testing::{coverage, exponentials, waits};
    use crate::stats::{proportion, quantile, wilson};

    fn estimate(value: f64, low: f64, high: f64) -> Estimate {
        Estimate { value, low, high }
    }

    #[test]
    fn two_shares_have_newcombes_interval() {
        // Newcombe 1998, table II, example (a): 56/70 against 48/80, method 10 (score): 0.0524 ..
        // 0.3339.
        let change = Change::difference(&wilson(48.0, 80.0, 0.95), &wilson(56.0, 70.0, 0.95)).0;
        assert!((change.value - 0.2).abs() < 1e-12);
        assert!((change.low - 0.0524).abs() < 5e-5 && (change.high - 0.3339).abs() < 5e-5, "{change:?}");
    }

    #[test]
    fn a_verdict_follows_from_interval_sense_and_margin() {
        let verdict = |low, high, sense| Change(estimate(0.0, low, high)).verdict(sense, 0.05);
        use Sense::{HigherIsBetter, LowerIsBetter};
        assert_eq!(verdict(0.1, 0.2, LowerIsBetter), Verdict::Worse);
        assert_eq!(verdict(0.1, 0.2, HigherIsBetter), Verdict::Better);
        assert_eq!(verdict(-0.2, -0.01, LowerIsBetter), Verdict::Better);
        assert_eq!(verdict(-0.2, -0.01, HigherIsBetter), Verdict::Worse);
        assert_eq!(verdict(-0.04, 0.05, LowerIsBetter), Verdict::NoDifference);
        assert_eq!(verdict(0.01, 0.02, LowerIsBetter), Verdict::NoDifference, "certain and trivial");
        assert_eq!(verdict(-0.04, 0.06, LowerIsBetter), Verdict::Undecided);
        assert_eq!(verdict(0.1, f64::INFINITY, LowerIsBetter), Verdict::Worse);
        assert_eq!(verdict(f64::NEG_INFINITY, f64::INFINITY, LowerIsBetter), Verdict::Undecided);
    }

    #[test]
    fn a_ratio_with_zero_is_undecided() {
        let zero = estimate(0.0, 0.0, 0.0);
        let one = estimate(1.0, 0.5, 2.0);
        let judge = |a, b| Change::ratio(a, b).verdict(Sense::LowerIsBetter, 0.05);
        assert_eq!(judge(&zero, &one), Verdict::Undecided);
        assert_eq!(judge(&one, &zero), Verdict::Undecided);
        assert_eq!(judge(&zero, &zero), Verdict::NoDifference);
        let open = estimate(1.0, 0.5, f64::INFINITY);
        let change = Change::ratio(&one, &open).0;
        assert!(change.low.is_finite() && change.high.is_infinite());
    }

    #[test]
    fn the_ratio_of_two_medians_is_covered() {
        let median = |seed, scale: f64| {
            let values: Vec<f64> = exponentials(seed, 300).into_iter().map(|value| value * scale).collect();
            quantile::of_series(&values, 0.5, 0.95)
        };
        let share = coverage(400, 0.25, |seed| Change::ratio(&median(2 * seed, 1.0), &median(2 * seed + 1, 1.25)).0);
        assert!(share > 0.92, "{share}");
    }

    #[test]
    fn two_runs_of_one_queue_are_seldom_called_different_and_a_slower_one_is_found() {
        let tail = |seed, load| {
            let values: Vec<f64> = waits(seed, load, 4000).into_iter().map(|wait| wait + 1.0).collect();
            quantile::of_series(&values, 0.9, 0.95)
        };
        let count = |wanted: &[Verdict], load_b| {
            let verdict = |seed: u64| {
                Change::ratio(&tail(2 * seed, 0.7), &tail(2 * seed + 1, load_b)).verdict(Sense::LowerIsBetter, 0.05)
            };
            (0u64..150).filter(|seed| wanted.contains(&verdict(*seed))).count()
        };
        let false_alarms = count(&[Verdict::Better, Verdict::Worse], 0.7);
        assert!(false_alarms <= 15, "{false_alarms} of 150");
        let found = count(&[Verdict::Worse], 0.85);
        assert!(found >= 130, "{found} of 150");
        assert_eq!(count(&[Verdict::Better], 0.85), 0);
    }

    #[test]
    fn equal_long_runs_are_shown_to_be_equal() {
        let run = |seed| quantile::of_series(&exponentials(seed, 40_000), 0.5, 0.95);
        let same = (0..20)
            .filter(|seed| {
                let change = Change::ratio(&run(2 * seed), &run(2 * seed + 1));
                change.verdict(Sense::LowerIsBetter, 0.06) == Verdict::NoDifference
            })
            .count();
        assert!(same >= 18, "{same} of 20");
        let hits = [true; 5000];
        let share = proportion::of_series(&hits, 0.95);
        assert_eq!(Change::difference(&share, &share).verdict(Sense::HigherIsBetter, 0.01), Verdict::NoDifference);
    }

    #[test]
    fn many_intervals_share_the_error() {
        assert!((each_of(10, 0.95) - 0.995).abs() < 1e-12);
        assert_eq!(each_of(0, 0.95), each_of(1, 0.95));
    }

    #[test]
    fn the_change_of_pairs_is_covered_and_needs_two() {
        let pairs = |seed| {
            let (shared, a, b) =
                (exponentials(seed, 8), exponentials(seed + 10_000, 8), exponentials(seed + 20_000, 8));
            let with = |own: &[f64], factor: f64| -> Vec<f64> {
                shared.iter().zip(own).map(|(shared, own)| (shared + 0.1 * own).exp() * factor).collect()
            };
            (with(&a, 1.0), with(&b, 1.07))
        };
        let covered = coverage(2000, 0.07, |seed| {
            let (a, b) = pairs(seed);
            Change::of_pairs(&a, &b, 0.95).0
        });
        assert!((0.93..0.98).contains(&covered), "{covered}");
        assert!(!Change::of_pairs(&[1.0], &[2.0], 0.95).0.is_bounded());
        assert!(!Change::of_pairs(&[1.0, 0.0], &[2.0, 1.0], 0.95).0.is_bounded());
        assert_eq!(Change::of_pairs(&[1.0, 2.0], &[1.0, 2.0], 0.95).0.high, 0.0);
    }
}
