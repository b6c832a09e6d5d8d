//! Asks for settings with the largest expected gain, by a Gaussian process.
//!
//! The search begins with the default, the [`PREDICTED`] best settings of a simulation, and
//! [`DESIGN`] evenly spread settings for each dimension (additive recurrence, Roberts 2018, mapped
//! to the nearest settings). Then it asks for the largest *expected improvement x probability of
//! starting*, and ends when that is below [`SMALL`]. The process is fitted to scores or, with
//! predictions, to the differences between scores and predictions. The error of a guess for a lost
//! race counts as noise. The probability of starting is the share of the tried settings, weighted
//! by likeness, that started and kept the bounds.
//!
//! For a front each trial weighs the two measures differently ([`Weight`]), and the search ends
//! when none of [`WEIGHTS`] weights promises a gain.

use super::ask::{Ask, Known, Search, score};
use super::gaussian::Gaussian;
use crate::front::{Weight, pair};
use crate::setting::Setting;
use crate::trial::{Outcome, Trial};

const DESIGN: usize = 2;
const PREDICTED: usize = 3;
/// The smallest expected gain of the score: 0.2 %.
const SMALL: f64 = 0.002;
/// Prior weight, in trials, of a start.
const PRIOR: f64 = 0.5;
/// Weights of two measures tried before the search ends.
const WEIGHTS: usize = 8;
/// The golden ratio. Fractional parts of the multiples are spread evenly.
const GOLDEN: f64 = 0.618_033_988_749_895;

pub(super) struct Model {
    coordinates: Vec<Vec<f64>>,
    /// Settings of the beginning, the next one last.
    design: Vec<usize>,
    predicted: Vec<Option<usize>>,
}

impl Model {
    pub(super) fn new(known: &Known<'_>) -> Self {
        let coordinates: Vec<Vec<f64>> =
            known.settings.iter().map(|setting| known.space.coordinates(setting)).collect();
        let mut first = vec![0];
        let predicted = if known.predicted.is_empty() { Vec::new() } else { by_prediction(known) };
        first.extend(predicted.into_iter().filter(|at| *at != 0).take(PREDICTED));
        let design = design(&coordinates, first, DESIGN * known.space.dimensions.len(), known.goal.seed);
        let place = |setting: &Setting| known.predicted.iter().position(|trial| trial.setting == *setting);
        let predicted = known.settings.iter().map(place).collect();
        Self { coordinates, design, predicted }
    }

    fn place(known: &Known<'_>, setting: &Setting) -> Option<usize> {
        known.settings.iter().position(|own| own == setting)
    }

    fn most(&self, known: &Known<'_>, tried: &[(usize, &Trial)], weight: Option<Weight>) -> Option<(f64, usize)> {
        let score = |trial: &Trial| match weight {
            Some(weight) => pair(trial, known.goal).map(|pair| weight.score(pair)),
            None => score(trial, known.goal),
        };
        let predicted = |at: usize| self.predicted[at].and_then(|place| score(&known.predicted[place]));
        let all: Vec<f64> = (0..known.settings.len()).filter_map(predicted).collect();
        let usual = all.iter().sum::<f64>() / all.len().max(1) as f64;
        let prior = |at: usize| predicted(at).unwrap_or(usual);
        // The default may lie anywhere in the space, so its value says nothing about neighbours.
        let (points, differences): (Vec<Vec<f64>>, Vec<f64>) = tried
            .iter()
            .filter(|(at, _)| *at != 0)
            .filter_map(|(at, trial)| Some((self.coordinates[*at].clone(), score(trial)? - prior(*at))))
            .unzip();
        let measured = tried.iter().filter(|(_, trial)| trial.value().is_some());
        let best = measured.filter_map(|(_, trial)| score(trial)).reduce(f64::max);
        let mut open = (1..known.settings.len()).filter(|at| !tried.iter().any(|(own, _)| own == at));
        let Some((process, best)) = Gaussian::fit(&points, &differences).zip(best) else {
            return open.next().map(|at| (f64::INFINITY, at));
        };
        let starts = |point: &[f64]| {
            let (mut up, mut all) = (PRIOR, PRIOR);
            for (at, trial) in tried {
                let weight = process.likeness(point, &self.coordinates[*at]);
                all += weight;
                up += if matches!(trial.outcome, Outcome::Refused { .. } | Outcome::Exceeds { .. }) {
                    0.0
                } else {
                    weight
                };
            }
            up / all
        };
        let gain = |at: usize| {
            let point = &self.coordinates[at];
            process.expected_improvement(point, best - prior(at)) * starts(point)
        };
        open.map(|at| (gain(at), at)).max_by(|one, other| one.0.total_cmp(&other.0))
    }
}

fn by_prediction(known: &Known<'_>) -> Vec<usize> {
    let scored = known.settings.iter().enumerate().filter_map(|(at, setting)| Some((known.prediction(setting)?, at)));
    let mut scored: Vec<(f64, usize)> = scored.collect();
    scored.sort_by(|one, other| other.0.total_cmp(&one.0));
    scored.into_iter().map(|(_, at)| at).collect()
}

/// `chosen`, and `count` evenly spread others, in reverse order.
fn design(coordinates: &[Vec<f64>], mut chosen: Vec<usize>, count: usize, seed: u64) -> Vec<usize> {
    let dimensions = coordinates.first().map_or(0, Vec::len);
    // The root of x^(d+1) = x + 1.
    let root = (0..64).fold(2.0f64, |x, _| (1.0 + x).powf(1.0 / (dimensions as f64 + 1.0)));
    let offset = (seed % 1024) as f64 / 1024.0;
    for number in 1..=count {
        let at = |axis: usize| (offset + number as f64 / root.powi(axis as i32 + 1)).fract();
        let distance =
            |place: &usize| coordinates[*place].iter().enumerate().map(|(axis, x)| (x - at(axis)).powi(2)).sum::<f64>();
        let open = (1..coordinates.len()).filter(|place| !chosen.contains(place));
        chosen.extend(open.min_by(|one, other| distance(one).total_cmp(&distance(other))));
    }
    chosen.reverse();
    chosen
}

impl Search for Model {
    fn next(&mut self, known: &Known<'_>) -> Option<Ask> {
        if let Some(at) = self.design.pop() {
            return Some(known.race(&known.settings[at]));
        }
        let tried: Vec<(usize, &Trial)> =
            known.trials.iter().filter_map(|trial| Some((Self::place(known, &trial.setting)?, trial))).collect();
        let pairs = || known.trials.iter().filter_map(|trial| pair(trial, known.goal));
        let weights = if known.goal.against.is_some() { WEIGHTS } else { 1 };
        (0..weights).find_map(|attempt| {
            let share = ((known.trials.len() + attempt) as f64 * GOLDEN).fract();
            let (gain, at) = self.most(known, &tried, Weight::new(share, pairs()))?;
            (gain >= SMALL).then(|| known.race(&known.settings[at]))
        })
    }
}
