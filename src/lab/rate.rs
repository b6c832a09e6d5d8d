//! `sluice lab rate`: the highest rate at which the objectives are met.
//!
//! Search and trials are as in `sluice bench --find-rate`, so results can be compared with measured
//! ones. There must be exactly one `[[traffic]]`, with a rate, which the search replaces. It must
//! have no conversations, because their later turns are sent when the client is ready, whatever the
//! rate. It must have no requests that leave early, because they meet no objective.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use crate::error::LabError;
use crate::run::{LabRun, Progress, run_until};
use crate::setup::Lab;
use sluice_bench::run::progress::InFlight;
use sluice_bench::search::{
    Groups, Judge, SearchGoal, SearchResult, SystemUnderTest, Trial, TrialLoad, TrialReport, TrialStats, find_rate,
    throughput,
};
use sluice_bench::{Arrival, Extent, RunPlan};

/// A simulation as the system under test.
#[derive(Clone, Debug)]
pub struct Simulated {
    lab: Lab,
    groups: Groups,
    last: Option<LabRun>,
}

/// The goal of a search: this share of requests meets the objectives of the classes.
///
/// # Errors
/// The share is not above 0 and below 1. There is not exactly one traffic, or it has no rate, no
/// objectives, conversations, or requests that leave early.
pub fn goal(traffic: &[RunPlan], attainment: f64, seed: u64) -> Result<SearchGoal, LabError> {
    // If no request may miss the objectives, or all may, there is no boundary to find.
    if !(attainment > 0.0 && attainment < 1.0) {
        let text = "plan.attainment must be above 0 and below 100 per cent for the highest rate";
        return Err(LabError::Plan(text.to_owned()));
    }
    let [traffic] = traffic else {
        let text = "the highest rate can be searched for one kind of traffic only; give one [[traffic]]";
        return Err(LabError::Plan(text.to_owned()));
    };
    if !matches!(traffic.arrival, Arrival::Poisson { .. } | Arrival::Gamma { .. } | Arrival::Burst { .. }) {
        return Err(LabError::Plan("the highest rate can be searched only for traffic with a rate".to_owned()));
    }
    if traffic.sessions.is_some() || traffic.workload.leaving > 0.0 {
        let text = "the search needs single requests that run to their end; leave out conversation and leave";
        return Err(LabError::Plan(text.to_owned()));
    }
    let classes = traffic.workload.class_configs();
    let bounds = classes.iter().flat_map(|class| [class.slo.ttft, class.slo.e2el].into_iter().flatten());
    let longest = bounds.fold(0.0, f64::max) / 1e3;
    if longest <= 0.0 {
        return Err(LabError::Plan("the search needs objectives; set ttft or e2el of a class".to_owned()));
    }
    Ok(SearchGoal { attainment, seed, ..SearchGoal::new(longest) })
}

/// Searches for the highest rate that meets a [`goal`]. `on_trial` is called after each trial.
pub fn highest_rate(
    lab: &Lab,
    goal: &SearchGoal,
    on_trial: impl FnMut(&TrialReport),
) -> Result<SearchResult, LabError> {
    let mut system = Simulated::new(lab, false);
    let search = pin!(find_rate(&mut system, goal, on_trial));
    // A simulated trial ends within one call.
    match search.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => Err(LabError::Plan("the search did not end".to_owned())),
    }
}

impl SystemUnderTest for Simulated {
    type Error = LabError;

    async fn run(&mut self, trial: &Trial, judge: &mut Judge) -> Result<TrialStats, LabError> {
        let mut lab = self.lab.clone();
        let slots = lab.config.pools.iter().map(|pool| pool.slots.saturating_mul(pool.backends.len() as u32));
        let slots = slots.sum::<u32>().max(1);
        let traffic = &mut lab.traffic[0];
        traffic.arrival = match trial.load {
            TrialLoad::Stream => Arrival::ClosedLoop { concurrency: 1 },
            // More streams than slots would only wait, or would be shed and count in the trial.
            TrialLoad::Saturated(streams) => {
                Arrival::ClosedLoop { concurrency: slots.min(u32::try_from(streams).unwrap_or(u32::MAX)) }
            }
            TrialLoad::Rate(rate) => traffic.arrival.at_rate(rate),
        };
        traffic.extent = Extent::Requests(trial.requests as u64);
        let (groups, shortest) = (&self.groups, self.groups.shortest());
        let is_open = matches!(trial.load, TrialLoad::Rate(_));
        let mut done = |progress: &Progress<'_>| {
            progress.ended.iter().for_each(|record| groups.record(judge, record));
            // Requests are in the order of due times. After the first that is not overdue by the
            // shortest bound, none is overdue.
            let old = |request: &InFlight| progress.now - request.due > shortest;
            let overdue = |request: &InFlight| groups.is_overdue(request, progress.now, 0.0);
            for request in progress.in_flight.values().map(InFlight::from).take_while(old).filter(overdue) {
                groups.miss(judge, &request);
            }
            is_open && judge.verdict().is_some()
        };
        let run = run_until(&lab, trial.seed, &mut done)?;
        let mut ended: Vec<f64> =
            run.result.requests.iter().filter(|record| record.is_completed()).map(|record| record.ended).collect();
        ended.sort_by(f64::total_cmp);
        let seconds = ended.last().copied().unwrap_or(run.result.duration);
        self.last = Some(run);
        Ok(TrialStats { throughput: throughput(&ended, trial.warmup), delivered: 1.0, seconds })
    }
}

impl Simulated {
    /// A system whose trials run in the laboratory. `by_group`: every class and adapter must meet
    /// the objectives separately.
    pub fn new(lab: &Lab, by_group: bool) -> Self {
        let classes: Vec<_> = lab.traffic.iter().flat_map(|traffic| traffic.workload.class_configs()).collect();
        let groups = match by_group {
            true => {
                let shares = lab.traffic.first().map(|traffic| traffic.workload.adapters.shares()).unwrap_or_default();
                Groups::each(&classes, &lab.adapters(), &shares)
            }
            false => Groups::one(classes.iter().map(|class| class.slo).collect()),
        };
        Self { lab: lab.clone(), groups, last: None }
    }

    /// The name of a group; empty if all requests are one group.
    pub fn group(&self, group: usize) -> &str {
        self.groups.name(group)
    }

    /// The last run.
    pub fn last(&self) -> Option<&LabRun> {
        self.last.as_ref()
    }
}
