//! Soak: many requests, clients that leave, engines that die, reloads; afterwards every resource must be released.
//!
//! Two models: `steady`, whose engines are never touched, and `brittle`, whose engines are killed and started again, one
//! at a time. Each has three engines, whose pools change with every reload (`gateway.rs`). Two kinds of requests
//! (`clients.rs`): *finite* ones, which their client reads to the end, and *endless* ones, which would run for minutes and
//! which their client leaves: queued, before the first token, or during the response. That makes the accounts exact:
//!
//! 1. per model: sum over outcomes in `sluice_requests_total` = requests sent = lines of the access log, no request id twice,
//!    and `completed` = responses read to the end
//! 2. every gauge of the gateway (in flight, outstanding tokens, prefill tokens, long prefills, queue) is 0
//! 3. every engine runs and queues nothing: an abort that an engine missed would still be running (or, after minutes,
//!    have finished, which account 4 finds)
//! 4. steady: no request failed or was refused for lack of a backend (a reload drops nothing);
//!    `client_gone + shed = clients that left + clients that read a shed response`; the engines finished as many as
//!    clients read; and `left a response <= aborts seen by the engines <= gone from a backend`
//! 5. brittle: every failed request got an error response, and no wait ran into a time limit
//! 6. descriptors are back where they were before the first client, memory is where it was after a quarter
//!
//! The gateway passes on no byte before the engine's first event, so a client that saw a response left a running request.
//! One that left earlier may have been queued, shed, or still on its way through the engine's front end; hence the
//! inequalities, and account 3. Aborts of a killed engine are lost with its counters, hence `steady`.
//!
//! Everything random follows from `SLUICE_SOAK_SEED`, except what the operating system schedules. Size: by default small
//! enough for `cargo test`; `SLUICE_SOAK_REQUESTS=100000` is the real one, which must also have met every situation above.
//! `SLUICE_SOAK_ENGINE` chooses the engines (`sim`: processes of `sluice sim`; `mock`: that of `benches/overhead`),
//! `SLUICE_BIN` another build of the program. The whole test has a deadline; waits are for conditions.

#[expect(dead_code, reason = "the soak uses parts of what the overhead measurement needs")]
#[path = "../../benches/overhead/engine.rs"]
mod engine;
#[expect(dead_code, reason = "the soak uses parts of what the overhead measurement needs")]
#[path = "../../benches/overhead/reply.rs"]
mod reply;

mod clients;
mod engines;
mod gateway;
mod page;
#[path = "../common/ports.rs"]
mod ports;
mod records;

use std::ffi::OsString;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use sluice::base::Rng;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use clients::{Crowd, Tally};
use engines::{Engine, Kind};
use gateway::{ENGINES, Gateway};
use page::Page;
use records::Records;

/// Default number of requests: a few seconds.
const REQUESTS: u64 = 600;
/// Time for everything beside the requests themselves: start, restarts, draining.
const OVERHEAD: Duration = Duration::from_secs(90);
/// Time allowed per request; 100,000 get 500 s.
const PER_REQUEST: Duration = Duration::from_millis(5);
/// Time for the last counters to settle after the last client has left.
const SETTLE: Duration = Duration::from_secs(30);
/// Pause between two checks of a condition.
const LOOK: Duration = Duration::from_millis(50);
/// From this size on a soak must have met every situation it tests.
const THOROUGH: u64 = 10_000;
/// Resident memory that may be added between a quarter of the requests and the end, bytes: what an allocator retains after one
/// burst. A leak of a kilobyte per request adds 75 MB to the real soak.
const MEMORY_SLACK: u64 = 24 << 20;

/// Names of the two models.
const MODELS: [&str; 2] = ["steady", "brittle"];
const STEADY: usize = 0;
const BRITTLE: usize = 1;

