//! A tuning: trials as the search asks for them, then the winner against the default.
//!
//! The best of many noisy values is too good by chance. So the winner and the default are measured once more, with loads of their
//! own, and only that is reported: a certified rate for each, and the change between them with its interval. The winner wins
//! if that interval is above zero and the gain not within the margin; otherwise the default is as good.

use std::time::Duration;

use crate::backend::Backend;
use crate::error::TuneError;
use crate::goal::{Goal, Objective};
use crate::journal::Journal;
use crate::search::{Ask, Known, Method, Pruned, best};
use crate::setting::Setting;
use crate::space::Space;
use crate::trial::{Effort, Outcome, Trial};
use crate::verdict::{Incumbent, judge};
use sluice_core::stats::{Change, Estimate, Verdict};

/// Settings that cannot be confirmed before the tuning ends without a winner.
const CONFIRMATIONS: usize = 3;
/// Confidence of the change between the winner and the default.
const CONFIDENCE: f64 = 0.95;

/// When a search ends at the latest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Budget {
    /// Trials of the search.
    pub trials: Option<usize>,
    /// Time of the engines, starts included.
    pub time: Option<Duration>,
}

/// What is tuned, and how.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The settings.
    pub space: Space,
    /// What is optimised.
    pub goal: Goal,
    /// How it is searched.
    pub method: Method,
    /// When the search ends.
    pub budget: Budget,
}

/// The winner against the default.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The change from the default to the winner, as a share.
    pub change: Estimate,
    /// What that means.
    pub verdict: Verdict,
}

/// The result of a tuning.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Every trial, in order.
    pub trials: Vec<Trial>,
    /// What was left out.
    pub pruned: Vec<Pruned>,
    /// Settings of the space.
    pub settings: usize,
    /// The confirmation of the winner. `None`: no setting meets the goal.
    pub winner: Option<Trial>,
    /// The confirmation of the default, unless the winner is the default, or the default meets nothing.
    pub default: Option<Trial>,
    /// The winner against the default.
    pub comparison: Option<Comparison>,
    /// Whether the budget ended the search.
    pub out_of_budget: bool,
}

/// What happens in a tuning.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A trial begins: its setting and effort.
    Begins(&'a Setting, Effort),
    /// It has ended; the best so far.
    Ended(&'a Trial, Option<&'a Trial>),
}

/// A tuning under way.
struct Tuning<'a, B, F> {
    plan: &'a Plan,
    backend: &'a mut B,
    journal: &'a mut Journal,
    /// Trials of the journal that were not asked for yet.
    replay: std::vec::IntoIter<Trial>,
    trials: Vec<Trial>,
    on_progress: F,
}

