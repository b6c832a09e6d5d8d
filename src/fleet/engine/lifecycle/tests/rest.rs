//! Engines that autoscaling stops and starts.
//!
//! A resting engine has no process, and starts when it is wanted.

use super::*;

fn idle() -> Lifecycle<u8> {
    let mut life = serving();
    life.rest(false).unwrap();
    (0..2).for_each(|_| life.on(Event::Done, &RULES, 0));
    assert_eq!(life.step, Step::Idle);
    life
}

#[test]
fn an_engine_that_is_not_wanted_is_drained_and_stopped_and_starts_again_without_a_failure() {
    let mut life = serving();
    life.rest(false).unwrap();
    assert_eq!((life.step, life.cordon()), (Step::Drain, Some(Cordon::Draining)));
    life.on(Event::Done, &RULES, 0);
    assert_eq!((life.step, life.cordon()), (Step::Stop, Some(Cordon::Idle)));
    life.on(Event::Done, &RULES, 0);
    assert_eq!((life.step, life.cordon(), life.why.as_deref()), (Step::Idle, Some(Cordon::Idle), None));
    life.wake();
    assert_eq!(
        (life.step, life.cordon()),
        (Step::Stop, Some(Cordon::Starting)),
        "whatever runs there is stopped first"
    );
    up(&mut life);
    assert_eq!((life.restarts_within(&RULES, 0), life.is_settled()), (0, true));
}

#[test]
fn an_engine_that_can_sleep_keeps_its_process_until_it_is_wanted_or_has_slept_for_long() {
    let asleep = || {
        let mut life = serving();
        life.rest(true).unwrap();
        life.on(Event::Done, &RULES, 0);
        assert_eq!((life.step, life.cordon()), (Step::Sleep, Some(Cordon::Idle)));
        life.on(Event::Done, &RULES, 0);
        assert_eq!((life.step, life.cordon()), (Step::Asleep, Some(Cordon::Idle)));
        life
    };
    let mut woken = asleep();
    woken.wake();
    assert_eq!((woken.step, woken.cordon()), (Step::Wake, Some(Cordon::Starting)));
    woken.on(Event::Done, &RULES, 0);
    assert_eq!((woken.step, woken.cordon()), (Step::Serve, Some(Cordon::Open)));
    let mut stopped = asleep();
    (0..2).for_each(|_| stopped.on(Event::Done, &RULES, 0));
    assert_eq!((stopped.step, stopped.restarts_within(&RULES, 0)), (Step::Idle, 0));
    let mut died = asleep();
    died.on(lost(), &RULES, 0);
    died.on(Event::Done, &RULES, 0);
    assert_eq!((died.step, died.restarts_within(&RULES, 0)), (Step::Idle, 0), "it is not needed now");
    let mut changed = asleep();
    changed.change(request(1, 5, false)).unwrap();
    changed.on(Event::Done, &RULES, 0);
    assert_eq!((changed.step, changed.wanted, outcome(&changed)), (Step::Idle, 5, Outcome::Done));
}

#[test]
fn one_that_cannot_sleep_is_stopped_and_one_that_does_not_wake_is_started_anew() {
    let mut life = serving();
    life.rest(true).unwrap();
    life.on(Event::Done, &RULES, 0);
    life.on(failed(), &RULES, 0);
    assert_eq!((life.step, life.cordon()), (Step::Stop, Some(Cordon::Idle)));
    life.on(Event::Done, &RULES, 0);
    assert_eq!(life.step, Step::Idle);
    let mut life = serving();
    life.rest(true).unwrap();
    life.on(Event::Done, &RULES, 0);
    life.wake();
    life.on(Event::Done, &RULES, 0);
    assert_eq!(life.step, Step::Wake, "it was wanted while it fell asleep");
    life.on(failed(), &RULES, 0);
    assert_eq!((life.step, life.restarts_within(&RULES, 0)), (Step::Stop, 1));
    up(&mut life);
}

#[test]
fn the_next_gateway_asks_an_engine_that_slept_whether_it_sleeps() {
    let mut asleep = serving();
    asleep.rest(true).unwrap();
    (0..2).for_each(|_| asleep.on(Event::Done, &RULES, 0));
    let next = recovered(asleep.clone(), Survivor::Adoptable);
    assert_eq!((next.step, next.resting), (Step::Sleep, true));
    let mut gone = recovered(asleep.clone(), Survivor::None);
    gone.on(Event::Done, &RULES, 0);
    assert_eq!(gone.step, Step::Idle);
    let mut leaving = asleep.clone();
    leaving.leave();
    let mut next = recovered(leaving, Survivor::None);
    next.on(Event::Done, &RULES, 0);
    assert_eq!(next.step, Step::Idle, "it is not wanted, although it was shut down");
    asleep.wake();
    assert_eq!(recovered(asleep, Survivor::Adoptable).step, Step::Wake);
}

