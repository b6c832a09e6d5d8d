//! One test per rule of vLLM's step loop, and properties that hold under any load (`properties`).
//!
//! Rules are tested without asynchronous scheduling, so that a step shows the effect of the one
//! before. A few tests cover asynchronous scheduling.

use std::collections::HashMap;
use std::time::Duration;

use super::*;
use crate::machine::{CostModel, Profile};

mod cache;
mod properties;
mod speculation;
mod traces;

fn engine(change: impl FnOnce(&mut EngineConfig)) -> Engine {
    let mut config = EngineConfig { num_blocks: 10_000, async_scheduling: false, seed: 1, ..EngineConfig::default() };
    change(&mut config);
    let cost =
        CostModel::new(&Profile::named("h200-llama-8b").unwrap(), config.max_num_seqs, config.max_num_batched_tokens);
    Engine::new(config, cost)
}

fn request(id: SequenceId, prompt_tokens: u32, output_tokens: u32) -> Request {
    Request::new(id, prompt_tokens, output_tokens)
}

fn admitted(outcome: &StepOutcome) -> Vec<SequenceId> {
    outcome.admitted.iter().map(|admitted| admitted.id).collect()
}

fn ids(outcome: &StepOutcome) -> Vec<SequenceId> {
    outcome.emitted.iter().map(|token| token.id).collect()
}

#[test]
fn running_requests_take_the_budget_before_waiting_ones() {
    let mut engine = engine(|config| config.max_num_batched_tokens = 100);
    engine.add(request(1, 250, 5)).unwrap();
    engine.step().unwrap();
    engine.add(request(2, 10, 5)).unwrap();
    let second = engine.step().unwrap();
    assert_eq!((second.load.tokens, second.admitted.len()), (100, 0), "the long prompt eats the whole step");
    let third = engine.step().unwrap();
    assert_eq!((third.load.tokens, ids(&third)), (60, vec![1, 2]), "its last 50 tokens leave room for the short one");
}

#[test]
fn a_partial_prefill_emits_nothing() {
    let mut engine = engine(|config| config.max_num_batched_tokens = 100);
    engine.add(request(1, 101, 1)).unwrap();
    assert!(engine.step().unwrap().emitted.is_empty());
    let token = engine.step().unwrap().emitted[0];
    assert!(token.first && token.last);
    assert!(engine.step().is_none() && engine.is_empty());
}

#[test]
fn the_long_prefill_threshold_caps_a_chunk_unless_the_request_is_alone() {
    let mut engine = engine(|config| config.long_prefill_token_threshold = 512);
    engine.add(request(1, 10_000, 5)).unwrap();
    assert_eq!(engine.step().unwrap().load.tokens, 8192);
    engine.add(request(2, 100, 50)).unwrap();
    assert_eq!(engine.step().unwrap().load.tokens, 612);
}

#[test]
fn without_blocks_the_last_running_request_is_preempted_and_computed_again() {
    let mut engine = engine(|config| config.num_blocks = 9);
    engine.add(request(1, 60, 40)).unwrap();
    engine.add(request(2, 62, 8)).unwrap();
    assert_eq!(admitted(&engine.step().unwrap()), [1, 2]);
    let mut preempted = 0;
    let mut emitted = HashMap::<_, u32>::new();
    while let Some(step) = engine.step() {
        preempted += step.preempted;
        if step.preempted > 0 {
            assert!(step.admitted.is_empty(), "nothing is admitted in a step that preempts");
            assert_eq!(ids(&step), [1], "the first of the list goes on");
        }
        for token in step.emitted {
            *emitted.entry(token.id).or_default() += 1;
        }
    }
    assert!(preempted > 0);
    assert_eq!((emitted[&1], emitted[&2]), (39, 7));
}

#[test]
fn a_prompt_that_does_not_fit_whole_stops_admission_for_all_behind_it() {
    let mut engine = engine(|config| {
        config.num_blocks = 101;
        config.max_num_batched_tokens = 400;
    });
    engine.add(request(1, 800, 2)).unwrap();
    engine.add(request(2, 900, 2)).unwrap();
    engine.add(request(3, 16, 2)).unwrap();
    let mut entered = Vec::new();
    while engine.blocks().usage() < 0.4 {
        entered.extend(admitted(&engine.step().unwrap()));
    }
    assert_eq!(entered, [1], "the small one waits behind the big one");
}

