//! Experiments on simulated engines.
//!
//! The cost of a LoRA adapter is found and named, with an interval that contains it.

use super::{MODEL, engines};
use crate::{EngineSetup, Lab, LabRun, run};
use sluice_bench::{Arrival, Class, Extent, Length, RunPlan, Workload};
use sluice_config::{Config, Machine, Surroundings};
use sluice_gateway::experiment::report::Range;
use sluice_gateway::experiment::{Cause, Conclusion, Quantity};

const ADAPTER: &str = r#"
[[model]]
name = "llama-3.1-8b"
[[model]]
name = "sql"
[[pool]]
name = "main"
models = ["llama-3.1-8b", "sql"]
[[pool.backend]]
name = "gpu0"
url = "http://127.0.0.1:8000"
[[pool]]
name = "lora"
models = ["sql"]
arms_only = true
[[pool.backend]]
name = "gpu1"
url = "http://127.0.0.1:8001"
[[experiment]]
name = "adapter"
models = ["llama-3.1-8b"]
[[experiment.arm]]
name = "base"
weight = 50
[[experiment.arm]]
name = "sql"
weight = 50
model = "sql"
pool = "lora"
"#;

const TWO_ADAPTERS: &str = r#"
[[model]]
name = "llama-3.1-8b"
[[model]]
name = "sql"
[[model]]
name = "chat"
[[pool]]
name = "main"
models = ["*"]
[[pool.backend]]
name = "gpu0"
url = "http://127.0.0.1:8000"
[[experiment]]
name = "adapter"
models = ["llama-3.1-8b"]
[[experiment.arm]]
name = "sql"
weight = 50
model = "sql"
[[experiment.arm]]
name = "chat"
weight = 50
model = "chat"
"#;

fn with_clients(concurrency: u32, requests: u64, flags: &[&str]) -> LabRun {
    let mut both = engines(2, &[]);
    both[1] = engines(2, flags).remove(1);
    run_on(ADAPTER, both, Arrival::ClosedLoop { concurrency }, requests)
}

fn run_on(config: &str, engines: Vec<EngineSetup>, arrival: Arrival, requests: u64) -> LabRun {
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    let config = Config::parse(config, "test", &[], &around).unwrap_or_else(|problems| panic!("{problems}")).config;
    let class = Class::new("all", Length::Exactly(200), Length::Exactly(128), 1.0);
    let workload = Workload::of_classes(MODEL, vec![class], 0);
    let plan = RunPlan::new(workload, arrival, Extent::Requests(requests));
    run(&Lab::new(config, engines, vec![plan]), 1).unwrap()
}

fn change(run: &LabRun, quantity: Quantity) -> (Range, Option<Conclusion>) {
    let comparison = &run.experiments[0].comparisons[0];
    let found = comparison.changes.iter().find(|change| change.quantity == quantity).unwrap();
    (found.change.unwrap(), found.conclusion)
}

#[test]
fn an_adapter_is_found_to_be_slower_per_token_by_what_it_costs_on_an_h200() {
    // In a closed loop with many clients, the slower engine would get ever more requests.
    let requests = 600;
    let run = with_clients(2, requests, &["--enable-lora", "--max-lora-rank", "16"]);
    let (tpot, conclusion) = change(&run, Quantity::Tpot);
    println!("{}", run.experiments[0].comparisons[0].sentence);
    assert_eq!(conclusion, Some(Conclusion::Worse));
    let (low, high) = (tpot.low.unwrap(), tpot.high.unwrap());
    assert!((0.29..0.36).contains(&tpot.value) && high - low < 0.05 && low > 0.0, "{tpot:?}");
    let arms = &run.experiments[0].arms;
    assert!(arms.iter().all(|arm| arm.fell_back == 0 && arm.failed == 0));
    assert_eq!(arms.iter().map(|arm| arm.requests).sum::<u64>(), requests);
    let causes: Vec<Cause> = run.experiments[0].comparisons[0].diagnosis.iter().map(|found| found.cause).collect();
    assert_eq!(causes, [Cause::Kernels]);
}

#[test]
fn two_adapters_wait_for_one_slot_which_is_named_and_with_two_the_wait_is_gone() {
    let with_slots = |slots: &str| {
        let flags = ["--enable-lora", "--max-loras", slots, "--max-cpu-loras", "4", "--max-lora-rank", "16"];
        let run = run_on(TWO_ADAPTERS, engines(1, &flags), Arrival::Poisson { rate: 4.0 }, 2_000);
        let report = &run.experiments[0];
        let ttft = report.arms.iter().map(|arm| arm.quantities[Quantity::Ttft as usize].mean).fold(0.0, f64::max);
        let slots = report.comparisons[0].diagnosis.iter().find(|found| found.cause == Cause::Slots);
        println!("mean TTFT {ttft:.3} s, {:.0} s deferred: {slots:?}", run.engines[0].deferred);
        (ttft, run.engines[0].deferred, slots.map(|found| found.sentence.clone()))
    };
    let (slow, deferred, cause) = with_slots("1");
    let cause = cause.expect("the slot limit is named");
    assert!(cause.contains("gpu0 has max-loras 1, and 2 adapters were used on it"), "{cause}");
    assert!(slow > 0.3 && deferred > 100.0, "{slow} {deferred}");
    let (fast, deferred, cause) = with_slots("2");
    assert_eq!((cause, deferred), (None, 0.0));
    assert!(fast < 0.05, "{fast}");
}

#[test]
fn adapters_that_the_flags_name_are_loaded_when_the_engine_starts() {
    // The first two requests name both adapters.
    let first_tokens = |modules: &[&str]| {
        let flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"];
        let engines = engines(1, &[&flags, modules].concat());
        let run = run_on(TWO_ADAPTERS, engines, Arrival::ClosedLoop { concurrency: 1 }, 2);
        let ttfts = run.result.requests.iter().map(|record| record.ttft);
        ttfts.fold([f64::MAX, 0.0], |[least, most], ttft| [ttft.min(least), ttft.max(most)])
    };
    let (read, loaded) = (first_tokens(&[]), first_tokens(&["--lora-modules", "sql=/sql", "chat=/chat"]));
    assert!(read[0] > loaded[1] + 0.01, "each that is read from disk stalls its first request: {read:?} {loaded:?}");
    let others = first_tokens(&["--lora-modules", "other=/other", "another=/another"]);
    assert!((0..2).all(|at| (others[at] - read[at]).abs() < 1e-6), "other adapters do not help: {others:?} {read:?}");
}

#[test]
fn an_arm_whose_engine_does_not_know_the_adapter_falls_back_and_is_stopped() {
    let run = with_clients(20, 2_000, &[]);
    let arms = &run.experiments[0].arms;
    assert!(arms[1].fell_back > 0, "the engine does not know the adapter");
    assert!(run.result.requests.iter().all(sluice_bench::Record::is_completed), "and every request is served");
    assert_eq!(run.experiments[0].phase, "stopped", "{:?}", run.experiments[0].why);
}
