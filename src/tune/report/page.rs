//! A tuning as a page of its own: the answer, every setting, and how the objective responds to each dimension.
//!
//! A dot is one setting with a value; settings that lost a race lie about where their value does. The page is that of `sluice bench`.

use crate::goal::Goal;
use crate::report::{answer, flags, predicted, table};
use crate::search::score;
use crate::setting::number;
use crate::trial::{Outcome, Trial};
use crate::tuner::Report;
use sluice_bench::report::sections::{Dots, Section, page as page_of};

/// The HTML.
pub fn page(title: &str, report: &Report, goal: &Goal) -> String {
    let answer = answer::answer(report, goal);
    let uses = report.winner.as_ref().map(|winner| flags::lines(&winner.setting)).unwrap_or_default();
    let rows = answer.iter().chain(&uses).map(|line| vec![line.clone()]);
    let head = vec!["Answer".to_owned()];
    let mut sections = vec![Section {
        title: "Result".to_owned(),
        note: [Some(table::cost(report)), predicted::agreement(report, goal)]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(". "),
        rows: std::iter::once(head).chain(rows).collect(),
        ..Section::default()
    }];
    sections.push(Section {
        title: "Settings".to_owned(),
        note: "The best first. Engines are simulated; values of the search are noisy, and the answer above is from loads of its own."
            .to_owned(),
        rows: table::rows(report, goal),
        ..Section::default()
    });
    sections.push(Section {
        title: "Responses".to_owned(),
        note: "One dot for each setting: the value of the objective over a dimension.".to_owned(),
        dots: responses(report, goal),
        ..Section::default()
    });
    page_of("sluice tune", title, &[], &sections)
}

fn responses(report: &Report, goal: &Goal) -> Vec<Dots> {
    let mut keys: Vec<&String> = report.trials.iter().flat_map(|trial| trial.setting.keys()).collect();
    keys.sort();
    keys.dedup();
    let of_key = |key: &String| {
        let points = |measured: bool| {
            let own = report.trials.iter().filter(|trial| trial.is_search() && is_measured(trial) == measured);
            let point = |trial: &Trial| {
                let x = trial.setting.get(key).and_then(number)?;
                let score = score(trial, goal)?;
                Some((x, if goal.score(2.0) > goal.score(1.0) { score.exp() } else { (-score).exp() }))
            };
            own.filter_map(point).collect::<Vec<_>>()
        };
        let series = vec![("measured".to_owned(), points(true)), ("not better".to_owned(), points(false))];
        Dots { title: key.clone(), x: key.clone(), y: goal.label(), series, ..Dots::default() }
    };
    keys.into_iter().map(of_key).collect()
}

fn is_measured(trial: &Trial) -> bool {
    matches!(trial.outcome, Outcome::Measured { .. })
}
