//! A tuning as a table: all settings, tried or left out, the advised one first, with values and a
//! note.
//!
//! A setting has one row, with a column for the most thorough search trial and a column for the
//! confirmation. The estimates come from different loads, and the estimate of the search is rough.
//! Only a confirmed rate has an interval.

use crate::bound::Bound;
use crate::goal::{Goal, Objective, label_of};
use crate::report::names::{Names, wrapped};
use crate::report::{answer, flags, predicted};
use crate::search::score;
use crate::setting::Setting;
use crate::trial::{Effort, Outcome, Trial};
use crate::tuner::Report;
use sluice_core::stats::Estimate;
use sluice_lab::table::{aligned, number};

/// A tuning as rows and columns.
#[derive(Debug)]
pub struct Table {
    /// The heads of the columns; the last column has notes.
    pub head: Vec<String>,
    /// A row for each setting.
    pub rows: Vec<Vec<String>>,
    /// The meaning of the columns.
    pub legend: Vec<String>,
}

impl Table {
    /// The table of a tuning.
    pub fn of(report: &Report, goal: &Goal) -> Self {
        let shown = shown(report, goal);
        let pruned = report.pruned.iter().map(|pruned| &pruned.setting);
        let names = Names::of(shown.iter().map(|trial| &trial.setting).chain(pruned));
        let columns = Columns { report, goal, names, confirmed: report.trials.iter().any(is_confirmation) };
        let mut rows: Vec<Vec<String>> =
            shown.iter().zip(1..).map(|(trial, place)| columns.row(place, trial)).collect();
        let left_out = report.pruned.iter().zip(1 + rows.len()..);
        let left_out: Vec<_> = left_out
            .map(|(pruned, place)| {
                let checked = if pruned.checked { "; tried after all, as a check" } else { "" };
                columns.left_out(place, &pruned.setting, format!("{}{checked}", pruned.reason))
            })
            .collect();
        rows.extend(left_out);
        let mut head = columns.head();
        if rows.iter().all(|row| row.last().is_none_or(String::is_empty)) {
            head.pop();
            rows.iter_mut().for_each(|row| drop(row.pop()));
        }
        Self { head, rows, legend: columns.legend() }
    }
}

/// The most thorough search trial of each setting: the advised one, then the best first.
fn shown<'a>(report: &'a Report, goal: &Goal) -> Vec<&'a Trial> {
    let mut shown: Vec<&Trial> = Vec::new();
    for trial in report.trials.iter().filter(|trial| trial.is_search()) {
        match shown.iter().position(|other| other.setting == trial.setting) {
            Some(place) => shown[place] = trial,
            None => shown.push(trial),
        }
    }
    let advised = answer::advised(report, goal);
    let rank = |trial: &Trial| match trial.outcome {
        _ if advised.as_ref() == Some(&trial.setting) => 0,
        Outcome::Measured { .. } => 1,
        Outcome::Worse { .. } | Outcome::Starts => 2,
        Outcome::Unmet { .. } | Outcome::Exceeds { .. } | Outcome::ColdCache { .. } | Outcome::Lossy { .. } => 3,
        Outcome::Refused { .. } => 4,
    };
    let value = |trial: &Trial| score(trial, goal).unwrap_or(f64::NEG_INFINITY);
    shown.sort_by(|one, other| rank(one).cmp(&rank(other)).then(value(other).total_cmp(&value(one))));
    shown
}

fn is_confirmation(trial: &Trial) -> bool {
    trial.effort == Effort::Confirm
}

struct Columns<'a> {
    report: &'a Report,
    goal: &'a Goal,
    names: Names,
    confirmed: bool,
}

