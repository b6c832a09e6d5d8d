//! `sluice lab plan`: the number of GPUs of each kind that the traffic needs, and their cost.
//!
//! For each candidate and load factor, the engines are doubled until the objectives are met.
//! Bisection then finds the smallest number, assuming that more engines are never worse.
//!
//! The objectives are met if, in every class with objectives, the share of requests that meet all
//! of them reaches `plan.attainment`. The share must do so over the whole run and over the second
//! half, because the second half shows a queue that keeps growing. Headroom is the additional
//! traffic within the objectives, found by trials with up to twice the traffic ([`MORE`]). Shares
//! are means over the seeds. A class without requests is an error. The cost is the price of the
//! GPUs alone, for the time in which requests arrive. Bounds: `plan.max_engines` engines.

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::LabError;
use crate::file::{AS_WRITTEN, CandidateTable, Variant};
use crate::parallel;
use crate::prices::Prices;
use crate::run::{LabRun, run};
use crate::scenario::{GPU, Scenario, preset};
use crate::setup::Lab;
use sluice_bench::result::metrics::Metrics;
use sluice_bench::{Arrival, Extent, Outcome, Record, RunPlan, RunResult};

/// Factors of the traffic that are tried for headroom.
pub const MORE: [f64; 4] = [1.1, 1.25, 1.5, 2.0];
const SECONDS_PER_HOUR: f64 = 3600.0;

/// The result for one candidate and one load factor.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanResult {
    /// Name of the candidate.
    pub candidate: String,
    /// Factor by which the traffic was multiplied.
    pub load: f64,
    /// The requirement, or why no number of engines suffices.
    pub needs: Result<Requirement, String>,
}

/// The fewest engines that meet the objectives, and their results.
#[derive(Clone, Debug, PartialEq)]
pub struct Requirement {
    /// Number of engines.
    pub engines: u32,
    /// Number of GPUs of all engines.
    pub gpus: u32,
    /// The lowest attainment of all classes, per cent, and the class.
    pub attainment: (f64, String),
    /// The lowest attainment with one engine less, per cent, and the class; `None`: there is only
    /// one engine.
    pub with_one_less: Option<(f64, String)>,
    /// Share by which the traffic may grow: 0.25 for the factor 1.25 of [`MORE`]; 0 if not even the
    /// first factor is met.
    pub headroom: f64,
    /// Mean share of the time in which an engine had a batch, per cent. A single request is a batch
    /// too, so this is nearly always near 100 and does not show headroom.
    pub with_a_batch: f64,
    /// The cost, if the prices of all GPUs are known.
    pub cost: Option<Cost>,
    /// GPUs whose prices are not known, as the scenario names them.
    pub unpriced: Vec<String>,
}

/// The cost of the GPUs, in the currency of the prices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Per hour.
    pub per_hour: f64,
    /// Per completed request.
    pub per_request: f64,
    /// Per million tokens of prompts and outputs.
    pub per_million_tokens: f64,
    /// Per million output tokens.
    pub per_million_output: f64,
}

struct Trial {
    attainment: (f64, String),
    runs: Vec<LabRun>,
    gpus: BTreeMap<String, u32>,
    traffic: Vec<RunPlan>,
}

/// Finds the requirement of every candidate at every load factor of the file, in that order.
/// `on_trial` gets candidate, load factor, engines, and the lowest attainment of all classes in per
/// cent, after each trial.
pub fn plan(
    scenario: &Scenario,
    prices: &Prices,
    seeds: &[u64],
    mut on_trial: impl FnMut(&str, f64, u32, f64),
) -> Result<Vec<PlanResult>, LabError> {
    let goal = &scenario.file.plan;
    if !(0.0..=100.0).contains(&goal.attainment) || goal.load.iter().any(|load| !(load.is_finite() && *load > 0.0)) {
        return Err(LabError::Plan(
            "plan.attainment must be from 0 to 100 per cent, and each plan.load above 0".to_owned(),
        ));
    }
    if seeds.is_empty() {
        return Err(LabError::Plan("a plan needs at least one run of each trial; give 1 seed or more".to_owned()));
    }
    let own = CandidateTable { name: AS_WRITTEN.to_owned(), gpu: None, args: Default::default() };
    let candidates = if goal.candidate.is_empty() { std::slice::from_ref(&own) } else { &goal.candidate };
    let mut results = Vec::new();
    for candidate in candidates {
        for load in &goal.load {
            let gpu = candidate.gpu.clone();
            let base = Variant { gpu, args: candidate.args.clone(), load: Some(*load), ..Variant::default() };
            let mut search = Search {
                scenario,
                base,
                seeds,
                on_trial: |factor: f64, engines, attainment: f64| {
                    on_trial(&candidate.name, load * factor, engines, attainment);
                },
            };
            let needs = match search.fewest() {
                // If vLLM would not start, this is a result, not an error.
                Err(LabError::Engine { source, .. }) => Err(does_not_start(&source.to_string())),
                Err(error @ LabError::Unjudged(_)) => Err(error.to_string()),
                found => found?.map(|found| found.requirement(scenario, prices)),
            };
            results.push(PlanResult { candidate: candidate.name.clone(), load: *load, needs });
        }
    }
    Ok(results)
}

