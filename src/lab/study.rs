//! Variants of a scenario, each run with several seeds, and how they compare.
//!
//! Every variant gets the same seeds, so the same requests at the same times: changes are those of pairs, and their
//! intervals are much narrower than those of the values. Intervals are Student's over the seeds: 95 % for the long-run mean
//! of the measure, in runs of this length. Runs are independent and spread over threads; the result does not depend on
//! their number. Bounds: [`MAX_RUNS`] runs; of their requests only the measures are kept, except for the first seed.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::error::LabError;
use crate::file::Variant;
use crate::measure::{Measure, Measured};
use crate::run::{LabRun, run};
use crate::scenario::Scenario;
use crate::setup::Lab;
use sluice_core::stats::{Estimate, mean};

/// The most runs of one study.
pub const MAX_RUNS: usize = 100_000;
/// Confidence of all intervals.
const CONFIDENCE: f64 = 0.95;

/// How a study is made.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The first seed; the others follow it.
    pub seed: u64,
    /// How many.
    pub seeds: u64,
    /// Threads.
    pub threads: usize,
    /// Whether to keep the run of the first seed of each variant.
    pub keep: bool,
}

/// The runs of one variant.
#[derive(Clone, Debug)]
pub struct VariantRuns {
    /// Its name.
    pub name: String,
    /// By measure, then by seed.
    pub values: Vec<Vec<f64>>,
    /// The run of the first seed, if it was to be kept.
    pub first: Option<LabRun>,
}

/// Variants and their runs.
#[derive(Clone, Debug)]
pub struct Study {
    /// Title of the scenario.
    pub title: String,
    /// The seeds.
    pub seeds: Vec<u64>,
    /// What was measured.
    pub measures: Vec<Measure>,
    /// In the order of the file.
    pub variants: Vec<VariantRuns>,
}

/// What a run leaves behind.
struct Outcome {
    values: Vec<f64>,
    run: Option<LabRun>,
}

impl Study {
    /// Runs `variants` of a scenario. Without measures, the usual ones are taken.
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
        let measures = if measures.is_empty() { Measure::usual(&classes) } else { measures.to_vec() };
        for measure in &measures {
            if measure.class().is_some_and(|class| !classes.iter().any(|known| known == class)) {
                return Err(LabError::NoClass(measure.to_string(), classes.join(", ")));
            }
        }
        let seeds: Vec<u64> = (0..options.seeds.max(1)).map(|at| options.seed.wrapping_add(at)).collect();
        let count = labs.len().saturating_mul(seeds.len());
        if count > MAX_RUNS {
            return Err(LabError::Sweep(format!("{count} runs are more than {MAX_RUNS}; give fewer seeds or values")));
        }
        let outcomes = run_all(&labs, &seeds, &measures, options)?;
        let mut outcomes = outcomes.into_iter();
        let collect = |variant: &Variant| {
            let mut runs: Vec<Outcome> = outcomes.by_ref().take(seeds.len()).collect();
            let first = runs.first_mut().and_then(|outcome| outcome.run.take());
            let values =
                (0..measures.len()).map(|at| runs.iter().map(|outcome| outcome.values[at]).collect()).collect();
            VariantRuns { name: variant.name.clone(), values, first }
        };
        let variants = variants.iter().map(collect).collect();
        Ok(Self { title: scenario.file.title.clone(), seeds, measures, variants })
    }

    /// The mean of a measure over the seeds.
    pub fn estimate(&self, variant: usize, measure: usize) -> Estimate {
        mean::of_series(&self.variants[variant].values[measure], CONFIDENCE)
    }

    /// By how much a measure of a variant differs from that of variant `base`, as a share of it: 0.1 is 10 % more. The mean of
    /// the pairs' logarithms, so that halving and doubling cancel; infinite bounds where a value is not above 0.
    pub fn change(&self, base: usize, variant: usize, measure: usize) -> Estimate {
        let (from, to) = (&self.variants[base].values[measure], &self.variants[variant].values[measure]);
        if from == to {
            return Estimate { value: 0.0, low: 0.0, high: 0.0 };
        }
        let logs: Vec<f64> = from.iter().zip(to).map(|(from, to)| (to / from).ln()).collect();
        if logs.iter().any(|log| !log.is_finite()) {
            return Estimate { value: f64::NAN, low: f64::NEG_INFINITY, high: f64::INFINITY };
        }
        let Estimate { value, low, high } = mean::of_series(&logs, CONFIDENCE);
        Estimate { value: value.exp_m1(), low: low.exp_m1(), high: high.exp_m1() }
    }

    /// The number of the variant of this name.
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

/// Runs every laboratory with every seed; results in that order.
fn run_all(labs: &[Lab], seeds: &[u64], measures: &[Measure], options: Options) -> Result<Vec<Outcome>, LabError> {
    let count = labs.len() * seeds.len();
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<Result<Outcome, LabError>>>> = Mutex::new((0..count).map(|_| None).collect());
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
                Outcome { values, run: (options.keep && seed == 0).then_some(run) }
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
