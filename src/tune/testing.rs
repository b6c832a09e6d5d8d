//! A backend whose capacity is known by formula: one server, exponential work, Poisson arrivals.
//!
//! The time in the system is exponential with rate mu - load. With an objective of `BOUND` seconds,
//! the highest rate with a share a of hits is mu + ln(1 - a) / BOUND. A setting determines the
//! service rate mu. A setting without a service rate does not start.

use crate::backend::{Backend, Started, System};
use crate::error::TuneError;
use crate::file::TuneTable;
use crate::goal::Goal;
use crate::setting::Setting;
use crate::trial::{self, Effort};
use sluice_bench::result::record::ClassConfig;
use sluice_bench::search::{Judge, SearchGoal, SystemUnderTest, Trial, TrialLoad, TrialStats, throughput};
use sluice_bench::{Outcome, Record, RunConfig, RunResult, Slo};
use sluice_core::base::Rng;
use sluice_core::stats::Estimate;

/// The objective, in seconds.
pub(crate) const BOUND: f64 = 2.0;

pub(crate) fn paired_goal() -> Goal {
    let measure = |text: &str| text.to_owned();
    let (objective, against) = (measure("all.ttft.p99"), Some(measure("all.e2el.p99")));
    Goal::new(&TuneTable { objective, against, ..TuneTable::default() }, 1).unwrap()
}

pub(crate) fn paired_trial(value: f64, against: f64) -> trial::Trial {
    let mut trial = trial::Trial::new(&Setting::new(), Effort::Race(None), 1);
    let range = Estimate { value, low: f64::NEG_INFINITY, high: f64::INFINITY };
    trial.outcome = trial::Outcome::Measured { value: range, runs: vec![value; 2], certified: None };
    trial.against = vec![against; 2];
    trial
}

pub(crate) struct Queues<F> {
    pub(crate) service: F,
    pub(crate) other: fn(&Setting) -> f64,
    pub(crate) started: Vec<Setting>,
}

impl<F: Fn(&Setting) -> Option<f64>> Queues<F> {
    pub(crate) fn new(service: F) -> Self {
        Self { service, other: |_| 1.0, started: Vec::new() }
    }
}

pub(crate) fn capacity(service: f64, attainment: f64) -> f64 {
    service + (1.0 - attainment).ln() / BOUND
}

impl<F: Fn(&Setting) -> Option<f64>> Backend for Queues<F> {
    type System = Queue;

    async fn start(&mut self, setting: &Setting) -> Result<Started<Queue>, TuneError> {
        self.started.push(setting.clone());
        Ok(match (self.service)(setting) {
            Some(service) => Started::Up { system: Queue::new(service, (self.other)(setting)), seconds: 60.0 },
            None => Started::Refused { reason: "no room".to_owned(), seconds: 20.0, foreseen: false },
        })
    }

    fn search_goal(&self, attainment: f64, requests: usize, seed: u64) -> Result<SearchGoal, TuneError> {
        Ok(SearchGoal { attainment, requests, seed, ..SearchGoal::new(BOUND) })
    }
}

pub(crate) struct Queue {
    service: f64,
    other: f64,
    last: RunResult,
}

impl Queue {
    pub(crate) fn new(service: f64, other: f64) -> Self {
        Self { service, other, last: RunResult::default() }
    }
}

impl SystemUnderTest for Queue {
    type Error = TuneError;

    async fn run(&mut self, trial: &Trial, judge: &mut Judge) -> Result<TrialStats, TuneError> {
        let mut rng = Rng::new(Rng::new(trial.seed ^ self.service.to_bits()).next_u64());
        let (mut due, mut free, mut ended, mut records) = (0.0f64, 0.0f64, Vec::new(), Vec::new());
        for ordinal in 0..trial.requests {
            match trial.load {
                TrialLoad::Stream => due = free,
                TrialLoad::Saturated(_) => due = 0.0,
                TrialLoad::Rate(rate) => due += rng.exponential() / rate,
            }
            free = free.max(due) + rng.exponential() / self.service;
            judge.record(ordinal, due, (free - due) / BOUND);
            ended.push(free);
            let latency = free - due;
            records.push(Record { outcome: Outcome::Completed, latency, ..Record::default() });
            if judge.verdict().is_some() {
                break;
            }
        }
        let slo = Slo { e2el: Some(BOUND * 1e3), ..Slo::default() };
        let class = ClassConfig { name: "all".to_owned(), slo, ..ClassConfig::default() };
        let config = RunConfig { classes: vec![class], ..RunConfig::default() };
        self.last = RunResult { config, requests: records, duration: free, ..RunResult::default() };
        Ok(TrialStats { throughput: throughput(&ended, trial.warmup), delivered: 1.0, seconds: free })
    }
}

impl System for Queue {
    fn last(&self) -> Option<&RunResult> {
        Some(&self.last)
    }

    fn group(&self, _: usize) -> String {
        String::new()
    }

    /// The mean work of 200 requests and the second measure, with noise that only depends on the
    /// seed.
    async fn observe(&mut self, seed: u64) -> Result<(Vec<f64>, f64), TuneError> {
        let mut rng = Rng::new(Rng::new(seed).next_u64());
        let mean = (0..200).map(|_| rng.exponential()).sum::<f64>() / 200.0;
        Ok((vec![mean / self.service, mean * self.other], 60.0))
    }

    async fn stress(&mut self, _: u64) -> Result<f64, TuneError> {
        if self.service < 1.0 { Err(TuneError::Died("out of memory".to_owned())) } else { Ok(10.0) }
    }

    fn is_kv_full(&self) -> bool {
        false
    }

    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}
