//! Owners of requests share a pool by their engine time.
//!
//! All tests run on virtual time.

use std::collections::BinaryHeap;

use proptest::prelude::*;

use super::*;
use crate::pool::owners::OWNERS_MAX;

const NO_PERMITS: BackendLimits = BackendLimits { slots: 4, tokens: None, prefill_tokens: None, long_prefix: None };

impl Fixture {
    fn owned(&self, owner: u64, weight: f64, prompt_tokens: u64) -> AdmissionRequest {
        AdmissionRequest {
            fair: Some(FairOwner::new(owner, weight)),
            arrived: self.now,
            since: self.now,
            ..self.request(0, prompt_tokens)
        }
    }

    fn enter_owned(&self, owner: u64, prompt_tokens: u64) -> Result<Lease, Ticket> {
        match self.admission.enter(self.owned(owner, 1.0, prompt_tokens)) {
            AdmissionDecision::Granted(lease) => Ok(lease),
            AdmissionDecision::Queued(ticket, _) => Err(ticket),
            other => panic!("neither room nor a place in the queue: {other:?}"),
        }
    }

    fn level(&self, owner: u64) -> f64 {
        self.admission.shared.lock().pools[0].queue.level_of(owner).expect("the owner is in the table")
    }

    fn owners(&self) -> Vec<OwnerView> {
        self.admission.shared.lock().pools[0].queue.view(OWNERS_MAX)
    }
}

fn pool(backends: usize, limits: BackendLimits, queue_length: usize) -> PoolSpec {
    let mut pool = spec("one", backends, limits, vec![]);
    pool.rules.queue_length = queue_length;
    pool
}

fn granted(tickets: &mut Vec<Ticket>) -> Vec<Lease> {
    let mut leases = Vec::new();
    tickets.retain_mut(|ticket| match poll(ticket) {
        Some(WaitResult::Granted(lease)) => {
            leases.push(lease);
            false
        }
        Some(other) => panic!("a request was not served: {other:?}"),
        None => true,
    });
    leases
}

/// Ends a request with as many tokens as estimated.
fn end(mut lease: Lease) {
    lease.first_token();
    lease.release();
    lease.settle(None, None, 10);
}

/// The most seconds that a request of this many prompt tokens and ten output tokens may cost: the
/// cost if the request decodes alone on an engine.
fn most(prompt: u64) -> f64 {
    prompt as f64 * 31e-6 + 10.0 * 5.1e-3
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// The bound in `owners.rs`: while two owners wait, their engine time differs by at most one
    /// request of either.
    #[test]
    fn what_two_waiting_owners_have_attained_differs_by_one_request_at_most(
        prompts in proptest::collection::vec((1..900u64, 1..900u64), 60..61),
        ends in proptest::collection::vec(any::<usize>(), 100),
        weights in (0.1..10.0f64, 0.1..10.0f64),
        slots in 1..6u32,
    ) {
        let fixture = Fixture::new(&[pool(1, BackendLimits { slots, ..NO_PERMITS }, 512)]);
        let mut running: Vec<Lease> = (0..slots).map(|_| fixture.granted(0, 10)).collect();
        let (mut tickets, weights) = ([Vec::new(), Vec::new()], [weights.0, weights.1]);
        for (one, two) in prompts {
            for (owner, prompt) in [one, two].into_iter().enumerate() {
                let request = fixture.owned(owner as u64, weights[owner], prompt);
                let AdmissionDecision::Queued(ticket, _) = fixture.admission.enter(request) else {
                    panic!("all slots are taken")
                };
                tickets[owner].push(ticket);
            }
        }
        let least = f64::min(weights[0], weights[1]);
        for which in ends {
            end(running.swap_remove(which % running.len()));
            tickets.iter_mut().for_each(|tickets| running.extend(granted(tickets)));
            running.iter_mut().for_each(Lease::first_token);
            prop_assert_eq!(running.len(), slots as usize, "work-conserving");
            if tickets.iter().any(Vec::is_empty) {
                break;
            }
            let apart = (fixture.level(0) - fixture.level(1)).abs();
            prop_assert!(apart <= most(900) / least + 1e-9, "{apart}");
            prop_assert_eq!(fixture.admission.check_invariants(), Ok(()));
        }
    }

    /// The bound on a wait: each other owner overtakes a request of an owner at V with at most one
    /// request.
    #[test]
    fn a_newcomer_waits_for_one_request_of_each_other_owner_at_most(
        others in 1..12u64,
        each in 1..30usize,
        served in 0..40usize,
        slots in 1..6u32,
        prompt in 1..900u64,
    ) {
        let fixture = Fixture::new(&[pool(1, BackendLimits { slots, ..NO_PERMITS }, 4_096)]);
        let (mut running, mut tickets) = (Vec::new(), Vec::new());
        for _ in 0..each {
            for owner in 1..=others {
                match fixture.enter_owned(owner, prompt) {
                    Ok(lease) => running.push(lease),
                    Err(ticket) => tickets.push(ticket),
                }
            }
        }
        let step = |running: &mut Vec<Lease>, tickets: &mut Vec<Ticket>| {
            running.iter_mut().for_each(Lease::first_token);
            if !running.is_empty() {
                end(running.remove(0));
            }
            running.extend(granted(tickets));
        };
        (0..served).for_each(|_| step(&mut running, &mut tickets));
        let mut newcomer = match fixture.enter_owned(99, 1) {
            Ok(_) => return Ok(()),
            Err(ticket) => ticket,
        };
        let mut overtaken = 0;
        while poll(&mut newcomer).is_none() {
            let before = tickets.len();
            step(&mut running, &mut tickets);
            overtaken += before - tickets.len();
            prop_assert!(overtaken <= others as usize, "{overtaken} went first");
        }
    }
}

