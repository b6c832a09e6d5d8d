//! Compares two results: the change from A to B, how certain that is, and whether it matters.
//!
//! Each metric has both values, the change with an interval, and a verdict by
//! [`stats::compare`](sluice_core::stats::compare): better, worse, no difference (the whole
//! interval is inside the margin), or undecided. If the loads differ, there is no verdict. The
//! intervals account for requests that are correlated within a run. All intervals together hold
//! with [`CompareOptions::confidence`], because Bonferroni's correction widens each, for
//! [`INDEPENDENT_METRICS`] intervals of each class.
//!
//! | metric | change | interval from |
//! |---|---|---|
//! | completed requests, output tokens per second | ratio | counts in the inner [`WINDOWS`] |
//! | failed; within objectives | difference | Wilson, effective number of requests |
//! | P50 and P99 of TTFT, TPOT, ITL, E2EL | ratio | order statistics, effective number of values |
//!
//! If order statistics give no bound, the interval comes from consecutive sections of the run and
//! is marked as approximate ([`ComparedMetric::rough`]). Only completed requests have latencies, so
//! a run with more failures can look faster. So the row of failures comes first. The intervals
//! cannot account for the age of the server, for caches or for the machine, so a comparison should
//! be repeated.

use serde::Serialize;
use serde_json::{Value, json};

use super::differences::{Differences, differences};
use crate::result::record::{Outcome, Record, RunConfig, RunResult};
use crate::result::slices::SliceBy;
use sluice_core::stats::compare::each_of;
use sluice_core::stats::{Change, Estimate, Sense, Verdict, mean, proportion, quantile};

/// Number of windows in which completed requests are counted. The first and the last window do not
/// count for the interval.
pub const WINDOWS: usize = 10;
/// Number of metrics that are treated as independent. With this number, two runs of the same
/// configuration are called different in about 1 of 20 comparisons, which a test checks.
pub const INDEPENDENT_METRICS: usize = 5;
/// Approximate limit on gaps between tokens; of more, every n-th is used.
const MOST_GAPS: usize = 1_000_000;

/// Options of a comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompareOptions {
    /// Confidence of all intervals together, in (0, 1).
    pub confidence: f64,
    /// Largest relative change of a rate or latency that does not matter.
    pub margin: f64,
    /// Largest difference of shares of requests that does not matter.
    pub points: f64,
}

impl Default for CompareOptions {
    fn default() -> Self {
        Self { confidence: 0.95, margin: 0.05, points: 0.01 }
    }
}

/// The unit of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Per second.
    PerSecond,
    /// Share of requests.
    Share,
    /// A latency in seconds.
    Seconds,
}

/// One metric of both results.
#[derive(Clone, Debug, PartialEq)]
pub struct ComparedMetric {
    /// Name of the metric.
    pub name: String,
    /// The unit of the values and intervals.
    pub unit: Unit,
    /// The value in A, with an interval.
    pub a: Estimate,
    /// The value in B, with an interval.
    pub b: Estimate,
    /// The change from A to B: a share of A, or a difference for [`Unit::Share`].
    pub change: Change,
    /// The verdict.
    pub verdict: Verdict,
    /// Whether the interval is approximate, because the values are too few or too strongly
    /// clustered.
    pub rough: bool,
}

/// Two results side by side.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Every metric that both results have.
    pub rows: Vec<ComparedMetric>,
    /// Differences of the loads, as sentences. If there is one, there is no verdict.
    pub loads: Vec<String>,
    /// Other differences, as sentences.
    pub notes: Vec<String>,
    /// The options of the comparison.
    pub options: CompareOptions,
}

/// Why two results cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// The file has only summary statistics, which give no interval.
    #[error(
        "result {0} has only totals, not each request, so its uncertainty is unknown; save it with --save-detailed"
    )]
    NoRequests(char),
    /// No request completed.
    #[error("result {0} has no completed request")]
    NothingCompleted(char),
}

/// Estimates a metric at a confidence. The flag marks an approximate interval.
type Estimator = Box<dyn Fn(&RunResult, f64) -> (Estimate, bool)>;

struct MetricSpec {
    name: String,
    unit: Unit,
    sense: Sense,
    estimate: Estimator,
}

