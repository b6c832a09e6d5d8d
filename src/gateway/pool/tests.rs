//! Admission as a whole: rules by example, conservation by property.

mod cordon;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use proptest::prelude::*;
use smallvec::smallvec;
use tokio::time::Instant;

use super::*;
use crate::config::{Endpoint, Policy};
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::ShedReason;

const RULES: HealthRules = HealthRules {
    probe_failures: 2,
    request_failures: 3,
    eject_base: Duration::from_secs(1),
    eject_max: Duration::from_secs(30),
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
        order: QueueOrder::FIFO,
    };
    PoolSpec { name: name.into(), rules, backends, spill }
}

fn address(number: usize) -> Arc<Address> {
    let endpoint = Endpoint { host: "10.0.0.1".to_owned(), port: number as u16 + 1, prefix: String::new() };
    Arc::new(Address { authority: endpoint.authority().into(), endpoint, api_key: None })
}

fn limits(slots: u32, permits: u32) -> BackendLimits {
    let long_prefix = Some(LongPrefix { threshold: 1_000, slots: permits });
    BackendLimits { slots, tokens: None, prefill_tokens: None, long_prefix }
}

/// The short and the long pool of the product's own example.
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
        AdmissionRequest {
            layout: self.layout.number,
            home: self.layout.pools[home],
            spill,
            need: Need { slots: 1, prompt_tokens, output_tokens: 10 },
            priority: 0,
            arrived: self.now,
            avoid: smallvec![],
        }
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

fn poll(ticket: &mut Ticket) -> Option<WaitResult> {
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
fn no_request_overtakes_one_that_waits_for_slots() {
    let fixture = Fixture::new(&[spec("one", 1, limits(4, 1), vec![])]);
    let _two = (fixture.granted(0, 10), fixture.granted(0, 10));
    let mut wide = fixture.request(0, 10);
    wide.need.slots = 3;
    let AdmissionDecision::Queued(mut wide, _) = fixture.admission.enter(wide) else {
        panic!("three of two free slots")
    };
    let mut behind = fixture.queued(0, 10);
    drop(_two);
    let wide = lease_of(&mut wide);
    assert_eq!(fixture.usage(0).slots, 4, "three for the wide one and one for the next");
    drop((wide, lease_of(&mut behind)));
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
    assert!(lease.hang_token().is_cancelled());
    assert!(matches!(fixture.admission.enter(fixture.request(0, 10)), AdmissionDecision::Shed(ShedReason::NoBackend)));
}

/// One move in a random history.
#[derive(Clone, Debug)]
enum Move {
    Enter { home: usize, prompt: u64, slots: u32, priority: i32 },
    Poll(usize),
    Abandon(usize),
    FirstToken(usize),
    Finish(usize),
    Resize { slots: u32, permits: u32, tokens: Option<u64> },
    Drain { backend: usize, on: bool },
    Fail { backend: usize, hung: bool },
    Probe { backend: usize, up: bool },
    DropPool,
    Wait(u64),
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        6 => (0..2usize, 1..3_000u64, 1..4u32, -1..2i32)
            .prop_map(|(home, prompt, slots, priority)| Move::Enter { home, prompt, slots, priority }),
        4 => any::<usize>().prop_map(Move::Poll),
        2 => any::<usize>().prop_map(Move::Abandon),
        3 => any::<usize>().prop_map(Move::FirstToken),
        4 => any::<usize>().prop_map(Move::Finish),
        1 => (1..6u32, 0..3u32, proptest::option::of(100..5_000u64))
            .prop_map(|(slots, permits, tokens)| Move::Resize { slots, permits, tokens }),
        1 => (0..4usize, any::<bool>()).prop_map(|(backend, on)| Move::Drain { backend, on }),
        1 => (0..4usize, any::<bool>()).prop_map(|(backend, hung)| Move::Fail { backend, hung }),
        2 => (0..4usize, proptest::bool::weighted(0.8)).prop_map(|(backend, up)| Move::Probe { backend, up }),
        1 => Just(Move::DropPool),
        1 => (0..3_000u64).prop_map(Move::Wait),
    ]
}

