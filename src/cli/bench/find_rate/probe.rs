//! The probe of a search that sends real requests.
//!
//! Strain of a request, from when it was due: the largest of TTFT, TPOT and E2EL over the bound of its class. A watcher on
//! the run's progress hears of each request as it is sent and as it ends; a ticker ([`LOOK`]) finds those that have been
//! open for longer than their bound on E2EL. Without such a bound a request that hangs is known when it times out.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::super::plan::{Setup, paced};
use super::super::{BenchArgs, Stop};
use crate::bench::result::validity::Delivered;
use crate::bench::run::progress::News;
use crate::bench::search::{Judge, Load, Order, Probe, Seen, throughput};
use crate::bench::{self, Arrival, BenchError, Extent, Plan, Progress, Record, Slo};
use crate::cli::line::Line;

/// Between two looks at what is open.
const LOOK: Duration = Duration::from_millis(50);

/// Seconds that a request may be open beyond its bound before it is given up: an answer that comes meanwhile tells exactly.
const GRACE: f64 = 0.25;

/// Why a search cannot go on.
pub(super) enum Halt {
    /// A plan that makes no sense.
    Bench(BenchError),
    /// Somebody wants it to end.
    Stopped,
}

/// The servers of the flags.
pub(super) struct Servers<'a> {
    args: &'a BenchArgs,
    setup: &'a Setup,
    objectives: Arc<[Slo]>,
    stop: &'a mut Stop,
    runs: usize,
}

impl<'a> Servers<'a> {
    pub(super) fn new(args: &'a BenchArgs, setup: &'a Setup, objectives: Vec<Slo>, stop: &'a mut Stop) -> Self {
        Self { args, setup, objectives: objectives.into(), stop, runs: 0 }
    }

    fn plan(&self, order: &Order) -> Plan {
        let load = &self.args.load;
        let streams = |streams: usize| Arrival::ClosedLoop { streams: u32::try_from(streams).unwrap_or(u32::MAX) };
        let arrival = match order.load {
            Load::Stream => streams(1),
            Load::Saturated(count) => streams(count),
            Load::Rate(rate) => paced(rate, load.burstiness.0, load.burst_size),
        };
        let mut plan = Plan {
            arrival,
            extent: Extent::Requests(order.requests as u64),
            max_concurrency: None,
            scrape: Vec::new(),
            ..self.setup.plan.clone()
        };
        plan.workload.seed = order.seed;
        plan
    }
}

/// One run as its watcher sees it.
struct Watched {
    judge: Judge,
    objectives: Arc<[Slo]>,
    /// Class and moment of what is open, by index.
    open: HashMap<u64, (u32, f64)>,
    ended: Vec<f64>,
    /// The start of the run, or a little later: nothing is sent before it is due.
    start: Option<Instant>,
}

impl Watched {
    fn slo(&self, class: u32) -> Slo {
        self.objectives.get(class as usize).or(self.objectives.first()).copied().unwrap_or_default()
    }

    fn hear(&mut self, news: News<'_>) {
        match news {
            News::Sent { index, class, at } => {
                self.open.insert(index, (class, at));
                let start = Instant::now().checked_sub(Duration::from_secs_f64(at));
                self.start = self.start.into_iter().chain(start).min();
            }
            News::Ended(record) => {
                self.open.remove(&record.index);
                // What was given up at the end of a run says nothing.
                if record.is_completed() || record.is_failed() {
                    // What is refused fast is no throughput.
                    self.ended.extend(record.is_completed().then_some(record.ended));
                    let due = record.due.unwrap_or(record.sent);
                    self.judge.record(record.index as usize, due, strain(record, &self.slo(record.class)));
                }
            }
        }
    }

    /// At `now` seconds: what has been open for too long has missed.
    fn give_up(&mut self, now: f64) {
        let late = |(class, at): (u32, f64)| self.slo(class).e2el.is_some_and(|bound| now - at > bound / 1e3 + GRACE);
        let missed: Vec<(u64, f64)> =
            self.open.iter().filter(|(_, open)| late(**open)).map(|(index, (_, at))| (*index, *at)).collect();
        for (index, at) in missed {
            self.judge.record(index as usize, at, f64::INFINITY);
        }
    }
}

