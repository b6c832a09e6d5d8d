//! Requests that need more room than is free.
//!
//! They are refused if no backend could ever take them. Otherwise they get room without delaying
//! others.

use proptest::prelude::*;

use super::*;

impl Fixture {
    fn wide(&self, slots: u32) -> AdmissionRequest {
        let request = self.request(0, 10);
        AdmissionRequest { need: Need { slots, ..request.need }, ..request }
    }

    fn queued_wide(&self, slots: u32) -> Ticket {
        match self.admission.enter(self.wide(slots)) {
            AdmissionDecision::Queued(ticket, _) => ticket,
            other => panic!("expected a ticket, got {other:?}"),
        }
    }

    fn refused(&self, request: AdmissionRequest) -> TooLarge {
        match self.admission.enter(request) {
            AdmissionDecision::Refused(limit) => limit,
            other => panic!("expected a refusal, got {other:?}"),
        }
    }
}

/// One pool of `backends` backends, each with `slots` slots, and a queue of 8 requests.
fn pool(backends: usize, slots: u32) -> Fixture {
    Fixture::new(&[spec("one", backends, limits(slots, 1), vec![])])
}

#[test]
fn a_need_that_no_backend_could_ever_grant_is_refused_at_once_with_the_limit() {
    let with_tokens = |slots, tokens| BackendLimits { tokens, ..limits(slots, 1) };
    let fixture = Fixture::new(&[
        spec("short", 1, with_tokens(4, Some(1_000)), vec![]),
        spec("long", 1, with_tokens(8, Some(2_000)), vec![0]),
    ]);
    let sequences = |wanted, limit| TooLarge { unit: LimitUnit::Sequences, wanted, limit };
    assert_eq!(fixture.refused(fixture.wide(16_384)), sequences(16_384, 4));
    let need = Need { slots: 1, prompt_tokens: 10, output_tokens: 1_000_000_000 };
    let endless = AdmissionRequest { need, ..fixture.request(0, 10) };
    assert_eq!(fixture.refused(endless), TooLarge { unit: LimitUnit::Tokens, wanted: 1_000_000_010, limit: 1_000 });
    // The refusal names the largest limit of the pools that the request may use.
    let at = |slots| AdmissionRequest { need: Need { slots, ..need_of_one() }, ..fixture.request(1, 10) };
    assert_eq!(fixture.refused(at(9)), sequences(9, 8));
    assert!(matches!(fixture.admission.enter(at(8)), AdmissionDecision::Granted(_)));
    assert_eq!(fixture.admission.load(), (0, 0), "a refused request leaves nothing");
}

fn need_of_one() -> Need {
    Need { slots: 1, prompt_tokens: 10, output_tokens: 10 }
}

/// Four backends, with 2 of 256 slots in use on each.
#[test]
fn a_wide_request_holds_up_no_others_and_is_served_when_one_backend_is_free() {
    let fixture = pool(4, 256);
    let mut running: Vec<Lease> = (0..8).map(|_| fixture.granted(0, 10)).collect();
    assert_eq!(fixture.refused(fixture.wide(16_384)).limit, 256);
    let mut wide = fixture.queued_wide(255);
    let others: Vec<Lease> = (0..20).map(|_| fixture.granted(0, 10)).collect();
    let used: Vec<u32> = fixture.admission.view()[0].backends.iter().map(|backend| backend.used.slots).collect();
    let reserved = used.iter().position(|slots| *slots == 2).expect("one backend is spared for the wide request");
    running.retain(|lease| lease.backend().index() != reserved);
    let wide = lease_of(&mut wide);
    assert_eq!((wide.backend().index(), running.len(), others.len()), (reserved, 6, 20));
}

#[test]
fn on_the_only_backend_a_wide_request_is_passed_a_bounded_number_of_times() {
    let fixture = pool(1, 4);
    let mut running = vec![fixture.granted(0, 10)];
    let mut wide = fixture.queued_wide(4);
    for _ in 0..8 {
        running.push(fixture.granted(0, 10));
        drop(running.remove(0));
    }
    let mut later = fixture.queued(0, 10);
    assert!(poll(&mut wide).is_none() && poll(&mut later).is_none());
    running.clear();
    drop(lease_of(&mut wide));
    drop(lease_of(&mut later));
}

#[test]
fn a_wide_request_that_has_waited_for_a_quarter_of_its_time_is_passed_no_more() {
    let mut fixture = pool(1, 4);
    let running = fixture.granted(0, 10);
    let mut wide = fixture.queued_wide(4);
    fixture.now += Duration::from_secs(5) - Duration::from_nanos(1);
    drop(fixture.granted(0, 10));
    fixture.now += Duration::from_nanos(1);
    let mut later = fixture.queued(0, 10);
    assert!(poll(&mut later).is_none());
    drop(running);
    drop(lease_of(&mut wide));
    drop(lease_of(&mut later));
}

