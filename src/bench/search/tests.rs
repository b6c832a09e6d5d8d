//! Tests of the search with queues whose capacity is known by formula.
//!
//! M/M/1, first come first served, service rate 1: the time in the system is exponential with rate
//! 1 - load. So attainment within t is 1 - exp(-(1 - load) t), and the highest load with attainment
//! a is 1 + ln(1 - a)/t.

use std::convert::Infallible;
use std::task::{Context, Poll, Waker};

use super::*;
use sluice_core::base::Rng;

fn at_once<T>(future: impl Future<Output = T>) -> T {
    match std::pin::pin!(future).as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("a system on virtual time does not wait"),
    }
}

/// One server, exponential work, an objective on the time in the system.
struct Queue {
    bound: f64,
    seed: u64,
    fastest: f64,
    /// Above this rate, every request fails.
    breaks_at: f64,
    stalls: bool,
}

impl Queue {
    fn new(bound: f64, seed: u64) -> Self {
        Self { bound, seed, fastest: f64::INFINITY, breaks_at: f64::INFINITY, stalls: false }
    }

    fn attainment(&self, rate: f64) -> f64 {
        if rate >= 1.0 { 0.0 } else { 1.0 - f64::exp(-(1.0 - rate) * self.bound) }
    }

    fn boundary(&self, share: f64) -> f64 {
        1.0 + (1.0 - share).ln() / self.bound
    }

    fn search(&mut self) -> SearchResult {
        at_once(find_rate(self, &SearchGoal::new(self.bound), |_| ())).unwrap()
    }
}

impl SystemUnderTest for Queue {
    type Error = Infallible;

    async fn run(&mut self, trial: &Trial, judge: &mut Judge) -> Result<TrialStats, Infallible> {
        let mut rng = Rng::new(Rng::new((self.seed << 32) ^ trial.seed).next_u64());
        let (mut due, mut free, mut ended) = (0.0f64, 0.0f64, Vec::new());
        let broken = matches!(trial.load, TrialLoad::Rate(rate) if rate > self.breaks_at);
        for ordinal in 0..trial.requests {
            match trial.load {
                TrialLoad::Stream => due = free,
                TrialLoad::Saturated(_) => due = 0.0,
                TrialLoad::Rate(rate) => due += rng.exponential() / rate.min(self.fastest),
            }
            free = free.max(due) + rng.exponential();
            judge.record(ordinal, due, if broken { f64::INFINITY } else { (free - due) / self.bound });
            ended.push(free);
            if judge.verdict().is_some() {
                break;
            }
        }
        if self.stalls && matches!(trial.load, TrialLoad::Saturated(_)) {
            ended.clear();
        }
        let delivered = if let TrialLoad::Rate(rate) = trial.load { (self.fastest / rate).min(1.0) } else { 1.0 };
        Ok(TrialStats { throughput: throughput(&ended, trial.warmup), delivered, seconds: free })
    }
}

fn rate(found: &SearchResult) -> f64 {
    found.best.map_or(0.0, |best| best.rate)
}

#[test]
fn the_capacity_of_a_queue_is_found_and_not_exceeded() {
    let (mut near, mut too_high) = (0, 0);
    for seed in 0..20 {
        let mut queue = Queue::new(10.0, seed);
        let found = queue.search();
        near += usize::from((rate(&found) / queue.boundary(0.99) - 1.0).abs() <= 0.05);
        too_high += usize::from(queue.attainment(rate(&found)) < 0.98);
        assert!(found.trials.len() <= 40 && matches!(found.ending, SearchEnd::Found | SearchEnd::TrialLimit));
    }
    // 100 seeds give 85 near results and none too high; these are the first 20 seeds.
    assert!(near >= 17 && too_high == 0, "{near} of 20 within 5 %, {too_high} too high");
}

#[test]
fn what_is_reported_was_proven_at_that_rate() {
    let found = Queue::new(10.0, 3).search();
    let ProvenRate { rate, attainment } = found.best.unwrap();
    let last = found.trials.last().unwrap();
    assert_eq!((last.load, last.kind, last.verdict), (TrialLoad::Rate(rate), TrialKind::Proof, TrialVerdict::Holds));
    assert!(last.attainment == attainment && attainment.value >= 0.99);
    assert_eq!(found, Queue::new(10.0, 3).search(), "the same seed finds the same");
    assert_ne!(found, Queue::new(10.0, 4).search());
}

#[test]
fn a_request_that_is_too_slow_alone_ends_the_search_at_once() {
    let found = Queue::new(1.0, 1).search();
    assert_eq!((found.ending, found.best, found.trials.len()), (SearchEnd::NoRate, None, 1));
}

#[test]
fn a_client_that_is_too_slow_is_not_taken_for_the_server() {
    let found = Queue { fastest: 0.2, ..Queue::new(10.0, 1) }.search();
    assert_eq!((found.ending, found.best), (SearchEnd::ClientLimit, None));
}

#[test]
fn a_server_that_breaks_is_taken_to_where_it_breaks() {
    let found = Queue { breaks_at: 0.3, ..Queue::new(10.0, 1) }.search();
    assert!((0.25..=0.3).contains(&rate(&found)), "{found:?}");
}

