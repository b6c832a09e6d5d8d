//! Pools the forecasts of successive simulations with the same flags, limits and load.
//!
//! Each simulation replays other requests. The error of the mean is computed as if simulations were
//! independent. If the gains of the simulations scatter more than this error explains, the error is
//! computed from the scatter. That happens where the queue is nearly always full, because the
//! batches within one simulation are alike there. Bounds: [`ROUNDS_MAX`] simulations; the oldest
//! are dropped first.

use std::collections::VecDeque;
use std::time::Duration;

use super::flags::Flags;
use super::forecast::{CandidateForecast, EngineAnswer, EngineCandidate, EngineQuestion};
use crate::limits::Limits;
use crate::limits::forecast::{BOUND, Forecast};

const ROUNDS_MAX: usize = 64;
/// Simulations after which a clearly worse change is not simulated again.
const ROUNDS_MIN: usize = 3;

/// Simulations with equal subjects are pooled.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Subject {
    pub(super) flags: Flags,
    pub(super) absent: Duration,
    pub(super) limits: Limits,
    pub(super) load_since: Duration,
}

#[derive(Clone, Debug, Default)]
struct Sample(VecDeque<f64>);

impl Sample {
    fn add(&mut self, value: f64) {
        self.0.push_back(value);
        if self.0.len() > ROUNDS_MAX {
            self.0.pop_front();
        }
    }

    fn extend(&mut self, value: Option<f64>) {
        value.filter(|value| value.is_finite()).into_iter().for_each(|value| self.add(value));
    }

    fn count(&self) -> f64 {
        self.0.len() as f64
    }

    fn mean(&self) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.iter().sum::<f64>() / self.count())
    }

    fn mean_or_0(&self) -> f64 {
        self.mean().unwrap_or_default()
    }

    fn squares(&self) -> f64 {
        let mean = self.mean_or_0();
        self.0.iter().map(|value| (value - mean).powi(2)).sum()
    }
}

#[derive(Clone, Debug, Default)]
struct Forecasts {
    gains: Sample,
    errors: Sample,
    /// Attainment with the change minus attainment without.
    attainment: Sample,
    /// Rise of the loss while an engine is absent and the others have the change.
    absence: Sample,
    /// How much less the loss rises while one engine is absent, if only the limits change.
    limits_save: Sample,
    unchanged: Sample,
}

impl Forecasts {
    fn error(&self) -> f64 {
        let count = self.gains.count();
        let within = (self.errors.mean().unwrap_or(f64::INFINITY) / count).sqrt();
        if count > 1.0 { within.max((self.gains.squares() / (count * (count - 1.0))).sqrt()) } else { within }
    }

