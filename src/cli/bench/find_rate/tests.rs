//! The rate search against simulated engines on virtual time, whose true rate is measured by long
//! runs.
//!
//! The load generator may not depend on the simulator, so the tests are here.

use std::convert::Infallible;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use sluice_bench::search::{
    Judge, SearchGoal, SearchResult, SystemUnderTest, Trial, TrialKind, TrialLoad, TrialRule, TrialStats, find_rate,
    throughput,
};
use sluice_core::base::Rng;
use sluice_sim::engine::{Engine, EngineConfig, Request};
use sluice_sim::machine::{CostModel, Profile};
use sluice_sim::virtual_server::{FrontEnd, VirtualServer};

#[derive(Clone, Copy)]
struct Scenario {
    name: &'static str,
    max_num_seqs: u32,
    prompt: (u32, u32),
    output: (u32, u32),
    /// Requests of the second length among ten requests.
    long_of_ten: usize,
    /// Bounds on TTFT and E2EL, seconds.
    ttft: f64,
    e2el: f64,
    /// Roughly the highest rate with 99 % attainment, requests per second; [`LongRuns::rate`]
    /// starts there.
    about: f64,
}

/// Requests of a long run, enough to show the attainment to about 0.1 %.
const LONG: usize = 240_000;

/// The objective is TTFT alone, so attainment falls slowly with the rate.
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
/// There are few slots and a loose bound on E2EL, so no request is late until nearly all are.
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
}

impl Simulated {
    fn virtual_server(&self, seed: u64) -> VirtualServer {
        let profile = Profile::named("h200-llama-8b").unwrap();
        // The cache is off, because no two prompts share a prefix and the cache would take most of
        // the test's time.
        let max_num_seqs = self.scenario.max_num_seqs;
        let config = EngineConfig { max_num_seqs, seed, prefix_caching: false, ..EngineConfig::default() };
        let cost = CostModel::new(&profile, config.max_num_seqs, config.max_num_batched_tokens);
        VirtualServer::new(Engine::new(config, cost), FrontEnd::new(&profile.front_end))
    }

    fn request(&self, rng: &mut Rng, id: u64) -> Request {
        let scenario = &self.scenario;
        let long = rng.below(10) < scenario.long_of_ten;
        let of = |(short, other): (u32, u32)| if long { other } else { short };
        // With equal lengths all responses would end in step.
        let output_tokens = 1 + rng.below(2 * of(scenario.output) as usize - 1) as u32;
        Request::new(id, of(scenario.prompt), output_tokens)
    }
}

impl SystemUnderTest for Simulated {
    type Error = Infallible;

    async fn run(&mut self, trial: &Trial, judge: &mut Judge) -> Result<TrialStats, Infallible> {
        let seed = Rng::new((self.seed << 32) ^ trial.seed).next_u64();
        let (mut rng, mut server) = (Rng::new(seed), self.virtual_server(seed));
        // The requests are a list by number, because a hash table would double the time of these
        // tests.
        let mut requests: Vec<(f64, f64)> = Vec::new();
        let (mut in_flight, mut now, mut due) = (0, 0.0, 0.0);
        let mut ends = Vec::new();
        let gap = |rng: &mut Rng| if let TrialLoad::Rate(rate) = trial.load { rng.exponential() / rate } else { 0.0 };
        due += gap(&mut rng);
        while ends.len() < trial.requests && judge.verdict().is_none() {
            let room = match trial.load {
                TrialLoad::Stream => 1,
                TrialLoad::Saturated(streams) => streams,
                TrialLoad::Rate(_) => usize::MAX,
            };
            let may_send = requests.len() < trial.requests && in_flight < room;
            if room < usize::MAX {
                due = now;
            }
            let step = server.next_at();
            if may_send && step.is_none_or(|at| due <= at.as_secs_f64()) {
                server.submit(Duration::from_secs_f64(due), [self.request(&mut rng, requests.len() as u64)]);
                requests.push((due, f64::NAN));
                in_flight += 1;
                due += gap(&mut rng);
                continue;
            }
            let Some(at) = step else { break };
            let Some(end) = server.poll(at) else { continue };
            now = end.ended.as_secs_f64();
            for token in end.emitted {
                let (due, first) = &mut requests[token.id as usize];
                if token.first {
                    *first = now - *due;
                }
                if token.last {
                    let slo_ratio = (*first / self.scenario.ttft).max((now - *due) / self.scenario.e2el);
                    judge.record(token.id as usize, *due, slo_ratio);
                    in_flight -= 1;
                    ends.push(now);
                }
            }
        }
        Ok(TrialStats { throughput: throughput(&ends, trial.warmup), delivered: 1.0, seconds: now })
    }
}

