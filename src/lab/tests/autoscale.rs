//! Engines that start and stop during a run.
//!
//! Stopping engines lose no request, the paid time is counted, and requests wait while there is no
//! engine.

use std::time::Duration;

use super::{MODEL, config};
use crate::autoscale_rules::{Autoscale, Policy};
use crate::{EngineSetup, Lab, LabRun, run};
use sluice_bench::{Arrival, Class, Extent, Length, RunPlan, Workload};
use sluice_core::base::Period;

/// One L4 serves about two of these requests per second.
fn lab(engines: usize, steps: &[(f64, f64)], autoscale: Autoscale) -> Lab {
    let flags = [MODEL, "--max-num-seqs=32", "--max-model-len=8192"];
    let engine = |at| EngineSetup::vllm(&format!("gpu{at}"), "l4", None, MODEL, &flags).unwrap();
    let class = Class::new("chat", Length::Exactly(500), Length::Exactly(60), 1.0);
    let steps = steps.to_vec();
    let seconds = steps.iter().map(|(_, time)| time).sum();
    let arrival = Arrival::Steps { steps, burstiness: 1.0 };
    let extent = Extent::Lasting(Duration::from_secs_f64(seconds));
    let traffic = RunPlan::new(Workload::of_classes(MODEL, vec![class], 0), arrival, extent);
    let pool = "slots = 32\nslo = { ttft = \"3s\", tpot = \"150ms\" }";
    let setups = (0..engines).map(engine).collect();
    Lab { autoscale: Some(autoscale), ..Lab::new(config(engines, pool), setups, vec![traffic]) }
}

fn rules(policy: Policy, target: Option<f64>) -> Autoscale {
    let period = |seconds| Some(Period(Duration::from_secs(seconds)));
    Autoscale {
        policy,
        start: None,
        min: 1,
        max: None,
        target,
        cold_start: period(15),
        down_after: period(60),
        rate: None,
        day_before: false,
    }
}

fn paid(run: &LabRun) -> Vec<f64> {
    run.engines.iter().map(|engine| engine.paid).collect()
}

#[test]
fn an_engine_that_goes_takes_no_request_with_it() {
    let steps = [(0.5, 200.0), (5.0, 400.0), (0.5, 900.0), (5.0, 300.0), (0.5, 600.0)];
    let policies = [
        rules(Policy::Queue, Some(2.0)),
        rules(Policy::InFlight, Some(6.0)),
        rules(Policy::Busy, Some(0.7)),
        rules(Policy::Predicted, None),
    ];
    for rules in policies {
        let policy = rules.policy;
        let run = run(&lab(4, &steps, rules), 1).unwrap();
        let lost = run.result.requests.iter().filter(|record| !record.is_completed()).count();
        assert_eq!((lost, run.result.partial), (0, false), "{policy:?}");
        let (paid, all) = (paid(&run), run.result.duration);
        assert!((paid[0] - all).abs() < 2.0, "{policy:?}: the first one is always there: {paid:?} of {all}");
        if policy == Policy::Busy {
            // Under any load an engine computes nearly all the time, so this policy does not stop
            // it.
            continue;
        }
        assert!(paid[1] > 100.0 && paid[1] < all - 100.0, "{policy:?}: the second one comes and goes: {paid:?}");
        assert!(paid[2] <= paid[1] && paid[3] <= paid[2], "{policy:?}: the last one goes first: {paid:?}");
    }
}

#[test]
fn busy_has_a_share_as_its_target() {
    let own = rules(Policy::Busy, None);
    assert_eq!((own.target(), rules(Policy::Queue, None).target()), (0.7, 8.0));
    assert!(own.check(1, 4).is_ok() && rules(Policy::Busy, Some(1.0)).check(1, 4).is_ok());
    let error = rules(Policy::Busy, Some(8.0)).check(1, 4).unwrap_err().to_string();
    assert!(error.contains("with busy also target <= 1"), "{error}");
    // Too few engines compute most of the time, so more are started.
    let run = run(&lab(4, &[(5.0, 300.0)], own), 1).unwrap();
    assert!(paid(&run)[1] > 100.0, "{:?}", paid(&run));
}

#[test]
fn engines_that_stay_are_all_paid_from_the_start_to_the_end() {
    let run = run(&lab(3, &[(2.0, 60.0)], Autoscale { start: Some(2), ..rules(Policy::Fixed, None) }), 1).unwrap();
    let (paid, all) = (paid(&run), run.result.duration);
    assert!((paid[0] - all).abs() < 0.1 && (paid[1] - all).abs() < 0.1 && paid[2] == 0.0, "{paid:?} of {all}");
    assert_eq!(run.engines[2].requests, 0);
}

#[test]
fn requests_are_held_while_the_first_engine_starts() {
    let steps = [(0.2, 60.0), (1e-6, 400.0), (0.2, 60.0)];
    let none = Autoscale { min: 0, start: Some(0), ..rules(Policy::Predicted, None) };
    let run = run(&lab(2, &steps, none), 2).unwrap();
    let requests = &run.result.requests;
    assert!(requests.len() > 10 && requests.iter().all(sluice_bench::Record::is_completed), "{requests:?}");
    let first_after = |at: f64| requests.iter().find(|record| record.sent > at).unwrap();
    for held in [first_after(0.0), first_after(460.0)] {
        let waited = held.queue_wait.unwrap();
        assert!((14.0..19.0).contains(&waited), "{waited} s, and an engine starts in 15 s");
    }
    let all: f64 = paid(&run).iter().sum();
    assert!(all < 0.6 * run.result.duration, "{all} of {}", run.result.duration);
}
