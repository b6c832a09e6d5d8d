//! A load of a rate search as a line of the journal, so that an interrupted search continues.
//!
//! The line has everything that the search keeps of a load: verdict, attainment, throughput, and
//! the counts for the curve. Rates are in requests per second, times in seconds.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::trial::Range;
use sluice_bench::search::{RatePoint, TrialKind, TrialLoad, TrialRecord, TrialReport, TrialStats, TrialVerdict};

/// A line of the journal. Its only key, `load`, distinguishes it from a trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoadLine {
    load: Load,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Load {
    /// The setting, by [`identity`](crate::setting::identity).
    of: Value,
    sent: Sent,
    kind: Kind,
    holds: bool,
    requests: usize,
    group: usize,
    attainment: Range,
    throughput: Range,
    delivered: f64,
    seconds: f64,
    /// Rate, requests, misses and design effect of each group.
    points: Vec<[f64; 4]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Sent {
    Stream,
    Saturated(usize),
    Rate(f64),
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Look,
    Sample,
    Proof,
}

impl LoadLine {
    /// The beginning of each such line.
    pub(crate) const BEGINS: &'static str = "{\"load\":";

    pub(crate) fn new(of: Value, record: &TrialRecord) -> Self {
        let report = &record.report;
        let sent = match report.load {
            TrialLoad::Stream => Sent::Stream,
            TrialLoad::Saturated(streams) => Sent::Saturated(streams),
            TrialLoad::Rate(rate) => Sent::Rate(rate),
        };
        let kind = match report.kind {
            TrialKind::Look => Kind::Look,
            TrialKind::Sample => Kind::Sample,
            TrialKind::Proof => Kind::Proof,
        };
        let load = Load {
            of,
            sent,
            kind,
            holds: report.verdict == TrialVerdict::Holds,
            requests: report.requests,
            group: report.group,
            attainment: report.attainment.into(),
            throughput: report.stats.throughput.into(),
            delivered: report.stats.delivered,
            seconds: report.stats.seconds,
            points: record.points.iter().map(|p| [p.rate, p.requests, p.misses, p.effect]).collect(),
        };
        Self { load }
    }

    /// Whether the load belongs to the setting `of`.
    pub(crate) fn is_of(&self, of: &Value) -> bool {
        self.load.of == *of
    }

    pub(crate) fn record(&self) -> TrialRecord {
        let Load { sent, kind, holds, requests, group, attainment, throughput, delivered, seconds, .. } = self.load;
        let load = match sent {
            Sent::Stream => TrialLoad::Stream,
            Sent::Saturated(streams) => TrialLoad::Saturated(streams),
            Sent::Rate(rate) => TrialLoad::Rate(rate),
        };
        let kind = match kind {
            Kind::Look => TrialKind::Look,
            Kind::Sample => TrialKind::Sample,
            Kind::Proof => TrialKind::Proof,
        };
        let verdict = if holds { TrialVerdict::Holds } else { TrialVerdict::Fails };
        let stats = TrialStats { throughput: throughput.into(), delivered, seconds };
        let report = TrialReport { load, kind, verdict, requests, group, attainment: attainment.into(), stats };
        let point = |[rate, requests, misses, effect]: &[f64; 4]| RatePoint {
            rate: *rate,
            requests: *requests,
            misses: *misses,
            effect: *effect,
        };
        TrialRecord { report, points: self.load.points.iter().map(point).collect() }
    }
}
