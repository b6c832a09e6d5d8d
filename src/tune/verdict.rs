//! The verdict about one setting: how good it is, as thoroughly as asked.
//!
//! A rate is judged by the search of `sluice bench --find-rate` (`sluice_bench::search`): warm-up, a horizon of many times the longest
//! bound, overdue requests as misses, early ends, a bracket from saturation. In a race it gives up as soon as the rate is not
//! above the best so far by the margin: when the throughput at saturation is not, or when one trial there fails.
//!
//! A measure is judged by runs with the same seeds for every setting, so that changes are those of pairs. In a race the runs end when
//! the setting is certainly worse than the best: the interval of the pairs' mean logarithm, at a confidence that holds for
//! all looks at once ([`LOOKS`], Bonferroni), is below zero.

use crate::backend::{Backend, Started, System};
use crate::error::TuneError;
use crate::goal::{Goal, Objective};
use crate::script_verdict;
use crate::setting::Setting;
use crate::trial::{Certified, Effort, Outcome, Trial};
use sluice_bench::RunResult;
use sluice_bench::search::{SearchEnd, SearchGoal, SearchResult, TrialLoad, find_rate, validate};
use sluice_core::stats::compare::each_of;
use sluice_core::stats::{Change, Sense, mean, percentile};

/// Runs after which a race of a measure is looked at, as powers of two from 2 on.
const LOOKS: usize = 3;
/// Confidence of intervals.
const CONFIDENCE: f64 = 0.95;
/// A rate search of a race and of a rung knows the rate to this share, 90 %.
const COARSE: f64 = 0.05;
/// The most trials of a rate search in a race.
const RACE_TRIALS: usize = 30;
/// The confirmation knows the rate to this share, 90 %.
const FINE: f64 = 0.025;
/// Its most trials.
const CONFIRM_TRIALS: usize = 60;
/// The proofs of a confirmation have seeds from here on.
const PROOF_SEEDS: u64 = 1 << 20;
/// The seeds of a confirmation begin this far from those of the search.
pub(crate) const HOLDOUT: u64 = 1 << 24;

/// The best so far, for a race: its value, and its runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Incumbent {
    pub(crate) value: Option<f64>,
    pub(crate) runs: Vec<f64>,
}

/// Tries a setting.
///
/// # Errors
/// Those of the backend.
pub(crate) async fn judge<B: Backend>(
    backend: &mut B,
    goal: &Goal,
    setting: &Setting,
    effort: Effort,
    best: &Incumbent,
) -> Result<Trial, TuneError> {
    let mut trial = Trial {
        setting: setting.clone(),
        effort,
        seed: goal.seed,
        outcome: Outcome::Worse { guess: 0.0 },
        beside: Vec::new(),
        seconds: 0.0,
        start_seconds: 0.0,
        starts: 0,
        loads: 0,
        requests: 0,
        kv_full: false,
        notes: Vec::new(),
    };
    let mut system = match backend.start(setting).await? {
        Started::Up { system, seconds } => {
            (trial.starts, trial.start_seconds) = (1, seconds);
            system
        }
        Started::Refused { reason, seconds, foreseen } => {
            (trial.starts, trial.start_seconds) = (u32::from(!foreseen), seconds);
            trial.outcome = Outcome::Refused { reason, foreseen };
            return Ok(trial);
        }
    };
    if effort == Effort::Start {
        trial.outcome = Outcome::Starts;
        return Ok(trial);
    }
    match &goal.objective {
        Objective::Rate { attainment } if effort == Effort::Script => {
            let search = backend.search_goal(*attainment, goal.requests, goal.seed)?;
            script_verdict::judge(&mut system, &search, &mut trial).await?;
        }
        Objective::Rate { attainment } => {
            let seed = goal.seed.wrapping_add(if effort == Effort::Confirm { HOLDOUT } else { 0 });
            let search = backend.search_goal(*attainment, goal.requests, seed)?;
            rate(&mut system, goal, search, effort, best, &mut trial).await?;
        }
        Objective::Measure(_) => measure(&mut system, goal, effort, best, &mut trial).await?,
    }
    Ok(trial)
}

