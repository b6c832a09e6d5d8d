//! The result of a tuning in sentences.
//!
//! First the advice: use the winner, or keep defaults that are as good ([`advised`]). Then the
//! measured values of both, and the change with an interval. If no setting is usable, the sentence
//! names the obstacle: the missed objective, by how much and by which requests, or the message of
//! an engine that does not start.

use crate::goal::{Goal, Objective};
use crate::report::front;
use crate::setting::{Setting, name};
use crate::trial::{Effort, Outcome, Trial};
use crate::tuner::{Comparison, Report};
use sluice_core::stats::{Estimate, Verdict};
use sluice_lab::table::number;

/// The sentences, one a line.
pub fn answer(report: &Report, goal: &Goal) -> Vec<String> {
    let Some(winner) = &report.winner else { return vec![why_none(report)] };
    let mut lines = Vec::new();
    if advised(report, goal).is_some_and(|setting| setting.is_empty()) {
        lines.push(as_good(report, goal));
    }
    if goal.against.is_some() {
        lines.extend(front::lines(report, goal));
        lines.push(format!("the best compromise, by the product of both: {}", name(&winner.setting)));
        lines.extend(ended_early(report));
        return lines;
    }
    let default = report.default.as_ref().map(|default| format!("defaults: {}", value(default, goal)));
    let best = format!("best: {}: {}", name(&winner.setting), value(winner, goal));
    // The advised setting comes first.
    let both = if lines.is_empty() { [Some(best), default] } else { [default, Some(best)] };
    lines.extend(both.into_iter().flatten());
    match &report.comparison {
        Some(comparison) if comparison.verdict == Verdict::Better => {
            lines.push(format!("the gain over the defaults: {}", change(comparison, goal)));
        }
        Some(comparison) if is_alone_certified(report, goal) => {
            lines.push(format!("only the best setting has a certified rate; {}", change(comparison, goal)));
        }
        Some(_) => {}
        None => lines.extend(default_is_unusable(report)),
    }
    lines.extend(winner.notes.iter().map(|note| format!("with it, {note}")));
    lines.extend(ended_early(report));
    lines
}

/// The winner, or the defaults if the winner is not certainly better. A certified winner is never
/// given up for defaults without a certified rate.
pub fn advised(report: &Report, goal: &Goal) -> Option<Setting> {
    let winner = report.winner.as_ref()?;
    let keep = match (&report.comparison, &report.default) {
        _ if winner.setting.is_empty() => true,
        (_, default) if goal.against.is_some() => default.is_some() && !front::gains(report, goal),
        _ if is_alone_certified(report, goal) => false,
        (Some(comparison), _) => comparison.verdict != Verdict::Better,
        (None, _) => false,
    };
    Some(if keep { Setting::new() } else { winner.setting.clone() })
}

fn is_alone_certified(report: &Report, goal: &Goal) -> bool {
    let has_rate = |trial: &Option<Trial>| {
        let outcome = trial.as_ref().map(|trial| &trial.outcome);
        outcome.map(|outcome| matches!(outcome, Outcome::Measured { certified: Some(_), .. }))
    };
    let is_rate = matches!(goal.objective, Objective::Rate { .. });
    is_rate && has_rate(&report.winner) == Some(true) && has_rate(&report.default) == Some(false)
}

fn as_good(report: &Report, goal: &Goal) -> String {
    if goal.against.is_some() {
        return "the defaults are as good: keep them. No setting is certainly better than them in one of both"
            .to_owned();
    }
    let Some(comparison) = report.comparison.as_ref() else {
        return "the defaults are as good: keep them. No setting that was tried is better than them".to_owned();
    };
    let change = change(comparison, goal);
    let margin = goal.margin * 100.0;
    match comparison.verdict {
        Verdict::Worse => format!("the defaults are better: keep them. With the best other setting {change}"),
        Verdict::NoDifference => {
            format!("the defaults are as good: keep them. With the best other setting {change}, within {margin:.0} %")
        }
        _ => format!("the defaults may be as good: keep them, or measure longer. With the best other setting {change}"),
    }
}

fn ended_early(report: &Report) -> Option<String> {
    let text = "the budget ended the search: a better setting may not have been tried";
    report.out_of_budget.then(|| text.to_owned())
}

/// The value in words. A certified rate is lower than the estimate, because of margins and failed
/// proofs.
fn value(trial: &Trial, goal: &Goal) -> String {
    match (&trial.outcome, &goal.objective) {
        (Outcome::Measured { certified: Some(certified), .. }, _) if trial.effort == Effort::Script => {
            let (rate, requests) = (number(certified.rate), certified.requests);
            format!("{rate} requests/s by the rule of auto_tune.sh, from one run of {requests} requests; not confirmed")
        }
        (Outcome::Measured { value, certified: Some(certified), .. }, Objective::Rate { .. }) => {
            let attainment = certified.attainment.value * 100.0;
            let (rate, proofs, requests) = (number(certified.rate), certified.proofs, certified.requests);
            format!(
                "{rate} requests/s certified ({attainment:.2} % of {requests} requests within their objectives; proofs that \
                 were run: {proofs}); the highest rate is estimated at {}",
                interval(value, 90)
            )
        }
        (Outcome::Measured { value, .. }, Objective::Rate { .. }) => {
            format!("no rate is certified; the highest rate is estimated at {}", interval(value, 90))
        }
        (Outcome::Measured { value, .. }, Objective::Measure(measure)) => {
            format!("{measure} {} {}", interval(value, 95), measure.unit())
        }
        (outcome, _) => missed(outcome)
            .or_else(|| outcome.exceeds())
            .unwrap_or_else(|| "no value, when it was measured again".to_owned()),
    }
}

