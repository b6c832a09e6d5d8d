//! Requests for a pool that may have no engine.
//!
//! They wait for the first engine.

use super::*;

const HOLD: Duration = Duration::from_secs(300);

/// One pool of two backends whose engines were stopped, with room for eight waiters.
fn asleep() -> (Fixture, [BackendId; 2]) {
    let mut pool = spec("one", 2, limits(4, 1), vec![]);
    pool.rules.hold = Some(HOLD);
    let fixture = Fixture::new(&[pool]);
    let ids = [fixture.layout.backends[0][0], fixture.layout.backends[0][1]];
    for id in ids {
        fixture.admission.set_cordon(id, Cordon::Idle);
    }
    (fixture, ids)
}

fn shed(fixture: &Fixture, request: AdmissionRequest) -> Option<ShedReason> {
    match fixture.admission.enter(request) {
        AdmissionDecision::Shed(reason) => Some(reason),
        _ => None,
    }
}

#[test]
fn a_request_waits_for_the_first_engine_as_long_as_the_pool_holds_it_and_is_served_then() {
    let (fixture, [first, _]) = asleep();
    assert!(fixture.admission.view()[0].holds);
    let (mut ticket, deadline) = match fixture.admission.enter(fixture.request(0, 10)) {
        AdmissionDecision::Queued(ticket, deadline) => (ticket, deadline),
        other => panic!("{other:?}"),
    };
    assert_eq!(deadline, fixture.now + HOLD);
    fixture.admission.set_cordon(first, Cordon::Starting);
    fixture.admission.set_ready_at(first, fixture.now + HOLD / 2);
    let mut second = fixture.queued(0, 10);
    fixture.admission.set_cordon(first, Cordon::Open);
    drop((lease_of(&mut ticket), lease_of(&mut second)));
    assert!(!fixture.admission.view()[0].holds);
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn the_queue_bounds_what_is_held_and_a_start_that_takes_too_long_is_refused_at_once() {
    let (fixture, [first, second]) = asleep();
    let held: Vec<Ticket> = (0..8).map(|_| fixture.queued(0, 10)).collect();
    assert_eq!(shed(&fixture, fixture.request(0, 10)), Some(ShedReason::QueueFull));
    drop(held);
    fixture.admission.set_cordon(second, Cordon::Down);
    fixture.admission.set_cordon(first, Cordon::Starting);
    fixture.admission.set_ready_at(first, fixture.now + 2 * HOLD);
    assert_eq!(shed(&fixture, fixture.request(0, 10)), Some(ShedReason::EngineStarting));
}

#[test]
fn nothing_is_held_by_a_pool_that_always_has_engines_or_for_what_no_engine_to_come_could_serve() {
    let plain = spec("one", 2, limits(4, 1), vec![]);
    let (fixture, _) = asleep();
    fixture.admission.apply(&[plain], RULES, fixture.now);
    let later = AdmissionRequest { layout: 2, ..fixture.request(0, 10) };
    assert_eq!(shed(&fixture, later), Some(ShedReason::NoBackend));
    let (fixture, ids) = asleep();
    let failed = AdmissionRequest { avoid: smallvec![ids[0]], ..fixture.request(0, 10) };
    assert_eq!(shed(&fixture, failed), Some(ShedReason::NoBackend), "another backend has failed it");
    let pinned = AdmissionRequest { only: Some("one1".into()), ..fixture.request(0, 10) };
    assert_eq!(shed(&fixture, pinned), Some(ShedReason::NoBackend), "what only one engine has is gone");
    fixture.admission.set_draining(ids[0], true);
    fixture.admission.set_cordon(ids[1], Cordon::Down);
    assert_eq!(shed(&fixture, fixture.request(0, 10)), Some(ShedReason::NoBackend), "no engine can come");
    let mut pods = spec("one", 0, limits(4, 1), vec![]);
    pods.rules.hold = Some(HOLD);
    let none = Fixture::new(&[pods]);
    drop(none.queued(0, 10));
}

#[test]
fn a_start_that_fails_sheds_what_is_held_unless_another_engine_is_on_its_way() {
    let (fixture, [first, second]) = asleep();
    let mut held = fixture.queued(0, 10);
    fixture.admission.set_cordon(first, Cordon::Starting);
    fixture.admission.set_cordon(second, Cordon::Starting);
    fixture.admission.start_failed(first);
    assert!(poll(&mut held).is_none(), "the other one starts");
    fixture.admission.set_cordon(second, Cordon::Idle);
    fixture.admission.set_ready_at(first, fixture.now + Duration::from_secs(40));
    fixture.admission.start_failed(first);
    assert!(matches!(poll(&mut held), Some(WaitResult::Shed(ShedReason::EngineStarting))));
    assert_eq!(fixture.admission.retry_after(fixture.layout.pools[0], fixture.now), Duration::from_secs(40));
    assert_eq!(fixture.admission.load(), (0, 0));
    fixture.admission.check_invariants().unwrap();
    let mut last = fixture.queued(0, 10);
    fixture.admission.set_cordon(second, Cordon::Down);
    fixture.admission.set_cordon(first, Cordon::Down);
    fixture.admission.start_failed(first);
    assert!(matches!(poll(&mut last), Some(WaitResult::Shed(ShedReason::NoBackend))));
    fixture.admission.set_cordon(second, Cordon::Idle);
    fixture.admission.set_start_takes(second, Duration::from_secs(30));
    assert_eq!(fixture.admission.retry_after(fixture.layout.pools[0], fixture.now), Duration::from_secs(30));
}
