//! Tests of the prefix cache, and of the rules for priorities and pauses.
//!
//! The cache tests check how many tokens are found, for which requests, and how they are counted.

use super::*;

/// A request whose first `shared` tokens come from text 1.
fn sharing(id: SequenceId, prompt: u32, output: u32, shared: u32) -> Request {
    Request { content: Content::shared(1, shared, id), ..Request::new(id, prompt, output) }
}

fn cached(outcome: &StepOutcome) -> Vec<u32> {
    outcome.admitted.iter().map(|admitted| admitted.cached_tokens).collect()
}

fn finish_all(engine: &mut Engine) {
    while engine.step().is_some() {}
}

#[test]
fn a_prompt_seen_before_is_computed_from_its_last_block_on() {
    let mut engine = engine(|_| {});
    engine.add(sharing(1, 64, 2, 64)).unwrap();
    finish_all(&mut engine);
    engine.add(sharing(2, 64, 2, 64)).unwrap();
    let step = engine.step().unwrap();
    assert_eq!((cached(&step), step.load.tokens), (vec![48], 16), "the last token is never found");
    engine.add(sharing(3, 65, 2, 65)).unwrap();
    assert_eq!(cached(&engine.step().unwrap()), [64]);
    assert_eq!(engine.prefix(), PrefixStats { queries: 64 + 64 + 65, hits: 48 + 64 });
}

#[test]
fn the_second_prompt_of_a_step_shares_what_the_first_one_is_about_to_compute() {
    let mut engine = engine(|_| {});
    engine.add(sharing(1, 100, 2, 80)).unwrap();
    engine.add(sharing(2, 100, 2, 80)).unwrap();
    let step = engine.step().unwrap();
    assert_eq!((cached(&step), step.load.tokens), (vec![0, 80], 120));
    assert_eq!(engine.blocks().usable() - engine.blocks().free(), 7 + 2, "five blocks are held by both");
}

#[test]
fn the_next_turn_of_a_chat_finds_the_answer_too() {
    let mut engine = engine(|_| {});
    let turn = |id, prompt, output| Request {
        content: Content::Text { head: 9, tokens: u32::MAX, tail: 0 },
        ..Request::new(id, prompt, output)
    };
    engine.add(turn(1, 40, 41)).unwrap();
    finish_all(&mut engine);
    engine.add(turn(2, 200, 1)).unwrap();
    assert_eq!(cached(&engine.step().unwrap()), [80], "40 and 41 tokens, of which the last was never computed");
}

#[test]
fn salt_and_adapter_keep_apart_and_a_request_may_look_away() {
    let mut engine = engine(|config| config.max_loras = 2);
    let plain = |id| sharing(id, 64, 1, 64);
    engine.add(plain(1)).unwrap();
    finish_all(&mut engine);
    engine.add(Request { salt: 7, ..plain(2) }).unwrap();
    engine.add(Request { adapter: Some(0), ..plain(3) }).unwrap();
    engine.add(Request { skip_cached: true, ..plain(4) }).unwrap();
    engine.add(plain(5)).unwrap();
    assert_eq!(cached(&engine.step().unwrap()), [0, 0, 0, 48]);
    assert_eq!(engine.prefix().queries, 4 * 64, "who does not look is not counted");
}

#[test]
fn without_prefix_caching_nothing_is_found_or_counted() {
    let mut engine = engine(|config| config.prefix_caching = false);
    for id in 1..3 {
        engine.add(sharing(id, 64, 1, 64)).unwrap();
        assert_eq!(cached(&engine.step().unwrap()), [0]);
    }
    assert_eq!((engine.prefix(), engine.blocks().published()), (PrefixStats::default(), 0));
}

