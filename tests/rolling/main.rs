//! Rolling restarts of engines that the gateway runs, under load, with a fault in each restart.
//!
//! Three simulated engines, clients that never pause, and a sequence of restarts with other flags.
//! Each restart meets one fault. The start of the engine fails or hangs, the engine runs out of
//! memory or hangs under load, ignores SIGTERM, leaves a child behind, or loses its port to another
//! process. Or the gateway itself is killed or upgraded. The test checks:
//!
//! 1. requests were lost only to faults that cut them directly: a stream on an engine that crashed,
//!    a connection of a gateway that was killed. Restarts lose none, nor does an upgrade, which
//!    restarts no engine;
//! 2. at every check, all engines but the one being changed were ready (after a kill of the
//!    gateway: once the next gateway has adopted them);
//! 3. every change has the outcome expected for its fault, and the journal records it with the
//!    reason;
//! 4. at the end no process of any engine is left, in any session.
//!
//! `SLUICE_ROLLING_RESTARTS` sets the number of restarts (default: each fault once),
//! `SLUICE_ROLLING_SEED` the order.

mod config;
mod copies;
mod load;
#[path = "../common/ports.rs"]
mod ports;
#[path = "../common/processes.rs"]
mod processes;
#[path = "../common/program.rs"]
mod program;
mod rig;
mod rollback;
mod scaling;
#[path = "../common/serve.rs"]
mod serve;
mod sharing;
mod upgrades;

use std::net::TcpListener;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use sluice_core::base::Rng;
use sluice_fleet::LastChange;
use tokio::time::{Instant, sleep, timeout};

use load::{Load, Loss};
use rig::{ENGINES, LOOK, Rig, TIMEOUT};

/// Time allowed for start and stop.
const OVERHEAD: Duration = Duration::from_secs(120);
/// Time allowed per restart; most take two seconds.
const PER_RESTART: Duration = Duration::from_secs(15);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    StartFails,
    StartHangs,
    OomUnderLoad,
    HangsUnderLoad,
    SigtermIgnored,
    OrphanChild,
    PortTaken,
    GatewayKilled,
    GatewayUpgraded,
}

const FAULTS: [Fault; 10] = [
    Fault::None,
    Fault::StartFails,
    Fault::StartHangs,
    Fault::OomUnderLoad,
    Fault::HangsUnderLoad,
    Fault::SigtermIgnored,
    Fault::OrphanChild,
    Fault::PortTaken,
    Fault::GatewayKilled,
    Fault::GatewayUpgraded,
];

impl Fault {
    /// The word that makes `engine.sh` cause this fault. `None` if the test itself causes the
    /// fault.
    fn word(self) -> Option<&'static str> {
        match self {
            Self::StartFails => Some("start-fails"),
            Self::StartHangs => Some("start-hangs"),
            Self::OomUnderLoad => Some("oom-under-load"),
            Self::SigtermIgnored => Some("sigterm-ignored"),
            Self::OrphanChild => Some("orphan-child"),
            Self::None | Self::HangsUnderLoad | Self::PortTaken | Self::GatewayKilled | Self::GatewayUpgraded => None,
        }
    }
}

/// A period in which the fault itself causes losses.
#[derive(Debug)]
struct Window {
    from: Instant,
    until: Instant,
    /// The backend whose streams may be lost, or `None` if all requests of the gateway may be lost.
    backend: Option<&'static str>,
}