/// Compares `b` with `a`, and each class with a completed request in both.
pub fn compare(a: &RunResult, b: &RunResult, options: CompareOptions) -> Result<Comparison, CompareError> {
    for (name, result) in [('A', a), ('B', b)] {
        if result.requests.is_empty() {
            return Err(CompareError::NoRequests(name));
        }
        if !result.requests.iter().any(Record::is_completed) {
            return Err(CompareError::NothingCompleted(name));
        }
    }
    // If the classes of the two gateways differ, the same name may mean other requests.
    let by = if a.config.gateway_classes == b.config.gateway_classes { SliceBy::Class } else { SliceBy::Load };
    let classes = classes(a, b, by);
    let confidence = each_of(INDEPENDENT_METRICS * classes.len().max(1), options.confidence);
    let mut rows = rows(a, b, None, confidence, options);
    for name in classes {
        rows.extend(self::rows(&of_class(a, by, name), &of_class(b, by, name), Some(name), confidence, options));
    }
    let Differences { load, other } = differences(a, b);
    Ok(Comparison { rows, loads: load, notes: notes(a, b, other), options })
}

fn rows(
    a: &RunResult,
    b: &RunResult,
    class: Option<&str>,
    confidence: f64,
    options: CompareOptions,
) -> Vec<ComparedMetric> {
    let compared = |pair: MetricSpec| {
        let [(a, rough), (b, rough_too)] = [a, b].map(|result| (pair.estimate)(result, confidence));
        let (change, margin) = match pair.unit {
            Unit::Share => (Change::difference(&a, &b), options.points),
            _ => (Change::ratio(&a, &b), options.margin),
        };
        let verdict = change.verdict(pair.sense, margin);
        ComparedMetric { name: pair.name, unit: pair.unit, a, b, change, verdict, rough: rough || rough_too }
    };
    pairs(a, b, class).into_iter().map(compared).collect()
}

fn classes<'a>(a: &'a RunResult, b: &'a RunResult, by: SliceBy) -> Vec<&'a str> {
    let names = |run: &'a RunResult| by.names(run, Record::is_completed);
    let (mut own, other) = (names(a), names(b));
    let has_several = [a, b].iter().any(|run| by.names(run, |_| true).len() > 1);
    own.retain(|name| has_several && other.contains(name));
    own
}

fn of_class(run: &RunResult, by: SliceBy, name: &str) -> RunResult {
    let requests = run.requests.iter().filter(|record| by.name_of(record, run) == Some(name)).cloned().collect();
    RunResult { config: run.config.clone(), duration: run.duration, requests, ..RunResult::default() }
}

/// The metrics of two results, or of one class in both. A class has no throughputs and token gaps,
/// because they describe servers.
fn pairs(a: &RunResult, b: &RunResult, class: Option<&str>) -> Vec<MetricSpec> {
    let pair = |name: &str, unit, sense, estimate: Estimator| {
        let name = class.map_or_else(|| name.to_owned(), |class| format!("{class}: {name}"));
        MetricSpec { name, unit, sense, estimate }
    };
    let mut pairs = Vec::new();
    if [a, b].iter().any(|run| run.requests.iter().any(Record::is_failed)) {
        let estimate: Estimator = Box::new(|run, level| (failed(run, level), false));
        pairs.push(pair("failed", Unit::Share, Sense::LowerIsBetter, estimate));
    }
    if class.is_none() {
        let completed = |run: &RunResult, level| (rate(run, |_| 1, level), false);
        pairs.push(pair("requests/s", Unit::PerSecond, Sense::HigherIsBetter, Box::new(completed)));
    }
    if class.is_none() && [a, b].iter().all(|run| !run.requests.iter().any(Record::is_uncounted)) {
        let tokens = |run: &RunResult, level| (rate(run, |record| record.output_tokens.unwrap_or(0), level), false);
        pairs.push(pair("output tokens/s", Unit::PerSecond, Sense::HigherIsBetter, Box::new(tokens)));
    }
    if a.config.has_slo() && same_objectives(&a.config, &b.config) {
        let met = |run: &RunResult, level| (within_objectives(run, level), false);
        pairs.push(pair("within objectives", Unit::Share, Sense::HigherIsBetter, Box::new(met)));
    }
    for (measure, values) in MEASURES.into_iter().filter(|(measure, _)| class.is_none() || *measure != "ITL") {
        if [a, b].iter().all(|run| !values(run).is_empty()) {
            for (label, q) in [("P50", 0.5), ("P99", 0.99)] {
                let estimate = move |run: &RunResult, level| latency(&values(run), q, level);
                let name = format!("{measure} {label}");
                pairs.push(pair(&name, Unit::Seconds, Sense::LowerIsBetter, Box::new(estimate)));
            }
        }
    }
    pairs
}

fn same_objectives(a: &RunConfig, b: &RunConfig) -> bool {
    let of = |config: &RunConfig| (config.slo, config.classes.iter().map(|class| class.slo).collect::<Vec<_>>());
    of(a) == of(b)
}

