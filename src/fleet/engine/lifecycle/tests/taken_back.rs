//! Settings that were asked for and are not in force, and reasons that are over.

use super::*;

#[test]
fn settings_that_were_asked_for_and_are_not_in_force_are_kept_with_the_reason_until_the_next_change() {
    let asked = |life: &Lifecycle<u8>| life.taken_back.as_ref().map(|one| (one.id, one.asked, one.why.clone()));
    let mut life = serving();
    life.change(request(1, 5, false)).unwrap();
    up(&mut life);
    assert_eq!((outcome(&life), asked(&life)), (Outcome::Done, None));
    // It dies before it has served for the settling time.
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
    // A plain restart asks for nothing else.
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