fn any_of<T>(list: &mut [T], index: usize) -> Option<&mut T> {
    let len = list.len();
    if len == 0 { None } else { list.get_mut(index % len) }
}

fn four_backends(slots: u32, permits: u32, tokens: Option<u64>, order: QueueOrder) -> Vec<PoolSpec> {
    let limits = |permits| BackendLimits { tokens, ..limits(slots, permits) };
    let mut specs = vec![spec("short", 2, limits(permits.min(1)), vec![]), spec("long", 2, limits(permits), vec![0])];
    specs.iter_mut().for_each(|spec| spec.rules.order = order);
    specs
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Whatever happens in whatever order: what is carried equals what the leases hold, nothing
    /// is idle while a waiter could use it, and in the end all counters are zero.
    #[test]
    fn permits_are_conserved_under_any_order_of_events(
        history in proptest::collection::vec(moves(), 1..120),
        shortest_first in any::<bool>(),
    ) {
        let aging = Duration::from_micros(if shortest_first { 250 } else { 0 });
        let order = QueueOrder { aging_per_token: aging };
        let mut specs = four_backends(3, 1, None, order);
        let mut fixture = Fixture::new(&specs);
        let (mut leases, mut tickets): (Vec<Lease>, Vec<Ticket>) = (Vec::new(), Vec::new());
        for step in history {
            match step {
                Move::Enter { home, prompt, slots, priority } => {
                    let mut request = fixture.request(home, prompt);
                    request.need.slots = slots;
                    request.priority = priority;
                    match fixture.admission.enter(request) {
                        AdmissionDecision::Granted(lease) => leases.push(lease),
                        AdmissionDecision::Queued(ticket, _) => tickets.push(ticket),
                        AdmissionDecision::Shed(_) | AdmissionDecision::Reclassify => {}
                    }
                }
                Move::Poll(index) => {
                    let waited = any_of(&mut tickets, index).and_then(poll);
                    if let Some(waited) = waited {
                        let index = index % tickets.len();
                        tickets.swap_remove(index);
                        if let WaitResult::Granted(lease) = waited {
                            leases.push(lease);
                        }
                    }
                }
                Move::Abandon(index) if !tickets.is_empty() => {
                    let index = index % tickets.len();
                    drop(tickets.swap_remove(index));
                }
                Move::FirstToken(index) => {
                    if let Some(lease) = any_of(&mut leases, index) {
                        lease.first_token();
                    }
                }
                Move::Finish(index) if !leases.is_empty() => {
                    let index = index % leases.len();
                    let lease = leases.swap_remove(index);
                    lease.success();
                }
                Move::Resize { slots, permits, tokens } => {
                    specs = four_backends(slots, permits, tokens, order);
                    fixture.layout = fixture.admission.apply(&specs, RULES, fixture.now);
                }
                Move::Drain { backend, on } => {
                    let id = BackendId::new(backend);
                    fixture.admission.set_draining(id, on);
                }
                Move::Fail { backend, hung } => {
                    let id = BackendId::new(backend);
                    if hung {
                        fixture.admission.mark_hung(id, fixture.now);
                    } else {
                        fixture.admission.failure(id, BackendFault::Connect, fixture.now);
                    }
                }
                Move::Probe { backend, up } => {
                    fixture.admission.record_probe(BackendId::new(backend), up, fixture.now);
                }
                Move::DropPool => {
                    fixture.admission.apply(&specs[..1], RULES, fixture.now);
                    fixture.layout = fixture.admission.apply(&specs, RULES, fixture.now);
                    for id in 0..4 {
                        fixture.admission.record_probe(BackendId::new(id), true, fixture.now);
                    }
                }
                Move::Wait(ms) => fixture.now += Duration::from_millis(ms),
                Move::Abandon(_) | Move::Finish(_) => {}
            }
            prop_assert_eq!(fixture.admission.check_invariants(), Ok(()));
        }
        drop((leases, tickets));
        prop_assert_eq!(fixture.admission.load(), (0, 0));
        prop_assert_eq!(fixture.admission.check_invariants(), Ok(()));
        for pool in fixture.admission.view() {
            for backend in pool.backends {
                prop_assert_eq!(backend.used, CapacityUsage::default());
            }
        }
    }
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