impl Window {
    fn explains(&self, loss: &Loss) -> bool {
        let meanwhile = loss.began <= self.until && loss.ended >= self.from;
        meanwhile && self.backend.is_none_or(|backend| loss.backend.as_deref() == Some(backend))
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_restarts_lose_no_request_under_any_fault() {
    let restarts = setting("SLUICE_ROLLING_RESTARTS", FAULTS.len() as u64);
    let limit = OVERHEAD + PER_RESTART * u32::try_from(restarts).unwrap();
    timeout(limit, roll(restarts, setting("SLUICE_ROLLING_SEED", 1))).await.expect("took longer than allowed").unwrap();
}

async fn roll(restarts: u64, seed: u64) -> anyhow::Result<()> {
    let mut rng = Rng::new(seed);
    let mut rig = Rig::start("settle = \"1h\"").await?;
    let load = Load::on(rig.port);
    let (mut windows, mut tally) = (Vec::new(), std::collections::BTreeMap::<String, u64>::new());
    let mut order = FAULTS.to_vec();
    for number in 0..restarts {
        let turn = number as usize % FAULTS.len();
        if turn == 0 {
            (1..order.len()).rev().for_each(|i| order.swap(i, rng.below(i + 1)));
        }
        let (fault, name) = (order[turn], ENGINES[rng.below(ENGINES.len())]);
        // The new value always differs from the current one.
        let seqs = 32 + number as usize % 31;
        let last = one(&mut rig, fault, name, seqs, &mut rng, &mut windows)
            .await
            .with_context(|| format!("restart {number} of {name} with {fault:?}; log:\n{}", rig.log()))?;
        *tally.entry(format!("{fault:?}: {}", last.outcome)).or_default() += 1;
    }
    let completed = load.completed();
    let losses = load.end().await;
    let (explained, lost): (Vec<Loss>, Vec<Loss>) =
        losses.into_iter().partition(|loss| windows.iter().any(|window| window.explains(loss)));
    println!(
        "{restarts} restarts: {tally:?}\n{completed} responses, {} cut by a fault itself, {} lost",
        explained.len(),
        lost.len()
    );
    ensure!(lost.is_empty(), "lost by restarting: {lost:#?}\n{}", rig.log());
    ensure!(completed > restarts * 3, "only {completed} responses: too few for a load");
    rig.stop().await?;
    let left = rig.processes()?;
    ensure!(left.is_empty(), "processes are left: {left:?}");
    Ok(())
}

/// Makes one restart with one fault. Returns the end of the change as the gateway reports it.
async fn one(
    rig: &mut Rig,
    fault: Fault,
    name: &'static str,
    seqs: usize,
    rng: &mut Rng,
    windows: &mut Vec<Window>,
) -> anyhow::Result<LastChange> {
    if let Some(word) = fault.word() {
        std::fs::write(rig.path(&format!("fault.{name}")), word)?;
    }
    let from = Instant::now();
    let id = rig.restart(name, &[format!("max-num-seqs={seqs}")], &[]).await?;
    let mut port = None;
    match fault {
        Fault::PortTaken => port = take_port(rig, name, id).await?,
        Fault::GatewayKilled => {
            sleep(Duration::from_millis(rng.below(1_500) as u64)).await;
            let from = Instant::now();
            rig.kill().await?;
            rig.run().await?;
            rig.settled().await?;
            windows.push(Window { from, until: Instant::now(), backend: None });
        }
        _ => {}
    }
    let last = ended(rig, name, id, fault).await?;
    if fault == Fault::PortTaken {
        // While the port is taken, the engine starts neither with the new settings nor with the old
        // ones. When the port is free again, it starts with the old settings.
        let (outcome, why) = if port.is_some() { ("failed", "is held by") } else { ("done", "") };
        let said = last.why.as_deref().unwrap_or_default();
        ensure!(last.outcome == outcome && said.contains(why), "the port was taken: {}, {last:?}", port.is_some());
    }
    drop(port);
    if fault == Fault::GatewayUpgraded {
        let processes = |rig: &Rig| ENGINES.map(|engine| rig.processes_of(engine).unwrap_or_default());
        let before = processes(rig);
        rig.fail_upgrade().await?;
        ensure!(processes(rig) == before, "an upgrade that fails restarts no engine: {before:?}");
        rig.upgrade().await?;
        let status = rig.status().await?;
        for backend in &status.pools[0].backends {
            ensure!(backend.state == "ready", "{} is {} right after an upgrade", backend.name, backend.state);
        }
        ensure!(processes(rig) == before, "an upgrade restarts no engine: {before:?}");
    }
    if matches!(fault, Fault::OomUnderLoad | Fault::HangsUnderLoad) {
        let before = restarts_of(rig, name).await?;
        if fault == Fault::OomUnderLoad {
            std::fs::write(rig.path(&format!("now.{name}")), "")?;
        } else {
            hang(rig, name).await?;
        }
        rig.until("the crash is noticed", async |rig| Ok(restarts_of(rig, name).await? > before)).await?;
    }
    rig.settled().await?;
    if matches!(fault, Fault::OomUnderLoad | Fault::HangsUnderLoad) {
        windows.push(Window { from, until: Instant::now(), backend: Some(name) });
    }
    judge(rig, fault, name, seqs, &last).await?;
    Ok(last)
}

/// Waits for the end of a change. Fails if another backend is not ready meanwhile.
async fn ended(rig: &Rig, name: &str, id: u64, fault: Fault) -> anyhow::Result<LastChange> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let status = rig.status().await?;
        for backend in status.pools[0].backends.iter().filter(|backend| backend.name != name) {
            ensure!(
                backend.state == "ready",
                "{} is {} while {name} is changed ({fault:?})",
                backend.name,
                backend.state
            );
        }
        let backend = status.pools[0].backends.iter().find(|backend| backend.name == name);
        let engine = backend.and_then(|backend| backend.engine.clone()).context("the gateway runs it")?;
        if let Some(last) = engine.last_change.clone().filter(|last| last.id == id && engine.change.is_none()) {
            return Ok(last);
        }
        ensure!(Instant::now() < deadline, "the change does not end: {engine:?}");
        sleep(LOOK).await;
    }
}

