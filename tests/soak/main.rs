//! Soak: many requests, clients that leave, engines that die, and reloads. Afterwards every
//! resource must be free.
//!
//! There are two models with three engines each: the engines of `steady` run all the time; the
//! engines of `brittle` are killed and started again, one at a time. Every valid reload changes the
//! pools (`gateway.rs`). There are two kinds of requests (`clients.rs`). Clients read the responses
//! to *finite* requests to the end, a few of them slowly. *Endless* requests would run for minutes,
//! but their clients leave while the request is queued, before the first token, or during the
//! response. So these equations hold exactly:
//!
//! 1. per model: sum over outcomes in `sluice_requests_total` = requests sent = lines of the access
//!    log, no request id twice, and `completed` = responses read to the end
//! 2. every gauge of the gateway (in flight, outstanding tokens, prefill tokens, long prefills,
//!    queue) is 0
//! 3. no engine has a running or queued request. A request whose abort the engine has missed would
//!    still run (or, after minutes, count as finished, which number 4 finds)
//! 4. steady: no request failed or found no backend (a reload drops nothing); `client_gone + shed =
//!    clients that left + clients that read a shed response`; the engines finished as many requests
//!    as clients read; and `left a response <= aborts seen by the engines <= gone from a backend`
//! 5. brittle: every failed request got an error response, and no request waited until a time limit
//! 6. descriptors are no more than before the first client, and memory is at most [`MEMORY_SLACK`]
//!    above its value at a quarter of the requests
//!
//! The gateway passes on no byte before the engine's first event. So if a client has seen a
//! response, its request was running on the engine. If a client leaves earlier, its request may be
//! queued, shed, or still in the engine's front end. Therefore number 4 has inequalities. A killed
//! engine loses its count of aborts, so aborts are checked for `steady` only.
//!
//! All randomness follows from `SLUICE_SOAK_SEED`; the scheduling of threads and processes does
//! not. The default number of requests suits `cargo test`. The full soak is
//! `SLUICE_SOAK_REQUESTS=100000`, which fails unless every situation above occurred.
//! `SLUICE_SOAK_SCALE` multiplies clients, slots and queues, for a machine with many cores and
//! millions of requests. `SLUICE_SOAK_ENGINE` chooses the engines (`sim`: processes of `sluice
//! sim`; `mock`: the mock of `benches/overhead`), and `SLUICE_BIN` another build of sluice.
//!
//! `hostile/` has the other soak: attackers next to honest clients.

#[expect(dead_code, reason = "the soak uses parts of what the overhead measurement needs")]
#[path = "../../benches/overhead/engine.rs"]
mod engine;
#[expect(dead_code, reason = "the soak uses parts of what the overhead measurement needs")]
#[path = "../../benches/overhead/reply.rs"]
mod reply;

mod clients;
mod engines;
mod gateway;
mod hostile;
mod page;
#[path = "../common/ports.rs"]
mod ports;
#[path = "../common/program.rs"]
mod program;
mod records;
#[path = "../common/serve.rs"]
mod serve;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use sluice_core::base::Rng;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use clients::{LoadClients, SUSPECTED, Tally};
use engines::{Engine, Kind};
use gateway::{ENGINES, Gateway};
use page::Page;
use records::Records;

/// Default number of requests, which take a few seconds.
const REQUESTS: u64 = 600;
/// Time limit for start, restarts and draining.
const OVERHEAD: Duration = Duration::from_secs(90);
/// Time allowed for each request, so that 100,000 requests have 500 s.
const PER_REQUEST: Duration = Duration::from_millis(5);
/// Time limit for the last counters to settle after the last client has left.
const SETTLE: Duration = Duration::from_secs(30);
const CHECK_EVERY: Duration = Duration::from_millis(50);
/// A soak with at least this many requests fails unless every situation occurred.
const THOROUGH: u64 = 10_000;
/// Allowed growth of resident memory between a quarter of the requests and the end, in bytes,
/// because the allocator retains memory after a burst. A leak of a kilobyte per request would add
/// 75 MB in the full soak.
const MEMORY_SLACK: u64 = 24 << 20;

