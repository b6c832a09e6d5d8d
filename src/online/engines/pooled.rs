//! Pools the forecasts of successive simulations with the same flags, limits and load.
//!
//! Each simulation has other requests, so several make a gain more certain. The error of the mean
//! gain is the error of independent simulations, or the scatter of the gains if that is larger:
//! batches within one simulation are alike where the queue is nearly always full. Bounds:
//! [`ROUNDS_MAX`] simulations, the oldest go first.

use std::collections::VecDeque;
use std::time::Duration;

use crate::engines::flags::Flags;
use crate::engines::forecast::{Answer, BOUND, Candidate, Forecast, Question};
use crate::limits::Limits;

/// The most simulations in a pool.
const ROUNDS_MAX: usize = 64;
/// Simulations after which a clearly worse change is not simulated again.
const ROUNDS_MIN: usize = 3;

/// Simulations are pooled if these are equal.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Subject {
    pub(crate) flags: Flags,
    pub(crate) absent: Duration,
    pub(crate) limits: Limits,
    pub(crate) load_since: Duration,
}

/// The latest values, at most [`ROUNDS_MAX`].
#[derive(Clone, Debug, Default)]
struct Sample(VecDeque<f64>);

impl Sample {
    fn add(&mut self, value: f64) {
        self.0.push_back(value);
        if self.0.len() > ROUNDS_MAX {
            self.0.pop_front();
        }
    }

    fn count(&self) -> f64 {
        self.0.len() as f64
    }

    fn mean(&self) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.iter().sum::<f64>() / self.count())
    }

    fn squares(&self) -> f64 {
        let mean = self.mean().unwrap_or_default();
        self.0.iter().map(|value| (value - mean).powi(2)).sum()
    }
}

/// Forecasts of one change.
#[derive(Clone, Debug, Default)]
struct Change {
    gains: Sample,
    /// Squared standard errors of `gains`.
    errors: Sample,
    /// Attainment minus attainment without the change.
    attainment: Sample,
    /// Cost of an absent engine if the others have the change.
    absence: Sample,
    /// The part of the cost of an absent engine, without the change, that the change's limits save.
    limits_save: Sample,
    /// Gain of the change's limits without the flag.
    unchanged: Sample,
}

impl Change {
    fn error(&self) -> f64 {
        let count = self.gains.count();
        let within = (self.errors.mean().unwrap_or(f64::INFINITY) / count).sqrt();
        if count > 1.0 { within.max((self.gains.squares() / (count * (count - 1.0))).sqrt()) } else { within }
    }

    /// Lower and upper bound of the gain, if the simulation is right.
    fn range(&self) -> Option<(f64, f64)> {
        let (gain, error) = (self.gains.mean()?, BOUND * self.error());
        Some((gain - error, gain + error))
    }
}

/// The pooled forecasts for one subject.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pooled {
    subject: Option<Subject>,
    now: Sample,
    attainment: Sample,
    absence: Sample,
    changes: Vec<(Candidate, Change)>,
}

impl Pooled {
    /// Pools simulations of `subject` and forgets all others.
    pub(crate) fn begin(&mut self, subject: Subject) {
        if self.subject.as_ref() != Some(&subject) {
            *self = Self { subject: Some(subject), ..Self::default() };
        }
    }

    /// Adds a simulation. Returns the pooled answer for the candidates of the question.
    pub(crate) fn add(&mut self, question: &Question, answer: &Answer) -> Answer {
        let is_known = |forecast: &Forecast| forecast.loss.is_finite() && forecast.error.is_finite();
        let Some(now) = answer.now.filter(|now| now.loss.is_finite()) else { return answer.clone() };
        self.now.add(now.loss);
        self.attainment.add(now.attainment);
        answer.absence.filter(|absence| absence.is_finite()).into_iter().for_each(|absence| self.absence.add(absence));
        let (mut candidates, mut unchanged_by) = (Vec::new(), Vec::new());
        for (at, (candidate, forecast)) in question.candidates.iter().zip(&answer.candidates).enumerate() {
            let forecast = forecast.filter(is_known);
            candidates.push(forecast.map(|forecast| {
                let change = self.change(*candidate);
                change.gains.add(now.loss - forecast.loss);
                change.errors.add(forecast.error.powi(2));
                change.attainment.add(forecast.attainment - now.attainment);
                let own = |absence: Option<(usize, f64)>| {
                    absence.filter(|(of, absence)| *of == at && absence.is_finite()).map(|(_, absence)| absence)
                };
                own(answer.absence_with).into_iter().for_each(|absence| change.absence.add(absence));
                // In pairs: costs differ more between simulations than by the limits.
                let costs = answer.absence.zip(own(answer.absence_under));
                costs.into_iter().for_each(|(now, under)| change.limits_save.add(now - under));
                let unchanged = answer.unchanged.get(at).copied().flatten().filter(is_known);
                unchanged.into_iter().for_each(|forecast| change.unchanged.add(now.loss - forecast.loss));
                unchanged_by.push(change.unchanged.mean());
                (change.gains.mean().unwrap_or_default(), change.error(), change.attainment.mean().unwrap_or_default())
            }));
            unchanged_by.resize(at + 1, None);
        }
        let (loss, attainment) = (self.now.mean().unwrap_or_default(), self.attainment.mean().unwrap_or_default());
        let forecast = |(gain, error, more)| Forecast { loss: loss - gain, error, attainment: attainment + more };
        Answer {
            now: Some(Forecast { loss, attainment, ..now }),
            absence: self.absence.mean().or(answer.absence),
            candidates: candidates.into_iter().map(|candidate| candidate.map(forecast)).collect(),
            unchanged: unchanged_by.into_iter().map(|by| by.map(|gain| forecast((gain, 0.0, 0.0)))).collect(),
            ..answer.clone()
        }
    }

