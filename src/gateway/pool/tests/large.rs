//! Pools with many backends.
//!
//! They have more backends than a choice compares.

use super::*;

fn pool_of(policy: Policy, backends: usize, slots: u32) -> Fixture {
    let mut all = spec("all", backends, limits(slots, 1), vec![]);
    all.rules.policy = policy;
    Fixture::new(&[all])
}

fn requests(fixture: &Fixture) -> Vec<u32> {
    fixture.admission.view()[0].backends.iter().map(|backend| backend.used.requests).collect()
}

#[test]
fn the_only_backend_of_many_that_has_room_or_a_permit_is_found() {
    for policy in [Policy::LeastWork, Policy::RoundRobin] {
        let fixture = pool_of(policy, 100, 2);
        let mut leases: Vec<Lease> = (0..200).map(|_| fixture.granted(0, 200)).collect();
        for at in [17, 71, 133] {
            let free = leases.swap_remove(at).backend();
            leases.push(fixture.granted(0, 200));
            assert_eq!(leases.last().unwrap().backend(), free);
        }
        drop(leases);
        let mut long: Vec<Lease> = (0..100).map(|_| fixture.granted(0, 16_000)).collect();
        let mut waiting = fixture.queued(0, 16_000);
        long[42].first_token();
        assert_eq!(lease_of(&mut waiting).backend(), long[42].backend());
        fixture.admission.check_invariants().unwrap();
    }
}

#[test]
fn many_backends_share_the_work_by_any_policy() {
    for policy in [Policy::LeastWork, Policy::FewestRequests, Policy::TwoChoices, Policy::RoundRobin] {
        let fixture = pool_of(policy, 64, 1_000);
        let _leases: Vec<Lease> = (0..6_400).map(|_| fixture.granted(0, 200)).collect();
        let counts = requests(&fixture);
        assert!(counts.iter().all(|count| (80..=125).contains(count)), "{policy:?}: {counts:?}");
    }
}

#[test]
fn a_backend_that_a_reload_takes_away_leaves_its_position_to_another() {
    let fixture = pool_of(Policy::LeastWork, 20, 1);
    let busy: Vec<Lease> = (0..20).map(|_| fixture.granted(0, 200)).collect();
    let mut fewer = spec("all", 20, limits(1, 1), vec![]);
    fewer.backends.drain(..10);
    let layout = fixture.admission.apply(&[fewer], RULES, fixture.now);
    let fixture = Fixture { layout, ..fixture };
    let kept: Vec<BackendId> = fixture.layout.backends[0].clone();
    let mut waiting = fixture.queued(0, 200);
    let (gone, stays): (Vec<_>, Vec<_>) = busy.into_iter().partition(|lease| !kept.contains(&lease.backend()));
    drop(gone);
    assert!(poll(&mut waiting).is_none(), "those that left take no more");
    fixture.admission.check_invariants().unwrap();
    drop(stays);
    assert!(kept.contains(&lease_of(&mut waiting).backend()));
}
