//! `sluice lab rate`: the highest rate at which the objectives are met.
//!
//! The search and its trials are those of `sluice bench --find-rate`; only the system under test is simulated. So results can
//! be compared with measured ones. There must be exactly one `[[traffic]]`, with a rate; the search replaces that rate.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use crate::error::LabError;
use crate::run::{LabRun, Progress, run_until};
use crate::setup::Lab;
use sluice_bench::search::{
    Judge, SearchGoal, SearchResult, SystemUnderTest, Trial, TrialLoad, TrialReport, TrialStats, find_rate, throughput,
};
use sluice_bench::{Arrival, Extent, Record, Slo};

/// Adapters with a smaller share of the requests are not judged for themselves: it would take too many requests.
pub const RARE: f64 = 0.05;

/// A simulation as the system under test.
#[derive(Clone, Debug)]
pub struct Simulated {
    lab: Lab,
    /// Of each class.
    slos: Vec<Slo>,
    /// The shortest bound on E2EL, seconds: nothing younger is overdue.
    shortest: f64,
    /// Names of the groups, class by class; empty: all requests are one group.
    groups: Vec<String>,
    /// The group, within its class, of each adapter.
    adapter_groups: Vec<usize>,
    last: Option<LabRun>,
}

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
    let mut system = Simulated::new(lab, false);
    let search = pin!(find_rate(&mut system, goal, on_trial));
    // The search never waits, since a simulated trial runs to its end in one call.
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
        let is_open = matches!(trial.load, TrialLoad::Rate(_));
        let mut done = |progress: &Progress<'_>| {
            for record in progress.ended {
                self.record(judge, record, record.slo_ratio(self.slo(record.class)));
            }
            let overdue = |record: &&Record| {
                let due = record.due.unwrap_or(record.sent);
                self.slo(record.class).e2el.is_some_and(|bound| progress.now - due > bound / 1e3)
            };
            // They are in the order due: the first that is not overdue by any bound ends the search for others.
            let old = |record: &&Record| progress.now - record.due.unwrap_or(record.sent) > self.shortest;
            for record in progress.in_flight.values().take_while(old).filter(overdue) {
                self.record(judge, record, f64::INFINITY);
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
    /// The laboratory as a system. `by_group` is whether every class and adapter must meet its objectives for itself; adapters
    /// with fewer than [`RARE`] of the requests are one group with the base model.
    pub fn new(lab: &Lab, by_group: bool) -> Self {
        let classes: Vec<_> = lab.traffic.iter().flat_map(|traffic| traffic.workload.class_configs()).collect();
        let slos: Vec<Slo> = classes.iter().map(|class| class.slo).collect();
        let shortest =
            slos.iter().filter_map(|slo| slo.e2el).reduce(f64::min).map_or(f64::INFINITY, |bound| bound / 1e3);
        let (mut groups, mut adapter_groups) = (Vec::new(), vec![0; lab.adapters().len()]);
        if by_group {
            let shares = lab.traffic.first().map(|traffic| traffic.workload.adapters.shares()).unwrap_or_default();
            let mut names = vec![String::new()];
            for (place, name) in lab.adapters().iter().enumerate() {
                if shares.get(place).is_some_and(|share| *share >= RARE) {
                    adapter_groups[place] = names.len();
                    names.push(name.clone());
                }
            }
            for class in &classes {
                let name = |adapter: &String| match adapter.as_str() {
                    "" => class.name.clone(),
                    adapter => format!("{} {adapter}", class.name),
                };
                groups.extend(names.iter().map(name));
            }
        }
        Self { lab: lab.clone(), slos, shortest, groups, adapter_groups, last: None }
    }

    /// The name of a group of requests; empty if all are one.
    pub fn group(&self, group: usize) -> &str {
        self.groups.get(group).map_or("", String::as_str)
    }

    /// The last run.
    pub fn last(&self) -> Option<&LabRun> {
        self.last.as_ref()
    }

    fn slo(&self, class: u32) -> &Slo {
        &self.slos[class as usize]
    }

    fn record(&self, judge: &mut Judge, record: &Record, ratio: f64) {
        let (index, due) = (record.index as usize, record.due.unwrap_or(record.sent));
        if self.groups.is_empty() {
            return judge.record(index, due, ratio);
        }
        let per_class = self.groups.len() / self.slos.len().max(1);
        let adapter = record.adapter.and_then(|adapter| self.adapter_groups.get(adapter as usize)).copied();
        judge.record_in(record.class as usize * per_class + adapter.unwrap_or(0), index, due, ratio);
    }
}
