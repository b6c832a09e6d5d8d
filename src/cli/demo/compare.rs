//! The table of tail latencies, with a line as soon as an arrangement is measured, and the
//! verdict.
//!
//! Four numbers decide: P99 of TTFT and of E2EL, for short and for long requests, in milliseconds.
//! The verdict gives the ratio of the first to the last arrangement for each number. If requests
//! failed, the verdict says so instead, because percentiles are of completed requests.
//!
//! One run of 20 s has about 40 long requests, whose P99 is nearly the slowest of them. The table
//! demonstrates a pattern; it does not measure a machine.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Value, json};

use super::arrangement::Arrangement;
use crate::cli::terminal::wrapped;
use sluice_bench::result::slices::{self, SliceBy};
use sluice_bench::result::vllm_keys;
use sluice_bench::{Distribution, Metrics, RunResult};

/// Columns of the names, of each number, and of the count of failures; 78 in all.
const NAME: usize = 21;
const COLUMN: usize = 10;
const FAILED: usize = 7;
pub(super) const TEXT: usize = 79;
/// P99 of the lag of requests, in ms, above which the machine counts as too busy.
pub(super) const LATE_MS: f64 = 20.0;

pub(super) struct Row {
    pub(super) arrangement: Arrangement,
    /// All requests, with latencies from the due time of each.
    pub(super) all: Metrics,
    classes: Vec<(String, Metrics)>,
    failures: BTreeMap<String, u64>,
    json: Value,
}

pub(super) struct Comparison {
    pub(super) rows: Vec<Row>,
    pub(super) seconds: f64,
    pub(super) seed: u64,
}

struct Decider {
    name: &'static str,
    key: &'static str,
    class: &'static str,
    of: fn(&Metrics) -> &Distribution,
}

const DECIDERS: [Decider; 4] = [
    Decider { name: "short TTFT P99", key: "short_p99_ttft", class: "short", of: |class| &class.ttft },
    Decider { name: "short E2EL P99", key: "short_p99_e2el", class: "short", of: |class| &class.e2el },
    Decider { name: "long TTFT P99", key: "long_p99_ttft", class: "long", of: |class| &class.ttft },
    Decider { name: "long E2EL P99", key: "long_p99_e2el", class: "long", of: |class| &class.e2el },
];

impl Row {
    pub(super) fn of(arrangement: Arrangement, result: &RunResult) -> Self {
        // Latencies count from the due time of a request, because the user waits from then on.
        let seen = result.from_due();
        let lag = Metrics::of(result).lag;
        let failures = slices::failures(result).into_iter().map(|(reason, count)| (reason.to_owned(), count)).collect();
        let mut json = Value::Object(vllm_keys::metric_keys(&Metrics::of(&seen), &result.config));
        json["classes"] = slices::json(&seen, SliceBy::Class);
        Self {
            arrangement,
            all: Metrics { lag, ..Metrics::of(&seen) },
            classes: slices::slices(&seen, SliceBy::Class),
            failures,
            json,
        }
    }

    pub(super) fn late_ms(&self) -> f64 {
        self.all.lag.percentile(99.0) * 1e3
    }

    fn class(&self, name: &str) -> Option<&Metrics> {
        self.classes.iter().find(|(class, _)| class == name).map(|(_, metrics)| metrics)
    }

    /// Percentile `p` of one measure of one class, ms.
    fn percentile(&self, class: &str, of: fn(&Metrics) -> &Distribution, p: f64) -> Option<f64> {
        self.class(class).map(of).filter(|of| of.count() > 0).map(|of| of.percentile(p) * 1e3)
    }
}

impl Comparison {
    pub(super) fn failures(&self) -> u64 {
        self.rows.iter().map(|row| row.all.failed).sum()
    }

    /// The number of the first arrangement divided by the number of the last, for each of the four.
    /// `None` if they cannot be compared.
    fn ratios(&self) -> Option<[f64; 4]> {
        let (first, last) = (self.rows.first()?, self.rows.last()?);
        let mut ratios = [0.0; 4];
        for (ratio, decider) in ratios.iter_mut().zip(&DECIDERS) {
            let [before, after] = [first, last].map(|row| row.percentile(decider.class, decider.of, 99.0));
            *ratio = before? / after.filter(|after| *after > 0.0)?;
        }
        (self.failures() == 0).then_some(ratios)
    }

