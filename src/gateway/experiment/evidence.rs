//! How often verdicts and stops are wrong, and how soon they come, for simulated requests with a
//! known truth.
//!
//! Latencies are log-normal (sigma 1), and one of 100 is ten times as long. They are multiplied by
//! 1 plus the waiting time (in mean service times) in a simulated M/M/1 queue at 80 % load, so that
//! busy periods slow both arms alike. Each user sends 1 to 40 requests; a log-normal factor of the
//! user (sigma 0.5) multiplies all of their latencies. Half of the prompts are short. The
//! experiment is reviewed every [`Truth::look`] requests, the guardrails after each. Short versions
//! run with the other tests; the full ones take about two hours of one core:
//!
//! ```sh
//! cargo test --release -p sluice-gateway --lib experiment::evidence -- --ignored --nocapture \
//!   --test-threads 1
//! ```
//!
//! `SLUICE_EXPERIMENT_SEEDS=FROM..TO` sets the experiments of each line, one per seed, so that
//! several machines can share them and counts add up. `SLUICE_EXPERIMENT_JOBS` sets how many run at
//! once (default: one per core).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::tests::config;
use super::*;
use crate::experiment::plan::ExperimentPlan;
use crate::origin::Origin;
use sluice_core::base::Rng;

/// The difference between the arms, and how long the experiment is watched.
#[derive(Clone, Copy)]
struct Truth {
    /// Latencies of the arm over the control's.
    slower: f64,
    /// Shares of requests that fail in control and arm.
    errors: [f64; 2],
    /// Whether all requests of a user fail, or none.
    by_user: bool,
    requests: u64,
    sticky: &'static str,
    look: u64,
}

const SAME: Truth =
    Truth { slower: 1.0, errors: [0.01, 0.01], by_user: false, requests: 10_000, sticky: "user", look: 20 };

fn plan(sticky: &str) -> ExperimentPlan {
    let text = format!(
        "[[experiment]]\nname = \"x\"\nsticky = \"{sticky}\"\n[[experiment.arm]]\nname = \"a\"\nweight = 50\n\
         [[experiment.arm]]\nname = \"b\"\nweight = 50\n"
    );
    ExperimentPlan::all(&config(&text)).remove(0)
}

struct Simulated {
    truth: Truth,
    plan: ExperimentPlan,
    hash: UnitHash,
    state: ExperimentState,
    rng: Rng,
    /// Waiting time of the queue, in mean service times.
    wait: f64,
    request: u64,
    user: User,
    users: u64,
}

#[derive(Default)]
struct User {
    left: usize,
    pace: f64,
    /// Random number that decides whether this user's requests fail.
    luck: f64,
}

impl Simulated {
    fn new(seed: u64, truth: Truth) -> Self {
        let plan = plan(truth.sticky);
        let state = ExperimentState::new(&plan, 1.0);
        let hash = UnitHash::new("default", &format!("salt {seed}"));
        let rng = Rng::new(Rng::new(seed).next_u64());
        Self { truth, plan, hash, state, rng, wait: 0.0, request: 0, user: User::default(), users: 0 }
    }

    fn normal(&mut self) -> f64 {
        let (radius, angle) = ((2.0 * self.rng.exponential()).sqrt(), std::f64::consts::TAU * self.rng.unit());
        radius * angle.cos()
    }

