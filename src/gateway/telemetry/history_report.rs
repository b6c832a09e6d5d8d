//! The history as it is shown. It has a row of numbers for each class, for each pool, and for each
//! pair of a class and a pool if the class ran in several pools.
//!
//! Latencies are in milliseconds, rounded to four digits, since bins are right within 5 %. Values
//! that were not measured are absent. `points` has one entry for each interval, oldest first.
//!
//! Bounds: the pairs of [`super::series`], and their classes and pools; about 5 KiB of JSON each.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::history::{History, INTERVALS, Resolution};
use super::span::{FirstTokens, Span};

const TAILS: [f64; 3] = [0.5, 0.9, 0.99];
const POINT: [f64; 2] = [0.5, 0.99];
const RATIOS: [f64; 3] = [0.05, 0.5, 0.95];
/// Quantile of TTFT from which a request is slow.
const SLOW: f64 = 0.95;

#[derive(Debug)]
pub(super) struct PairHistory {
    pub(super) class: Arc<str>,
    pub(super) pool: Arc<str>,
    pub(super) history: Mutex<History>,
}

/// The history by class and pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistoryReport {
    /// Length of an interval, seconds.
    pub interval_seconds: u64,
    /// Number of intervals.
    pub intervals: u64,
    /// The time that is covered, in seconds. Just after a start, it is less than all intervals.
    pub covered_seconds: f64,
    /// Requests by class, wherever they ran; class "" has requests that were refused before they
    /// had a class.
    pub classes: Vec<HistoryRow>,
    /// Requests by the pool in which they ran, or would have run.
    pub pools: Vec<HistoryRow>,
    /// Requests by class and pool, for classes that ran in several pools.
    pub pairs: Vec<HistoryRow>,
}

/// Requests of a class, of a pool, or of both.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistoryRow {
    /// The class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<Arc<str>>,
    /// The pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<Arc<str>>,
    /// Requests that completed.
    pub completed: u64,
    /// Requests that were refused early for want of capacity.
    pub shed: u64,
    /// Requests that a backend's failure or a timeout ended.
    pub failed: u64,
    /// Clients that left.
    pub client_gone: u64,
    /// Requests that were refused through the client's fault.
    pub refused: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generation_tokens: u64,
    /// Time to first token of streams.
    pub ttft_ms: Option<Tails>,
    /// Time between tokens of streams.
    pub itl_ms: Option<Tails>,
    /// Time per output token of completed requests.
    pub tpot_ms: Option<Tails>,
    /// End-to-end latency of completed requests.
    pub e2el_ms: Option<Tails>,
    /// Parts of the time before the first token.
    pub ttft_parts: Option<TtftParts>,
    /// Share of the requests with objectives that met all of them; a request that failed or was
    /// shed met none.
    pub attainment: Option<f64>,
    /// Estimated over actual length of prompts.
    pub estimate: Option<EstimateAccuracy>,
    /// Reasons why requests were shed or failed: outcome, detail, count.
    pub reasons: Vec<(String, String, u64)>,
    /// Reasons why attempts were repeated, with counts.
    pub retries: Vec<(String, u64)>,
    /// Values by interval.
    pub points: Points,
}

/// Quantiles, milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tails {
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 99th percentile.
    pub p99: f64,
}

/// The parts of TTFT, for three groups of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TtftParts {
    /// All streams.
    pub all: PartsOfGroup,
    /// The streams up to the median.
    pub typical: PartsOfGroup,
    /// The slowest 5 %, with their whole bin.
    pub slowest: PartsOfGroup,
}

/// Means, milliseconds; the four parts add up to `ttft`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartsOfGroup {
    /// Number of requests.
    pub count: u64,
    /// Time to first token.
    pub ttft: f64,
    /// Time in the queues of pools.
    pub queue: f64,
    /// Time to get a connection.
    pub connect: f64,
    /// Time from the request sent to the first token: the engine's queue and the prefill.
    pub backend: f64,
    /// The rest: reading and estimating, sending, failed attempts.
    pub other: f64,
}

/// Accuracy of the estimates of prompt lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EstimateAccuracy {
    /// Requests whose engine reported the actual length.
    pub count: u64,
    /// Share of the requests whose estimate was within 10 %.
    pub near: f64,
    /// Estimated over actual length: the 5th percentile.
    pub p5: f64,
    /// The median.
    pub p50: f64,
    /// The 95th percentile.
    pub p95: f64,
}