    fn verdict(&self) -> String {
        let names = self.rows.last().zip(self.rows.first());
        let Some((last, first)) = names.map(|(last, first)| (last.arrangement.label(), first.arrangement.label()))
        else {
            return "nothing was measured".to_owned();
        };
        let Some(ratios) = self.ratios() else {
            return match self.failures() {
                0 => "No verdict: a class of requests has no values; run longer with --seconds.".to_owned(),
                failures => format!("No verdict: {failures} requests failed, so the percentiles are not comparable."),
            };
        };
        let parts: Vec<String> =
            DECIDERS.iter().zip(ratios).map(|(decider, ratio)| format!("{} {}", decider.name, times(ratio))).collect();
        let worse: Vec<&str> = DECIDERS
            .iter()
            .zip(ratios)
            .filter(|(_, ratio)| !is_better(*ratio))
            .map(|(decider, _)| decider.name)
            .collect();
        let sum = if worse.is_empty() {
            "better in all four".to_owned()
        } else {
            format!("not better in {}", worse.join(", "))
        };
        format!("{last} against {first}: {}: {sum}.", parts.join(", "))
    }

    /// The verdict. A warning precedes it if requests were sent late, because that makes every
    /// number worse.
    pub(super) fn ending(&self) -> String {
        let late = self.rows.iter().map(Row::late_ms).fold(0.0, f64::max);
        let lateness = format!(
            "This machine was busy: requests were sent up to {late:.0} ms late (P99), which the latencies include.\n"
        );
        wrapped(&format!("{}{}", if late > LATE_MS { lateness.as_str() } else { "" }, self.verdict()), TEXT)
    }

    pub(super) fn json(&self) -> Value {
        let rows: Vec<Value> =
            self.rows.iter().map(|row| json!({ "arrangement": row.arrangement.label(), "result": row.json })).collect();
        let ratios = self.ratios();
        json!({
            "seconds": self.seconds,
            "seed": self.seed,
            "arrangements": rows,
            "ratios": ratios.map(|ratios| DECIDERS.iter().zip(ratios).map(|(decider, ratio)| (decider.key, ratio)).collect::<std::collections::BTreeMap<_, _>>()),
            "better_in_all": ratios.is_some_and(|ratios| ratios.into_iter().all(is_better)),
            "verdict": self.verdict(),
        })
    }
}

pub(super) fn head(first: &Row, seconds: f64, seed: u64) -> String {
    let count = |class| first.class(class).map_or(0, |class| class.sent);
    let names = DECIDERS.iter().map(|decider| decider.name);
    let columns: Vec<(&str, &str)> =
        std::iter::once("short TTFT P50").chain(names).filter_map(|name| name.split_once(' ')).collect();
    let (classes, measures): (Vec<&str>, Vec<&str>) = columns.into_iter().unzip();
    let above = line("", &[classes, vec![""]].concat());
    let below = line("arrangement", &[measures, vec!["failed"]].concat());
    format!(
        "{} short and {} long requests in {seconds} s, seed {seed},\nthe same for each arrangement; times in ms\n\n{above}\n{below}\n{}",
        count("short"),
        count("long"),
        "─".repeat(NAME + COLUMN * 5 + FAILED),
    )
}

fn line(name: &str, cells: &[impl AsRef<str>]) -> String {
    let mut text = format!("{name:<NAME$}");
    for (index, cell) in cells.iter().enumerate() {
        let width = if index + 1 == cells.len() { FAILED } else { COLUMN };
        text.push_str(&format!("{:>width$}", cell.as_ref()));
    }
    text
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cells = vec![millis(self.percentile("short", |class| &class.ttft, 50.0))];
        cells.extend(DECIDERS.iter().map(|decider| millis(self.percentile(decider.class, decider.of, 99.0))));
        cells.push(self.all.failed.to_string());
        f.write_str(&line(self.arrangement.label(), &cells))?;
        for (failure, count) in &self.failures {
            write!(f, "\n  {count} failed: {failure}")?;
        }
        Ok(())
    }
}

fn millis(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"))
}

/// Whether a ratio, or its inverse, is shown as 1.0.
fn is_same(ratio: f64) -> bool {
    (1.0 / 1.05..1.05).contains(&ratio)
}

fn is_better(ratio: f64) -> bool {
    ratio > 1.0 && !is_same(ratio)
}