/// The values of a measure in seconds: requests in the order of sending, gaps in the order of their
/// ends.
type Values = fn(&RunResult) -> Vec<f64>;

const MEASURES: [(&str, Values); 4] = [
    ("TTFT", |run| completed(run).map(|record| record.ttft).collect()),
    ("TPOT", |run| completed(run).filter_map(Record::tpot).collect()),
    ("ITL", gaps),
    ("E2EL", |run| completed(run).map(|record| record.latency).collect()),
];

fn completed(run: &RunResult) -> impl Iterator<Item = &Record> {
    in_order(run).into_iter().filter(|record| record.is_completed())
}

fn gaps(run: &RunResult) -> Vec<f64> {
    let count: usize = completed(run).map(|record| record.itls.len()).sum();
    let mut gaps = Vec::new();
    for record in completed(run).step_by(count.div_ceil(MOST_GAPS).max(1)) {
        let mut at = record.sent + record.ttft;
        for gap in &record.itls {
            at += gap;
            gaps.push((at, *gap));
        }
    }
    gaps.sort_by(|a, b| a.0.total_cmp(&b.0));
    gaps.into_iter().map(|(_, gap)| gap).collect()
}

fn in_order(run: &RunResult) -> Vec<&Record> {
    let judged = |record: &&Record| matches!(record.outcome, Outcome::Completed | Outcome::Failed(_));
    let mut requests: Vec<&Record> = run.requests.iter().filter(judged).collect();
    requests.sort_by(|a, b| a.sent.total_cmp(&b.sent));
    requests
}

fn failed(run: &RunResult, confidence: f64) -> Estimate {
    let hits: Vec<bool> = in_order(run).into_iter().map(Record::is_failed).collect();
    proportion::of_series(&hits, confidence)
}

fn within_objectives(run: &RunResult, confidence: f64) -> Estimate {
    let requests = in_order(run);
    let hits: Vec<bool> = requests.iter().map(|record| record.meets(run.config.slo_of(record.class))).collect();
    // A failed request counts as slower than any completed request.
    let latencies: Vec<f64> =
        requests.iter().map(|record| if record.is_completed() { record.latency } else { f64::MAX }).collect();
    proportion::of_series_with(&hits, &latencies, confidence)
}

/// A percentile, and whether the interval is approximate.
fn latency(values: &[f64], q: f64, confidence: f64) -> (Estimate, bool) {
    let sure = quantile::of_series(values, q, confidence);
    if sure.is_bounded() {
        return (sure, false);
    }
    let rough = quantile::sectioned(values, q, confidence);
    let low = if sure.low.is_finite() { sure.low } else { rough.low };
    let high = if sure.high.is_finite() { sure.high } else { rough.high };
    (Estimate { value: sure.value, low, high }, true)
}

/// The sum of `of` over completed requests, per second of the whole run.
fn rate(run: &RunResult, of: impl Fn(&Record) -> u64, confidence: f64) -> Estimate {
    let length = run.duration / WINDOWS as f64;
    if length <= 0.0 {
        return mean::of_series(&[], confidence);
    }
    let mut windows = [0.0; WINDOWS];
    for record in run.requests.iter().filter(|record| record.is_completed()) {
        let ended = if record.ended > 0.0 { record.ended } else { record.sent + record.latency };
        windows[((ended / length) as usize).min(WINDOWS - 1)] += of(record) as f64;
    }
    let value = windows.iter().sum::<f64>() / run.duration;
    // The load generator draws the arrivals of an open loop, so their randomness is not the
    // server's. Only the difference of completions and arrivals in a window counts.
    if run.config.request_rate.is_some() {
        let each = windows.iter().sum::<f64>() / run.requests.len().max(1) as f64;
        for record in &run.requests {
            let due = record.due.unwrap_or(record.sent).max(0.0);
            windows[((due / length) as usize).min(WINDOWS - 1)] -= each;
        }
    }
    let rates = windows.map(|count| count / length);
    // The first and last window (ramp-up, drain) are not random.
    let middle = mean::of_series(&rates[1..WINDOWS - 1], confidence);
    let reach = middle.high - middle.value;
    Estimate { value, low: value - reach, high: value + reach }
}

