//! Runs the variants of a scenario with several seeds and compares them.
//!
//! Every variant has the same seeds, so it has the same requests at the same times. Comparisons are
//! paired, so the interval of a change is much narrower than the intervals of the two values.
//! Intervals are Student's t over the seeds, 95 %, for the mean of the measure over all possible
//! seeds. The number of threads does not change the result.
//!
//! Bounds: at most [`MAX_RUNS`] runs. Of each run only the measures are kept; the runs of the first
//! seed are kept too if the caller asks.

use std::collections::BTreeSet;

use crate::error::LabError;
use crate::file::Variant;
use crate::measure::{Measure, Measured};
use crate::parallel;
use crate::run::{LabRun, run};
use crate::scenario::Scenario;
use crate::setup::Lab;
use sluice_bench::result::record::Outcome;
use sluice_bench::{Record, nth_seed};
use sluice_core::stats::{Change, Estimate, mean};

/// Maximum number of runs of one study.
pub const MAX_RUNS: usize = 100_000;
const CONFIDENCE: f64 = 0.95;

/// The options of a study.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The first seed; [`nth_seed`] derives the others from it.
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
    /// Why the first request failed, if no request of any run completed.
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
    /// The variants, in the order of the file.
    pub variants: Vec<VariantRuns>,
}

struct RunValues {
    values: Vec<f64>,
    run: Option<LabRun>,
    failure: Option<String>,
}

impl Study {
    /// Runs the variants with the seeds. Without measures, the default measures are used.
    pub fn run(
        scenario: &Scenario,
        variants: &[Variant],
        measures: &[Measure],
        options: Options,
    ) -> Result<Self, LabError> {
        let seeds = seeds(options.seed, options.seeds, variants.len())?;
        let labs: Vec<Lab> = variants.iter().map(|variant| scenario.lab(variant)).collect::<Result<_, _>>()?;
        let classes = classes(&labs);
        let measures = if measures.is_empty() { Measure::default_for(&classes) } else { measures.to_vec() };
        let of_gateway: BTreeSet<&str> =
            labs.iter().flat_map(|lab| &lab.config.classes).map(|class| class.name.as_str()).collect();
        for measure in &measures {
            let is_known = |class| classes.iter().any(|known| known == class) || of_gateway.contains(class);
            if !measure.class().is_none_or(is_known) {
                let of_gateway = Vec::from_iter(of_gateway).join(", ");
                return Err(LabError::NoClass(measure.to_string(), classes.join(", "), of_gateway));
            }
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

    /// The relative change of a measure from variant `base` to `variant`: 0.1 is 10 % more. It is
    /// the geometric mean of the ratios of pairs, so halving and doubling cancel. A value that is
    /// not above 0 makes it NaN with infinite bounds.
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

/// The seeds of `each` runs of each variant, beginning with `first`.
pub fn seeds(first: u64, each: u64, variants: usize) -> Result<Vec<u64>, LabError> {
    let count = each.saturating_mul(variants as u64);
    if each == 0 {
        return Err(LabError::Sweep("0 runs of each variant; give 1 seed or more".to_owned()));
    } else if count > MAX_RUNS as u64 {
        return Err(LabError::Sweep(format!("{count} runs are more than {MAX_RUNS}; give fewer seeds or values")));
    }
    Ok((0..each).map(|at| nth_seed(first, at)).collect())
}

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

fn run_all(labs: &[Lab], seeds: &[u64], measures: &[Measure], options: Options) -> Result<Vec<RunValues>, LabError> {
    let job = |at: usize| {
        let (lab, seed) = (&labs[at / seeds.len()], at % seeds.len());
        run(lab, seeds[seed]).map(|run| {
            let measured = Measured::of(&run);
            let values = measures.iter().map(|measure| measured.value(measure)).collect();
            drop(measured);
            let failure = why_none_completed(&run);
            RunValues { values, run: (options.keep && seed == 0).then_some(run), failure }
        })
    };
    parallel::each(labs.len() * seeds.len(), options.threads, job).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_runs_is_checked_before_they_are_listed() {
        assert_eq!(seeds(1, 2, 3).unwrap(), [nth_seed(1, 0), nth_seed(1, 1)]);
        for (each, variants, says) in [(100_000_000_000, 1, "fewer seeds"), (60_000, 2, "fewer"), (0, 1, "1 seed")] {
            let error = seeds(1, each, variants).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
