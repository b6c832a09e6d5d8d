//! Engines that die, hang and stall at random times, and clients that give up.
//!
//! Every request ends, a completed response has every token, and soon after the last fault no
//! request fails. Every run checks that nothing is held at the end (`check_released`).

use std::time::Duration;

use super::{config, engines, mixed};
use crate::{EngineChange, Lab, run};
use sluice_bench::{Api, Outcome, PromptTokens, Record};
use sluice_config::{Config, Machine, Surroundings};
use sluice_core::base::Rng;

/// Seconds during which requests arrive. Faults begin in the first third.
const SECONDS: u64 = 36;
/// Seconds in which requests may fail after the last fault: a round of probes and the first
/// ejection.
const RECOVERY: f64 = 7.0;

/// The long prompts of the short and the long pool may spill.
const TWO_POOLS: &str = include_str!("../../../config/short-long.toml");

fn configurations() -> [Config; 3] {
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    let two = Config::parse(TWO_POOLS, "test", &[], &around).unwrap_or_else(|problems| panic!("{problems}")).config;
    [config(2, "policy = \"round_robin\""), config(2, "long_prefix = { threshold = \"5k\", slots = 1 }"), two]
}

/// Two faults at random times, and the end of the last one in seconds.
fn faulty(config: Config, seed: u64, client_timeout: Option<Duration>) -> (Lab, f64) {
    let mut rng = Rng::new(seed);
    let mut engines = engines(2, &[]);
    let mut over = 0.0_f64;
    for _ in 0..2 {
        let at = Duration::from_secs_f64(rng.unit() * SECONDS as f64 / 3.0);
        let lasts = Duration::from_secs_f64(1.0 + 9.0 * rng.unit());
        let engine = &mut engines[rng.below(2)].changes;
        match rng.below(3) {
            0 => engine.extend([(at, EngineChange::Stop), (at + lasts, EngineChange::Start)]),
            1 => engine.extend([(at, EngineChange::Hang), (at + lasts, EngineChange::Resume)]),
            _ => engine.push((at, EngineChange::Stall(lasts))),
        }
        over = over.max((at + lasts).as_secs_f64());
    }
    (Lab { client_timeout, ..Lab::new(config, engines, vec![mixed(SECONDS)]) }, over)
}

#[test]
fn whatever_fails_every_request_ends_and_service_comes_back() {
    let mut failed = 0;
    for seed in [3, 5] {
        for config in configurations() {
            let (lab, over) = faulty(config, seed, None);
            let run = run(&lab, seed).unwrap();
            assert!(!run.result.partial, "seed {seed}: a request has not ended");
            let requests = &run.result.requests;
            for record in requests.iter().filter(|record| record.is_completed()) {
                assert_eq!(Some(record.itls.len() as u64 + 1), record.output_tokens, "seed {seed}: {record:?}");
            }
            let late: Vec<&Record> = requests.iter().filter(|r| r.is_failed() && r.sent > over + RECOVERY).collect();
            assert!(late.is_empty(), "seed {seed}, faults over at {over:.1} s: {:?}", late[0]);
            assert!(requests.iter().any(|record| record.sent > over + RECOVERY), "the run is too short");
            failed += requests.iter().filter(|record| record.is_failed()).count();
        }
    }
    assert!(failed > 0, "no fault was noticed");
}

#[test]
fn an_engine_that_hangs_is_ejected_and_the_other_serves() {
    let mut engines = engines(2, &[]);
    engines[0] = engines[0].clone().changing(Duration::from_secs(5), EngineChange::Hang);
    let lab = Lab::new(config(2, "[health]\nstall = \"3s\"\n"), engines, vec![mixed(20)]);
    let run = run(&lab, 1).unwrap();
    assert!(!run.result.partial, "a request waits for the engine for ever");
    let requests = &run.result.requests;
    let failed: Vec<&Record> = requests.iter().filter(|record| record.is_failed()).collect();
    assert!(!failed.is_empty() && failed.iter().all(|record| (8.0..14.0).contains(&record.ended)), "{failed:?}");
    let late = requests.iter().filter(|record| record.sent > 14.0);
    assert!(late.clone().count() > 100 && late.clone().all(|record| record.backend.as_deref() == Some("gpu1")));
}

#[test]
fn chats_of_an_engine_that_stops_or_hangs_continue_on_the_other() {
    let mut chats = mixed(10);
    (chats.workload.api, chats.workload.tokens) = (Api::Chat, PromptTokens::Words);
    for change in [EngineChange::Stop, EngineChange::Hang] {
        let [cut, continued] = ["off", "failures"].map(|when| {
            let mut engines = engines(2, &[]);
            engines[0] = engines[0].clone().changing(Duration::from_secs(5), change);
            let keys = format!("[health]\nstall = \"3s\"\n[retry]\ncontinue = \"{when}\"\n");
            run(&Lab::new(config(2, &keys), engines, vec![chats.clone()]), 1).unwrap().result.requests
        });
        let failed = |requests: &[Record]| requests.iter().filter(|record| record.is_failed()).count();
        assert!(failed(&cut) > 10, "{change:?}: {} cut", failed(&cut));
        assert_eq!(failed(&continued), 0, "{change:?}");
        for record in &continued {
            assert_eq!(Some(record.itls.len() as u64 + 1), record.output_tokens, "{change:?}: {record:?}");
        }
    }
}

#[test]
fn a_stall_during_a_stall_makes_it_longer() {
    let at = Duration::from_secs;
    let mut engines = engines(1, &[]);
    engines[0].changes = vec![(at(5), EngineChange::Stall(at(4))), (at(6), EngineChange::Stall(at(1)))];
    let run = run(&Lab::new(config(1, ""), engines, vec![mixed(12)]), 1).unwrap();
    let during = run.result.requests.iter().filter(|record| (5.1..9.9).contains(&record.sent));
    assert!(during.clone().count() > 50);
    assert!(during.clone().all(|record| record.is_completed() && record.sent + record.ttft >= 10.0));
}

#[test]
fn clients_that_give_up_leave_nothing_behind() {
    let timeout = Duration::from_millis(1_500);
    for seed in 0..3 {
        for config in configurations() {
            let (lab, _) = faulty(config, seed, Some(timeout));
            let run = run(&lab, seed).unwrap();
            assert!(!run.result.partial, "seed {seed}: a request has not ended");
            let given_up = Outcome::Failed("timed out".into());
            let given_up = run.result.requests.iter().filter(|record| record.outcome == given_up);
            let mut after = given_up.map(|record| record.ended - record.sent).peekable();
            assert!(after.peek().is_some(), "seed {seed}: every request was served in time");
            // The timer of a client may be as late as the run's resolution allows.
            assert!(after.all(|after| (1.5..1.55).contains(&after)), "seed {seed}");
        }
    }
}

#[test]
fn faults_and_clients_that_give_up_repeat_with_their_seed() {
    let outcome = |seed| {
        let (lab, _) = faulty(configurations()[1].clone(), seed, Some(Duration::from_secs(2)));
        run(&lab, seed).unwrap()
    };
    assert!(outcome(1) == outcome(1), "a second run differs");
    assert!(outcome(1) != outcome(2));
}
