//! A front of two measures in sentences: each member, with the change from the default in both.
//!
//! Values come from confirmations, changes from pairs of runs with the same loads.

use crate::goal::{Goal, Objective};
use crate::setting::name;
use crate::trial::Trial;
use crate::tuner::Report;
use sluice_core::stats::{Change, Sense, Verdict};
use sluice_lab::Measure;
use sluice_lab::table::number;

const CONFIDENCE: f64 = 0.95;

/// The sentences, one a line.
pub fn lines(report: &Report, goal: &Goal) -> Vec<String> {
    let (Objective::Measure(own), Some(other)) = (&goal.objective, &goal.against) else { return Vec::new() };
    let mut lines = vec![match report.front.len() {
        1 => format!("one setting is the best in both {own} and {other}"),
        count => format!("{count} settings are not beaten in both {own} and {other} by another one"),
    }];
    let default = report.default.as_ref();
    for member in &report.front {
        let mut text = name(&member.setting);
        for (measure, runs, of) in [(own, member.runs(), runs_of as Runs), (other, &member.against[..], against_of)] {
            text += &format!("; {measure} {} {}", number(mean(runs)), measure.unit());
            if let Some(default) = default.filter(|_| !member.setting.is_empty()) {
                let change = Change::of_pairs(of(default), runs, CONFIDENCE);
                text += &format!(" ({})", percent(&change));
            }
        }
        lines.push(text);
    }
    lines
}

/// Whether a member of the front is certainly better than the default in at least one of the two
/// measures.
pub fn gains(report: &Report, goal: &Goal) -> bool {
    let (Objective::Measure(own), Some(other), Some(default)) = (&goal.objective, &goal.against, &report.default)
    else {
        return false;
    };
    let others = || report.front.iter().filter(|member| !member.setting.is_empty());
    let is_better = |measure: &Measure, of: Runs| {
        others().any(|member| is_gain(&Change::of_pairs(of(default), of(member), CONFIDENCE), measure, goal.margin))
    };
    is_better(own, runs_of) || is_better(other, against_of)
}

type Runs = fn(&Trial) -> &[f64];

fn runs_of(trial: &Trial) -> &[f64] {
    trial.runs()
}

fn against_of(trial: &Trial) -> &[f64] {
    &trial.against
}

fn mean(runs: &[f64]) -> f64 {
    runs.iter().sum::<f64>() / runs.len() as f64
}

fn is_gain(change: &Change, measure: &Measure, margin: f64) -> bool {
    let sense: Sense = measure.sense();
    change.verdict(sense, margin) == Verdict::Better
}

fn percent(Change(change): &Change) -> String {
    let [value, low, high] = [change.value, change.low, change.high].map(|share| format!("{:+.1} %", share * 100.0));
    format!("{value} from the default, between {low} and {high}")
}