fn notes(a: &RunResult, b: &RunResult, differences: Vec<String>) -> Vec<String> {
    let mut notes: Vec<String> =
        differences.into_iter().map(|found| format!("the runs were configured differently: {found}")).collect();
    if a.config.has_slo() && b.config.has_slo() && !same_objectives(&a.config, &b.config) {
        notes.push("the objectives differ, so the shares within them are not compared".to_owned());
    }
    notes.extend(prefix_caches(a, b));
    for (name, run) in [('A', a), ('B', b)] {
        notes.extend(run.warnings.iter().map(|warning| format!("{name}: {warning}")));
    }
    notes
}

fn prefix_caches(a: &RunResult, b: &RunResult) -> Option<String> {
    let found = |run: &RunResult| {
        let cached: u64 = run.requests.iter().map(|record| record.cached_tokens).sum::<Option<u64>>()?;
        let sent: u64 = run.requests.iter().map(|record| record.prompt_tokens).sum();
        Some(cached as f64 / sent.max(1) as f64)
    };
    if let (Some(was), Some(is)) = (found(a), found(b)) {
        let text =
            format!("{:.0} % of the prompt tokens were in prefix caches in A and {:.0} % in B", was * 1e2, is * 1e2);
        return ((was - is).abs() > 0.05).then_some(text);
    }
    let empties = |run: &RunResult| run.config.arguments.iter().any(|flag| flag == "--reset-prefix-cache");
    let same = !a.config.version.is_empty() && a.config.seed == b.config.seed && a.config.urls == b.config.urls;
    (same && !a.requests.is_empty() && !(empties(a) && empties(b))).then(|| {
        "both runs sent the same prompts to the same servers: unless these were restarted in between, the later run found them \
         in the prefix caches (--reset-prefix-cache empties these)"
            .to_owned()
    })
}

impl Comparison {
    fn with(&self, verdict: Verdict) -> Vec<&str> {
        self.rows.iter().filter(|row| row.verdict == verdict).map(|row| row.name.as_str()).collect()
    }

    /// The verdict in a word: `better`, `worse`, `mixed`, `no difference`, `undecided`,
    /// `loads differ`.
    pub fn word(&self) -> &'static str {
        if !self.loads.is_empty() {
            return "loads differ";
        }
        let any = |verdict| !self.with(verdict).is_empty();
        match (any(Verdict::Better), any(Verdict::Worse), any(Verdict::Undecided)) {
            (true, true, _) => "mixed",
            (true, false, _) => "better",
            (false, true, _) => "worse",
            (false, false, true) => "undecided",
            (false, false, false) => "no difference",
        }
    }

    /// The verdict on a row; `-` if the loads differ.
    pub fn verdict_on(&self, row: &ComparedMetric) -> &'static str {
        if self.loads.is_empty() { verdict_word(row.verdict) } else { "-" }
    }

    /// The verdict in words.
    pub fn verdict(&self) -> String {
        if !self.loads.is_empty() {
            return format!(
                "The loads differ, so neither run is better or worse: {}. Repeat one of them with the load of the other.",
                self.loads.join("; ")
            );
        }
        let list = |verdict| self.with(verdict).join(", ");
        let (better, worse, open) = (list(Verdict::Better), list(Verdict::Worse), list(Verdict::Undecided));
        let margin = format!("within ±{:.3} %", self.options.margin * 100.0);
        let margin = margin.replace(".000", "");
        let mut text = match self.word() {
            "mixed" => format!("B is better in {better} and worse in {worse}."),
            "better" => format!("B is better in {better}."),
            "worse" => format!("B is worse in {worse}."),
            "undecided" => "No difference was found.".to_owned(),
            _ => format!("No difference: every change is {margin}."),
        };
        if !open.is_empty() {
            text.push_str(&format!(
                " These runs are too short to decide {open}: the interval includes both no change and one that matters."
            ));
        }
        text
    }

    /// The comparison as JSON.
    pub fn json(&self) -> Value {
        let json_of = |row: &ComparedMetric| {
            let ComparedMetric { name, unit, a, b, change: Change(change), rough, .. } = row;
            let verdict = self.verdict_on(row);
            json!({ "name": name, "unit": unit, "a": a, "b": b, "change": change, "verdict": verdict, "rough": rough })
        };
        let rows: Vec<Value> = self.rows.iter().map(json_of).collect();
        json!({
            "verdict": self.word(),
            "text": self.verdict(),
            "confidence": self.options.confidence,
            "margin": self.options.margin,
            "margin_points": self.options.points,
            "rows": rows,
            "loads_differ": self.loads,
            "notes": self.notes,
        })
    }
}

fn verdict_word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Better => "better",
        Verdict::Worse => "worse",
        Verdict::NoDifference => "no difference",
        Verdict::Undecided => "undecided",
    }
}

#[cfg(test)]
mod tests;