#[test]
fn the_watermark_keeps_blocks_free_only_while_something_runs() {
    let mut engine = engine(|config| {
        config.num_blocks = 101;
        config.watermark = 0.5;
    });
    engine.add(request(1, 900, 5)).unwrap();
    assert_eq!(admitted(&engine.step().unwrap()), [1]);
    engine.add(request(2, 16, 5)).unwrap();
    assert!(engine.step().unwrap().admitted.is_empty());
}

#[test]
fn at_most_max_num_seqs_run() {
    let mut engine = engine(|config| config.max_num_seqs = 2);
    (1..=3).for_each(|id| engine.add(request(id, 10, 3)).unwrap());
    engine.step().unwrap();
    assert_eq!((engine.running(), engine.waiting()), (2, 1));
}

#[test]
fn a_new_adapter_beyond_max_loras_is_deferred_and_others_pass() {
    let mut engine = engine(|config| config.max_loras = 1);
    let with = |id, adapter| Request { adapter, ..request(id, 10, 3) };
    engine.add(with(1, Some(0))).unwrap();
    engine.add(with(2, Some(1))).unwrap();
    engine.add(with(3, None)).unwrap();
    engine.add(with(4, Some(0))).unwrap();
    let step = engine.step().unwrap();
    assert_eq!((admitted(&step), engine.deferred()), (vec![1, 3, 4], 1));
    assert!(step.load.adapter);
    while engine.running() > 0 {
        engine.step().unwrap();
    }
    assert_eq!(admitted(&engine.step().unwrap()), [2], "it runs when the slot is free");
}

#[test]
fn without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it() {
    let mut engine = engine(|config| {
        config.chunked_prefill = false;
        config.max_num_batched_tokens = 100;
    });
    engine.add(request(1, 60, 3)).unwrap();
    engine.add(request(2, 60, 3)).unwrap();
    assert_eq!(admitted(&engine.step().unwrap()), [1]);
    assert_eq!(admitted(&engine.step().unwrap()), [2]);
    assert!(matches!(engine.add(request(3, 101, 3)), Err(EngineError::PromptOverBudget { .. })));
}

#[test]
fn an_abort_frees_blocks_and_slot() {
    let mut engine = engine(|_| {});
    engine.add(request(1, 1000, 100)).unwrap();
    engine.step().unwrap();
    assert!(engine.blocks().usage() > 0.0);
    assert!(engine.abort(1) && !engine.abort(1));
    assert!(engine.step().is_none());
    assert_eq!((engine.blocks().usage(), engine.running()), (0.0, 0));
}

#[test]
fn asynchronous_scheduling_looks_at_an_arrival_one_step_later() {
    let mut engine = engine(|config| config.async_scheduling = true);
    engine.add(request(1, 10, 9)).unwrap();
    assert_eq!(admitted(&engine.step().unwrap()), [1], "an idle engine starts at once");
    engine.add(request(2, 10, 9)).unwrap();
    assert!(engine.step().unwrap().admitted.is_empty(), "this step was planned before it came");
    assert_eq!(admitted(&engine.step().unwrap()), [2]);
}

#[test]
fn asynchronous_scheduling_holds_the_slot_of_what_ended_for_one_more_plan() {
    let mut engine = engine(|config| {
        config.async_scheduling = true;
        config.max_num_seqs = 2;
    });
    engine.add(request(1, 10, 1)).unwrap();
    engine.add(request(2, 10, 9)).unwrap();
    engine.add(request(3, 10, 9)).unwrap();
    assert_eq!(admitted(&engine.step().unwrap()), [1, 2]);
    assert!(engine.step().unwrap().admitted.is_empty());
    assert_eq!(admitted(&engine.step().unwrap()), [3]);
}

#[test]
fn what_can_never_fit_is_refused() {
    let mut engine = engine(|config| config.num_blocks = 11);
    assert_eq!(engine.add(request(1, 160, 2)), Err(EngineError::NeverFits { needed: 11, usable: 10 }));
    assert!(engine.add(request(2, 160, 1)).is_ok());
}
