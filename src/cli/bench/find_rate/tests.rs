//! The rate search against simulated engines on virtual time, whose capacity is known from runs of a million requests.
//!
//! Here and not beside the search because the search may not know the simulator.

use std::collections::HashMap;
use std::convert::Infallible;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::base::Rng;
use crate::bench::search::{
    Judge, SearchGoal, SearchResult, SystemUnderTest, Trial, TrialKind, TrialLoad, TrialRule, TrialStats, find_rate,
    throughput,
};
use crate::sim::engine::{Engine, EngineConfig, Request};
use crate::sim::machine::{CostModel, Profile};
use crate::sim::virtual_server::{FrontEnd, VirtualServer};

/// A server, what it is asked and what is promised.
#[derive(Clone, Copy)]
struct Scenario {
    name: &'static str,
    max_num_seqs: u32,
    prompt: (u32, u32),
    output: (u32, u32),
    /// Of ten requests, this many are of the second length.
    long_of_ten: usize,
    /// Seconds to the first token, and to the last.
    ttft: f64,
    e2el: f64,
    /// About the highest rate with 99 % in the long run, requests per second: where [`long_rate`] begins to look.
    about: f64,
}

/// Requests of a long run: its share is then right to about 0.1 %.
const LONG: usize = 240_000;

/// TTFT alone: the share falls slowly with the rate.
const GENTLE: Scenario = Scenario {
    name: "gentle",
    max_num_seqs: 256,
    prompt: (1000, 1000),
    output: (16, 16),
    long_of_ten: 0,
    ttft: 0.3,
    e2el: f64::INFINITY,
    about: 34.02,
};
/// Few places and a loose end: nothing is late until nearly everything is.
const CLIFF: Scenario = Scenario {
    name: "cliff",
    max_num_seqs: 16,
    prompt: (200, 200),
    output: (32, 32),
    long_of_ten: 0,
    ttft: f64::INFINITY,
    e2el: 2.0,
    about: 86.06,
};
/// Long prompts among short ones.
const MIXED: Scenario = Scenario {
    name: "mixed",
    max_num_seqs: 64,
    prompt: (200, 4000),
    output: (24, 8),
    long_of_ten: 1,
    ttft: 0.5,
    e2el: 2.0,
    about: 46.63,
};

struct Simulated {
    scenario: Scenario,
    seed: u64,
    sent: usize,
}

impl Simulated {
    fn virtual_server(&self, seed: u64) -> VirtualServer {
        let profile = Profile::named("h200-llama-8b").unwrap();
        let config = EngineConfig { max_num_seqs: self.scenario.max_num_seqs, seed, ..EngineConfig::default() };
        let cost = CostModel::new(&profile, config.max_num_seqs, config.max_num_batched_tokens);
        VirtualServer::new(Engine::new(config, cost), FrontEnd::new(&profile.front_end))
    }

    fn request(&self, rng: &mut Rng, id: u64) -> Request {
        let scenario = &self.scenario;
        let long = rng.below(10) < scenario.long_of_ten;
        let of = |(short, other): (u32, u32)| if long { other } else { short };
        // Answers of one length would march in step.
        let output_tokens = 1 + rng.below(2 * of(scenario.output) as usize - 1) as u32;
        Request::new(id, of(scenario.prompt), output_tokens)
    }
}

impl SystemUnderTest for Simulated {
    type Error = Infallible;

    async fn run(&mut self, trial: &Trial, judge: &mut Judge) -> Result<TrialStats, Infallible> {
        let seed = Rng::new((self.seed << 32) ^ trial.seed).next_u64();
        let (mut rng, mut server) = (Rng::new(seed), self.virtual_server(seed));
        // Due and first token of what is in flight.
        let mut open: HashMap<u64, (f64, f64)> = HashMap::new();
        let (mut sent, mut now, mut due) = (0, 0.0, 0.0);
        let mut ends = Vec::new();
        let gap = |rng: &mut Rng| if let TrialLoad::Rate(rate) = trial.load { rng.exponential() / rate } else { 0.0 };
        due += gap(&mut rng);
        while ends.len() < trial.requests && judge.verdict().is_none() {
            let room = match trial.load {
                TrialLoad::Stream => 1,
                TrialLoad::Saturated(streams) => streams,
                TrialLoad::Rate(_) => usize::MAX,
            };
            let may_send = sent < trial.requests && open.len() < room;
            if room < usize::MAX {
                due = now;
            }
            let step = server.next_at();
            if may_send && step.is_none_or(|at| due <= at.as_secs_f64()) {
                server.submit(Duration::from_secs_f64(due), [self.request(&mut rng, sent as u64)]);
                open.insert(sent as u64, (due, f64::NAN));
                sent += 1;
                due += gap(&mut rng);
                continue;
            }
            let Some(at) = step else { break };
            let Some(end) = server.poll(at) else { continue };
            now = end.ended.as_secs_f64();
            for token in end.emitted {
                let Some((due, first)) = open.get_mut(&token.id) else { continue };
                if token.first {
                    *first = now - *due;
                }
                if token.last {
                    let slo_ratio = (*first / self.scenario.ttft).max((now - *due) / self.scenario.e2el);
                    judge.record(token.id as usize, *due, slo_ratio);
                    open.remove(&token.id);
                    ends.push(now);
                }
            }
        }
        self.sent += sent;
        Ok(TrialStats { throughput: throughput(&ends, trial.warmup), delivered: 1.0, seconds: now })
    }
}

