//! Gateways with a ledger in memory, on virtual time.
//!
//! Every step checks that all gateways together stay within the limit.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, advance, sleep};

use super::renewal::Running;
use super::store::{Found, Store, Written};
use super::{Cluster, Divided};
use sluice_config::{Address, ClusterMode, Endpoint, Policy};
use sluice_core::base::BackendId;
use sluice_fleet::{Lead, OtherGateways};
use sluice_gateway::flow::keys::KeyUsage;
use sluice_gateway::pool::{
    Admission, AdmissionDecision, AdmissionRequest, BackendLimits, BackendSpec, HealthRules, Lease, LongPrefix, Need,
    PoolLayout, PoolRules, PoolSpec, QueueOrder, Ticket, WaitResult,
};

mod keys;
mod others;

const SLOTS: u32 = 10;
const LEASE: Duration = Duration::from_secs(4);

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Fault {
    #[default]
    None,
    Gone,
    /// The store writes, but the answer is lost.
    Forgets,
}

#[derive(Debug, Default)]
struct State {
    bytes: Option<Vec<u8>>,
    version: u64,
}

/// One object in memory. Clones share the object and its fault.
#[derive(Clone, Debug, Default)]
struct Memory {
    state: Arc<Mutex<State>>,
    fault: Arc<Mutex<Fault>>,
}

impl Memory {
    /// The same object with a separate fault.
    fn apart(&self) -> Self {
        Self { state: Arc::clone(&self.state), fault: Arc::default() }
    }

    fn set(&self, fault: Fault) {
        *self.fault.lock() = fault;
    }

    async fn pass(&self, what: Fault) {
        sleep(Duration::from_millis(3)).await;
        if *self.fault.lock() == what {
            std::future::pending::<()>().await;
        }
    }
}

impl Store for Memory {
    fn name(&self) -> String {
        "memory".to_owned()
    }

    async fn read(&self) -> Result<Found, String> {
        self.pass(Fault::Gone).await;
        let state = self.state.lock();
        Ok(Found { bytes: state.bytes.clone(), version: state.version.to_string() })
    }

    async fn write(&self, bytes: Vec<u8>, over: &Found) -> Written {
        self.pass(Fault::Gone).await;
        let written = {
            let mut state = self.state.lock();
            let same = state.version.to_string() == over.version;
            if same {
                (state.bytes, state.version) = (Some(bytes), state.version + 1);
            }
            same
        };
        self.pass(Fault::Forgets).await;
        if written { Written::Done } else { Written::Refused }
    }
}

struct Gateway {
    admission: Arc<Admission>,
    keys: Arc<KeyUsage>,
    lead: Arc<Lead>,
    others: Arc<OtherGateways>,
    layout: PoolLayout,
    cluster: Cluster,
    leases: Vec<Lease>,
    tickets: Vec<Ticket>,
}

impl Gateway {
    fn join(store: &Memory, number: u64, mode: ClusterMode) -> Self {
        Self::join_before(store, number, mode, |_| Box::pin(async { Some(0) }))
    }

    /// Joins in front of an engine that reports the load `running`.
    fn join_before(store: &Memory, number: u64, mode: ClusterMode, running: fn(Arc<Address>) -> Running) -> Self {
        let rules = HealthRules {
            probe_failures: 2,
            request_failures: 3,
            eject_base: Duration::from_secs(1),
            eject_max: Duration::from_secs(9),
            max_ejected: 0.5,
        };
        let admission = Admission::new(Instant::now(), rules, number);
        let endpoint = Endpoint { https: false, host: "127.0.0.1".to_owned(), port: 9, prefix: String::new() };
        let address = Arc::new(Address::new(endpoint, None, None));
        let limits = BackendLimits {
            slots: SLOTS,
            tokens: None,
            prefill_tokens: None,
            long_prefix: Some(LongPrefix { threshold: 1_000, slots: 1 }),
        };
        let pool = PoolSpec {
            name: "p".into(),
            rules: PoolRules {
                policy: Policy::LeastWork,
                limits,
                queue_length: 64,
                queue_timeout: Duration::from_secs(60),
                hold: None,
                order: QueueOrder::FIFO,
                by_priority: None,
            },
            backends: vec![BackendSpec { name: "b".into(), address, weight: 1.0 }],
            spill: vec![],
        };
        let layout = admission.apply(&[pool], rules, Instant::now());
        admission.record_probe(layout.backends[0][0], true, Instant::now());
        let table = sluice_config::Cluster {
            name: Some(format!("g{number}")),
            etcd: vec![],
            tls: None,
            kubernetes: None,
            key: "k".to_owned(),
            lease: LEASE,
            mode,
            leader: sluice_config::ClusterLeader::None,
        };
        let keys = Arc::new(KeyUsage::default());
        let (lead, others) = (Arc::<Lead>::default(), Arc::<OtherGateways>::default());
        let divided = Divided { admission: &admission, keys: &keys, lead: &lead, others: &others };
        let cluster = Cluster::join_with(store.clone(), &table, divided, (number, false), running);
        Self { admission, keys, lead, others, layout, cluster, leases: Vec::new(), tickets: Vec::new() }
    }

