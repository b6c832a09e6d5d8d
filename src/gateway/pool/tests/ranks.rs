//! Data-parallel ranks of one server.
//!
//! They have separate capacity, and enter and leave rotation together.

use super::*;
use crate::origin::Origin;
use crate::pool::replacement::{Irreplaceable, Replacement};

/// One pool: the ranks `one0` and `one1` of a server, and `one2` at another address.
fn ranks() -> Fixture {
    let mut pool = spec("one", 3, limits(2, 1), vec![]);
    for (rank, backend) in pool.backends.iter_mut().take(2).enumerate() {
        backend.address = Arc::new(Address { rank: Some(rank as u16), ..Address::clone(&address(7)) });
    }
    Fixture::new(&[pool])
}

impl Fixture {
    fn states(&self) -> Vec<&'static str> {
        self.admission.view()[0].backends.iter().map(BackendView::state).collect()
    }

    fn backend(&self, at: usize) -> BackendId {
        self.layout.backends[0][at]
    }
}

#[test]
fn each_rank_has_its_own_slots() {
    let fixture = ranks();
    let leases: Vec<Lease> = (0..6).map(|_| fixture.granted(0, 10)).collect();
    let _waits = fixture.queued(0, 10);
    let slots: Vec<u32> = fixture.admission.view()[0].backends.iter().map(|backend| backend.used.slots).collect();
    assert_eq!(slots, [2, 2, 2]);
    let of_rank: Vec<&Lease> = leases.iter().filter(|lease| lease.address().rank == Some(1)).collect();
    assert_eq!(of_rank[0].server().as_slice(), [fixture.backend(1), fixture.backend(0)]);
    let alone = leases.iter().find(|lease| lease.address().rank.is_none()).unwrap();
    assert_eq!(alone.server().as_slice(), [fixture.backend(2)]);
}

#[test]
fn drain_and_cordon_reach_all_ranks_of_the_server() {
    let fixture = ranks();
    fixture.admission.set_draining(fixture.backend(1), true);
    assert_eq!(fixture.states(), ["draining", "draining", "ready"]);
    fixture.admission.set_draining(fixture.backend(0), false);
    fixture.admission.set_cordon(fixture.backend(0), Cordon::Starting);
    assert_eq!(fixture.states(), ["starting", "starting", "ready"]);
    fixture.admission.set_cordon(fixture.backend(1), Cordon::Open);
    fixture.admission.set_bounds([(fixture.backend(0), Bound::Ceiling(Some(1)))]);
    let slots: Vec<u32> = fixture.admission.view()[0].backends.iter().map(|backend| backend.limits.slots).collect();
    assert_eq!((fixture.states(), slots), (vec!["ready"; 3], vec![1, 1, 2]));
}

#[test]
fn an_ejection_takes_all_ranks_out_and_one_request_in_probation_brings_all_back() {
    let fixture = ranks();
    let (admission, now) = (&fixture.admission, fixture.now);
    (0..3).for_each(|_| admission.failure(fixture.backend(1), BackendFault::Connect, now));
    assert_eq!(fixture.states(), ["ejected", "ejected", "ready"]);
    let later = now + Duration::from_secs(2);
    for at in [0, 1] {
        admission.record_probe(fixture.backend(at), true, later);
    }
    assert_eq!(fixture.states(), ["probation", "probation", "ready"]);
    admission.set_draining(fixture.backend(2), true);
    let mut trial = fixture.granted(0, 10);
    trial.set_origin(Origin::default());
    trial.success(later);
    assert_eq!(fixture.states(), ["ready", "ready", "draining"]);
}

#[test]
fn a_rank_that_the_engine_lacks_is_down_alone_and_its_facts_are_due() {
    let fixture = ranks();
    let leases: Vec<Lease> = (0..3).map(|_| fixture.granted(0, 10)).collect();
    let lease = leases.iter().find(|lease| lease.address().rank == Some(1)).unwrap();
    lease.refused_by_engine(Lack::Rank, fixture.now);
    assert_eq!(fixture.states(), ["ready", "down", "ready"]);
    let due: Vec<bool> = fixture.admission.view()[0].backends.iter().map(|backend| backend.facts_due).collect();
    assert!(due[1] && !due[2], "{due:?}");
}

#[test]
fn the_share_of_ejected_backends_counts_servers() {
    let fixture = ranks();
    let failed = |at| {
        let report = || {
            fixture.admission.shared.failure(fixture.backend(at), BackendFault::Timeout, Origin::default(), fixture.now)
        };
        [report(), report(), report()][2].verdict
    };
    assert!(matches!(failed(0), Verdict::Ejected(_)), "one of two servers may be out");
    assert_eq!(failed(2), Verdict::Spared(Spared::OnlyOne));
}

#[test]
fn a_rank_is_no_replacement_for_its_own_server() {
    let fixture = ranks();
    let check = || {
        let leaving = Replacement { pool: "one", backend: "one0", spill: vec![], headroom: 0.9 };
        leaving.check(&fixture.admission.view(), |_| vec!["m".to_owned()])
    };
    assert_eq!(check(), Ok(()));
    fixture.admission.set_draining(fixture.backend(2), true);
    assert_eq!(check(), Err(Irreplaceable::Unserved("m".to_owned())));
}