#[test]
fn a_preempted_request_finds_its_own_blocks_again_and_is_not_counted_twice() {
    let mut engine = engine(|config| config.num_blocks = 9);
    engine.add(request(1, 60, 40)).unwrap();
    engine.add(request(2, 62, 8)).unwrap();
    let mut resumed = Vec::new();
    while let Some(step) = engine.step() {
        resumed.extend(step.admitted.into_iter().filter(|admitted| admitted.resumed));
    }
    assert!(!resumed.is_empty() && resumed[0].id == 2);
    assert_eq!(engine.prefix().queries, 60 + 62);
}

#[test]
fn cached_blocks_without_an_owner_count_against_the_free_ones() {
    let mut engine = engine(|config| config.num_blocks = 9);
    engine.add(sharing(1, 80, 1, 80)).unwrap();
    finish_all(&mut engine);
    engine.add(request(2, 50, 40)).unwrap();
    engine.step().unwrap();
    // Four blocks are held and four are free. The free ones hold the head of the next prompt.
    engine.add(sharing(3, 81, 1, 80)).unwrap();
    assert!(engine.step().unwrap().admitted.is_empty(), "it needs six");
}

#[test]
fn the_cache_is_emptied_when_nothing_runs_or_by_force() {
    let mut engine = engine(|_| {});
    engine.add(sharing(1, 64, 9, 64)).unwrap();
    engine.step().unwrap();
    assert!(!engine.reset_prefix_cache(false), "blocks are held");
    assert!(engine.reset_prefix_cache(true));
    let step = engine.step().unwrap();
    assert_eq!((cached(&step), step.admitted[0].resumed), (vec![0], true));
}

#[test]
fn a_pause_stops_admission_or_everything() {
    let mut engine = engine(|_| {});
    engine.add(request(1, 10, 3)).unwrap();
    engine.step().unwrap();
    engine.add(request(2, 10, 3)).unwrap();
    engine.pause(Pause::All);
    assert!(engine.step().is_none());
    engine.pause(Pause::Admission);
    assert_eq!(ids(&engine.step().unwrap()), [1]);
    engine.pause(Pause::No);
    assert_eq!(ids(&engine.step().unwrap()), [1, 2]);
}

#[test]
fn priority_decides_who_enters_and_arrival_between_equals() {
    let mut engine = engine(|config| {
        config.policy = Policy::Priority;
        config.max_num_seqs = 1;
    });
    let with =
        |id, priority, arrived| Request { priority, arrived: Duration::from_secs(arrived), ..Request::new(id, 10, 1) };
    for request in [with(1, 2, 0), with(2, 1, 9), with(3, 1, 8), with(4, -1, 10)] {
        engine.add(request).unwrap();
    }
    let order: Vec<_> = std::iter::from_fn(|| engine.step()).flat_map(|step| admitted(&step)).collect();
    assert_eq!(order, [4, 3, 2, 1]);
}

#[test]
fn the_least_urgent_is_preempted_although_it_was_scheduled_and_its_budget_goes_to_others() {
    let mut engine = engine(|config| {
        config.policy = Policy::Priority;
        config.max_num_batched_tokens = 80;
        config.long_prefill_token_threshold = 32;
        config.scheduler_reserve_full_isl = false;
        config.prefix_caching = false;
        config.num_blocks = 13;
    });
    engine.add(Request { priority: 5, ..Request::new(1, 180, 1) }).unwrap();
    assert_eq!(engine.step().unwrap().load.tokens, 80);
    engine.add(Request::new(2, 64, 2)).unwrap();
    engine.add(Request { priority: 1, ..Request::new(3, 100, 2) }).unwrap();
    assert_eq!(engine.step().unwrap().load.tokens, 32 + 32 + 16);
    // Ten of twelve blocks are held. The first sequence takes two, the second finds none, and the
    // first must be preempted.
    let step = engine.step().unwrap();
    assert_eq!((step.preempted, step.load.tokens, step.load.sequences), (1, 32 + 32, 2));
}

