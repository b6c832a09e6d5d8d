//! The gateway that leads restarts engines that all gateways use.

use std::path::Path;

use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::leaders::{Ended, TERM_LEASE, Trio, stream};
use super::*;

const ENGINES: [&str; 2] = ["n0", "n1"];

/// A pool of two engines that the leader runs.
fn pool(folder: &Path) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rolling/engine.sh");
    let mut text = "[[model]]\nname = \"n\"\n[[pool]]\nname = \"q\"\nmodels = [\"n\"]\nslots = 64\n".to_owned();
    for name in ENGINES {
        text += &format!(
            "[[pool.backend]]\nname = \"{name}\"\n[pool.backend.launch]\n\
             command = [\"/bin/bash\", {script:?}, \"{name}\"]\nport = {}\nenv = {{ RIG = {folder:?}, SLUICE = {:?} }}\n\
             args = {{ max-num-seqs = 64, served-model-name = \"n\" }}\n",
            ports::free_port(),
            gateways::binary(),
        );
    }
    text
}

async fn state(gateway: &Gateway, engine: &str) -> String {
    let pools = gateway.status().await.map(|status| status.pools).unwrap_or_default();
    let mut backends = pools.into_iter().flat_map(|pool| pool.backends);
    backends.find(|backend| backend.name == engine).map(|backend| backend.state).unwrap_or_default()
}

async fn is_used(gateway: &Gateway, engine: &str) -> bool {
    // The first requests decide about one that was away.
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

/// Requests a restart by the gateway that leads.
async fn restart(leader: &Gateway, engine: &str) {
    let serves = format!("engine backend=q/{engine} step=\"serve\"");
    leader.until("it serves", async |gateway| gateway.log().contains(&serves)).await;
    let asked = leader.post(&format!("/admin/backends/q/{engine}/restart?set=max-num-seqs=48")).await;
    assert!(asked.starts_with("HTTP/1.1 20"), "{asked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_is_not_stopped_while_a_gateway_that_stands_still_may_send_requests_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let trio = Trio::start("decides", Some(&folder.path().join("state")), &pool(folder.path())).await;
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
    let folder = tempfile::tempdir().unwrap();
    let trio = Trio::start("decides", Some(&folder.path().join("state")), &pool(folder.path())).await;
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

/// What the log says at the end of the change.
fn done(engine: &str) -> String {
    format!("change ended backend=q/{engine} change=")
}