/// A request that runs until a time in virtual microseconds.
struct Running {
    until: u64,
    owner: usize,
    lease: Lease,
}

impl PartialEq for Running {
    fn eq(&self, other: &Self) -> bool {
        self.until == other.until
    }
}
impl Eq for Running {}
impl PartialOrd for Running {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Running {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.until.cmp(&self.until)
    }
}

#[test]
fn over_a_minute_the_shares_follow_the_weights_whatever_the_requests_and_their_estimates() {
    let mut fixture = Fixture::new(&[pool(2, BackendLimits { slots: 8, ..NO_PERMITS }, 4_096)]);
    // Weight, prompt, output. The estimate is ten output tokens.
    let owners = [(1.0, 600, 40), (2.0, 100, 12), (4.0, 900, 200)];
    let mut running = BinaryHeap::new();
    let begin = |owner: usize, until: u64, mut lease: Lease| {
        lease.first_token();
        Running { until, owner, lease }
    };
    let mut tickets: [Vec<Ticket>; 3] = Default::default();
    let begun = fixture.now;
    let until = |fixture: &Fixture, owner: usize| {
        let (_, prompt, output) = owners[owner];
        (fixture.now - begun).as_micros() as u64 + prompt * 31 * 4 + output * 600
    };
    for owner in (0..3).cycle().take(120) {
        match fixture.admission.enter(fixture.owned(owner as u64, owners[owner].0, owners[owner].1)) {
            AdmissionDecision::Granted(lease) => running.push(begin(owner, until(&fixture, owner), lease)),
            AdmissionDecision::Queued(ticket, _) => tickets[owner].push(ticket),
            other => panic!("{other:?}"),
        }
    }
    while let Some(Running { until: ended, owner, mut lease }) = running.pop().filter(|next| next.until < 60_000_000) {
        fixture.now = begun + Duration::from_micros(ended);
        let (weight, prompt, output) = owners[owner];
        // The charge is corrected after the release, as with a slow client.
        lease.release();
        lease.settle(Some(prompt), None, output);
        match fixture.admission.enter(fixture.owned(owner as u64, weight, prompt)) {
            AdmissionDecision::Granted(lease) => running.push(begin(owner, until(&fixture, owner), lease)),
            AdmissionDecision::Queued(ticket, _) => tickets[owner].push(ticket),
            other => panic!("{other:?}"),
        }
        for (owner, tickets) in tickets.iter_mut().enumerate() {
            for lease in granted(tickets) {
                running.push(begin(owner, until(&fixture, owner), lease));
            }
        }
    }
    let views = fixture.owners();
    let work = |id: u64| views.iter().find(|view| view.id == id).expect("it has requests").work;
    for (id, share) in [(1, 2.0), (2, 4.0)] {
        let ratio = work(id) / work(0);
        assert!((ratio / share - 1.0).abs() < 0.05, "owner {id} has {ratio} times what the first has: {views:?}");
    }
}

