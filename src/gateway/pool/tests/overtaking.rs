//! The bound on overtakers in `dispatch.rs`.
//!
//! Tested for every order, priority and length, also with wide requests.

use proptest::prelude::*;

use super::*;

const QUEUE: usize = 6;
const TIMEOUT: Duration = Duration::from_secs(20);

/// A request that waits.
struct Waiting {
    ticket: Ticket,
    entered: u64,
    request: AdmissionRequest,
    overtakers: u64,
}

/// A lease that was granted by the last event.
struct Fresh {
    entered: u64,
    arrived: Instant,
    need: Need,
    lease: Lease,
}

/// Compares every grant with every request that still waits.
struct Observed {
    fixture: Fixture,
    entered: u64,
    waiting: Vec<Waiting>,
    leases: Vec<Lease>,
}

impl Observed {
    fn new(specs: &[PoolSpec]) -> Self {
        Self { fixture: Fixture::new(specs), entered: 0, waiting: Vec::new(), leases: Vec::new() }
    }

    fn enter(&mut self, mut request: AdmissionRequest) -> Result<(), TestCaseError> {
        request.arrived = self.fixture.now;
        self.entered += 1;
        let entered = self.entered;
        let mut fresh = Vec::new();
        match self.fixture.admission.enter(request.clone()) {
            AdmissionDecision::Granted(lease) => {
                fresh.push(Fresh { entered, arrived: request.arrived, need: request.need, lease });
            }
            AdmissionDecision::Queued(ticket, _) => {
                self.waiting.push(Waiting { ticket, entered, request, overtakers: 0 });
            }
            AdmissionDecision::Refused(_) | AdmissionDecision::Shed(_) | AdmissionDecision::Reclassify => {}
        }
        self.settle(fresh)
    }

    /// Takes the grants of the last event, and counts the waiters that they overtook.
    fn settle(&mut self, mut fresh: Vec<Fresh>) -> Result<(), TestCaseError> {
        for mut waiting in std::mem::take(&mut self.waiting) {
            match poll(&mut waiting.ticket) {
                None => self.waiting.push(waiting),
                Some(WaitResult::Reclassify | WaitResult::Shed(_) | WaitResult::Unserved) => {}
                Some(WaitResult::Granted(lease)) => {
                    let (entered, request) = (waiting.entered, &waiting.request);
                    fresh.push(Fresh { entered, arrived: request.arrived, need: request.need, lease });
                }
            }
        }
        prop_assert_eq!(self.fixture.admission.check_invariants(), Ok(()));
        let views = self.fixture.admission.view();
        for granted in &fresh {
            for waiting in self.waiting.iter_mut().filter(|waiting| waiting.entered < granted.entered) {
                if !fits_instead(&views, granted, &waiting.request) {
                    continue;
                }
                waiting.overtakers += 1;
                prop_assert!(waiting.overtakers <= QUEUE as u64, "{:?} was overtaken too often", waiting.request);
                let later = granted.arrived.saturating_duration_since(waiting.request.arrived);
                prop_assert!(later < TIMEOUT / 4, "{:?} was overtaken after {later:?}", waiting.request);
            }
        }
        self.leases.extend(fresh.into_iter().map(|granted| granted.lease));
        Ok(())
    }
}

/// Whether a waiting request could have had the room that another one was granted.
fn fits_instead(views: &[PoolView], granted: &Fresh, waiting: &AdmissionRequest) -> bool {
    let pool = granted.lease.pool();
    let may_use = waiting.home == pool || waiting.spill.contains(&pool);
    let backends = views.iter().flat_map(|view| &view.backends);
    let Some(backend) = backends.clone().find(|backend| backend.id == granted.lease.backend()) else { return false };
    let (limits, mut used) = (&backend.limits, backend.used);
    used.requests -= 1;
    used.slots -= granted.need.slots;
    used.tokens -= granted.need.tokens();
    used.prefill_tokens -= granted.need.prompt_tokens;
    used.long_prefills -= u32::from(limits.is_long(granted.need.prompt_tokens));
    may_use && backend.in_rotation() && used.fit(limits, &waiting.need) == capacity::Fit::Room
}

#[derive(Clone, Debug)]
enum Event {
    Enter { home: usize, need: Need, priority: i32 },
    Finish(usize),
    FirstToken(usize),
    Abandon(usize),
    Resize(u32),
    Drain(usize, bool),
    Wait(u64),
}