/// Tunes. `done` are the trials of a journal that is continued.
///
/// # Errors
/// The space is empty, the goal makes no sense, the backend fails, or the journal cannot be written.
pub async fn tune<B: Backend>(
    plan: &Plan,
    backend: &mut B,
    journal: &mut Journal,
    done: Vec<Trial>,
    on_progress: impl FnMut(Progress<'_>),
) -> Result<Report, TuneError> {
    let settings = plan.space.settings()?;
    let replay = done.into_iter();
    let mut tuning = Tuning { plan, backend, journal, replay, trials: Vec::new(), on_progress };
    let start = Known { space: &plan.space, settings: &settings, goal: &plan.goal, trials: &[] };
    let mut search = plan.method.search(&start);
    let mut out_of_budget = false;
    loop {
        if tuning.is_out_of_budget() {
            out_of_budget = true;
            break;
        }
        let trials = std::mem::take(&mut tuning.trials);
        let ask = search.next(&Known { trials: &trials, ..start });
        tuning.trials = trials;
        match ask {
            Some(ask) => tuning.try_out(&ask).await?,
            None => break,
        }
    }
    let pruned = search.pruned().to_vec();
    let (winner, default, comparison) = match plan.method {
        // The script confirms nothing.
        Method::AutoTune => (best(&tuning.trials, &plan.goal).cloned(), None, None),
        _ => tuning.confirm().await?,
    };
    let trials = tuning.trials;
    Ok(Report { trials, pruned, settings: settings.len(), winner, default, comparison, out_of_budget })
}

impl<B: Backend, F: FnMut(Progress<'_>)> Tuning<'_, B, F> {
    fn is_out_of_budget(&self) -> bool {
        let Budget { trials, time } = self.plan.budget;
        let spent: f64 = self.trials.iter().map(|trial| trial.seconds + trial.start_seconds).sum();
        trials.is_some_and(|most| self.trials.len() >= most) || time.is_some_and(|most| spent >= most.as_secs_f64())
    }

    /// Runs a trial, or takes it from the journal.
    async fn try_out(&mut self, ask: &Ask) -> Result<(), TuneError> {
        (self.on_progress)(Progress::Begins(&ask.setting, ask.effort));
        let trial = match self.replay.next() {
            Some(trial) if is_same(&trial, ask) => trial,
            Some(trial) => return Err(self.journal.mismatch(&crate::setting::name(&trial.setting))),
            None => {
                let own = best(&self.trials, &self.plan.goal);
                let incumbent = Incumbent {
                    value: own.and_then(Trial::value),
                    runs: own.map(|trial| trial.runs().to_vec()).unwrap_or_default(),
                };
                let trial = judge(self.backend, &self.plan.goal, &ask.setting, ask.effort, &incumbent).await?;
                self.journal.append(&trial)?;
                trial
            }
        };
        self.trials.push(trial);
        let best = best(&self.trials, &self.plan.goal);
        if let Some(trial) = self.trials.last() {
            (self.on_progress)(Progress::Ended(trial, best));
        }
        Ok(())
    }

    /// Measures the best setting and the default once more. If the best does not hold, the next best.
    async fn confirm(&mut self) -> Result<(Option<Trial>, Option<Trial>, Option<Comparison>), TuneError> {
        let mut candidates: Vec<(f64, Setting)> = Vec::new();
        let mut left = self.trials.clone();
        while let Some(best) = best(&left, &self.plan.goal) {
            let (setting, score) =
                (best.setting.clone(), best.value().map_or(0.0, |value| self.plan.goal.score(value)));
            left.retain(|trial| trial.setting != setting);
            candidates.push((score, setting));
        }
        let mut winner = None;
        for (_, setting) in candidates.into_iter().take(CONFIRMATIONS) {
            self.try_out(&Ask { setting, effort: Effort::Confirm }).await?;
            winner = self.trials.last().filter(|trial| self.holds(trial)).cloned();
            if winner.is_some() {
                break;
            }
        }
        let Some(won) = &winner else { return Ok((None, None, None)) };
        let untuned = Setting::new();
        let usable = self.trials.iter().any(|trial| trial.setting == untuned && trial.value().is_some());
        if won.setting.is_empty() || !usable {
            return Ok((winner, None, None));
        }
        self.try_out(&Ask { setting: untuned, effort: Effort::Confirm }).await?;
        let default = self.trials.last().cloned();
        let comparison = default.as_ref().and_then(|default| self.compare(default, won));
        Ok((winner, default, comparison))
    }

    fn holds(&self, trial: &Trial) -> bool {
        match (&trial.outcome, &self.plan.goal.objective) {
            (Outcome::Measured { certified, .. }, Objective::Rate { .. }) => certified.is_some(),
            (outcome, _) => matches!(outcome, Outcome::Measured { .. }),
        }
    }

    fn compare(&self, default: &Trial, winner: &Trial) -> Option<Comparison> {
        let change = match &self.plan.goal.objective {
            Objective::Rate { .. } => Change::ratio(&range(default)?, &range(winner)?),
            Objective::Measure(_) => Change::of_pairs(default.runs(), winner.runs(), CONFIDENCE),
        };
        let verdict = change.verdict(self.plan.goal.sense(), self.plan.goal.margin);
        Some(Comparison { change: change.0, verdict })
    }
}

fn range(trial: &Trial) -> Option<Estimate> {
    match &trial.outcome {
        Outcome::Measured { value, .. } => Some((*value).into()),
        _ => None,
    }
}

/// Whether a trial of the journal is the one that is asked for. Numbers may differ in the last bit after JSON.
fn is_same(trial: &Trial, ask: &Ask) -> bool {
    let close = |one: f64, other: f64| (one - other).abs() <= 1e-9 * one.abs().max(1.0);
    let effort = match (trial.effort, ask.effort) {
        (Effort::Race(Some(one)), Effort::Race(Some(other))) | (Effort::Rung(one), Effort::Rung(other)) => {
            close(one, other)
        }
        (one, other) => one == other,
    };
    effort && trial.setting == ask.setting
}
