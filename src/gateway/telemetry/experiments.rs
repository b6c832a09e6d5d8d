//! Metrics of experiments: state, measurements of each arm, and conclusions.
//!
//! Latencies and tokens of an arm are in the families of requests, by their label `arm`. The
//! metrics here are read at scrape time from the reports of the experiments: numbers that survive a
//! restart of the gateway, and intervals that hold at all times.
//!
//! Bounds: at most 16 experiments of 8 arms each.

use super::exposition::Page;
use super::families::{self, Family};
use crate::experiment::report::{ArmReport, ChangeReport};
use crate::experiment::{Conclusion, ExperimentReport, Phase};

type ArmValue = fn(&ArmReport) -> f64;
const ARMS: [(Family, ArmValue); 6] = [
    (families::ARM_REQUESTS, |arm| arm.requests as f64),
    (families::ARM_FAILURES, |arm| arm.failed as f64),
    (families::ARM_SLO_MISSES, |arm| arm.missed.0 as f64),
    (families::ARM_FALLBACKS, |arm| arm.fell_back as f64),
    (families::ARM_REFUSALS, |arm| arm.quality.refused as f64),
    (families::ARM_STOPPED, |arm| f64::from(u8::from(arm.stopped.is_some()))),
];

pub(super) const FAMILIES: [Family; 14] = [
    families::EXPERIMENT_STATE,
    families::EXPERIMENT_EXPOSURE,
    families::ARM_REQUESTS,
    families::ARM_FAILURES,
    families::ARM_SLO_MISSES,
    families::ARM_FALLBACKS,
    families::ARM_REFUSALS,
    families::ARM_STOPPED,
    families::ARM_ANSWERS,
    families::ARM_RATINGS,
    families::ARM_CHANGE,
    families::ARM_CONCLUSION,
    families::COPIES,
    families::COPIES_IN_FLIGHT,
];

pub(super) fn add(reports: &[ExperimentReport], page: &mut Page) {
    for report in reports {
        let states = [Phase::Running, Phase::Stopped, Phase::Promoted(0)].map(Phase::label);
        page.add_states(&families::EXPERIMENT_STATE, &[&report.name], states, &report.phase);
        page.add(&families::EXPERIMENT_EXPOSURE, &[&report.name], report.exposure);
        for arm in &report.arms {
            add_arm(&format!("{}/{}", report.name, arm.name), arm, page);
        }
        for comparison in &report.comparisons {
            let label = format!("{}/{}", report.name, comparison.arm);
            comparison.changes.iter().for_each(|change| add_change(&label, change, page));
            let words = |conclusion: Conclusion| conclusion.words().replace(' ', "_");
            let all = Conclusion::ALL.map(words);
            let current = words(comparison.conclusion);
            page.add_states(&families::ARM_CONCLUSION, &[&label], all.iter().map(String::as_str), &current);
        }
    }
}

fn add_arm(label: &str, arm: &ArmReport, page: &mut Page) {
    for (family, read) in &ARMS {
        page.add(family, &[label], read(arm));
    }
    for (reason, count) in &arm.quality.finish {
        page.add(&families::ARM_ANSWERS, &[label, reason.label()], *count as f64);
    }
    let (bad, all) = arm.quality.bad_ratings;
    for (rating, count) in [("good", all - bad), ("bad", bad)] {
        page.add(&families::ARM_RATINGS, &[label, rating], count as f64);
    }
    let Some(copies) = &arm.copies else { return };
    page.add(&families::COPIES_IN_FLIGHT, &[label], copies.in_flight.into());
    for (outcome, count) in &copies.ended {
        page.add(&families::COPIES, &[label, outcome.label()], *count as f64);
    }
}

/// Adds a change on which the verdict rests, if it is bounded.
fn add_change(label: &str, change: &ChangeReport, page: &mut Page) {
    let Some(range) = change.change.filter(|_| change.conclusion.is_some()) else { return };
    let Some((low, high)) = range.low.zip(range.high) else { return };
    let quantity = change.quantity.label().to_lowercase();
    for (bound, value) in [("value", range.value), ("low", low), ("high", high)] {
        page.add(&families::ARM_CHANGE, &[label, &quantity, bound], value);
    }
}