async fn rate<S: System>(
    system: &mut S,
    goal: &Goal,
    search: SearchGoal,
    effort: Effort,
    best: &Incumbent,
    trial: &mut Trial,
) -> Result<(), TuneError> {
    let search = match effort {
        Effort::Race(_) => {
            let floor = best.value.map(|best| best * (1.0 + goal.margin));
            SearchGoal { floor, prove: false, tolerance: COARSE, max_trials: RACE_TRIALS, ..search }
        }
        Effort::Rung(share) => {
            let requests = ((search.requests as f64 * share) as usize).max(30);
            SearchGoal { requests, prove: false, tolerance: COARSE / share.sqrt(), max_trials: RACE_TRIALS, ..search }
        }
        _ => SearchGoal { prove: false, tolerance: FINE, max_trials: CONFIRM_TRIALS, ..search },
    };
    let mut notes = Vec::new();
    let found = find_rate(system, &search, |_| ()).await?;
    notes.extend(system.notes());
    let kv_full = system.is_kv_full();
    count(trial, &found);
    trial.outcome = match (found.ending, found.boundary) {
        (SearchEnd::NoRate, _) => unmet(system, search.attainment, &found),
        (SearchEnd::BelowFloor, _) => Outcome::Worse { guess: guess(&found, search.floor.unwrap_or(0.0)) },
        (_, None) => Outcome::Worse { guess: 0.0 },
        (_, Some(value)) => {
            let certified = match found.safe.filter(|_| effort == Effort::Confirm) {
                Some(safe) => certify(system, goal, &search, safe, trial).await?,
                None => None,
            };
            Outcome::Measured { value: value.into(), runs: Vec::new(), certified }
        }
    };
    let group = found.trials.iter().rev().find(|run| run.attainment.value < search.attainment).map(|run| run.group);
    if let Some(name) = group.map(|group| system.group(group)).filter(|name| !name.is_empty()) {
        notes.push(format!("the requests of '{name}' decide"));
    }
    trial.notes = notes;
    trial.kv_full = kv_full;
    Ok(())
}

async fn certify<S: System>(
    system: &mut S,
    goal: &Goal,
    search: &SearchGoal,
    safe: f64,
    trial: &mut Trial,
) -> Result<Option<Certified>, TuneError> {
    let search = SearchGoal { seed: search.seed.wrapping_add(PROOF_SEEDS), ..*search };
    let proven = validate(system, &search, safe, goal.repeats).await?;
    Ok(proven.map(|proven| {
        trial.loads += proven.proofs as u32;
        trial.requests += proven.requests as u64;
        trial.seconds += proven.requests as f64 / proven.rate;
        let (proofs, requests) = (proven.proofs, proven.requests);
        Certified { rate: proven.rate, attainment: proven.attainment.into(), proofs, requests }
    }))
}

fn count(trial: &mut Trial, found: &SearchResult) {
    trial.loads += found.trials.len() as u32;
    trial.seconds += found.trials.iter().map(|run| run.stats.seconds).sum::<f64>();
    trial.requests += found.trials.iter().map(|run| run.requests as u64).sum::<u64>();
}

/// About where the highest rate of a search that gave up lies: below the throughput at saturation, and below a rate that failed.
fn guess(found: &SearchResult, floor: f64) -> f64 {
    let most = found.trials.iter().find_map(|run| match run.load {
        TrialLoad::Saturated(_) => Some(run.stats.throughput.value),
        _ => None,
    });
    most.unwrap_or(floor).min(floor)
}

/// The objective that single requests miss by most.
fn unmet<S: System>(system: &S, attainment: f64, found: &SearchResult) -> Outcome {
    let group = found.trials.last().map(|run| system.group(run.group)).unwrap_or_default();
    let (class, objective, ratio) =
        system.last().and_then(|result| binding(result, attainment)).unwrap_or((String::new(), "E2EL", f64::INFINITY));
    // JSON has no infinity.
    let ratio = ratio.min(1e9);
    Outcome::Unmet { group: if group.is_empty() { class } else { group }, objective: objective.to_owned(), ratio }
}

