//! How often verdicts are wrong, and how soon they come, for simulated requests whose truth is known.
//!
//! Latencies have heavy tails (log-normal, sigma 1, one of 100 ten times as long) and come in waves that reach both arms: each is
//! multiplied by 1 plus the waiting time of an M/M/1 queue at 80 %. Users send 1 to 40 requests each and have a pace of
//! their own (sigma 0.5). Half of the prompts are short. The experiment is looked at after every [`LOOK`] requests, and its
//! guardrails after each. Short versions run with the other tests; the whole ones, with `SLUICE_EXPERIMENT_ROUNDS` experiments
//! for each line:
//!
//! ```sh
//! cargo test --release -p sluice-gateway experiment::evidence -- --ignored --nocapture
//! ```

use super::tests::config;
use super::*;
use crate::experiment::plan::ExperimentPlan;
use sluice_core::base::Rng;

/// Requests between two looks.
const LOOK: u64 = 20;

/// What differs between the arms, and how long it is watched.
#[derive(Clone, Copy)]
struct Truth {
    /// Latencies of the arm over those of the control.
    slower: f64,
    /// Shares of requests that fail in control and arm.
    errors: [f64; 2],
    /// Requests at most, all together.
    requests: u64,
    sticky: &'static str,
}

const SAME: Truth = Truth { slower: 1.0, errors: [0.01, 0.01], requests: 10_000, sticky: "user" };

/// What an experiment came to.
struct Outcome {
    conclusion: Conclusion,
    /// The first look at which it was known.
    requests: u64,
    /// Requests of the arm when it was stopped.
    stopped_after: Option<u64>,
}

fn plan(sticky: &str) -> ExperimentPlan {
    let text = format!(
        "[[experiment]]\nname = \"x\"\nsticky = \"{sticky}\"\n[[experiment.arm]]\nname = \"a\"\nweight = 50\n\
         [[experiment.arm]]\nname = \"b\"\nweight = 50\n"
    );
    ExperimentPlan::all(&config(&text)).remove(0)
}

/// Runs one experiment until it has a conclusion, or is stopped, or is over.
fn watch(seed: u64, truth: Truth) -> Outcome {
    let mut rng = Rng::new(Rng::new(seed).next_u64());
    let plan = plan(truth.sticky);
    let hash = UnitHash::new("default", &format!("salt {seed}"));
    let state = ExperimentState::new(&plan, 1.0);
    let normal = |rng: &mut Rng| {
        let (radius, angle) = ((2.0 * rng.exponential()).sqrt(), std::f64::consts::TAU * rng.unit());
        radius * angle.cos()
    };
    let (mut wait, mut user, mut left, mut pace) = (0.0f64, 0u64, 0usize, 0.0);
    let mut now = jiff::Timestamp::UNIX_EPOCH;
    for request in 1..=truth.requests {
        if left == 0 {
            (user, left, pace) = (user + 1, 1 + rng.below(40), 0.5 * normal(&mut rng));
        }
        left -= 1;
        wait = (wait + rng.exponential() - rng.exponential() / 0.8).max(0.0);
        let id = if truth.sticky == "request" { request } else { user };
        let unit = Unit::new(&id.to_le_bytes());
        let arm = plan.arm_of(hash.draw(unit));
        let long = rng.unit() < 0.5;
        let tail = if rng.unit() < 0.01 { 10.0 } else { 1.0 };
        let slower = if arm == 1 { truth.slower } else { 1.0 };
        let ttft = 0.05 * (pace + normal(&mut rng)).exp() * tail * (1.0 + wait) * slower * if long { 5.0 } else { 1.0 };
        let failed = rng.unit() < truth.errors[arm];
        let mut values = [None; Quantity::ALL.len()];
        if !failed {
            values[..3].copy_from_slice(&[Some(ttft), Some(ttft / 10.0), Some(ttft * 4.0)]);
        }
        let observation = Observation {
            class: usize::from(long),
            group: hash.group(unit),
            values,
            ending: if failed { Ending::Failed } else { Ending::Completed },
            missed: Some(failed || ttft > 5.0),
            fell_back: false,
        };
        state.observe(&plan, arm, &observation);
        now += jiff::SignedDuration::from_millis(10);
        let stopped = state.is_stopped(1);
        if stopped || request % LOOK == 0 {
            let conclusion = state.review(&plan, now)[0].conclusion;
            if stopped || conclusion != Conclusion::NotYet {
                let stopped_after = stopped.then(|| state.progress().arms[1].requests());
                return Outcome { conclusion, requests: request, stopped_after };
            }
        }
    }
    Outcome { conclusion: Conclusion::NotYet, requests: truth.requests, stopped_after: None }
}

