//! Hostile clients next to honest ones, in front of engines that misbehave. The test checks that
//! attackers do not harm honest clients.
//!
//! The same honest requests (`honest.rs`) and the same faults of four simulated engines run twice
//! from one seed: first without attackers, then with all of them (`attackers.rs`), on a fresh
//! gateway each time. Honest clients have their own key; the attackers share another key with an
//! in-flight limit, and come from another address, which may open fewer connections than they try
//! to open ([`PER_ADDRESS`]). With attackers:
//!
//! 1. no honest client reads a wrong response: bytes of another request, an incomplete stream
//!    without an error, or an unexplained status
//! 2. hardly more honest requests are shed than without attackers ([`MAX_EXTRA`]). In a run of
//!    [`FULL_LENGTH`] or longer, also hardly more fail. In a shorter run, chance decides how many
//!    streams a fault breaks off
//! 3. when all clients have gone, every gauge of the gateway is 0, engines run no request, and
//!    descriptors are closed
//! 4. in a run of [`FULL_LENGTH`] or longer, resident memory stays below [`MEMORY_BOUND`] at every
//!    moment, and P99 TTFT of honest streams is at most [`TTFT_RATIO`] times P99 TTFT without
//!    attackers, both over all streams and over the streams during which no engine misbehaved
//!
//! Clients, attackers, engines and the gateway share one machine. Delays by the scheduler of the
//! machine are not the gateway's fault. So the speed of the attacks depends on the number of cores
//! (`attackers.rs`), and a long run on a machine that was too busy fails without a verdict on the
//! tail (`machine.rs`). Shorter runs print their measurements.
//!
//! By default each of the two runs takes a few seconds; `SLUICE_HOSTILE_SECONDS=600` is the full
//! test.

mod attackers;
mod honest;
mod machine;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use sha2::{Digest as _, Sha256};
use sluice_core::base::Rng;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use crate::engines::{Engine, Kind};
use crate::gateway::Gateway;
use crate::page::{Page, read_to_end};
use crate::{Footprint, at_rest, block_on, eventually, gauges_are_zero, idle, setting};

use attackers::Attack;
use honest::Honest;
use machine::{Load, Watch};

/// Default length of each of the two runs.
const SECONDS: u64 = 5;
/// Runs of this length or longer judge failures, memory and the tail. Shorter runs only print them.
const FULL_LENGTH: Duration = Duration::from_secs(300);
/// Time limit of everything except the two runs.
const OVERHEAD: Duration = Duration::from_secs(120);
/// Maximum P99 TTFT with attackers, relative to P99 TTFT without.
const TTFT_RATIO: f64 = 1.5;
/// With attackers, the share of honest requests that fail or are shed may be higher by this much.
const MAX_EXTRA: f64 = 0.005;
/// Bytes of request bodies that the configuration lets the gateway buffer.
const BUFFERED: u64 = 64 << 20;
/// Connections that the configuration allows one address. They are fewer than the 304 connections
/// that attackers hold for seconds.
const PER_ADDRESS: u64 = 288;
/// Limits that the attackers must reach: reasons of `sluice_shed_total` that must not be 0.
const LIMITS_REACHED: [&str; 2] = ["body_memory_full", "too_many_connections"];
/// Bound on resident memory at any moment. It has 64 MiB for the start and for learned state, the
/// buffered bodies twice (received and rewritten), and 64 KiB for each of
/// [`attackers::CONNECTIONS`].
const MEMORY_BOUND: u64 = (64 << 20) + 2 * BUFFERED + attackers::CONNECTIONS * (64 << 10);
const ENGINES: usize = 4;
/// Time after a fault during which an engine may still be slow or ejected.
const AFTERMATH: Duration = Duration::from_secs(2);
const MODEL: &str = "m";
/// Key of the honest clients.
const HONEST_KEY: &str = "honest-0123456789abcdef";
/// Key that all attackers share.
const ATTACKER_KEY: &str = "attacker-0123456789abcdef";

