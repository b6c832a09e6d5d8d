//! A tuning as a page: the answer, all settings, and the objective over each dimension.
//!
//! A dot is one setting with a measured value.

use crate::goal::Goal;
use crate::report::{answer, flags, predicted, table};
use crate::setting::Setting;
use crate::trial::{Effort, Outcome, Trial};
use crate::tuner::Report;
use sluice_bench::report::sections::{Dots, Section, page as page_of};
use sluice_config::ArgValue;

/// The HTML page.
pub fn page(title: &str, report: &Report, goal: &Goal) -> String {
    let answer = answer::answer(report, goal);
    let uses = answer::advised(report, goal).map(|setting| flags::lines(&setting)).unwrap_or_default();
    let rows = answer.iter().chain(&uses).map(|line| vec![line.clone()]);
    let head = vec!["Answer".to_owned()];
    let mut sections = vec![Section {
        title: "Result".to_owned(),
        note: sentences([Some(table::cost(report)), predicted::agreement(report, goal)].into_iter().flatten()),
        rows: std::iter::once(head).chain(rows).collect(),
        ..Section::default()
    }];
    let table = table::Table::of(report, goal);
    let engines = format!("Engines are {}", table::engines(report));
    sections.push(Section {
        title: "Settings".to_owned(),
        note: sentences(std::iter::once(engines).chain(table.legend)),
        rows: std::iter::once(table.head).chain(table.rows).collect(),
        ..Section::default()
    });
    let without = without_a_value(report);
    let note = format!("One dot for each setting that was measured in full. {without} have no value and no dot.");
    sections.push(Section {
        title: "Responses".to_owned(),
        note: if without == 0 { "One dot for each setting.".to_owned() } else { note },
        dots: responses(report, goal),
        ..Section::default()
    });
    page_of("sluice tune", title, &[], &sections)
}

fn sentences(lines: impl Iterator<Item = String>) -> String {
    lines.map(|line| line + ". ").collect::<String>().trim_end().to_owned()
}

fn without_a_value(report: &Report) -> usize {
    let mut tried: Vec<_> = report.trials.iter().map(|trial| &trial.setting).collect();
    tried.sort_by_key(|setting| format!("{setting:?}"));
    tried.dedup();
    let has_value =
        |setting: &Setting| report.trials.iter().any(|trial| trial.setting == *setting && trial.value().is_some());
    tried.into_iter().filter(|setting| !has_value(setting)).count()
}

fn responses(report: &Report, goal: &Goal) -> Vec<Dots> {
    let mut keys: Vec<&String> = report.trials.iter().flat_map(|trial| trial.setting.keys()).collect();
    keys.sort();
    keys.dedup();
    let of_key = |key: &String| {
        let points = |confirmed: bool| {
            let own = report.trials.iter().filter(|trial| (trial.effort == Effort::Confirm) == confirmed);
            own.filter_map(|trial| point(trial, key)).collect::<Vec<_>>()
        };
        let series = vec![("search".to_owned(), points(false)), ("confirmed".to_owned(), points(true))];
        Dots { title: key.clone(), x: key.clone(), y: goal.label(), series, ..Dots::default() }
    };
    keys.into_iter().map(of_key).collect()
}

/// The dot of a trial. A lost race has no dot, because the value is only a guess.
fn point(trial: &Trial, key: &str) -> Option<(f64, f64)> {
    let Outcome::Measured { value, .. } = &trial.outcome else { return None };
    Some((trial.setting.get(key).and_then(ArgValue::number)?, value.value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::value;
    use sluice_core::stats::Estimate;

    #[test]
    fn only_measured_settings_are_drawn() {
        let setting: Setting = [("vllm.max-num-seqs".to_owned(), value("64"))].into();
        let measured = Outcome::Measured {
            value: Estimate { value: 18.4, low: f64::NEG_INFINITY, high: f64::INFINITY },
            runs: Vec::new(),
            certified: None,
        };
        let refused = Outcome::Refused { reason: "no room".to_owned(), foreseen: false };
        for (outcome, drawn) in
            [(measured, Some((64.0, 18.4))), (Outcome::Worse { guess: 18.4 }, None), (refused, None)]
        {
            let trial = Trial { outcome, ..Trial::new(&setting, Effort::Race(Some(18.4)), 1) };
            assert_eq!(point(&trial, "vllm.max-num-seqs"), drawn, "{trial:?}");
            assert_eq!(point(&trial, "vllm.max-model-len"), None);
        }
    }
}
