//! Runs the trials of a search against real servers.
//!
//! An observer of the run sees each request as it is sent and as it ends; a timer ([`CHECK_EVERY`])
//! finds requests in flight beyond the bound on E2EL. Without such a bound, a request that hangs
//! becomes known only by its timeout. Latencies count from the due time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::groups::Groups;
use super::judge::Judge;
use super::trial::{Trial, TrialLoad, TrialStats, throughput};
use crate::client::load_client::LoadClient;
use crate::error::BenchError;
use crate::load::arrival::{Arrival, Extent};
use crate::result::record::RunResult;
use crate::result::validity::Delivered;
use crate::run::plan::RunPlan;
use crate::run::progress::{InFlight, Progress, RequestEvent};
use crate::run::runner::run;

const CHECK_EVERY: Duration = Duration::from_millis(50);
/// Seconds after the bound at which a request in flight counts as a miss. An earlier response gives
/// the exact ratio.
const GRACE: f64 = 0.25;

/// One trial against real servers.
#[derive(Debug)]
pub struct LiveTrial {
    plan: RunPlan,
    warmup: usize,
    watch: Arc<Mutex<TrialWatch>>,
    progress: Arc<Progress>,
}

impl LiveTrial {
    /// A trial with the requests of `plan` at the load of `trial`.
    pub fn new(plan: &RunPlan, trial: &Trial, judge: &Judge, groups: &Arc<Groups>) -> Self {
        let watch = TrialWatch::new(judge.clone(), groups.clone());
        let watch = Arc::new(Mutex::new(watch));
        let observed = watch.clone();
        let progress = Arc::new(Progress::with_observer(move |event| observed.lock().on_event(event)));
        Self { plan: plan_of(plan, trial), warmup: trial.warmup, watch, progress }
    }

    /// The plan of the trial.
    pub fn plan(&self) -> &RunPlan {
        &self.plan
    }

    /// The progress, by which the trial can be stopped.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Runs the trial until all requests have ended, or until `judge` has a verdict. Requests in
    /// flight are then abandoned.
    ///
    /// # Errors
    /// The plan is invalid; nothing was sent.
    pub async fn run(self, client: &Arc<LoadClient>, judge: &mut Judge) -> Result<(TrialStats, RunResult), BenchError> {
        let mut running = run(&self.plan, client, &self.progress);
        let mut ticks = tokio::time::interval(CHECK_EVERY);
        let result = loop {
            tokio::select! {
                result = &mut running => break result?,
                _ = ticks.tick() => {
                    if self.watch.lock().is_decided(Instant::now()) {
                        self.progress.stop();
                    }
                }
            }
        };
        let mut watch = self.watch.lock();
        *judge = watch.judge.clone();
        watch.ended.sort_by(f64::total_cmp);
        let delivered = Delivered::of(&result).map_or(1.0, |delivered| delivered.share());
        let delivered = if delivered.is_finite() { delivered } else { 1.0 };
        let stats =
            TrialStats { throughput: throughput(&watch.ended, self.warmup), delivered, seconds: result.duration };
        Ok((stats, result))
    }
}

fn plan_of(plan: &RunPlan, trial: &Trial) -> RunPlan {
    let streams = |streams: usize| Arrival::ClosedLoop { concurrency: u32::try_from(streams).unwrap_or(u32::MAX) };
    let arrival = match trial.load {
        TrialLoad::Stream => streams(1),
        TrialLoad::Saturated(count) => streams(count),
        TrialLoad::Rate(rate) => plan.arrival.at_rate(rate),
    };
    let mut plan =
        RunPlan { arrival, extent: Extent::Requests(trial.requests as u64), max_concurrency: None, ..plan.clone() };
    plan.workload.seed = trial.seed;
    plan
}

#[derive(Debug)]
struct TrialWatch {
    judge: Judge,
    groups: Arc<Groups>,
    open: HashMap<u64, InFlight>,
    ended: Vec<f64>,
    /// The start of the run or slightly later.
    start: Option<Instant>,
}

