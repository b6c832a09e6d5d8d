//! The load that requests put on a changed engine.
//!
//! The engine gets no requests before it has served copies, and then at most the load of the
//! copies.

use crate::engines::change::Stage;
use crate::engines::proof::Load;
use crate::engines::trial::{COPIES, COPIES_SOON, RECOVERY};
use crate::event::EventKind;

use super::deployment::{Deployment, helps};

#[test]
fn requests_load_a_changed_engine_at_most_as_copies_did_from_its_restart_to_the_end_of_the_change() {
    let mut pool = Deployment::new(3, helps);
    let mut seen: Vec<(Stage, Vec<Option<u32>>)> = Vec::new();
    for _ in 0..7_200 {
        if pool.kinds().last() == Some(&EventKind::Kept) {
            break;
        }
        pool.second();
        let mut bounds: Vec<Option<u32>> = pool.bounds.clone();
        bounds.sort_unstable();
        if let Some(stage) = pool.stage().filter(|stage| seen.last() != Some(&(*stage, bounds.clone()))) {
            seen.push((stage, bounds));
        }
    }
    let (none, closed, open) = (None, Some(0), Some(20));
    let wanted = [
        // The canary has not served copies yet, so it must not get the waiting requests.
        (Stage::Canary, vec![none, none, closed]),
        (Stage::Copies, vec![none, none, closed]),
        (Stage::Recovery, vec![none, none, open]),
        (Stage::Compared, vec![none, none, open]),
        (Stage::Promotion, vec![none, none, open]),
        (Stage::Promotion, vec![none, open, open]),
        (Stage::Promotion, vec![open, open, open]),
    ];
    assert_eq!(seen, wanted);
    assert_eq!(pool.bounds, [None; 3], "the change has ended");
}

#[test]
fn where_no_request_can_be_copied_no_engine_with_a_change_serves_one() {
    let mut pool = Deployment::new(2, helps);
    pool.at_once = 0;
    pool.run_until(Some(Stage::Copies));
    pool.run_until(Some(Stage::Return));
    let (kind, why) = pool.events.last().unwrap();
    assert_eq!((*kind, why.contains("no request could be copied")), (EventKind::Undone, true), "{why}");
    assert_eq!(pool.tuner.failures, 0, "it did nothing wrong");
}

#[test]
fn copies_end_sooner_where_many_are_served() {
    let lasts = |rate: u32| {
        let mut pool = Deployment { rate, ..Deployment::new(2, helps) };
        pool.run_until(Some(Stage::Copies));
        let since = pool.now;
        pool.run_until(Some(Stage::Recovery));
        (pool.now - since).as_secs()
    };
    let (many, soon) = COPIES_SOON;
    assert_eq!(lasts(10), COPIES.0.as_secs());
    assert_eq!(lasts(200), soon.as_secs());
    let between = lasts(many as u32 / 30);
    assert!((55..65).contains(&between), "33 a second are many after 60 s: {between}");
}

#[test]
fn a_queue_that_was_as_long_before_the_change_does_not_hold_it_up() {
    let mut pool = Deployment::new(2, helps);
    let queue = |pool: &mut Deployment, waiting| pool.engines.iter_mut().for_each(|engine| engine.waiting = waiting);
    queue(&mut pool, 50);
    pool.run_until(Some(Stage::Copies));
    queue(&mut pool, 60);
    pool.run_until(Some(Stage::Recovery));
    pool.run(60);
    assert_eq!(pool.stage(), Some(Stage::Recovery), "what waited during the restart is served first");
    queue(&mut pool, 50);
    pool.run_until(Some(Stage::Promotion));
}

#[test]
fn a_queue_that_engines_without_the_change_keep_long_does_not_end_it() {
    let mut pool = Deployment::new(2, helps);
    pool.run_until(Some(Stage::Copies));
    pool.engines.iter_mut().for_each(|engine| engine.waiting = 500);
    pool.run_until(Some(Stage::Recovery));
    pool.run(RECOVERY.as_secs() - 5);
    assert_eq!(pool.stage(), Some(Stage::Recovery));
    pool.run(10);
    assert_eq!(pool.stage(), Some(Stage::Compared), "{:?}", pool.events);
    pool.run_until(Some(Stage::Promotion));
}

#[test]
fn a_canary_that_hangs_when_its_copies_are_nearly_over_serves_no_request() {
    let mut pool = Deployment::new(2, helps);
    pool.run_until(Some(Stage::Copies));
    pool.run(COPIES.0.as_secs() - 5);
    (pool.hangs, pool.at_once) = (true, 200);
    pool.run_until(Some(Stage::Return));
    let (kind, why) = pool.events.last().unwrap();
    assert_eq!((*kind, why.contains("stopped serving copies")), (EventKind::Undone, true), "{why}");
    assert!(pool.bounds.contains(&Some(20)), "200 at once were not served: {:?}", pool.bounds);
}

#[test]
fn a_load_for_which_the_canary_was_not_tried_leads_to_more_copies_and_at_last_to_its_end() {
    let mut pool = Deployment::new(2, helps);
    let crowd = |pool: &mut Deployment, used: u32, waiting| {
        for engine in &mut pool.engines {
            (engine.waiting, engine.used) = (waiting, Load::new(used, 0));
        }
    };
    pool.run_until(Some(Stage::Compared));
    crowd(&mut pool, 19, 500);
    pool.run(60);
    assert_eq!(pool.stage(), Some(Stage::Compared), "it has room: the others hold requests up");
    let mut copied = 0;
    for _ in 0..3_600 {
        if pool.stage() == Some(Stage::Return) {
            break;
        }
        let stage = pool.stage();
        let waits = stage == Some(Stage::Compared);
        crowd(&mut pool, if waits { 20 } else { 0 }, if waits { 500 } else { 0 });
        pool.second();
        copied += u32::from(stage == Some(Stage::Compared) && pool.stage() == Some(Stage::Copies));
    }
    assert_eq!(copied, 2);
    let (kind, why) = pool.events.last().unwrap();
    assert_eq!((*kind, why.contains("not tried under so much load")), (EventKind::Undone, true), "{why}");
}

#[test]
fn while_a_change_that_was_promoted_waits_for_its_hour_its_engines_take_more_step_by_step() {
    let mut pool = Deployment::new(2, helps);
    pool.run_until(Some(Stage::Promotion));
    pool.waits = Some("until 22:00");
    pool.run(120);
    let load = |pool: &mut Deployment| {
        pool.engines.iter_mut().for_each(|engine| (engine.waiting, engine.used) = (500, Load::new(30, 0)));
    };
    load(&mut pool);
    pool.run(4);
    assert!(pool.bounds.contains(&Some(20)), "{:?}", pool.bounds);
    pool.run(30);
    let bound = *pool.bounds.iter().flatten().next().unwrap();
    assert!((30..40).contains(&bound), "as much as they are used: {bound}");
}
