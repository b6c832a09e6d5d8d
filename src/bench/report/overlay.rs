//! Several runs in one plot: their names, and their distributions of each measure.
//!
//! Each run has a unique name of label and varied setting, with the file name and a number if
//! needed. Bounds: [`MOST_RUNS`] runs, as many as there are different colours.

use std::path::Path;

use super::charts::{MOST_CLASSES, distribution, objectives};
use super::plot::Plot;
use super::scale::short;
use crate::result::metrics::Metrics;
use crate::result::record::RunResult;
use crate::result::slices::{SliceBy, slices};

pub(super) const MOST_RUNS: usize = MOST_CLASSES;

/// The name of a run: the label, and the settings that a sweep may vary.
pub fn name(run: &RunResult) -> String {
    let config = &run.config;
    let streams = config.max_concurrency.map(|streams| format!("concurrency {streams}"));
    let rate = config.request_rate.map(|rate| format!("{} requests per second", short(rate)));
    let parts: Vec<String> = [config.label.clone(), streams, rate].into_iter().flatten().collect();
    if parts.is_empty() { "all at once".to_owned() } else { parts.join(", ") }
}

/// Unique names of runs.
pub fn names(runs: &[RunResult]) -> Vec<String> {
    let mut names: Vec<String> = runs.iter().map(name).collect();
    let files = |run: &RunResult| {
        let file = Path::new(&run.file).file_name().map(|file| format!(" ({})", file.display()));
        file.unwrap_or_default()
    };
    distinguish(&mut names, |index| files(&runs[index]));
    distinguish(&mut names, |index| format!(" #{}", index + 1));
    names
}

fn distinguish(names: &mut [String], appendix: impl Fn(usize) -> String) {
    let before = names.to_vec();
    for (index, name) in names.iter_mut().enumerate() {
        if before.iter().filter(|other| *other == name).count() > 1 {
            name.push_str(&appendix(index));
        }
    }
}

/// Plots of all requests, or of each class if the runs share several.
pub(super) fn overlays(runs: &[RunResult], names: &[String], measures: &[(&str, &str)]) -> Vec<Plot> {
    let shown: Vec<&RunResult> = runs.iter().take(MOST_RUNS).collect();
    let parts: Vec<Vec<(String, Metrics)>> = shown.iter().map(|run| slices(run, SliceBy::plotted(run))).collect();
    let mut classes: Vec<&String> = parts.first().into_iter().flatten().map(|(class, _)| class).collect();
    classes.retain(|class| parts.iter().all(|part| part.iter().any(|(name, _)| name == *class)));
    let mut plots = Vec::new();
    let classes =
        if classes.len() > 1 { classes.into_iter().take(MOST_CLASSES).map(Some).collect() } else { vec![None] };
    for class in classes {
        let of_class = |(index, name): (usize, &String)| {
            let metrics = match class {
                None => Metrics::of(shown[index]),
                Some(class) => parts[index].iter().find(|(other, _)| other == class)?.1.clone(),
            };
            Some((name.clone(), metrics))
        };
        let variants: Vec<(String, Metrics)> = names.iter().take(MOST_RUNS).enumerate().filter_map(of_class).collect();
        for (measure, title) in measures {
            let title = class.map_or_else(|| (*title).to_owned(), |class| format!("{class}: {title}"));
            plots.push(distribution(
                &variants,
                measure,
                &title,
                &objectives(&shown, measure, class.map(String::as_str)),
            ));
        }
    }
    plots.retain(|plot| !plot.is_empty());
    plots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::record::{ClassConfig, Outcome, Record, RunConfig, Slo};

    fn run(file: &str, classes: &[&str]) -> RunResult {
        let record = |index: u64| Record {
            index,
            class: (index % classes.len().max(1) as u64) as u32,
            outcome: Outcome::Completed,
            output_tokens: Some(2),
            ttft: 0.1 + index as f64 * 0.01,
            latency: 0.5,
            itls: vec![0.1],
            ..Record::default()
        };
        let slo = Slo { ttft: Some(250.0), ..Slo::default() };
        let class = |name: &&str| ClassConfig { name: (*name).to_owned(), ..ClassConfig::default() };
        let classes = classes.iter().map(class).collect();
        let config = RunConfig { request_rate: Some(8.0), classes, slo, ..RunConfig::default() };
        let requests = (0..20).map(record).collect();
        RunResult { config, requests, duration: 1.0, file: file.to_owned(), ..RunResult::default() }
    }

    const TTFT: [(&str, &str); 1] = [("ttft", "time to first token")];

    #[test]
    fn two_runs_of_one_load_have_different_names() {
        let names_of = |files: [&str; 2]| names(&files.map(|file| run(file, &[])));
        let rate = "8 requests per second";
        assert_eq!(names_of(["x/a.json", "y/b.json"]), [format!("{rate} (a.json)"), format!("{rate} (b.json)")]);
        assert_eq!(names_of(["a.json", "a.json"]), [format!("{rate} (a.json) #1"), format!("{rate} (a.json) #2")]);
        assert_eq!(names_of(["", ""]), [format!("{rate} #1"), format!("{rate} #2")]);
    }

    #[test]
    fn two_runs_are_drawn_over_one_another_with_their_objectives() {
        let runs = ["a.json", "b.json"].map(|file| run(file, &[]));
        let plots = overlays(&runs, &names(&runs), &TTFT);
        assert_eq!(plots.len(), 1);
        let series: Vec<&str> = plots[0].series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(series, names(&runs));
        assert_eq!(plots[0].marks.iter().map(|mark| mark.label.as_str()).collect::<Vec<_>>(), ["objective 250 ms"]);
        assert_eq!(plots[0].marks[0].at, 250.0);
    }

    #[test]
    fn classes_that_the_runs_share_have_plots_of_their_own_and_colours_are_enough() {
        let runs: Vec<RunResult> = (0..6).map(|n| run(&n.to_string(), &["short", "long"])).collect();
        let plots = overlays(&runs, &names(&runs), &TTFT);
        let titles: Vec<&str> = plots.iter().map(|plot| plot.title.as_str()).collect();
        assert_eq!(titles, ["short: time to first token: distribution", "long: time to first token: distribution"]);
        assert!(plots.iter().all(|plot| plot.series.len() == MOST_RUNS));
        let others = [run("a", &["short", "long"]), run("b", &["x", "y"])];
        assert_eq!(overlays(&others, &names(&others), &TTFT).len(), 1, "no class in common: all requests together");
        let titles = |all: &[&[&str]]| {
            let runs: Vec<RunResult> = all.iter().map(|classes| run("a", classes)).collect();
            overlays(&runs, &names(&runs), &TTFT).into_iter().map(|plot| plot.title).collect::<Vec<_>>()
        };
        let together = ["time to first token: distribution"];
        assert_eq!(titles(&[&["short", "long"], &["short", "x"]]), together, "one class in common");
        assert_eq!(titles(&[&["short", "long"], &["short"], &["long"]]), together, "in common with the first only");
        assert_eq!(
            titles(&[&["a", "b", "c"], &["c", "a"]]),
            ["a", "c"].map(|class| format!("{class}: {}", together[0]))
        );
    }
}