fn interval(estimate: &Estimate, percent: u32) -> String {
    let [value, low, high] = [estimate.value, estimate.low, estimate.high].map(number);
    if estimate.is_bounded() { format!("{value} (between {low} and {high} with {percent} %)") } else { value }
}

fn change(comparison: &Comparison, goal: &Goal) -> String {
    let change = &comparison.change;
    let [value, low, high] = [change.value, change.low, change.high].map(|share| match share.is_finite() {
        true => format!("{:+.1} %", share * 100.0),
        false => "any value".to_owned(),
    });
    let (of, percent) = match &goal.objective {
        Objective::Rate { .. } => ("the estimated highest rate".to_owned(), 90),
        Objective::Measure(measure) => (measure.to_string(), 95),
    };
    format!("{of} changes by {value} (between {low} and {high} with {percent} %)")
}

fn default_is_unusable(report: &Report) -> Option<String> {
    // The default may have failed only in the last trial, the confirmation.
    let default = report.trials.iter().rfind(|trial| trial.setting.is_empty())?;
    match &default.outcome {
        Outcome::Refused { reason, .. } => Some(format!("the defaults do not start: {reason}")),
        Outcome::Unmet { .. } => Some(format!("the defaults meet no rate: {}", missed(&default.outcome)?)),
        Outcome::Exceeds { .. } => Some(format!("the defaults do not qualify: {}", default.outcome.exceeds()?)),
        Outcome::Lossy { measure } => {
            Some(format!("the defaults cannot be used: so many requests fail that {measure} is one of theirs"))
        }
        _ => None,
    }
}

fn why_none(report: &Report) -> String {
    let nearest = report.trials.iter().filter_map(|trial| match &trial.outcome {
        Outcome::Unmet { ratio, .. } => Some((*ratio, trial)),
        _ => None,
    });
    let nearest = nearest.min_by(|one, other| one.0.total_cmp(&other.0));
    if let Some((_, trial)) = nearest {
        let missed = missed(&trial.outcome).unwrap_or_default();
        return format!(
            "no setting meets the objectives. The nearest is {}: {missed}. Loosen that objective, shorten these requests, or \
             use a faster GPU",
            name(&trial.setting)
        );
    }
    let nearest = report.trials.iter().filter_map(|trial| match &trial.outcome {
        Outcome::Exceeds { ratio, .. } => Some((*ratio, trial)),
        _ => None,
    });
    if let Some((_, trial)) = nearest.min_by(|one, other| one.0.total_cmp(&other.0)) {
        let exceeds = trial.outcome.exceeds().unwrap_or_default();
        return format!(
            "no setting keeps the bounds. The nearest is {}: {exceeds}. Loosen that bound, or add dimensions that serve it",
            name(&trial.setting)
        );
    }
    let lossy = report.trials.iter().find_map(|trial| match &trial.outcome {
        Outcome::Lossy { measure } => Some(measure),
        _ => None,
    });
    if let Some(measure) = lossy {
        return format!(
            "no setting can be used: so many requests fail that {measure} is one of theirs. Lower the load, or admit more of it"
        );
    }
    let cold = report.trials.iter().find_map(|trial| match trial.outcome {
        Outcome::ColdCache { hit_rate, wanted } => Some((hit_rate * 100.0, wanted * 100.0)),
        _ => None,
    });
    if let Some((hit_rate, wanted)) = cold {
        return format!(
            "the prefix caches held {hit_rate:.0} % of the prompts and not at least {wanted:.0} %: give the classes prefixes \
             (prefix_share, prefixes) as your traffic has them, enable prefix caching, or lower tune.hit_rate"
        );
    }
    let refused = report.trials.iter().find_map(|trial| match &trial.outcome {
        Outcome::Refused { reason, .. } => Some((trial, reason)),
        _ => None,
    });
    match refused {
        Some((trial, reason)) if report.trials.iter().all(|t| matches!(t.outcome, Outcome::Refused { .. })) => {
            format!("no engine starts. With {}, it says: {reason}", name(&trial.setting))
        }
        _ => "no setting held when it was measured again with other loads; give more requests (tune.requests) or seeds"
            .to_owned(),
    }
}

fn missed(outcome: &Outcome) -> Option<String> {
    let Outcome::Unmet { group, objective, ratio } = outcome else { return None };
    let by = match outcome.is_incomplete() {
        true => "because they do not complete".to_owned(),
        false => format!("by {:.0} %", (ratio - 1.0) * 100.0),
    };
    Some(format!("even single requests of '{group}' miss {objective} {by}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_do_not_complete_miss_no_objective_by_a_number() {
        let text = |ratio| {
            missed(&Outcome::Unmet { group: "a".to_owned(), objective: "E2EL".to_owned(), ratio }).unwrap_or_default()
        };
        assert_eq!(text(1.5), "even single requests of 'a' miss E2EL by 50 %");
        assert_eq!(text(6.9e8), "even single requests of 'a' miss E2EL because they do not complete");
    }
}