/// The memory of a long soak after this many requests, times [`scale`], is compared with the memory
/// at the end. The number grows with the scale, because with more clients at a time, it takes more
/// requests until the tables are as full as they get.
const WARM: u64 = 100_000;
/// A soak is long from this many times the warm requests on.
const LONG: u64 = 5;
/// Maximum resident memory at the end of a long soak, relative to the memory when it was warm.
const MEMORY_GROWTH: f64 = 1.1;

const MODELS: [&str; 2] = ["steady", "brittle"];
const STEADY: usize = 0;
const BRITTLE: usize = 1;

pub(crate) fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn scale() -> u32 {
    u32::try_from(setting("SLUICE_SOAK_SCALE", 1)).unwrap_or(1)
}

/// Runs a test on half of the cores, but at least two. The other half is for the gateway.
pub(crate) fn block_on(test: impl Future<Output = ()>) {
    let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get());
    let workers = (cores / 2).max(2);
    tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build().unwrap().block_on(test);
}

fn warm() -> u64 {
    WARM * u64::from(scale())
}

fn limit(requests: u64) -> Duration {
    OVERHEAD + PER_REQUEST * u32::try_from(requests).unwrap_or(u32::MAX)
}

#[test]
fn nothing_leaks_after_clients_leave_engines_die_and_the_gateway_reloads() {
    let (requests, seed) = (setting("SLUICE_SOAK_REQUESTS", REQUESTS), setting("SLUICE_SOAK_SEED", 1));
    println!("soak: {requests} requests, seed {seed}, scale {}", scale());
    block_on(async {
        timeout(limit(requests), soak(requests, seed)).await.expect("the soak took longer than its deadline").unwrap();
    });
}

/// Checks the clients and the mock without a gateway between them: every client that leaves causes
/// an abort in the engine.
#[test]
fn without_a_gateway_the_engines_see_every_client_that_leaves() {
    let (requests, seed) = (setting("SLUICE_SOAK_REQUESTS", REQUESTS), setting("SLUICE_SOAK_SEED", 1));
    let kind = Kind::from_env(Kind::Mock);
    let direct = async {
        let engines = [Engine::start(kind, MODELS[0]).await?, Engine::start(kind, MODELS[1]).await?];
        let tallies = LoadClients::new([engines[0].port, engines[1].port], requests, seed).run().await?;
        for (engine, tally) in engines.iter().zip(&tallies) {
            println!("{tally:?}");
            ensure!(tally.failed == 0 && tally.shed == 0, "an engine failed a request: {tally:?}");
            ensure!(tally.left_at_once > 0 && tally.left_at_head > 0 && tally.left_in_content > 0, "{tally:?}");
            // When a client left, the engine may not yet have read its request, so the test waits
            // for the engine's counts.
            eventually(async || {
                let page = idle(engine).await?;
                aborts_fit(tally.left_in_content, aborted(&page), tally.left())?;
                ensure!(
                    kind == Kind::FAST || aborted(&page) == tally.left(),
                    "the mock counts every client that leaves"
                );
                equal("finished", finished(&page), tally.completed)
            })
            .await?;
        }
        anyhow::Ok(())
    };
    block_on(async { timeout(limit(requests), direct).await.expect("took longer than its deadline").unwrap() });
}

async fn soak(requests: u64, seed: u64) -> anyhow::Result<()> {
    let kind = Kind::from_env(Kind::FAST);
    let mut engines = Vec::new();
    for model in MODELS {
        for _ in 0..ENGINES {
            engines.push(Engine::start(kind, model).await?);
        }
    }
    let mut gateway = Gateway::start(engines.iter().map(|e| e.port).collect()).await?;
    let at_start = Footprint::of(&Page::fetch(gateway.admin).await?);
    let load = LoadClients::new([gateway.port; 2], requests, seed);
    let clients = tokio::spawn(Arc::clone(&load).run());
    let seen = disturb(&mut gateway, &mut engines[ENGINES..], seed, || clients.is_finished(), &load).await?;
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
    println!("at start {at_start}; warm {}; after a quarter {}; at the end {at_end}", seen.warm, seen.quarter);
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
        seen.is_thorough(&records, requests)?;
        ensure!(at_end.memory <= seen.quarter.memory + MEMORY_SLACK, "memory grew: {} -> {at_end}", seen.quarter);
    }
    if requests >= LONG * warm() {
        let most = seen.warm.memory as f64 * MEMORY_GROWTH;
        ensure!(at_end.memory as f64 <= most, "memory grew by more than a tenth: {} -> {at_end}", seen.warm);
    }
    Ok(())
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Footprint {
    /// Resident memory in bytes.
    memory: u64,
    descriptors: u64,
}

