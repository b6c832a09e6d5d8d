//! Settings that were requested and are not in force, with the reason, and the reasons of earlier
//! failures.
//!
//! Both are kept until the next change.

use super::*;

#[test]
fn settings_that_were_asked_for_and_are_not_in_force_are_kept_with_the_reason_until_the_next_change() {
    let asked = |life: &Lifecycle<u8>| life.taken_back.as_ref().map(|one| (one.id, one.asked, one.why.clone()));
    let mut life = serving();
    life.change(request(1, 5, false)).unwrap();
    up(&mut life);
    assert_eq!((outcome(&life), asked(&life)), (Outcome::Done, None));
    life.on(lost(), &RULES, 0);
    let why = "it did not serve for fleet.settle: lost".to_owned();
    assert_eq!((life.wanted, outcome(&life)), (0, Outcome::RolledBack(why.clone())));
    assert_eq!(asked(&life), Some((1, 5, why)));
    up(&mut life);
    life.on(Event::Done, &RULES, 0);
    assert!(asked(&life).is_some(), "it stays while the engine serves with other settings");
    life.change(request(2, 6, false)).unwrap();
    assert_eq!((asked(&life), life.why.clone()), (None, None), "the reason of another change");
    life.on(Event::Done, &RULES, 0);
    life.on(Event::Done, &RULES, 0);
    life.on(failed(), &RULES, 0);
    up(&mut life);
    assert_eq!(asked(&life), Some((2, 6, "failed".to_owned())), "it did not start");
    // A restart with the same settings requests nothing else.
    life.change(request(3, 0, false)).unwrap();
    life.on(failed(), &RULES, 0);
    assert_eq!((outcome(&life), asked(&life)), (Outcome::Aborted("failed".to_owned()), None));
    life.refuse(0, "it runs that".to_owned());
    assert_eq!(asked(&life), None);
    life.refuse(7, "a flag that is not known".to_owned());
    assert_eq!(asked(&life), Some((0, 7, "a flag that is not known".to_owned())));
}

#[test]
fn a_failure_that_is_over_is_not_the_reason_of_a_planned_restart() {
    let mut life = serving();
    life.on(lost(), &RULES, 0);
    assert_eq!(life.why.as_deref(), Some("lost"));
    up(&mut life);
    life.change(request(1, 0, false)).unwrap();
    assert_eq!((life.step, life.why), (Step::Drain, None));
}

#[test]
fn a_configuration_that_fails_after_a_restart_is_no_rollback_of_the_change_before_it() {
    let mut life = serving();
    life.change(request(4, 5, false)).unwrap();
    up(&mut life);
    life.on(Event::Done, &RULES, 0);
    assert_eq!((life.good, outcome(&life)), (5, Outcome::Done));
    let mut next = Lifecycle::new(6);
    assert_eq!(next.recover(Some((life, Difference::Flags)), Survivor::None), Recovery::Reconfigured);
    up(&mut next);
    next.on(lost(), &RULES, 0);
    assert_eq!(next.wanted, 5, "the flags that were good serve again");
    assert_eq!(next.ended, Some(EndedChange { id: 4, outcome: Outcome::Done }));
    let taken_back = next.taken_back.clone().unwrap();
    assert_eq!((taken_back.id, taken_back.asked), (0, 6), "the new flags are named, and no change");
    // A later change is rolled back as usual.
    up(&mut next);
    next.on(Event::Done, &RULES, 0);
    next.change(request(7, 8, false)).unwrap();
    up(&mut next);
    next.on(lost(), &RULES, 0);
    assert!(matches!(next.ended, Some(EndedChange { id: 7, outcome: Outcome::RolledBack(_) })), "{:?}", next.ended);
}

#[test]
fn settings_that_an_earlier_configuration_asked_for_are_forgotten_with_it() {
    let mut life = serving();
    life.refuse(9, "a flag that is not known".to_owned());
    let mut next = Lifecycle::new(6);
    next.recover(Some((life, Difference::Flags)), Survivor::None);
    assert_eq!(next.taken_back, None);
}
