//! A tuning: predictions, the trials of a search, then the winner against the default.
//!
//! With [`Plan::prior`], up to [`MOST_PREDICTED`] settings are first tried roughly in the
//! laboratory, without engine time. Predictions only guide the search.
//!
//! The best of many noisy values is too good by chance. So winner and default are measured again
//! with new loads, and only these values are reported: a certified rate for each, and the change
//! with an interval. The winner wins if the interval is above zero and the gain not within the
//! margin. For a front, up to [`MEMBERS`] members are measured again, and the ones that none beats
//! in both measures are reported.

use std::time::Duration;

use crate::backend::Backend;
use crate::error::TuneError;
use crate::front::{front, pair};
use crate::goal::{Goal, Objective};
use crate::journal::Journal;
use crate::laboratory::Laboratory;
use crate::learned::refusal;
use crate::load_line::LoadLine;
use crate::memory::{Bisection, SHARE, hungriest, with_share};
use crate::search::{Ask, Known, Method, Pruned, best};
use crate::setting::Setting;
use crate::space::Space;
use crate::trial::{Effort, Outcome, Trial};
use crate::verdict::{Incumbent, Loads, judge};
use sluice_bench::search::{TrialRecord, TrialReport};
use sluice_core::stats::{Change, Estimate, Verdict};
use sluice_lab::Scenario;

/// Settings confirmed before the tuning ends without a winner.
const CONFIRMATIONS: usize = 3;
const MEMBERS: usize = 6;
/// The most settings that are predicted. From a larger space they are chosen at random.
pub const MOST_PREDICTED: usize = 500;
/// Distance of the seeds of predictions from the seeds of the search.
const PREDICTIONS: u64 = 1 << 32;
const CONFIDENCE: f64 = 0.95;

/// The latest end of a search.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Budget {
    /// The most trials of the search.
    pub trials: Option<usize>,
    /// The most engine time, starts included.
    pub time: Option<Duration>,
}

/// The plan of a tuning.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The settings.
    pub space: Space,
    /// The goal.
    pub goal: Goal,
    /// The search method.
    pub method: Method,
    /// The latest end of the search.
    pub budget: Budget,
    /// The scenario that predicts values.
    pub prior: Option<Scenario>,
}

/// The winner compared with the default.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The change from default to winner, as a share.
    pub change: Estimate,
    /// The verdict on the change.
    pub verdict: Verdict,
}

/// The result of a tuning.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Every trial, in order.
    pub trials: Vec<Trial>,
    /// Predicted trials; empty without [`Plan::prior`].
    pub predicted: Vec<Trial>,
    /// Settings that were left out.
    pub pruned: Vec<Pruned>,
    /// Number of settings in the space.
    pub settings: usize,
    /// The confirmed winner; `None`: no setting meets the goal.
    pub winner: Option<Trial>,
    /// The confirmed default; `None`: it is the winner, or unusable.
    pub default: Option<Trial>,
    /// The winner against the default.
    pub comparison: Option<Comparison>,
    /// The confirmed settings of a front that none beats in both measures, the best in the
    /// objective first. The winner has the best product of both measures.
    pub front: Vec<Trial>,
    /// Whether the budget ended the search.
    pub out_of_budget: bool,
    /// Whether the engines were real; predictions never are.
    pub real: bool,
}

#[derive(Default)]
struct Confirmed {
    winner: Option<Trial>,
    default: Option<Trial>,
    comparison: Option<Comparison>,
    front: Vec<Trial>,
}

/// An event of a tuning.
#[derive(Debug)]
pub enum Progress<'a> {
    /// Settings predicted so far, and in total.
    Predicted(usize, usize),
    /// A trial begins, with a setting and an effort.
    Begins(&'a Setting, Effort),
    /// A load of the rate search has ended.
    Load(&'a TrialReport),
    /// The trial has ended, with the best so far.
    Ended(&'a Trial, Option<&'a Trial>),
}

struct Tuning<'a, B, F> {
    plan: &'a Plan,
    backend: &'a mut B,
    journal: &'a mut Journal,
    replay: std::vec::IntoIter<Trial>,
    trials: Vec<Trial>,
    on_progress: F,
}