#[test]
fn one_that_is_wanted_again_while_it_drains_serves_and_while_it_is_stopped_starts() {
    let mut life = serving();
    life.rest(false).unwrap();
    life.wake();
    assert_eq!((life.step, life.cordon()), (Step::Serve, Some(Cordon::Open)));
    life.rest(false).unwrap();
    life.on(Event::Done, &RULES, 0);
    life.wake();
    life.on(Event::Done, &RULES, 0);
    assert_eq!(life.step, Step::Start);
}

#[test]
fn one_whose_requests_do_not_end_in_time_serves_on_and_one_that_dies_meanwhile_rests() {
    let mut life = serving();
    life.rest(false).unwrap();
    life.on(failed(), &RULES, 0);
    assert_eq!((life.step, life.resting), (Step::Serve, false));
    life.rest(false).unwrap();
    life.on(lost(), &RULES, 0);
    life.on(Event::Done, &RULES, 0);
    assert_eq!((life.step, life.restarts_within(&RULES, 0)), (Step::Idle, 0));
}

#[test]
fn one_that_does_not_serve_yet_is_stopped_at_once_and_one_that_is_changed_or_taken_over_is_left_alone() {
    for steps in 1..5 {
        let mut life = new(0);
        (0..steps).for_each(|_| life.on(Event::Done, &RULES, 0));
        life.rest(false).unwrap();
        assert_eq!(life.step, Step::Stop, "after {steps} steps");
        life.on(Event::Done, &RULES, 0);
        assert_eq!(life.step, Step::Idle);
    }
    let mut changing = serving();
    changing.change(request(1, 5, false)).unwrap();
    assert!(changing.rest(false).is_err());
    up(&mut changing);
    assert_eq!(outcome(&changing), Outcome::Done);
    let mut adopted = recovered(serving(), Survivor::Adoptable);
    assert!(adopted.rest(false).is_err());
    adopted.on(Event::Done, &RULES, 0);
    assert!(adopted.rest(false).is_err(), "{:?}: it may have requests of others", adopted.step);
}

#[test]
fn a_change_of_an_idle_engine_is_done_at_once_and_in_force_with_its_next_start() {
    let mut life = idle();
    life.change(request(1, 5, false)).unwrap();
    life.on(Event::Done, &RULES, 0);
    assert_eq!((life.step, life.wanted, outcome(&life)), (Step::Idle, 5, Outcome::Done));
    life.wake();
    life.on(Event::Done, &RULES, 0);
    life.on(failed(), &RULES, 0);
    assert_eq!((life.step, life.wanted), (Step::Stop, 0), "back to the settings that were good");
}

#[test]
fn the_next_gateway_leaves_a_stopped_engine_stopped_and_takes_over_one_that_drained() {
    assert_eq!(recovered(idle(), Survivor::None).cordon(), Some(Cordon::Idle));
    let mut stopped = idle();
    stopped.leave();
    assert_eq!(stopped.step, Step::Off);
    for life in [idle(), stopped] {
        let mut next = recovered(life, Survivor::None);
        next.on(Event::Done, &RULES, 0);
        assert_eq!(next.step, Step::Idle);
    }
    let mut drained = serving();
    drained.rest(false).unwrap();
    let drained = recovered(drained, Survivor::Adoptable);
    assert_eq!((drained.step, drained.resting), (Step::Adopt, false));
    let other = recovered(idle(), Survivor::Adoptable);
    assert_eq!((other.step, other.resting), (Step::Adopt, false), "someone started it");
}

#[test]
fn a_new_engine_that_starts_on_demand_rests_unless_it_runs() {
    for (survivor, step) in [(Survivor::None, Step::Stop), (Survivor::Adoptable, Step::Adopt)] {
        let mut life = Lifecycle::new(0);
        life.begin_at_rest();
        life.recover(None, survivor);
        assert_eq!(life.step, step);
        for _ in 0..10 {
            life.on(Event::Done, &RULES, 0);
        }
        let rests = survivor == Survivor::None;
        assert_eq!(life.step, if rests { Step::Idle } else { Step::Serve });
    }
}
