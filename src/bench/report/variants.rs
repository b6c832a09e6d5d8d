//! An HTML page that compares variants: a table, plots of their latency distributions, and a section for each run.
//!
//! The caller provides the table, because only the caller knows the variants and the number of runs. Plots show one run of
//! each of the first few variants, by class.

use super::charts::{MOST_CLASSES, distribution};
use super::html;
use super::page::Page;
use super::plot::Plot;
use crate::result::metrics::Metrics;
use crate::result::record::RunResult;
use crate::result::slices::{SliceBy, slices};

/// The page. `note` describes the table, whose first row is the header. `runs` has one run of each variant; its label is the
/// name of the variant.
pub fn page(title: &str, note: &str, rows: &[Vec<String>], runs: &[RunResult]) -> String {
    let mut page = Page::new(title);
    html::warnings(&mut page, runs);
    page.section("Variants".to_owned(), note);
    page.table(rows);
    let shown = &runs[..runs.len().min(MOST_CLASSES)];
    let plots = overlays(shown);
    if !plots.is_empty() {
        let some = if shown.len() < runs.len() { "The first variants; one run of each." } else { "One run of each." };
        page.section("Distributions".to_owned(), some);
        page.plots(&plots);
    }
    for run in runs {
        page.fold(&html::name(run), |page| html::one(page, run, &Metrics::of(run)));
    }
    page.end()
}

/// For each class, TTFT and E2EL of all runs.
fn overlays(runs: &[RunResult]) -> Vec<Plot> {
    let parts: Vec<(String, Vec<(String, Metrics)>)> =
        runs.iter().map(|run| (run.config.label.clone().unwrap_or_default(), slices(run, SliceBy::Class))).collect();
    let Some((_, classes)) = parts.first() else { return Vec::new() };
    let mut plots = Vec::new();
    for (class, _) in classes {
        let of_class = |(name, slices): &(String, Vec<(String, Metrics)>)| {
            let found = slices.iter().find(|(other, _)| other == class)?;
            Some((name.clone(), found.1.clone()))
        };
        let variants: Vec<(String, Metrics)> = parts.iter().filter_map(of_class).collect();
        for (measure, title) in [("ttft", "time to first token"), ("e2el", "end-to-end latency")] {
            plots.push(distribution(&variants, measure, &format!("{class}: {title}")));
        }
    }
    plots.retain(|plot| !plot.is_empty());
    plots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::record::{ClassConfig, Outcome, Record, RunConfig};

    #[test]
    fn variants_are_drawn_over_one_another_and_each_has_its_section() {
        let run = |label: &str| {
            let record = |index: u64| Record {
                index,
                outcome: Outcome::Completed,
                output_tokens: 2,
                ttft: 0.1 + index as f64 * 0.01,
                latency: 0.5,
                itls: vec![0.1],
                ..Record::default()
            };
            let classes = vec![ClassConfig { name: "short".to_owned(), ..ClassConfig::default() }];
            let config = RunConfig { label: Some(label.to_owned()), classes, ..RunConfig::default() };
            RunResult { config, requests: (0..20).map(record).collect(), duration: 1.0, ..RunResult::default() }
        };
        let rows = [vec!["variant".to_owned()], vec!["<one>".to_owned()]];
        let page = page("two", "a note", &rows, &[run("<one>"), run("other")]);
        assert!(page.contains("&lt;one&gt;") && !page.contains("<one>") && page.contains("a note"));
        assert!(page.contains("short: time to first token"));
        assert_eq!(page.matches("<details>").count(), 2);
    }
}
