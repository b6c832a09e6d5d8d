//! The gateway that leads restarts engines that all gateways use for requests.
//!
//! No gateway loses a stream to a planned restart, and an engine is not stopped while a frozen
//! gateway may still send requests to it.

use std::path::Path;

use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::leaders::{Ended, TERM_LEASE, Trio, stream};
use super::*;

const ENGINES: [&str; 2] = ["n0", "n1"];

fn pool_of(backends: [String; 2]) -> String {
    format!("[[model]]\nname = \"n\"\n[[pool]]\nname = \"q\"\nmodels = [\"n\"]\nslots = 64\n{}", backends.concat())
}

/// The folder of a test whose engines outlive their gateways. Dropping it kills the engines.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // [`launched`] gives engines this variable.
        let mark = format!("RIG={}", self.path().display());
        processes::kill_with(|variable| variable == mark.as_bytes());
    }
}

fn launched(folder: &Path, ports: [u16; 2]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rolling/engine.sh");
    pool_of([0, 1].map(|at| {
        let (name, port, binary) = (ENGINES[at], ports[at], crate::program::binary());
        format!(
            "[[pool.backend]]\nname = \"{name}\"\n[pool.backend.launch]\n\
             command = [\"/bin/bash\", {script:?}, \"{name}\"]\nport = {port}\n\
             env = {{ RIG = {folder:?}, SLUICE = {binary:?} }}\n\
             args = {{ max-num-seqs = 64, served-model-name = \"n\" }}\n"
        )
    }))
}

/// The same engines in the configuration of a gateway that does not run them.
fn found(ports: [u16; 2]) -> String {
    pool_of(
        [0, 1].map(|at| {
            format!("[[pool.backend]]\nname = \"{}\"\nurl = \"http://127.0.0.1:{}\"\n", ENGINES[at], ports[at])
        }),
    )
}

fn ports() -> [u16; 2] {
    [(); 2].map(|()| ports::free_port())
}

async fn state(gateway: &Gateway, engine: &str) -> String {
    let pools = gateway.status().await.map(|status| status.pools).unwrap_or_default();
    let mut backends = pools.into_iter().flat_map(|pool| pool.backends);
    backends.find(|backend| backend.name == engine).map(|backend| backend.state).unwrap_or_default()
}

async fn is_used(gateway: &Gateway, engine: &str) -> bool {
    // An engine that was away is in probation until its first requests have succeeded.
    matches!(&*state(gateway, engine).await, "ready" | "probation")
}

async fn until_used(gateways: &[Gateway]) {
    for gateway in gateways {
        gateway
            .until("both engines are in use", async |gateway| {
                is_used(gateway, "n0").await && is_used(gateway, "n1").await
            })
            .await;
    }
}

