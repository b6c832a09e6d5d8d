//! Copies for shadow arms.
//!
//! Copies use room that requests leave free, and requests get the same room as without copies.

use proptest::prelude::*;

use super::*;

/// One pool of one backend.
fn one_backend(slots: u32) -> (Fixture, BackendId) {
    let fixture = Fixture::new(&[spec("one", 1, limits(slots, 1), vec![])]);
    let backend = fixture.layout.backends[0][0];
    (fixture, backend)
}

fn is_cut(copy: &Lease) -> bool {
    copy.abort_token().is_cancelled()
}

#[test]
fn a_copy_takes_free_room_once_and_nothing_counts_it() {
    let (fixture, _) = one_backend(2);
    let request = fixture.request(0, 10);
    let held = fixture.granted(0, 10);
    let copy = fixture.admission.enter_copy(&request).expect("one of two slots is free");
    assert!(fixture.admission.enter_copy(&request).is_none(), "the copy has it");
    assert_eq!((fixture.admission.load(), fixture.usage(0).requests), ((1, 0), 1));
    drop(copy);
    let copy = fixture.admission.enter_copy(&request).expect("the first one has ended");
    assert!(!is_cut(&copy));
    copy.failure(BackendFault::Connect, fixture.now);
    copy.failure(BackendFault::Connect, fixture.now);
    copy.failure(BackendFault::Connect, fixture.now);
    assert_eq!(fixture.admission.view()[0].backends[0].phase, Phase::Ready, "its faults are not the backend's");
    drop(held);
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn a_copy_returns_its_permit_at_its_first_token() {
    let (fixture, _) = one_backend(4);
    let long = fixture.request(0, 16_000);
    let mut first = fixture.admission.enter_copy(&long).expect("the permit is free");
    assert!(fixture.admission.enter_copy(&long).is_none(), "one long prompt in prefill at once");
    first.first_token();
    first.first_token();
    let _second = fixture.admission.enter_copy(&long).expect("the first copy decodes");
    assert!(!is_cut(&first));
    assert!(fixture.admission.enter_copy(&long).is_none());
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn a_request_takes_the_room_of_the_latest_copy_at_once() {
    let (fixture, _) = one_backend(3);
    let copies = [0, 1].map(|_| fixture.admission.enter_copy(&fixture.request(0, 10)).unwrap());
    let first = fixture.granted(0, 10);
    assert_eq!(copies.each_ref().map(is_cut), [false, false], "the third slot was free");
    let second = fixture.granted(0, 10);
    assert_eq!(copies.each_ref().map(is_cut), [false, true]);
    drop((first, second));
}

#[test]
fn a_request_that_waits_cuts_all_copies_and_none_begins_while_it_waits() {
    let (fixture, _) = one_backend(4);
    let permit = fixture.granted(0, 16_000);
    let copy = fixture.admission.enter_copy(&fixture.request(0, 10)).unwrap();
    let waiting = fixture.queued(0, 16_000);
    assert!(is_cut(&copy), "although the request waits for a permit");
    assert!(fixture.admission.enter_copy(&fixture.request(0, 10)).is_none());
    drop((waiting, permit));
    assert!(fixture.admission.enter_copy(&fixture.request(0, 10)).is_some());
}

/// As in an experiment whose arms have separate backends.
#[test]
fn a_request_that_waits_for_other_backends_leaves_copies_alone() {
    let fixture = Fixture::new(&[spec("one", 2, limits(1, 1), vec![])]);
    let [own, other] = [0, 1].map(|at| fixture.layout.backends[0][at]);
    let avoiding = |backend| {
        let mut request = fixture.request(0, 10);
        request.avoid.push(backend);
        request
    };
    let AdmissionDecision::Granted(held) = fixture.admission.enter(avoiding(own)) else { panic!("there was room") };
    let before = fixture.admission.enter_copy(&avoiding(other)).unwrap();
    let AdmissionDecision::Queued(waiting, _) = fixture.admission.enter(avoiding(own)) else { panic!("no room") };
    assert!(!is_cut(&before));
    drop(before);
    let copy = fixture.admission.enter_copy(&avoiding(other)).expect("no request waits for that backend");
    let AdmissionDecision::Granted(second) = fixture.admission.enter(avoiding(other)) else {
        panic!("copies have no room")
    };
    assert!(is_cut(&copy));
    drop((held, second, waiting));
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn the_copies_of_a_pool_that_a_waiting_request_may_spill_to_are_cut() {
    let fixture = Fixture::new(&two_pools());
    let copy = fixture.admission.enter_copy(&fixture.request(0, 10)).unwrap();
    let held = [0, 1, 2].map(|_| fixture.granted(1, 16_000));
    assert!(!is_cut(&copy));
    let _waiting = fixture.queued(1, 16_000);
    assert!(is_cut(&copy));
    drop(held);
}

#[test]
fn the_copies_of_a_backend_that_leaves_the_rotation_are_cut() {
    let leave: [fn(&Fixture, BackendId); 5] = [
        |fixture, backend| fixture.admission.set_draining(backend, true),
        |fixture, backend| fixture.admission.set_cordon(backend, Cordon::Draining),
        |fixture, backend| fixture.admission.mark_hung(backend, fixture.now),
        |fixture, _| fixture.admission.abort_all(),
        |fixture, _| drop(fixture.admission.apply(&[], RULES, fixture.now)),
    ];
    for (number, leave) in leave.into_iter().enumerate() {
        let (fixture, backend) = one_backend(2);
        let copy = fixture.admission.enter_copy(&fixture.request(0, 10)).unwrap();
        leave(&fixture, backend);
        assert!(is_cut(&copy), "{number}");
        let next = fixture.admission.enter_copy(&fixture.request(0, 10));
        assert!(next.is_none_or(|copy| is_cut(&copy)), "{number}");
    }
}

#[test]
fn copies_are_spread_over_the_backends_of_their_pool() {
    let fixture = Fixture::new(&[spec("one", 2, limits(64, 1), vec![])]);
    let mut request = fixture.request(0, 10);
    request.need.output_tokens = 128;
    let copies: Vec<Lease> = (0..80).filter_map(|_| fixture.admission.enter_copy(&request)).collect();
    let one = copies[0].backend();
    let (on_one, on_other): (Vec<Lease>, Vec<Lease>) = copies.into_iter().partition(|copy| copy.backend() == one);
    assert_eq!((on_one.len(), on_other.len()), (40, 40));
    let other = on_other[0].backend();
    drop(on_other);
    for _ in 0..3 {
        let AdmissionDecision::Granted(lease) = fixture.admission.enter(request.clone()) else {
            panic!("there is room")
        };
        assert_eq!(lease.backend(), other, "a request avoids the engine that copies slow");
    }
}

proptest! {
    /// The room that a request gets at once, and which waiter is next, do not depend on copies.
    #[test]
    fn requests_get_what_they_would_get_without_copies(
        steps in proptest::collection::vec((0..4u8, any::<usize>(), 1..3_000u64, 1..3u32), 1..80),
    ) {
        let with_copies = |copies: bool| {
            let fixture = Fixture::new(&[spec("one", 2, limits(4, 1), vec![])]);
            let (mut leases, mut tickets, mut running) = (Vec::new(), Vec::new(), Vec::new());
            let mut seen = Vec::new();
            for (step, index, prompt, slots) in &steps {
                let mut request = fixture.request(0, *prompt);
                request.need.slots = *slots;
                // Each request has one backend to go to.
                request.avoid.push(fixture.layout.backends[0][index % 2]);
                match step {
                    0 => match fixture.admission.enter(request) {
                        AdmissionDecision::Granted(lease) => leases.push(lease),
                        AdmissionDecision::Queued(ticket, _) => tickets.push(ticket),
                        other => seen.push(format!("{other:?}")),
                    },
                    1 if !leases.is_empty() => drop(leases.swap_remove(index % leases.len())),
                    2 if copies => running.extend(fixture.admission.enter_copy(&request)),
                    3 if !running.is_empty() => drop(running.swap_remove(index % running.len())),
                    _ => {}
                }
                if let Some(at) = tickets.iter_mut().position(|ticket| match poll(ticket) {
                    Some(WaitResult::Granted(lease)) => { leases.push(lease); true }
                    _ => false,
                }) {
                    tickets.remove(at);
                }
                let used = fixture.usage(0);
                seen.push(format!("{} {} {used:?} {:?}", leases.len(), tickets.len(), fixture.admission.check_invariants()));
            }
            seen
        };
        prop_assert_eq!(with_copies(true), with_copies(false));
    }
}