/// The largest measure over its bound; infinite for a failure.
fn strain(record: &Record, slo: &Slo) -> f64 {
    if !record.is_completed() {
        return f64::INFINITY;
    }
    let over = |bound: Option<f64>, value: f64| bound.map_or(0.0, |bound| value * 1e3 / bound);
    let delay = record.delay();
    over(slo.ttft, delay + record.ttft)
        .max(over(slo.e2el, delay + record.latency))
        .max(over(slo.tpot, record.tpot().unwrap_or(0.0)))
}

impl Probe for Servers<'_> {
    type Error = Halt;

    async fn run(&mut self, order: &Order, judge: &mut Judge) -> Result<Seen, Halt> {
        self.runs += 1;
        let plan = self.plan(order);
        let watched = Arc::new(Mutex::new(Watched {
            judge: judge.clone(),
            objectives: self.objectives.clone(),
            open: HashMap::new(),
            ended: Vec::new(),
            start: None,
        }));
        let hears = watched.clone();
        let progress = Arc::new(Progress::watched(move |news| hears.lock().hear(news)));
        let title = format!("run {}, {}", self.runs, super::text::load(&order.load));
        let quiet = self.args.output.disable_tqdm;
        let line = (!quiet).then(|| Line::start(&title, plan.extent, progress.clone()));
        let mut halted = false;
        let result = {
            let mut running = std::pin::pin!(bench::run(&plan, &self.setup.client, &progress));
            let mut ticks = tokio::time::interval(LOOK);
            loop {
                tokio::select! {
                    result = &mut running => break result,
                    _ = ticks.tick() => {
                        let mut watched = watched.lock();
                        if let Some(start) = watched.start {
                            watched.give_up(start.elapsed().as_secs_f64());
                        }
                        if watched.judge.finding().is_some() {
                            progress.stop();
                        }
                    }
                    () = self.stop.wanted(), if !halted => {
                        halted = true;
                        progress.stop();
                    }
                }
            }
        };
        drop(line);
        let result = result.map_err(Halt::Bench)?;
        if halted {
            return Err(Halt::Stopped);
        }
        let mut watched = watched.lock();
        *judge = watched.judge.clone();
        watched.ended.sort_by(f64::total_cmp);
        let delivered = Delivered::of(&result).map_or(1.0, |delivered| delivered.share());
        let delivered = if delivered.is_finite() { delivered } else { 1.0 };
        Ok(Seen { throughput: throughput(&watched.ended, order.warmup), delivered, seconds: result.duration })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Outcome;
    use crate::bench::search::{Finding, Manner, Rule};

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
        assert!((strain(&completed(0, 0.05, 0.2), &SLO) - 0.75).abs() < 1e-12, "TPOT 15 of 20 ms");
        assert!((strain(&completed(0, 0.05, 0.1), &SLO) - 0.5).abs() < 1e-12, "TTFT 50 of 100 ms");
        let late = Record { due: Some(0.9), ..completed(0, 0.05, 0.1) };
        assert!((strain(&late, &SLO) - 1.5).abs() < 1e-9, "and 100 ms late");
        let failed = Record { outcome: Outcome::Failed("status 503".into()), ..Record::default() };
        assert_eq!(strain(&failed, &SLO), f64::INFINITY);
        assert_eq!(strain(&completed(0, 9.0, 9.0), &Slo::default()), 0.0);
    }

    #[test]
    fn a_request_that_is_open_for_too_long_has_missed() {
        let rule = Rule { manner: Manner::Look, target: 0.9, warmup: 0, length: 10 };
        let judge = Judge::new(rule);
        let mut watched =
            Watched { judge, objectives: vec![SLO].into(), open: HashMap::new(), ended: Vec::new(), start: None };
        for index in 0..2 {
            watched.hear(News::Sent { index, class: 0, at: 1.0 });
        }
        watched.give_up(2.2);
        assert_eq!(watched.judge.finding(), None);
        watched.give_up(2.3);
        assert_eq!(watched.judge.finding(), Some(Finding::Fails));
        // What is told afterwards does not count again, and what was given up says nothing.
        watched.hear(News::Ended(&completed(0, 0.05, 0.1)));
        watched.hear(News::Ended(&Record { index: 1, ..Record::default() }));
        assert_eq!((watched.judge.hits(), watched.ended.len()), (vec![false, false], 1));
    }
}
