//! Runs the variants of a scenario with several seeds and compares them.
//!
//! Every variant is run with the same seeds, so it gets the same requests at the same times. This makes comparisons paired:
//! the interval of a change is much narrower than those of the two values. Intervals are Student's t over the seeds, 95 %, for
//! the mean of the measure over all possible seeds. Runs are spread over threads; the result does not depend on how many.
//!
//! Bounds: at most [`MAX_RUNS`] runs. Only the measures of a run are kept and, for the first seed, its requests if asked for.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::error::LabError;
use crate::file::Variant;
use crate::measure::{Measure, Measured};
use crate::run::{LabRun, run};
use crate::scenario::Scenario;
use crate::setup::Lab;
use sluice_bench::result::record::Outcome;
use sluice_bench::{Record, nth_seed};
use sluice_core::stats::{Change, Estimate, mean};

/// The most runs of one study.
pub const MAX_RUNS: usize = 100_000;
/// Confidence of all intervals.
const CONFIDENCE: f64 = 0.95;

/// The options of a study.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The first seed; those of the other runs follow it, as [`nth_seed`] says.
    pub seed: u64,
    /// Number of seeds.
    pub seeds: u64,
    /// Number of threads.
    pub threads: usize,
    /// Whether to keep the first seed's run of each variant.
    pub keep: bool,
}

/// The runs of one variant.
#[derive(Clone, Debug)]
pub struct VariantRuns {
    /// Name of the variant.
    pub name: String,
    /// Values by measure, then by seed.
    pub values: Vec<Vec<f64>>,
    /// The run of the first seed, with [`Options::keep`].
    pub first: Option<LabRun>,
    /// Why the first request failed, if none of any run completed.
    pub failure: Option<String>,
}

/// Variants and their runs.
#[derive(Clone, Debug)]
pub struct Study {
    /// Title of the scenario.
    pub title: String,
    /// The seeds.
    pub seeds: Vec<u64>,
    /// The measures.
    pub measures: Vec<Measure>,
    /// In the order of the file.
    pub variants: Vec<VariantRuns>,
}

/// What is kept of a run.
struct RunValues {
    values: Vec<f64>,
    run: Option<LabRun>,
    /// Why its first request failed, if none completed.
    failure: Option<String>,
}

impl Study {
    /// Runs `variants` of a scenario. An empty list of measures means the default ones.
    ///
    /// # Errors
    /// A variant is not valid.
    pub fn run(
        scenario: &Scenario,
        variants: &[Variant],
        measures: &[Measure],
        options: Options,
    ) -> Result<Self, LabError> {
        let labs: Vec<Lab> = variants.iter().map(|variant| scenario.lab(variant)).collect::<Result<_, _>>()?;
        let classes = classes(&labs);
        let measures = if measures.is_empty() { Measure::default_for(&classes) } else { measures.to_vec() };
        for measure in &measures {
            if measure.class().is_some_and(|class| !classes.iter().any(|known| known == class)) {
                return Err(LabError::NoClass(measure.to_string(), classes.join(", ")));
            }
        }
        let seeds: Vec<u64> = (0..options.seeds.max(1)).map(|at| nth_seed(options.seed, at)).collect();
        let count = labs.len().saturating_mul(seeds.len());
        if count > MAX_RUNS {
            return Err(LabError::Sweep(format!("{count} runs are more than {MAX_RUNS}; give fewer seeds or values")));
        }
        let outcomes = run_all(&labs, &seeds, &measures, options)?;
        let mut outcomes = outcomes.into_iter();
        let collect = |variant: &Variant| {
            let mut runs: Vec<RunValues> = outcomes.by_ref().take(seeds.len()).collect();
            let first = runs.first_mut().and_then(|outcome| outcome.run.take());
            let failures: Option<Vec<&String>> = runs.iter().map(|outcome| outcome.failure.as_ref()).collect();
            let failure = failures.and_then(|all| Some((*all.first()?).clone()));
            let values =
                (0..measures.len()).map(|at| runs.iter().map(|outcome| outcome.values[at]).collect()).collect();
            VariantRuns { name: variant.name.clone(), values, first, failure }
        };
        let variants = variants.iter().map(collect).collect();
        Ok(Self { title: scenario.file.title.clone(), seeds, measures, variants })
    }

    /// The mean of a measure over the seeds.
    pub fn estimate(&self, variant: usize, measure: usize) -> Estimate {
        mean::of_series(&self.variants[variant].values[measure], CONFIDENCE)
    }

    /// The relative change of a measure from variant `base` to `variant`: 0.1 is 10 % more. It is the geometric mean of the
    /// ratios of pairs, so halving and doubling cancel. If a value is not above 0, it is NaN with infinite bounds.
    pub fn change(&self, base: usize, variant: usize, measure: usize) -> Estimate {
        let (from, to) = (&self.variants[base].values[measure], &self.variants[variant].values[measure]);
        if from == to {
            return Estimate { value: 0.0, low: 0.0, high: 0.0 };
        }
        Change::of_pairs(from, to, CONFIDENCE).0
    }

    /// The index of the variant with this name.
    pub fn variant(&self, name: &str) -> Option<usize> {
        self.variants.iter().position(|variant| variant.name == name)
    }
}

/// The classes of all traffic, without repetition.
fn classes(labs: &[Lab]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for config in labs.iter().flat_map(|lab| &lab.traffic).flat_map(|plan| plan.workload.class_configs()) {
        if !names.contains(&config.name) {
            names.push(config.name);
        }
    }
    names
}

fn why_none_completed(run: &LabRun) -> Option<String> {
    let records = &run.result.requests;
    if records.iter().any(Record::is_completed) {
        return None;
    }
    records.iter().find_map(|record| match &record.outcome {
        Outcome::Failed(why) => Some(why.to_string()),
        _ => None,
    })
}

/// Runs every setup with every seed, and returns the results in that order.
fn run_all(labs: &[Lab], seeds: &[u64], measures: &[Measure], options: Options) -> Result<Vec<RunValues>, LabError> {
    let count = labs.len() * seeds.len();
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<Result<RunValues, LabError>>>> = Mutex::new((0..count).map(|_| None).collect());
    let work = || {
        loop {
            let job = next.fetch_add(1, Ordering::Relaxed);
            if job >= count {
                return;
            }
            let (lab, seed) = (&labs[job / seeds.len()], job % seeds.len());
            let outcome = run(lab, seeds[seed]).map(|run| {
                let measured = Measured::of(&run);
                let values = measures.iter().map(|measure| measured.value(measure)).collect();
                drop(measured);
                let failure = why_none_completed(&run);
                RunValues { values, run: (options.keep && seed == 0).then_some(run), failure }
            });
            done.lock()[job] = Some(outcome);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..options.threads.clamp(1, count.max(1)) {
            scope.spawn(work);
        }
    });
    done.into_inner().into_iter().flatten().collect()
}
