//! Admission as a whole.
//!
//! Rules are tested by examples, and the conservation of capacity by a property.

mod conservation;
mod copies;
mod cordon;
mod divided;
mod fair;
mod foreign;
mod held;
mod large;
mod origins;
mod overtaking;
mod prefixes;
mod cache_events;
mod ranks;
mod replacement;
mod serving;
mod trial;
mod wide;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use smallvec::smallvec;
use tokio::time::Instant;

use super::*;
use sluice_config::{Address, Endpoint, Policy};
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::{LimitUnit, Route, ShedReason, TooLarge};

const RULES: HealthRules = HealthRules {
    probe_failures: 2,
    request_failures: 3,
    eject_base: Duration::from_secs(1),
    eject_max: Duration::from_secs(30),
    max_ejected: 0.5,
};

fn spec(name: &str, backends: usize, limits: BackendLimits, spill: Vec<usize>) -> PoolSpec {
    let backends = (0..backends)
        .map(|i| BackendSpec { name: format!("{name}{i}").into(), address: address(i), weight: 1.0 })
        .collect();
    let rules = PoolRules {
        policy: Policy::LeastWork,
        limits,
        queue_length: 8,
        queue_timeout: Duration::from_secs(20),
        hold: None,
        order: QueueOrder::FIFO,
        by_priority: None,
    };
    PoolSpec { name: name.into(), rules, backends, spill }
}

fn address(number: usize) -> Arc<Address> {
    let endpoint =
        Endpoint { https: false, host: "10.0.0.1".to_owned(), port: number as u16 + 1, prefix: String::new() };
    Arc::new(Address::new(endpoint, None, None))
}

fn limits(slots: u32, permits: u32) -> BackendLimits {
    let long_prefix = Some(LongPrefix { threshold: 1_000, slots: permits });
    BackendLimits { slots, tokens: None, prefill_tokens: None, long_prefix }
}

/// The short and the long pool of the documented example.
fn two_pools() -> Vec<PoolSpec> {
    vec![spec("short", 1, limits(4, 1), vec![]), spec("long", 1, limits(4, 2), vec![0])]
}

struct Fixture {
    admission: Arc<Admission>,
    layout: PoolLayout,
    now: Instant,
}

impl Fixture {
    fn new(specs: &[PoolSpec]) -> Self {
        let now = Instant::now();
        let admission = Admission::new(now, RULES, 1);
        let layout = admission.apply(specs, RULES, now);
        for backend in layout.backends.iter().flatten() {
            admission.record_probe(*backend, true, now);
        }
        Self { admission, layout, now }
    }

    fn request(&self, home: usize, prompt_tokens: u64) -> AdmissionRequest {
        let spill = if home == 1 { smallvec![self.layout.pools[0]] } else { smallvec![] };
        let need = Need { slots: 1, prompt_tokens, output_tokens: 10 };
        let asks = Asks { model: Some(ModelKey::of("m")), prompt_tokens, ..Asks::default() };
        let (layout, home) = (self.layout.number, self.layout.pools[home]);
        AdmissionRequest { spill, asks, ..AdmissionRequest::new(layout, home, need, self.now) }
    }

    fn granted(&self, home: usize, prompt_tokens: u64) -> Lease {
        match self.admission.enter(self.request(home, prompt_tokens)) {
            AdmissionDecision::Granted(lease) => lease,
            other => panic!("expected a lease, got {other:?}"),
        }
    }

    fn queued(&self, home: usize, prompt_tokens: u64) -> Ticket {
        match self.admission.enter(self.request(home, prompt_tokens)) {
            AdmissionDecision::Queued(ticket, _) => ticket,
            other => panic!("expected a ticket, got {other:?}"),
        }
    }

    fn usage(&self, pool: usize) -> CapacityUsage {
        self.admission.view()[pool].backends[0].used
    }
}

