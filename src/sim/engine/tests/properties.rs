//! Properties that hold under any load: random arrivals, aborts, pauses, resets and steps, under
//! any limits.
//!
//! Blocks are conserved (references are owners, nothing is lost); steps keep to the budget and the
//! running list to its limit; a sequence finds only blocks that a sequence with the same prefix
//! wrote; every request ends exactly once; the engine becomes idle.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Act {
    Add { prompt: u32, output: u32, adapter: Option<u16>, priority: i64, head: u64, shared: u32, stops: bool },
    Abort(usize),
    Pause(Pause),
    Reset(bool),
    Step,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let sizes = (1u32..400, 1u32..60, 0u64..3, 0u32..400);
    let add = (sizes, proptest::option::of(0u16..3), 0i64..3, any::<bool>()).prop_map(
        |((prompt, output, head, shared), adapter, priority, stops)| Act::Add {
            prompt,
            output,
            adapter,
            priority,
            head,
            shared,
            stops,
        },
    );
    let pause = prop_oneof![4 => Just(Pause::No), 1 => Just(Pause::Admission), 1 => Just(Pause::All)];
    let act = prop_oneof![
        9 => add,
        3 => (0usize..50).prop_map(Act::Abort),
        1 => pause.prop_map(Act::Pause),
        1 => any::<bool>().prop_map(Act::Reset),
        18 => Just(Act::Step),
    ];
    proptest::collection::vec(act, 1..200)
}

fn limits() -> impl Strategy<Value = EngineConfig> {
    let sizes = (32u32..120, 16u32..300, 1u32..12, 0u32..64, 1u32..4, 0.0..0.3);
    let switches = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (sizes, switches, speculations()).prop_map(
        |((blocks, budget, seqs, threshold, interval, watermark), switches, speculation)| {
            let (asynchronous, reserve, caching, priority, adaptive) = switches;
            EngineConfig {
                num_blocks: blocks,
                max_num_batched_tokens: budget,
                max_num_seqs: seqs.min(budget),
                long_prefill_token_threshold: threshold,
                long_prefill_token_threshold_adaptive: adaptive,
                prefill_schedule_interval: interval,
                scheduler_reserve_full_isl: reserve,
                prefix_caching: caching,
                watermark,
                policy: if priority { Policy::Priority } else { Policy::Fcfs },
                max_loras: 2,
                max_cpu_loras: 2,
                async_scheduling: asynchronous,
                speculation,
                ..EngineConfig::default()
            }
        },
    )
}

fn speculations() -> impl Strategy<Value = Option<Speculation>> {
    let drafter = prop_oneof![Just(Drafter::Lookup), Just(Drafter::Model)];
    let own = (drafter, 1u32..5, 0.0..1.0f64, 0.0..1.0f64, 1u32..8);
    proptest::option::of(own.prop_map(|(drafter, tokens, rate, proposed, off_above)| Speculation {
        drafter,
        tokens,
        acceptance: vec![rate],
        kinds: vec![vec![1.0 - rate]],
        proposed,
        length: f64::from(tokens) * (0.5 + rate / 2.0),
        is_greedy: false,
        by_sequences: vec![(1, off_above, tokens), (off_above + 1, 512, 0)],
    }))
}

struct Watched {
    engine: Engine,
    /// The tokens still to come and the request, for each sequence that has not ended.
    left: HashMap<SequenceId, (u32, Request)>,
    next: SequenceId,
}

impl Watched {
    fn act(&mut self, act: Act) -> Result<(), TestCaseError> {
        match act {
            Act::Add { prompt, output, adapter, priority, head, shared, stops } => {
                let content = Content::Text { head, tokens: shared, tail: self.next };
                let plain = Request::new(self.next, prompt, output);
                // Two sequences of equal priority and arrival time preempt each other in turn, in
                // vLLM too. So no two arrive at the same time.
                let arrived = Duration::from_micros(self.next);
                let request = Request { adapter, priority, stops, content, arrived, ..plain };
                if self.engine.add(request.clone()).is_ok() {
                    self.left.insert(self.next, (output, request));
                }
                self.next += 1;
            }
            Act::Abort(at) => {
                let mut live: Vec<_> = self.left.keys().copied().collect();
                live.sort_unstable();
                if let Some(id) = live.get(at) {
                    prop_assert!(self.engine.abort(*id));
                    prop_assert!(!self.engine.abort(*id));
                    self.left.remove(id);
                }
            }
            Act::Pause(pause) => self.engine.pause(pause),
            Act::Reset(preempt) => {
                let done = self.engine.reset_prefix_cache(preempt);
                prop_assert!(done || !preempt, "after a preemption nothing is held");
                prop_assert!(!done || self.engine.blocks().published() == 0);
            }
            Act::Step => {
                self.step()?;
            }
        }
        self.check()
    }