fn config([port, admin]: [u16; 2], engines: &[u16]) -> String {
    let mut text = format!(
        "[server]\nlisten = \"127.0.0.1:{port}\"\nadmin = \"127.0.0.1:{admin}\"\nmax_body = \"4MiB\"\n\
         max_body_memory = {BUFFERED}\nmax_connections_per_address = {PER_ADDRESS}\n\
         header_timeout = \"5s\"\nbody_timeout = \"10s\"\n\
         [health]\nprobe_interval = \"500ms\"\nejection_base = \"500ms\"\nejection_max = \"2s\"\nstall = \"5s\"\n\
         [[auth.keys]]\nname = \"honest\"\nsha256 = \"{}\"\n\
         [[auth.keys]]\nname = \"attacker\"\nsha256 = \"{}\"\npriority = 10\n\
         limit = {{ in_flight = 16, sequences = 64, tokens = \"100k\" }}\n\
         [[model]]\nname = \"{MODEL}\"\n\
         [[pool]]\nname = \"all\"\nslots = 64\ntokens = \"400k\"\nlong_prefix = {{ threshold = \"2k\", slots = 1 }}\n\
         queue = {{ length = 256, timeout = \"10s\" }}\n",
        sha256(HONEST_KEY),
        sha256(ATTACKER_KEY),
    );
    for port in engines {
        text += &format!("[[pool.backend]]\nname = \"e{port}\"\nurl = \"http://127.0.0.1:{port}\"\n");
    }
    text
}

