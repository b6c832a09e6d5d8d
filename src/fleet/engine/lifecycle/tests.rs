//! The life cycle by example, and exhaustively next to a model of the processes.
//!
//! The examples here are about starts, changes and crashes; the folder `tests` has the other tests.

mod exhaustive;
mod kept;
mod rest;
mod taken_back;

use super::*;
use sluice_gateway::pool::Irreplaceable;

const RULES: RestartRules = RestartRules { restarts: 2, window_ms: 1_000, backoff_ms: 10, backoff_max_ms: 40 };

fn failure(why: &str) -> StepFailure {
    StepFailure { why: why.to_owned(), permanent: false }
}

fn failed() -> Event {
    Event::Failed(failure("failed"))
}

fn lost() -> Event {
    Event::EngineLost(failure("lost"))
}

/// Lets every effect succeed until the engine serves.
fn up(life: &mut Lifecycle<u8>) {
    for _ in 0..16 {
        if life.step == Step::Serve {
            return;
        }
        life.on(Event::Done, &RULES, 0);
    }
    panic!("does not come up: {life:?}");
}

fn request(id: u64, to: u8, cut: bool) -> ChangeRequest<u8> {
    ChangeRequest { id, to, cut, hold: false, keep: None }
}

/// An engine without a predecessor.
fn new(settings: u8) -> Lifecycle<u8> {
    let mut life = Lifecycle::new(settings);
    assert_eq!((life.step, life.recover(None, Survivor::None)), (Step::Recover, Recovery::New));
    life
}

/// The life cycle of the next gateway, with the same configuration.
fn recovered(life: Lifecycle<u8>, survivor: Survivor) -> Lifecycle<u8> {
    let mut next = Lifecycle::new(life.wanted);
    assert_eq!(next.recover(Some((life, Difference::None)), survivor), Recovery::Resumed);
    next
}

fn serving() -> Lifecycle<u8> {
    let mut life = new(0);
    up(&mut life);
    life.on(Event::Done, &RULES, 0);
    life
}

fn outcome(life: &Lifecycle<u8>) -> Outcome {
    life.ended.clone().expect("no change has ended").outcome
}

#[test]
fn a_change_drains_stops_starts_and_serves_in_this_order() {
    let mut life = serving();
    life.change(request(1, 5, false)).unwrap();
    let mut steps = vec![life.step];
    while life.step != Step::Serve {
        life.on(Event::Done, &RULES, 0);
        steps.push(life.step);
    }
    use Step::{Adapters, Drain, Golden, Ramp, Serve, Start, Stop, WarmUp};
    assert_eq!(steps, [Drain, Stop, Start, Adapters, Golden, WarmUp, Ramp, Serve]);
    assert_eq!((life.wanted, life.good, outcome(&life)), (5, 0, Outcome::Done));
    life.on(Event::Done, &RULES, 0);
    assert_eq!(life.good, 5, "good only after the settling time");
}

#[test]
fn a_drain_that_takes_too_long_gives_the_change_up_unless_it_may_cut() {
    let mut life = serving();
    life.change(request(1, 5, false)).unwrap();
    life.on(failed(), &RULES, 0);
    assert_eq!((life.step, life.wanted, outcome(&life)), (Step::Serve, 0, Outcome::Aborted("failed".to_owned())));
    life.change(request(2, 5, true)).unwrap();
    life.on(failed(), &RULES, 0);
    assert_eq!((life.step, life.wanted), (Step::Stop, 5));
}

#[test]
fn settings_that_do_not_come_up_are_rolled_back_at_once_and_cost_no_budget() {
    for steps in 1..6 {
        let mut life = serving();
        life.change(request(1, 5, false)).unwrap();
        (0..=steps).for_each(|_| life.on(Event::Done, &RULES, 0));
        life.on(failed(), &RULES, 0);
        assert_eq!((life.step, life.wanted, life.restarts_within(&RULES, 0)), (Step::Stop, 0, 0));
        up(&mut life);
        assert_eq!(outcome(&life), Outcome::RolledBack("failed".to_owned()));
    }
}