fn poll(ticket: &mut Ticket) -> Option<WaitResult<Lease>> {
    let mut cx = Context::from_waker(Waker::noop());
    match pin!(ticket).poll(&mut cx) {
        Poll::Ready(waited) => Some(waited),
        Poll::Pending => None,
    }
}

fn lease_of(ticket: &mut Ticket) -> Lease {
    match poll(ticket) {
        Some(WaitResult::Granted(lease)) => lease,
        other => panic!("expected a lease, got {other:?}"),
    }
}

#[test]
fn long_prompts_go_where_fewest_long_prefills_run_then_wait_and_the_first_token_lets_the_next_in() {
    let fixture = Fixture::new(&two_pools());
    let mut at_home = fixture.granted(1, 16_000);
    let spilled = fixture.granted(1, 16_000);
    let also_home = fixture.granted(1, 16_000);
    assert_eq!((at_home.pool(), also_home.pool()), (fixture.layout.pools[1], fixture.layout.pools[1]));
    assert_eq!(spilled.pool(), fixture.layout.pools[0]);
    let mut waiting = fixture.queued(1, 16_000);
    let short = fixture.granted(0, 200);
    assert!(poll(&mut waiting).is_none());
    at_home.first_token();
    assert_eq!(lease_of(&mut waiting).pool(), fixture.layout.pools[1]);
    drop((at_home, also_home, spilled, short));
    assert_eq!((fixture.usage(0), fixture.usage(1)), (CapacityUsage::default(), CapacityUsage::default()));
}

#[test]
fn a_spilled_prompt_that_waits_comes_after_those_who_are_at_home() {
    let fixture = Fixture::new(&two_pools());
    let mut holders: Vec<Lease> = (0..4).map(|_| fixture.granted(0, 200)).collect();
    let long: Vec<Lease> = (0..2).map(|_| fixture.granted(1, 16_000)).collect();
    assert!(long.iter().all(|lease| lease.pool() == fixture.layout.pools[1]), "the short side has no slot");
    let mut spilling = fixture.queued(1, 16_000);
    let mut home = fixture.queued(0, 200);
    drop(holders.pop());
    assert!(poll(&mut spilling).is_none());
    drop(lease_of(&mut home));
    assert_eq!(lease_of(&mut spilling).pool(), fixture.layout.pools[0]);
    drop(long);
}

#[test]
fn a_short_prompt_may_pass_one_that_waits_only_for_a_permit() {
    let fixture = Fixture::new(&[spec("one", 1, limits(3, 1), vec![])]);
    let _long = fixture.granted(0, 16_000);
    let mut second_long = fixture.queued(0, 16_000);
    let passing = fixture.granted(0, 200);
    assert!(poll(&mut second_long).is_none());
    drop(passing);
}

#[test]
fn requests_that_wait_are_shown_until_they_are_granted_or_leave() {
    let fixture = Fixture::new(&two_pools());
    let leases: Vec<Lease> = (0..4).map(|_| fixture.granted(0, 100)).collect();
    let later = fixture.now + Duration::from_secs(7);
    assert_eq!(fixture.admission.waiting(later), []);
    let (ticket, other) = (fixture.queued(0, 300), fixture.queued(0, 200));
    let shown = |prompt_tokens| WaitingRequest { waited: Duration::from_secs(7), prompt_tokens };
    assert_eq!(fixture.admission.waiting(later), [shown(300), shown(200)]);
    drop(ticket);
    assert_eq!(fixture.admission.waiting(later), [shown(200)]);
    drop(leases);
    assert_eq!(fixture.admission.waiting(later), [], "a granted one holds its capacity already");
    drop(other);
}