/// One entry for each interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Points {
    /// Requests that ended.
    pub requests: Vec<u64>,
    /// Requests that were shed or failed.
    pub lost: Vec<u64>,
    /// TTFT: P50 and P99.
    pub ttft_ms: Vec<Option<[f64; 2]>>,
    /// ITL.
    pub itl_ms: Vec<Option<[f64; 2]>>,
    /// TPOT.
    pub tpot_ms: Vec<Option<[f64; 2]>>,
    /// E2EL.
    pub e2el_ms: Vec<Option<[f64; 2]>>,
}

pub(super) fn report(pairs: &[Arc<PairHistory>], resolution: Resolution, at: Duration) -> HistoryReport {
    let (mut classes, mut pools) = (BTreeMap::new(), BTreeMap::new());
    let mut each = Vec::new();
    for pair in pairs {
        let mut spans = vec![Span::default(); INTERVALS as usize];
        pair.history.lock().add_to(&mut spans, resolution, at);
        add(classes.entry(Arc::clone(&pair.class)).or_default(), &spans);
        add(pools.entry(Arc::clone(&pair.pool)).or_default(), &spans);
        each.push((pair, spans));
    }
    let runs_elsewhere = |class: &Arc<str>| pairs.iter().filter(|other| other.class == *class).count() > 1;
    each.retain(|(pair, spans)| runs_elsewhere(&pair.class) && spans.iter().any(|span| span.ended() > 0));
    each.sort_by(|(a, _), (b, _)| (&a.class, &a.pool).cmp(&(&b.class, &b.pool)));
    let used = |(_, spans): &(Arc<str>, Vec<Span>)| spans.iter().any(|span| span.ended() > 0);
    let rows = |map: BTreeMap<Arc<str>, Vec<Span>>, row: fn(Arc<str>, &[Span]) -> HistoryRow| {
        map.into_iter().filter(used).map(|(name, spans)| row(name, &spans)).collect()
    };
    let whole = (INTERVALS - 1) * resolution.seconds() + at.as_secs() % resolution.seconds();
    HistoryReport {
        interval_seconds: resolution.seconds(),
        intervals: INTERVALS,
        covered_seconds: at.as_secs_f64().min(whole as f64 + f64::from(at.subsec_nanos()) / 1e9),
        classes: rows(classes, |class, spans| HistoryRow { class: Some(class), ..HistoryRow::new(spans) }),
        pools: rows(pools, |pool, spans| HistoryRow { pool: Some(pool), ..HistoryRow::new(spans) }),
        pairs: each
            .into_iter()
            .map(|(pair, spans)| HistoryRow {
                class: Some(Arc::clone(&pair.class)),
                pool: Some(Arc::clone(&pair.pool)),
                ..HistoryRow::new(&spans)
            })
            .collect(),
    }
}

fn add(sums: &mut Vec<Span>, spans: &[Span]) {
    sums.resize_with(spans.len(), Span::default);
    sums.iter_mut().zip(spans).for_each(|(sum, span)| sum.add(span));
}

impl HistoryRow {
    fn new(spans: &[Span]) -> Self {
        let mut all = Span::default();
        spans.iter().for_each(|span| all.add(span));
        let tails = |values: Option<Vec<f64>>| {
            let values = values?;
            Some(Tails { p50: short(values[0]), p90: short(values[1]), p99: short(values[2]) })
        };
        let share = |part: u32, whole: u32| (whole > 0).then(|| f64::from(part) / f64::from(whole));
        let [every, typical, slowest] = all.first_tokens(SLOW).map(PartsOfGroup::new);
        let mut reasons: Vec<_> = all
            .reasons
            .iter()
            .map(|(outcome, count)| (outcome.label().to_owned(), outcome.detail().to_owned(), u64::from(*count)))
            .collect();
        reasons.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.cmp(b)));
        Self {
            class: None,
            pool: None,
            completed: all.completed.into(),
            shed: all.shed.into(),
            failed: all.failed.into(),
            client_gone: all.client_gone.into(),
            refused: all.refused.into(),
            prompt_tokens: all.prompt,
            generation_tokens: all.generation,
            ttft_ms: tails(all.ttft(&TAILS)),
            itl_ms: tails(all.itl(&TAILS)),
            tpot_ms: tails(all.tpot(&TAILS)),
            e2el_ms: tails(all.e2el(&TAILS)),
            ttft_parts: (every.count > 0).then_some(TtftParts { all: every, typical, slowest }),
            attainment: share(all.met, all.judged),
            estimate: all.ratio(&RATIOS).map(|ratios| EstimateAccuracy {
                count: all.estimated.into(),
                near: share(all.near, all.estimated).unwrap_or(0.0),
                p5: short(ratios[0]),
                p50: short(ratios[1]),
                p95: short(ratios[2]),
            }),
            reasons,
            retries: all.retries.iter().map(|(reason, n)| (reason.label().to_owned(), u64::from(*n))).collect(),
            points: Points::new(spans),
        }
    }
}