/// The program under test: `SLUICE_BIN` (a release build, say), or the one that was built with this test.
fn binary() -> OsString {
    std::env::var_os("SLUICE_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_sluice").into())
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn limit(requests: u64) -> Duration {
    OVERHEAD + PER_REQUEST * u32::try_from(requests).unwrap_or(u32::MAX)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_leaks_after_clients_leave_engines_die_and_the_gateway_reloads() {
    let (requests, seed) = (setting("SLUICE_SOAK_REQUESTS", REQUESTS), setting("SLUICE_SOAK_SEED", 1));
    println!("soak: {requests} requests, seed {seed}");
    timeout(limit(requests), soak(requests, seed)).await.expect("the soak took longer than its deadline").unwrap();
}

/// Checks the test itself: without a gateway in between, every client that leaves is an abort in the engine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_gateway_the_engines_see_every_client_that_leaves() {
    let (requests, seed) = (setting("SLUICE_SOAK_REQUESTS", REQUESTS), setting("SLUICE_SOAK_SEED", 1));
    let kind = Kind::from_env(Kind::Mock);
    let direct = async {
        let engines = [Engine::start(kind, MODELS[0]).await?, Engine::start(kind, MODELS[1]).await?];
        let tallies = Crowd::new([engines[0].port, engines[1].port], requests, seed).run().await?;
        for (engine, tally) in engines.iter().zip(&tallies) {
            println!("{tally:?}");
            ensure!(tally.failed == 0 && tally.shed == 0, "an engine failed a request: {tally:?}");
            ensure!(tally.left_at_once > 0 && tally.left_at_head > 0 && tally.left_in_content > 0, "{tally:?}");
            // An engine may not have read yet what a client sent before it left: wait for its counts.
            eventually(async || {
                let page = idle(engine).await?;
                aborts_fit(tally.left_in_content, aborted(&page), tally.left())?;
                ensure!(
                    kind == Kind::Sim || aborted(&page) == tally.left(),
                    "the mock counts every client that leaves"
                );
                equal("finished", finished(&page), tally.completed)
            })
            .await?;
        }
        anyhow::Ok(())
    };
    timeout(limit(requests), direct).await.expect("took longer than its deadline").unwrap();
}

async fn soak(requests: u64, seed: u64) -> anyhow::Result<()> {
    let kind = Kind::from_env(Kind::Sim);
    let mut engines = Vec::new();
    for model in MODELS {
        for _ in 0..ENGINES {
            engines.push(Engine::start(kind, model).await?);
        }
    }
    let mut gateway = Gateway::start(engines.iter().map(|e| e.port).collect()).await?;
    let at_start = Footprint::of(&Page::fetch(gateway.admin).await?);
    let crowd = Crowd::new([gateway.port; 2], requests, seed);
    let clients = tokio::spawn(Arc::clone(&crowd).run());
    let seen = disturb(&mut gateway, &mut engines[ENGINES..], seed, || clients.is_finished(), &crowd).await?;
    let tallies = clients.await??;
    MODELS.iter().zip(&tallies).for_each(|(model, tally)| println!("{model}: {tally:?}"));
    ensure!(gateway.runs()?, "the gateway ended by itself:\n{}", gateway.log());

    let page = eventually(async || closed(Page::fetch(gateway.admin).await?, &tallies)).await.context(gateway.log())?;
    eventually(async || {
        for engine in &engines {
            idle(engine).await?;
        }
        Ok(())
    })
    .await?;
    let at_end = eventually(async || at_rest(Page::fetch(gateway.admin).await?, &at_start)).await?;
    println!("{seen}, {} right and {} wrong reloads", gateway.reloads[0], gateway.reloads[1]);
    println!("at start {at_start}; after a quarter {}; at the end {at_end}", seen.quarter);
    reloads(&page, &gateway)?;
    gateway.stop().await?;

    let records = Records::read(&gateway.access_log())?;
    MODELS.iter().zip(&records).for_each(|(model, records)| println!("{model}: {records:?}"));
    for (i, records) in records.iter().enumerate() {
        equal(&format!("lines about {}", MODELS[i]), records.lines(), tallies[i].sent)?;
        for of in ["completed", "client_gone", "shed", "upstream_error"] {
            equal(&format!("{of} lines about {}", MODELS[i]), records.outcome(of), outcome(&page, i, of))?;
        }
    }
    let mut pages = Vec::new();
    for engine in &engines[..ENGINES] {
        pages.push(idle(engine).await?);
    }
    steady_accounts(&tallies[STEADY], &records[STEADY], &pages)?;
    brittle_accounts(&tallies[BRITTLE], &records[BRITTLE])?;
    if requests >= THOROUGH {
        seen.is_thorough(&records)?;
        ensure!(at_end.memory <= seen.quarter.memory + MEMORY_SLACK, "memory grew: {} -> {at_end}", seen.quarter);
    }
    Ok(())
}

/// Memory and descriptors of the gateway.
#[derive(Clone, Copy, Default)]
struct Footprint {
    /// Resident, bytes.
    memory: u64,
    descriptors: u64,
}