#[test]
fn a_full_queue_sheds_the_newcomer_and_a_departure_makes_room() {
    let fixture = Fixture::new(&[spec("one", 1, limits(1, 1), vec![])]);
    let lease = fixture.granted(0, 10);
    let mut tickets: Vec<Ticket> = (0..8).map(|_| fixture.queued(0, 10)).collect();
    assert!(matches!(fixture.admission.enter(fixture.request(0, 10)), AdmissionDecision::Shed(ShedReason::QueueFull)));
    drop(tickets.remove(3));
    tickets.push(fixture.queued(0, 10));
    drop(lease);
    for mut ticket in tickets {
        drop(lease_of(&mut ticket));
    }
    assert_eq!(fixture.usage(0), CapacityUsage::default());
}

#[test]
fn a_ticket_dropped_after_its_grant_gives_the_grant_to_the_next() {
    let fixture = Fixture::new(&[spec("one", 1, limits(1, 1), vec![])]);
    let lease = fixture.granted(0, 10);
    let first = fixture.queued(0, 10);
    let mut second = fixture.queued(0, 10);
    drop(lease);
    drop(first);
    drop(lease_of(&mut second));
    assert_eq!(fixture.usage(0), CapacityUsage::default());
}

#[test]
fn without_a_backend_in_rotation_requests_are_shed_at_once() {
    let fixture = Fixture::new(&two_pools());
    fixture.admission.set_draining(fixture.layout.backends[0][0], true);
    assert!(matches!(fixture.admission.enter(fixture.request(0, 10)), AdmissionDecision::Shed(ShedReason::NoBackend)));
    fixture.admission.set_draining(fixture.layout.backends[0][0], false);
    drop(fixture.granted(0, 10));
}

#[test]
fn a_retry_avoids_the_backend_that_failed() {
    let fixture = Fixture::new(&[spec("one", 2, limits(4, 1), vec![])]);
    let failed = fixture.granted(0, 10).backend();
    let mut request = fixture.request(0, 10);
    request.avoid.push(failed);
    let AdmissionDecision::Granted(other) = fixture.admission.enter(request.clone()) else {
        panic!("the other has room")
    };
    assert_ne!(other.backend(), failed);
    request.avoid.push(other.backend());
    assert!(matches!(fixture.admission.enter(request), AdmissionDecision::Shed(ShedReason::NoBackend)));
}

#[test]
fn a_reload_changes_limits_under_load_and_sends_waiters_of_a_removed_pool_back() {
    let fixture = Fixture::new(&two_pools());
    let held: Vec<Lease> = (0..4).map(|_| fixture.granted(0, 10)).collect();
    let mut waiting = fixture.queued(0, 10);
    let mut wider = two_pools();
    wider[0].rules.limits.slots = 5;
    fixture.admission.apply(&wider, RULES, fixture.now);
    drop(lease_of(&mut waiting));
    let mut full = (0..2).map(|_| fixture.granted(1, 16_000)).collect::<Vec<_>>();
    full.push(fixture.granted(1, 16_000));
    let mut stranded = fixture.queued(1, 16_000);
    let layout = fixture.admission.apply(&wider[..1], RULES, fixture.now);
    assert_eq!(layout.pools, [fixture.layout.pools[0]]);
    assert!(matches!(poll(&mut stranded), Some(WaitResult::Reclassify)));
    drop((held, full));
    assert_eq!(fixture.admission.load(), (0, 0));
    assert_eq!(fixture.admission.view().len(), 1, "a removed pool disappears once it carries nothing");
}

#[test]
fn retry_after_is_not_stretched_by_the_quiet_time_before_a_burst() {
    let mut fixture = Fixture::new(&[spec("one", 1, limits(1, 1), vec![])]);
    let pool = fixture.layout.pools[0];
    drop(fixture.granted(0, 10));
    fixture.now += Duration::from_secs(3_600);
    let lease = fixture.granted(0, 10);
    let waiting = fixture.queued(0, 10);
    fixture.now += Duration::from_millis(200);
    drop((lease, waiting));
    assert_eq!(fixture.admission.retry_after(pool, fixture.now), Duration::from_secs(1), "one left in 200 ms");
}