#[test]
fn the_adaptive_threshold_is_at_least_a_fair_share_of_the_budget() {
    let mut engine = engine(|config| {
        config.max_num_batched_tokens = 1000;
        config.long_prefill_token_threshold = 100;
        config.long_prefill_token_threshold_adaptive = true;
    });
    (1..=2).for_each(|id| engine.add(request(id, 5000, 1)).unwrap());
    assert_eq!(engine.step().unwrap().load.tokens, 500 + 500);
    (3..=20).for_each(|id| engine.add(request(id, 5000, 1)).unwrap());
    assert_eq!(engine.step().unwrap().load.sequences, 10, "100 each");
}

#[test]
fn a_stop_token_costs_one_more_step_and_a_limit_does_not() {
    let rows = |stops| {
        let mut engine = engine(|config| config.async_scheduling = true);
        engine.add(Request { stops, ..request(1, 10, 3) }).unwrap();
        std::iter::from_fn(|| engine.step()).map(|step| (step.load.tokens, step.emitted.len())).collect::<Vec<_>>()
    };
    assert_eq!(rows(false), [(10, 1), (1, 1), (1, 1)]);
    assert_eq!(rows(true), [(10, 1), (1, 1), (1, 1), (1, 0)]);
}

#[test]
fn who_leaves_is_computed_in_the_step_that_was_already_planned() {
    let mut engine = engine(|config| {
        config.async_scheduling = true;
        config.max_num_batched_tokens = 100;
    });
    engine.add(request(1, 250, 3)).unwrap();
    engine.step().unwrap();
    assert!(engine.abort(1));
    assert_eq!((engine.running(), engine.is_empty()), (0, true));
    assert_eq!(engine.step().unwrap().load.tokens, 100);
    assert!(engine.step().is_none());
    assert_eq!(engine.blocks().free(), engine.blocks().usable());
}

#[test]
fn prefills_wait_for_their_step_while_something_decodes() {
    let mut engine = engine(|config| config.prefill_schedule_interval = 3);
    engine.add(request(1, 10, 20)).unwrap();
    engine.step().unwrap();
    engine.add(request(2, 10, 20)).unwrap();
    assert!(engine.step().unwrap().admitted.is_empty());
    assert!(engine.step().unwrap().admitted.is_empty());
    assert_eq!(admitted(&engine.step().unwrap()), [2]);
}

#[test]
fn a_running_prefill_waits_for_its_step_too_unless_requests_wait_for_room() {
    for (seqs, tokens) in [(3, [100, 1, 1, 100]), (2, [100, 100, 100, 51])] {
        let mut engine = engine(|config| {
            (config.prefill_schedule_interval, config.max_num_batched_tokens) = (3, 100);
            (config.max_num_seqs, config.async_scheduling) = (seqs, false);
        });
        engine.add(request(1, 10, 20)).unwrap();
        for _ in 0..3 {
            engine.step().unwrap();
        }
        engine.add(request(2, 347, 20)).unwrap();
        if seqs == 2 {
            engine.add(request(3, 10, 20)).unwrap();
        }
        let steps = tokens.map(|_| engine.step().unwrap().load.tokens);
        assert_eq!(steps, tokens, "{seqs} sequences at once");
    }
}

#[test]
fn a_generated_token_is_findable_when_it_is_known_which_asynchronous_scheduling_learns_late() {
    let chat = |id, prompt, output| Request {
        content: Content::Text { head: 9, tokens: u32::MAX, tail: 0 },
        ..Request::new(id, prompt, output)
    };
    // The second block becomes full in the 17th step, in whose plan the other request is
    // considered.
    for (asynchronous, arrives_before, found) in [(false, 17, 32), (true, 16, 16)] {
        let mut engine = engine(|config| config.async_scheduling = asynchronous);
        engine.add(chat(1, 16, 40)).unwrap();
        let mut last = Vec::new();
        for step in 1..=17 {
            if step == arrives_before {
                engine.add(chat(2, 33, 1)).unwrap();
            }
            last = cached(&engine.step().unwrap());
        }
        assert_eq!(last, [found]);
    }
}
