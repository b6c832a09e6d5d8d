//! `sluice bench --find-rate`: finds the highest rate at which the objectives hold, on real
//! servers.
//!
//! Each trial of the search (`bench::search`) is a run of the load generator with fresh prompts.
//! Latencies count from the due time of a request, so lag of the client does not improve the
//! result. A request in flight counts as missed after the bound on E2EL, so a trial ends even if
//! the server hangs.
//!
//! Ctrl-C ends the search and prints the trials so far. Bound: `--find-rate-runs` trials.

pub(super) mod args;
mod servers;
#[cfg(test)]
mod tests;
pub(in crate::cli) mod text;

use std::process::ExitCode;

use super::args::BenchArgs;
use super::error::{CommandError, failed, usage};
use super::plan::Setup;
use super::signals::StopSignals;
use servers::{SearchError, Servers};
use sluice_bench::search::{SearchEnd, SearchGoal, SearchResult, TrialReport, find_rate};
use sluice_bench::{RequestSource, Slo};

pub(super) async fn run(args: &BenchArgs, setup: &Setup, stop: &mut StopSignals) -> Result<ExitCode, CommandError> {
    let objectives = objectives(setup).map_err(usage)?;
    let goal = goal(args, &objectives).map_err(usage)?;
    let mut trials: Vec<TrialReport> = Vec::new();
    let mut servers = Servers::new(args, setup, objectives, stop);
    eprintln!("{}", text::HEADER);
    let outcome = find_rate(&mut servers, &goal, |report| {
        eprintln!("{}", text::report(report));
        trials.push(*report);
    })
    .await;
    let (found, halted) = match outcome {
        Ok(found) => (found, false),
        Err(SearchError::Bench(error)) => return Err(usage(error)),
        Err(SearchError::Interrupted) => (
            SearchResult {
                best: None,
                boundary: None,
                most: f64::INFINITY,
                safe: None,
                ending: SearchEnd::TrialLimit,
                trials,
            },
            true,
        ),
    };
    for (status, reason) in setup.client.reasons() {
        eprintln!("warning: the first response with status {status} said: {reason}");
    }
    text::print(&found, &goal, halted, args.output.json).map_err(failed)?;
    Ok(if found.best.is_some() && !halted { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The objectives of each class. A class without objectives is an error.
fn objectives(setup: &Setup) -> anyhow::Result<Vec<Slo>> {
    let plan = &setup.plan;
    if plan.sessions.is_some() || plan.workload.leaving > 0.0 {
        anyhow::bail!(
            "--find-rate needs single requests that run to their end; leave out --multi-turn and --leave-share"
        );
    }
    let mut result = sluice_bench::RunResult::default();
    result.config.classes = plan.workload.class_configs();
    setup.annotate(&mut result);
    let count = match &plan.workload.source {
        RequestSource::Classes(classes) => classes.len() as u32,
        RequestSource::Items(_) => result.config.classes.len() as u32,
    };
    let all: Vec<Slo> = (0..count.max(1)).map(|class| *result.config.slo_of(class)).collect();
    if all.iter().any(Slo::is_empty) {
        anyhow::bail!(
            "--find-rate needs objectives for every class: give --goodput ttft:500 e2el:5000 (ms), or ttft= in --class"
        );
    }
    Ok(all)
}

fn goal(args: &BenchArgs, objectives: &[Slo]) -> anyhow::Result<SearchGoal> {
    let search = &args.search;
    let share = search.find_rate_attainment / 100.0;
    if !(share > 0.0 && share < 1.0) {
        anyhow::bail!(
            "--find-rate-attainment {}: give a percentage above 0 and below 100",
            search.find_rate_attainment
        );
    }
    let tolerance = search.find_rate_tolerance / 100.0;
    if !(tolerance > 0.0 && tolerance < 1.0) || search.find_rate_requests < 30 || search.find_rate_runs < 3 {
        anyhow::bail!("--find-rate: give a tolerance above 0 and below 100 %, 30 requests or more, and 3 runs or more");
    }
    // A bound on TPOT alone does not limit how long a queue may grow, so one second is the bound
    // then.
    let spans = objectives.iter().flat_map(|slo| [slo.ttft, slo.e2el]).flatten().map(|ms| ms / 1e3);
    let longest_bound = spans.reduce(f64::max).unwrap_or(1.0);
    Ok(SearchGoal {
        attainment: share,
        tolerance,
        requests: search.find_rate_requests,
        max_trials: search.find_rate_runs,
        seed: args.load.seed,
        ..SearchGoal::new(longest_bound)
    })
}
