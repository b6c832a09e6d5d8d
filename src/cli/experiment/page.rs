//! An experiment as an HTML page: verdicts, arms, changes, and the confidence sequences over time.
//!
//! The page has the form of `sluice bench`'s pages, without external resources.

use super::text::{arm_rows, causes, comparison_rows, verdicts};
use sluice_bench::report::sections::{Dots, Section, page as page_of};
use sluice_gateway::experiment::{ExperimentReport, Moment, Quantity};

pub(super) fn page(report: &ExperimentReport) -> String {
    let head = vec!["Verdict".to_owned()];
    let lines = verdicts(report).into_iter().chain(report.comparisons.iter().flat_map(causes));
    let mut sections = vec![
        Section {
            title: "Verdict".to_owned(),
            note: format!(
                "{}; intervals hold at all times together with {} %.",
                super::text::phase(report),
                report.confidence * 100.0
            ),
            rows: std::iter::once(head).chain(lines.map(|line| vec![line])).collect(),
            ..Section::default()
        },
        Section { title: "Arms".to_owned(), rows: arm_rows(report), ..Section::default() },
    ];
    for (position, comparison) in report.comparisons.iter().enumerate() {
        sections.push(Section {
            title: format!("{} beside {}", comparison.arm, report.arms[0].name),
            note: "Changes are of geometric means at equal lengths of prompts, arm over control.".to_owned(),
            rows: comparison_rows(report, comparison),
            dots: Quantity::JUDGED.iter().enumerate().map(|(at, one)| over_time(report, position, at, *one)).collect(),
            ..Section::default()
        });
    }
    page_of("sluice experiment", &format!("Experiment {}", report.name), &[], &sections)
}

/// The change of a quantity and both ends of the interval, in percent over time in minutes.
fn over_time(report: &ExperimentReport, comparison: usize, at: usize, quantity: Quantity) -> Dots {
    let begin = report.history.first().map(|moment| moment.at);
    let points = |pick: usize| {
        let point = |moment: &Moment| {
            let ends = moment.changes.get(comparison)?[at]?;
            let minutes = (moment.at - begin?) as f64 / 60e3;
            Some((minutes, ends[pick] * 100.0))
        };
        report.history.iter().filter_map(point).collect::<Vec<_>>()
    };
    Dots {
        title: format!("{}: change over time", quantity.label()),
        x: "minutes".to_owned(),
        y: "%".to_owned(),
        series: ["change", "lower end", "upper end"]
            .iter()
            .enumerate()
            .map(|(pick, name)| ((*name).to_owned(), points(pick)))
            .collect(),
        ..Dots::default()
    }
}