impl Footprint {
    pub(crate) fn of(page: &Page) -> Self {
        Self { memory: page.sum("process_resident_memory_bytes", &[]), descriptors: page.sum("process_open_fds", &[]) }
    }

    pub(crate) fn max(self, other: Self) -> Self {
        Self { memory: self.memory.max(other.memory), descriptors: self.descriptors.max(other.descriptors) }
    }
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MiB, {} descriptors", self.memory as f64 / f64::from(1 << 20), self.descriptors)
    }
}

#[derive(Default)]
struct ObservedTotals {
    kills: u64,
    /// The footprint when the first [`warm`] requests had begun.
    warm: Footprint,
    /// The footprint when a quarter of the requests had begun.
    quarter: Footprint,
    most: Footprint,
    longest_queue: u64,
    most_long_prefills: u64,
    /// The most bytes of responses that waited in the memory of the gateway.
    most_unread: u64,
}

impl ObservedTotals {
    fn look(&mut self, page: &Page, clients: &LoadClients) {
        let (now, progress) = (Footprint::of(page), clients.progress());
        if clients.begun() < warm() || self.warm.memory == 0 {
            self.warm = now;
        }
        if progress < 0.25 || self.quarter.memory == 0 {
            self.quarter = now;
        }
        self.most = self.most.max(now);
        self.longest_queue = self.longest_queue.max(page.sum("sluice_queue_length", &[]));
        self.most_long_prefills = self.most_long_prefills.max(page.sum("sluice_long_prefills", &[]));
        self.most_unread = self.most_unread.max(page.sum("sluice_response_bytes", &[]));
    }

    fn is_thorough(&self, records: &[Records; 2], requests: u64) -> anyhow::Result<()> {
        // A kill and the start that follows take two seconds, in which thousands of requests pass.
        let kills = (requests / THOROUGH).min(10);
        ensure!(
            self.kills >= kills && self.longest_queue > 0 && self.most_long_prefills > 0 && self.most_unread > 0,
            "nothing happened: {self}"
        );
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

impl fmt::Display for ObservedTotals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kills, most, longest_queue, most_long_prefills, most_unread, .. } = self;
        write!(f, "{kills} kills, at most {longest_queue} queued, {most_long_prefills} long prefills, ")?;
        write!(f, "{most_unread} bytes that clients had not read, {most}")
    }
}