#[test]
fn a_request_that_enters_a_removed_pool_is_reclassified() {
    let fixture = Fixture::new(&two_pools());
    let request = fixture.request(1, 10);
    let mut published = false;
    fixture.admission.apply_with(&two_pools()[..1], RULES, fixture.now, |layout| published = layout.pools.len() == 1);
    assert!(published && matches!(fixture.admission.enter(request), AdmissionDecision::Reclassify));
}

#[test]
fn a_request_that_enters_a_just_removed_pool_is_reclassified_instead_of_queued() {
    let fixture = Fixture::new(&two_pools());
    let request = AdmissionRequest { spill: smallvec![fixture.layout.pools[0]], ..fixture.request(1, 16_000) };
    fixture.admission.apply(&two_pools()[..1], RULES, fixture.now);
    assert!(matches!(fixture.admission.enter(fixture.request(1, 16_000)), AdmissionDecision::Reclassify));
    assert!(matches!(fixture.admission.enter(request), AdmissionDecision::Reclassify));
    assert_eq!(fixture.admission.load(), (0, 0));
}

#[test]
fn a_request_whose_spill_pool_was_just_removed_stays_at_home() {
    let fixture = Fixture::new(&two_pools());
    drop(fixture.granted(0, 10));
    fixture.admission.apply(&[spec("long", 1, limits(4, 2), vec![])], RULES, fixture.now);
    let lease = fixture.granted(1, 16_000);
    assert_eq!(lease.pool(), fixture.layout.pools[1]);
}

#[test]
fn a_request_that_a_reload_bars_from_its_pool_is_reclassified_instead_of_shed() {
    let mut pools = two_pools();
    let fixture = Fixture::new(&pools);
    pools[0].rules.limits = limits(4, 0);
    let layout = fixture.admission.apply(&pools, RULES, fixture.now);
    let long = fixture.request(0, 16_000);
    assert!(matches!(fixture.admission.enter(long.clone()), AdmissionDecision::Reclassify));
    let again = AdmissionRequest { layout: layout.number, ..long };
    assert!(matches!(fixture.admission.enter(again), AdmissionDecision::Shed(ShedReason::NoBackend)));
}

#[test]
fn a_waiter_that_a_reload_makes_short_gets_room_without_a_permit_and_one_that_it_makes_long_waits_for_one() {
    let with_threshold = |threshold| {
        let long_prefix = Some(LongPrefix { threshold, slots: 1 });
        spec("one", 1, BackendLimits { long_prefix, ..limits(4, 1) }, vec![])
    };
    let fixture = Fixture::new(&[with_threshold(1_000)]);
    let _long = fixture.granted(0, 16_000);
    let (mut longer, mut shorter) = (fixture.queued(0, 6_000), fixture.queued(0, 2_000));
    assert!(poll(&mut shorter).is_none());
    fixture.admission.apply(&[with_threshold(4_000)], RULES, fixture.now);
    let _short = lease_of(&mut shorter);
    assert!(poll(&mut longer).is_none());
    assert_eq!(fixture.admission.check_invariants(), Ok(()));
    let _full: Vec<Lease> = (0..2).map(|_| fixture.granted(0, 3_000)).collect();
    let mut rest = fixture.queued(0, 3_000);
    fixture.admission.apply(&[with_threshold(1_000)], RULES, fixture.now);
    drop(_full);
    assert!(poll(&mut longer).is_none() && poll(&mut rest).is_none());
    assert_eq!(fixture.admission.check_invariants(), Ok(()));
}

