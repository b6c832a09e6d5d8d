//! An HTML page that compares variants: the caller's table, plots of latency distributions, a
//! section for each run.
//!
//! Plots show one run of each of the first few variants, by class.

use super::html;
use super::overlay::{self, MOST_RUNS, overlays};
use super::page::Page;
use crate::result::metrics::Metrics;
use crate::result::record::RunResult;

/// The page. `note` describes the table, whose first row is the head. `runs`: one run of each
/// variant, labelled with the variant's name.
pub fn page(title: &str, note: &str, rows: &[Vec<String>], runs: &[RunResult]) -> String {
    let mut page = Page::new(title);
    html::warnings(&mut page, runs);
    page.section("Variants".to_owned(), note);
    page.table(rows);
    let labels: Vec<String> = runs.iter().map(|run| run.config.label.clone().unwrap_or_default()).collect();
    let plots = overlays(runs, &labels, &[("ttft", "time to first token"), ("e2el", "end-to-end latency")]);
    if !plots.is_empty() {
        let some = if runs.len() > MOST_RUNS { "The first variants; one run of each." } else { "One run of each." };
        page.section("Distributions".to_owned(), some);
        page.plots(&plots);
    }
    for run in runs {
        page.fold(&overlay::name(run), |page| html::one(page, run, &Metrics::of(run)));
    }
    page.end()
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
                output_tokens: Some(2),
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
        assert!(page.contains("time to first token: distribution"));
        assert_eq!(page.matches("<details>").count(), 2);
    }
}