/// The class and the objective that are missed by most, and by how much: the quantile of the measure over its bound.
fn binding(result: &RunResult, attainment: f64) -> Option<(String, &'static str, f64)> {
    let mut worst: Option<(String, &'static str, f64)> = None;
    for (index, class) in (0..).zip(&result.config.classes) {
        let slo = result.config.slo_of(index);
        for (name, bound) in [("TTFT", slo.ttft), ("TPOT", slo.tpot), ("E2EL", slo.e2el)] {
            let Some(bound) = bound else { continue };
            let value = |record: &sluice_bench::Record| match name {
                _ if !record.is_completed() => f64::INFINITY,
                "TTFT" => record.ttft,
                "TPOT" => record.tpot().unwrap_or(0.0),
                _ => record.latency,
            };
            let records = result.requests.iter().filter(|record| record.class == index);
            let mut values: Vec<f64> = records.map(|record| value(record) * 1e3 / bound).collect();
            values.sort_by(f64::total_cmp);
            if !values.is_empty() {
                let ratio = percentile(&values, attainment);
                if worst.as_ref().is_none_or(|(.., other)| ratio > *other) {
                    worst = Some((class.name.clone(), name, ratio));
                }
            }
        }
    }
    worst
}

async fn measure<S: System>(
    system: &mut S,
    goal: &Goal,
    effort: Effort,
    best: &Incumbent,
    trial: &mut Trial,
) -> Result<(), TuneError> {
    let (runs, holdout) = match effort {
        Effort::Rung(share) => (((goal.runs as f64 * share).round() as usize).max(1), 0),
        Effort::Confirm => (2 * goal.runs, HOLDOUT),
        _ => (goal.runs, 0),
    };
    let mut values: Vec<Vec<f64>> = Vec::new();
    for run in 0..runs {
        let (observed, seconds) = system.observe(goal.seed.wrapping_add(holdout).wrapping_add(run as u64)).await?;
        trial.loads += 1;
        trial.seconds += seconds;
        trial.requests += system.last().map_or(0, |result| result.requests.len() as u64);
        values.push(observed);
        let of_objective: Vec<f64> = values.iter().map(|values| values[0]).collect();
        let is_look = matches!(effort, Effort::Race(_)) && (run + 1).is_power_of_two() && run > 0 && run + 1 < runs;
        if is_look && is_worse(&of_objective, &best.runs, goal.sense()) {
            trial.outcome = Outcome::Worse { guess: mean::of_series(&of_objective, CONFIDENCE).value };
            trial.notes = system.notes();
            return Ok(());
        }
    }
    let series = |at: usize| values.iter().map(|values| values[at]).collect::<Vec<f64>>();
    let own = series(0);
    trial.beside = (1..=goal.beside.len()).map(|at| mean::of_series(&series(at), CONFIDENCE).value).collect();
    trial.notes = system.notes();
    let value = mean::of_series(&own, CONFIDENCE);
    trial.outcome = match value.value.is_finite() {
        true => Outcome::Measured { value: value.into(), runs: own, certified: None },
        // No request of the class was completed.
        false => Outcome::Worse { guess: 0.0 },
    };
    Ok(())
}

/// Whether pairs of runs show that the values are worse than those of the best.
fn is_worse(values: &[f64], best: &[f64], sense: Sense) -> bool {
    let Change(change) = Change::of_pairs(&best[..values.len().min(best.len())], values, each_of(LOOKS, CONFIDENCE));
    match sense {
        Sense::LowerIsBetter => change.low > 0.0,
        Sense::HigherIsBetter => change.high < 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::base::Rng;

    /// Pairs of runs with a noise in common and one of their own, and a true ratio.
    fn pairs(seed: u64, count: usize, ratio: f64) -> (Vec<f64>, Vec<f64>) {
        let mut rng = Rng::new(Rng::new(seed).next_u64());
        let mut noise = |size: f64| ((0..12).map(|_| rng.unit()).sum::<f64>() - 6.0) * size;
        let pair = |_| {
            let shared = noise(0.3);
            ((shared + noise(0.05)).exp(), (shared + noise(0.05)).exp() * ratio)
        };
        (0..count).map(pair).unzip()
    }

    #[test]
    fn a_race_seldom_ends_a_setting_that_is_as_good_and_nearly_always_one_that_is_much_worse() {
        let ended = |ratio: f64| {
            let seeds = 0..2000;
            let ends = |seed: &u64| {
                let (best, values) = pairs(*seed, 8, ratio);
                [2, 4].iter().any(|count| is_worse(&values[..*count], &best[..*count], Sense::LowerIsBetter))
            };
            seeds.filter(ends).count() as f64 / 2000.0
        };
        // Two looks of three, one side of each interval: 1.7 % are promised.
        assert!(ended(1.0) < 0.025, "{}", ended(1.0));
        assert!(ended(1.5) > 0.95, "{}", ended(1.5));
        assert!(ended(0.7) == 0.0);
    }
}