impl TrialWatch {
    fn new(judge: Judge, groups: Arc<Groups>) -> Self {
        Self { judge, groups, open: HashMap::new(), ended: Vec::new(), start: None }
    }

    fn on_event(&mut self, event: RequestEvent<'_>) {
        match event {
            RequestEvent::Sent(request) => {
                self.open.insert(request.index, request);
                let start = Instant::now().checked_sub(Duration::from_secs_f64(request.due));
                self.start = self.start.into_iter().chain(start).min();
            }
            RequestEvent::Ended(record) => {
                self.open.remove(&record.index);
                if record.is_completed() || record.is_failed() {
                    self.ended.extend(record.is_completed().then_some(record.ended));
                    self.groups.record(&mut self.judge, record);
                }
            }
        }
    }

    /// Records a miss for each overdue request. Returns whether there is a verdict.
    fn is_decided(&mut self, now: Instant) -> bool {
        if let Some(start) = self.start {
            self.fail_overdue(now.saturating_duration_since(start).as_secs_f64());
        }
        self.judge.verdict().is_some()
    }

    fn fail_overdue(&mut self, now: f64) {
        let overdue = self.open.values().filter(|request| self.groups.is_overdue(request, now, GRACE));
        let missed: Vec<InFlight> = overdue.copied().collect();
        missed.iter().for_each(|request| self.groups.miss(&mut self.judge, request));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::record::{Outcome, Record, Slo};
    use crate::search::{TrialKind, TrialRule, TrialVerdict};

    const SLO: Slo = Slo { ttft: Some(100.0), tpot: Some(20.0), e2el: Some(1000.0) };

    fn completed(index: u64, ttft: f64, latency: f64) -> Record {
        let outcome = Outcome::Completed;
        Record {
            index,
            due: Some(1.0),
            sent: 1.0,
            ended: 1.0 + latency,
            outcome,
            ttft,
            latency,
            output_tokens: Some(11),
            ..Record::default()
        }
    }

    #[test]
    fn strain_is_the_worst_measure_over_its_bound_from_when_it_was_due() {
        assert!((completed(0, 0.05, 0.2).slo_ratio(&SLO) - 0.75).abs() < 1e-12, "TPOT 15 of 20 ms");
        assert!((completed(0, 0.05, 0.1).slo_ratio(&SLO) - 0.5).abs() < 1e-12, "TTFT 50 of 100 ms");
        let late = Record { due: Some(0.9), ..completed(0, 0.05, 0.1) };
        assert!((late.slo_ratio(&SLO) - 1.5).abs() < 1e-9, "and 100 ms late");
        let failed = Record { outcome: Outcome::Failed("status 503".into()), ..Record::default() };
        assert_eq!(failed.slo_ratio(&SLO), f64::INFINITY);
        assert_eq!(completed(0, 9.0, 9.0).slo_ratio(&Slo::default()), 0.0);
    }

    #[test]
    fn a_request_that_is_open_for_too_long_has_missed() {
        let rule = TrialRule { kind: TrialKind::Look, target: 0.9, warmup: 0, length: 10 };
        let mut watch = TrialWatch::new(Judge::new(rule), Arc::new(Groups::one(vec![SLO])));
        for index in 0..2 {
            watch.on_event(RequestEvent::Sent(InFlight { index, class: 0, adapter: None, due: 1.0 }));
        }
        watch.fail_overdue(2.2);
        assert_eq!(watch.judge.verdict(), None);
        watch.fail_overdue(2.3);
        assert_eq!(watch.judge.verdict(), Some(TrialVerdict::Fails));
        // Later events do not count again, and abandoned requests are not recorded.
        watch.on_event(RequestEvent::Ended(&completed(0, 0.05, 0.1)));
        watch.on_event(RequestEvent::Ended(&Record { index: 1, ..Record::default() }));
        assert_eq!((watch.judge.hits(), watch.ended.len()), (vec![false, false], 1));
    }
}