impl Footprint {
    fn of(page: &Page) -> Self {
        Self { memory: page.sum("process_resident_memory_bytes", &[]), descriptors: page.sum("process_open_fds", &[]) }
    }
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MiB, {} descriptors", self.memory as f64 / f64::from(1 << 20), self.descriptors)
    }
}

/// Observations while the clients were running.
#[derive(Default)]
struct Seen {
    kills: u64,
    /// The footprint when a quarter of the requests had begun.
    quarter: Footprint,
    most: Footprint,
    longest_queue: u64,
    most_long_prefills: u64,
}

impl Seen {
    fn look(&mut self, page: &Page, progress: f64) {
        let now = Footprint::of(page);
        if progress < 0.25 || self.quarter.memory == 0 {
            self.quarter = now;
        }
        self.most.memory = self.most.memory.max(now.memory);
        self.most.descriptors = self.most.descriptors.max(now.descriptors);
        self.longest_queue = self.longest_queue.max(page.sum("sluice_queue_length", &[]));
        self.most_long_prefills = self.most_long_prefills.max(page.sum("sluice_long_prefills", &[]));
    }

    /// Checks that every situation was met.
    fn is_thorough(&self, records: &[Records; 2]) -> anyhow::Result<()> {
        ensure!(self.kills > 10 && self.longest_queue > 0 && self.most_long_prefills > 0, "nothing happened: {self}");
        for (model, r) in MODELS.iter().zip(records) {
            let left = [r.gone_queued, r.gone_waiting, r.gone_answered];
            ensure!(
                left.iter().all(|n| *n > 0),
                "{model}: no client left in the queue, before or during the response: {left:?}"
            );
            let met = [r.queued, r.spilled, r.outcome("shed")];
            ensure!(met.iter().all(|n| *n > 0), "{model}: no request queued, spilled or was shed: {met:?}");
        }
        ensure!(records[BRITTLE].retried > 0, "no request was sent again");
        Ok(())
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kills, most, longest_queue, most_long_prefills, .. } = self;
        write!(f, "{kills} kills, at most {longest_queue} queued, {most_long_prefills} long prefills, {most}")
    }
}

/// Kills, revives and reloads until the clients are done.
async fn disturb(
    gateway: &mut Gateway,
    brittle: &mut [Engine],
    seed: u64,
    over: impl Fn() -> bool,
    crowd: &Crowd,
) -> anyhow::Result<Seen> {
    let mut seen = Seen::default();
    let mut rng = Rng::new(seed ^ 0xC4A0_5000);
    while !over() {
        // One engine at a time dies, so that others are left; the pauses only space the kills.
        let victim = &mut brittle[rng.below(ENGINES)];
        sleep(Duration::from_millis(100 + rng.below(400) as u64)).await;
        victim.kill().await;
        seen.kills += 1;
        gateway.reload()?;
        sleep(Duration::from_millis(50 + rng.below(300) as u64)).await;
        seen.look(&Page::fetch(gateway.admin).await?, crowd.progress());
        victim.revive().await?;
    }
    Ok(seen)
}

fn equal(what: &str, found: u64, expected: u64) -> anyhow::Result<()> {
    ensure!(found == expected, "{what}: {found} instead of {expected}");
    Ok(())
}

fn aborted(page: &Page) -> u64 {
    page.sum("vllm:request_success_total", &[("finished_reason", "abort")])
}

fn finished(page: &Page) -> u64 {
    ["stop", "length"].iter().map(|r| page.sum("vllm:request_success_total", &[("finished_reason", r)])).sum()
}

fn outcome(page: &Page, model: usize, outcome: &str) -> u64 {
    page.sum("sluice_requests_total", &[("model", MODELS[model]), ("outcome", outcome)])
}

/// The accounts of the model whose engines never died.
fn steady_accounts(tally: &Tally, records: &Records, engines: &[Page]) -> anyhow::Result<()> {
    ensure!(tally.failed == 0, "requests to engines that never died failed: {:?}", tally.failures);
    for (outcome, n) in &records.outcomes {
        let fine = ["completed", "client_gone", "shed queue_full", "shed queue_timeout"].contains(&outcome.as_str());
        ensure!(fine, "{n} requests to engines that never died: {outcome}");
    }
    let (gone, shed, left) = (records.outcome("client_gone"), records.outcome("shed"), tally.left());
    equal("gone and shed", gone + shed, left + tally.shed)?;
    equal("finished by the steady engines", engines.iter().map(finished).sum(), tally.completed)?;
    let aborts: u64 = engines.iter().map(aborted).sum();
    let (answered, on_backend) = (tally.left_at_head + tally.left_in_content, gone - records.gone_queued);
    aborts_fit(answered, aborts, on_backend)?;
    println!(
        "steady: {answered} left a response <= {aborts} aborts in engines <= {on_backend} gone from a backend; \
         {gone} gone + {shed} shed = {left} left + {} shed responses read",
        tally.shed
    );
    Ok(())
}

