//! Metrics of experiments: state, measurements of each arm, and conclusions.
//!
//! Latencies and tokens of an arm are in the families of requests, by their label `arm`. The
//! metrics here are read at scrape time from the reports of the experiments: numbers that survive a
//! restart of the gateway, and intervals that hold at all times. A removed experiment is absent
//! from the next page.
//!
//! Bounds: at most 16 experiments of 8 arms each.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Metric, MetricFamily, MetricType};

use super::exposition::{describe, family_of};
use super::families::{self, Family, MetricKind};
use super::gauges::{counter_of, gauge};
use crate::experiment::report::{ArmReport, ChangeReport};
use crate::experiment::{Conclusion, ExperimentReport, Phase};

/// Families per arm, each with a function that reads the value.
type ArmValue = fn(&ArmReport) -> f64;
const ARMS: [(Family, ArmValue); 7] = [
    (families::ARM_REQUESTS, |arm| arm.requests as f64),
    (families::ARM_FAILURES, |arm| arm.failed as f64),
    (families::ARM_SLO_MISSES, |arm| arm.missed.0 as f64),
    (families::ARM_FALLBACKS, |arm| arm.fell_back as f64),
    (families::ARM_REFUSALS, |arm| arm.quality.refused as f64),
    (families::ARM_STOPPED, |arm| f64::from(u8::from(arm.stopped.is_some()))),
    (families::COPIES_IN_FLIGHT, |arm| arm.copies.as_ref().map_or(0.0, |copies| copies.in_flight.into())),
];

pub(super) struct Experiments<F> {
    view: F,
    descs: Vec<Desc>,
}

impl<F: Fn() -> Vec<ExperimentReport> + Send + Sync> Experiments<F> {
    pub(super) fn new(view: F) -> Self {
        let others = [
            families::EXPERIMENT_STATE,
            families::EXPERIMENT_EXPOSURE,
            families::ARM_ANSWERS,
            families::ARM_RATINGS,
            families::ARM_CHANGE,
            families::ARM_CONCLUSION,
            families::COPIES,
        ];
        let descs = ARMS.iter().map(|(family, _)| family).chain(&others).map(describe).collect();
        Self { view, descs }
    }
}

impl<F: Fn() -> Vec<ExperimentReport> + Send + Sync> Collector for Experiments<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let reports = (self.view)();
        let arms: Vec<(String, &ArmReport)> = reports
            .iter()
            .flat_map(|report| report.arms.iter().map(|arm| (format!("{}/{}", report.name, arm.name), arm)))
            .collect();
        let per_arm = ARMS.iter().map(|(family, read)| {
            // An arm with units has no copies.
            let has_copies = |arm: &ArmReport| *family != families::COPIES_IN_FLIGHT || arm.copies.is_some();
            let shown = arms.iter().filter(|(_, arm)| has_copies(arm));
            page(family, shown.map(|(label, arm)| metric(family, &[label], read(arm))).collect())
        });
        let all = [
            page(&families::EXPERIMENT_STATE, reports.iter().flat_map(states).collect()),
            page(
                &families::EXPERIMENT_EXPOSURE,
                reports.iter().map(|one| gauge(&families::EXPERIMENT_EXPOSURE, &[&one.name], one.exposure)).collect(),
            ),
            page(&families::ARM_ANSWERS, arms.iter().flat_map(|(label, arm)| answers(label, arm)).collect()),
            page(&families::ARM_RATINGS, arms.iter().flat_map(|(label, arm)| ratings(label, arm)).collect()),
            page(&families::ARM_CHANGE, reports.iter().flat_map(changes).collect()),
            page(&families::ARM_CONCLUSION, reports.iter().flat_map(conclusions).collect()),
            page(&families::COPIES, arms.iter().flat_map(|(label, arm)| copies(label, arm)).collect()),
        ];
        per_arm.chain(all).flatten().collect()
    }
}

fn page(family: &Family, metrics: Vec<Metric>) -> Option<MetricFamily> {
    let kind = if family.kind == MetricKind::Counter { MetricType::COUNTER } else { MetricType::GAUGE };
    family_of(family, kind, metrics)
}

fn metric(family: &Family, labels: &[&str], value: f64) -> Metric {
    if family.kind == MetricKind::Counter { counter_of(family, labels, value) } else { gauge(family, labels, value) }
}

fn states(report: &ExperimentReport) -> Vec<Metric> {
    let all = [Phase::Running, Phase::Stopped, Phase::Promoted(0)].map(Phase::label);
    let value = |state: &str| f64::from(u8::from(report.phase == state));
    all.map(|state| gauge(&families::EXPERIMENT_STATE, &[&report.name, state], value(state))).to_vec()
}

fn answers(label: &str, arm: &ArmReport) -> Vec<Metric> {
    let each = arm.quality.finish.iter();
    each.map(|(reason, count)| metric(&families::ARM_ANSWERS, &[label, reason.label()], *count as f64)).collect()
}

fn ratings(label: &str, arm: &ArmReport) -> Vec<Metric> {
    let (bad, all) = arm.quality.bad_ratings;
    let rated = [("good", all - bad), ("bad", bad)];
    rated.map(|(rating, count)| gauge(&families::ARM_RATINGS, &[label, rating], count as f64)).to_vec()
}

/// The changes on which the verdict rests, if they are bounded.
fn changes(report: &ExperimentReport) -> Vec<Metric> {
    let of_change = |label: &str, change: &ChangeReport| -> Vec<Metric> {
        let Some((range, (low, high))) = change
            .change
            .and_then(|range| Some((range, range.low.zip(range.high)?)))
            .filter(|_| change.conclusion.is_some())
        else {
            return Vec::new();
        };
        let quantity = change.quantity.label().to_lowercase();
        let bounds = [("value", range.value), ("low", low), ("high", high)];
        bounds.map(|(bound, value)| gauge(&families::ARM_CHANGE, &[label, &quantity, bound], value)).to_vec()
    };
    let arms = report.comparisons.iter().map(|one| (format!("{}/{}", report.name, one.arm), &one.changes));
    arms.flat_map(|(label, changes)| changes.iter().flat_map(|change| of_change(&label, change)).collect::<Vec<_>>())
        .collect()
}

fn conclusions(report: &ExperimentReport) -> Vec<Metric> {
    let of_arm = |arm: &str, conclusion: Conclusion| {
        let label = format!("{}/{arm}", report.name);
        Conclusion::ALL.map(|one| {
            let value = f64::from(u8::from(one == conclusion));
            gauge(&families::ARM_CONCLUSION, &[&label, &one.words().replace(' ', "_")], value)
        })
    };
    report.comparisons.iter().flat_map(|one| of_arm(&one.arm, one.conclusion)).collect()
}

fn copies(label: &str, arm: &ArmReport) -> Vec<Metric> {
    let ended = arm.copies.iter().flat_map(|copies| &copies.ended);
    ended.map(|(outcome, count)| metric(&families::COPIES, &[label, outcome.label()], *count as f64)).collect()
}