#[test]
fn a_change_after_which_nothing_comes_up_ends_and_the_good_settings_are_tried_again() {
    for to in [0, 5] {
        let mut life = serving();
        life.change(request(1, to, false)).unwrap();
        // The engine is drained and stopped. Then two starts fail.
        (0..2).for_each(|_| life.on(Event::Done, &RULES, 0));
        for _ in 0..2 {
            life.on(failed(), &RULES, 0);
            while life.step != Step::Start && life.change.is_some() {
                life.on(Event::Done, &RULES, 0);
            }
        }
        assert_eq!((life.step, outcome(&life)), (Step::Stop, Outcome::Failed("failed".to_owned())));
        up(&mut life);
        assert_eq!(life.wanted, 0);
    }
}

#[test]
fn a_crash_before_the_new_settings_settled_returns_to_the_good_ones() {
    let mut life = serving();
    life.change(request(1, 5, false)).unwrap();
    up(&mut life);
    life.on(lost(), &RULES, 0);
    assert_eq!((life.step, life.wanted), (Step::Stop, 0));
    life.on(Event::Done, &RULES, 0);
    assert_eq!(life.step, Step::Backoff);
}

#[test]
fn crashes_are_restarted_after_doubling_waits_until_the_budget_is_spent() {
    let mut life = serving();
    let mut waits = Vec::new();
    while life.step != Step::Hold {
        life.on(lost(), &RULES, 0);
        life.on(Event::Done, &RULES, 0);
        if life.step == Step::Backoff {
            waits.push(life.backoff_ms(&RULES));
            up(&mut life);
        }
    }
    assert_eq!(waits, [10, 20]);
    life.enable().unwrap();
    assert_eq!(life.step, Step::Stop, "a stop that failed may be why it is in `Hold`");
    up(&mut life);
    // The same number of crashes, each a window later, is no reason for `Hold`.
    for round in 1..10u64 {
        life.on(lost(), &RULES, round * RULES.window_ms);
        up(&mut life);
    }
}

#[test]
fn another_configuration_starts_afresh_whatever_the_earlier_gateway_came_to() {
    let mut left = serving();
    left.leave();
    (0..2).for_each(|_| left.on(Event::Done, &RULES, 0));
    assert_eq!(left.step, Step::Off);
    let mut crashed = serving();
    while crashed.step != Step::Hold {
        crashed.on(lost(), &RULES, 0);
        crashed.on(Event::Done, &RULES, 0);
    }
    for life in [left, crashed, serving()] {
        for (difference, survivor) in
            [(Difference::Program, Survivor::Adoptable), (Difference::Flags, Survivor::ToStop)]
        {
            let before = life.clone();
            let mut life = Lifecycle::new(7);
            assert_eq!(life.recover(Some((before, difference)), survivor), Recovery::Reconfigured);
            assert_eq!(life.step, Step::Stop, "whatever runs is stopped first");
            let mut broken = life.clone();
            broken.on(Event::Done, &RULES, 0);
            broken.on(Event::Failed(StepFailure { why: "no".to_owned(), permanent: true }), &RULES, 0);
            broken.on(Event::Done, &RULES, 0);
            let back = if difference == Difference::Flags { (Step::Backoff, 0) } else { (Step::Hold, 7) };
            assert_eq!((broken.step, broken.wanted), back);
            up(&mut life);
            life.on(Event::Done, &RULES, 0);
            assert_eq!((life.wanted, life.good), (7, 7));
        }
    }
}

#[test]
fn a_change_without_replacement_capacity_is_given_up_even_if_it_may_cut() {
    let mut life = serving();
    life.change(request(1, 5, true)).unwrap();
    life.on(Event::Failed(StepFailure { why: "alone".to_owned(), permanent: true }), &RULES, 0);
    assert_eq!((life.step, life.wanted, outcome(&life)), (Step::Serve, 0, Outcome::Aborted("alone".to_owned())));
}

