//! Shares of a ledger.
//!
//! Such shares are one more bound, and admission measures usage and wants for the ledger.

use super::*;
use crate::pool::divided::TICK;

const LIMITS: BackendLimits = BackendLimits {
    slots: 8,
    tokens: Some(4_000),
    prefill_tokens: Some(2_500),
    long_prefix: Some(LongPrefix { threshold: 1_000, slots: 2 }),
};

fn divided() -> Fixture {
    let fixture = Fixture::new(&[spec("one", 1, LIMITS, vec![])]);
    fixture.admission.divide();
    fixture
}

fn share(slots: u32, tokens: u64, prefill_tokens: u64, permits: u32) -> Share {
    Share { slots, tokens, prefill_tokens, permits }
}

fn give(fixture: &Fixture, share: Share) {
    fixture.admission.set_ledger_shares(None, |_, _, _, _| share);
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn a_share_of_no_slots_admits_nothing_and_a_larger_one_what_waits() {
    let fixture = divided();
    let mut waiting: Vec<Ticket> = (0..3).map(|_| fixture.queued(0, 10)).collect();
    give(&fixture, share(0, 4_000, 2_500, 2));
    assert!(waiting.iter_mut().all(|ticket| poll(ticket).is_none()));
    give(&fixture, share(2, 4_000, 2_500, 2));
    let leases: Vec<Lease> = waiting[..2].iter_mut().map(lease_of).collect();
    assert!(poll(&mut waiting[2]).is_none());
    give(&fixture, share(0, 4_000, 2_500, 2));
    drop(leases);
    assert!(poll(&mut waiting[2]).is_none(), "what is given back is not used again");
    assert_eq!(fixture.usage(0), CapacityUsage::default());
}

#[test]
fn a_ceiling_and_a_share_are_both_bounds() {
    let fixture = divided();
    let admits = |ceiling, slots| {
        fixture.admission.set_bounds([(fixture.layout.backends[0][0], Bound::Ceiling(ceiling))]);
        give(&fixture, share(slots, 4_000, 2_500, 2));
        let mut leases = Vec::new();
        while let AdmissionDecision::Granted(lease) = fixture.admission.enter(fixture.request(0, 10)) {
            leases.push(lease);
        }
        leases.len()
    };
    assert_eq!([admits(Some(2), 3), admits(Some(3), 2), admits(None, 5), admits(Some(2), 0)], [2, 2, 5, 0]);
}

#[test]
fn without_permits_a_long_prompt_waits_and_short_ones_pass() {
    let fixture = divided();
    give(&fixture, share(4, 4_000, 2_500, 0));
    let mut long = fixture.queued(0, 1_500);
    let _short = fixture.granted(0, 10);
    assert!(poll(&mut long).is_none());
    give(&fixture, share(4, 4_000, 2_500, 1));
    assert_eq!(lease_of(&mut long).backend(), fixture.layout.backends[0][0]);
}

#[test]
fn a_need_above_the_share_and_within_the_limit_waits_for_a_larger_share() {
    let fixture = divided();
    give(&fixture, share(3, 4_000, 2_500, 2));
    let mut wide = fixture.request(0, 100);
    wide.need.slots = 6;
    let AdmissionDecision::Queued(mut ticket, _) = fixture.admission.enter(wide.clone()) else { panic!("not queued") };
    let found = &fixture.admission.uses()[0];
    assert_eq!((found.need.slots, found.waiting.slots, found.used.slots), (6, 6, 0));
    give(&fixture, share(6, 4_000, 2_500, 2));
    assert_eq!(lease_of(&mut ticket).backend(), fixture.layout.backends[0][0]);
    wide.need.slots = 9;
    assert!(matches!(fixture.admission.enter(wide), AdmissionDecision::Refused(_)), "above the limit");
}

#[test]
fn a_prompt_above_the_pace_runs_only_where_the_whole_pace_is_the_share() {
    let fixture = divided();
    give(&fixture, share(8, 4_000, 2_499, 2));
    let mut huge = fixture.queued(0, 3_000);
    assert!(poll(&mut huge).is_none(), "other gateways may have prompts in prefill");
    assert_eq!(fixture.admission.uses()[0].need.prefill_tokens, 3_000);
    give(&fixture, share(8, 4_000, 2_500, 2));
    drop(lease_of(&mut huge));
}

#[test]
fn a_backend_that_appears_has_no_share_yet() {
    let fixture = divided();
    give(&fixture, Share::ALL);
    fixture.admission.apply(&[spec("one", 2, LIMITS, vec![])], RULES, fixture.now);
    let uses = fixture.admission.view();
    let shares: Vec<u32> = uses[0].backends.iter().map(|backend| backend.share.unwrap().slots).collect();
    assert_eq!(shares, [Share::ALL.slots, 0]);
}

#[tokio::test(start_paused = true)]
async fn shares_end_by_the_clock_before_anything_is_granted() {
    let fixture = divided();
    let end = |seconds| Some(ShareEnd { at: Instant::now() + Duration::from_secs(seconds), clock: Instant::now });
    fixture.admission.set_ledger_shares(end(2), |_, _, _, _| share(1, 4_000, 2_500, 2));
    let held = fixture.granted(0, 10);
    let mut waiting = fixture.queued(0, 10);
    tokio::time::advance(Duration::from_secs(3)).await;
    drop(held);
    assert!(poll(&mut waiting).is_none(), "a lease that is returned after the end grants nothing");
    let mut later = fixture.queued(0, 10);
    assert!(poll(&mut later).is_none());
    fixture.admission.set_ledger_shares(end(2), |_, _, _, _| share(1, 4_000, 2_500, 2));
    drop(lease_of(&mut waiting));
    fixture.admission.set_ledger_shares(end(0), |_, _, _, _| share(8, 4_000, 2_500, 2));
    assert_eq!(fixture.admission.view()[0].backends[0].share, Some(Share::default()), "ended on their way");
}

#[test]
fn what_waits_is_divided_among_the_backends_of_a_pool() {
    let fixture = Fixture::new(&[spec("one", 4, LIMITS, vec![])]);
    fixture.admission.divide();
    let _waiting: Vec<Ticket> = (0..6).map(|_| fixture.queued(0, 100)).collect();
    for found in fixture.admission.uses() {
        assert_eq!((found.waiting, found.need), (share(2, 165, 150, 0), share(1, 110, 100, 0)));
    }
}

#[test]
fn only_streams_that_were_seen_and_read_at_once_are_settled() {
    let fixture = divided();
    give(&fixture, Share::ALL);
    let mut leases: Vec<Lease> = (0..4).map(|_| fixture.granted(0, 10)).collect();
    leases[0].first_token();
    leases[1..].iter_mut().for_each(|lease| lease.first_token_seen(Instant::now()));
    leases[1].fell_behind();
    let settled = |ticks| {
        for _ in 0..ticks {
            fixture.admission.tick();
        }
        fixture.admission.uses()[0].settled
    };
    assert_eq!((settled(8), settled(1), settled(1)), (0, 0, 2), "{TICK:?}");
    let waiting = leases[2].client_wait();
    assert_eq!((settled(1), settled(1)), (1, 1));
    drop(waiting);
    assert_eq!((settled(1), settled(1)), (1, 2));
    leases.truncate(3);
    assert_eq!(settled(0), 1);
    drop(leases);
    assert_eq!(settled(1), 0);
}

#[test]
fn a_backend_that_another_gateway_has_closed_gets_nothing_and_is_waited_for() {
    let fixture = Fixture::new(&[spec("one", 2, limits(4, 1), vec![])]);
    let close = |closed: &[&str]| {
        fixture.admission.set_closed(|pool, backend| {
            assert_eq!(pool, "one");
            closed.contains(&backend)
        });
        fixture.admission.check_invariants().unwrap();
    };
    let names: Vec<Arc<str>> = fixture.admission.view()[0].backends.iter().map(|view| Arc::clone(&view.name)).collect();
    close(&[&*names[0]]);
    for _ in 0..4 {
        std::mem::forget(fixture.granted(0, 10));
    }
    let views = fixture.admission.view();
    let used: Vec<u32> = views[0].backends.iter().map(|view| view.used.requests).collect();
    assert_eq!((used, views[0].backends[0].state()), (vec![0, 4], "draining"));
    close(&[&*names[0], &*names[1]]);
    let mut waiting = fixture.queued(0, 10);
    assert!(poll(&mut waiting).is_none());
    close(&[&*names[1]]);
    assert_eq!(lease_of(&mut waiting).backend(), fixture.layout.backends[0][0]);
    fixture.admission.set_cordon(fixture.layout.backends[0][1], Cordon::Draining);
    close(&[]);
    assert_eq!(fixture.admission.view()[0].backends[1].state(), "draining", "by this one");
}
