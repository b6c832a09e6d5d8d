//! Predictions of the laboratory next to measurements.
//!
//! Only settings that were measured in full are compared.

use crate::goal::Goal;
use crate::search::score;
use crate::setting::Setting;
use crate::trial::{Outcome, Trial};
use crate::tuner::Report;
use sluice_core::stats::percentile;
use sluice_lab::table::number;

/// The predicted value of a setting, as a cell.
pub fn cell(report: &Report, setting: &Setting) -> String {
    match report.predicted.iter().find(|trial| trial.setting == *setting).map(|trial| &trial.outcome) {
        Some(Outcome::Measured { value, .. }) => number(value.value),
        Some(Outcome::Refused { .. }) => "does not start".to_owned(),
        Some(Outcome::Unmet { .. }) => "none".to_owned(),
        Some(Outcome::Exceeds { .. }) => "out of bounds".to_owned(),
        _ => "-".to_owned(),
    }
}

/// How well predictions agree with measurements, if there are any.
pub fn agreement(report: &Report, goal: &Goal) -> Option<String> {
    let measured = report.trials.iter().filter(|trial| trial.is_search() && trial.value().is_some());
    let predicted = |trial: &Trial| report.predicted.iter().find(|other| other.setting == trial.setting);
    let error = |trial: &Trial| Some(f64::abs(score(predicted(trial)?, goal)? - score(trial, goal)?).exp_m1());
    let mut errors: Vec<f64> = measured.filter_map(error).collect();
    errors.sort_by(f64::total_cmp);
    let most = errors.last()?;
    let mut text = format!(
        "The laboratory's prediction of {} measured settings was off by {:.0} % (median), {:.0} % at most",
        errors.len(),
        percentile(&errors, 0.5) * 100.0,
        most * 100.0
    );
    if let Some(place) = report.winner.as_ref().and_then(|winner| place(report, goal, &winner.setting)) {
        text += &format!("; it ranks the best setting {place} of {}", report.predicted.len());
    }
    Some(text)
}

fn place(report: &Report, goal: &Goal, setting: &Setting) -> Option<usize> {
    let own = score(report.predicted.iter().find(|trial| trial.setting == *setting)?, goal)?;
    Some(1 + report.predicted.iter().filter(|trial| score(trial, goal).is_some_and(|other| other > own)).count())
}
