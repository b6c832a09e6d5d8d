//! The interface between the tuner and every search method.
//!
//! [`Search::next`] gets all trials so far and returns the next one to run.

use super::pruned::Pruned;
use crate::front::front;
use crate::goal::Goal;
use crate::setting::Setting;
use crate::space::Space;
use crate::trial::{Effort, Outcome, Trial};

pub(super) const CHANCE: u64 = 0x7475_6E65;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Known<'a> {
    pub(crate) space: &'a Space,
    /// Every setting of the space, the default first.
    pub(crate) settings: &'a [Setting],
    pub(crate) goal: &'a Goal,
    pub(crate) trials: &'a [Trial],
    /// Simulated trials, at most one for each setting.
    pub(crate) predicted: &'a [Trial],
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ask {
    pub(crate) setting: Setting,
    pub(crate) effort: Effort,
}

pub(crate) trait Search {
    /// The next trial; `None` ends the search.
    fn next(&mut self, known: &Known<'_>) -> Option<Ask>;

    fn pruned(&self) -> &[Pruned] {
        &[]
    }
}

impl<'a> Known<'a> {
    pub(crate) fn best(&self) -> Option<&'a Trial> {
        best(self.trials, self.goal)
    }

    pub(crate) fn leads(&self, setting: &Setting) -> bool {
        let best = self.best().filter(|_| self.goal.against.is_none()).into_iter();
        best.chain(front(self.trials.iter(), self.goal)).any(|trial| trial.setting == *setting)
    }

    pub(crate) fn race(&self, setting: &Setting) -> Ask {
        Ask { setting: setting.clone(), effort: Effort::Race(self.best().and_then(Trial::value)) }
    }

    /// Numbers of all settings in the order of [`Space::order`], with the best predicted settings
    /// as early as that order allows.
    pub(crate) fn order(&self) -> Vec<usize> {
        let by_chance = self.space.order(self.settings, self.goal.seed);
        let scores: Vec<f64> =
            self.settings.iter().map(|setting| self.prediction(setting).unwrap_or(f64::NEG_INFINITY)).collect();
        if self.predicted.is_empty() { by_chance } else { self.space.best_first(self.settings, &by_chance, &scores) }
    }

    pub(crate) fn prediction(&self, setting: &Setting) -> Option<f64> {
        score(self.predicted.iter().find(|trial| trial.setting == *setting)?, self.goal)
    }
}

/// The best trial measured in full; the first of equals.
pub fn best<'a>(trials: &'a [Trial], goal: &Goal) -> Option<&'a Trial> {
    let full = |trial: &&Trial| matches!(trial.effort, Effort::Race(_) | Effort::Script);
    let scored = trials.iter().filter(full).filter_map(|trial| Some((goal.score(trial.value()?), trial)));
    scored.reduce(|best, other| if other.0 > best.0 { other } else { best }).map(|(_, trial)| trial)
}

/// The score of a usable setting's trial; rough after a lost race.
pub fn score(trial: &Trial, goal: &Goal) -> Option<f64> {
    match &trial.outcome {
        Outcome::Measured { value, .. } => Some(goal.score(value.value)),
        Outcome::Worse { guess } if *guess > 0.0 => Some(goal.score(*guess)),
        _ => None,
    }
}
