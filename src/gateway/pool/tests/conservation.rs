//! Capacity is conserved.
//!
//! Tested with random histories of all events of admission, including wide requests.

use proptest::prelude::*;

use super::*;

/// One move in a random history.
#[derive(Clone, Debug)]
enum Move {
    Enter {
        home: usize,
        prompt: u64,
        slots: u32,
        priority: i32,
        /// The owner; 0: none.
        owner: u64,
        /// Pinned to this backend and later ones.
        pinned: Option<usize>,
    },
    Poll(usize),
    Abandon(usize),
    FirstToken(usize),
    Charge(usize, u64),
    Settle(usize, u64),
    Finish(usize),
    Resize {
        slots: u32,
        permits: u32,
        tokens: Option<u64>,
    },
    Drain {
        backend: usize,
        on: bool,
    },
    Fail {
        backend: usize,
        hung: bool,
    },
    Ceiling {
        backend: usize,
        slots: Option<u32>,
    },
    Trial {
        backend: usize,
        bound: Option<(u32, u64)>,
    },
    Cordon {
        backend: usize,
        cordon: Cordon,
    },
    StartFailed(usize),
    ContextLimit {
        backend: usize,
        tokens: Option<u64>,
    },
    /// The engine of a lease refuses the model, another model, the route, or the length.
    Refuse {
        lease: usize,
        lack: usize,
    },
    Probe {
        backend: usize,
        up: bool,
    },
    DropPool,
    /// A reload starts or stops spilling from the long pool into the short one.
    Spill(bool),
    /// This gateway is being upgraded: it claims less than the limits. `false`: the upgrade failed,
    /// and the full limits are back.
    Upgrade(bool),
    Wait(u64),
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        6 => (0..2usize, 1..3_000u64, 1..7u32, -1..2i32, 0..4u64, proptest::option::weighted(0.3, 0..4usize)).prop_map(
            |(home, prompt, slots, priority, owner, pinned)| {
                Move::Enter { home, prompt, slots, priority, owner, pinned }
            }
        ),
        4 => any::<usize>().prop_map(Move::Poll),
        2 => any::<usize>().prop_map(Move::Abandon),
        1 => (any::<usize>(), 0..4_000u64).prop_map(|(lease, tokens)| Move::Settle(lease, tokens)),
        3 => any::<usize>().prop_map(Move::FirstToken),
        2 => (any::<usize>(), 0..4_000u64).prop_map(|(lease, prompt)| Move::Charge(lease, prompt)),
        4 => any::<usize>().prop_map(Move::Finish),
        1 => (1..6u32, 0..3u32, proptest::option::of(100..5_000u64))
            .prop_map(|(slots, permits, tokens)| Move::Resize { slots, permits, tokens }),
        1 => (0..4usize, any::<bool>()).prop_map(|(backend, on)| Move::Drain { backend, on }),
        1 => (0..4usize, any::<bool>()).prop_map(|(backend, hung)| Move::Fail { backend, hung }),
        1 => (0..4usize, proptest::option::of(1..4u32)).prop_map(|(backend, slots)| Move::Ceiling { backend, slots }),
        1 => (0..4usize, proptest::option::of((0..4u32, 0..5_000u64)))
            .prop_map(|(backend, bound)| Move::Trial { backend, bound }),
        1 => (0..4usize, cordons()).prop_map(|(backend, cordon)| Move::Cordon { backend, cordon }),
        1 => (0..4usize).prop_map(Move::StartFailed),
        1 => (0..4usize, proptest::option::of(100..5_000u64))
            .prop_map(|(backend, tokens)| Move::ContextLimit { backend, tokens }),
        2 => (any::<usize>(), 0..4usize).prop_map(|(lease, lack)| Move::Refuse { lease, lack }),
        2 => (0..4usize, proptest::bool::weighted(0.8)).prop_map(|(backend, up)| Move::Probe { backend, up }),
        1 => Just(Move::DropPool),
        1 => any::<bool>().prop_map(Move::Spill),
        1 => any::<bool>().prop_map(Move::Upgrade),
        1 => (0..3_000u64).prop_map(Move::Wait),
    ]
}