    fn range(&self) -> Option<(f64, f64)> {
        let (gain, error) = (self.gains.mean()?, BOUND * self.error());
        Some((gain - error, gain + error))
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Pooled {
    subject: Option<Subject>,
    now: Sample,
    attainment: Sample,
    absence: Sample,
    changes: Vec<(EngineCandidate, Forecasts)>,
}

impl Pooled {
    pub(super) fn begin(&mut self, subject: Subject) {
        if self.subject.as_ref() != Some(&subject) {
            *self = Self { subject: Some(subject), ..Self::default() };
        }
    }

    pub(super) fn add(&mut self, question: &EngineQuestion, answer: &EngineAnswer) -> EngineAnswer {
        let Some(now) = answer.now.filter(|now| now.loss.is_finite()) else { return answer.clone() };
        self.now.add(now.loss);
        self.attainment.add(now.attainment);
        self.absence.extend(answer.absence);
        let mean = Forecast { loss: self.now.mean_or_0(), attainment: self.attainment.mean_or_0(), ..now };
        let each = question.candidates.iter().zip(&answer.candidates);
        EngineAnswer {
            now: Some(mean),
            absence: self.absence.mean().or(answer.absence),
            candidates: each
                .map(|(candidate, found)| self.add_to(*candidate, answer.absence, now, found, mean))
                .collect(),
            span: answer.span,
        }
    }

    /// `now` and `mean`: forecasts without a change, by this simulation and by all of them.
    fn add_to(
        &mut self,
        candidate: EngineCandidate,
        absence: Option<f64>,
        now: Forecast,
        found: &CandidateForecast,
        mean: Forecast,
    ) -> CandidateForecast {
        let is_known = |forecast: &Forecast| forecast.loss.is_finite() && forecast.error.is_finite();
        let Some(forecast) = found.forecast.filter(is_known) else { return CandidateForecast::default() };
        let change = self.change(candidate);
        change.gains.add(now.loss - forecast.loss);
        change.errors.add(forecast.error.powi(2));
        change.attainment.add(forecast.attainment - now.attainment);
        change.absence.extend(found.absence_with);
        // Both costs are from one simulation, because simulations differ more than limits.
        change.limits_save.extend(absence.zip(found.absence_under).map(|(now, under)| now - under));
        change.unchanged.extend(found.unchanged.filter(is_known).map(|unchanged| now.loss - unchanged.loss));
        let pooled = Forecast {
            loss: mean.loss - change.gains.mean_or_0(),
            error: change.error(),
            attainment: mean.attainment + change.attainment.mean_or_0(),
        };
        let unchanged = |gain| Forecast { loss: mean.loss - gain, error: 0.0, ..mean };
        CandidateForecast { forecast: Some(pooled), unchanged: change.unchanged.mean().map(unchanged), ..*found }
    }

    fn change(&mut self, candidate: EngineCandidate) -> &mut Forecasts {
        let at = self.changes.iter().position(|(known, _)| *known == candidate).unwrap_or_else(|| {
            self.changes.push((candidate, Forecasts::default()));
            self.changes.len() - 1
        });
        &mut self.changes[at].1
    }

    fn known(&self, candidate: EngineCandidate) -> Option<&Forecasts> {
        self.changes.iter().find(|(known, _)| *known == candidate).map(|(_, change)| change)
    }

    pub(super) fn absence_with(&self, candidate: EngineCandidate) -> Option<f64> {
        self.known(candidate)?.absence.mean()
    }

    pub(super) fn limits_save(&self, candidate: EngineCandidate) -> Option<f64> {
        self.known(candidate)?.limits_save.mean()
    }

    /// Whether another change is clearly better, so that this one is not simulated again.
    pub(super) fn is_beaten(&self, candidate: EngineCandidate) -> bool {
        let own = self.known(candidate).filter(|change| change.gains.0.len() >= ROUNDS_MIN);
        let best = self.changes.iter().filter_map(|(_, change)| Some(change.range()?.0)).fold(0.0, f64::max);
        own.and_then(Forecasts::range).is_some_and(|(_, most)| most < best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::engines::flags::EngineFlag;

    const FLAG: EngineFlag = EngineFlag::MaxNumSeqs;

    fn to(to: f64) -> EngineCandidate {
        EngineCandidate { flag: FLAG, to, limits: None }
    }

    fn subject(seconds: u64) -> Subject {
        Subject {
            flags: Flags::from([(FLAG, 8.0)]),
            absent: Duration::from_secs(150),
            limits: Limits::default(),
            load_since: Duration::from_secs(seconds),
        }
    }

    fn question(candidates: &[f64]) -> EngineQuestion {
        EngineQuestion {
            pool: "all".to_owned(),
            flags: Flags::from([(FLAG, 8.0)]),
            limits: Vec::new(),
            candidates: candidates.iter().copied().map(to).collect(),
            absent: Duration::from_secs(150),
            requests: Vec::new(),
        }
    }

    fn answer(losses: &[f64], error: f64) -> EngineAnswer {
        let of = |loss: f64| Forecast { loss, error, attainment: 1.0 - loss };
        EngineAnswer {
            now: Some(of(0.5)),
            absence: Some(1.0),
            candidates: losses
                .iter()
                .map(|loss| CandidateForecast { forecast: Some(of(*loss)), ..Default::default() })
                .collect(),
            ..EngineAnswer::default()
        }
    }

    #[test]
    fn a_gain_is_known_better_the_more_simulations_show_it_and_worse_if_they_differ() {
        let pooled = |losses: &[f64]| {
            let mut pooled = Pooled::default();
            pooled.begin(subject(0));
            losses.iter().map(|loss| pooled.add(&question(&[16.0]), &answer(&[*loss], 0.1))).last().unwrap()
        };
        let error = |losses: &[f64]| pooled(losses).candidates[0].forecast.unwrap().error;
        assert_eq!(error(&[0.4]), 0.1);
        assert!((error(&[0.4; 16]) - 0.025).abs() < 1e-9, "{}", error(&[0.4; 16]));
        let apart: Vec<f64> = (0..16).map(|round| f64::from(round % 2)).collect();
        assert!(error(&apart) > 0.1, "{}", error(&apart));
        assert!((pooled(&[0.2, 0.4]).candidates[0].forecast.unwrap().loss - 0.3).abs() < 1e-9);
    }

    #[test]
    fn simulations_of_another_load_are_forgotten() {
        let mut pooled = Pooled::default();
        for (load, error) in [(0, 0.1), (0, 0.1 / 2f64.sqrt()), (9, 0.1)] {
            pooled.begin(subject(load));
            let found = pooled.add(&question(&[16.0]), &answer(&[0.4], 0.1)).candidates[0].forecast.unwrap().error;
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
        assert_eq!(none.candidates, [CandidateForecast::default()]);
        assert!(pooled.add(&question(&[16.0]), &answer(&[0.1], 0.1)).candidates[0].forecast.unwrap().loss.is_finite());
        assert_eq!(pooled.add(&question(&[16.0]), &EngineAnswer::default()), EngineAnswer::default());
    }
}
