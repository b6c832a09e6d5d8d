//! Prints a study as text and as JSON.
//!
//! One line for each variant has the mean of each measure over the seeds, the half-width of the 95
//! % interval, and the change from the first variant in per cent. `~` marks a change whose interval
//! contains zero.

use serde_json::{Value, json};

use crate::study::Study;
use sluice_core::stats::Estimate;

/// The rows of the table; the first is the header.
pub fn rows(study: &Study) -> Vec<Vec<String>> {
    let unit = |measure: &crate::measure::Measure| match measure.unit() {
        "" => measure.to_string(),
        unit => format!("{measure} ({unit})"),
    };
    let mut rows =
        vec![std::iter::once("variant".to_owned()).chain(study.measures.iter().map(unit)).collect::<Vec<_>>()];
    for (place, variant) in study.variants.iter().enumerate() {
        let mut row = vec![variant.name.clone()];
        for measure in 0..study.measures.len() {
            let value = shown(&study.estimate(place, measure));
            let change = (place > 0).then(|| study.change(0, place, measure)).and_then(|change| percent(&change));
            row.push(change.map_or(value.clone(), |change| format!("{value}  {change}")));
        }
        rows.push(row);
    }
    rows
}

/// The table, with columns aligned.
pub fn text(study: &Study) -> String {
    let mut text = if study.title.is_empty() { String::new() } else { format!("{}\n", study.title) };
    text += &aligned(&rows(study));
    text += &match study.seeds[..] {
        [first] => format!("1 run of each variant, seed {first}; for intervals use --seeds 5 or more\n"),
        _ => format!(
            "{} seeds ({}); +-: half-width of the 95 % interval; ~: the change may be chance (its interval contains 0)\n",
            study.seeds.len(),
            seeds(&study.seeds)
        ),
    };
    text
}

/// The first two seeds and the last.
fn seeds(seeds: &[u64]) -> String {
    let shown: Vec<String> = seeds.iter().map(u64::to_string).collect();
    match &shown[..] {
        [first, second, .., last] if shown.len() > 3 => format!("{first}, {second}, .. {last}"),
        _ => shown.join(", "),
    }
}

/// The rows as lines, with the first column to the left and the others to the right.
pub fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            line += &if column == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// The study as JSON: every value, the means, intervals and changes.
pub fn json(study: &Study) -> Value {
    let interval = |estimate: &Estimate| json!([estimate.low, estimate.high]);
    let variant = |place: usize| {
        let measures = study.measures.iter().enumerate().map(|(at, measure)| {
            let (estimate, change) = (study.estimate(place, at), study.change(0, place, at));
            let entry = json!({
                "unit": measure.unit(),
                "mean": estimate.value,
                "interval_95": interval(&estimate),
                "change": change.value,
                "change_interval_95": interval(&change),
                "values": study.variants[place].values[at],
            });
            (measure.to_string(), entry)
        });
        let measures: serde_json::Map<String, Value> = measures.collect();
        json!({ "name": study.variants[place].name, "measures": measures })
    };
    let variants: Vec<Value> = (0..study.variants.len()).map(variant).collect();
    json!({ "title": study.title, "seeds": study.seeds, "variants": variants })
}

/// A relative half-width below this is noise of floating-point sums.
const NOISE: f64 = 1e-9;

fn shown(estimate: &Estimate) -> String {
    let value = number(estimate.value);
    let reach = estimate.high - estimate.value;
    let reach = if reach.abs() < NOISE * estimate.value.abs() { 0.0 } else { reach };
    if reach.is_finite() && !estimate.value.is_nan() { format!("{value} +-{}", number(reach)) } else { value }
}

fn percent(change: &Estimate) -> Option<String> {
    let certain = change.low > 0.0 || change.high < 0.0;
    let value = change.value * 100.0;
    value.is_finite().then(|| format!("{}{value:+.0} %", if certain || value == 0.0 { "" } else { "~" }))
}

/// Formats a number with about three digits.
pub fn number(value: f64) -> String {
    match value.abs() {
        _ if value.is_nan() => "-".to_owned(),
        0.0 => "0".to_owned(),
        size if size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.01 => format!("{value:.2}"),
        _ => format!("{value:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::VariantRuns;

    #[test]
    fn floating_point_noise_is_no_interval() {
        let estimate = |reach: f64| Estimate { value: 1.61, low: 1.61 - reach, high: 1.61 + reach };
        assert_eq!(shown(&estimate(6.7e-16)), "1.61 +-0");
        assert_eq!(shown(&estimate(1e-5)), "1.61 +-1.0e-5");
    }

    #[test]
    fn a_table_shows_means_intervals_and_changes_of_pairs() {
        let runs = |name: &str, values: [f64; 3]| VariantRuns {
            name: name.to_owned(),
            values: vec![values.to_vec(), vec![0.0; 3]],
            first: None,
            failure: None,
        };
        let study = Study {
            title: "t".to_owned(),
            seeds: vec![1, 2, 3],
            measures: ["a.ttft.p99", "all.failed"].map(|name| name.parse().unwrap()).to_vec(),
            variants: vec![runs("one", [100.0, 200.0, 300.0]), runs("half", [50.0, 100.0, 150.0])],
        };
        let text = text(&study);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[2].split_whitespace().collect::<Vec<_>>(), ["one", "200", "+-248", "0", "+-0"]);
        // The ratios of the pairs are all equal.
        assert!(lines[3].contains("100 +-124  -50 %"), "{text}");
        assert_eq!(json(&study)["variants"][1]["measures"]["a.ttft.p99"]["change"], -0.5);
    }
}
