//! Where settings are tried: the laboratory today, real engines by the same trait.
//!
//! A backend brings up a *system* with a setting. The system runs trials of the rate search, and runs with the traffic as it is.

use crate::error::TuneError;
use crate::setting::Setting;
use sluice_bench::RunResult;
use sluice_bench::search::{SearchGoal, SystemUnderTest};

/// The result of a start.
#[derive(Debug)]
pub enum Started<S> {
    /// It runs.
    Up {
        /// The system.
        system: S,
        /// What the start took, seconds of the engines; 0 if they were running.
        seconds: f64,
    },
    /// It does not start.
    Refused {
        /// What it says.
        reason: String,
        /// Seconds until then.
        seconds: f64,
        /// Whether that was known without a start.
        foreseen: bool,
    },
}

/// Brings up systems.
pub trait Backend {
    /// What it brings up.
    type System: System;

    /// Brings up a system with a setting.
    ///
    /// # Errors
    /// The backend itself is at fault, or the tuning makes no sense; a setting that is refused is no error.
    fn start(&mut self, setting: &Setting) -> impl Future<Output = Result<Started<Self::System>, TuneError>>;

    /// The least that a rate search needs to know of the workload: its objectives' longest bound.
    ///
    /// # Errors
    /// The traffic has no rate that could be searched.
    fn search_goal(&self, attainment: f64, requests: usize, seed: u64) -> Result<SearchGoal, TuneError>;
}

/// A system with a setting.
pub trait System: SystemUnderTest<Error = TuneError> {
    /// The requests of the last trial or run.
    fn last(&self) -> Option<&RunResult>;

    /// The name of a group of requests that is judged for itself.
    fn group(&self, group: usize) -> String;

    /// One run with the traffic as it is: the values of the objective's measure and of those beside it, and the seconds it took.
    ///
    /// # Errors
    /// The load could not be sent.
    fn observe(&mut self, seed: u64) -> impl Future<Output = Result<(Vec<f64>, f64), TuneError>>;

    /// Whether the KV cache was full in the last trial.
    fn is_kv_full(&self) -> bool;

    /// The share of prompt tokens that the engines found in their prefix caches in the last trial; `None` if that is not known.
    fn hit_rate(&self) -> Option<f64> {
        None
    }

    /// What was seen in the last trial that explains a bad value.
    fn notes(&self) -> Vec<String>;
}