/// How many of `rounds` experiments came to each conclusion, and the median number of requests until then.
fn tally(rounds: u64, truth: Truth) -> ([u64; 4], u64) {
    let mut counts = [0; 4];
    let mut requests = Vec::new();
    for seed in 0..rounds {
        let outcome = watch(seed, truth);
        counts[outcome.conclusion as usize] += 1;
        requests.push(outcome.requests);
    }
    requests.sort_unstable();
    (counts, requests[requests.len() / 2])
}

#[test]
fn arms_that_do_not_differ_are_seldom_called_different_however_often_one_looks() {
    for sticky in ["user", "request"] {
        let ([better, worse, ..], _) = tally(30, Truth { sticky, requests: 3_000, ..SAME });
        // At 5 % more than 4 of 30 happen once in 70 runs; the seeds are fixed.
        assert!(better + worse <= 4, "{better} better and {worse} worse of 30");
    }
}

#[test]
fn planted_differences_are_found() {
    let half = Truth { slower: 1.5, sticky: "request", requests: 20_000, ..SAME };
    let (counts, median) = tally(10, half);
    assert_eq!(counts[Conclusion::Worse as usize], 10, "{counts:?}, median {median}");
    let (counts, _) = tally(10, Truth { slower: 1.0 / 1.5, ..half });
    assert_eq!(counts[Conclusion::Better as usize], 10, "{counts:?}");
}

#[test]
fn an_arm_with_many_errors_is_mostly_stopped_within_200_of_its_requests() {
    let planted = Truth { errors: [0.005, 0.1], sticky: "request", ..SAME };
    let stops: Vec<Option<u64>> = (0..20).map(|seed| watch(seed, planted).stopped_after).collect();
    let in_time = stops.iter().flatten().filter(|requests| **requests <= 200).count();
    // With 10 errors instead of the expected 20 the evidence does not suffice yet.
    assert!(in_time >= 17, "{stops:?}");
}

/// Experiments for each line of a whole measurement.
fn rounds(usual: u64) -> u64 {
    std::env::var("SLUICE_EXPERIMENT_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

#[test]
#[ignore = "takes minutes"]
fn arms_alike() {
    let rounds = rounds(1_000);
    for sticky in ["request", "user"] {
        let (counts, _) = tally(rounds, Truth { sticky, ..SAME });
        println!("no difference, sticky by {sticky}: better, worse, no difference, not yet: {counts:?} of {rounds}");
        assert!(counts[0] + counts[1] <= rounds / 20);
    }
}

#[test]
#[ignore = "takes minutes"]
fn slower_arms() {
    let rounds = rounds(200);
    for (slower, requests) in [(1.5, 50_000), (1.2, 100_000), (1.05, 600_000)] {
        for sticky in ["request", "user"] {
            let (counts, median) = tally(rounds, Truth { slower, sticky, requests, ..SAME });
            println!("TTFT x {slower}, sticky by {sticky}: {counts:?} of {rounds}, median {median} requests");
        }
    }
}

#[test]
#[ignore = "takes minutes"]
fn failing_arms() {
    let rounds = rounds(1_000);
    for sticky in ["request", "user"] {
        let errors = Truth { errors: [0.005, 0.02], requests: 50_000, sticky, ..SAME };
        let (counts, median) = tally(rounds, errors);
        println!("errors 0.5 % and 2 %, sticky by {sticky}: {counts:?} of {rounds}, median {median} requests");
        let planted = Truth { errors: [0.005, 0.1], sticky, ..SAME };
        let stops = (0..rounds).map(|seed| watch(seed, planted).stopped_after.unwrap_or(u64::MAX));
        let mut stops: Vec<u64> = stops.collect();
        stops.sort_unstable();
        let within = stops.iter().filter(|requests| **requests <= 200).count();
        println!(
            "errors 0.5 % and 10 %, sticky by {sticky}: {within} of {rounds} stopped within 200 requests, median {}",
            stops[stops.len() / 2]
        );
    }
}