async fn judge(rig: &Rig, fault: Fault, name: &str, seqs: usize, last: &LastChange) -> anyhow::Result<()> {
    let (outcomes, reason): (&[&str], &str) = match fault {
        Fault::None | Fault::SigtermIgnored | Fault::OrphanChild | Fault::GatewayUpgraded => (&["done"], ""),
        Fault::OomUnderLoad | Fault::HangsUnderLoad => (&["done"], ""),
        Fault::StartFails => (&["rolled_back"], "out of memory"),
        Fault::StartHangs => (&["rolled_back"], "no progress"),
        // Both outcomes are possible. A check after the restart decides which of them is right.
        Fault::PortTaken => (&["failed", "done"], ""),
        Fault::GatewayKilled => (&["done", "aborted", "rolled_back"], ""),
    };
    ensure!(outcomes.contains(&last.outcome.as_str()), "{fault:?} ended as {last:?}");
    let why = last.why.clone().unwrap_or_default().to_lowercase();
    ensure!(why.contains(reason), "the reason does not contain '{reason}': {last:?}");
    let crashed = matches!(fault, Fault::OomUnderLoad | Fault::HangsUnderLoad);
    let status = rig.status().await?;
    let backend = status.pools[0].backends.iter().find(|backend| backend.name == name).context("configured")?;
    let engine = backend.engine.clone().context("the gateway runs it")?;
    let runs_new = engine.settings == format!("max-num-seqs={seqs}");
    ensure!(crashed || runs_new == (last.outcome == "done"), "runs {} after {last:?}", engine.settings);
    ensure!(
        !crashed || engine.settings == "max-num-seqs=64",
        "not back to the last working settings: {}",
        engine.settings
    );
    // When the gateway changes `max-num-seqs`, it must change the slots of the backend in the same
    // step.
    let slots = engine.settings.strip_prefix("max-num-seqs=").and_then(|n| n.parse().ok());
    ensure!(backend.slots.limit == slots, "{:?} slots with {}", backend.slots.limit, engine.settings);
    let journal = rig.journal()?;
    let recorded = journal.iter().any(|line| {
        let ended = &line["life"]["ended"];
        ended["id"].as_u64() == Some(last.id) && ended["outcome"] == last.outcome.as_str()
    });
    ensure!(recorded, "the journal has no end of change {}", last.id);
    Ok(())
}

async fn restarts_of(rig: &Rig, name: &str) -> anyhow::Result<usize> {
    let status = rig.status().await?;
    let backend = status.pools[0].backends.iter().find(|backend| backend.name == name).context("configured")?;
    Ok(backend.engine.as_ref().context("the gateway runs it")?.restarts)
}

/// Takes the port of an engine as soon as the engine has left it. Returns `None` if the next engine
/// took it first.
async fn take_port(rig: &Rig, name: &str, id: u64) -> anyhow::Result<Option<TcpListener>> {
    let port = rig.ports[ENGINES.iter().position(|engine| *engine == name).unwrap_or(0)];
    let deadline = Instant::now() + TIMEOUT;
    loop {
        for _ in 0..100 {
            match TcpListener::bind(("127.0.0.1", port)) {
                Ok(held) => return Ok(Some(held)),
                Err(error) => ensure!(Instant::now() < deadline, "port {port} never came free: {error}"),
            }
            sleep(Duration::from_millis(1)).await;
        }
        let status = rig.status().await?;
        let backend = status.pools[0].backends.iter().find(|backend| backend.name == name);
        let engine = backend.and_then(|backend| backend.engine.clone()).context("the gateway runs it")?;
        if engine.last_change.is_some_and(|last| last.id == id) {
            return Ok(None);
        }
    }
}

async fn hang(rig: &Rig, name: &str) -> anyhow::Result<()> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let at = ENGINES.iter().position(|engine| *engine == name).unwrap_or(0);
    let mut socket = tokio::net::TcpStream::connect(("127.0.0.1", rig.ports[at])).await?;
    let request = "POST /sim/fault HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\nhang";
    socket.write_all(request.as_bytes()).await?;
    let mut response = String::new();
    socket.read_to_string(&mut response).await?;
    ensure!(response.contains("200"), "{response}");
    Ok(())
}