impl Columns<'_> {
    fn is_rate(&self) -> bool {
        matches!(self.goal.objective, Objective::Rate { .. })
    }

    fn head(&self) -> Vec<String> {
        let Self { report, goal, .. } = self;
        let label = goal.label();
        let mut head = self.names.head();
        head.push(if self.confirmed { format!("search: {label}") } else { label });
        head.extend(self.confirmed.then(|| "confirmed".to_owned()));
        head.extend((self.confirmed && self.is_rate()).then(|| "certified".to_owned()));
        head.extend(has_predictions(report).then(|| "predicted".to_owned()));
        head.extend(goal.against.as_ref().map(label_of));
        head.extend(goal.bounds.iter().map(Bound::text));
        head.extend(goal.beside.iter().map(ToString::to_string));
        head.push("note".to_owned());
        head
    }

    fn legend(&self) -> Vec<String> {
        let mut legend: Vec<String> = self.names.shared().into_iter().collect();
        if !self.confirmed {
            return legend;
        }
        legend.extend(match self.is_rate() {
            true => vec![
                "search: a rough estimate of the highest rate, which chooses what is confirmed".to_owned(),
                "confirmed: the estimate from other and more loads, with its 90 % interval".to_owned(),
                "certified: the rate below it at which proofs met the objectives".to_owned(),
            ],
            false => vec![
                format!("search: the mean of {} runs or fewer, with its 95 % interval", self.goal.runs),
                format!("confirmed: the mean of {} runs with other loads, with its 95 % interval", 2 * self.goal.runs),
            ],
        });
        legend
    }

    fn row(&self, place: usize, trial: &Trial) -> Vec<String> {
        let goal = self.goal;
        let (value, notes) = value_and_notes(trial, self.is_rate());
        let mut row = self.names.cells(place, &trial.setting);
        row.push(value);
        row.extend(self.confirmation(&trial.setting));
        row.extend(has_predictions(self.report).then(|| predicted::cell(self.report, &trial.setting)));
        row.extend(goal.against.as_ref().map(|_| mean(&trial.against)));
        row.extend((0..goal.bounds.len()).map(|at| trial.bounded.get(at).map_or_else(dash, |value| number(*value))));
        row.extend((0..goal.beside.len()).map(|at| trial.beside.get(at).map_or_else(dash, |value| number(*value))));
        row.push(notes.join("; "));
        row
    }

    fn left_out(&self, place: usize, setting: &Setting, note: String) -> Vec<String> {
        let mut row = self.names.cells(place, setting);
        row.push("left out".to_owned());
        row.extend(self.confirmation(setting));
        row.extend(has_predictions(self.report).then(|| predicted::cell(self.report, setting)));
        let measures = usize::from(self.goal.against.is_some()) + self.goal.bounds.len() + self.goal.beside.len();
        row.extend((0..measures).map(|_| dash()));
        row.push(note);
        row
    }

    fn confirmation(&self, setting: &Setting) -> Vec<String> {
        if !self.confirmed {
            return Vec::new();
        }
        let trial = self.report.trials.iter().rfind(|trial| is_confirmation(trial) && trial.setting == *setting);
        let mut cells = vec![trial.map_or_else(dash, |trial| match &trial.outcome {
            Outcome::Measured { value, .. } => with_interval(value),
            _ => value_and_notes(trial, self.is_rate()).0,
        })];
        let certified = |trial: &Trial| match &trial.outcome {
            Outcome::Measured { certified: Some(certified), .. } => number(certified.rate),
            _ => "none".to_owned(),
        };
        cells.extend(self.is_rate().then(|| trial.map_or_else(dash, certified)));
        cells
    }
}

fn dash() -> String {
    "-".to_owned()
}

fn mean(values: &[f64]) -> String {
    if values.is_empty() { dash() } else { number(values.iter().sum::<f64>() / values.len() as f64) }
}

fn with_interval(estimate: &Estimate) -> String {
    let [value, low, high] = [estimate.value, estimate.low, estimate.high].map(number);
    if estimate.is_bounded() { format!("{value} ({low} to {high})") } else { value }
}

fn has_predictions(report: &Report) -> bool {
    !report.predicted.is_empty()
}

