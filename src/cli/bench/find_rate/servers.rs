//! Runs the trials of a search against real servers.
//!
//! The SLO ratio of a request, from when it was due, is the largest of TTFT, TPOT and E2EL over the bound of its class.
//! An observer of the run sees each request as it is sent and as it ends; a timer ([`CHECK_EVERY`]) finds those in
//! flight for longer than their bound on E2EL. Without such a bound, a request that hangs is known when it times out.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::super::args::BenchArgs;
use super::super::plan::{Setup, paced};
use super::super::signals::StopSignals;
use crate::bench::result::validity::Delivered;
use crate::bench::run::progress::RequestEvent;
use crate::bench::search::{Judge, SystemUnderTest, Trial, TrialLoad, TrialStats, throughput};
use crate::bench::{self, Arrival, BenchError, Extent, Progress, RunPlan, Slo};
use crate::cli::line::Line;

/// Time between two checks for overdue requests.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// A request counts as missed this many seconds after its bound; a response before that gives its exact ratio.
const GRACE: f64 = 0.25;

/// Why a search cannot continue.
pub(super) enum SearchError {
    /// An invalid plan.
    Bench(BenchError),
    /// A stop signal arrived.
    Interrupted,
}

/// The servers given by the flags.
pub(super) struct Servers<'a> {
    args: &'a BenchArgs,
    setup: &'a Setup,
    objectives: Arc<[Slo]>,
    stop: &'a mut StopSignals,
    runs: usize,
}

impl<'a> Servers<'a> {
    pub(super) fn new(args: &'a BenchArgs, setup: &'a Setup, objectives: Vec<Slo>, stop: &'a mut StopSignals) -> Self {
        Self { args, setup, objectives: objectives.into(), stop, runs: 0 }
    }

    fn plan(&self, trial: &Trial) -> RunPlan {
        let load = &self.args.load;
        let streams = |streams: usize| Arrival::ClosedLoop { concurrency: u32::try_from(streams).unwrap_or(u32::MAX) };
        let arrival = match trial.load {
            TrialLoad::Stream => streams(1),
            TrialLoad::Saturated(count) => streams(count),
            TrialLoad::Rate(rate) => paced(rate, load.burstiness.0, load.burst_size),
        };
        let mut plan = RunPlan {
            arrival,
            extent: Extent::Requests(trial.requests as u64),
            max_concurrency: None,
            scrape: Vec::new(),
            ..self.setup.plan.clone()
        };
        plan.workload.seed = trial.seed;
        plan
    }
}

/// The state of one trial, kept by the observer of its run.
struct TrialWatch {
    judge: Judge,
    objectives: Arc<[Slo]>,
    /// Class and due time of each request in flight, by index.
    open: HashMap<u64, (u32, f64)>,
    ended: Vec<f64>,
    /// The start of the run, or slightly later, since no request is sent before it is due.
    start: Option<Instant>,
}

impl TrialWatch {
    fn slo(&self, class: u32) -> Slo {
        self.objectives.get(class as usize).or(self.objectives.first()).copied().unwrap_or_default()
    }

    fn on_event(&mut self, event: RequestEvent<'_>) {
        match event {
            RequestEvent::Sent { index, class, at } => {
                self.open.insert(index, (class, at));
                let start = Instant::now().checked_sub(Duration::from_secs_f64(at));
                self.start = self.start.into_iter().chain(start).min();
            }
            RequestEvent::Ended(record) => {
                self.open.remove(&record.index);
                // Requests abandoned at the end of a trial are not recorded.
                if record.is_completed() || record.is_failed() {
                    // Failures are not throughput.
                    self.ended.extend(record.is_completed().then_some(record.ended));
                    let due = record.due.unwrap_or(record.sent);
                    self.judge.record(record.index as usize, due, record.slo_ratio(&self.slo(record.class)));
                }
            }
        }
    }

    /// Records a miss for each request that is overdue at `now` seconds.
    fn fail_overdue(&mut self, now: f64) {
        let late = |(class, at): (u32, f64)| self.slo(class).e2el.is_some_and(|bound| now - at > bound / 1e3 + GRACE);
        let missed: Vec<(u64, f64)> =
            self.open.iter().filter(|(_, open)| late(**open)).map(|(index, (_, at))| (*index, *at)).collect();
        for (index, at) in missed {
            self.judge.record(index as usize, at, f64::INFINITY);
        }
    }
}

impl SystemUnderTest for Servers<'_> {
    type Error = SearchError;

    async fn run(&mut self, trial: &Trial, judge: &mut Judge) -> Result<TrialStats, SearchError> {
        self.runs += 1;
        let plan = self.plan(trial);
        let watch = Arc::new(Mutex::new(TrialWatch {
            judge: judge.clone(),
            objectives: self.objectives.clone(),
            open: HashMap::new(),
            ended: Vec::new(),
            start: None,
        }));
        let observed = watch.clone();
        let progress = Arc::new(Progress::with_observer(move |event| observed.lock().on_event(event)));
        let title = format!("run {}, {}", self.runs, super::text::load(&trial.load));
        let quiet = self.args.output.disable_tqdm;
        let line = (!quiet).then(|| Line::start(&title, plan.extent, progress.clone()));
        let mut halted = false;
        let result = {
            let mut running = bench::run(&plan, &self.setup.client, &progress);
            let mut ticks = tokio::time::interval(CHECK_EVERY);
            loop {
                tokio::select! {
                    result = &mut running => break result,
                    _ = ticks.tick() => {
                        let mut watch = watch.lock();
                        if let Some(start) = watch.start {
                            watch.fail_overdue(start.elapsed().as_secs_f64());
                        }
                        if watch.judge.verdict().is_some() {
                            progress.stop();
                        }
                    }
                    () = self.stop.received(), if !halted => {
                        halted = true;
                        progress.stop();
                    }
                }
            }
        };
        drop(line);
        let result = result.map_err(SearchError::Bench)?;
        if halted {
            return Err(SearchError::Interrupted);
        }
        let mut watch = watch.lock();
        *judge = watch.judge.clone();
        watch.ended.sort_by(f64::total_cmp);
        let delivered = Delivered::of(&result).map_or(1.0, |delivered| delivered.share());
        let delivered = if delivered.is_finite() { delivered } else { 1.0 };
        Ok(TrialStats { throughput: throughput(&watch.ended, trial.warmup), delivered, seconds: result.duration })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::search::{TrialKind, TrialRule, TrialVerdict};
    use crate::bench::{Outcome, Record};

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
            output_tokens: 11,
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
        let judge = Judge::new(rule);
        let mut watch =
            TrialWatch { judge, objectives: vec![SLO].into(), open: HashMap::new(), ended: Vec::new(), start: None };
        for index in 0..2 {
            watch.on_event(RequestEvent::Sent { index, class: 0, at: 1.0 });
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
