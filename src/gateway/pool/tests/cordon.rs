//! What a supervisor says of an engine: a cordon beside the operator's drain, a ceiling on slots, a health begun anew.

use super::*;

/// One pool of two backends, `slots` each.
fn pair(slots: u32) -> (House, [BackendId; 2]) {
    let house = House::new(&[spec("one", 2, limits(slots, 1), vec![])]);
    let ids = [house.layout.backends[0][0], house.layout.backends[0][1]];
    (house, ids)
}

#[test]
fn a_backend_that_drains_or_comes_is_given_nothing_and_waited_for_and_one_that_is_away_is_not() {
    let (house, [first, second]) = pair(4);
    let held = house.granted(0, 10);
    for (cordon, waits, state) in
        [(Cordon::Draining, true, "draining"), (Cordon::Starting, true, "starting"), (Cordon::Down, false, "down")]
    {
        assert!(house.admission.set_cordon(first, cordon) && house.admission.set_cordon(second, Cordon::Down));
        match house.admission.enter(house.ask(0, 10)) {
            AdmissionDecision::Queued(mut ticket, _) => {
                assert!(waits && poll(&mut ticket).is_none(), "{cordon:?}");
                house.admission.check_invariants().unwrap();
                // It is there: whoever waited gets it at once.
                house.admission.set_cordon(first, Cordon::Open);
                drop(lease_of(&mut ticket));
                house.admission.set_cordon(first, cordon);
            }
            AdmissionDecision::Shed(ShedReason::NoBackend) => assert!(!waits, "{cordon:?}"),
            other => panic!("{cordon:?}: {other:?}"),
        }
        let views = house.admission.view();
        let view = views[0].backends.iter().find(|view| view.id == first).unwrap();
        assert_eq!((view.state(), view.in_rotation()), (state, false));
    }
    drop(held);
}

#[test]
fn the_operators_drain_and_the_supervisors_cordon_do_not_lift_each_other() {
    let (house, [first, second]) = pair(4);
    house.admission.set_cordon(second, Cordon::Down);
    house.admission.set_draining(first, true);
    house.admission.set_cordon(first, Cordon::Starting);
    assert!(matches!(house.admission.enter(house.ask(0, 10)), AdmissionDecision::Shed(ShedReason::NoBackend)));
    house.admission.set_cordon(first, Cordon::Open);
    assert!(matches!(house.admission.enter(house.ask(0, 10)), AdmissionDecision::Shed(ShedReason::NoBackend)));
    house.admission.set_draining(first, false);
    drop(house.granted(0, 10));
}

#[test]
fn a_ceiling_bounds_the_configured_slots_and_survives_a_reload() {
    let (house, [first, second]) = pair(4);
    house.admission.set_cordon(second, Cordon::Down);
    let slots = |house: &House| house.admission.view()[0].backends[0].limits.slots;
    house.admission.set_ceiling(first, Some(2));
    let held = [house.granted(0, 10), house.granted(0, 10)];
    let mut third = house.queued(0, 10);
    assert_eq!(slots(&house), 2);
    let layout = house.admission.apply(&[spec("one", 2, limits(3, 1), vec![])], RULES, house.now);
    assert_eq!((slots(&house), layout.backends[0][0]), (2, first));
    house.admission.set_ceiling(first, Some(64));
    assert_eq!(slots(&house), 3, "never above what was configured");
    drop(lease_of(&mut third));
    house.admission.set_ceiling(first, None);
    assert_eq!(slots(&house), 3);
    drop(held);
    assert_eq!(house.admission.load(), (0, 0));
}

#[test]
fn a_fresh_engine_does_not_pay_for_the_faults_of_the_one_before_it() {
    let (house, [first, _]) = pair(4);
    house.admission.mark_hung(first, house.now);
    assert!(matches!(house.admission.view()[0].backends[0].phase, Phase::Ejected { .. }));
    assert!(house.admission.reset_health(first, house.now));
    let view = &house.admission.view()[0].backends[0];
    assert_eq!((view.phase, view.hangs), (Phase::Ready, 1));
}