#[test]
fn large_prompts_of_one_owner_leave_an_engine_to_the_others_and_take_all_when_alone() {
    let mut fixture = Fixture::new(&[pool(2, BackendLimits { slots: 64, ..NO_PERMITS }, 512)]);
    let alone: Vec<Lease> = (0..4).map(|_| fixture.enter_owned(1, 4_500).expect("it is alone")).collect();
    assert_eq!(alone.iter().filter(|lease| lease.backend().index() == 0).count(), 2, "evenly on both");
    drop(alone);
    let _quiet = fixture.enter_owned(2, 200).expect("there is room");
    let (mut running, mut waiting) = (Vec::new(), Vec::new());
    for _ in 0..200 {
        match fixture.enter_owned(1, 4_500) {
            Ok(lease) => running.push(lease),
            Err(ticket) => waiting.push(ticket),
        }
    }
    assert_eq!((running.len(), waiting.len()), (1, 199), "one at a time, on one engine");
    for _ in 0..20 {
        fixture.now += Duration::from_millis(200);
        let beside = fixture.enter_owned(2, 200).expect("it does not wait behind the others");
        assert_ne!(beside.backend(), running.last().expect("one is in prefill").backend());
        running.last_mut().expect("one is in prefill").first_token();
        let next = granted(&mut waiting);
        assert_eq!(next.len(), 1, "the next takes its turn at once");
        running.extend(next);
        assert_eq!(fixture.admission.check_invariants(), Ok(()));
    }
}

#[test]
fn while_prompts_queue_in_an_engine_only_owners_below_their_share_send_more() {
    let fixture = Fixture::new(&[pool(1, BackendLimits { slots: 256, ..NO_PERMITS }, 512)]);
    let (mut running, mut waiting) = (Vec::new(), Vec::new());
    for owner in (0..4).flat_map(|_| 1..=10) {
        match fixture.enter_owned(owner, 500) {
            Ok(lease) => running.push(lease),
            Err(ticket) => waiting.push(ticket),
        }
    }
    assert_eq!((running.len(), waiting.len()), (10, 30), "one prompt of each owner is below its share");
    running.push(fixture.enter_owned(11, 200).expect("the newcomer has nothing running"));
    // 10 x 500 + 200 tokens: below 2,048 after seven first tokens.
    for prompt in 1..=7 {
        running[prompt - 1].first_token();
        let next = granted(&mut waiting).len();
        assert_eq!(next > 0, prompt == 7, "after {prompt} first tokens");
        assert_eq!(fixture.admission.check_invariants(), Ok(()));
    }
    while let Some(mut lease) = (!running.is_empty()).then(|| running.remove(0)) {
        lease.first_token();
        drop(lease);
        running.extend(granted(&mut waiting));
    }
    assert!(waiting.is_empty(), "nothing waits while the engine is idle");
}

#[test]
fn a_prompt_that_only_one_engine_may_serve_takes_its_turn_after_a_first_token_at_another() {
    let fixture = Fixture::new(&[pool(2, BackendLimits { slots: 64, ..NO_PERMITS }, 512)]);
    let _quiet = fixture.enter_owned(2, 200).expect("there is room");
    let mut first = fixture.enter_owned(1, 4_500).expect("the first large prompt");
    let mut retried = fixture.owned(1, 1.0, 4_500);
    (retried.avoid, retried.pinned) = (smallvec![first.backend()], true);
    let AdmissionDecision::Queued(ticket, _) = fixture.admission.enter(retried) else { panic!("it waits its turn") };
    first.first_token();
    assert_eq!(granted(&mut vec![ticket]).len(), 1);
    assert_eq!(fixture.admission.check_invariants(), Ok(()));
}

#[test]
fn an_owner_that_has_gone_keeps_nothing_from_the_others() {
    let fixture = Fixture::new(&[pool(2, BackendLimits { slots: 64, ..NO_PERMITS }, 512)]);
    drop(fixture.enter_owned(2, 200));
    let (mut running, mut waiting) = (vec![fixture.enter_owned(2, 200).expect("room")], Vec::new());
    for _ in 0..200 {
        match fixture.enter_owned(1, 20_000) {
            Ok(lease) => running.push(lease),
            Err(ticket) => waiting.push(ticket),
        }
    }
    drop(running.remove(0));
    let mut prompts = 0;
    while running.iter().filter(|lease| lease.prefill_time() > Duration::ZERO).count() < 2 {
        let mut first = running.remove(0);
        first.first_token();
        drop(first);
        running.extend(granted(&mut waiting));
        prompts += 1;
        assert!(prompts < 20, "no reservation for one that does not come back");
    }
    assert_eq!(fixture.admission.check_invariants(), Ok(()));
}

