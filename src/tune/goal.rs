//! What is optimised: the highest rate at which objectives hold, or a measure.
//!
//! Values are compared by their logarithms, so that ratios count: a rate of 11 is as far above 10 as 110 above 100.

use crate::error::TuneError;
use crate::file::TuneTable;
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
    /// Other measures.
    pub beside: Vec<Measure>,
    /// The least number of requests of the shortest trial of a rate.
    pub requests: usize,
    /// Runs of a setting, for a measure.
    pub runs: usize,
    /// Proofs of the winner.
    pub repeats: usize,
    /// A smaller gain than this share is none.
    pub margin: f64,
    /// The first seed.
    pub seed: u64,
}

impl Goal {
    /// The goal of a table.
    ///
    /// # Errors
    /// The objective is neither a rate nor a measure.
    pub fn new(table: &TuneTable, seed: u64) -> Result<Self, TuneError> {
        let objective = match table.objective.as_str() {
            "rate" => Objective::Rate { attainment: table.attainment / 100.0 },
            measure => Objective::Measure(measure.parse()?),
        };
        let beside = table.beside.iter().map(|text| text.parse()).collect::<Result<Vec<Measure>, _>>()?;
        if matches!(objective, Objective::Rate { .. }) && !beside.is_empty() {
            let text = "tune.beside is for a measure as the objective; each trial of a rate has a load of its own";
            return Err(TuneError::Goal(text.to_owned()));
        }
        let TuneTable { requests, runs, repeats, margin, .. } = *table;
        Ok(Self { objective, beside, requests, runs, repeats, margin: margin / 100.0, seed })
    }

    /// Which direction is good.
    pub fn sense(&self) -> Sense {
        match &self.objective {
            Objective::Rate { .. } => Sense::HigherIsBetter,
            Objective::Measure(measure) => measure.sense(),
        }
    }

    /// A value as a score: its logarithm, so that more is better and ratios count.
    pub fn score(&self, value: f64) -> f64 {
        let logarithm = value.max(1e-12).ln();
        if self.sense() == Sense::HigherIsBetter { logarithm } else { -logarithm }
    }

    /// What a run with the traffic as it is measures: the objective first.
    pub fn measures(&self) -> Vec<Measure> {
        let own = match &self.objective {
            Objective::Rate { .. } => None,
            Objective::Measure(measure) => Some(measure.clone()),
        };
        own.into_iter().chain(self.beside.iter().cloned()).collect()
    }

    /// The objective in a table's head.
    pub fn label(&self) -> String {
        match &self.objective {
            Objective::Rate { attainment } => format!("rate at {} % (/s)", attainment * 100.0),
            Objective::Measure(measure) => match measure.unit() {
                "" => measure.to_string(),
                unit => format!("{measure} ({unit})"),
            },
        }
    }
}
