//! What is optimised: the highest rate at which objectives hold, or a measure.
//!
//! Values are compared by their logarithms, so that ratios count: a rate of 11 is as far above 10 as 110 above 100.

use crate::error::TuneError;
use crate::file::{MemoryTable, TuneTable};
use sluice_core::stats::Sense;
use sluice_lab::Measure;

/// What is optimised.
#[derive(Clone, Debug, PartialEq)]
pub enum Objective {
    /// The highest rate at which this share (0 to 1) of the requests of every class and adapter meets its objectives.
    Rate {
        /// The share.
        attainment: f64,
    },
    /// A measure of runs with the traffic as it is.
    Measure(Measure),
}

/// An objective, and how thoroughly it is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Goal {
    /// What is optimised.
    pub objective: Objective,
    /// A second measure. Then every setting is wanted that no other one beats in both: the front.
    pub against: Option<Measure>,
    /// Other measures.
    pub beside: Vec<Measure>,
    /// The least number of requests of the shortest trial of a rate.
    pub requests: usize,
    /// Runs of a setting, for a measure.
    pub runs: usize,
    /// Number of runs with new loads that prove the winner.
    pub repeats: usize,
    /// A gain below this share counts as no gain.
    pub margin: f64,
    /// The least share of prompt tokens that the engines must find in their prefix caches.
    pub hit_rate: Option<f64>,
    /// Whether every setting is measured in full, also one that is certainly worse.
    pub complete: bool,
    /// The first seed.
    pub seed: u64,
    /// The values of `gpu-memory-utilization` of which the largest is found first.
    pub memory: Option<MemoryTable>,
}

impl Goal {
    /// The goal of a table.
    ///
    /// # Errors
    /// The objective is neither a rate nor a measure, or a rate beside other measures.
    pub fn new(table: &TuneTable, seed: u64) -> Result<Self, TuneError> {
        let objective = match table.objective.as_str() {
            "rate" => Objective::Rate { attainment: table.attainment / 100.0 },
            measure => Objective::Measure(measure.parse()?),
        };
        let beside = table.beside.iter().map(|text| text.parse()).collect::<Result<Vec<Measure>, _>>()?;
        let against = table.against.as_ref().map(|text| text.parse()).transpose()?;
        let others = [("tune.beside", !beside.is_empty()), ("tune.against", against.is_some())];
        if let (Objective::Rate { .. }, Some((key, _))) = (&objective, others.iter().find(|(_, given)| *given)) {
            let text = "is for a measure as the objective; each trial of a rate has a load of its own";
            return Err(TuneError::Goal(format!("{key} {text}")));
        }
        let TuneTable { requests, runs, repeats, margin, complete, memory, .. } = *table;
        let (margin, hit_rate) = (margin / 100.0, table.hit_rate.map(|share| share / 100.0));
        Ok(Self { objective, against, beside, requests, runs, repeats, margin, hit_rate, complete, seed, memory })
    }

    /// Which direction is good.
    pub fn sense(&self) -> Sense {
        match &self.objective {
            Objective::Rate { .. } => Sense::HigherIsBetter,
            Objective::Measure(measure) => measure.sense(),
        }
    }

    /// A value of the objective as a score: its logarithm, so that more is better and ratios count.
    pub fn score(&self, value: f64) -> f64 {
        score_of(self.sense(), value)
    }

    /// What a run with the traffic as it is measures: the objective, the second measure of a front, the others. In the first two a
    /// percentile counts requests without a response, so that no setting wins by shedding.
    pub fn measures(&self) -> Vec<Measure> {
        let own = match &self.objective {
            Objective::Rate { .. } => None,
            Objective::Measure(measure) => Some(measure.clone()),
        };
        let optimised = own.into_iter().chain(self.against.clone()).map(Measure::counting_lost);
        optimised.chain(self.beside.iter().cloned()).collect()
    }

    /// The objective in a table's head.
    pub fn label(&self) -> String {
        match &self.objective {
            Objective::Rate { attainment } => format!("rate at {} % (/s)", attainment * 100.0),
            Objective::Measure(measure) => label_of(measure),
        }
    }
}

/// A value as a score, if this is the good direction.
pub fn score_of(sense: Sense, value: f64) -> f64 {
    let logarithm = value.max(1e-12).ln();
    if sense == Sense::HigherIsBetter { logarithm } else { -logarithm }
}

/// A measure in a table's head.
pub fn label_of(measure: &Measure) -> String {
    match measure.unit() {
        "" => measure.to_string(),
        unit => format!("{measure} ({unit})"),
    }
}
