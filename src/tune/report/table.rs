//! A tuning as a table: every setting that was tried or left out, the best first, with what was found and a note.
//!
//! A setting has one row, with its most thorough trial of the search.

use crate::goal::{Goal, label_of};
use crate::report::{answer, flags, predicted};
use crate::search::score;
use crate::setting::name;
use crate::trial::{Outcome, Trial};
use crate::tuner::Report;
use sluice_lab::table::{aligned, number};

/// The rows, the head first: setting, value, its interval, other measures, note.
pub fn rows(report: &Report, goal: &Goal) -> Vec<Vec<String>> {
    let mut head = vec!["setting".to_owned(), goal.label(), "interval".to_owned()];
    head.extend(has_predictions(report).then(|| "predicted".to_owned()));
    head.extend(goal.against.as_ref().map(label_of));
    head.extend(goal.beside.iter().map(ToString::to_string));
    head.push("note".to_owned());
    let mut shown: Vec<&Trial> = Vec::new();
    for trial in report.trials.iter().filter(|trial| trial.is_search()) {
        match shown.iter().position(|other| other.setting == trial.setting) {
            Some(place) => shown[place] = trial,
            None => shown.push(trial),
        }
    }
    // Measured ones first, then those that lost a race, then those that cannot be used.
    let rank = |trial: &Trial| match trial.outcome {
        Outcome::Measured { .. } => 0,
        Outcome::Worse { .. } | Outcome::Starts => 1,
        Outcome::Unmet { .. } | Outcome::ColdCache { .. } | Outcome::Lossy { .. } => 2,
        Outcome::Refused { .. } => 3,
    };
    let value = |trial: &Trial| score(trial, goal).unwrap_or(f64::NEG_INFINITY);
    shown.sort_by(|one, other| rank(one).cmp(&rank(other)).then(value(other).total_cmp(&value(one))));
    let mut rows = vec![head];
    rows.extend(shown.into_iter().map(|trial| row(report, trial, goal)));
    for pruned in &report.pruned {
        let checked = if pruned.checked { "; tried after all, as a check" } else { "" };
        let mut row = vec![name(&pruned.setting), "left out".to_owned(), "-".to_owned()];
        row.extend(has_predictions(report).then(|| predicted::cell(report, &pruned.setting)));
        row.extend(goal.against.iter().chain(&goal.beside).map(|_| "-".to_owned()));
        row.push(format!("{}{checked}", pruned.reason));
        rows.push(row);
    }
    rows
}

fn has_predictions(report: &Report) -> bool {
    !report.predicted.is_empty()
}

fn row(report: &Report, trial: &Trial, goal: &Goal) -> Vec<String> {
    let dash = || "-".to_owned();
    let mut notes = trial.notes.clone();
    let (value, range) = match &trial.outcome {
        Outcome::Measured { value, certified, .. } => {
            if let Some(certified) = certified {
                notes.push(format!("at a rate of {}", number(certified.rate)));
            }
            let range = value.low.zip(value.high).map(|(low, high)| format!("{} to {}", number(low), number(high)));
            (number(value.value), range.unwrap_or_else(dash))
        }
        Outcome::Worse { .. } => ("not better".to_owned(), dash()),
        Outcome::Starts => ("starts".to_owned(), dash()),
        Outcome::Unmet { group, objective, ratio } => {
            let what = match trial.outcome.is_incomplete() {
                true => "do not complete".to_owned(),
                false => format!("take {ratio:.2} times their {objective}"),
            };
            notes.insert(0, format!("single requests of '{group}' {what}"));
            ("none".to_owned(), dash())
        }
        Outcome::Lossy { measure } => {
            notes.insert(0, format!("so many requests fail that {measure} is one of theirs"));
            ("requests fail".to_owned(), dash())
        }
        Outcome::ColdCache { hit_rate, wanted } => {
            let (found, wanted) = (hit_rate * 100.0, wanted * 100.0);
            notes.insert(0, format!("the prefix caches held {found:.0} % of the prompts and not {wanted:.0} %"));
            ("cold cache".to_owned(), dash())
        }
        Outcome::Refused { reason, foreseen } => {
            notes.insert(0, format!("{}{reason}", if *foreseen { "not started: " } else { "" }));
            ("does not start".to_owned(), dash())
        }
    };
    let mut row = vec![name(&trial.setting), value, range];
    row.extend(has_predictions(report).then(|| predicted::cell(report, &trial.setting)));
    let against = || trial.against.iter().sum::<f64>() / trial.against.len() as f64;
    row.extend(goal.against.as_ref().map(|_| number(against())));
    row.extend((0..goal.beside.len()).map(|at| trial.beside.get(at).map_or_else(dash, |value| number(*value))));
    row.push(notes.join("; "));
    row
}

/// The cost of the search and of the confirmations.
pub fn cost(report: &Report) -> String {
    let sum = |of: fn(&Trial) -> f64| report.trials.iter().map(of).sum::<f64>();
    let (starts, loads) = (sum(|trial| f64::from(trial.starts)), sum(|trial| f64::from(trial.loads)));
    let (seconds, starting) = (sum(|trial| trial.seconds), sum(|trial| trial.start_seconds));
    let requests = sum(|trial| trial.requests as f64);
    format!(
        "{} trials of {} settings: {starts:.0} starts, {loads:.0} runs, {requests:.0} requests; {:.0} min of engine time, of \
         which {:.0} min starts",
        report.trials.len(),
        report.settings,
        (seconds + starting) / 60.0,
        starting / 60.0
    )
}

/// The whole result as text.
pub fn text(report: &Report, goal: &Goal) -> String {
    let mut rows = rows(report, goal);
    // The note is the last column and is not aligned.
    let notes: Vec<String> = rows.iter_mut().filter_map(Vec::pop).collect();
    let mut text = String::new();
    for (line, note) in aligned(&rows).lines().zip(notes) {
        text += format!("{line}  {note}").trim_end();
        text.push('\n');
    }
    text += &format!("{}\n", cost(report));
    predicted::agreement(report, goal).iter().for_each(|line| text += &format!("{line}\n"));
    text.push('\n');
    for line in answer::answer(report, goal) {
        text += &format!("{line}\n");
    }
    if let Some(winner) = &report.winner {
        flags::lines(&winner.setting).iter().for_each(|line| text += &format!("{line}\n"));
    }
    text
}