fn at_once<T>(future: impl Future<Output = T>) -> T {
    match std::pin::pin!(future).as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("a system on virtual time does not wait"),
    }
}

fn search(scenario: Scenario, seed: u64) -> SearchResult {
    let bounds = [scenario.ttft, scenario.e2el].into_iter().filter(|bound| bound.is_finite());
    let mut system = Simulated { scenario, seed };
    at_once(find_rate(&mut system, &SearchGoal::new(bounds.fold(0.0, f64::max)), |_| ())).unwrap()
}

/// The long-run attainment by rate. Each rate is run once.
struct LongRuns {
    scenario: Scenario,
    /// Rate and attainment.
    measured: Vec<(f64, f64)>,
}

impl LongRuns {
    fn measure(&mut self, rate: f64) {
        let mut system = Simulated { scenario: self.scenario, seed: 77 };
        let rule = TrialRule { kind: TrialKind::Sample, target: 0.0, warmup: 0, length: LONG };
        let mut judge = Judge::new(rule);
        let trial = Trial { load: TrialLoad::Rate(rate), requests: LONG, warmup: 0, seed: 0 };
        at_once(system.run(&trial, &mut judge)).unwrap();
        let hits = judge.hits().iter().filter(|hit| **hit).count();
        self.measured.push((rate, hits as f64 / LONG as f64));
    }

    /// The rate with the attainment `share`, exact to 1 %. It is measured, so that the tests stay
    /// valid when the cost model changes.
    fn rate(&mut self, share: f64) -> f64 {
        loop {
            let holding = self.measured.iter().filter(|(_, attainment)| *attainment >= share).map(|(rate, _)| *rate);
            let failing = self.measured.iter().filter(|(_, attainment)| *attainment < share).map(|(rate, _)| *rate);
            let (holds, fails) = (holding.reduce(f64::max), failing.reduce(f64::min));
            match (holds, fails) {
                (Some(holds), Some(fails)) if fails / holds <= 1.01 => return (holds * fails).sqrt(),
                (Some(holds), Some(fails)) => self.measure((holds * fails).sqrt()),
                (Some(holds), None) => self.measure(holds * 1.1),
                (None, Some(fails)) => self.measure(fails / 1.1),
                (None, None) => self.measure(self.scenario.about),
            }
            let name = self.scenario.name;
            assert!(self.measured.len() < 40, "{name}: no rate with {share} is near the expected one");
        }
    }
}

/// Searches with the first `seeds` seeds, on all cores. Returns how many results are within 5 % of
/// the true rate, and how many are above the rate with 98 % attainment.
fn census(scenario: Scenario, seeds: u64) -> (usize, usize) {
    let mut long_runs = LongRuns { scenario, measured: Vec::new() };
    let (true_rate, slack_rate) = (long_runs.rate(0.99), long_runs.rate(0.98));
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let search_from = |first: usize| {
            scope.spawn(move || {
                let seeds = (first as u64..seeds).step_by(threads);
                seeds.map(|seed| search(scenario, seed).best.map_or(0.0, |best| best.rate)).collect::<Vec<_>>()
            })
        };
        let parts: Vec<_> = (0..threads).map(search_from).collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    });
    let near = rates.iter().filter(|rate| (**rate / true_rate - 1.0).abs() <= 0.05).count();
    let too_high = rates.iter().filter(|rate| **rate > slack_rate).count();
    println!("{}: {near} of {seeds} within 5 %, {too_high} too high", scenario.name);
    (near, too_high)
}

// Of 100 seeds of the three scenarios, 99, 95 and 92 were within 5 %, none too high (with a
// slightly different cost model). The tests run the first seeds and allow one to be outside.

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