#[test]
fn what_cannot_succeed_is_not_tried_again() {
    let mut life = new(0);
    life.on(Event::Done, &RULES, 0);
    life.on(Event::Failed(StepFailure { why: "no such flag".to_owned(), permanent: true }), &RULES, 0);
    life.on(Event::Done, &RULES, 0);
    assert_eq!((life.step, life.why.as_deref()), (Step::Hold, Some("no such flag")));
    life.change(request(1, 3, false)).unwrap();
    up(&mut life);
    assert_eq!((life.wanted, outcome(&life)), (3, Outcome::Done));
}

#[test]
fn what_a_crash_of_the_gateway_interrupts_is_given_up_before_the_stop_and_completed_after_it() {
    let mut life = serving();
    life.change(request(1, 5, false)).unwrap();
    let mut drained = recovered(life.clone(), Survivor::Adoptable);
    assert_eq!((drained.step, drained.wanted), (Step::Adopt, 0));
    assert!(matches!(outcome(&drained), Outcome::Aborted(_)));
    up(&mut drained);
    life.on(Event::Done, &RULES, 0);
    for survivor in [Survivor::Adoptable, Survivor::None] {
        let mut stopping = recovered(life.clone(), survivor);
        assert_eq!((stopping.step, stopping.wanted), (Step::Stop, 5));
        up(&mut stopping);
        assert_eq!(outcome(&stopping), Outcome::Done);
    }
}

#[test]
fn an_engine_that_runs_unrecorded_is_adopted_or_drained_before_it_is_stopped() {
    for (survivor, step, adopted) in [(Survivor::Adoptable, Step::Adopt, true), (Survivor::ToStop, Step::Drain, false)]
    {
        let mut life = Lifecycle::new(0);
        assert_eq!(life.recover(None, survivor), Recovery::New);
        assert_eq!((life.step, life.adopted), (step, adopted));
        up(&mut life);
        assert_eq!(life.adopted, adopted, "only a start makes it cold");
    }
}

#[test]
fn other_flags_leave_an_engine_that_may_be_adopted_alone() {
    let mut life = Lifecycle::new(7);
    let recovery = life.recover(Some((serving(), Difference::Flags)), Survivor::Adoptable);
    assert_eq!((recovery, life.step, life.wanted), (Recovery::Resumed, Step::Adopt, 0));
}

#[test]
fn a_reason_to_wait_is_news_once_and_ends_with_the_change() {
    let mut life = serving();
    let full = |used| Irreplaceable::NoRoom { used, room: 8, headroom_percent: 80 }.into();
    assert!(life.block(full(7)) && !life.block(full(8)), "counts differ, the reason does not");
    assert!(
        life.block(RestartBlocked::MustMove("p/a".to_owned()))
            && life.block(RestartBlocked::MustMove("p/b".to_owned()))
    );
    life.change(request(1, 5, false)).unwrap();
    assert_eq!(life.blocked, None);
}

#[test]
fn a_withdrawn_engine_serves_out_of_rotation_until_it_is_reinstated() {
    let mut life = serving();
    life.withdraw();
    assert_eq!((life.step, life.cordon()), (Step::Serve, Some(Cordon::Draining)));
    life.reinstate();
    assert_eq!(life.cordon(), Some(Cordon::Open));
    life.leave();
    assert_eq!(life.cordon(), None, "its place may belong to another engine");
}

#[test]
fn an_engine_that_crashes_while_it_is_withdrawn_comes_back_closed() {
    let mut life = serving();
    life.withdraw();
    life.on(lost(), &RULES, 0);
    while life.step != Step::Ramp {
        life.on(Event::Done, &RULES, 0);
    }
    assert_eq!((life.opens_in_ramp(), life.cordon()), (false, Some(Cordon::Draining)));
    life.reinstate();
    assert_eq!((life.opens_in_ramp(), life.cordon()), (true, None));
}
