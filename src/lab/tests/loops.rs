//! Closed loops and conversations end with all their requests, whatever the engines do.
//!
//! A client whose request was refused sends the next one after a pause, because otherwise virtual
//! time would stand still.

use std::time::Duration;

use super::{MODEL, config, engines};
use crate::run::run_until;
use crate::{EngineChange, Lab, run};
use sluice_bench::{Arrival, Class, Extent, Length, RunPlan, Sessions, Workload};

fn plan(arrival: Arrival, extent: Extent) -> RunPlan {
    let class = Class::new("short", Length::Exactly(100), Length::Exactly(20), 1.0);
    RunPlan::new(Workload::of_classes(MODEL, vec![class], 0), arrival, extent)
}

#[test]
fn a_closed_loop_that_is_shed_tries_again_later_and_ends() {
    let lasting = Extent::Lasting(Duration::from_secs(3));
    for leaving in [0.0, 0.5] {
        let mut plan = plan(Arrival::ClosedLoop { concurrency: 60 }, lasting);
        plan.workload.leaving = leaving;
        let pool = "slots = 8\nqueue = { length = 4 }";
        let run = run(&Lab::new(config(1, pool), engines(1, &[]), vec![plan]), 1).unwrap();
        assert!(!run.result.partial);
        let shed = run.result.requests.iter().filter(|record| record.is_failed());
        // 48 clients are too many. Each tries every second, as `Retry-After` says.
        assert!((48..=200).contains(&shed.clone().count()), "{}", shed.count());
        assert!(run.result.requests.iter().all(|record| record.sent < 3.0));
    }
}

#[test]
fn a_closed_loop_ends_when_its_engine_has_stopped_or_hangs() {
    let lasting = Extent::Lasting(Duration::from_secs(10));
    for change in [EngineChange::Stop, EngineChange::Hang] {
        let mut engines = engines(1, &[]);
        engines[0] = engines[0].clone().changing(Duration::from_secs(2), change);
        let keys = "[health]\nstall = \"1h\"\n";
        let traffic = vec![plan(Arrival::ClosedLoop { concurrency: 4 }, lasting)];
        let lab = Lab { give_up_after: Duration::from_secs(30), ..Lab::new(config(1, keys), engines, traffic) };
        let run = run(&lab, 1).unwrap();
        let (completed, sent) = (run.result.requests.iter().filter(|r| r.is_completed()).count(), &run.result.requests);
        assert!(completed > 10, "{completed}");
        assert!(sent.len() - completed <= 4 * 80 + 8, "{} of {}", completed, sent.len());
        assert!(run.result.duration < 45.0, "{change:?}: {}", run.result.duration);
    }
}

#[test]
fn a_conversation_has_all_of_its_turns_however_long_its_user_thinks() {
    let arrival = || plan(Arrival::Poisson { rate: 1.0 }, Extent::Requests(5));
    let sessions = Sessions { turns: Length::Exactly(12), later: None, think: 1_200.0 };
    let mut plan = RunPlan { sessions: Some(sessions), ..arrival() };
    plan.workload = plan.workload.with_text_prompts();
    let lab = Lab::new(config(1, ""), engines(1, &[]), vec![plan]);
    let all = run(&lab, 1).unwrap();
    assert_eq!((all.result.requests.len(), all.result.partial), (60, false));
    assert!(all.result.duration > 3_600.0, "{}", all.result.duration);
    let some = run_until(&lab, 1, &mut |_| true).unwrap();
    assert!(some.result.requests.len() < 60 && some.result.partial);
}

#[test]
fn a_closed_loop_of_few_requests_sends_no_more() {
    let plan = plan(Arrival::ClosedLoop { concurrency: 32 }, Extent::Requests(10));
    let run = run(&Lab::new(config(1, ""), engines(1, &[]), vec![plan]), 1).unwrap();
    assert_eq!(run.result.requests.len(), 10);
}
