//! Verdicts and waits of the controller, step by step; the tests in `super` run longer.

use std::time::Duration;

use crate::event::{Acting, EventKind, Proposal};
use crate::limits::controller::{
    Action, COOL_DOWN_MAX, Controller, LIMITS_SETTLE, LOAD_WEIGHT, LimitsTrial, MEASURED_MAX, QUIET,
};
use crate::limits::moves::{Direction, Move};
use crate::limits::{Knob, Limits, PoolLimits};
use crate::observe::loss::{Cause, Judged};
use crate::observe::window::{PoolWindow, Score, Window};

fn limits() -> Limits {
    Limits(vec![PoolLimits { slots: 64, prefill_tokens: None, long: None, range: (0, None) }])
}

fn controller() -> Controller {
    Controller::new(vec!["all".to_owned()], limits(), 0.99, LIMITS_SETTLE.0, Acting::Acts)
}

/// A trial of more slots that began after a window with `score`.
fn trial(score: Score, since: Duration) -> Box<LimitsTrial> {
    let direction = Direction { pool: 0, knob: Knob::Slots, up: true };
    let step = Move { direction, to: limits(), why: String::new() };
    Box::new(LimitsTrial { step, before: limits(), score, since })
}

#[test]
fn where_all_are_late_a_few_per_cent_less_is_a_gain() {
    let verdict = |loss: f64| {
        let mut pool = PoolWindow::new(Duration::ZERO);
        (0..900).for_each(|request| {
            let judged = Judged { loss, cause: Some(Cause::Queue), service: None };
            pool.add(MEASURED_MAX * request / 900, 200, judged);
        });
        let window = Window { from: Duration::ZERO, pools: vec![pool] };
        let (mut controller, before) = (controller(), Score { loss: 1.684, peak: 1.7, ..Score::default() });
        controller.measure(MEASURED_MAX + LIMITS_SETTLE.0, &window, trial(before, Duration::ZERO));
        controller.take_events()[0].kind
    };
    assert_eq!([1.643, 1.67].map(verdict), [EventKind::Kept, EventKind::Undone]);
}

#[test]
fn the_error_of_the_loss_does_not_excuse_missed_objectives() {
    let mut pool = PoolWindow::new(Duration::ZERO);
    // 3 of 250 requests miss in each batch: the attainment is known to be 98.8 %. These requests
    // lose differently (slightly late, or shed), so the mean loss is known less well.
    for batch in 0..24_u32 {
        for request in 0..250 {
            let loss = if request >= 3 { 0.0 } else { [1.0, 4.0][batch as usize % 2] };
            let cause = (loss > 0.0).then_some(Cause::Queue);
            pool.add(MEASURED_MAX * batch / 24, 200, Judged { loss, cause, service: None });
        }
    }
    let window = Window { from: Duration::ZERO, pools: vec![pool] };
    let score = window.score(MEASURED_MAX);
    assert!(score.error > 0.99 - score.attainment && score.attainment_error < 1e-9, "{score:?}");
    let mut controller = controller();
    controller.step(MEASURED_MAX + LIMITS_SETTLE.0, &window);
    assert!(controller.experience.misses);
}

#[test]
fn a_night_with_few_requests_begins_a_new_window() {
    let mut controller = controller();
    let window = Window { from: Duration::ZERO, pools: vec![PoolWindow::new(Duration::ZERO)] };
    let begins = |second: &u64| controller.step(Duration::from_secs(*second), &window) == Action::Begin;
    assert_eq!((1..3_600).find(begins).map(Duration::from_secs), Some(QUIET + LIMITS_SETTLE.0));
}

#[test]
fn a_queue_that_a_failed_change_has_left_is_waited_for_longer_than_any_other() {
    let mut window = Window { from: Duration::ZERO, pools: vec![PoolWindow::new(Duration::ZERO)] };
    window.pools[0].usage.in_rotation = 2;
    let waits_for = |has_failed: bool, queue: usize| {
        let mut controller = controller();
        let began = Duration::from_secs(1_000);
        if has_failed {
            let window = Window { from: began - MEASURED_MAX - LIMITS_SETTLE.0, ..window.clone() };
            let action = controller.measure(began, &window, trial(Score::default(), began - LIMITS_SETTLE.0));
            assert_eq!(action, Action::Apply);
        } else {
            controller.stand_back(began, "a backend entered or left rotation");
        }
        let mut window = window.clone();
        window.pools[0].usage.queue = queue;
        let ends = |second: &u64| controller.step(began + Duration::from_secs(*second), &window) == Action::Begin;
        (1..600).find(ends).map(Duration::from_secs)
    };
    assert_eq!([waits_for(false, 2), waits_for(true, 2)], [Some(LIMITS_SETTLE.0); 2]);
    assert_eq!(waits_for(false, 50), Some(LIMITS_SETTLE.1));
    assert_eq!(waits_for(true, 50), Some(COOL_DOWN_MAX));
}