/// Runs a future that never waits.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    match std::pin::pin!(future).as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("a probe on virtual time does not wait"),
    }
}

fn search(scenario: Scenario, seed: u64) -> (SearchResult, usize) {
    let longest_bound =
        [scenario.ttft, scenario.e2el].into_iter().filter(|bound| bound.is_finite()).fold(0.0, f64::max);
    let mut probe = Simulated { scenario, seed, sent: 0 };
    let found = at_once(find_rate(&mut probe, &SearchGoal::new(longest_bound), |_| ())).unwrap();
    (found, probe.sent)
}

/// Attainment at `rate` over `requests`, whatever comes of it.
fn long_run(scenario: Scenario, rate: f64, requests: usize) -> f64 {
    let mut probe = Simulated { scenario, seed: 77, sent: 0 };
    let rule = TrialRule { kind: TrialKind::Sample, target: 0.0, warmup: 0, length: requests };
    let mut judge = Judge::new(rule);
    at_once(probe.run(&Trial { load: TrialLoad::Rate(rate), requests, warmup: 0, seed: 0 }, &mut judge)).unwrap();
    judge.hits().iter().filter(|hit| **hit).count() as f64 / requests as f64
}

/// The rate at which `share` of the requests are in time in the long run, to 1 %. Measured here and not written down, so that
/// an engine that is priced otherwise leaves the search's accuracy to be judged as before.
fn long_rate(scenario: Scenario, share: f64) -> f64 {
    let (mut holds, mut fails) = (scenario.about / 2.0, scenario.about * 2.0);
    assert!(
        long_run(scenario, holds, LONG) >= share && long_run(scenario, fails, LONG) < share,
        "{}: far from it",
        scenario.name
    );
    while fails / holds > 1.01 {
        let middle = (holds * fails).sqrt();
        if long_run(scenario, middle, LONG) >= share { holds = middle } else { fails = middle }
    }
    (holds * fails).sqrt()
}

/// Searches with the first `seeds` seeds, two at a time: how many are within 5 % of the capacity, and how many above the rate
/// with 98 %.
fn census(scenario: Scenario, seeds: u64) -> (usize, usize) {
    let (capacity, slack_capacity) = (long_rate(scenario, 0.99), long_rate(scenario, 0.98));
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let half = |from: u64| {
            scope.spawn(move || {
                let seeds = (from..seeds).step_by(2);
                seeds.map(|seed| search(scenario, seed).0.best.map_or(0.0, |best| best.rate)).collect::<Vec<_>>()
            })
        };
        let halves = [half(0), half(1)];
        halves.into_iter().flat_map(|half| half.join().unwrap()).collect()
    });
    let near = rates.iter().filter(|rate| (**rate / capacity - 1.0).abs() <= 0.05).count();
    let too_high = rates.iter().filter(|rate| **rate > slack_capacity).count();
    println!("{}: {near} of {seeds} within 5 %, {too_high} too high", scenario.name);
    (near, too_high)
}

// Of 100 seeds: within 5 % in 99, 95 and 92, none too high (on an engine priced a little otherwise). The first of them are
// run here; where 5 and 8 in 100 are outside, one of four may be.

#[test]
fn the_rate_of_an_engine_is_found_within_five_percent_and_never_too_high() {
    let (near, too_high) = census(GENTLE, 20);
    assert!(near >= 19 && too_high == 0);
}

#[test]
fn a_server_whose_queue_fills_at_once_is_not_certified_above_its_capacity() {
    let (near, too_high) = census(CLIFF, 4);
    assert!(near >= 3 && too_high == 0);
}

#[test]
fn long_prompts_among_short_ones_leave_the_rate_within_five_percent() {
    let (near, too_high) = census(MIXED, 4);
    assert!(near >= 3 && too_high == 0);
}
