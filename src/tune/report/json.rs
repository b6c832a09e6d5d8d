//! A tuning as JSON: the answer, winner, default, all trials, and the settings left out.
//!
//! If the defaults are as good, `advised`, `use` and `patch` are empty. Trials are as in the
//! journal. Changes are shares: 0.1 is 10 % more.

use serde_json::{Value, json};

use crate::bound::Bound;
use crate::goal::Goal;
use crate::report::{answer, flags, table};
use crate::trial::Trial;
use crate::tuner::Report;
use sluice_core::stats::Estimate;

/// The result as JSON.
pub fn json(report: &Report, goal: &Goal) -> Value {
    let confirmed = |trial: &Option<Trial>| {
        trial.as_ref().map(|trial| json!({ "setting": trial.setting, "outcome": trial.outcome, "notes": trial.notes }))
    };
    let change = report.comparison.as_ref().map(|comparison| {
        let Estimate { value, low, high } = comparison.change;
        json!({ "value": value, "interval": [low, high], "verdict": format!("{:?}", comparison.verdict) })
    });
    let advised = answer::advised(report, goal);
    json!({
        "objective": goal.label(),
        "subject_to": goal.bounds.iter().map(Bound::text).collect::<Vec<_>>(),
        "answer": answer::answer(report, goal),
        "winner": confirmed(&report.winner),
        "default": confirmed(&report.default),
        "change": change,
        "engines": table::engines(report),
        "advised": advised,
        "use": advised.as_ref().map(flags::lines),
        "patch": advised.as_ref().map(flags::patch),
        "settings": report.settings,
        "out_of_budget": report.out_of_budget,
        "front": report.front.iter().map(|trial| &trial.setting).collect::<Vec<_>>(),
        "trials": report.trials,
        "predicted": report.predicted,
        "left_out": report.pruned,
    })
}