    fn step(&mut self) {
        let truth = self.truth;
        if self.user.left == 0 {
            let left = 1 + self.rng.below(40);
            self.user = User { left, pace: 0.5 * self.normal(), luck: self.rng.unit() };
            self.users += 1;
        }
        self.user.left -= 1;
        self.request += 1;
        self.wait = (self.wait + self.rng.exponential() - self.rng.exponential() / 0.8).max(0.0);
        let id = if truth.sticky == "request" { self.request } else { self.users };
        let unit = Unit::new(&id.to_le_bytes());
        let arm = self.plan.arm_of(self.hash.draw(unit));
        let long = self.rng.unit() < 0.5;
        let tail = if self.rng.unit() < 0.01 { 10.0 } else { 1.0 };
        let slower = if arm == 1 { truth.slower } else { 1.0 };
        let noise = (self.user.pace + self.normal()).exp();
        let ttft = 0.05 * noise * tail * (1.0 + self.wait) * slower * if long { 5.0 } else { 1.0 };
        let luck = if truth.by_user { self.user.luck } else { self.rng.unit() };
        let failed = luck < truth.errors[arm];
        let mut values = [None; Quantity::ALL.len()];
        if !failed {
            values[..3].copy_from_slice(&[Some(ttft), Some(ttft / 10.0), Some(ttft * 4.0)]);
        }
        let observation = Observation {
            origin: Origin::default(),
            blamed: true,
            stratum: usize::from(long),
            cell: self.hash.cell(unit),
            values,
            ending: if failed { Ending::Failed } else { Ending::Completed },
            missed: Some(failed || ttft > 5.0),
            fell_back: false,
            cached: None,
            answer: Default::default(),
        };
        self.state.note_assigned(arm, observation.cell);
        self.state.observe(&self.plan, arm, &observation);
    }

    /// The number of the arm's requests when the arm was stopped.
    fn stopped_after(&self) -> Option<u64> {
        self.state.is_stopped(1).then(|| self.state.progress().arms[1].requests())
    }
}

/// Watches one experiment. Returns the conclusion and the requests of both arms until then.
fn watch(seed: u64, truth: Truth) -> (Conclusion, u64) {
    let mut simulated = Simulated::new(seed, truth);
    let mut now = jiff::Timestamp::UNIX_EPOCH;
    for request in 1..=truth.requests {
        simulated.step();
        now += jiff::SignedDuration::from_millis(10);
        if request % truth.look == 0 {
            let conclusion = simulated.state.review(&simulated.plan, now)[0].conclusion;
            if conclusion != Conclusion::NotYet {
                return (conclusion, request);
            }
        }
    }
    (Conclusion::NotYet, truth.requests)
}

/// The results of `run` for each seed, in no order.
fn each<T: Send>(seeds: Range<u64>, run: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = variable("SLUICE_EXPERIMENT_JOBS").and_then(|text| text.parse().ok()).unwrap_or_else(cores);
    let next = AtomicU64::new(seeds.start);
    let work = || {
        let seeds = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < seeds.end));
        seeds.map(&run).collect::<Vec<_>>()
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    })
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The number of experiments with each conclusion, and the median of requests until then.
fn tally(seeds: Range<u64>, truth: Truth) -> ([u64; 4], u64) {
    let mut counts = [0; 4];
    let watched = each(seeds, |seed| watch(seed, truth));
    watched.iter().for_each(|(conclusion, _)| counts[*conclusion as usize] += 1);
    let mut requests: Vec<u64> = watched.into_iter().map(|(_, requests)| requests).collect();
    requests.sort_unstable();
    (counts, requests[requests.len() / 2])
}

/// Requests of the arm when a guardrail stopped it, for each experiment that was stopped; sorted.
fn stops(seeds: Range<u64>, truth: Truth) -> Vec<u64> {
    let stop = |seed| {
        let mut simulated = Simulated::new(seed, truth);
        (0..truth.requests).find_map(|_| {
            simulated.step();
            simulated.stopped_after()
        })
    };
    let mut stops: Vec<u64> = each(seeds, stop).into_iter().flatten().collect();
    stops.sort_unstable();
    stops
}

fn in_time(stops: &[u64]) -> usize {
    stops.partition_point(|requests| *requests <= 200)
}

#[test]
fn arms_that_do_not_differ_are_seldom_called_different_however_often_one_looks() {
    for sticky in ["user", "request"] {
        let ([better, worse, ..], _) = tally(0..30, Truth { sticky, requests: 3_000, ..SAME });
        // At 5 % each, more than 4 of 30 would happen once in 70 runs. The seeds are fixed.
        assert!(better + worse <= 4, "{better} better and {worse} worse of 30");
    }
}

#[test]
fn planted_differences_are_found() {
    let half = Truth { slower: 1.5, sticky: "request", requests: 20_000, ..SAME };
    let (counts, median) = tally(0..10, half);
    assert_eq!(counts[Conclusion::Worse as usize], 10, "{counts:?}, median {median}");
    let (counts, _) = tally(0..10, Truth { slower: 1.0 / 1.5, ..half });
    assert_eq!(counts[Conclusion::Better as usize], 10, "{counts:?}");
}

