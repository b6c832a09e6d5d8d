//! Tests of the whole gateway in memory, on paused time: request path, pools and health rules in front of simulated engines.
//!
//! Minutes of traffic take seconds, and the same seed gives the same run. Only sockets are mocked: requests go through `Flow`
//! with the configurations of the demo to engines of the simulator.
//! Load, clients that leave and faults (an engine dies and restarts, hangs, stalls) follow from a seed. Invariants: every
//! request ends and is recorded once, a completed response has every token, and at the end no capacity is held.

mod client;
mod engine;
mod world;

use std::time::Duration;

use super::arrangement::{ALL, Arrangement};
use crate::flow::Outcome;
use world::{EndedRequest, Script, run};

/// Requests may fail for this long after the last fault: a round of probes and the first ejection.
const RECOVERY: Duration = Duration::from_secs(7);

/// The value at `q` of the sorted values.
fn quantile(values: impl Iterator<Item = Duration>, q: f64) -> f64 {
    let mut values: Vec<f64> = values.map(|value| value.as_secs_f64()).collect();
    values.sort_by(f64::total_cmp);
    values[(q * (values.len() - 1) as f64).round() as usize]
}

/// P99 of short TTFT, short E2EL, long TTFT, long E2EL, seconds.
fn tails(requests: &[EndedRequest]) -> [f64; 4] {
    let of = |long: bool| requests.iter().filter(move |request| request.long == long);
    let ttft = |long| quantile(of(long).map(|request| request.ttft.unwrap()), 0.99);
    let e2el = |long| quantile(of(long).map(|request| request.total), 0.99);
    [ttft(false), e2el(false), ttft(true), e2el(true)]
}

#[test]
fn the_arrangements_are_in_the_order_that_was_measured_on_gpus() {
    let script = Script { seconds: 40, faults: 0, leaving: 0.0, ..Script::new(1) };
    let rows = ALL.map(|arrangement| {
        let end = run(arrangement, &script);
        end.check();
        assert!(end.requests.iter().all(|request| request.outcome == Outcome::Completed), "no request is shed");
        tails(&end.requests)
    });
    let [round_robin, split, permits] = rows;
    assert!(split[0] < permits[0] && permits[0] * 2.0 < round_robin[0], "short TTFT: {rows:?}");
    assert!(split[1] < permits[1] && permits[1] < round_robin[1], "short E2EL: {rows:?}");
    assert!(split[2] > round_robin[2] && split[3] > round_robin[3], "the split slows long requests down: {rows:?}");
    assert!(permits[3] < round_robin[3], "long E2EL: {rows:?}");
}

#[test]
fn whatever_fails_every_request_ends_once_nothing_is_held_and_service_comes_back() {
    for seed in [3, 6] {
        for arrangement in ALL {
            let end = run(arrangement, &Script::new(seed));
            end.check();
            let bad = |request: &&EndedRequest| !matches!(request.outcome, Outcome::Completed | Outcome::ClientGone);
            let last = end.requests.iter().filter(bad).map(|request| request.arrived).max().unwrap_or_default();
            assert!(last < end.faults_over + RECOVERY, "seed {seed}, {}: {last:?}", arrangement.label());
            assert!(
                end.requests.iter().any(|request| request.arrived > end.faults_over + RECOVERY),
                "the run is too short"
            );
        }
    }
}

#[test]
fn a_seed_says_everything_that_happens() {
    let requests = |seed| run(Arrangement::Permits, &Script { seconds: 12, ..Script::new(seed) }).requests;
    assert_eq!(requests(11), requests(11));
    assert_ne!(requests(11), requests(12));
}
