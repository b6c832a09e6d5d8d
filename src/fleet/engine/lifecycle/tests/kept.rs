//! Old engines that are kept asleep while new settings are on trial.

use super::*;

fn kept(id: u64, to: u8, keep: Keep) -> ChangeRequest<u8> {
    ChangeRequest { keep: Some(keep), ..request(id, to, false) }
}

/// The new settings 5 start, while an engine with the old settings 0 sleeps.
fn starting(keep: Keep) -> Lifecycle<u8> {
    let mut life = serving();
    life.change(kept(1, 5, keep)).unwrap();
    let mut steps = vec![life.step];
    while life.step != Step::Start {
        life.on(Event::Done, &RULES, 0);
        steps.push(life.step);
    }
    assert_eq!(steps, [Step::Drain, Step::Sleep, Step::Start]);
    assert_eq!((life.wanted, life.kept.as_ref().map(|kept| kept.setup)), (5, Some(0)));
    life
}

/// The steps until the engine serves.
fn steps_up(life: &mut Lifecycle<u8>) -> Vec<Step> {
    let mut steps = vec![life.step];
    while life.step != Step::Serve {
        life.on(Event::Done, &RULES, 0);
        steps.push(life.step);
    }
    steps
}

use Step::{Adapters, Backoff, Golden, Ramp, Serve, Sleep, Start, Stop, Wake, WarmUp};

#[test]
fn a_start_that_fails_wakes_the_old_engine() {
    for steps in 0..5 {
        let mut life = starting(Keep::Settling);
        (0..steps).for_each(|_| life.on(Event::Done, &RULES, 0));
        life.on(failed(), &RULES, 0);
        assert_eq!(steps_up(&mut life), [Stop, Wake, Adapters, Golden, WarmUp, Ramp, Serve]);
        assert_eq!((life.wanted, life.adopted, outcome(&life)), (0, true, Outcome::RolledBack("failed".to_owned())));
        assert_eq!((life.kept, life.restarts.len()), (None, 0));
    }
}

#[test]
fn a_change_back_and_a_crash_before_the_settings_settled_wake_the_old_engine() {
    let mut life = starting(Keep::Trial);
    up(&mut life);
    life.change(kept(2, 0, Keep::Trial)).unwrap();
    life.on(Event::Done, &RULES, 0);
    assert_eq!(steps_up(&mut life), [Stop, Wake, Adapters, Golden, WarmUp, Ramp, Serve]);
    assert_eq!((life.wanted, outcome(&life)), (0, Outcome::Done));
    let mut life = starting(Keep::Settling);
    up(&mut life);
    life.on(lost(), &RULES, 0);
    assert_eq!(steps_up(&mut life)[..3], [Stop, Backoff, Wake]);
    assert_eq!(life.wanted, 0);
}

#[test]
fn a_wake_that_fails_becomes_a_start_and_an_engine_without_room_is_stopped_as_ever() {
    let mut life = starting(Keep::Settling);
    life.on(failed(), &RULES, 0);
    life.on(Event::Done, &RULES, 0);
    assert_eq!(life.step, Wake);
    life.on(failed(), &RULES, 0);
    assert_eq!(steps_up(&mut life)[..2], [Stop, Start]);
    assert_eq!((life.wanted, life.restarts.len()), (0, 0));
    let mut life = serving();
    life.change(kept(1, 5, Keep::Settling)).unwrap();
    life.on(Event::Done, &RULES, 0);
    life.on(failed(), &RULES, 0);
    assert_eq!(steps_up(&mut life)[..2], [Stop, Start]);
    assert_eq!((life.wanted, life.why.as_deref(), outcome(&life)), (5, None, Outcome::Done));
}

#[test]
fn the_old_engine_is_done_with_once_the_settings_have_settled_and_the_tuner_has_ended_the_trial() {
    for keep in [Keep::Settling, Keep::Trial] {
        let mut life = starting(keep);
        assert!(!life.is_done_with_kept());
        up(&mut life);
        assert!(!life.is_done_with_kept());
        life.on(Event::Done, &RULES, 0);
        assert_eq!(life.is_done_with_kept(), keep == Keep::Settling);
        life.end_trial();
        assert!(life.is_done_with_kept());
    }
    let mut life = starting(Keep::Trial);
    life.end_trial();
    up(&mut life);
    assert!(!life.is_done_with_kept(), "not settled");
}

#[test]
fn a_second_change_keeps_the_engine_of_the_first() {
    let mut life = starting(Keep::Settling);
    up(&mut life);
    life.change(kept(2, 6, Keep::Settling)).unwrap();
    life.on(Event::Done, &RULES, 0);
    assert_eq!(steps_up(&mut life)[..2], [Stop, Start]);
    assert_eq!((life.wanted, life.kept.as_ref().map(|kept| kept.setup)), (6, Some(0)));
    let mut life = serving();
    life.change(kept(3, 0, Keep::Settling)).unwrap();
    life.on(Event::Done, &RULES, 0);
    assert_eq!(life.step, Stop, "the same settings need no return");
}

#[test]
fn the_next_gateway_wakes_an_engine_that_fell_asleep_and_keeps_one_that_slept() {
    let mut life = serving();
    life.change(kept(1, 5, Keep::Settling)).unwrap();
    life.on(Event::Done, &RULES, 0);
    assert_eq!(life.step, Sleep);
    let mut woken = recovered(life, Survivor::Adoptable);
    assert_eq!((woken.step, woken.wanted), (Wake, 0));
    assert!(matches!(outcome(&woken), Outcome::Aborted(_)));
    woken.on(Event::Done, &RULES, 0);
    assert_eq!(woken.step, Serve);
    let mut broken = recovered(starting(Keep::Settling), Survivor::None);
    assert_eq!(broken.step, Stop);
    broken.on(Event::Done, &RULES, 0);
    broken.on(failed(), &RULES, 0);
    assert_eq!(steps_up(&mut broken)[..2], [Stop, Wake]);
    let mut adopted = recovered(starting(Keep::Settling), Survivor::Adoptable);
    adopted.on(failed(), &RULES, 0);
    assert_eq!(steps_up(&mut adopted)[..2], [Stop, Wake]);
}

#[test]
fn an_engine_that_leaves_or_rests_keeps_none() {
    let mut life = starting(Keep::Trial);
    life.leave();
    assert_eq!((life.step, life.kept.clone()), (Stop, None));
    let mut life = starting(Keep::Trial);
    up(&mut life);
    life.rest(true).unwrap();
    life.on(Event::Done, &RULES, 0);
    assert_eq!((life.step, life.kept.clone()), (Stop, None), "the stop ends both");
}