#[test]
fn a_proposal_ends_with_the_limits_that_it_was_made_under() {
    let mut controller = controller();
    let proposal = Proposal { id: 1, key: String::new(), values: Default::default(), why: String::new() };
    let step = trial(Score::default(), LIMITS_SETTLE.0).step;
    controller.proposals.propose(LIMITS_SETTLE.0, proposal, (step, Score::default()));
    assert!(controller.proposals.approve(1));
    let adopted = PoolLimits { slots: 8, ..limits().0[0] };
    controller.adopt(0, adopted, LIMITS_SETTLE.0);
    let window = Window { from: LIMITS_SETTLE.0, pools: vec![PoolWindow::new(LIMITS_SETTLE.0)] };
    let mut acts = |second| controller.step(Duration::from_secs(second), &window) == Action::Apply;
    assert_eq!((4..60).find(|second| acts(*second)), None);
    assert_eq!(controller.limits().0, [adopted]);
}

#[test]
fn what_was_lost_before_a_quiet_time_is_over() {
    let mut controller = controller();
    (controller.stuck_since, controller.latest_score.loss) = (Some(LIMITS_SETTLE.0), 0.5);
    let window = Window { from: Duration::ZERO, pools: vec![PoolWindow::new(Duration::ZERO)] };
    controller.step(QUIET, &window);
    assert!(controller.stuck_since.is_some(), "it may still come");
    controller.step(QUIET + LIMITS_SETTLE.0, &window);
    assert_eq!((controller.stuck_since, controller.latest_score), (None, Score::default()));
}

#[test]
fn a_queue_from_before_is_not_the_harm_of_a_change_and_one_that_grows_is() {
    let (began, now) = (LIMITS_SETTLE.0, LIMITS_SETTLE.0 * 3);
    let decides = |before: usize, gone: f64| {
        let mut pool = PoolWindow::new(began);
        (pool.usage.in_rotation, pool.usage.queue, pool.ended) = (2, 200, gone);
        pool.usage.in_flight = Some(((began, before), (now, 250)));
        let window = Window { from: began, pools: vec![pool] };
        let mut controller = controller();
        let score = Score { loss: 1.9, peak: 2.0, ..Score::default() };
        let action = controller.measure(now, &window, trial(score, Duration::ZERO));
        (action, controller.take_events().pop().map(|event| event.why))
    };
    assert_eq!(decides(300, 150.0), (Action::Wait, None), "a hundred have come, and wait behind the others");
    let (action, why) = decides(100, 50.0);
    assert_eq!(action, Action::Apply);
    let said = "loss 3.000 after 1.900, attainment 0.0 % after 0.0 %, 200 requests";
    assert_eq!(why.as_deref(), Some(said));
}

#[test]
fn the_load_that_is_remembered_follows_once_per_window() {
    let mut controller = controller();
    let window = |from: u64| Window { from: Duration::from_secs(from), pools: vec![PoolWindow::new(LIMITS_SETTLE.0)] };
    let score = |rate| Score { rate, ..Score::default() };
    controller.compare_load(&score(10.0), &window(0));
    (0..90).for_each(|_| controller.compare_load(&score(19.0), &window(100)));
    assert_eq!(controller.load.as_ref().map(|(rate, _)| *rate), Some(10.0 + LOAD_WEIGHT * 9.0));
    controller.stuck_since = Some(LIMITS_SETTLE.0);
    controller.compare_load(&score(30.0), &window(200));
    assert_eq!((controller.stuck_since, controller.load.as_ref().map(|(rate, _)| *rate)), (None, Some(30.0)));
    controller.stuck_since = Some(LIMITS_SETTLE.0);
    controller.compare_load(&score(31.0), &window(200));
    assert_eq!(controller.stuck_since, Some(LIMITS_SETTLE.0), "noticed once");
}