/// Kills and revives engines and reloads the gateway until the clients are done.
async fn disturb(
    gateway: &mut Gateway,
    brittle: &mut [Engine],
    seed: u64,
    over: impl Fn() -> bool,
    clients: &LoadClients,
) -> anyhow::Result<ObservedTotals> {
    let mut seen = ObservedTotals::default();
    let mut rng = Rng::new(seed ^ 0xC4A0_5000);
    while !over() {
        // Only one engine at a time dies, so that others remain. The pauses only spread the kills
        // over the run.
        let victim = &mut brittle[rng.below(ENGINES)];
        sleep(Duration::from_millis(100 + rng.below(400) as u64)).await;
        victim.kill().await;
        seen.kills += 1;
        gateway.reload()?;
        sleep(Duration::from_millis(50 + rng.below(300) as u64)).await;
        seen.look(&Page::fetch(gateway.admin).await?, clients);
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

/// Checks the numbers of the model whose engines died. Every failed request must have an error
/// response, and no request may have waited until a timeout.
fn brittle_accounts(tally: &Tally, records: &Records) -> anyhow::Result<()> {
    let suspected = format!("status 422: {SUSPECTED}");
    let refused = tally.failures.get(&suspected).copied().unwrap_or(0);
    for (failure, n) in &tally.failures {
        let said = ["closed before the response ended, status 200", "status 200", "status 502", &suspected];
        ensure!(
            said.iter().any(|start| failure.starts_with(start)),
            "{n} requests failed without an error response: {failure}"
        );
    }
    let errors = records.outcome("upstream_error");
    ensure!(records.outcome("timeout") == 0, "requests ran into a time limit: {:?}", records.outcomes);
    let failed = tally.failed - refused;
    let (least, most) = (failed, failed + tally.left());
    ensure!((least..=most).contains(&errors), "{errors} upstream errors, clients saw {least} and {most} at most");
    println!("brittle: {least} read a failure <= {errors} upstream errors <= {most} with all clients that left");
    Ok(())
}

/// Checks that engines counted an abort for each client that left a running response (`least`), and
/// no more aborts than clients that left (`most`).
fn aborts_fit(least: u64, aborts: u64, most: u64) -> anyhow::Result<()> {
    ensure!(least <= aborts, "{least} clients left a running response, the engines saw only {aborts} aborts");
    ensure!(aborts <= most, "the engines saw {aborts} aborts, only {most} clients are known to have left");
    Ok(())
}

/// Checks that the gateway applied valid files and refused invalid ones. It may count two signals
/// that come close together as one reload.
fn reloads(page: &Page, gateway: &Gateway) -> anyhow::Result<()> {
    for (result, sent) in ["ok", "failed"].iter().zip(gateway.reloads) {
        let done = page.sum("sluice_config_reloads_total", &[("result", result)]);
        ensure!(done <= sent && (done > 0 || sent == 0), "{done} reloads were {result}, {sent} should have been");
    }
    Ok(())
}

/// The gateway's footprint when all connections of clients are closed.
///
/// # Errors
/// When more descriptors are open than before.
pub(crate) fn at_rest(page: Page, before: &Footprint) -> anyhow::Result<Footprint> {
    let now = Footprint::of(&page);
    ensure!(now.descriptors <= before.descriptors, "{} descriptors, {} before", now.descriptors, before.descriptors);
    Ok(now)
}

/// Repeats an attempt until it succeeds. After [`SETTLE`], returns the last error.
pub(crate) async fn eventually<T>(mut attempt: impl AsyncFnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + SETTLE;
    let mut last = anyhow!("no attempt ended in time");
    while Instant::now() < deadline {
        match timeout_at(deadline, attempt()).await {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(open)) => last = open,
            Err(_) => last = last.context("the last attempt did not end in time"),
        }
        sleep(CHECK_EVERY).await;
    }
    Err(last)
}

/// Gauges that must be 0 when there are no requests.
const GAUGES: [&str; 6] = [
    "sluice_in_flight",
    "sluice_outstanding_tokens",
    "sluice_prefill_tokens",
    "sluice_long_prefills",
    "sluice_queue_length",
    "sluice_response_bytes",
];

pub(crate) fn gauges_are_zero(page: &Page) -> anyhow::Result<()> {
    for gauge in GAUGES {
        ensure!(page.has(gauge), "no metric {gauge}");
        page.all_zero(gauge)?;
    }
    Ok(())
}

/// Returns the gateway's metrics page if all [`GAUGES`] are 0 and the counts match the clients'
/// tallies.
fn closed(page: Page, tallies: &[Tally; 2]) -> anyhow::Result<Page> {
    gauges_are_zero(&page)?;
    equal("lost lines of the access log", page.sum("sluice_access_log_dropped_total", &[]), 0)?;
    equal("outcomes recorded", page.sum("sluice_requests_total", &[]), tallies.iter().map(|t| t.sent).sum())?;
    for (i, tally) in tallies.iter().enumerate() {
        let recorded = page.sum("sluice_requests_total", &[("model", MODELS[i])]);
        equal(&format!("outcomes of {}", MODELS[i]), recorded, tally.sent)?;
        equal(&format!("completed by {}", MODELS[i]), outcome(&page, i, "completed"), tally.completed)?;
    }
    Ok(page)
}

/// Returns an engine's metrics page if no request is running or queued. A request whose abort the
/// engine missed would still run.
pub(crate) async fn idle(engine: &Engine) -> anyhow::Result<Page> {
    let page = Page::fetch(engine.port).await?;
    page.all_zero("vllm:num_requests_running")?;
    page.all_zero("vllm:num_requests_waiting")?;
    Ok(page)
}