#[test]
fn few_runs_give_a_proven_rate_or_none_and_say_so() {
    let goal = SearchGoal { max_trials: 12, ..SearchGoal::new(10.0) };
    let found = at_once(find_rate(&mut Queue::new(10.0, 1), &goal, |_| ())).unwrap();
    assert_eq!(found.ending, SearchEnd::TrialLimit);
    assert!(found.trials.len() <= 12);
}

#[test]
fn a_search_with_a_floor_above_the_capacity_gives_up_and_one_below_it_goes_on() {
    let search = |floor: f64| {
        let goal = SearchGoal { floor: Some(floor), prove: false, ..SearchGoal::new(10.0) };
        at_once(find_rate(&mut Queue::new(10.0, 1), &goal, |_| ())).unwrap()
    };
    let boundary = Queue::new(10.0, 1).boundary(0.99);
    let (saturated, failed) = (search(1.1), search(1.3 * boundary));
    assert_eq!(
        (saturated.ending, saturated.trials.len()),
        (SearchEnd::BelowFloor, 2),
        "the saturated throughput is below"
    );
    assert_eq!((failed.ending, failed.trials.len()), (SearchEnd::BelowFloor, 3), "a look at the floor fails");
    let found = search(0.8 * boundary);
    assert!(found.ending != SearchEnd::BelowFloor && found.best.is_none(), "{:?}", found.ending);
    assert!((found.boundary.unwrap().value / boundary - 1.0).abs() < 0.1, "{:?}", found.boundary);
}

#[test]
fn a_server_that_completes_nothing_under_a_backlog_has_a_rate_all_the_same() {
    let boundary = Queue::new(10.0, 1).boundary(0.99);
    for floor in [None, Some(0.0)] {
        let goal = SearchGoal { floor, ..SearchGoal::new(10.0) };
        let found = at_once(find_rate(&mut Queue { stalls: true, ..Queue::new(10.0, 1) }, &goal, |_| ())).unwrap();
        assert!((rate(&found) / boundary - 1.0).abs() < 0.1, "{:?} {}", found.ending, rate(&found));
    }
}

#[test]
fn a_search_that_was_ended_goes_on_from_its_records_to_the_same_result() {
    let goal = SearchGoal { requests: 300, ..SearchGoal::new(10.0) };
    let search = |past: Vec<TrialRecord>| {
        let mut run = Vec::new();
        let found = at_once(resume_rate(&mut Queue::new(10.0, 1), &goal, past, |record| {
            run.push(record.clone());
            Ok(())
        }));
        (found.unwrap(), run)
    };
    let (whole, records) = search(Vec::new());
    for known in [1, 3, records.len() / 2, records.len() - 1] {
        let (resumed, run) = search(records[..known].to_vec());
        assert_eq!((&resumed, run.len()), (&whole, records.len() - known), "after {known}");
    }
    let mut other = records.clone();
    other[2].report.load = TrialLoad::Rate(0.123);
    let (resumed, run) = search(other);
    assert_eq!((resumed, run.len()), (whole, records.len() - 2));
}

#[test]
fn the_worst_group_decides() {
    let rule = TrialRule { kind: TrialKind::Look, target: 0.9, warmup: 0, length: 400 };
    // A third of the second group, which is a twentieth of the requests, misses, so 98 % of all
    // hit.
    let judged = |grouped: bool| {
        let mut judge = Judge::new(rule);
        for ordinal in 0..400 {
            let group = usize::from(ordinal % 20 == 0);
            let ratio = if ordinal % 60 == 0 { 2.0 } else { 0.5 };
            judge.record_in(if grouped { group } else { 0 }, ordinal, ordinal as f64, ratio);
        }
        (judge.close(), judge.worst())
    };
    assert_eq!(judged(false).0, TrialVerdict::Holds);
    let (verdict, (group, attainment)) = judged(true);
    assert_eq!((verdict, group), (TrialVerdict::Fails, 1));
    assert!((attainment.value - 2.0 / 3.0).abs() < 0.1, "{attainment:?}");
}

#[test]
fn a_validated_rate_is_lowered_to_where_it_holds() {
    let (mut too_high, mut far) = (0, 0);
    for seed in 0..10 {
        let mut queue = Queue::new(10.0, seed);
        let boundary = queue.boundary(0.99);
        let found = at_once(validate(&mut queue, &SearchGoal::new(10.0), 1.12 * boundary, 3)).unwrap().unwrap();
        too_high += usize::from(queue.attainment(found.rate) < 0.98);
        far += usize::from(found.rate < 0.93 * boundary);
        assert!(found.attainment.value >= 0.99 && found.attainment.low >= 0.98 && found.proofs > 3, "{found:?}");
    }
    assert!(too_high == 0 && far <= 1, "{too_high} too high, {far} far below");
    let goal = SearchGoal::new(10.0);
    let hopeless = at_once(validate(&mut Queue::new(10.0, 1), &goal, 3.0, 3)).unwrap();
    assert_eq!(hopeless, None);
}
