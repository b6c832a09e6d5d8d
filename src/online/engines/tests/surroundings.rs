//! Events around a change that must neither harm requests nor freeze the tuner: absent engines,
//! changes by others, other pools, and restarts that must wait.

use std::time::Duration;

use crate::engines::change::Stage;
use crate::engines::decide::ASK_INTERVAL;
use crate::engines::flags::Flags;
use crate::engines::look::{EngineState, Restarted};
use crate::engines::trial::{BLOCKED, COPIES};
use crate::engines::verdict::COMPARED;
use crate::event::{Acting, EventKind};

use super::deployment::{BEFORE, Deployment, FLAG, helps};

#[test]
fn a_proposal_for_engines_that_were_changed_or_renamed_since_is_dropped() {
    let disturbances: [fn(&mut Deployment); 2] = [
        |pool| (0..2).for_each(|engine| pool.give(engine, 4.0 * BEFORE)),
        |pool| pool.engines[1].backend = "another".to_owned(),
    ];
    for disturb in disturbances {
        let mut pool = Deployment::new(2, helps);
        pool.acting = Acting::WaitsForApproval;
        pool.run_until_asked();
        pool.second();
        let id = pool.tuner.proposals.shown().unwrap().0.id;
        assert!(pool.tuner.proposals.approve(id));
        disturb(&mut pool);
        pool.run(2 * ASK_INTERVAL.as_secs());
        assert!(
            pool.begun.is_empty() && pool.tuner.proposals.shown().is_none_or(|(next, _)| next.id != id),
            "{:?}",
            pool.events
        );
    }
}

fn another(pool: &mut Deployment) {
    let own = pool.engines.clone();
    pool.engines.extend(own.into_iter().map(|engine| EngineState { pool: "other".to_owned(), ..engine }));
    pool.another_misses = true;
}

#[test]
fn a_pool_that_no_change_helps_leaves_the_others_their_turn() {
    let mut pool = Deployment::new(2, |_| (0.5, 0.0));
    pool.forecast = |_| 0.5;
    another(&mut pool);
    let mut asked = Vec::new();
    for _ in 0..4 {
        pool.run_until_asked();
        asked.push(pool.answer_due.as_ref().unwrap().pool.clone());
        pool.second();
    }
    assert!(asked.windows(2).all(|two| two[0] != two[1]), "{asked:?}");
}

#[test]
fn a_proposal_stays_while_other_pools_are_asked_about_and_ends_with_the_need() {
    let mut pool = Deployment::new(2, helps);
    pool.acting = Acting::Proposes;
    another(&mut pool);
    pool.run_until_asked();
    pool.second();
    let id = pool.tuner.proposals.shown().unwrap().0.id;
    pool.run(4 * ASK_INTERVAL.as_secs());
    assert_eq!(pool.tuner.proposals.shown().map(|(proposal, _)| proposal.id), Some(id));
    let proposed = pool.kinds().iter().filter(|kind| **kind == EventKind::Proposed).count();
    assert_eq!(proposed, 1, "{:?}", pool.events);
    pool.fares = |_| (0.0, 0.0);
    pool.another_misses = false;
    pool.run(5);
    assert_eq!(pool.tuner.proposals.shown(), None);
}

#[test]
fn misses_of_other_pools_are_not_charged_to_a_change() {
    let mut pool = Deployment::new(2, helps);
    pool.another_misses = true;
    pool.run_until(Some(Stage::Promotion));
    pool.run_until(None);
    assert_eq!(pool.kinds().last(), Some(&EventKind::Kept), "{:?}", pool.events);
}

#[test]
fn an_engine_that_is_no_longer_there_is_left_out_without_a_freeze() {
    for stage in [Stage::Copies, Stage::Promotion] {
        let mut pool = Deployment::new(3, helps);
        pool.run_until(Some(stage));
        let gone = pool.engines.iter().position(|engine| engine.flags != Some(Flags::from([(FLAG, BEFORE)])));
        pool.engines.remove(gone.unwrap());
        pool.tuner.stand_back("the configuration has changed", pool.now);
        pool.run(BLOCKED.as_secs() + 120);
        assert_eq!((pool.stage(), pool.tuner.frozen.as_deref()), (None, None), "{stage:?}: {:?}", pool.events);
        assert_eq!(pool.values(), [BEFORE; 2], "{stage:?}");
    }
}

#[test]
fn an_engine_that_the_gateway_runs_no_longer_is_left_out_too() {
    let mut pool = Deployment::new(2, helps);
    pool.run_until(Some(Stage::Copies));
    let canary = pool.values().iter().position(|value| *value != BEFORE).unwrap();
    pool.engines[canary].flags = None;
    pool.restarts = |_| Restarted::Blocked("not managed".to_owned());
    pool.tuner.stand_back("the configuration has changed", pool.now);
    pool.run(BLOCKED.as_secs() + 120);
    assert_eq!((pool.stage(), pool.tuner.frozen.as_deref()), (None, None), "{:?}", pool.events);
}

#[test]
fn a_promotion_that_waited_for_hours_is_not_given_up_when_its_first_restart_is_blocked() {
    let mut pool = Deployment::new(2, helps);
    pool.run_until(Some(Stage::Promotion));
    pool.waits = Some("until 22:00");
    pool.run(4 * 3_600);
    pool.restarts = |_| Restarted::Blocked("a long request".to_owned());
    pool.waits = None;
    pool.run(300);
    pool.restarts = |_| Restarted::Done;
    pool.run_until(None);
    assert_eq!(pool.kinds().last(), Some(&EventKind::Kept), "{:?}", pool.events);
}

#[test]
fn a_canary_that_has_no_more_requests_to_copy_has_not_failed() {
    let mut pool = Deployment::new(2, helps);
    pool.run_until(Some(Stage::Copies));
    pool.run(20);
    (pool.rate, pool.at_once) = (0, 0);
    pool.run((COPIES.1 + COMPARED.0 + Duration::from_secs(900)).as_secs());
    let kinds = &pool.kinds()[..3];
    assert_eq!(kinds, [EventKind::Tried, EventKind::Compared, EventKind::Undone], "{:?}", pool.events);
    assert_eq!(pool.tuner.failures, 0, "{:?}", pool.events);
}
