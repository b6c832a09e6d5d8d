//! Compares every step with the decisions of vLLM's own scheduler.
//!
//! `tests/real/scheduler.py` runs the scheduler of vLLM 0.33 alone, under random limits and load,
//! and records its decisions and the number of free blocks in every step. The engine must decide
//! the same. `SLUICE_SCHEDULER_TRACES` names a file with more cases.

use serde::Deserialize;

use super::*;

const TRACES: &str = include_str!("../../../../tests/fixtures/vllm-0.33/scheduler.jsonl");

#[derive(Deserialize)]
struct Limits {
    num_blocks: u32,
    max_num_batched_tokens: u32,
    max_num_seqs: u32,
    max_num_active_seqs: Option<u32>,
    long_prefill_token_threshold: u32,
    adaptive: bool,
    interval: u32,
    chunked_prefill: bool,
    reserve_full_isl: bool,
    prefix_caching: bool,
    watermark: f64,
    priority: bool,
    max_loras: u32,
    #[serde(rename = "async")]
    asynchronous: bool,
}

#[derive(Deserialize)]
struct Entry {
    id: SequenceId,
    prompt: u32,
    output: u32,
    priority: i64,
    head: u64,
    shared: u32,
    stops: bool,
    salt: u64,
    adapter: Option<u16>,
}

#[derive(Deserialize)]
struct Batch {
    add: Vec<Entry>,
    abort: Vec<SequenceId>,
}

/// One step: free blocks before it; the ids that advance and by how many tokens; the ids admitted,
/// with their cached tokens and whether they were preempted before; the number preempted.
type Step = (u32, Vec<(SequenceId, u32)>, Vec<(SequenceId, u32, bool)>, u32);

#[derive(Deserialize)]
struct Case {
    limits: Limits,
    batches: Vec<Batch>,
    steps: Vec<Step>,
}

fn engine_of(limits: &Limits) -> Engine {
    engine(|config| {
        *config = EngineConfig {
            num_blocks: limits.num_blocks,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_num_seqs: limits.max_num_seqs,
            max_num_active_seqs: limits.max_num_active_seqs,
            long_prefill_token_threshold: limits.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive: limits.adaptive,
            prefill_schedule_interval: limits.interval,
            chunked_prefill: limits.chunked_prefill,
            scheduler_reserve_full_isl: limits.reserve_full_isl,
            prefix_caching: limits.prefix_caching,
            watermark: limits.watermark,
            policy: if limits.priority { Policy::Priority } else { Policy::Fcfs },
            max_loras: limits.max_loras,
            max_cpu_loras: 3,
            speculation: None,
            kv_events: false,
            async_scheduling: limits.asynchronous,
            seed: 0,
        }
    })
}

fn feed(engine: &mut Engine, batch: &Batch) {
    for id in &batch.abort {
        engine.abort(*id);
    }
    for entry in &batch.add {
        let request = Request {
            adapter: entry.adapter,
            priority: entry.priority,
            arrived: Duration::from_secs(entry.id),
            stops: entry.stops,
            content: Content::shared(entry.head, entry.shared, entry.id),
            salt: entry.salt,
            ..Request::new(entry.id, entry.prompt, entry.output)
        };
        engine.add(request).unwrap();
    }
}

/// Plays a case. The error is the number of the first step that differs, with both sides.
fn replay(case: &Case) -> Result<(), String> {
    let mut engine = engine_of(&case.limits);
    let mut batches = case.batches.iter();
    let mut taken = 0;
    loop {
        let batch = batches.next();
        if let Some(batch) = batch {
            feed(&mut engine, batch);
        }
        let Some(outcome) = engine.step() else {
            if batch.is_none() {
                break;
            }
            continue;
        };
        let (free, mut chunks) = std::mem::take(&mut engine.observed);
        chunks.sort_unstable();
        let admitted = outcome.admitted.iter().map(|one| (one.id, one.cached_tokens, one.resumed)).collect();
        let step: Step = (free, chunks, admitted, outcome.preempted);
        match case.steps.get(taken) {
            Some(expected) if *expected == step => taken += 1,
            expected => return Err(format!("step {taken}: vLLM {expected:?}, here {step:?}")),
        }
    }
    if taken == case.steps.len() { Ok(()) } else { Err(format!("{taken} steps of {}", case.steps.len())) }
}

#[test]
fn every_step_is_the_one_that_vllm_decided() {
    let more = std::env::var("SLUICE_SCHEDULER_TRACES").ok();
    let text = more.map_or_else(|| TRACES.to_owned(), |path| std::fs::read_to_string(path).unwrap());
    let (mut cases, mut steps, mut wrong) = (0, 0, Vec::new());
    for (number, line) in text.lines().enumerate() {
        let case: Case = serde_json::from_str(line).unwrap();
        cases += 1;
        steps += case.steps.len();
        if let Err(difference) = replay(&case) {
            wrong.push(format!("case {number}: {difference}"));
        }
    }
    assert!(cases >= 25 && steps > 1000, "{cases} cases and {steps} steps are too few to say anything");
    assert!(wrong.is_empty(), "{} of {cases} cases differ, the first: {}", wrong.len(), wrong[0]);
}
