//! Speculative decoding in the step loop: tokens of a step, rejected drafts, slots that a drafter
//! reserves, and drafts that stop above a number of sequences.

use super::*;

fn drafting(acceptance: f64, change: impl FnOnce(&mut Speculation)) -> Engine {
    let mut speculation = Speculation {
        drafter: Drafter::Lookup,
        tokens: 3,
        acceptance: vec![acceptance; 3],
        kinds: Vec::new(),
        proposed: 1.0,
        length: 3.0,
        is_greedy: false,
        by_sequences: Vec::new(),
    };
    change(&mut speculation);
    engine(|config| config.speculation = Some(speculation))
}

/// The tokens that each step after the first computes and emits.
fn steps(engine: &mut Engine) -> Vec<(u32, u32)> {
    std::iter::from_fn(|| engine.step())
        .skip(1)
        .map(|step| (step.load.tokens, step.emitted.iter().map(|token| token.tokens).sum()))
        .collect()
}

#[test]
fn accepted_drafts_come_in_one_event_and_the_last_one_is_cut_at_the_limit() {
    let mut engine = drafting(1.0, |_| {});
    engine.add(request(1, 50, 10)).unwrap();
    // The first token, then 4 + 4 + 1: drafts beyond the limit are computed and dropped.
    assert_eq!(steps(&mut engine), [(4, 4), (4, 4), (4, 1)]);
    assert_eq!(*engine.drafts(), DraftStats { drafts: 3, tokens: 9, accepted: vec![3, 3, 3] });
}

#[test]
fn rejected_drafts_cost_tokens_and_leave_nothing() {
    let mut engine = drafting(0.0, |_| {});
    engine.add(request(1, 50, 6)).unwrap();
    assert_eq!(steps(&mut engine), [(4, 1); 5]);
    assert_eq!(engine.blocks().free(), engine.blocks().usable());
    assert_eq!(engine.drafts().accepted, [0, 0, 0]);
}

#[test]
fn drafts_stop_above_a_number_of_sequences() {
    let mut engine = drafting(1.0, |own| own.by_sequences = vec![(1, 1, 3), (2, 256, 0)]);
    engine.add(request(1, 50, 40)).unwrap();
    engine.step().unwrap();
    assert_eq!(engine.step().unwrap().load.tokens, 4);
    engine.add(request(2, 20, 40)).unwrap();
    // The drafts of the step before are still verified.
    let both = engine.step().unwrap().load;
    assert_eq!((both.tokens, both.proposed, both.drafting), (24, 0, 0), "none is searched");
    assert_eq!(engine.step().unwrap().load.tokens, 2);
}

#[test]
fn a_drafter_with_its_own_cache_reserves_slots() {
    let held = |drafter| {
        let mut engine = drafting(0.0, |own| own.drafter = drafter);
        // Two blocks hold 32 tokens. Four drafts and three slots more need a third.
        engine.add(request(1, 27, 9)).unwrap();
        engine.step().unwrap();
        engine.step().unwrap();
        engine.blocks().usable() - engine.blocks().free()
    };
    assert_eq!((held(Drafter::Lookup), held(Drafter::Model)), (2, 3));
}

#[test]
fn a_preempted_sequence_loses_its_drafts_and_ends_with_all_its_tokens() {
    let mut engine = drafting(0.5, |_| {});
    engine.config.num_blocks = 12;
    engine.blocks = Blocks::new(12);
    engine.add(request(1, 60, 60)).unwrap();
    engine.add(request(2, 62, 60)).unwrap();
    let (mut preempted, mut tokens) = (0, HashMap::<_, u32>::new());
    while let Some(step) = engine.step() {
        preempted += step.preempted;
        step.emitted.iter().for_each(|token| *tokens.entry(token.id).or_default() += token.tokens);
    }
    assert!(preempted > 0);
    assert_eq!((tokens[&1], tokens[&2]), (60, 60));
}