    fn backend(&self) -> BackendId {
        self.layout.backends[0][0]
    }

    fn share(&self) -> u32 {
        self.admission.view()[0].backends[self.backend().index()].share.map_or(0, |share| share.slots)
    }

    fn fill(&mut self, most: usize) {
        for mut ticket in std::mem::take(&mut self.tickets) {
            match Pin::new(&mut ticket).poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(WaitResult::Granted(lease)) => self.leases.push(lease),
                Poll::Ready(other) => panic!("nothing was reconfigured, and no engine started: {other:?}"),
                Poll::Pending => self.tickets.push(ticket),
            }
        }
        while self.leases.len() + self.tickets.len() < most {
            let request = AdmissionRequest::new(
                self.layout.number,
                self.layout.pools[0],
                Need { slots: 1, prompt_tokens: 10, output_tokens: 10 },
                Instant::now(),
            );
            match self.admission.enter(request) {
                AdmissionDecision::Granted(lease) => self.leases.push(lease),
                AdmissionDecision::Queued(ticket, _) => self.tickets.push(ticket),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Lets time pass in small steps. After each, the limit must hold for the sum over all gateways of
/// the share or, if larger, the use.
async fn pass(gateways: &mut [Gateway], seconds: u64, mut each: impl FnMut(&mut [Gateway])) {
    for step in 0..seconds * 20 {
        advance(Duration::from_millis(50)).await;
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        each(gateways);
        let sum: u32 = gateways.iter().map(|gateway| gateway.share().max(gateway.leases.len() as u32)).sum();
        assert!(sum <= SLOTS, "step {step}: {sum} of {SLOTS}");
    }
}

fn shares(gateways: &[Gateway]) -> Vec<u32> {
    gateways.iter().map(Gateway::share).collect()
}

#[tokio::test(start_paused = true)]
async fn shares_follow_demand_and_their_sum_is_within_the_limit() {
    let store = Memory::default();
    let mut gateways = vec![Gateway::join(&store, 1, ClusterMode::Strict)];
    assert_eq!(gateways[0].share(), 0, "nothing before it has joined");
    assert!(!gateways[0].cluster.view().is_ready());
    pass(&mut gateways, 15, |_| {}).await;
    assert_eq!(shares(&gateways), [SLOTS], "one gateway has all");
    assert!(gateways[0].cluster.view().is_ready());
    gateways.push(Gateway::join(&store, 2, ClusterMode::Strict));
    pass(&mut gateways, 5, |gateways| gateways[0].fill(8)).await;
    assert_eq!(gateways[0].leases.len(), 8);
    gateways[0].leases.clear();
    pass(&mut gateways, 5, |gateways| {
        gateways[0].fill(1);
        gateways[1].fill(30);
    })
    .await;
    let busy = gateways[1].leases.len();
    assert!((7..=9).contains(&busy), "the busy one: {busy}");
}

#[tokio::test(start_paused = true)]
async fn without_the_store_strict_stops_when_the_lease_is_over_and_keep_goes_on() {
    for mode in [ClusterMode::Strict, ClusterMode::Keep] {
        let store = Memory::default();
        let mut gateways = vec![Gateway::join(&store, 1, mode), Gateway::join(&store, 2, mode)];
        pass(&mut gateways, 20, |_| {}).await;
        let before = shares(&gateways);
        assert_eq!(before.iter().sum::<u32>(), SLOTS);
        store.set(Fault::Gone);
        pass(&mut gateways, 2, |_| {}).await;
        assert_eq!(shares(&gateways), before, "within the lease");
        pass(&mut gateways, 4, |_| {}).await;
        let keeps = mode == ClusterMode::Keep;
        assert_eq!(shares(&gateways), if keeps { before } else { vec![0, 0] }, "{mode:?}");
        assert_eq!(gateways[0].cluster.view().is_ready(), keeps);
        let status = gateways[0].cluster.view().status();
        assert_eq!(status.standing, if keeps { "keeping" } else { "stopped" });
        assert!(status.why.unwrap().contains("has not answered within"));
        store.set(Fault::None);
        pass(&mut gateways, 4, |_| {}).await;
        assert_eq!(shares(&gateways).iter().sum::<u32>(), SLOTS);
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_without_an_answer_raises_nothing() {
    let store = Memory::default();
    let mut gateways =
        vec![Gateway::join(&store, 1, ClusterMode::Strict), Gateway::join(&store, 2, ClusterMode::Strict)];
    pass(&mut gateways, 20, |_| {}).await;
    for round in 0..4 {
        store.set(if round % 2 == 0 { Fault::Forgets } else { Fault::None });
        pass(&mut gateways, 4, |gateways| {
            gateways[round % 2].fill(30);
            let other = &mut gateways[1 - round % 2];
            (other.leases, other.tickets) = Default::default();
        })
        .await;
    }
    assert_eq!(gateways[0].cluster.view().status().standing, "holding");
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_leaves_gives_back_at_once_and_one_that_dies_after_its_lease() {
    let store = Memory::default();
    let mut gateways: Vec<Gateway> = (1..4).map(|number| Gateway::join(&store, number, ClusterMode::Keep)).collect();
    pass(&mut gateways, 20, |_| {}).await;
    let leaving = gateways.pop().unwrap();
    leaving.cluster.end().await;
    pass(&mut gateways, 3, |_| {}).await;
    assert_eq!(shares(&gateways).iter().sum::<u32>(), SLOTS);
    let dead = gateways.pop().unwrap();
    dead.cluster.renewing.abort();
    let had = dead.share();
    pass(&mut gateways, 4, |_| {}).await;
    assert_eq!(gateways[0].share(), SLOTS - had, "its lease may not be over");
    pass(&mut gateways, 10, |_| {}).await;
    assert_eq!(gateways[0].share(), SLOTS);
}

#[tokio::test(start_paused = true)]
async fn of_an_engine_that_says_nothing_keep_takes_a_share_back_and_strict_does_not() {
    for (mode, wanted) in [(ClusterMode::Keep, SLOTS), (ClusterMode::Strict, 0)] {
        let store = Memory::default();
        let mut gateways = vec![Gateway::join_before(&store, 1, mode, |_| Box::pin(async { None }))];
        // At first, the limit may be held for earlier gateways.
        pass(&mut gateways, 40, |_| {}).await;
        assert_eq!(gateways[0].share(), wanted);
        let why = gateways[0].cluster.view().status().why;
        assert_eq!(why.is_some_and(|why| why.contains("what they run")), mode == ClusterMode::Strict);
    }
}

/// Once a plan is written that takes capacity from a gateway, other gateways may use that capacity.
#[tokio::test(start_paused = true)]
async fn less_is_used_from_before_a_write_is_sent() {
    let store = Memory::default();
    let forgetful = store.apart();
    let mut gateways =
        vec![Gateway::join(&forgetful, 1, ClusterMode::Strict), Gateway::join(&store, 2, ClusterMode::Strict)];
    pass(&mut gateways, 20, |gateways| gateways[0].fill(30)).await;
    let had = gateways[0].share();
    assert!(had >= 7, "{had}");
    forgetful.set(Fault::Forgets);
    pass(&mut gateways, 3, |gateways| {
        (gateways[0].leases, gateways[0].tickets) = Default::default();
        gateways[1].fill(30);
    })
    .await;
    assert!(gateways[1].leases.len() > (SLOTS - had) as usize, "the other has got more");
}
