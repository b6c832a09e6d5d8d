//! Cells and rows of the tables of a report: counts, percentiles, shares.
//!
//! TTFT and queue time are from all requests that have them. TPOT and E2EL are only from completed
//! requests, because a response that was cut off is short for the wrong reason.

use super::Entry;
use sluice_core::stats::quantile::percentile;

/// Approximate limit on the rows of a table by intervals shorter than an hour.
const ROWS: f64 = 100.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Interval {
    pub(super) seconds: f64,
    pub(super) name: &'static str,
}

impl Interval {
    /// The shortest interval with about [`ROWS`] rows or fewer, otherwise an hour. Records must be
    /// in the order of arrival.
    pub(super) fn of(entries: &[Entry]) -> Self {
        let span = entries.first().zip(entries.last()).map_or(0.0, |(first, last)| last.at - first.at);
        let hour = Self { seconds: 3_600.0, name: "hour" };
        let shorter = [Self { seconds: 60.0, name: "minute" }, Self { seconds: 600.0, name: "10 minutes" }];
        shorter.into_iter().find(|interval| span <= ROWS * interval.seconds).unwrap_or(hour)
    }

    pub(super) fn number(self, entry: &Entry) -> i64 {
        (entry.at / self.seconds).floor() as i64
    }

    pub(super) fn clock(self, number: i64) -> String {
        clock(number as f64 * self.seconds)[..16].to_owned()
    }
}

/// Date and time of day, UTC.
pub fn clock(at: f64) -> String {
    let time = jiff::Timestamp::from_microsecond((at * 1e6) as i64).unwrap_or_default();
    time.strftime("%Y-%m-%d %H:%M:%S").to_string()
}

pub(super) fn quantile(entries: &[&Entry], q: f64, of: impl Fn(&Entry) -> Option<f64>) -> Option<f64> {
    let mut values: Vec<f64> = entries.iter().filter_map(|entry| of(entry)).collect();
    values.sort_by(f64::total_cmp);
    (!values.is_empty()).then(|| percentile(&values, q))
}

pub(super) fn ttft(entries: &[&Entry], q: f64) -> Option<f64> {
    quantile(entries, q, |entry| entry.ttft)
}

pub(super) fn queue(entries: &[&Entry], q: f64) -> Option<f64> {
    quantile(entries, q, |entry| Some(entry.queue))
}

pub(super) fn e2el(entries: &[&Entry], q: f64) -> Option<f64> {
    quantile(entries, q, |entry| entry.e2el.filter(|_| entry.is_completed()))
}

fn tpot(entries: &[&Entry], q: f64) -> Option<f64> {
    quantile(entries, q, |entry| entry.tpot.filter(|_| entry.is_completed()))
}

pub(super) fn millis(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value < 10.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.0}"),
    }
}

pub(super) fn count(entries: &[&Entry], is: impl Fn(&Entry) -> bool) -> usize {
    entries.iter().filter(|entry| is(entry)).count()
}

pub(super) fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.0} %", 100.0 * part / whole) } else { "-".to_owned() }
}

pub(super) fn met(entries: &[&Entry]) -> String {
    let judged: Vec<bool> = entries.iter().filter_map(|entry| entry.met).collect();
    let good = judged.iter().filter(|met| **met).count();
    if judged.is_empty() { "-".to_owned() } else { format!("{:.1} %", 100.0 * good as f64 / judged.len() as f64) }
}

pub(super) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

const LATENCIES: &str = "requests,shed,failed,TTFT P50,P90,P99,queue P99,TPOT P50,P99,E2EL P50,P90,P99,objectives met";

pub(super) fn head(first: &[&str]) -> Vec<String> {
    first.iter().copied().chain(LATENCIES.split(',')).map(str::to_owned).collect()
}

pub(super) fn latencies(first: &[&str], entries: &[&Entry]) -> Vec<String> {
    let mut cells: Vec<String> = first.iter().map(|name| (*name).to_owned()).collect();
    cells.extend(
        [entries.len(), count(entries, Entry::is_shed), count(entries, Entry::is_broken)].map(|n| n.to_string()),
    );
    cells.extend([0.5, 0.9, 0.99].map(|q| millis(ttft(entries, q))));
    cells.extend([queue(entries, 0.99), tpot(entries, 0.5), tpot(entries, 0.99)].map(millis));
    cells.extend([0.5, 0.9, 0.99].map(|q| millis(e2el(entries, q))));
    cells.push(met(entries));
    cells
}