/// A ratio in words: "10.9x lower", "1.3x higher", "the same".
fn times(ratio: f64) -> String {
    if is_same(ratio) {
        return "the same".to_owned();
    }
    if ratio >= 1.0 { format!("{ratio:.1}x lower") } else { format!("{:.1}x higher", 1.0 / ratio) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_bench::result::record::ClassConfig;
    use sluice_bench::{Outcome, Record, RunConfig};

    fn row(arrangement: Arrangement, short: (f64, f64), long: (f64, f64), failed: u64) -> Row {
        let record = |class, (ttft, e2el): (f64, f64)| Record {
            class,
            outcome: Outcome::Completed,
            ttft: ttft / 1e3,
            latency: e2el / 1e3,
            ..Record::default()
        };
        let mut requests = vec![record(0, short), record(1, long)];
        for _ in 0..failed {
            requests.push(Record { outcome: Outcome::Failed("status 503".into()), ..Record::default() });
        }
        let class = |name: &str| ClassConfig { name: name.into(), weight: 1.0, ..ClassConfig::default() };
        let config = RunConfig { classes: vec![class("short"), class("long")], ..RunConfig::default() };
        Row::of(arrangement, &RunResult { requests, config, duration: 20.0, ..RunResult::default() })
    }

    fn comparison(last: Row) -> Comparison {
        let rows = vec![
            row(Arrangement::RoundRobin, (959.3, 4470.9), (1046.4, 4117.0), 0),
            row(Arrangement::Split, (30.1, 780.0), (2789.4, 14137.3), 0),
            last,
        ];
        Comparison { rows, seconds: 20.0, seed: 1 }
    }

    #[test]
    fn the_verdict_gives_the_four_ratios() {
        let comparison = comparison(row(Arrangement::Permits, (88.2, 1885.3), (950.0, 2785.5), 0));
        assert_eq!(
            comparison.verdict(),
            "one pool with permits against round robin: short TTFT P99 10.9x lower, short E2EL P99 2.4x lower, \
             long TTFT P99 1.1x lower, long E2EL P99 1.5x lower: better in all four."
        );
        assert_eq!(comparison.json()["better_in_all"], true);
        assert!((comparison.json()["ratios"]["short_p99_ttft"].as_f64().unwrap() - 10.876).abs() < 0.001);
    }

    #[test]
    fn ratios_that_round_to_one_are_the_same() {
        assert_eq!([1.04, 1.0, 0.97].map(times), ["the same"; 3]);
        assert_eq!([1.06, 0.9].map(times), ["1.1x lower", "1.1x higher"]);
        let comparison = comparison(row(Arrangement::Permits, (88.2, 1885.3), (950.0, 4100.0), 0));
        assert!(comparison.verdict().ends_with("long E2EL P99 the same: not better in long E2EL P99."));
        assert_eq!(comparison.json()["better_in_all"], false);
    }

    #[test]
    fn a_number_that_got_worse_is_not_hidden() {
        let comparison = comparison(row(Arrangement::Permits, (88.2, 1885.3), (1258.7, 2785.5), 0));
        assert!(comparison.verdict().ends_with("not better in long TTFT P99."), "{}", comparison.verdict());
        assert_eq!(comparison.json()["better_in_all"], false);
    }

    #[test]
    fn with_failures_there_is_no_verdict() {
        let comparison = comparison(row(Arrangement::Permits, (1.0, 1.0), (1.0, 1.0), 3));
        assert!(comparison.verdict().starts_with("No verdict: 3 requests failed"));
        assert_eq!(comparison.json()["ratios"], Value::Null);
        assert!(comparison.rows[2].to_string().ends_with("3\n  3 failed: status 503"), "{}", comparison.rows[2]);
    }

    #[test]
    fn the_table_stands_side_by_side_in_80_columns() {
        let comparison = comparison(row(Arrangement::Permits, (88.2, 1885.3), (1258.7, 114_137.3), 0));
        let head = head(&comparison.rows[0], 20.0, 1);
        let lines: Vec<String> = comparison.rows.iter().map(Row::to_string).collect();
        let cells: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(cells, ["split", "by", "length", "30.1", "30.1", "780.0", "2789.4", "14137.3", "0"]);
        let text = format!("{head}\n{}\n{}", lines.join("\n"), comparison.ending());
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        // Each number ends below the header of the column.
        let columns = head.lines().rev().nth(1).unwrap();
        assert_eq!(columns.find("E2EL P99").map(|at| at + 8), lines[1].find("780.0").map(|at| at + 5), "{text}");
        assert_eq!(columns.chars().count(), lines[1].chars().count(), "{text}");
    }
}