/// Runs a tuning. `done`: the trials of a continued journal.
pub async fn tune<B: Backend>(
    plan: &Plan,
    backend: &mut B,
    journal: &mut Journal,
    done: Vec<Trial>,
    on_progress: impl FnMut(Progress<'_>),
) -> Result<Report, TuneError> {
    let mut settings = plan.space.settings()?;
    let replay = done.into_iter();
    plan.method.check(&plan.goal)?;
    let mut tuning = Tuning { plan, backend, journal, replay, trials: Vec::new(), on_progress };
    if let Some(share) = tuning.find_memory(&settings).await? {
        settings[1..].iter_mut().for_each(|setting| *setting = with_share(setting, share));
    }
    let before = tuning.trials.len();
    let predicted = tuning.predict(&settings).await?;
    let start = Known { space: &plan.space, settings: &settings, goal: &plan.goal, trials: &[], predicted: &predicted };
    let mut search = plan.method.search(&start);
    let mut out_of_budget = false;
    loop {
        if tuning.is_out_of_budget() {
            out_of_budget = true;
            break;
        }
        let trials = std::mem::take(&mut tuning.trials);
        let ask = search.next(&Known { trials: &trials[before..], ..start });
        tuning.trials = trials;
        match ask {
            Some(ask) => tuning.try_out(&ask).await?,
            None => break,
        }
    }
    let pruned = search.pruned().to_vec();
    let Confirmed { winner, default, comparison, front } = match plan.method {
        // The script confirms nothing.
        Method::AutoTune => Confirmed { winner: best(&tuning.trials, &plan.goal).cloned(), ..Confirmed::default() },
        _ if plan.goal.against.is_some() => tuning.confirm_front().await?,
        _ => tuning.confirm().await?,
    };
    let (trials, settings) = (tuning.trials, settings.len());
    Ok(Report { trials, predicted, pruned, settings, winner, default, comparison, front, out_of_budget, real: B::REAL })
}

impl<B: Backend, F: FnMut(Progress<'_>)> Tuning<'_, B, F> {
    fn is_out_of_budget(&self) -> bool {
        let Budget { trials, time } = self.plan.budget;
        let tried = self.trials.iter().filter(|trial| trial.effort != Effort::Stress).count();
        let spent: f64 = self.trials.iter().map(|trial| trial.seconds + trial.start_seconds).sum();
        trials.is_some_and(|most| tried >= most) || time.is_some_and(|most| spent >= most.as_secs_f64())
    }

    /// The largest share of memory with which engines survive, if the goal asks for it.
    async fn find_memory(&mut self, settings: &[Setting]) -> Result<Option<f64>, TuneError> {
        let Some(table) = &self.plan.goal.memory else { return Ok(None) };
        if settings.iter().any(|setting| setting.contains_key(SHARE)) {
            let text = format!("{SHARE} is a dimension and is found by tune.memory as well; leave out one of them");
            return Err(TuneError::Goal(text));
        }
        let mut bisection = Bisection::new(table)?;
        let hungriest = hungriest(settings);
        while let Some(share) = bisection.next() {
            self.try_out(&Ask { setting: with_share(&hungriest, share), effort: Effort::Stress }).await?;
            let lived = self.trials.last().is_some_and(|trial| trial.outcome == Outcome::Starts);
            bisection.record(share, lived);
        }
        Ok(bisection.found())
    }

    async fn try_out(&mut self, ask: &Ask) -> Result<(), TuneError> {
        (self.on_progress)(Progress::Begins(&ask.setting, ask.effort));
        let trial = match self.replayed(ask)? {
            Some(trial) => trial,
            None => {
                let incumbent = self.incumbent();
                let trial = match refusal(&self.trials, &ask.setting) {
                    Some(reason) => Trial::refused(&ask.setting, ask.effort, reason, true),
                    None => self.judge(ask, &incumbent).await?,
                };
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

    async fn judge(&mut self, ask: &Ask, best: &Incumbent) -> Result<Trial, TuneError> {
        let Self { plan, backend, journal, on_progress, .. } = self;
        let of = crate::setting::identity(&ask.setting);
        let past = journal.take_loads(&of);
        let mut on_load = |record: &TrialRecord| {
            on_progress(Progress::Load(&record.report));
            if B::REAL { journal.append_load(&LoadLine::new(of.clone(), record)) } else { Ok(()) }
        };
        let loads = Loads { past, on_load: &mut on_load };
        judge(*backend, &plan.goal, &ask.setting, ask.effort, best, loads).await
    }

    fn replayed(&mut self, ask: &Ask) -> Result<Option<Trial>, TuneError> {
        match self.replay.next() {
            Some(trial) if !is_same(&trial, ask) => Err(self.journal.mismatch(&crate::setting::name(&trial.setting))),
            trial => Ok(trial),
        }
    }

    fn incumbent(&self) -> Incumbent {
        let goal = &self.plan.goal;
        let own = best(&self.trials, goal);
        let members = front(self.trials.iter().filter(|trial| trial.is_search()), goal);
        Incumbent {
            value: own.and_then(Trial::value),
            runs: own.map(|trial| trial.runs().to_vec()).unwrap_or_default(),
            front: members.into_iter().map(|trial| [trial.runs().to_vec(), trial.against.clone()]).collect(),
        }
    }

    async fn predict(&mut self, settings: &[Setting]) -> Result<Vec<Trial>, TuneError> {
        let Some(scenario) = &self.plan.prior else { return Ok(Vec::new()) };
        let goal =
            Goal { seed: self.plan.goal.seed.wrapping_add(PREDICTIONS), hit_rate: None, ..self.plan.goal.clone() };
        let mut laboratory = Laboratory::new(scenario.clone(), goal.measures());
        let mut order = self.plan.space.order(settings, goal.seed);
        order.truncate(MOST_PREDICTED);
        let mut predicted = Vec::new();
        for (done, at) in (1..).zip(&order) {
            let ask = Ask { setting: settings[*at].clone(), effort: Effort::Predict };
            let trial = match self.replayed(&ask)? {
                Some(trial) => trial,
                None => {
                    let loads = Loads { past: Vec::new(), on_load: &mut |_| Ok(()) };
                    let trial =
                        judge(&mut laboratory, &goal, &ask.setting, ask.effort, &Incumbent::default(), loads).await?;
                    self.journal.append(&trial)?;
                    trial
                }
            };
            predicted.push(trial);
            (self.on_progress)(Progress::Predicted(done, order.len()));
        }
        Ok(predicted)
    }

    async fn confirm_front(&mut self) -> Result<Confirmed, TuneError> {
        let goal = &self.plan.goal;
        let members = front(self.trials.iter().filter(|trial| trial.is_search()), goal);
        // Of many members, evenly spread ones are chosen, both ends included.
        let step = (members.len().saturating_sub(1) as f64 / (MEMBERS - 1) as f64).max(1.0);
        let places = (0..MEMBERS).map(|number| (number as f64 * step).round() as usize);
        let mut chosen: Vec<Setting> =
            places.filter_map(|place| members.get(place)).map(|trial| trial.setting.clone()).collect();
        if !chosen.contains(&Setting::new()) && !chosen.is_empty() {
            chosen.push(Setting::new());
        }
        let begin = self.trials.len();
        for setting in chosen {
            self.try_out(&Ask { setting, effort: Effort::Confirm }).await?;
        }
        let confirmed = &self.trials[begin..];
        let front: Vec<Trial> = front(confirmed.iter(), goal).into_iter().cloned().collect();
        let product = |trial: &Trial| pair(trial, goal).map_or(f64::NEG_INFINITY, |pair| pair[0] + pair[1]);
        let winner = front.iter().max_by(|one, other| product(one).total_cmp(&product(other))).cloned();
        let default = confirmed.iter().find(|trial| trial.setting.is_empty() && self.holds(trial)).cloned();
        let both = winner.as_ref().filter(|won| !won.setting.is_empty()).zip(default.as_ref());
        let comparison = both.and_then(|(won, default)| self.compare(default, won));
        Ok(Confirmed { winner, default, comparison, front })
    }

    /// Measures the best setting and the default again. If the best does not hold, measures the
    /// next best.
    async fn confirm(&mut self) -> Result<Confirmed, TuneError> {
        let mut candidates: Vec<Setting> = Vec::new();
        let mut left = self.trials.clone();
        while candidates.len() < CONFIRMATIONS
            && let Some(best) = best(&left, &self.plan.goal)
        {
            let setting = best.setting.clone();
            left.retain(|trial| trial.setting != setting);
            candidates.push(setting);
        }
        let begin = self.trials.len();
        let mut winner = None;
        for setting in candidates {
            self.try_out(&Ask { setting, effort: Effort::Confirm }).await?;
            winner = self.trials.last().filter(|trial| self.holds(trial)).cloned();
            if winner.is_some() {
                break;
            }
        }
        let Some(won) = &winner else { return Ok(Confirmed::default()) };
        let untuned = Setting::new();
        let usable = self.trials.iter().any(|trial| trial.setting == untuned && trial.value().is_some());
        if won.setting.is_empty() || !usable {
            return Ok(Confirmed { winner, ..Confirmed::default() });
        }
        // The default is measured already if it was a candidate that did not hold.
        if !self.trials[begin..].iter().any(|trial| trial.setting == untuned) {
            self.try_out(&Ask { setting: untuned.clone(), effort: Effort::Confirm }).await?;
        }
        let default = self.trials[begin..].iter().find(|trial| trial.setting == untuned);
        let default = default.filter(|trial| !matches!(trial.outcome, Outcome::Lossy { .. } | Outcome::Exceeds { .. }));
        let default = default.cloned();
        let comparison = default.as_ref().and_then(|default| self.compare(default, won));
        Ok(Confirmed { winner, default, comparison, front: Vec::new() })
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
        Outcome::Measured { value, .. } => Some(*value),
        _ => None,
    }
}

/// Whether a trial of the journal is the requested one. Numbers may differ a little, because JSON
/// may change their last bit.
fn is_same(trial: &Trial, ask: &Ask) -> bool {
    let close = |one: f64, other: f64| (one - other).abs() <= 1e-9 * one.abs().max(1.0);
    let effort = match (trial.effort, ask.effort) {
        (Effort::Race(Some(one)), Effort::Race(Some(other))) => close(one, other),
        (one, other) => one == other,
    };
    effort && trial.setting == ask.setting
}