/// If no other backend serves the models of an engine, the gateway refuses to restart it. With
/// `hold` it restarts the engine, requests wait, and none is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_without_replacement_capacity_is_refused_or_holds_requests() {
    let held = async {
        let mut rig = Rig::start("").await?;
        for other in ["b", "c"] {
            rig.drain(other).await?;
        }
        let load = Load::on(rig.port);
        rig.until("requests come through", async |_| Ok(load.completed() > 20)).await?;
        let refused = rig.restart("a", &[], &[]).await.unwrap_err().to_string();
        ensure!(refused.contains("no other backend in rotation serves m") && refused.contains("--hold"), "{refused}");
        let id = rig.restart("a", &["max-num-seqs=48".to_owned()], &["hold"]).await?;
        let busy = rig.restart("b", &[], &["hold"]).await.unwrap_err().to_string();
        ensure!(busy.contains("p/a is being changed"), "{busy}");
        rig.until("it serves again", async |rig| {
            let engine = rig.status().await?.pools[0].backends[0].engine.clone();
            Ok(engine
                .is_some_and(|engine| engine.last_change.is_some_and(|last| last.id == id && last.outcome == "done")))
        })
        .await?;
        let before = load.completed();
        rig.until("requests come through", async |_| Ok(load.completed() > before + 20)).await?;
        load.end_without_loss(&rig).await?;
        rig.stop().await
    };
    timeout(OVERHEAD, held).await.expect("took longer than allowed").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_restarts_changed_engines_one_at_a_time() {
    let rolled = async {
        let mut rig = Rig::start("").await?;
        let load = Load::on(rig.port);
        rig.until("requests come through", async |_| Ok(load.completed() > 20)).await?;
        let refused = rig.restart("a", &["max-num-seqs=many".to_owned()], &[]).await.unwrap_err().to_string();
        ensure!(refused.contains("these settings would not start") && refused.contains("max-num-seqs"), "{refused}");
        rig.reconfigure("max-num-seqs = 64", "max-num-seqs = 40").await?;
        rig.until("all run with the settings of the file", async |rig| {
            let status = rig.status().await?;
            let engines = status.pools[0].backends.iter().filter_map(|backend| backend.engine.as_ref());
            let serving = status.pools[0].backends.iter().filter(|backend| backend.state == "ready").count();
            ensure!(serving >= ENGINES.len() - 1, "only {serving} ready");
            Ok(engines.filter(|engine| engine.settings == "max-num-seqs=40" && engine.step == "serve").count()
                == ENGINES.len())
        })
        .await?;
        load.end_without_loss(&rig).await?;
        rig.stop_all().await?;
        anyhow::Ok(())
    };
    timeout(OVERHEAD, rolled).await.expect("took longer than allowed").unwrap();
}

/// The next gateway after a kill finds the running engines and starts no others next to them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_gateways_successor_adopts_its_engines() {
    let adopted = async {
        let mut rig = Rig::start("").await?;
        let before = rig.processes()?;
        ensure!(before.len() >= ENGINES.len(), "{before:?}");
        rig.kill().await?;
        ensure!(rig.processes()? == before, "engines outlive the gateway");
        rig.run().await?;
        rig.settled().await?;
        ensure!(rig.processes()? == before, "{before:?} became {:?}", rig.processes()?);
        let load = Load::on(rig.port);
        rig.until("requests come through", async |_| Ok(load.completed() > 20)).await?;
        // The gateway can restart adopted engines like other engines, and stops them when it stops.
        rig.restart("a", &["max-num-seqs=16".to_owned()], &[]).await?;
        rig.settled().await?;
        load.end_without_loss(&rig).await?;
        rig.stop_all().await?;
        anyhow::Ok(())
    };
    timeout(OVERHEAD, adopted).await.expect("took longer than allowed").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_may_not_adopt_stops_found_engines_before_it_starts_its_own() {
    let replaced = async {
        let mut rig = Rig::start("on_start = \"stop\"").await?;
        let before = rig.processes()?;
        rig.kill().await?;
        rig.run().await?;
        rig.settled().await?;
        let after = rig.processes()?;
        ensure!(after.len() == before.len(), "{before:?} became {after:?}");
        ensure!(after.iter().all(|new| !before.contains(new)), "{before:?} became {after:?}");
        rig.stop_all().await?;
        anyhow::Ok(())
    };
    timeout(OVERHEAD, replaced).await.expect("took longer than allowed").unwrap();
}
