//! The objective: the highest rate at which objectives hold, or a measure.
//!
//! Values are compared by logarithms, so 11 is as far above 10 as 110 above 100.

use crate::bound::{Bound, MOST_BOUNDS};
use crate::error::TuneError;
use crate::file::{MemoryTable, TuneTable};
use sluice_core::stats::Sense;
use sluice_lab::Measure;

/// The value to optimise.
#[derive(Clone, Debug, PartialEq)]
pub enum Objective {
    /// The highest rate at which the requests of every class and adapter meet their objectives.
    Rate {
        /// The share (0 to 1) of requests that must meet them.
        attainment: f64,
    },
    /// A measure of runs with the traffic as configured.
    Measure(Measure),
}

/// An objective, and how thoroughly it is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Goal {
    /// The objective.
    pub objective: Objective,
    /// A second measure. If it is set, the result is the front of both measures.
    pub against: Option<Measure>,
    /// More measures to show.
    pub beside: Vec<Measure>,
    /// Bounds that a setting must keep.
    pub bounds: Vec<Bound>,
    /// Number of requests of the shortest trial, if the objective is a rate.
    pub requests: usize,
    /// Number of runs of a setting, if the objective is a measure.
    pub runs: usize,
    /// Runs with new loads that prove the winner.
    pub repeats: usize,
    /// Gain, as a share, below which a setting counts as no better.
    pub margin: f64,
    /// The least share of prompt tokens in the prefix caches.
    pub hit_rate: Option<f64>,
    /// Whether every setting is measured in full.
    pub complete: bool,
    /// The first seed.
    pub seed: u64,
    /// The range of `gpu-memory-utilization` to search first.
    pub memory: Option<MemoryTable>,
}

impl Goal {
    /// The goal of a table.
    pub fn new(table: &TuneTable, seed: u64) -> Result<Self, TuneError> {
        let objective = match table.objective.as_str() {
            "rate" => Objective::Rate { attainment: table.attainment / 100.0 },
            measure => Objective::Measure(measure.parse()?),
        };
        let beside = table.beside.iter().map(|text| text.parse()).collect::<Result<Vec<Measure>, _>>()?;
        let against = table.against.as_ref().map(|text| text.parse()).transpose()?;
        let bounds = table.subject_to.iter().map(|text| Bound::parse(text)).collect::<Result<Vec<_>, _>>()?;
        if bounds.len() > MOST_BOUNDS {
            return Err(TuneError::Goal(format!("tune.subject_to has more than {MOST_BOUNDS} bounds")));
        }
        let others = [
            ("tune.beside", !beside.is_empty()),
            ("tune.against", against.is_some()),
            ("tune.subject_to", !bounds.is_empty()),
        ];
        if let (Objective::Rate { .. }, Some((key, _))) = (&objective, others.iter().find(|(_, given)| *given)) {
            let text = "is for a measure as the objective; each trial of a rate has a load of its own";
            return Err(TuneError::Goal(format!("{key} {text}")));
        }
        let TuneTable { requests, runs, repeats, margin, complete, memory, .. } = *table;
        let (margin, hit_rate) = (margin / 100.0, table.hit_rate.map(|share| share / 100.0));
        Ok(Self {
            objective,
            against,
            beside,
            bounds,
            requests,
            runs,
            repeats,
            margin,
            hit_rate,
            complete,
            seed,
            memory,
        })
    }

    /// Whether a higher or a lower value is better.
    pub fn sense(&self) -> Sense {
        match &self.objective {
            Objective::Rate { .. } => Sense::HigherIsBetter,
            Objective::Measure(measure) => measure.sense(),
        }
    }

    /// The score of a value: a logarithm, more is better.
    pub fn score(&self, value: f64) -> f64 {
        score_of(self.sense(), value)
    }

    /// The measures of a run with the traffic as configured: the objective, the second measure of a
    /// front, the measures of the bounds, then the measures to show. All but the last count
    /// requests without a response in percentiles, so that no setting wins by shedding.
    pub fn measures(&self) -> Vec<Measure> {
        let own = match &self.objective {
            Objective::Rate { .. } => None,
            Objective::Measure(measure) => Some(measure.clone()),
        };
        let optimised = own.into_iter().chain(self.against.clone()).map(Measure::counting_lost);
        let bounded = self.bounds.iter().map(|bound| bound.measure.clone());
        optimised.chain(bounded).chain(self.beside.iter().cloned()).collect()
    }

    /// The objective as the head of a column.
    pub fn label(&self) -> String {
        match &self.objective {
            Objective::Rate { attainment } => format!("rate at {} % (/s)", attainment * 100.0),
            Objective::Measure(measure) => label_of(measure),
        }
    }
}

/// The score of a value: a logarithm, more is better. `sense`: the good direction.
pub fn score_of(sense: Sense, value: f64) -> f64 {
    let logarithm = value.max(1e-12).ln();
    if sense == Sense::HigherIsBetter { logarithm } else { -logarithm }
}

/// A measure as the head of a column.
pub fn label_of(measure: &Measure) -> String {
    match measure.unit() {
        "" => measure.to_string(),
        unit => format!("{measure} ({unit})"),
    }
}