fn events() -> impl Strategy<Value = Event> {
    let prompt = prop_oneof![3 => 1..200u64, 1 => 200..60_000u64];
    let slots = prop_oneof![5 => Just(1u32), 1 => 2..5u32];
    prop_oneof![
        9 => (0..2usize, slots, prompt, -2..3i32).prop_map(|(home, slots, prompt_tokens, priority)| {
            Event::Enter { home, need: Need { slots, prompt_tokens, output_tokens: 10 }, priority }
        }),
        6 => any::<usize>().prop_map(Event::Finish),
        4 => any::<usize>().prop_map(Event::FirstToken),
        1 => any::<usize>().prop_map(Event::Abandon),
        1 => (2..6u32).prop_map(Event::Resize),
        1 => (0..3usize, any::<bool>()).prop_map(|(backend, on)| Event::Drain(backend, on)),
        2 => (0..4_000u64).prop_map(Event::Wait),
    ]
}

fn specs(slots: u32, order: QueueOrder, tokens: Option<u64>) -> Vec<PoolSpec> {
    let limits = BackendLimits { tokens, prefill_tokens: Some(80_000), ..limits(slots, 1) };
    let mut specs = vec![spec("short", 2, limits, vec![]), spec("long", 1, limits, vec![0])];
    for spec in &mut specs {
        spec.rules = PoolRules { order, queue_length: QUEUE, queue_timeout: TIMEOUT, ..spec.rules.clone() };
    }
    specs
}

fn orders() -> impl Strategy<Value = QueueOrder> {
    prop_oneof![Just(0), Just(250), Just(500), Just(1_000_000)]
        .prop_map(|micros| QueueOrder { aging_per_token: Duration::from_micros(micros) })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn whatever_the_order_a_request_has_a_bounded_number_of_overtakers(
        history in proptest::collection::vec(events(), 40..240),
        order in orders(),
        tokens in proptest::option::of(61_000..200_000u64),
    ) {
        let mut observed = Observed::new(&specs(2, order, tokens));
        for event in history {
            let fixture = &mut observed.fixture;
            match event {
                Event::Enter { home, need, priority } => {
                    let request = AdmissionRequest { need, priority, ..fixture.request(home, 1) };
                    observed.enter(request)?;
                }
                Event::Finish(index) if !observed.leases.is_empty() => {
                    let index = index % observed.leases.len();
                    drop(observed.leases.swap_remove(index));
                }
                Event::FirstToken(index) if !observed.leases.is_empty() => {
                    let index = index % observed.leases.len();
                    observed.leases[index].first_token();
                }
                Event::Abandon(index) if !observed.waiting.is_empty() => {
                    let index = index % observed.waiting.len();
                    drop(observed.waiting.swap_remove(index));
                }
                Event::Resize(slots) => {
                    fixture.layout = fixture.admission.apply(&specs(slots, order, tokens), RULES, fixture.now);
                }
                Event::Drain(backend, on) => {
                    fixture.admission.set_draining(BackendId::new(backend), on);
                }
                Event::Wait(ms) => fixture.now += Duration::from_millis(ms),
                Event::Finish(_) | Event::FirstToken(_) | Event::Abandon(_) => {}
            }
            observed.settle(Vec::new())?;
        }
    }
}

/// `shortest_first` with the defaults: one prompt of 40,000 tokens among short ones that never stop
/// coming.
#[test]
fn a_long_prompt_is_served_beside_short_ones_that_never_stop_coming() {
    let order = QueueOrder { aging_per_token: Duration::from_micros(500) };
    let mut one = spec("one", 1, BackendLimits { long_prefix: None, ..limits(2, 0) }, vec![]);
    one.rules = PoolRules { order, queue_length: 512, queue_timeout: TIMEOUT, ..one.rules };
    let mut fixture = Fixture::new(&[one]);
    let enter = |fixture: &Fixture, prompt| {
        let request = AdmissionRequest { arrived: fixture.now, ..fixture.request(0, prompt) };
        match fixture.admission.enter(request) {
            AdmissionDecision::Queued(ticket, _) => ticket,
            other => panic!("the backend is full: {other:?}"),
        }
    };
    let mut running: Vec<Lease> = (0..2).map(|_| fixture.granted(0, 200)).collect();
    let (begun, mut long) = (fixture.now, enter(&fixture, 40_000));
    let mut short: Vec<Ticket> = (0..4).map(|_| enter(&fixture, 200)).collect();
    loop {
        fixture.now += Duration::from_millis(100);
        let waited = fixture.now.duration_since(begun);
        assert!(waited < TIMEOUT, "the long prompt starved");
        drop(running.remove(0));
        short.push(enter(&fixture, 200));
        if let Some(WaitResult::Granted(_)) = poll(&mut long) {
            assert!(waited <= TIMEOUT / 4 + Duration::from_millis(200), "{waited:?}");
            return;
        }
        let served = short.iter_mut().position(|ticket| match poll(ticket) {
            Some(WaitResult::Granted(lease)) => {
                running.push(lease);
                true
            }
            _ => false,
        });
        short.remove(served.expect("a short one is served instead"));
    }
}
