//! Two gateways divide the limits of one backend.
//!
//! They do it by messages that arrive late.

use proptest::prelude::*;

use super::*;

const LIMITS: BackendLimits = BackendLimits {
    slots: 4,
    tokens: Some(8_000),
    prefill_tokens: Some(2_500),
    long_prefix: Some(LongPrefix { threshold: 1_000, slots: 1 }),
};

/// One gateway with leases and tickets.
struct Gateway {
    fixture: Fixture,
    leases: Vec<Lease>,
    tickets: Vec<Ticket>,
}

impl Gateway {
    fn new() -> Self {
        Self { fixture: Fixture::new(&[spec("one", 1, LIMITS, vec![])]), leases: Vec::new(), tickets: Vec::new() }
    }

    fn backend(&self) -> BackendId {
        self.fixture.layout.backends[0][0]
    }

    fn enter(&mut self, prompt_tokens: u64) {
        match self.fixture.admission.enter(self.fixture.request(0, prompt_tokens)) {
            AdmissionDecision::Granted(lease) => self.leases.push(lease),
            AdmissionDecision::Queued(ticket, _) => self.tickets.push(ticket),
            _ => {}
        }
        self.take();
    }

    /// Takes the leases that were granted to waiters.
    fn take(&mut self) {
        let mut waiting = Vec::new();
        for mut ticket in std::mem::take(&mut self.tickets) {
            match std::pin::Pin::new(&mut ticket).poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(WaitResult::Granted(lease)) => self.leases.push(lease),
                Poll::Ready(other) => panic!("nothing was reconfigured, and no engine started: {other:?}"),
                Poll::Pending => waiting.push(ticket),
            }
        }
        self.tickets = waiting;
        self.fixture.admission.check_invariants().unwrap();
    }

    fn end(&mut self, number: usize) {
        if !self.leases.is_empty() {
            drop(self.leases.swap_remove(number % self.leases.len()));
        }
        self.take();
    }

    fn first_token(&mut self, number: usize) {
        if !self.leases.is_empty() {
            let at = number % self.leases.len();
            self.leases[at].first_token();
        }
        self.take();
    }

    fn used(&self) -> CapacityUsage {
        self.fixture.admission.view()[0].backends[0].used
    }
}

/// A draining gateway and its successor, with the one message that is in transit.
struct Pair {
    old: Gateway,
    new: Gateway,
    claimed: Option<Share>,
    conceded: Option<Share>,
}

impl Pair {
    fn new(requests: &[u64]) -> Self {
        let (mut old, new) = (Gateway::new(), Gateway::new());
        requests.iter().for_each(|prompt| old.enter(*prompt));
        new.fixture.admission.concede(new.backend(), Share::ALL);
        Self { old, new, claimed: None, conceded: None }
    }

    /// Performs the next step: claim, answer, or arrival of the answer.
    fn step(&mut self) {
        if let Some(conceded) = self.conceded.take() {
            self.old.fixture.admission.set_bounds([(self.old.backend(), Bound::Share(Some(conceded)))]);
            self.old.take();
        } else if let Some(claimed) = self.claimed.take() {
            self.conceded = self.new.fixture.admission.concede(self.new.backend(), claimed);
            self.new.take();
        } else {
            self.claimed = Some(self.old.fixture.admission.claim()[0].share);
            self.old.take();
        }
    }

    fn check(&self) {
        let (old, new) = (self.old.used(), self.new.used());
        assert!(old.slots + new.slots <= LIMITS.slots, "{old:?} {new:?}");
        assert!(old.tokens + new.tokens <= 8_000, "{old:?} {new:?}");
        assert!(old.long_prefills + new.long_prefills <= 1, "{old:?} {new:?}");
        // One prompt above the limit of prefill tokens runs alone.
        let prefill = old.prefill_tokens + new.prefill_tokens;
        assert!(prefill <= 2_500 || old.prefill_tokens == 3_000 || new.prefill_tokens == 3_000, "{old:?} {new:?}");
        assert!(prefill <= 3_000, "{old:?} {new:?}");
    }
}

