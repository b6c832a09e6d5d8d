//! Where a Gaussian process expects the largest gain, and the engine to start.
//!
//! It begins with the default and [`DESIGN`] settings for each dimension, spread evenly (the additive recurrence of Roberts 2018, mapped to
//! the nearest settings). From then on it asks for the setting with the largest *expected improvement x probability of starting*. The
//! process is fitted to the scores; its guesses for settings that lost a race are rough, which the noise absorbs. The
//! probability is the share of started settings among those that were tried, weighted by how alike the process finds them.
//! It ends when the largest product is below [`SMALL`].

use super::ask::{Ask, Known, Search, score};
use super::gaussian::Gaussian;
use crate::setting::Setting;
use crate::trial::{Outcome, Trial};

/// Settings for each dimension that the search begins with.
const DESIGN: usize = 2;
/// An expected gain of the score below this one ends the search: 0.2 %.
const SMALL: f64 = 0.002;
/// The weight of the belief that a setting starts, in trials.
const PRIOR: f64 = 0.5;

/// The search. See the header of this file.
pub(super) struct Model {
    coordinates: Vec<Vec<f64>>,
    /// Settings of the beginning, the next one last.
    design: Vec<usize>,
}

impl Model {
    pub(super) fn new(known: &Known<'_>) -> Self {
        let coordinates: Vec<Vec<f64>> =
            known.settings.iter().map(|setting| known.space.coordinates(setting)).collect();
        let design = design(&coordinates, DESIGN * known.space.dimensions.len(), known.goal.seed);
        Self { coordinates, design }
    }

    fn place(known: &Known<'_>, setting: &Setting) -> Option<usize> {
        known.settings.iter().position(|own| own == setting)
    }
}

/// `count` settings that are spread evenly, the default as the last.
fn design(coordinates: &[Vec<f64>], count: usize, seed: u64) -> Vec<usize> {
    let dimensions = coordinates.first().map_or(0, Vec::len);
    // The root of x^(d+1) = x + 1.
    let root = (0..64).fold(2.0f64, |x, _| (1.0 + x).powf(1.0 / (dimensions as f64 + 1.0)));
    let offset = (seed % 1024) as f64 / 1024.0;
    let mut chosen: Vec<usize> = vec![0];
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
        // The default may lie anywhere in the space: it says nothing about its neighbours.
        let scored: Vec<(&Vec<f64>, f64)> = tried
            .iter()
            .filter(|(at, _)| *at != 0)
            .filter_map(|(at, trial)| Some((&self.coordinates[*at], score(trial, known.goal)?)))
            .collect();
        let (points, scores): (Vec<Vec<f64>>, Vec<f64>) =
            scored.into_iter().map(|(point, score)| (point.clone(), score)).unzip();
        let best = known.best().and_then(|trial| score(trial, known.goal));
        let open: Vec<usize> = (1..known.settings.len()).filter(|at| !tried.iter().any(|(own, _)| own == at)).collect();
        let Some((process, best)) = Gaussian::fit(&points, &scores).zip(best) else {
            // Nothing to learn from yet.
            return open.first().map(|at| known.race(&known.settings[*at]));
        };
        let starts = |point: &[f64]| {
            let (mut up, mut all) = (PRIOR, PRIOR);
            for (at, trial) in &tried {
                let weight = process.likeness(point, &self.coordinates[*at]);
                all += weight;
                up += if matches!(trial.outcome, Outcome::Refused { .. }) { 0.0 } else { weight };
            }
            up / all
        };
        let gain = |at: usize| {
            let point = &self.coordinates[at];
            process.expected_improvement(point, best) * starts(point)
        };
        let most = open.into_iter().map(|at| (gain(at), at)).max_by(|one, other| one.0.total_cmp(&other.0))?;
        (most.0 >= SMALL).then(|| known.race(&known.settings[most.1]))
    }
}