    fn change(&mut self, candidate: Candidate) -> &mut Change {
        let at = self.changes.iter().position(|(known, _)| *known == candidate).unwrap_or_else(|| {
            self.changes.push((candidate, Change::default()));
            self.changes.len() - 1
        });
        &mut self.changes[at].1
    }

    fn known(&self, candidate: Candidate) -> Option<&Change> {
        self.changes.iter().find(|(known, _)| *known == candidate).map(|(_, change)| change)
    }

    /// Cost of an absent engine if the others have this change; `None`: not simulated.
    pub(crate) fn absence_with(&self, candidate: Candidate) -> Option<f64> {
        self.known(candidate)?.absence.mean()
    }

    /// The part of that cost, without the change, that the change's limits save; `None`: no limits,
    /// or not simulated.
    pub(crate) fn limits_save(&self, candidate: Candidate) -> Option<f64> {
        self.known(candidate)?.limits_save.mean()
    }

    /// Whether another change is clearly better, so that this one is not simulated again.
    pub(crate) fn is_beaten(&self, candidate: Candidate) -> bool {
        let own = self.known(candidate).filter(|change| change.gains.0.len() >= ROUNDS_MIN);
        let best = self.changes.iter().filter_map(|(_, change)| Some(change.range()?.0)).fold(0.0, f64::max);
        own.and_then(Change::range).is_some_and(|(_, most)| most < best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::engines::flags::EngineFlag;

    const FLAG: EngineFlag = EngineFlag::MaxNumSeqs;

    fn to(to: f64) -> Candidate {
        Candidate { flag: FLAG, to, limits: None }
    }

    fn subject(seconds: u64) -> Subject {
        Subject {
            flags: Flags::from([(FLAG, 8.0)]),
            absent: Duration::from_secs(150),
            limits: Limits::default(),
            load_since: Duration::from_secs(seconds),
        }
    }

    fn question(candidates: &[f64]) -> Question {
        Question {
            pool: "all".to_owned(),
            flags: Flags::from([(FLAG, 8.0)]),
            limits: Vec::new(),
            candidates: candidates.iter().copied().map(to).collect(),
            absent: Duration::from_secs(150),
            requests: Vec::new(),
        }
    }

    fn answer(losses: &[f64], error: f64) -> Answer {
        let of = |loss: f64| Forecast { loss, error, attainment: 1.0 - loss };
        Answer {
            now: Some(of(0.5)),
            absence: Some(1.0),
            candidates: losses.iter().map(|loss| Some(of(*loss))).collect(),
            ..Answer::default()
        }
    }

    #[test]
    fn a_gain_is_known_better_the_more_simulations_show_it_and_worse_if_they_differ() {
        let pooled = |losses: &[f64]| {
            let mut pooled = Pooled::default();
            pooled.begin(subject(0));
            losses.iter().map(|loss| pooled.add(&question(&[16.0]), &answer(&[*loss], 0.1))).last().unwrap()
        };
        let error = |losses: &[f64]| pooled(losses).candidates[0].unwrap().error;
        assert_eq!(error(&[0.4]), 0.1);
        assert!((error(&[0.4; 16]) - 0.025).abs() < 1e-9, "{}", error(&[0.4; 16]));
        let apart: Vec<f64> = (0..16).map(|round| f64::from(round % 2)).collect();
        assert!(error(&apart) > 0.1, "{}", error(&apart));
        assert!((pooled(&[0.2, 0.4]).candidates[0].unwrap().loss - 0.3).abs() < 1e-9);
    }

    #[test]
    fn simulations_of_another_load_are_forgotten() {
        let mut pooled = Pooled::default();
        for (load, error) in [(0, 0.1), (0, 0.1 / 2f64.sqrt()), (9, 0.1)] {
            pooled.begin(subject(load));
            let found = pooled.add(&question(&[16.0]), &answer(&[0.4], 0.1)).candidates[0].unwrap().error;
            assert!((found - error).abs() < 1e-9, "{found}");
        }
    }

    #[test]
    fn a_change_that_another_one_beats_clearly_is_simulated_no_more() {
        let mut pooled = Pooled::default();
        pooled.begin(subject(0));
        for round in 0..ROUNDS_MIN {
            assert!(!pooled.is_beaten(to(4.0)), "{round}");
            pooled.add(&question(&[4.0, 16.0, 32.0]), &answer(&[0.6, 0.1, 0.12], 0.02));
        }
        assert_eq!([4.0, 16.0, 32.0, 64.0].map(|value| pooled.is_beaten(to(value))), [true, false, false, false]);
    }

    #[test]
    fn numbers_that_are_none_are_not_pooled() {
        let mut pooled = Pooled::default();
        pooled.begin(subject(0));
        let none = pooled.add(&question(&[16.0]), &answer(&[f64::NAN], 0.1));
        assert_eq!(none.candidates, [None]);
        assert!(pooled.add(&question(&[16.0]), &answer(&[0.1], 0.1)).candidates[0].unwrap().loss.is_finite());
        assert_eq!(pooled.add(&question(&[16.0]), &Answer::default()), Answer::default());
    }
}