/// The digest of a key in the form that the configuration expects.
fn sha256(key: &str) -> String {
    Sha256::digest(key).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn attackers_do_not_harm_honest_clients() {
    let seconds = Duration::from_secs(setting("SLUICE_HOSTILE_SECONDS", SECONDS));
    let seed = setting("SLUICE_SOAK_SEED", 1);
    block_on(async {
        let both = async {
            let without = run(seconds, seed, false).await.context("without attackers")?;
            println!("without attackers: {without}");
            println!("{}", attackers::scale());
            let with = run(seconds, seed, true).await.context("with attackers")?;
            println!("with attackers: {with}");
            compare(&without, &with, seconds)
        };
        timeout(2 * seconds + OVERHEAD, both).await.expect("took longer than its deadline").unwrap();
    });
}

struct Outcome {
    honest: Honest,
    /// Periods in which engines misbehaved.
    faults: Vec<(Instant, Instant)>,
    attacks: Vec<(&'static str, u64)>,
    /// Number of requests that were refused because of each of [`LIMITS_REACHED`].
    refused: [u64; 2],
    at_start: Footprint,
    most: Footprint,
    at_end: Footprint,
    load: Load,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { honest, faults, attacks, refused, at_start, most, at_end, load } = self;
        write!(f, "{honest}\n  {}; while no engine misbehaved: {}", honest.all(), honest.outside(faults))?;
        write!(f, "\n  at start {at_start}; at most {most}; at the end {at_end}\n  {load}")?;
        for (reason, times) in LIMITS_REACHED.iter().zip(refused) {
            write!(f, "\n  {times:7} refused: {reason}")?;
        }
        for (attack, times) in attacks {
            write!(f, "\n  {times:7} x {attack}")?;
        }
        Ok(())
    }
}

async fn run(length: Duration, seed: u64, attacked: bool) -> anyhow::Result<Outcome> {
    let mut engines = Vec::new();
    for _ in 0..ENGINES {
        engines.push(Engine::start(Kind::Sim { speed: 1 }, MODEL).await?);
    }
    let ports = engines.iter().map(|engine| engine.port).collect::<Vec<_>>();
    let mut gateway = Gateway::start_with(|own| config(own, &ports)).await?;
    let at_start = Footprint::of(&Page::fetch(gateway.admin).await?);
    let processes = engines.iter().map(Engine::process).collect::<anyhow::Result<_>>()?;
    let watch = Watch::start(gateway.process()?, processes)?;
    let over = Arc::new(AtomicBool::new(false));
    let attacks = if attacked { Attack::start_all(gateway.port, seed, &over) } else { Vec::new() };
    let port = gateway.port;
    let honest = std::thread::spawn(move || honest::run(port, length, seed));
    let (most, faults) = inject_faults(&gateway, &ports, seed, || honest.is_finished()).await?;
    let honest = honest.join().map_err(|_| anyhow!("the honest clients panicked"))??;
    let load = watch.end(honest.threads)?;
    over.store(true, Relaxed);
    let mut counted = Vec::new();
    for attack in attacks {
        counted.push((attack.name, attack.stop().await?));
    }
    ensure!(gateway.runs()?, "the gateway ended by itself:\n{}", gateway.log());
    eventually(async || gauges_are_zero(&Page::fetch(gateway.admin).await?)).await.context(gateway.log())?;
    for engine in &engines {
        eventually(async || idle(engine).await).await?;
    }
    let page = Page::fetch(gateway.admin).await?;
    let refused = LIMITS_REACHED.map(|reason| page.sum("sluice_shed_total", &[("reason", reason)]));
    let at_end = eventually(async || at_rest(Page::fetch(gateway.admin).await?, &at_start)).await?;
    gateway.stop().await?;
    Ok(Outcome { honest, faults, attacks: counted, refused, at_start, most, at_end, load })
}

/// Lets one engine at a time stall, hang or break off its streams until the honest clients are
/// done. Returns the largest footprint of the gateway and the periods in which a fault had effects.
async fn inject_faults(
    gateway: &Gateway,
    engines: &[u16],
    seed: u64,
    over: impl Fn() -> bool,
) -> anyhow::Result<(Footprint, Vec<(Instant, Instant)>)> {
    let mut rng = Rng::new(seed ^ 0xFA17);
    let mut faults = Vec::new();
    let mut most = Footprint::default();
    let mut next = Instant::now();
    let mut undo: Option<(u16, Instant)> = None;
    while !over() {
        let now = Instant::now();
        if let Some((port, _)) = undo.take_if(|(_, until)| now >= *until) {
            inject(port, "none").await?;
        }
        if undo.is_none() && now >= next {
            let (fault, lasts) = [("stall=300", 0), ("hang", 700), ("reset-midstream=3", 400)][rng.below(3)];
            let port = engines[rng.below(engines.len())];
            inject(port, fault).await?;
            let end = now + Duration::from_millis(lasts);
            undo = Some((port, end));
            faults.push((now, end + AFTERMATH));
            next = now + Duration::from_millis(3_000 + rng.below(4_000) as u64);
        }
        let seen = Footprint::of(&Page::fetch(gateway.admin).await?);
        most = most.max(seen);
        sleep(Duration::from_millis(100)).await;
    }
    for port in engines {
        inject(*port, "none").await?;
    }
    Ok((most, faults))
}

async fn inject(port: u16, fault: &str) -> anyhow::Result<()> {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).await?;
    let length = fault.len();
    let request =
        format!("POST /sim/fault HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    socket.write_all((request + fault).as_bytes()).await?;
    let reply = read_to_end(&mut socket, 300).await?;
    ensure!(reply.status == 200, "the fault '{fault}' was refused with {}", reply.status);
    Ok(())
}

fn compare(without: &Outcome, with: &Outcome, length: Duration) -> anyhow::Result<()> {
    for outcome in [without, with] {
        ensure!(outcome.honest.wrong.is_empty(), "wrong responses: {:?}", outcome.honest.wrong);
        ensure!(outcome.honest.right > 0, "no honest request succeeded");
        let within = outcome.most.memory < MEMORY_BOUND;
        ensure!(length < FULL_LENGTH || within, "{} of memory, {MEMORY_BOUND} bytes allowed", outcome.most);
    }
    for (attack, times) in &with.attacks {
        ensure!(*times > 0, "the attack '{attack}' was never made");
    }
    for (reason, times) in LIMITS_REACHED.iter().zip(with.refused) {
        ensure!(times > 0, "no attacker was refused for {reason}");
    }
    let more = (MAX_EXTRA * with.honest.sent as f64).ceil() as u64;
    let (shed, usual) = (with.honest.shed, without.honest.shed);
    ensure!(shed <= usual + more, "{shed} honest requests were shed with attackers, {usual} without");
    let (failed, usual) = (with.honest.failed(), without.honest.failed());
    ensure!(
        length < FULL_LENGTH || failed <= usual + more,
        "{failed} honest requests failed with attackers, {usual} without"
    );
    tail(without, with, length >= FULL_LENGTH)
}

/// Compares the tails of all streams. Because faults of 700 ms could hide a delay that attackers
/// add, also compares the streams during which no engine misbehaved.
fn tail(without: &Outcome, with: &Outcome, judged: bool) -> anyhow::Result<()> {
    let p99 = |ttfts: honest::Ttfts| ttfts.quantile(0.99).as_secs_f64();
    let all = [with, without].map(|outcome| p99(outcome.honest.all()));
    let quiet = [with, without].map(|outcome| p99(outcome.honest.outside(&outcome.faults)));
    let ratios = [all, quiet].map(|[with, without]| with / without);
    println!(
        "P99 TTFT of honest streams: {:.2} times that without attackers; while no engine misbehaved: {:.2} times",
        ratios[0], ratios[1]
    );
    for (what, outcome) in [("without", without), ("with", with)] {
        if let Some(why) = outcome.load.full() {
            println!("not judged: {what} attackers the machine was full: {why}");
            ensure!(!judged, "the machine was too full {what} attackers to judge P99 TTFT: {why}");
        }
    }
    ensure!(!judged || ratios.iter().all(|ratio| *ratio <= TTFT_RATIO), "P99 TTFT is {ratios:.2?} times that without");
    Ok(())
}
