//! Where settings are tried: the laboratory, or real engines.
//!
//! A backend starts a *system* with a setting. The system runs the trials of a rate search, or the
//! traffic as configured.

use crate::error::TuneError;
use crate::setting::Setting;
use sluice_bench::result::record::ServerSide;
use sluice_bench::search::{RARE, SearchGoal, SystemUnderTest};
use sluice_bench::{RunPlan, RunResult};
use sluice_lab::rate::goal;

/// Share of the KV cache in use above which a trial notes that the cache was full.
pub(crate) const FULL_CACHE: f64 = 0.97;
/// Bound on the factor by which a rare group raises the number of requests.
const MOST_STRETCH: f64 = 4.0;

/// The result of a start.
#[derive(Debug)]
pub enum Started<S> {
    /// The system runs.
    Up {
        /// The system.
        system: S,
        /// Engine seconds of the start; 0 if the engines were running.
        seconds: f64,
    },
    /// The system does not start.
    Refused {
        /// The engine's message.
        reason: String,
        /// Seconds until the refusal.
        seconds: f64,
        /// Whether the refusal was known without a start.
        foreseen: bool,
    },
}

/// Starts systems.
pub trait Backend {
    /// The system that it starts.
    type System: System;

    /// Starts a system with a setting.
    ///
    /// # Errors
    /// The start fails for another reason than the setting, or the tuning makes no sense.
    fn start(&mut self, setting: &Setting) -> impl Future<Output = Result<Started<Self::System>, TuneError>>;

    /// Whether loads take real time, so that the journal keeps each load.
    const REAL: bool = false;

    /// The search goal for the backend's workload.
    fn search_goal(&self, attainment: f64, requests: usize, seed: u64) -> Result<SearchGoal, TuneError>;
}

/// A system with a setting.
pub trait System: SystemUnderTest<Error = TuneError> {
    /// The requests of the last trial or run.
    fn last(&self) -> Option<&RunResult>;

    /// The name of a group that is judged separately.
    fn group(&self, group: usize) -> String;

    /// Runs the traffic as configured. Returns the values of the goal's measures, and the seconds
    /// that the run took.
    fn observe(&mut self, seed: u64) -> impl Future<Output = Result<(Vec<f64>, f64), TuneError>>;

    /// Applies the worst load: all sequences run and all steps are full. Returns the seconds that
    /// it took.
    ///
    /// # Errors
    /// [`TuneError::Died`] if an engine ends.
    fn stress(&mut self, seed: u64) -> impl Future<Output = Result<f64, TuneError>>;

    /// Traces some requests with the engines' profiler, at `rate` requests per second or with the
    /// traffic as configured. Returns a note, if an engine has a profiler.
    fn profile(&mut self, _rate: Option<f64>) -> impl Future<Output = Result<Option<String>, TuneError>> {
        async { Ok(None) }
    }

    /// Whether the KV cache was full in the last trial.
    fn is_kv_full(&self) -> bool;

    /// Share of the last trial's prompt tokens that the prefix caches held, if known.
    fn hit_rate(&self) -> Option<f64> {
        None
    }

    /// Observations of the last trial that explain a bad value.
    fn notes(&self) -> Vec<String>;
}

/// The search goal for this traffic. A rare class or adapter raises the number of requests.
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
    // The number of requests grows until the rarest group gets a quarter of `requests`, at most by
    // the factor [`MOST_STRETCH`].
    let stretch = (0.25 / rarest).clamp(1.0, MOST_STRETCH);
    Ok(SearchGoal { requests: (requests as f64 * stretch) as usize, ..goal })
}

pub(crate) fn is_cache_full(sides: &[&ServerSide]) -> bool {
    sides.iter().any(|side| side.preemptions > 0.0 || side.kv_peak > FULL_CACHE)
}

pub(crate) fn cache_hits(sides: &[&ServerSide]) -> Option<f64> {
    let sum = |of: fn(&ServerSide) -> f64| sides.iter().map(|side| of(side)).sum::<f64>();
    let queries = sum(|side| side.prefix_queries);
    (queries > 0.0).then(|| sum(|side| side.prefix_hits) / queries)
}

pub(crate) fn cache_notes(sides: &[&ServerSide]) -> Option<String> {
    let preempted: f64 = sides.iter().map(|side| side.preemptions).sum();
    let full = sides.iter().map(|side| side.kv_peak).fold(0.0, f64::max);
    if preempted > 0.0 {
        return Some(format!("{preempted:.0} preemptions: the KV cache is too small for so many sequences"));
    }
    (full > FULL_CACHE).then(|| format!("the KV cache was {:.0} % full", full * 100.0))
}