#[test]
fn an_engine_that_a_reload_moves_to_another_pool_is_ready_there_at_once() {
    let mut pools = vec![spec("all", 2, limits(4, 2), vec![])];
    let fixture = Fixture::new(&pools);
    let moved = BackendSpec { name: "long0".into(), ..pools[0].backends.pop().unwrap() };
    pools.push(PoolSpec { name: "long".into(), backends: vec![moved], ..pools[0].clone() });
    let layout = fixture.admission.apply(&pools, RULES, fixture.now);
    let request = AdmissionRequest { home: layout.pools[1], ..fixture.request(0, 16_000) };
    assert!(
        matches!(fixture.admission.enter(request), AdmissionDecision::Granted(lease) if lease.backend() == layout.backends[1][0])
    );
}

#[test]
fn a_hung_backend_is_taken_out_and_its_exchanges_are_cut() {
    let fixture = Fixture::new(&two_pools());
    let lease = fixture.granted(0, 10);
    let limit = Duration::from_secs(30);
    assert!(fixture.admission.silent_backends(limit, fixture.now).is_empty());
    let later = fixture.now + Duration::from_secs(31);
    assert_eq!(fixture.admission.silent_backends(limit, later), [lease.backend()]);
    let at_client = lease.client_wait();
    assert!(
        fixture.admission.silent_backends(limit, later).is_empty(),
        "a client that does not read is not its silence"
    );
    drop(at_client);
    lease.record_progress(later);
    assert!(fixture.admission.silent_backends(limit, later).is_empty());
    fixture.admission.mark_hung(lease.backend(), later);
    assert!(lease.abort_token().is_cancelled());
    assert!(matches!(fixture.admission.enter(fixture.request(0, 10)), AdmissionDecision::Shed(ShedReason::NoBackend)));
}

#[test]
fn round_robin_gives_each_its_weight_and_steps_over_the_full() {
    let mut specs = vec![spec("one", 2, limits(40, 1), vec![])];
    specs[0].rules.policy = Policy::RoundRobin;
    specs[0].backends[0].weight = 2.0;
    let fixture = Fixture::new(&specs);
    let leases: Vec<Lease> = (0..6).map(|_| fixture.granted(0, 10)).collect();
    let order: Vec<usize> = leases.iter().map(|lease| lease.backend().index()).collect();
    assert_eq!(order, [0, 1, 0, 0, 1, 0]);
    fixture.admission.set_draining(leases[0].backend(), true);
    assert_eq!(fixture.granted(0, 10).backend().index(), 1);
}

#[test]
fn ids_of_pools_are_positions_until_a_reload() {
    assert_eq!(Fixture::new(&two_pools()).layout.pools, [PoolId::new(0), PoolId::new(1)]);
}

/// Of many backends a few are compared, including the runner-up of the last choice: with it, six
/// are as good as sixteen where engines differ.
#[test]
fn a_choice_among_many_backends_compares_the_runner_up_of_the_one_before() {
    let fixture = Fixture::new(&[spec("one", 64, limits(4, 1), vec![])]);
    let (request, pool) = (fixture.request(0, 10), fixture.layout.pools[0]);
    let mut state = fixture.admission.shared.lock();
    for _ in 0..50 {
        state.pick(pool, &request).expect("all have room");
        let position = state.pools[0].rooms.runner_up().expect("others were compared");
        let offers = state.find(pool, &request, &mut state.rng.clone());
        assert_eq!(offers.len(), 6);
        let compared = |id| state.backend(id).is_some_and(|found| found.place.position == position);
        assert!(offers.iter().any(|offer| compared(offer.candidate.id)));
    }
}

/// Turns stay exact among more backends than other policies compare.
#[test]
fn round_robin_takes_turns_among_many() {
    let mut many = spec("one", 40, limits(4, 1), vec![]);
    many.rules.policy = Policy::RoundRobin;
    let fixture = Fixture::new(&[many]);
    let leases: Vec<Lease> = (0..80).map(|_| fixture.granted(0, 10)).collect();
    let mut counts = [0; 40];
    leases.iter().for_each(|lease| counts[lease.backend().index()] += 1);
    assert_eq!(counts, [2; 40]);
}