impl PartsOfGroup {
    fn new(sums: FirstTokens) -> Self {
        let mean = |sum: f32| if sums.count == 0 { 0.0 } else { f64::from(sum) * 1e3 / f64::from(sums.count) };
        let [ttft, queue, connect, backend] = [sums.ttft, sums.queue, sums.connect, sums.backend].map(mean);
        Self {
            count: sums.count.into(),
            ttft: short(ttft),
            queue: short(queue),
            connect: short(connect),
            backend: short(backend),
            other: short((ttft - queue - connect - backend).max(0.0)),
        }
    }
}

impl Points {
    fn new(spans: &[Span]) -> Self {
        let pair = |values: Option<Vec<f64>>| values.map(|values| [short(values[0]), short(values[1])]);
        let each = |read: &dyn Fn(&Span) -> Option<Vec<f64>>| spans.iter().map(|span| pair(read(span))).collect();
        Self {
            requests: spans.iter().map(Span::ended).collect(),
            lost: spans.iter().map(|span| u64::from(span.shed + span.failed)).collect(),
            ttft_ms: each(&|span| span.ttft(&POINT)),
            itl_ms: each(&|span| span.itl(&POINT)),
            tpot_ms: each(&|span| span.tpot(&POINT)),
            e2el_ms: each(&|span| span.e2el(&POINT)),
        }
    }
}

fn short(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::super::testing::completed;
    use super::*;
    use crate::flow::Record;

    fn pair(class: &str, pool: &str) -> Arc<PairHistory> {
        let pair = PairHistory { class: class.into(), pool: pool.into(), history: Mutex::default() };
        let record = completed(Duration::from_millis(20), Duration::from_millis(5));
        let record = Record { backend_ttft: Some(Duration::from_millis(17)), ..record };
        pair.history.lock().add(&record, Duration::ZERO);
        Arc::new(pair)
    }

    #[test]
    fn classes_and_pools_are_summed_and_pairs_are_shown_where_a_class_ran_in_several_pools() {
        let pairs = [pair("long", "long"), pair("long", "short"), pair("short", "short"), pair("", "")];
        let report = report(&pairs, Resolution::Fine, Duration::from_secs(10));
        let names = |rows: &[HistoryRow]| -> Vec<(Option<String>, Option<String>, u64)> {
            let text = |name: &Option<Arc<str>>| name.as_ref().map(ToString::to_string);
            rows.iter().map(|row| (text(&row.class), text(&row.pool), row.completed)).collect()
        };
        let named = |name: &str| Some(name.to_owned());
        assert_eq!(names(&report.classes), [(named(""), None, 1), (named("long"), None, 2), (named("short"), None, 1)]);
        assert_eq!(names(&report.pools), [(None, named(""), 1), (None, named("long"), 1), (None, named("short"), 2)]);
        let pairs = [(named("long"), named("long"), 1), (named("long"), named("short"), 1)];
        assert_eq!(names(&report.pairs), pairs);
        assert_eq!(report.covered_seconds, 10.0);
        let row = &report.classes[1];
        let parts = row.ttft_parts.unwrap().all;
        let sum = parts.queue + parts.connect + parts.backend + parts.other;
        assert!((sum / parts.ttft - 1.0).abs() < 0.001 && parts.queue == 2.0 && parts.other == 0.7, "{parts:?}");
        assert_eq!(row.points.requests.iter().sum::<u64>(), 2);
        assert_eq!(row.points.ttft_ms.iter().flatten().count(), 1);
    }

    #[test]
    fn an_hour_later_there_are_no_rows() {
        let report = report(&[pair("a", "a")], Resolution::Coarse, Duration::from_secs(3_600));
        assert_eq!((report.classes.len(), report.pools.len(), report.pairs.len()), (0, 0, 0));
        assert_eq!(report.covered_seconds, 3_540.0);
    }

    #[test]
    fn values_are_rounded_to_four_digits() {
        let found = [0.0, 12.345_67, 98_765.4, 0.001_234_56, f64::INFINITY].map(short);
        assert_eq!(found, [0.0, 12.35, 98_770.0, 0.001_235, 0.0]);
    }
}
