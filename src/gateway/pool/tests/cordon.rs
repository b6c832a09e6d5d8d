//! Decisions of a supervisor about an engine.
//!
//! These are a cordon next to the operator's drain, a ceiling on slots, and the news that the
//! engine was replaced.

use super::*;

/// One pool of two backends with `slots` slots each.
fn pair(slots: u32) -> (Fixture, [BackendId; 2]) {
    let fixture = Fixture::new(&[spec("one", 2, limits(slots, 1), vec![])]);
    let ids = [fixture.layout.backends[0][0], fixture.layout.backends[0][1]];
    (fixture, ids)
}

#[test]
fn a_backend_that_drains_or_comes_is_given_nothing_and_waited_for_and_one_that_is_away_is_not() {
    let (fixture, [first, second]) = pair(4);
    let held = fixture.granted(0, 10);
    for (cordon, waits, state) in
        [(Cordon::Draining, true, "draining"), (Cordon::Starting, true, "starting"), (Cordon::Down, false, "down")]
    {
        fixture.admission.set_cordon(first, cordon);
        fixture.admission.set_cordon(second, Cordon::Down);
        match fixture.admission.enter(fixture.request(0, 10)) {
            AdmissionDecision::Queued(mut ticket, _) => {
                assert!(waits && poll(&mut ticket).is_none(), "{cordon:?}");
                fixture.admission.check_invariants().unwrap();
                // The backend is ready: the waiter gets it at once.
                fixture.admission.set_cordon(first, Cordon::Open);
                drop(lease_of(&mut ticket));
                fixture.admission.set_cordon(first, cordon);
            }
            AdmissionDecision::Shed(ShedReason::NoBackend) => assert!(!waits, "{cordon:?}"),
            other => panic!("{cordon:?}: {other:?}"),
        }
        let views = fixture.admission.view();
        let view = views[0].backends.iter().find(|view| view.id == first).unwrap();
        assert_eq!((view.state(), view.in_rotation()), (state, false));
    }
    drop(held);
}

#[test]
fn the_operators_drain_and_the_supervisors_cordon_do_not_lift_each_other() {
    let (fixture, [first, second]) = pair(4);
    fixture.admission.set_cordon(second, Cordon::Down);
    fixture.admission.set_draining(first, true);
    fixture.admission.set_cordon(first, Cordon::Starting);
    assert!(matches!(fixture.admission.enter(fixture.request(0, 10)), AdmissionDecision::Shed(ShedReason::NoBackend)));
    fixture.admission.set_cordon(first, Cordon::Open);
    assert!(matches!(fixture.admission.enter(fixture.request(0, 10)), AdmissionDecision::Shed(ShedReason::NoBackend)));
    fixture.admission.set_draining(first, false);
    drop(fixture.granted(0, 10));
}

#[test]
fn a_ceiling_bounds_the_configured_slots_and_survives_a_reload() {
    let (fixture, [first, second]) = pair(4);
    fixture.admission.set_cordon(second, Cordon::Down);
    let slots = |fixture: &Fixture| fixture.admission.view()[0].backends[0].limits.slots;
    fixture.admission.set_bounds([(first, Bound::Ceiling(Some(2)))]);
    let held = [fixture.granted(0, 10), fixture.granted(0, 10)];
    let mut third = fixture.queued(0, 10);
    assert_eq!(slots(&fixture), 2);
    let layout = fixture.admission.apply(&[spec("one", 2, limits(3, 1), vec![])], RULES, fixture.now);
    assert_eq!((slots(&fixture), layout.backends[0][0]), (2, first));
    fixture.admission.set_bounds([(first, Bound::Ceiling(Some(64)))]);
    assert_eq!(slots(&fixture), 3, "never above what was configured");
    drop(lease_of(&mut third));
    fixture.admission.set_bounds([(first, Bound::Ceiling(None))]);
    assert_eq!(slots(&fixture), 3);
    drop(held);
    assert_eq!(fixture.admission.load(), (0, 0));
}

