//! One of several gateways leads. The tests kill it, freeze and resume it, and ask it to stop,
//! while clients stream.
//!
//! The clients behave like a load balancer with health checks. They send a new request to a gateway
//! whose `/ready` is 200, and if no byte of an answer comes, to another gateway. Only a stream that
//! the killed gateway had begun is lost.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::*;

/// A longer lease than in other tests, because a gateway that gets no processor for most of its
/// lease would lose the lead.
pub(super) const TERM_LEASE: Duration = Duration::from_secs(3);
/// Maximum time until another gateway leads. It consists of a lease on a clock that is a tenth too
/// slow, a round of the election, and delays of a machine under load.
const SWITCH_MAX: Duration = Duration::from_secs(6);
const KEY: &str = "sluice-ledger-leader";
const STREAMS: usize = 12;

pub(super) struct Trio {
    store: Store,
    engines: Vec<Arc<Engine>>,
    pub(super) gateways: Vec<Gateway>,
}

impl Trio {
    pub(super) async fn start(leader: &str, state: Option<&Path>, tables: &str) -> Self {
        Self::on(Store::Fake(Fake::start().await), leader, state, tables).await
    }

    async fn on(store: Store, leader: &str, state: Option<&Path>, tables: &str) -> Self {
        let engines = vec![Engine::start().await, Engine::start().await];
        let mut gateways = Vec::new();
        for name in ["one", "two", "three"] {
            gateways.push(start(&store, &engines, name, leader, state, tables).await);
        }
        let trio = Self { store, engines, gateways };
        for gateway in &trio.gateways {
            let has_share = async |gateway: &Gateway| {
                gateway.status().await.and_then(|status| status.cluster).is_some_and(|cluster| cluster.ready)
            };
            gateway.until("it has a share", has_share).await;
        }
        trio.until_one_leads().await;
        trio
    }

    /// Returns the index of the leader.
    pub(super) async fn until_one_leads(&self) -> usize {
        let begun = Instant::now();
        loop {
            let mut leaders = Vec::new();
            for (number, gateway) in self.gateways.iter().enumerate() {
                if leads(gateway).await {
                    leaders.push(number);
                }
            }
            match leaders[..] {
                [one] => return one,
                _ => assert!(begun.elapsed() < TIMEOUT, "{leaders:?} lead\n{}", self.logs()),
            }
            sleep(LOOK).await;
        }
    }

    fn ports(&self) -> Vec<u16> {
        self.gateways.iter().map(|gateway| gateway.port).collect()
    }

    pub(super) fn logs(&self) -> String {
        self.gateways.iter().map(|gateway| format!("{}:\n{}", gateway.name, gateway.log())).collect()
    }
}

async fn start(
    store: &Store,
    engines: &[Arc<Engine>],
    name: &str,
    leader: &str,
    state: Option<&Path>,
    tables: &str,
) -> Gateway {
    let lines = format!("leader = \"{leader}\"");
    let fleet = "restarts = 1000\nbackoff = \"200ms\"\nbackoff_max = \"300ms\"";
    let server = "lame_duck = \"5s\"";
    let leader = Leader { lines: &lines, lease: Some(TERM_LEASE), state, server, fleet, tables };
    Gateway::start(name, &Setup { store: &store.url(), mode: "keep", slots: SLOTS, engines, more: "", leader }).await
}

async fn leads(gateway: &Gateway) -> bool {
    let status = timeout(Duration::from_secs(2), gateway.status()).await.ok().flatten();
    status.and_then(|status| status.cluster).and_then(|cluster| cluster.leader).is_some_and(|leader| leader.leads)
}

