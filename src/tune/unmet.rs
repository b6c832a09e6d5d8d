//! The outcome of a system that misses objectives at every rate: the objective missed by most, and
//! by how much.
//!
//! It is read from the last run, which had the lowest load. Requests cut off by the end of the run
//! do not count. Failed requests miss by [`NEVER`].

use crate::trial::{NEVER, Outcome};
use sluice_bench::{Outcome as Ended, Record, RunResult};
use sluice_core::stats::percentile;

/// The outcome after the run `last`. `group`: the requests that decided; empty: all.
pub(crate) fn unmet(last: Option<&RunResult>, group: String, attainment: f64) -> Outcome {
    let (class, objective, ratio) =
        last.and_then(|result| binding(result, attainment)).unwrap_or((String::new(), "E2EL", NEVER));
    Outcome::Unmet { group: if group.is_empty() { class } else { group }, objective: objective.to_owned(), ratio }
}

/// The class and the objective missed by most, and the measured quantile over the bound. `None`:
/// the unfinished requests decided.
fn binding(result: &RunResult, attainment: f64) -> Option<(String, &'static str, f64)> {
    let is_unfinished = |record: &Record| record.outcome == Ended::Unfinished;
    let mut worst: Option<(String, &'static str, f64)> = None;
    for (index, class) in (0..).zip(&result.config.classes) {
        let slo = result.config.slo_of(index);
        for (name, bound) in [("TTFT", slo.ttft), ("TPOT", slo.tpot), ("E2EL", slo.e2el)] {
            let Some(bound) = bound else { continue };
            let value = |record: &Record| match name {
                _ if !record.is_completed() => f64::INFINITY,
                "TTFT" => record.ttft,
                "TPOT" => record.tpot().unwrap_or(0.0),
                _ => record.latency,
            };
            let records = result.requests.iter().filter(|record| record.class == index && !is_unfinished(record));
            let mut values: Vec<f64> = records.map(|record| (value(record) * 1e3 / bound).min(NEVER)).collect();
            values.sort_by(f64::total_cmp);
            if !values.is_empty() {
                let ratio = percentile(&values, attainment);
                if worst.as_ref().is_none_or(|(.., other)| ratio > *other) {
                    worst = Some((class.name.clone(), name, ratio));
                }
            }
        }
    }
    worst.filter(|(.., ratio)| *ratio > 1.0 || !result.requests.iter().any(is_unfinished))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sluice_bench::result::record::ClassConfig;
    use sluice_bench::{RunConfig, Slo};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn the_binding_objective_is_the_one_that_is_missed_by_most(
            ttft in 10.0..2000.0f64, e2el in 10.0..2000.0f64, times in proptest::collection::vec(0.01..3.0f64, 1..60),
        ) {
            let slo = Slo { ttft: Some(ttft), e2el: Some(e2el), ..Slo::default() };
            let class = ClassConfig { name: "a".to_owned(), slo, ..ClassConfig::default() };
            let record = |time: &f64| Record {
                outcome: Ended::Completed, ttft: time / 2.0, latency: *time, ..Record::default()
            };
            let requests: Vec<Record> = times.iter().map(record).collect();
            let mut result = RunResult { config: RunConfig { classes: vec![class], ..RunConfig::default() }, requests, ..RunResult::default() };
            let longest = times.iter().copied().fold(0.0, f64::max) * 1e3;
            let (_, name, ratio) = binding(&result, 1.0).unwrap();
            let expected = f64::max(longest / 2.0 / ttft, longest / e2el);
            prop_assert!((ratio / expected - 1.0).abs() < 1e-9, "{} {}", ratio, expected);
            prop_assert_eq!(name == "TTFT", longest / 2.0 / ttft >= longest / e2el);
            // An unfinished request does not count, unless the others miss nothing.
            result.requests.push(Record { outcome: Ended::Unfinished, ..Record::default() });
            prop_assert_eq!(binding(&result, 1.0).map(|found| found.2), (ratio > 1.0).then_some(ratio));
            result.requests[0].outcome = Ended::Failed("status 503".into());
            prop_assert_eq!(binding(&result, 1.0).unwrap().2, NEVER);
        }
    }
}
