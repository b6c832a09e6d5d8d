//! Where settings are tried: the laboratory, or real engines.
//!
//! A backend brings up a *system* with a setting. The system runs trials of the rate search, and runs with the traffic as it is.

use crate::error::TuneError;
use crate::setting::Setting;
use sluice_bench::result::record::ServerSide;
use sluice_bench::search::{RARE, SearchGoal, SystemUnderTest};
use sluice_bench::{RunPlan, RunResult};
use sluice_lab::rate::goal;

/// Share of the KV cache in use that is worth a note.
pub(crate) const FULL_CACHE: f64 = 0.97;
/// Requests of a class that is this rare get as many more that the class has enough.
const MOST_STRETCH: f64 = 4.0;

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

    /// Whether its loads take real time, so that each is worth a line of the journal.
    const REAL: bool = false;

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

    /// The worst load: every sequence runs and every step is full. Returns the seconds it took.
    ///
    /// # Errors
    /// [`TuneError::Died`] if an engine ends.
    fn stress(&mut self, seed: u64) -> impl Future<Output = Result<f64, TuneError>>;

    /// Records a trace of some requests with the profiler of the engines, at `rate` requests per second or with the traffic as it is.
    /// Returns what to note about it; `None`: no engine has a profiler.
    ///
    /// # Errors
    /// An engine ends.
    fn profile(&mut self, _rate: Option<f64>) -> impl Future<Output = Result<Option<String>, TuneError>> {
        async { Ok(None) }
    }

    /// Whether the KV cache was full in the last trial.
    fn is_kv_full(&self) -> bool;

    /// The share of prompt tokens that the engines found in their prefix caches in the last trial; `None` if that is not known.
    fn hit_rate(&self) -> Option<f64> {
        None
    }

    /// What was seen in the last trial that explains a bad value.
    fn notes(&self) -> Vec<String>;
}

/// What a rate search needs to know of traffic. The rarest group gets enough requests of its own.
///
/// # Errors
/// The traffic has no rate that could be searched, or no objectives.
pub(crate) fn search_goal(
    traffic: &[RunPlan],
    attainment: f64,
    requests: usize,
    seed: u64,
) -> Result<SearchGoal, TuneError> {
    let goal = goal(traffic, attainment, seed)?;
    let workload = &traffic[0].workload;
    let weights: Vec<f64> = workload.class_configs().iter().map(|class| class.weight).collect();
    let total = weights.iter().sum::<f64>().max(1e-9);
    let classes: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
    let adapters = workload.adapters.shares();
    let rarest = classes
        .iter()
        .chain(adapters.iter().filter(|share| **share >= RARE))
        .fold(1.0, |rarest: f64, share| rarest.min(*share));
    // The rarest group needs requests of its own, but not all of them.
    let stretch = (0.25 / rarest).clamp(1.0, MOST_STRETCH);
    Ok(SearchGoal { requests: (requests as f64 * stretch) as usize, ..goal })
}

/// Whether the KV cache of an engine was full.
pub(crate) fn is_cache_full(sides: &[&ServerSide]) -> bool {
    sides.iter().any(|side| side.preemptions > 0.0 || side.kv_peak > FULL_CACHE)
}

/// The share of prompt tokens that engines found in their prefix caches.
pub(crate) fn cache_hits(sides: &[&ServerSide]) -> Option<f64> {
    let sum = |of: fn(&ServerSide) -> f64| sides.iter().map(|side| of(side)).sum::<f64>();
    let queries = sum(|side| side.prefix_queries);
    (queries > 0.0).then(|| sum(|side| side.prefix_hits) / queries)
}

/// What is worth a note about the KV caches of engines.
pub(crate) fn cache_notes(sides: &[&ServerSide]) -> Option<String> {
    let preempted: f64 = sides.iter().map(|side| side.preemptions).sum();
    let full = sides.iter().map(|side| side.kv_peak).fold(0.0, f64::max);
    if preempted > 0.0 {
        return Some(format!("{preempted:.0} preemptions: the KV cache is too small for so many sequences"));
    }
    (full > FULL_CACHE).then(|| format!("the KV cache was {:.0} % full", full * 100.0))
}