    fn step(&mut self) -> Result<bool, TestCaseError> {
        let Some(outcome) = self.engine.step() else { return Ok(false) };
        let config = &self.engine.config;
        prop_assert!(outcome.load.tokens > 0 && outcome.load.tokens <= config.max_num_batched_tokens);
        prop_assert!(outcome.load.sequences <= config.max_num_seqs);
        prop_assert!(self.engine.running.len() <= config.max_num_seqs as usize);
        prop_assert!(
            outcome.admitted.is_empty()
                || config.max_loras as usize >= self.engine.distinct(self.engine.running.iter().copied()).len()
        );
        for admitted in &outcome.admitted {
            // It may have been aborted since the plan was made.
            let Some((left, request)) = self.left.get(&admitted.id) else { continue };
            let tokens = request.prompt_tokens + request.output_tokens - left;
            prop_assert!(admitted.cached_tokens < tokens && admitted.cached_tokens % BLOCK_TOKENS == 0);
            prop_assert!(config.prefix_caching || admitted.cached_tokens == 0);
            let Content::Text { tokens: shared, .. } = request.content else { unreachable!() };
            prop_assert!(
                admitted.resumed || admitted.cached_tokens <= shared,
                "found blocks that no other sequence has written"
            );
        }
        for token in outcome.emitted {
            let entry = self.left.get_mut(&token.id);
            prop_assert!(entry.is_some(), "a token for a request that ended");
            let (left, request) = entry.unwrap();
            prop_assert_eq!(token.first, *left == request.output_tokens);
            let most = 1 + config.speculation.as_ref().map_or(0, |own| own.tokens);
            prop_assert!((1..=most.min(*left)).contains(&token.tokens));
            *left -= token.tokens;
            prop_assert_eq!(token.last, *left == 0);
            if token.last {
                self.left.remove(&token.id);
            }
        }
        Ok(true)
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let engine = &self.engine;
        let owners = engine.sequences.iter().flat_map(|sequence| sequence.blocks.iter().copied());
        prop_assert_eq!(engine.blocks.check(owners), Ok(()));
        prop_assert_eq!(engine.running() + engine.waiting(), self.left.len());
        prop_assert_eq!(engine.is_empty(), self.left.is_empty());
        let over = engine.running.iter().filter(|slot| engine.sequences[**slot as usize].ending.is_some());
        prop_assert_eq!(over.count(), engine.ending);
        Ok(())
    }
}

fn play(limits: EngineConfig, acts: Vec<Act>) -> Result<(), TestCaseError> {
    let mut watched = Watched { engine: engine(|config| *config = limits), left: HashMap::new(), next: 0 };
    for act in acts {
        watched.act(act)?;
    }
    watched.engine.pause(Pause::No);
    let mut steps = 0;
    while watched.step()? {
        watched.check()?;
        steps += 1;
        prop_assert!(steps < 100_000, "the engine does not come to an end");
    }
    prop_assert!(watched.left.is_empty() && watched.engine.is_empty());
    prop_assert_eq!(watched.engine.blocks().free(), watched.engine.blocks().usable());
    Ok(())
}

#[test]
fn every_short_history_of_a_tiny_engine_keeps_its_accounts() {
    let add = |prompt, output, shared, stops| Act::Add {
        prompt,
        output,
        adapter: None,
        priority: i64::from(output) % 2,
        head: 1,
        shared,
        stops,
    };
    // A request that fills the cache, one that grows, and one that shares a prefix and ends with a
    // stop token; `Abort(0)` aborts the oldest.
    let letters = [add(60, 4, 0, false), add(17, 30, 0, false), add(33, 3, 32, true), Act::Abort(0), Act::Step];
    let histories = 5u32.pow(5);
    for (asynchronous, policy) in [(false, Policy::Fcfs), (true, Policy::Fcfs), (true, Policy::Priority)] {
        for number in 0..histories {
            let acts = (0..5).map(|place| letters[(number / 5u32.pow(place) % 5) as usize].clone()).collect();
            let limits = EngineConfig {
                num_blocks: 6,
                max_num_batched_tokens: 40,
                max_num_seqs: 2,
                async_scheduling: asynchronous,
                policy,
                ..EngineConfig::default()
            };
            play(limits, acts).unwrap_or_else(|error| panic!("history {number}, {policy:?}: {error}"));
        }
    }
}

#[test]
fn a_big_prompt_is_served_although_small_ones_keep_coming() {
    let mut engine = engine(|config| config.num_blocks = 65);
    let mut next = 1;
    let small = |engine: &mut Engine, next: &mut u64| {
        engine.add(request(*next, 100, 20)).unwrap();
        *next += 1;
    };
    (0..8).for_each(|_| small(&mut engine, &mut next));
    engine.step().unwrap();
    engine.add(request(0, 1000, 1)).unwrap();
    let served = (0..200).any(|_| {
        small(&mut engine, &mut next);
        ids(&engine.step().unwrap()).contains(&0)
    });
    assert!(served, "it is at the head of the queue, and no other passes it");
}

#[test]
fn an_adapter_waits_for_ever_while_another_one_keeps_the_only_slot() {
    let mut engine = engine(|config| config.max_loras = 1);
    let with = |id, adapter| Request { adapter: Some(adapter), ..request(id, 10, 5) };
    engine.add(with(1, 0)).unwrap();
    engine.step().unwrap();
    engine.add(with(0, 1)).unwrap();
    for id in 2..300 {
        engine.add(with(id, 0)).unwrap();
        assert!(!admitted(&engine.step().unwrap()).contains(&0), "as in vLLM, nothing gives the other one a turn");
    }
    assert_eq!(engine.deferred(), 1);
}

proptest! {
    #[test]
    fn blocks_are_conserved_limits_hold_and_every_request_ends_once(acts in acts(), limits in limits()) {
        play(limits, acts)?;
    }
}