#[test]
fn a_wide_request_that_leaves_lets_those_in_that_it_kept_out() {
    let fixture = pool(1, 4);
    let _running = fixture.granted(0, 10);
    let wide = fixture.queued_wide(4);
    (0..8).for_each(|_| drop(fixture.granted(0, 10)));
    let mut later = fixture.queued(0, 10);
    drop(wide);
    drop(lease_of(&mut later));
}

#[test]
fn when_the_reserved_backend_leaves_rotation_another_is_reserved() {
    let fixture = pool(2, 4);
    let mut running: Vec<Lease> = (0..2).map(|_| fixture.granted(0, 10)).collect();
    let mut wide = fixture.queued_wide(4);
    let spared = fixture.granted(0, 10);
    let reserved = running.iter().position(|lease| lease.backend() != spared.backend()).unwrap();
    let reserved = running.remove(reserved);
    fixture.admission.set_draining(reserved.backend(), true);
    for _ in 0..7 {
        drop(fixture.granted(0, 10));
    }
    let mut later = fixture.queued(0, 10);
    drop((running, spared));
    let wide = lease_of(&mut wide);
    assert_ne!(wide.backend(), reserved.backend());
    assert!(poll(&mut later).is_none());
    fixture.admission.set_draining(reserved.backend(), false);
    drop(lease_of(&mut later));
}

#[test]
fn a_reload_that_lowers_the_limits_sends_a_wide_waiter_back_and_refuses_it() {
    let fixture = pool(1, 4);
    let _running = fixture.granted(0, 10);
    let mut wide = fixture.queued_wide(4);
    let layout = fixture.admission.apply(&[spec("one", 1, limits(3, 1), vec![])], RULES, fixture.now);
    assert!(matches!(poll(&mut wide), Some(WaitResult::Reclassify)));
    let again = AdmissionRequest { layout: layout.number, ..fixture.wide(4) };
    assert_eq!(fixture.refused(again), TooLarge { unit: LimitUnit::Sequences, wanted: 4, limit: 3 });
    assert_eq!(fixture.admission.load(), (1, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Clients keep every backend busy for ever with requests of higher priority, which live for at
    /// most `life` steps. At most as many of them pass a wide request as the queue is long; then it
    /// waits for one backend.
    #[test]
    fn a_wide_request_is_served_after_a_bounded_amount_of_work(
        backends in 1..4usize,
        slots in 2..7u32,
        width in any::<proptest::sample::Index>(),
        life in 1..6usize,
        each_step in 1..4usize,
        micros in prop_oneof![Just(0u64), Just(500), Just(1_000_000)],
        lives in proptest::collection::vec(1..6usize, 32),
    ) {
        let width = 2 + width.index(slots as usize - 1) as u32;
        let mut one = spec("one", backends, limits(slots, 1), vec![]);
        one.rules.order = QueueOrder { aging_per_token: Duration::from_micros(micros) };
        let queue = one.rules.queue_length;
        let fixture = Fixture::new(&[one]);
        let life_of = |number: usize| lives[number % lives.len()].min(life);
        let mut running: Vec<(usize, Lease)> =
            (0..backends * slots as usize).map(|number| (life_of(number), fixture.granted(0, 10))).collect();
        let mut wide = AdmissionRequest { priority: 5, ..fixture.wide(width) };
        wide.need.prompt_tokens = 900;
        let AdmissionDecision::Queued(mut wide, _) = fixture.admission.enter(wide) else {
            panic!("every backend is full")
        };
        let mut waiting: Vec<Ticket> = Vec::new();
        let mut number = 0;
        // Each request that passes runs for at most `life` steps, and so do the requests on the
        // backend that is reserved afterwards.
        let bound = (queue + 2) * life;
        for step in 0.. {
            prop_assert!(step <= bound, "not served after {bound} steps");
            for _ in 0..each_step {
                number += 1;
                match fixture.admission.enter(fixture.request(0, 10)) {
                    AdmissionDecision::Granted(lease) => running.push((life_of(number), lease)),
                    AdmissionDecision::Queued(ticket, _) => waiting.push(ticket),
                    _ => {}
                }
            }
            running.iter_mut().for_each(|(left, _)| *left -= 1);
            running.retain(|(left, _)| *left > 0);
            prop_assert_eq!(fixture.admission.check_invariants(), Ok(()));
            if poll(&mut wide).is_some() {
                break;
            }
            for mut ticket in std::mem::take(&mut waiting) {
                number += 1;
                match poll(&mut ticket) {
                    Some(WaitResult::Granted(lease)) => running.push((life_of(number), lease)),
                    _ => waiting.push(ticket),
                }
            }
        }
        drop((running, waiting));
        prop_assert_eq!(fixture.admission.load(), (0, 0));
    }
}