/// The accounts of the model whose engines died: a failure is reported, and soon.
fn brittle_accounts(tally: &Tally, records: &Records) -> anyhow::Result<()> {
    for (failure, n) in &tally.failures {
        let said = ["closed before the response ended, status 200", "status 200", "status 502"];
        ensure!(
            said.iter().any(|start| failure.starts_with(start)),
            "{n} requests failed without an error response: {failure}"
        );
    }
    let errors = records.outcome("upstream_error");
    ensure!(records.outcome("timeout") == 0, "requests ran into a time limit: {:?}", records.outcomes);
    let (least, most) = (tally.failed, tally.failed + tally.left());
    ensure!((least..=most).contains(&errors), "{errors} upstream errors, clients saw {least} and {most} at most");
    println!("brittle: {least} read a failure <= {errors} upstream errors <= {most} with all clients that left");
    Ok(())
}

/// Engines saw every client that left a running response (`least`), and no more aborts than clients left (`most`).
fn aborts_fit(least: u64, aborts: u64, most: u64) -> anyhow::Result<()> {
    ensure!(least <= aborts, "{least} clients left a running response, the engines saw only {aborts} aborts");
    ensure!(aborts <= most, "the engines saw {aborts} aborts, only {most} clients are known to have left");
    Ok(())
}

/// The gateway applied valid files and refused invalid ones; signals close together count as one.
fn reloads(page: &Page, gateway: &Gateway) -> anyhow::Result<()> {
    for (result, sent) in ["ok", "failed"].iter().zip(gateway.reloads) {
        let done = page.sum("sluice_config_reloads_total", &[("result", result)]);
        ensure!(done <= sent && (done > 0 || sent == 0), "{done} reloads were {result}, {sent} should have been");
    }
    Ok(())
}

/// The gateway's footprint, once all client connections are closed.
fn at_rest(page: Page, before: &Footprint) -> anyhow::Result<Footprint> {
    let now = Footprint::of(&page);
    ensure!(now.descriptors <= before.descriptors, "{} descriptors, {} before", now.descriptors, before.descriptors);
    Ok(now)
}

/// Try until it succeeds; after `SETTLE` the last error counts.
async fn eventually<T>(mut attempt: impl AsyncFnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + SETTLE;
    let mut last = anyhow!("no attempt ended in time");
    while Instant::now() < deadline {
        match timeout_at(deadline, attempt()).await {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(open)) => last = open,
            Err(_) => last = last.context("the last attempt did not end in time"),
        }
        sleep(LOOK).await;
    }
    Err(last)
}

/// Gauges that are 0 without requests.
const GAUGES: [&str; 5] = [
    "sluice_in_flight",
    "sluice_outstanding_tokens",
    "sluice_prefill_tokens",
    "sluice_long_prefills",
    "sluice_queue_length",
];

/// The gateway's page, if its accounts are closed.
fn closed(page: Page, tallies: &[Tally; 2]) -> anyhow::Result<Page> {
    for gauge in GAUGES {
        ensure!(page.has(gauge), "no metric {gauge}");
        page.all_zero(gauge)?;
    }
    equal("lost lines of the access log", page.sum("sluice_access_log_dropped_total", &[]), 0)?;
    equal("outcomes recorded", page.sum("sluice_requests_total", &[]), tallies.iter().map(|t| t.sent).sum())?;
    for (i, tally) in tallies.iter().enumerate() {
        let recorded = page.sum("sluice_requests_total", &[("model", MODELS[i])]);
        equal(&format!("outcomes of {}", MODELS[i]), recorded, tally.sent)?;
        equal(&format!("completed by {}", MODELS[i]), outcome(&page, i, "completed"), tally.completed)?;
    }
    Ok(page)
}

/// An engine's page, if it runs and queues nothing: an abort that it missed would still run.
async fn idle(engine: &Engine) -> anyhow::Result<Page> {
    let page = Page::fetch(engine.port).await?;
    page.all_zero("vllm:num_requests_running")?;
    page.all_zero("vllm:num_requests_waiting")?;
    Ok(page)
}