#[test]
fn a_fresh_engine_does_not_pay_for_the_faults_of_the_one_before_it() {
    let (fixture, [first, second]) = pair(4);
    fixture.admission.set_cordon(second, Cordon::Down);
    fixture.granted(0, 10).observe_decode(100, Duration::from_millis(50), fixture.now);
    let speed = || fixture.admission.view()[0].backends[0].seconds_per_token;
    assert_eq!(speed(), Some(0.05));
    fixture.admission.mark_hung(first, fixture.now);
    assert!(matches!(fixture.admission.view()[0].backends[0].phase, Phase::Ejected { .. }));
    fixture.admission.engine_replaced(first, fixture.now);
    let view = &fixture.admission.view()[0].backends[0];
    assert_eq!((view.phase, view.hangs), (Phase::Ready, 1));
    assert_eq!(speed(), None);
}

#[test]
fn a_request_that_no_starting_engine_can_serve_in_time_is_refused_at_once_with_the_time_when_one_can() {
    let (fixture, [first, second]) = pair(4);
    let admission = &fixture.admission;
    let queued = |why: &str| match admission.enter(fixture.request(0, 10)) {
        AdmissionDecision::Queued(ticket, _) => drop(ticket),
        other => panic!("{why}: {other:?}"),
    };
    let pool = fixture.layout.pools[0];
    let soon = |seconds| fixture.request(0, 10).arrived + Duration::from_secs(seconds);
    for id in [first, second] {
        admission.set_cordon(id, Cordon::Starting);
    }
    queued("it is not known when one will be ready");
    assert_eq!(admission.timeout_reason(pool, &[]), ShedReason::EngineStarting);
    admission.set_ready_at(first, soon(45));
    queued("the other may be ready at any moment");
    admission.set_ready_at(second, soon(3_000));
    match admission.enter(fixture.request(0, 10)) {
        AdmissionDecision::Shed(ShedReason::EngineStarting) => {}
        other => panic!("none is ready in time: {other:?}"),
    }
    assert_eq!(admission.retry_after(pool, soon(0)), Duration::from_secs(45));
    admission.set_ready_at(second, soon(0));
    queued("one is about to be ready");
    admission.set_ready_at(second, soon(3_000));
    admission.set_cordon(second, Cordon::Down);
    assert!(matches!(admission.enter(fixture.request(0, 10)), AdmissionDecision::Shed(ShedReason::EngineStarting)));
    admission.set_cordon(first, Cordon::Open);
    drop(fixture.granted(0, 10));
    assert_eq!(admission.timeout_reason(pool, &[]), ShedReason::QueueTimeout);
    admission.set_cordon(first, Cordon::Starting);
    queued("what was known of an earlier start does not count");
}

#[test]
fn a_pinned_request_does_not_wait_for_an_engine_that_has_left_the_rotation() {
    let (fixture, [first, second]) = pair(1);
    let held = [fixture.granted(0, 10), fixture.granted(0, 10)];
    let enter = |avoid: &[BackendId], pinned| {
        let request = AdmissionRequest { avoid: avoid.into(), pinned, ..fixture.request(0, 10) };
        fixture.admission.enter(request)
    };
    let wait = |avoid: &[BackendId], pinned| match enter(avoid, pinned) {
        AdmissionDecision::Queued(ticket, _) => ticket,
        other => panic!("{other:?}"),
    };
    let (mut to_second, mut to_both, mut plain) = (wait(&[first], true), wait(&[], true), wait(&[first], false));
    for cordon in [Cordon::Draining, Cordon::Starting] {
        fixture.admission.set_cordon(second, cordon);
        fixture.admission.check_invariants().unwrap();
        if cordon == Cordon::Draining {
            assert!(matches!(poll(&mut to_second), Some(WaitResult::Shed(ShedReason::NoBackend))));
        }
        assert!(poll(&mut to_both).is_none(), "the first backend is left");
        assert!(poll(&mut plain).is_none(), "it may not be served in another way");
        assert!(matches!(enter(&[first], true), AdmissionDecision::Shed(ShedReason::NoBackend)));
    }
    fixture.admission.set_draining(first, true);
    assert!(matches!(poll(&mut to_both), Some(WaitResult::Shed(ShedReason::NoBackend))));
    assert_eq!(fixture.admission.load(), (2, 1));
    drop((held, plain));
}
