//! `sluice lab rate`: the highest rate at which the objectives are met.
//!
//! The search and its trials are those of `sluice bench --find-rate`; only the system under test is simulated. So results can
//! be compared with measured ones. There must be exactly one `[[traffic]]`, with a rate; the search replaces that rate.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use crate::error::LabError;
use crate::run::run;
use crate::setup::Lab;
use sluice_bench::search::{
    Judge, SearchGoal, SearchResult, SystemUnderTest, Trial, TrialLoad, TrialReport, TrialStats, find_rate, throughput,
};
use sluice_bench::{Arrival, Extent, Slo};

/// A simulation as the system under test.
struct Simulated<'a>(&'a Lab);

/// The goal of a search: this share of requests meets the objectives of the traffic's classes.
///
/// # Errors
/// The traffic is not one kind with a rate and with objectives.
pub fn goal(lab: &Lab, attainment: f64, seed: u64) -> Result<SearchGoal, LabError> {
    let [traffic] = &lab.traffic[..] else {
        let text = "the highest rate can be searched for one kind of traffic only; give one [[traffic]]";
        return Err(LabError::Plan(text.to_owned()));
    };
    if !matches!(traffic.arrival, Arrival::Poisson { .. } | Arrival::Gamma { .. } | Arrival::Burst { .. }) {
        return Err(LabError::Plan("the highest rate can be searched only for traffic with a rate".to_owned()));
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
///
/// # Errors
/// The setup is not valid.
pub fn highest_rate(
    lab: &Lab,
    goal: &SearchGoal,
    on_trial: impl FnMut(&TrialReport),
) -> Result<SearchResult, LabError> {
    let mut system = Simulated(lab);
    let search = pin!(find_rate(&mut system, goal, on_trial));
    // The search never waits, since a simulated trial runs to its end in one call.
    match search.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => Err(LabError::Plan("the search did not end".to_owned())),
    }
}

impl SystemUnderTest for Simulated<'_> {
    type Error = LabError;

    async fn run(&mut self, trial: &Trial, judge: &mut Judge) -> Result<TrialStats, LabError> {
        let mut lab = self.0.clone();
        let slots = lab.config.pools.iter().map(|pool| pool.slots.saturating_mul(pool.backends.len() as u32));
        let slots = slots.sum::<u32>().max(1);
        let traffic = &mut lab.traffic[0];
        traffic.arrival = match (trial.load, &traffic.arrival) {
            (TrialLoad::Stream, _) => Arrival::ClosedLoop { concurrency: 1 },
            // With more streams than slots, each shed request would be replaced by another at the same virtual time, forever.
            (TrialLoad::Saturated(streams), _) => {
                Arrival::ClosedLoop { concurrency: slots.min(u32::try_from(streams).unwrap_or(u32::MAX)) }
            }
            (TrialLoad::Rate(rate), Arrival::Gamma { burstiness, .. }) => {
                Arrival::Gamma { rate, burstiness: *burstiness }
            }
            (TrialLoad::Rate(rate), Arrival::Burst { size, .. }) => Arrival::Burst { rate, size: *size },
            (TrialLoad::Rate(rate), _) => Arrival::Poisson { rate },
        };
        traffic.extent = Extent::Requests(trial.requests as u64);
        let result = run(&lab, trial.seed)?.result;
        let slo = |class: u32| -> Slo { *result.config.slo_of(class) };
        let mut ended = Vec::with_capacity(result.requests.len());
        for record in &result.requests {
            judge.record(
                record.index as usize,
                record.due.unwrap_or(record.sent),
                record.slo_ratio(&slo(record.class)),
            );
            if record.is_completed() {
                ended.push(record.ended);
            }
        }
        ended.sort_by(f64::total_cmp);
        Ok(TrialStats { throughput: throughput(&ended, trial.warmup), delivered: 1.0, seconds: result.duration })
    }
}