#[derive(Clone, Debug)]
enum Move {
    Old(u64),
    New(u64),
    FirstToken(bool, usize),
    End(bool, usize),
    Message,
}

fn prompt() -> impl Strategy<Value = u64> {
    prop_oneof![Just(10), Just(900), Just(1_200), Just(2_000), Just(3_000)]
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        prompt().prop_map(Move::Old),
        prompt().prop_map(Move::New),
        (any::<bool>(), 0..8_usize).prop_map(|(old, number)| Move::FirstToken(old, number)),
        (any::<bool>(), 0..8_usize).prop_map(|(old, number)| Move::End(old, number)),
        Just(Move::Message),
        Just(Move::Message),
    ];
    proptest::collection::vec(one, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn two_gateways_stay_within_one_limit_and_serve_all_that_wait(
        before in proptest::collection::vec(prompt(), 0..10),
        moves in moves(),
    ) {
        let mut pair = Pair::new(&before);
        pair.check();
        for step in moves {
            let Pair { old, new, .. } = &mut pair;
            match step {
                Move::Old(prompt) => old.enter(prompt),
                Move::New(prompt) => new.enter(prompt),
                Move::FirstToken(true, number) => old.first_token(number),
                Move::FirstToken(false, number) => new.first_token(number),
                Move::End(true, number) => old.end(number),
                Move::End(false, number) => new.end(number),
                Move::Message => pair.step(),
            }
            pair.check();
        }
        // All requests end at some point; then none waits for room that no gateway uses.
        for _ in 0..200 {
            pair.old.end(0);
            pair.new.end(0);
            for _ in 0..3 {
                pair.step();
                pair.check();
            }
        }
        prop_assert_eq!(pair.old.tickets.len() + pair.new.tickets.len(), 0);
        prop_assert_eq!((pair.old.used(), pair.new.used()), Default::default());
    }
}

#[test]
fn requests_that_wait_at_the_old_gateway_are_served_before_later_ones_at_the_new_one() {
    let mut pair = Pair::new(&[10; 6]);
    assert_eq!((pair.old.leases.len(), pair.old.tickets.len()), (4, 2));
    pair.new.enter(10);
    let mut served = Vec::new();
    for _ in 0..3 {
        pair.old.end(0);
        (0..6).for_each(|_| pair.step());
        served.push((pair.old.tickets.len(), pair.new.tickets.len()));
    }
    assert_eq!(served, [(1, 1), (0, 1), (0, 0)]);
}

#[test]
fn what_a_gateway_claims_that_has_gone_is_free_again() {
    let mut pair = Pair::new(&[10; 4]);
    pair.new.enter(10);
    assert_eq!(pair.new.tickets.len(), 1);
    pair.new.fixture.admission.concede(pair.new.backend(), Share::default());
    pair.new.take();
    assert_eq!(pair.new.leases.len(), 1);
    let unknown = BackendId::new(7);
    assert_eq!(pair.new.fixture.admission.concede(unknown, Share::ALL), None);
}

#[test]
fn a_gateway_between_two_others_passes_on_what_the_first_one_claims() {
    let (mut first, middle, mut last) = (Gateway::new(), Gateway::new(), Gateway::new());
    (0..3).for_each(|_| first.enter(10));
    let relay = || {
        let claimed = first.fixture.admission.claim()[0].share;
        middle.fixture.admission.concede(middle.backend(), claimed);
        middle.fixture.admission.claim()[0].share
    };
    let conceded = last.fixture.admission.concede(last.backend(), relay());
    assert_eq!(conceded.map(|share| share.slots), Some(3));
    (0..2).for_each(|_| last.enter(10));
    assert_eq!((last.leases.len(), last.tickets.len()), (1, 1), "three of four slots are used by the first one");
}
