//! Numbers from a run: counts, failures by reason, and exact percentiles, for each class and for all.
//!
//! Percentiles are computed from every value, not from buckets: sorted x, h = (n - 1) (p / 100), linear
//! interpolation between the neighbours of h, as numpy does by default; when the fraction is 0.5 or
//! more it interpolates down from the upper neighbour, so that the last bit agrees too. The standard
//! deviation divides by n. A summary of nothing is all zeros (and its count says so).
//!
//! Latency values are in milliseconds and come from completed requests only. ITL pools the gaps of
//! all requests, so long answers weigh more; TPOT is one value for each request of 2 or more tokens.
//! Failures are counted by reason and never enter a latency.
//!
//! Memory: 8 bytes for each value, so some 8 MB for a million tokens. Bounded by the run.

use std::collections::BTreeMap;
use std::time::Duration;

use super::client::{Failure, Timing};
use super::run::{Run, Sample};
use super::workload::Workload;

/// The distribution of one measure.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    sorted: Vec<f64>,
    mean: f64,
    std: f64,
}

impl Summary {
    /// Summarises `values`. Values that are not numbers sort last; there are none in a run.
    pub fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean) * (value - mean)).sum::<f64>() / count;
        Self { sorted: values, mean, std: variance.sqrt() }
    }

    /// How many values there are.
    pub fn count(&self) -> usize {
        self.sorted.len()
    }

    /// Their arithmetic mean.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Their standard deviation, dividing by n.
    pub fn std(&self) -> f64 {
        self.std
    }

    /// The largest value.
    pub fn max(&self) -> f64 {
        self.sorted.last().copied().unwrap_or(0.0)
    }

    /// The percentile `p` in 0..=100 (values outside are taken as the nearer end); 50 is the median.
    pub fn percentile(&self, p: f64) -> f64 {
        let Some(last) = self.sorted.len().checked_sub(1) else { return 0.0 };
        let position = last as f64 * (p.clamp(0.0, 100.0) / 100.0);
        let below = (position.floor() as usize).min(last);
        let fraction = position - below as f64;
        let low = self.sorted[below];
        let high = self.sorted[(below + 1).min(last)];
        if fraction < 0.5 { low + (high - low) * fraction } else { high - (high - low) * (1.0 - fraction) }
    }
}

/// What one class of requests met.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassTally {
    /// The class's name.
    pub name: String,
    /// Requests sent.
    pub sent: u64,
    /// Requests that got a complete answer.
    pub completed: u64,
    /// Requests that did not, by reason.
    pub failed: BTreeMap<Failure, u64>,
    /// Prompt tokens of completed requests.
    pub prompt_tokens: u64,
    /// Output tokens of completed requests.
    pub output_tokens: u64,
    /// Time to first token, ms.
    pub ttft: Summary,
    /// Time per output token after the first, ms.
    pub tpot: Summary,
    /// Gaps between token events, ms.
    pub itl: Summary,
    /// Start to last token event, ms.
    pub e2el: Summary,
    /// How late requests were sent (failed ones too), ms.
    pub late: Summary,
}

impl ClassTally {
    /// Failures of all reasons.
    pub fn failures(&self) -> u64 {
        self.failed.values().sum()
    }

    fn of<'a>(name: &str, samples: impl Iterator<Item = &'a Sample>) -> Self {
        let mut tally = Self { name: name.to_owned(), ..Self::default() };
        let [mut ttft, mut tpot, mut itl, mut e2el, mut late] = [const { Vec::new() }; 5];
        for sample in samples {
            tally.sent += 1;
            late.push(millis(sample.late));
            let timing: &Timing = match &sample.answer {
                Ok(timing) => timing,
                Err(failure) => {
                    *tally.failed.entry(*failure).or_default() += 1;
                    continue;
                }
            };
            tally.completed += 1;
            tally.prompt_tokens += timing.prompt_tokens.unwrap_or(u64::from(sample.prompt_tokens));
            tally.output_tokens += timing.output_tokens;
            ttft.push(millis(timing.ttft));
            tpot.extend(timing.tpot().map(millis));
            itl.extend(timing.gaps.iter().copied().map(millis));
            e2el.push(millis(timing.e2el));
        }
        let [ttft, tpot, itl, e2el, late] = [ttft, tpot, itl, e2el, late].map(Summary::of);
        Self { ttft, tpot, itl, e2el, late, ..tally }
    }
}

/// What a whole run met.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// From the start to the end of the last request.
    pub duration: Duration,
    /// In the order of the workload's classes.
    pub classes: Vec<ClassTally>,
    /// All classes together.
    pub all: ClassTally,
}