async fn is_ready(port: u16) -> bool {
    let asked = gateways::exchange(port, "GET /ready HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n");
    let answer = timeout(Duration::from_millis(500), asked).await.ok().flatten();
    answer.is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// How a stream ended at one gateway.
#[derive(Debug, PartialEq)]
pub(super) enum Ended {
    Whole,
    /// No byte of the answer came, or it was a 503: another gateway may serve the request.
    Unserved,
    /// The stream broke after the answer had begun.
    Cut,
}

pub(super) async fn stream(port: u16, model: &str, tokens: u64) -> Ended {
    let body = format!(r#"{{"model":"{model}","prompt":"a","stream":true,"ignore_eos":true,"max_tokens":{tokens}}}"#);
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: g\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut answer = Vec::new();
    if let Ok(mut socket) = TcpStream::connect(("127.0.0.1", port)).await
        && socket.write_all(request.as_bytes()).await.is_ok()
    {
        let _ = socket.read_to_end(&mut answer).await;
    }
    let answer = String::from_utf8_lossy(&answer);
    match answer.contains("[DONE]") {
        true => Ended::Whole,
        false if answer.is_empty() || answer.starts_with("HTTP/1.1 503") => Ended::Unserved,
        false => Ended::Cut,
    }
}

#[derive(Debug, Default)]
struct Counts {
    whole: AtomicU64,
    cut: AtomicU64,
    again: AtomicU64,
    lost: AtomicU64,
}

fn add(count: &AtomicU64) {
    count.fetch_add(1, Relaxed);
}

/// Clients behind a load balancer. A request is lost if no gateway has served it within
/// [`TIMEOUT`].
struct Clients {
    counts: Arc<Counts>,
    tasks: JoinSet<()>,
}

impl Clients {
    fn begin(ports: Vec<u16>) -> Self {
        let (counts, mut tasks) = (Arc::new(Counts::default()), JoinSet::new());
        for client in 0..STREAMS {
            let (counts, ports) = (Arc::clone(&counts), ports.clone());
            let mut next = client as u64 * 7;
            tasks.spawn(async move {
                loop {
                    next = (next * 1_103_515_245 + 12_345) % (1 << 31);
                    request(&ports, &counts, 5 + next % 20).await;
                }
            });
        }
        Self { counts, tasks }
    }

    async fn end(mut self) -> Arc<Counts> {
        self.tasks.shutdown().await;
        eprintln!("{:?}", self.counts);
        self.counts
    }
}

async fn request(ports: &[u16], counts: &Counts, tokens: u64) {
    let begun = Instant::now();
    while begun.elapsed() < TIMEOUT {
        for port in ports {
            if !is_ready(*port).await {
                continue;
            }
            match stream(*port, "m", tokens).await {
                Ended::Unserved => counts.again.fetch_add(1, Relaxed),
                Ended::Whole => return add(&counts.whole),
                Ended::Cut => return add(&counts.cut),
            };
        }
        sleep(LOOK).await;
    }
    counts.lost.fetch_add(1, Relaxed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_killed_is_followed_within_a_lease_and_no_request_is_lost_that_another_one_could_save() {
    a_killed_leader_is_followed(Store::Fake(Fake::start().await)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd: apt-get install etcd-server, or SLUICE_ETCD=program"]
async fn real_etcd_leader_is_killed() {
    a_killed_leader_is_followed(Store::Real(Box::new(Real::start().await))).await;
}

async fn a_killed_leader_is_followed(store: Store) {
    let mut trio = Trio::on(store, "serves", None, "").await;
    let first = trio.until_one_leads().await;
    for (number, gateway) in trio.gateways.iter().enumerate() {
        let wanted = number == first;
        gateway.until("only the leader is ready", async |gateway| gateway.is_ready().await == wanted).await;
    }
    let clients = Clients::begin(trio.ports());
    sleep(TERM_LEASE).await;
    let begun: i64 = trio.engines.iter().map(|engine| engine.running()).sum();
    let killed = Instant::now();
    trio.gateways[first].kill().await;
    trio.gateways.remove(first);
    let second = trio.until_one_leads().await;
    let led = killed.elapsed();
    trio.gateways[second].until("it is ready", async |gateway| gateway.is_ready().await).await;
    eprintln!(
        "after a SIGKILL another one leads {led:.2?} and is ready {:.2?} later, {begun} streams had begun",
        killed.elapsed()
    );
    assert!(led <= SWITCH_MAX, "{led:?}\n{}", trio.logs());
    sleep(TERM_LEASE).await;
    let counts = clients.end().await;
    let of = |count: &AtomicU64| count.load(Relaxed);
    assert_eq!(of(&counts.lost), 0, "{counts:?}\n{}", trio.logs());
    // Streams had begun at the killed gateway, some of them while they were counted.
    assert!(of(&counts.cut) <= STREAMS as u64, "{counts:?}");
    assert!(of(&counts.whole) > 20, "{counts:?}");
    let record = trio.store.value_of(KEY).await.unwrap();
    assert_eq!(record["leaseTransitions"], 1, "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_leader_stops_in_order_one_gateway_is_ready_at_any_moment_and_no_stream_is_cut() {
    a_leader_stops_in_order(Store::Fake(Fake::start().await)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd: apt-get install etcd-server, or SLUICE_ETCD=program"]
async fn real_etcd_leader_stops_in_order() {
    a_leader_stops_in_order(Store::Real(Box::new(Real::start().await))).await;
}

async fn a_leader_stops_in_order(store: Store) {
    let mut trio = Trio::on(store, "serves", None, "").await;
    let first = trio.until_one_leads().await;
    let clients = Clients::begin(trio.ports());
    sleep(Duration::from_secs(1)).await;
    let (asked, ports) = (Instant::now(), trio.ports());
    trio.gateways[first].signal(Signal::SIGTERM);
    let mut stopping = trio.gateways.remove(first);
    let order = [ports[first], ports[(first + 1) % 3], ports[(first + 2) % 3]];
    while is_ready(order[0]).await {
        sleep(LOOK).await;
    }
    eprintln!("after a SIGTERM the one that led is ready for {:.2?} more", asked.elapsed());
    let (one, other) = (is_ready(order[1]).await, is_ready(order[2]).await);
    assert!(one || other, "none is ready\n{}\n{}", stopping.log(), trio.logs());
    assert!(asked.elapsed() < TERM_LEASE, "it waited for the lease\n{}\n{}", stopping.log(), trio.logs());
    stopping.ended().await;
    let counts = clients.end().await;
    assert_eq!((counts.cut.load(Relaxed), counts.lost.load(Relaxed)), (0, 0), "{counts:?}");
    assert!(counts.whole.load(Relaxed) > 10, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_of_the_leader_gives_the_lead_up_at_once_and_cuts_no_stream() {
    let mut trio = Trio::start("decides", None, "").await;
    let first = trio.until_one_leads().await;
    let clients = Clients::begin(trio.ports());
    sleep(Duration::from_secs(1)).await;
    let holder = |store: &Store| {
        store.fake().value_of(KEY).and_then(|record| record["holderIdentity"].as_str().map(str::to_owned))
    };
    let (asked, before) = (Instant::now(), holder(&trio.store));
    trio.gateways[first].run(&["--upgrade"]).await;
    while holder(&trio.store).is_none_or(|now| Some(now) == before) {
        assert!(asked.elapsed() < TIMEOUT, "the lead stays\n{}", trio.logs());
        sleep(LOOK).await;
    }
    assert!(asked.elapsed() < TERM_LEASE, "it waited for the lease\n{}", trio.logs());
    eprintln!("after the upgrade began another process leads {:.2?} later", asked.elapsed());
    trio.until_one_leads().await;
    sleep(Duration::from_secs(1)).await;
    let counts = clients.end().await;
    assert_eq!((counts.cut.load(Relaxed), counts.lost.load(Relaxed)), (0, 0), "{counts:?}\n{}", trio.logs());
    // The old process gave up the lead. Otherwise the new process could take the lead only after a
    // lease.
    assert_eq!(trio.logs().matches("the lead was not given up").count(), 0, "{}", trio.logs());
}

/// A backend whose engine never starts, so that the leading gateway keeps starting it; each attempt
/// writes a line with the id of the gateway's process.
fn restless(acts: &Path) -> String {
    format!(
        "[[model]]\nname = \"n\"\n[[pool]]\nname = \"q\"\nmodels = [\"n\"]\n[[pool.backend]]\nname = \"c\"\nurl = \"http://127.0.0.1:9\"\n\
         control = {{ start = [\"sh\", \"-c\", \"echo $PPID >> {acts}; exit 1\"], stop = [\"true\"], status = [\"false\"] }}\n",
        acts = acts.display()
    )
}

fn lines(acts: &Path) -> Vec<String> {
    fs::read_to_string(acts).unwrap_or_default().lines().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_was_stopped_and_goes_on_changes_no_engine_any_more_and_serves_the_streams_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let acts = folder.path().join("acts");
    let trio = Trio::start("decides", None, &restless(&acts)).await;
    for gateway in &trio.gateways {
        gateway.until("all are ready", async |gateway| gateway.is_ready().await).await;
    }
    let first = &trio.gateways[trio.until_one_leads().await];
    first.until("it acts", async |gateway| lines(&acts).contains(&gateway.pid().to_string())).await;
    let port = first.port;
    let streams: Vec<_> = (0..3).map(|_| tokio::spawn(stream(port, "m", 150))).collect();
    sleep(Duration::from_millis(500)).await;
    first.signal(nix::sys::signal::Signal::SIGSTOP);
    let stopped = Instant::now();
    let others: Vec<&Gateway> = trio.gateways.iter().filter(|gateway| gateway.name != first.name).collect();
    let second = loop {
        assert!(stopped.elapsed() < TIMEOUT, "none leads\n{}", trio.logs());
        match (leads(others[0]).await, leads(others[1]).await) {
            (true, false) => break others[0],
            (false, true) => break others[1],
            (both, _) => assert!(!both, "two lead"),
        }
        sleep(LOOK).await;
    };
    second.until("it acts", async |gateway| lines(&acts).contains(&gateway.pid().to_string())).await;
    eprintln!("after a SIGSTOP another one acts {:.2?} later", stopped.elapsed());
    let before = lines(&acts).len();
    first.signal(nix::sys::signal::Signal::SIGCONT);
    second.until("it acts further", async |_| lines(&acts).len() >= before + 3).await;
    let later = lines(&acts).split_off(before);
    assert!(later.iter().all(|pid| *pid == second.pid().to_string()), "{later:?}\n{}", trio.logs());
    first.until("it says so", async |gateway| gateway.log().contains("no longer leads")).await;
    assert!(leads(second).await && !leads(first).await);
    for stream in streams {
        assert_eq!(stream.await.unwrap(), Ended::Whole, "{}", first.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_leader_that_has_the_journal_of_all_keeps_it_until_it_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (acts, state) = (folder.path().join("acts"), folder.path().join("state"));
    let mut trio = Trio::start("decides", Some(&state), &restless(&acts)).await;
    let first = trio.until_one_leads().await;
    trio.gateways[first].until("it acts", async |_| !lines(&acts).is_empty()).await;
    trio.gateways[first].signal(Signal::SIGSTOP);
    let mut frozen = trio.gateways.remove(first);
    let second = &trio.gateways[trio.until_one_leads().await];
    let why = async |gateway: &Gateway| {
        let leader = gateway.status().await.and_then(|status| status.cluster).and_then(|cluster| cluster.leader);
        leader.and_then(|leader| leader.why).unwrap_or_default()
    };
    second.until("it waits", async |gateway| why(gateway).await.contains("used by another running sluice")).await;
    let before = lines(&acts);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(lines(&acts), before, "an engine was changed without the journal");
    frozen.kill().await;
    let pid = second.pid().to_string();
    second.until("it acts", async |_| lines(&acts).contains(&pid)).await;
    assert!(second.log().contains("continues what an earlier gateway began"), "{}", second.log());
    assert_eq!(why(second).await, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_the_leader_may_change_is_refused_elsewhere_with_its_name() {
    let trio = Trio::start("decides", None, "").await;
    let leader = &trio.gateways[trio.until_one_leads().await];
    for gateway in &trio.gateways {
        gateway
            .until("it knows", async |gateway| {
                gateway.log().contains(&format!("{} leads", leader.name)) || gateway.name == leader.name
            })
            .await;
        let refused = gateway.post("/admin/tuner/freeze").await;
        match gateway.name == leader.name {
            true => assert!(refused.starts_with("HTTP/1.1 200"), "{refused}"),
            false => {
                assert!(refused.starts_with("HTTP/1.1 409") && refused.contains("not_leading"), "{refused}");
                assert!(refused.contains(&format!("{} leads", leader.name)), "{refused}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_store_none_begins_to_lead_and_one_that_leads_stops_in_time_and_serves_on() {
    the_store_is_gone(Store::Fake(Fake::start().await)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd: apt-get install etcd-server, or SLUICE_ETCD=program"]
async fn real_etcd_is_gone_and_comes_back() {
    the_store_is_gone(Store::Real(Box::new(Real::start().await))).await;
}

async fn the_store_is_gone(store: Store) {
    let mut trio = Trio::on(store, "serves", None, "").await;
    let first = &trio.gateways[trio.until_one_leads().await];
    trio.store.take_down().await;
    let gone = Instant::now();
    first.until("it stops to lead", async |gateway| !leads(gateway).await).await;
    assert!(gone.elapsed() < TERM_LEASE, "{:?}", gone.elapsed());
    first.until("it says why", async |gateway| gateway.log().contains("no longer leads")).await;
    sleep(TERM_LEASE).await;
    for gateway in &trio.gateways {
        assert!(!leads(gateway).await);
        // In mode keep, the last leader stays ready. If no gateway were ready, a load balancer
        // would refuse all requests.
        assert_eq!(gateway.is_ready().await, gateway.name == first.name, "{}", gateway.name);
    }
    assert_eq!(stream(first.port, "m", 5).await, Ended::Whole);
    trio.store.bring_back().await;
    let back = Instant::now();
    trio.until_one_leads().await;
    eprintln!("one leads {:.2?} after the store was back", back.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_record_is_left_as_it_is_and_a_holder_written_by_hand_is_obeyed() {
    let trio = Trio::start("decides", None, "").await;
    let first = &trio.gateways[trio.until_one_leads().await];
    trio.store.fake().put_at(KEY, br#"{"holderIdentity":"by-hand","leaseDurationSeconds":3,"leaseTransitions":9}"#);
    first.until("it stops at once", async |gateway| gateway.log().contains("by-hand leads")).await;
    assert!(!leads(first).await);
    trio.until_one_leads().await;
    assert_eq!(trio.store.fake().value_of(KEY).unwrap()["leaseTransitions"], 10);
    trio.store.fake().put_at(KEY, b"[]");
    for gateway in &trio.gateways {
        gateway.until("it says so", async |gateway| gateway.log().contains("is no record of who leads")).await;
    }
    sleep(TERM_LEASE).await;
    for gateway in &trio.gateways {
        assert!(!leads(gateway).await, "{}", gateway.name);
    }
    assert_eq!(trio.store.fake().value_of(KEY), Some(serde_json::json!([])));
}