#[test]
fn a_full_queue_takes_a_place_from_the_owner_that_has_most() {
    let fixture = Fixture::new(&[pool(1, BackendLimits { slots: 1, ..NO_PERMITS }, 8)]);
    let running = fixture.enter_owned(1, 10).expect("room");
    let mut noisy: Vec<Ticket> = (0..8).map(|_| fixture.enter_owned(1, 10).expect_err("it waits")).collect();
    let again = fixture.admission.enter(fixture.owned(1, 1.0, 10));
    assert!(matches!(again, AdmissionDecision::Shed(ShedReason::QueueFull)), "of its own it has enough");
    let mut quiet = fixture.enter_owned(2, 10).expect_err("it waits");
    let shed = poll(&mut noisy[7]);
    assert!(matches!(shed, Some(WaitResult::Shed(ShedReason::QueueFull))), "{shed:?}");
    drop(running);
    drop(lease_of(&mut quiet));
    assert_eq!(fixture.admission.check_invariants(), Ok(()));
}

#[test]
fn an_owner_of_a_worse_priority_is_not_starved_by_another() {
    let mut fixture = Fixture::new(&[pool(1, BackendLimits { slots: 1, ..NO_PERMITS }, 512)]);
    let mut running = fixture.enter_owned(1, 10).expect("room");
    let late = AdmissionRequest { priority: 5, ..fixture.owned(2, 1.0, 10) };
    let AdmissionDecision::Queued(mut late, _) = fixture.admission.enter(late) else { panic!("it waits") };
    let begun = fixture.now;
    let mut first: Vec<Ticket> = (0..4).map(|_| fixture.enter_owned(1, 10).expect_err("it waits")).collect();
    while poll(&mut late).is_none() {
        fixture.now += Duration::from_millis(100);
        assert!(fixture.now - begun <= Duration::from_millis(5_300), "a quarter of the timeout, and a turn");
        first.push(fixture.enter_owned(1, 10).expect_err("it waits"));
        drop(running);
        match granted(&mut first).pop() {
            Some(next) => running = next,
            None => return,
        }
    }
}

#[test]
fn a_wide_request_gets_its_turn_and_its_owner_no_more_than_its_share() {
    let fixture = Fixture::new(&[pool(1, NO_PERMITS, 512)]);
    let mut running: Vec<Lease> = (0..4).map(|_| fixture.enter_owned(1, 10).expect("room")).collect();
    let mut small: Vec<Ticket> = (0..40).map(|_| fixture.enter_owned(1, 10).expect_err("it waits")).collect();
    let mut wide: Vec<Ticket> = Vec::new();
    for _ in 0..3 {
        let mut request = fixture.owned(2, 1.0, 10);
        request.need = Need { slots: 4, output_tokens: 40, ..request.need };
        // It has waited for more than a quarter of the timeout, so room is kept for it.
        request.arrived -= Duration::from_secs(6);
        let AdmissionDecision::Queued(ticket, _) = fixture.admission.enter(request) else { panic!("it waits") };
        wide.push(ticket);
    }
    let mut order = Vec::new();
    while !(small.is_empty() && wide.is_empty()) {
        end(running.remove(0));
        let (one, two) = (granted(&mut small), granted(&mut wide));
        order.extend(one.iter().map(|_| 's').chain(two.iter().map(|_| 'w')));
        running.extend(one.into_iter().chain(two));
        running.iter_mut().for_each(Lease::first_token);
        assert_eq!(fixture.admission.check_invariants(), Ok(()));
    }
    let order: String = order.into_iter().collect();
    let between = order.split('w').skip(1).take(2).map(str::len).max();
    assert!(order.find('w') < Some(8), "the first wide one waits for its turn only: {order}");
    assert!(between.is_some_and(|between| (1..24).contains(&between)), "turns: {order}");
}

