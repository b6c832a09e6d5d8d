//! A backend whose engine is on trial.
//!
//! It gets copies first, then requests up to the load that it sustained with copies.

use super::*;

const CLOSED: Option<TrialBound> = Some(TrialBound { slots: 0, tokens: 0 });

/// One pool of two backends with four slots each, the first of which is on trial.
fn pair(trial: Option<TrialBound>) -> (Fixture, BackendId) {
    let fixture = Fixture::new(&[spec("one", 2, limits(4, 4), vec![])]);
    let canary = fixture.layout.backends[0][0];
    fixture.admission.set_bounds([(canary, Bound::Trial(trial))]);
    (fixture, canary)
}

fn on(leases: &[Lease], backend: BackendId) -> usize {
    leases.iter().filter(|lease| lease.backend() == backend).count()
}

#[test]
fn requests_that_wait_when_an_engine_on_trial_starts_are_served_by_others_and_copies_run_meanwhile() {
    let (fixture, canary) = pair(CLOSED);
    fixture.admission.set_cordon(canary, Cordon::Starting);
    let mut held = Vec::from([(); 4].map(|()| fixture.granted(0, 10)));
    let mut waiting = fixture.queued(0, 10);
    fixture.admission.set_cordon(canary, Cordon::Open);
    assert!(poll(&mut waiting).is_none(), "the engine has started, and takes no request");
    let copies = [(); 4].map(|()| fixture.admission.enter_copy(&fixture.request(0, 10)).expect("the canary is empty"));
    assert!(copies.iter().all(|copy| copy.backend() == canary && !copy.abort_token().is_cancelled()));
    assert!(fixture.admission.enter_copy(&fixture.request(0, 10)).is_none(), "its limits hold for copies");
    drop(held.pop());
    assert_ne!(lease_of(&mut waiting).backend(), canary);
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn requests_load_an_engine_on_trial_at_most_as_its_copies_did() {
    let (fixture, canary) = pair(CLOSED);
    let copy = fixture.admission.enter_copy(&fixture.request(0, 10)).unwrap();
    fixture.admission.set_bounds([(canary, Bound::Trial(Some(TrialBound { slots: 2, tokens: 100 })))]);
    assert!(copy.abort_token().is_cancelled(), "the engine was not tried with both");
    let held = Vec::from([(); 6].map(|()| fixture.granted(0, 10)));
    assert_eq!(on(&held, canary), 2);
    let mut waiting = fixture.queued(0, 10);
    assert!(fixture.admission.enter_copy(&fixture.request(0, 10)).is_none());
    fixture.admission.check_invariants().unwrap();
    fixture.admission.set_bounds([(canary, Bound::Trial(None))]);
    assert_eq!(lease_of(&mut waiting).backend(), canary, "the trial has ended");
}

#[test]
fn a_request_larger_than_all_copies_together_is_served_by_another_engine() {
    let (fixture, canary) = pair(Some(TrialBound { slots: 2, tokens: 100 }));
    let mut large = fixture.request(0, 200);
    let AdmissionDecision::Granted(lease) = fixture.admission.enter(large.clone()) else {
        panic!("the other has room")
    };
    assert_ne!(lease.backend(), canary);
    large.avoid.push(lease.backend());
    // In the arm of an experiment, the request leaves the arm at once instead of waiting.
    let decision = fixture.admission.enter(large);
    assert!(matches!(decision, AdmissionDecision::Shed(ShedReason::NoBackend)), "{decision:?}");
}

#[test]
fn copies_begin_once_the_requests_on_an_engine_that_is_tried_again_have_ended() {
    let (fixture, canary) = pair(Some(TrialBound { slots: 4, tokens: 1_000 }));
    let mut held = Vec::from([(); 8].map(|()| fixture.granted(0, 10)));
    fixture.admission.set_bounds([(canary, Bound::Trial(CLOSED))]);
    held.retain(|lease| lease.backend() == canary);
    while held.pop().is_some() {
        let copy = fixture.admission.enter_copy(&fixture.request(0, 10));
        assert_eq!(copy.is_some_and(|copy| copy.backend() == canary), held.is_empty(), "{} left", held.len());
    }
}