fn value_and_notes(trial: &Trial, is_rate: bool) -> (String, Vec<String>) {
    let mut notes = trial.notes.clone();
    let value = match &trial.outcome {
        Outcome::Measured { value, certified, .. } => {
            if let Some(certified) = certified.filter(|_| trial.effort == Effort::Script) {
                notes.push(format!("at a rate of {}", number(certified.rate)));
            }
            if is_rate { number(value.value) } else { with_interval(value) }
        }
        Outcome::Worse { .. } => "not better".to_owned(),
        Outcome::Starts => "starts".to_owned(),
        Outcome::Unmet { group, objective, ratio } => {
            let what = match trial.outcome.is_incomplete() {
                true => "do not complete".to_owned(),
                false => format!("take {ratio:.2} times their {objective}"),
            };
            notes.insert(0, format!("single requests of '{group}' {what}"));
            "none".to_owned()
        }
        Outcome::Exceeds { .. } => {
            notes.extend(trial.outcome.exceeds());
            notes.rotate_right(1);
            "out of bounds".to_owned()
        }
        Outcome::Lossy { measure } => {
            notes.insert(0, format!("so many requests fail that {measure} is one of theirs"));
            "requests fail".to_owned()
        }
        Outcome::ColdCache { hit_rate, wanted } => {
            let (found, wanted) = (hit_rate * 100.0, wanted * 100.0);
            notes.insert(0, format!("the prefix caches held {found:.0} % of the prompts and not {wanted:.0} %"));
            "cold cache".to_owned()
        }
        Outcome::Refused { reason, foreseen } => {
            notes.insert(0, format!("{}{reason}", if *foreseen { "not started: " } else { "" }));
            "does not start".to_owned()
        }
    };
    (value, notes)
}

/// The kind of the engines.
pub fn engines(report: &Report) -> &'static str {
    if report.real { "real" } else { "simulated" }
}

/// The cost of search and confirmations.
pub fn cost(report: &Report) -> String {
    let sum = |of: fn(&Trial) -> f64| report.trials.iter().map(of).sum::<f64>();
    let (starts, loads) = (sum(|trial| f64::from(trial.starts)), sum(|trial| f64::from(trial.loads)));
    let (seconds, starting) = (sum(|trial| trial.seconds), sum(|trial| trial.start_seconds));
    let requests = sum(|trial| trial.requests as f64);
    format!(
        "{} trials of {} settings on {} engines: {starts:.0} starts, {loads:.0} runs, {requests:.0} requests; {} of engine \
         time, of which {} starts",
        report.trials.len(),
        report.settings,
        engines(report),
        minutes(seconds + starting),
        minutes(starting)
    )
}

/// A time in words: below two minutes in seconds, otherwise in minutes.
pub fn minutes(seconds: f64) -> String {
    if seconds < 120.0 { format!("{seconds:.0} s") } else { format!("{:.0} min", seconds / 60.0) }
}

/// The whole result as text.
pub fn text(report: &Report, goal: &Goal) -> String {
    let Table { mut head, mut rows, legend } = Table::of(report, goal);
    // Notes are the last column and not aligned.
    let note = head.pop().unwrap_or_default();
    let notes: Vec<String> = rows.iter_mut().filter_map(Vec::pop).collect();
    let head = wrapped(&head, &rows);
    let notes = head.iter().skip(1).map(|_| String::new()).chain([note]).chain(notes);
    let mut text = String::new();
    for (line, note) in aligned(&[&head[..], &rows].concat()).lines().zip(notes) {
        text += format!("{line}  {note}").trim_end();
        text.push('\n');
    }
    legend.iter().for_each(|line| text += &format!("{line}\n"));
    text += &format!("{}\n", cost(report));
    predicted::agreement(report, goal).iter().for_each(|line| text += &format!("{line}\n"));
    text.push('\n');
    for line in answer::answer(report, goal) {
        text += &format!("{line}\n");
    }
    for line in answer::advised(report, goal).iter().flat_map(flags::lines) {
        text += &format!("{line}\n");
    }
    text
}
