//! The CPU time that admission takes for one request, by the number of backends of its pool.
//!
//! Each request passes through all of admission: it enters, reports its first token and its pace,
//! succeeds and returns its lease. Meanwhile every backend carries [`BESIDE`] other requests. One
//! prompt in 16 is large. The pool has one of three states:
//!
//! - `room`: every backend has room, so the policy compares them.
//! - `full`: no backend has room; each request waits for the room of the oldest running request.
//! - `one free`: a single backend has room, and the policy must find it.
//!
//! The result is CPU time of this thread, which other processes change little. It is the median of
//! [`ROUNDS`] rounds, in which all sizes alternate. The command is `cargo bench --bench admission
//! [POLICY [REQUESTS [BACKENDS [STATE]]]]`. With all four arguments the program runs a single case,
//! whose instructions `valgrind --tool=callgrind` can count.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use sluice_config::{Address, Endpoint, Policy};
use sluice_gateway::pool::{
    Admission, AdmissionDecision, AdmissionRequest, BackendLimits, BackendSpec, HealthRules, Lease, Need, PoolLayout,
    PoolRules, PoolSpec, QueueOrder, Ticket, WaitResult,
};
use tokio::time::Instant;

/// Numbers of backends in the pool, of which each is measured.
const SIZES: [usize; 4] = [2, 16, 64, 256];
/// Requests that each backend carries besides the measured one.
const BESIDE: usize = 8;
const ROUNDS: usize = 9;
/// Requests in a round, unless the command line says otherwise.
const REQUESTS: u32 = 200_000;

/// Which backends have room when a request enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    Everywhere,
    Nowhere,
    OnOne,
}

struct Bench {
    admission: Arc<Admission>,
    layout: PoolLayout,
    running: VecDeque<Lease>,
    waiting: Option<Ticket>,
    room: Room,
    now: Instant,
    count: u32,
}

impl Bench {
    fn new(policy: Policy, backends: usize, room: Room) -> Self {
        let now = Instant::now();
        let rules = HealthRules {
            probe_failures: 2,
            request_failures: 3,
            eject_base: Duration::from_secs(1),
            eject_max: Duration::from_secs(30),
            max_ejected: 0.5,
        };
        let admission = Admission::new(now, rules, 1);
        let slots = if room == Room::Everywhere { 4 * BESIDE } else { BESIDE };
        let layout = admission.apply(&[pool(policy, backends, slots as u32)], rules, now);
        for backend in layout.backends.iter().flatten() {
            admission.record_probe(*backend, true, now);
        }
        let mut bench = Self { admission, layout, running: VecDeque::new(), waiting: None, room, now, count: 0 };
        let filled = backends * BESIDE - usize::from(room == Room::OnOne);
        (0..filled).for_each(|_| bench.enter());
        bench.waiting = (room == Room::Nowhere).then(|| bench.queue());
        bench
    }

    /// The next request. A thousand requests arrive per second.
    fn request(&mut self) -> AdmissionRequest {
        self.count += 1;
        self.now += Duration::from_millis(1);
        let (prompt_tokens, output_tokens) = if self.count.is_multiple_of(16) { (16_000, 64) } else { (200, 128) };
        AdmissionRequest::new(
            self.layout.number,
            self.layout.pools[0],
            Need { slots: 1, prompt_tokens, output_tokens },
            self.now,
        )
    }

    fn enter(&mut self) {
        let request = self.request();
        match self.admission.enter(request) {
            AdmissionDecision::Granted(lease) => self.begin(lease),
            other => panic!("there is room: {other:?}"),
        }
    }

    fn queue(&mut self) -> Ticket {
        let request = self.request();
        match self.admission.enter(request) {
            AdmissionDecision::Queued(ticket, _) => ticket,
            other => panic!("there is no room: {other:?}"),
        }
    }

    fn begin(&mut self, mut lease: Lease) {
        lease.observe_prefill(200, Duration::from_millis(30), self.now);
        lease.first_token();
        self.running.push_back(lease);
    }

    fn end_oldest(&mut self) {
        let lease = self.running.pop_front().expect("requests run");
        lease.observe_decode(128, Duration::from_millis(8), self.now);
        lease.success(Instant::now());
    }

    fn one_request(&mut self) {
        if self.room != Room::Nowhere {
            self.enter();
            self.end_oldest();
            return;
        }
        let next = self.queue();
        let mut ticket = self.waiting.replace(next).expect("one waits");
        self.end_oldest();
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(&mut ticket).poll(&mut context) {
            std::task::Poll::Ready(WaitResult::Granted(lease)) => self.begin(lease),
            other => panic!("the oldest waiter has the room: {other:?}"),
        }
    }

    /// Nanoseconds of CPU time for one request.
    fn measure(&mut self, requests: u32) -> f64 {
        let begun = cpu_time();
        (0..requests).for_each(|_| self.one_request());
        (cpu_time() - begun).as_nanos() as f64 / f64::from(requests)
    }
}

fn pool(policy: Policy, backends: usize, slots: u32) -> PoolSpec {
    let backend = |number: usize| {
        let host = format!("10.0.{}.{}", number / 250, number % 250 + 1);
        let endpoint = Endpoint { https: false, host, port: 8000, prefix: String::new() };
        let address = Address::new(endpoint, None, None);
        BackendSpec { name: format!("gpu{number}").into(), address: Arc::new(address), weight: 1.0 }
    };
    let rules = PoolRules {
        policy,
        limits: BackendLimits { slots, tokens: None, prefill_tokens: None, long_prefix: None },
        queue_length: 64,
        queue_timeout: Duration::from_secs(600),
        hold: None,
        order: QueueOrder::FIFO,
        by_priority: None,
    };
    PoolSpec { name: "all".into(), rules, backends: (0..backends).map(backend).collect(), spill: Vec::new() }
}

fn cpu_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("Linux has it");
    let microseconds = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(microseconds.unsigned_abs())
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let policies = [Policy::LeastWork, Policy::FewestRequests, Policy::TwoChoices, Policy::RoundRobin];
    let policy = words.first().map_or(Policy::LeastWork, |name| {
        policies.into_iter().find(|policy| policy.word() == name).expect("the name of a policy")
    });
    let requests = words.get(1).map_or(REQUESTS, |word| word.parse().expect("a number of requests"));
    let sizes = words.get(2).map_or(SIZES.to_vec(), |word| vec![word.parse().expect("a number of backends")]);
    println!("nanoseconds of CPU time per request, {policy:?}");
    let all = [("room", Room::Everywhere), ("full", Room::Nowhere), ("one free", Room::OnOne)];
    for (label, room) in all.into_iter().filter(|(label, _)| words.get(3).is_none_or(|word| word == label)) {
        let mut benches: Vec<Bench> = sizes.iter().map(|size| Bench::new(policy, *size, room)).collect();
        let mut rounds = vec![Vec::with_capacity(ROUNDS); sizes.len()];
        for _ in 0..ROUNDS {
            benches.iter_mut().zip(&mut rounds).for_each(|(bench, times)| times.push(bench.measure(requests)));
        }
        for (size, times) in sizes.iter().zip(&mut rounds) {
            times.sort_by(f64::total_cmp);
            println!("{label:>8} {size:>4} backends {:>8.0}", times[ROUNDS / 2]);
        }
    }
}
