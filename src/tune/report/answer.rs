//! What came out of a tuning, in sentences.
//!
//! The winner with what was proven of it, the default beside it, the change with its interval, and what the change means. Where no
//! setting can be used, the sentence names what is in the way: the objective that is missed, by how much and by which requests,
//! or what the engine says when it does not start.

use crate::goal::{Goal, Objective};
use crate::report::front;
use crate::setting::name;
use crate::trial::{Outcome, Range, Trial};
use crate::tuner::{Comparison, Report};
use sluice_core::stats::Verdict;
use sluice_lab::table::number;

/// The sentences, one a line.
pub fn answer(report: &Report, goal: &Goal) -> Vec<String> {
    let Some(winner) = &report.winner else { return vec![why_none(report)] };
    if goal.against.is_some() {
        let mut lines = front::lines(report, goal);
        lines.push(format!("the best compromise, by the product of both: {}", name(&winner.setting)));
        lines.extend(ended_early(report));
        return lines;
    }
    let mut lines = vec![format!("best: {}: {}", name(&winner.setting), value(winner, goal))];
    match (&report.default, &report.comparison) {
        (Some(default), comparison) => {
            lines.push(format!("default: {}", value(default, goal)));
            lines.extend(comparison.as_ref().map(|comparison| meaning(comparison, goal)));
        }
        (None, _) if winner.setting.is_empty() => {
            lines.push("the defaults are as good: no setting that was tried is better than them".to_owned());
        }
        (None, _) => lines.extend(default_is_unusable(report)),
    }
    lines.extend(winner.notes.iter().map(|note| format!("with it, {note}")));
    lines.extend(ended_early(report));
    lines
}

fn ended_early(report: &Report) -> Option<String> {
    let text = "the budget ended the search: a better setting may not have been tried";
    report.out_of_budget.then(|| text.to_owned())
}

/// The value of a confirmation, in the unit of the objective.
fn value(trial: &Trial, goal: &Goal) -> String {
    match (&trial.outcome, &goal.objective) {
        (Outcome::Measured { value, certified: Some(certified), .. }, Objective::Rate { .. }) => {
            let attainment = certified.attainment.value * 100.0;
            let (rate, proofs, requests) = (number(certified.rate), certified.proofs, certified.requests);
            format!(
                "{rate} requests/s certified ({attainment:.2} % of {requests} requests within their objectives, {proofs} \
                 proofs; the boundary is {})",
                interval(value, 90)
            )
        }
        (Outcome::Measured { value, .. }, Objective::Rate { .. }) => {
            format!("about {} requests/s, not certified", number(value.value))
        }
        (Outcome::Measured { value, .. }, Objective::Measure(measure)) => {
            format!("{measure} {} {}", interval(value, 95), measure.unit())
        }
        (outcome, _) => format!("{outcome:?}"),
    }
}

fn interval(range: &Range, percent: u32) -> String {
    match (range.low, range.high) {
        (Some(low), Some(high)) => {
            format!("{} (between {} and {} with {percent} %)", number(range.value), number(low), number(high))
        }
        _ => number(range.value),
    }
}

/// What a change means.
fn meaning(comparison: &Comparison, goal: &Goal) -> String {
    let change = &comparison.change;
    let [value, low, high] = [change.value, change.low, change.high].map(|share| format!("{:+.1} %", share * 100.0));
    let range = format!("{value}, between {low} and {high}");
    let margin = goal.margin * 100.0;
    match comparison.verdict {
        Verdict::Better => format!("the gain over the default: {range}"),
        Verdict::NoDifference => format!("the defaults are as good: the change is {range}, within {margin:.0} %"),
        Verdict::Worse => format!("the defaults are better: the change is {range}; keep them"),
        Verdict::Undecided => {
            format!("the defaults may be as good: the change is {range}; keep them, or measure longer")
        }
    }
}

/// Why the winner cannot be compared with the default.
fn default_is_unusable(report: &Report) -> Option<String> {
    // The last trial: the default may have failed only when it was measured again.
    let default = report.trials.iter().rfind(|trial| trial.setting.is_empty())?;
    match &default.outcome {
        Outcome::Refused { reason, .. } => Some(format!("the default does not start: {reason}")),
        Outcome::Unmet { .. } => Some(format!("the default meets no rate: {}", missed(&default.outcome)?)),
        Outcome::Lossy { measure } => {
            Some(format!("the default cannot be used: so many requests fail that {measure} is one of theirs"))
        }
        _ => None,
    }
}

/// Why there is no winner.
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

/// What is missed, and by how much.
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
        // A percentile between one that completes and one that does not.
        assert_eq!(text(6.9e8), "even single requests of 'a' miss E2EL because they do not complete");
    }
}