/// The last line of vLLM's message.
fn does_not_start(text: &str) -> String {
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
    format!("does not start: {line}")
}

struct Search<'a, F> {
    scenario: &'a Scenario,
    base: Variant,
    seeds: &'a [u64],
    on_trial: F,
}

struct Found {
    engines: u32,
    enough: Trial,
    headroom: f64,
    with_one_less: Option<(f64, String)>,
}

impl<F: FnMut(f64, u32, f64)> Search<'_, F> {
    fn fewest(&mut self) -> Result<Result<Found, String>, LabError> {
        let (most, target) = (self.scenario.file.plan.max_engines.max(1), self.scenario.file.plan.attainment);
        let (mut too_few, mut failed) = (0, None);
        let mut engines = 1;
        let (mut enough_at, mut enough) = loop {
            let trial = self.trial(engines, 1.0)?;
            if trial.attainment.0 >= target {
                break (engines, trial);
            }
            let (share, class) = trial.attainment;
            if engines == most {
                let s = if most == 1 { "" } else { "s" };
                return Ok(Err(format!(
                    "not met with {most} engine{s}: {share:.1} % of '{class}' meet their objectives"
                )));
            }
            (too_few, failed) = (engines, Some((share, class)));
            engines = (engines * 2).min(most);
        };
        while enough_at - too_few > 1 {
            let middle = too_few.midpoint(enough_at);
            let trial = self.trial(middle, 1.0)?;
            if trial.attainment.0 >= target {
                (enough_at, enough) = (middle, trial);
            } else {
                (too_few, failed) = (middle, Some(trial.attainment));
            }
        }
        let headroom = self.headroom(enough_at)?;
        Ok(Ok(Found { engines: enough_at, enough, headroom, with_one_less: failed }))
    }

    /// Share by which the traffic may grow, by bisection of [`MORE`].
    fn headroom(&mut self, engines: u32) -> Result<f64, LabError> {
        let target = self.scenario.file.plan.attainment;
        let (mut met, mut at_most) = (0, MORE.len());
        while met < at_most {
            let middle = (met + at_most).div_ceil(2);
            let is_met = self.trial(engines, MORE[middle - 1])?.attainment.0 >= target;
            (met, at_most) = if is_met { (middle, at_most) } else { (met, middle - 1) };
        }
        Ok(met.checked_sub(1).map_or(0.0, |place| MORE[place] - 1.0))
    }

    fn trial(&mut self, engines: u32, factor: f64) -> Result<Trial, LabError> {
        let load = self.base.load.map(|load| load * factor);
        let lab = self.scenario.lab(&Variant { count: Some(engines), load, ..self.base.clone() })?;
        let mut gpus = BTreeMap::new();
        for engine in &lab.engines {
            let name = engine.gpu().unwrap_or(GPU).to_owned();
            *gpus.entry(name).or_default() += engine.sim.profile.layout.tensor_parallel.max(1);
        }
        let runs = run_all(&lab, self.seeds)?;
        let attainment = worst_class(&runs)?;
        (self.on_trial)(factor, engines, attainment.0);
        Ok(Trial { attainment, runs, gpus, traffic: lab.traffic })
    }
}

fn run_all(lab: &Lab, seeds: &[u64]) -> Result<Vec<LabRun>, LabError> {
    parallel::each(seeds.len(), parallel::cores(), |at| run(lab, seeds[at])).into_iter().collect()
}