fn cordons() -> impl Strategy<Value = Cordon> {
    prop_oneof![
        3 => Just(Cordon::Open),
        1 => Just(Cordon::Draining),
        1 => Just(Cordon::Starting),
        1 => Just(Cordon::Down),
        1 => Just(Cordon::Idle)
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
    // While no backend is in rotation, this pool holds requests, and the other one refuses them at
    // once.
    specs[0].rules.hold = Some(Duration::from_secs(60));
    specs
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// In any order of events, no backend has room for a waiter, unless it is reserved for an
    /// earlier one, and in the end all counters are zero.
    #[test]
    fn permits_are_conserved_under_any_order_of_events(
        history in proptest::collection::vec(moves(), 1..120),
        shortest_first in any::<bool>(),
        fair in any::<bool>(),
    ) {
        let aging = Duration::from_micros(if shortest_first { 250 } else { 0 });
        let order = QueueOrder { aging_per_token: aging };
        let mut specs = four_backends(3, 1, None, order);
        let mut fixture = Fixture::new(&specs);
        let (mut leases, mut tickets): (Vec<Lease>, Vec<Ticket>) = (Vec::new(), Vec::new());
        for step in history {
            match step {
                Move::Enter { home, prompt, slots, priority, owner, pinned } => {
                    let mut request = fixture.request(home, prompt);
                    request.need.slots = slots;
                    request.priority = priority;
                    request.asks.route = Some(Route::Embeddings);
                    let weight = (owner * owner) as f64;
                    let own = FairOwner::new(owner, weight);
                    let own = if owner == 3 { own.of_group(prompt % 2) } else { own };
                    request.fair = (fair && owner > 0).then_some(own);
                    if let Some(first) = pinned {
                        request.pinned = true;
                        request.avoid = (0..first).map(BackendId::new).collect();
                    }
                    match fixture.admission.enter(request) {
                        AdmissionDecision::Granted(lease) => leases.push(lease),
                        AdmissionDecision::Queued(ticket, _) => tickets.push(ticket),
                        AdmissionDecision::Refused(limit) => prop_assert!(limit.wanted > limit.limit),
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
                Move::Charge(index, prompt_tokens) => {
                    if let Some(lease) = any_of(&mut leases, index) {
                        lease.charge(prompt_tokens);
                    }
                }
                Move::Settle(index, tokens) => {
                    if let Some(lease) = any_of(&mut leases, index) {
                        lease.settle(Some(tokens), Some(tokens / 2), tokens / 4);
                    }
                }
                Move::Finish(index) if !leases.is_empty() => {
                    let index = index % leases.len();
                    let lease = leases.swap_remove(index);
                    lease.success(fixture.now);
                }
                Move::Resize { slots, permits, tokens } => {
                    specs = four_backends(slots, permits, tokens, order);
                    fixture.layout = fixture.admission.apply(&specs, RULES, fixture.now);
                }
                Move::Spill(on) => {
                    specs[1].spill = if on { vec![0] } else { vec![] };
                    fixture.layout = fixture.admission.apply(&specs, RULES, fixture.now);
                }
                Move::Upgrade(true) => {
                    fixture.admission.claim();
                }
                Move::Upgrade(false) => {
                    let all = (0..4).map(|id| (BackendId::new(id), Bound::Share(None)));
                    fixture.admission.set_bounds(all);
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
                Move::Ceiling { backend, slots } => {
                    fixture.admission.set_bounds([(BackendId::new(backend), Bound::Ceiling(slots))]);
                }
                Move::Trial { backend, bound } => {
                    let bound = bound.map(|(slots, tokens)| TrialBound { slots, tokens });
                    fixture.admission.set_bounds([(BackendId::new(backend), Bound::Trial(bound))]);
                }
                Move::Cordon { backend, cordon } => {
                    fixture.admission.set_cordon(BackendId::new(backend), cordon);
                }
                Move::StartFailed(backend) => fixture.admission.start_failed(BackendId::new(backend)),
                Move::ContextLimit { backend, tokens } => {
                    // The served models change as well.
                    let served = match tokens.map_or(0, |tokens| tokens % 4) {
                        0 => Served::unreadable(),
                        1 => Served::list(["m"]),
                        2 => Served::list(["m", "other"]),
                        _ => Served::list(["other"]),
                    };
                    fixture.admission.set_served(BackendId::new(backend), served, tokens, fixture.now);
                }
                Move::Refuse { lease, lack } => {
                    let lacks = [
                        Lack::Model(ModelKey::of("m")),
                        Lack::Model(ModelKey::of("other")),
                        Lack::Route(Route::Embeddings),
                        Lack::Length(Some(1_000)),
                    ];
                    if let Some(lease) = any_of(&mut leases, lease) {
                        lease.refused_by_engine(lacks[lack], fixture.now);
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