impl Tally {
    /// Counts `run`, whose requests came from `workload`.
    pub fn of(run: &Run, workload: &Workload) -> Self {
        let classes = workload.classes.iter().enumerate().map(|(index, class)| {
            ClassTally::of(&class.name, run.samples.iter().filter(|sample| sample.class == index))
        });
        Self { duration: run.duration, classes: classes.collect(), all: ClassTally::of("all", run.samples.iter()) }
    }

    /// `count` for each second of the run; 0 for a run that took no time.
    pub fn per_second(&self, count: u64) -> f64 {
        let seconds = self.duration.as_secs_f64();
        if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::mock::small_workload;
    use proptest::prelude::*;

    #[test]
    fn percentiles_are_those_of_numpy() {
        // numpy 2.4: percentile(x, p), mean(x), std(x). To the last bit.
        let summary = Summary::of(vec![15.0, 20.0, 35.0, 40.0, 50.0]);
        let expected = [
            (0.0, 15.0),
            (25.0, 20.0),
            (50.0, 35.0),
            (90.0, 46.0),
            (99.0, 49.6),
            (99.9, 49.96000000000001),
            (100.0, 50.0),
        ];
        for (p, value) in expected {
            assert_eq!(summary.percentile(p), value, "P{p}");
        }
        assert_eq!((summary.mean(), summary.std()), (32.0, 12.884098726725126));
        // [i * i / 7 for i in range(1, 12)]; the order given must not matter.
        let squares = Summary::of((1..12).rev().map(|i| f64::from(i * i) / 7.0).collect());
        let expected = [
            (12.3, 0.7357142857142859),
            (33.0, 2.6714285714285717),
            (87.5, 13.607142857142858),
            (99.0, 16.985714285714288),
            (99.9, 17.25571428571429),
        ];
        for (p, value) in expected {
            assert_eq!(squares.percentile(p), value, "P{p}");
        }
        assert!((squares.std() - 5.565931353936616).abs() < 1e-12);
    }

    #[test]
    fn a_summary_of_nothing_is_zero_and_of_one_value_is_that_value() {
        let nothing = Summary::of(vec![]);
        assert_eq!((nothing.count(), nothing.mean(), nothing.percentile(99.0), nothing.max()), (0, 0.0, 0.0, 0.0));
        let one = Summary::of(vec![3.5]);
        assert_eq!((one.percentile(0.0), one.percentile(99.0), one.std()), (3.5, 3.5, 0.0));
    }

    fn sample(ordinal: u64, answer: Result<Timing, Failure>) -> Sample {
        Sample { ordinal, class: 0, prompt_tokens: 3, started: Duration::ZERO, late: Duration::ZERO, answer }
    }

    fn timing(ttft: u64, gaps: &[u64]) -> Timing {
        let gaps: Vec<Duration> = gaps.iter().copied().map(Duration::from_millis).collect();
        let ttft = Duration::from_millis(ttft);
        let e2el = ttft + gaps.iter().sum::<Duration>();
        Timing { ttft, e2el, output_tokens: gaps.len() as u64 + 1, prompt_tokens: Some(5), gaps }
    }

    #[test]
    fn failures_are_counted_by_reason_and_never_enter_a_latency() {
        let samples = vec![
            sample(0, Ok(timing(10, &[5, 7]))),
            sample(1, Err(Failure::Status(503))),
            sample(2, Ok(timing(30, &[]))),
            sample(3, Err(Failure::Status(503))),
            sample(4, Err(Failure::Cut)),
        ];
        let run = Run { samples, duration: Duration::from_secs(2) };
        let tally = Tally::of(&run, &small_workload());
        let class = &tally.classes[0];
        assert_eq!((class.sent, class.completed, class.failures()), (5, 2, 3));
        assert_eq!(class.failed, BTreeMap::from([(Failure::Status(503), 2), (Failure::Cut, 1)]));
        assert_eq!((class.ttft.mean(), class.ttft.count()), (20.0, 2));
        assert_eq!((class.itl.mean(), class.itl.count()), (6.0, 2));
        // One token has no time per token.
        assert_eq!((class.tpot.mean(), class.tpot.count()), (6.0, 1));
        assert_eq!((class.prompt_tokens, class.output_tokens), (10, 4));
        assert_eq!(tally.per_second(class.completed), 1.0);
        assert_eq!(ClassTally { name: "all".into(), ..class.clone() }, tally.all);
    }

    proptest! {
        #[test]
        fn a_percentile_lies_between_the_ends_and_grows(
            values in proptest::collection::vec(0.0..1e6, 1..50),
            p in 0.0..100.0,
            q in 0.0..100.0,
        ) {
            let summary = Summary::of(values);
            let (low, high) = if p < q { (p, q) } else { (q, p) };
            prop_assert!(summary.percentile(0.0) <= summary.percentile(low));
            prop_assert!(summary.percentile(low) <= summary.percentile(high) + 1e-9);
            prop_assert!(summary.percentile(high) <= summary.max() + 1e-9);
        }
    }
}