/// A broken arm next to a control that works.
const BROKEN: Truth = Truth { errors: [0.005, 0.1], requests: 1_000, sticky: "request", ..SAME };

#[test]
fn an_arm_with_many_errors_is_stopped_within_200_of_its_requests() {
    let stops = stops(0..100, BROKEN);
    // In 2,000 runs, 99.4 % were stopped in time. The seeds are fixed.
    assert!(in_time(&stops) >= 98, "{stops:?}");
}

#[test]
fn arms_that_fail_alike_are_seldom_stopped() {
    for (sticky, by_user, errors) in [("request", false, 0.01), ("user", false, 0.1), ("user", true, 0.1)] {
        let stops = stops(0..60, Truth { sticky, by_user, errors: [errors; 2], requests: 3_000, ..SAME });
        // At 5 % each, more than 6 of 60 would happen once in 30 runs. The seeds are fixed.
        assert!(stops.len() <= 6, "{sticky} {by_user}: {stops:?}");
    }
}

fn seeds(usual: u64) -> (Range<u64>, u64) {
    let parse = |text: String| {
        let (from, to) = text.split_once("..")?;
        Some(from.parse().ok()?..to.parse().ok()?)
    };
    let seeds = match variable("SLUICE_EXPERIMENT_SEEDS") {
        Some(text) => parse(text).expect("SLUICE_EXPERIMENT_SEEDS is written FROM..TO"),
        None => 0..usual,
    };
    (seeds.clone(), seeds.end - seeds.start)
}

#[test]
#[ignore = "takes minutes"]
fn arms_alike() {
    let (seeds, rounds) = seeds(1_000);
    for sticky in ["request", "user"] {
        let (counts, _) = tally(seeds.clone(), Truth { sticky, ..SAME });
        println!("no difference, sticky by {sticky}: better, worse, no difference, not yet: {counts:?} of {rounds}");
        assert!(counts[0] + counts[1] <= rounds / 20);
    }
}

#[test]
#[ignore = "takes an hour"]
fn slower_arms() {
    let (seeds, rounds) = seeds(200);
    for (slower, requests, look) in [(1.5, 50_000, 20), (1.2, 100_000, 50), (1.05, 2_000_000, 200)] {
        for sticky in ["request", "user"] {
            let (counts, median) = tally(seeds.clone(), Truth { slower, sticky, requests, look, ..SAME });
            println!("TTFT x {slower}, sticky by {sticky}: {counts:?} of {rounds}, median {median} requests");
        }
    }
}

#[test]
#[ignore = "takes minutes"]
fn failing_arms() {
    let (seeds, rounds) = seeds(1_000);
    for sticky in ["request", "user"] {
        let errors = Truth { errors: [0.005, 0.02], requests: 50_000, sticky, ..SAME };
        let (counts, median) = tally(seeds.clone(), errors);
        println!("errors 0.5 % and 2 %, sticky by {sticky}: {counts:?} of {rounds}, median {median} requests");
        let stops = stops(seeds.clone(), Truth { sticky, ..BROKEN });
        let (within, median) = (in_time(&stops), stops.get(rounds as usize / 2));
        println!(
            "errors 0.5 % and 10 %, sticky by {sticky}: {within} of {rounds} stopped within 200 requests, median {median:?}, last {:?}",
            stops.last()
        );
    }
}

#[test]
#[ignore = "takes minutes"]
fn stops_without_a_cause() {
    let (seeds, rounds) = seeds(1_000);
    for (sticky, by_user) in [("request", false), ("user", false), ("user", true)] {
        for errors in [0.005, 0.01, 0.1] {
            let stops = stops(seeds.clone(), Truth { sticky, by_user, errors: [errors; 2], ..SAME });
            let share = errors * 100.0;
            println!(
                "errors {share} % in both arms, sticky by {sticky}, by user {by_user}: {} of {rounds} stopped",
                stops.len()
            );
            assert!(stops.len() as u64 <= rounds / 20, "{sticky} {by_user} {errors}");
        }
    }
}