/// The lowest attainment of all classes, per cent, and the class. The lower share of the whole run
/// and the second half counts.
fn worst_class(runs: &[LabRun]) -> Result<(f64, String), LabError> {
    let config = &runs[0].result.config;
    let with_objectives = (0..).zip(&config.classes).filter(|(index, _)| !config.slo_of(*index).is_empty());
    let mut worst: Option<(f64, String)> = None;
    for (index, class) in with_objectives {
        // Means over the runs that have requests of the class.
        let of_half = |late: bool| {
            let shares: Vec<f64> = runs.iter().filter_map(|run| share(&run.result, index, late)).collect();
            (!shares.is_empty()).then(|| 100.0 * shares.iter().sum::<f64>() / shares.len() as f64)
        };
        let whole = of_half(false).ok_or_else(|| LabError::Unjudged(class.name.clone()))?;
        let lower = of_half(true).map_or(whole, |late| late.min(whole));
        if worst.as_ref().is_none_or(|(lowest, _)| lower < *lowest) {
            worst = Some((lower, class.name.clone()));
        }
    }
    worst.ok_or_else(|| LabError::Plan("a plan needs objectives; set ttft, tpot or e2el of a class".to_owned()))
}

/// The share of requests of a class that met their objectives, without clients that left on
/// purpose; `None` without requests. `late`: in the second half only.
fn share(result: &RunResult, class: u32, late: bool) -> Option<f64> {
    let middle = last_sent(result) / 2.0;
    let of_class =
        |record: &&Record| record.class == class && record.outcome != Outcome::Left && (!late || record.sent >= middle);
    let (mut met, mut all) = (0.0, 0.0);
    for record in result.requests.iter().filter(of_class) {
        all += 1.0;
        met += f64::from(u8::from(record.meets(result.config.slo_of(class))));
    }
    (all > 0.0).then_some(met / all)
}

/// Seconds during which requests arrive. If no duration is configured, they end with the last
/// request or, in a closed loop with a number of requests, with the run.
fn arrival_seconds(traffic: &[RunPlan], result: &RunResult) -> f64 {
    let configured = traffic.iter().map(|plan| match (plan.extent, &plan.arrival) {
        (Extent::Lasting(length), _) => length.as_secs_f64(),
        (Extent::Requests(_), Arrival::ClosedLoop { .. }) => result.duration,
        (Extent::Requests(_), _) => 0.0,
    });
    let seconds = configured.fold(last_sent(result), f64::max);
    if seconds > 0.0 { seconds } else { result.duration }
}

fn last_sent(result: &RunResult) -> f64 {
    result.requests.iter().map(|record| record.sent).fold(0.0, f64::max)
}

impl Found {
    fn requirement(self, scenario: &Scenario, prices: &Prices) -> Requirement {
        let Trial { attainment, runs, gpus, traffic } = self.enough;
        let folder = &scenario.folder;
        let price = |gpu: &str| prices.per_hour.iter().find(|(name, _)| preset(name, folder) == gpu);
        let of_each = gpus.iter().map(|(gpu, count)| Some(price(gpu)?.1 * f64::from(*count)));
        let per_hour: Option<f64> = of_each.sum();
        let shown = |gpu: &String| Path::new(gpu).strip_prefix(folder).unwrap_or(Path::new(gpu)).display().to_string();
        let unpriced = gpus.keys().filter(|gpu| price(gpu).is_none()).map(shown).collect();
        let gpus = gpus.values().sum();
        let with_a_batch = runs.iter().map(|run| {
            let busy: f64 = run.engines.iter().map(|engine| engine.busy).sum();
            100.0 * busy / run.engines.len() as f64 / run.result.duration.max(f64::MIN_POSITIVE)
        });
        let with_a_batch = with_a_batch.sum::<f64>() / runs.len() as f64;
        let cost = per_hour.map(|per_hour| cost(per_hour, &traffic, &runs));
        let (engines, with_one_less, headroom) = (self.engines, self.with_one_less, self.headroom);
        Requirement { engines, gpus, attainment, with_one_less, headroom, with_a_batch, cost, unpriced }
    }
}

fn cost(per_hour: f64, traffic: &[RunPlan], runs: &[LabRun]) -> Cost {
    let (mut hours, mut requests, mut input, mut output) = (0.0, 0.0, 0.0, 0.0);
    for run in runs {
        let metrics = Metrics::of(&run.result);
        hours += arrival_seconds(traffic, &run.result) / SECONDS_PER_HOUR;
        requests += metrics.completed as f64;
        input += metrics.input_tokens as f64;
        output += metrics.output_tokens as f64;
    }
    let paid = per_hour * hours;
    Cost {
        per_hour,
        per_request: paid / requests,
        per_million_tokens: paid / (input + output) * 1e6,
        per_million_output: paid / output * 1e6,
    }
}