async fn restart(leader: &Gateway, engine: &str) {
    let serves = format!("engine backend=q/{engine} step=\"serve\"");
    leader.until("it serves", async |gateway| gateway.log().contains(&serves)).await;
    let path = format!("/admin/backends/q/{engine}/restart");
    let asked = leader.post_json(&path, r#"{"set": {"max-num-seqs": 48}}"#).await;
    assert!(asked.starts_with("HTTP/1.1 20"), "{asked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_is_not_stopped_while_a_gateway_that_stands_still_may_send_requests_to_it() {
    let folder = Folder::new();
    let trio = Trio::start("decides", Some(&folder.path().join("state")), &launched(folder.path(), ports())).await;
    until_used(&trio.gateways).await;
    let leads = trio.until_one_leads().await;
    let (leader, frozen) = (&trio.gateways[leads], &trio.gateways[(leads + 1) % 3]);
    let stops = "engine backend=q/n0 step=\"stop\" settings=max-num-seqs=48";
    restart(leader, "n1").await;
    leader.until("n1 is restarted", async |gateway| gateway.log().contains(&done("n1"))).await;
    frozen.signal(Signal::SIGSTOP);
    let stopped = Instant::now();
    restart(leader, "n0").await;
    leader.until("n0 is stopped", async |gateway| gateway.log().contains(stops)).await;
    assert!(stopped.elapsed() >= TERM_LEASE, "{:?}\n{}", stopped.elapsed(), leader.log());
    frozen.signal(Signal::SIGCONT);
    until_used(&trio.gateways).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planned_restart_by_the_leader_cuts_no_stream_of_the_others() {
    let folder = Folder::new();
    let trio = Trio::start("decides", Some(&folder.path().join("state")), &launched(folder.path(), ports())).await;
    until_used(&trio.gateways).await;
    let mut clients = JoinSet::new();
    let (over, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    for client in 0..12 {
        let (over, ended, port) = (Arc::clone(&over), Arc::clone(&ended), trio.gateways[client % 3].port);
        clients.spawn(async move {
            let mut number = client as u64;
            while !over.load(Relaxed) {
                number += 1;
                let end = stream(port, "n", 300 + number * 397 % 3_000).await;
                ended.lock().push((client % 3, end));
            }
        });
    }
    let leader = &trio.gateways[trio.until_one_leads().await];
    for engine in ENGINES {
        restart(leader, engine).await;
        let others = trio.gateways.iter().filter(|gateway| gateway.name != leader.name);
        for gateway in others {
            gateway.until("it sends nothing there", async |gateway| state(gateway, engine).await == "draining").await;
        }
        leader.until("it is restarted", async |gateway| gateway.log().contains(&done(engine))).await;
        for gateway in &trio.gateways {
            gateway.until("it is in use again", async |gateway| is_used(gateway, engine).await).await;
        }
    }
    over.store(true, Relaxed);
    clients.join_all().await;
    let ended = ended.lock();
    let cut: Vec<_> = ended.iter().filter(|(_, end)| *end != Ended::Whole).collect();
    assert!(cut.is_empty(), "{} of {} were not served whole: {cut:?}\n{}", cut.len(), ended.len(), trio.logs());
    assert!((0..3).all(|gateway| ended.iter().any(|(served, _)| *served == gateway)), "{}", ended.len());
    eprintln!("two planned restarts: {} streams through three gateways, 0 cut", ended.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_of_the_gateway_that_runs_the_engines_closes_none_of_them_for_the_others() {
    let folder = Folder::new();
    let store = Store::Fake(Fake::start().await);
    let (ports, engine) = (ports(), Engine::start().await);
    let start = async |name, tables: &str| {
        let leader = Leader { lines: "", lease: Some(TERM_LEASE), state: None, server: "", fleet: "", tables };
        let setup = Setup {
            store: &store.url(),
            mode: "keep",
            slots: SLOTS,
            engines: std::slice::from_ref(&engine),
            more: "",
            leader,
        };
        Gateway::start(name, &setup).await
    };
    let mut runs = start("runs", &launched(folder.path(), ports)).await;
    let others = start("other", &found(ports)).await;
    until_used(std::slice::from_ref(&runs)).await;
    until_used(std::slice::from_ref(&others)).await;
    // The process before the upgrade lives as long as this stream.
    let long = tokio::spawn(stream(runs.port, "n", 15_000));
    sleep(Duration::from_millis(500)).await;
    let (over, closed) = (AtomicBool::new(false), AtomicBool::new(false));
    let watch = async {
        while !over.load(Relaxed) {
            for engine in ENGINES {
                closed.fetch_or(state(&others, engine).await == "draining", Relaxed);
            }
            sleep(LOOK).await;
        }
    };
    let upgrade = async {
        runs.run(&["--upgrade"]).await;
        sleep(TERM_LEASE).await;
        over.store(true, Relaxed);
    };
    tokio::join!(watch, upgrade);
    assert_eq!(long.await.unwrap(), Ended::Whole, "{}", runs.log());
    assert!(!closed.load(Relaxed), "{}\n{}", runs.log(), others.log());
}

fn done(engine: &str) -> String {
    format!("change ended backend=q/{engine} change=")
}