#[test]
fn a_changed_weight_counts_from_the_next_request_and_no_waiter_is_lost() {
    let specs = [pool(1, BackendLimits { slots: 1, ..NO_PERMITS }, 512)];
    let fixture = Fixture::new(&specs);
    let mut running = fixture.enter_owned(9, 10).expect("room");
    let mut tickets = Vec::new();
    for weight in [1.0, 1e9] {
        for owner in [1, 2] {
            let weight = if owner == 2 { weight } else { 1.0 };
            let request = fixture.owned(owner, weight, 10);
            let AdmissionDecision::Queued(ticket, _) = fixture.admission.enter(request) else { panic!("it waits") };
            tickets.push(ticket);
        }
        fixture.admission.apply(&specs, RULES, fixture.now);
        assert_eq!(fixture.admission.check_invariants(), Ok(()));
    }
    assert_eq!(fixture.owners().iter().map(|view| view.weight).fold(0.0, f64::max), 1_000.0, "clamped");
    // A reload turns fair queues off: later requests have no owner.
    tickets.push(fixture.queued(0, 10));
    while !tickets.is_empty() {
        drop(running);
        running = granted(&mut tickets).pop().expect("the next is served");
    }
}

#[test]
fn users_of_a_key_divide_its_weight() {
    let fixture = Fixture::new(&[pool(1, BackendLimits { slots: 1, ..NO_PERMITS }, 4_096)]);
    let mut running = fixture.enter_owned(99, 10).expect("room");
    let mut tickets: [Vec<Ticket>; 2] = Default::default();
    for turn in 0..400u64 {
        for (key, users) in [(0, 40), (1, 1)] {
            let mut request = fixture.owned(1_000 * (key + 1) + turn % users, 1.0, 10);
            request.fair = request.fair.map(|fair| fair.of_group(key));
            let AdmissionDecision::Queued(ticket, _) = fixture.admission.enter(request) else { panic!("it waits") };
            tickets[key as usize].push(ticket);
        }
    }
    for _ in 0..300 {
        drop(running);
        let mut next: Vec<Lease> = tickets.iter_mut().flat_map(granted).collect();
        running = next.pop().expect("one is served");
    }
    let served = tickets.map(|tickets| 400 - tickets.len());
    assert!(served[0].abs_diff(served[1]) <= 42, "forty users are one key: {served:?}");
}

#[test]
fn the_table_of_owners_is_bounded_and_empty_owners_leave() {
    let fixture = Fixture::new(&[pool(1, BackendLimits { slots: 16, ..NO_PERMITS }, 512)]);
    for owner in 1..5_000 {
        drop(fixture.enter_owned(owner, 10));
    }
    assert!(fixture.owners().len() <= 2, "{}", fixture.owners().len());
    let slots = OWNERS_MAX as u32 + 500;
    let fixture = Fixture::new(&[pool(1, BackendLimits { slots, ..NO_PERMITS }, 512)]);
    let begin = |owner| {
        let Ok(mut lease) = fixture.enter_owned(owner, 1) else { panic!("there is room") };
        lease.first_token();
        lease
    };
    let held: Vec<Lease> = (1..u64::from(slots)).map(begin).collect();
    assert_eq!(fixture.owners().len(), OWNERS_MAX);
    assert_eq!(fixture.admission.check_invariants(), Ok(()));
    drop(held);
    assert_eq!(fixture.admission.check_invariants(), Ok(()));
}

#[test]
fn what_an_owner_has_had_at_another_gateway_counts_here() {
    let fixture = Fixture::new(&[pool(1, BackendLimits { slots: 1, ..NO_PERMITS }, 512)]);
    let mut running = fixture.enter_owned(1, 10).expect("room");
    let mut first: Vec<Ticket> = (0..8).map(|_| fixture.enter_owned(1, 10).expect_err("it waits")).collect();
    let mut second: Vec<Ticket> = (0..8).map(|_| fixture.enter_owned(2, 10).expect_err("it waits")).collect();
    for (owner, seconds) in [(1, 60.0), (2, -1.0), (2, f64::NAN), (3, 60.0)] {
        fixture.admission.attained_elsewhere("one", owner, seconds);
    }
    for _ in 0..8 {
        end(running);
        assert!(granted(&mut first).is_empty());
        running = granted(&mut second).pop().expect("the other one is served");
    }
    let sums = fixture.admission.attained();
    assert_eq!(sums.len(), 1);
    assert!(sums[0].1.iter().all(|(_, seconds)| *seconds < 5.0), "only what it had here: {sums:?}");
    end(running);
    drop(granted(&mut first));
    assert_eq!(fixture.admission.check_invariants(), Ok(()));
}
