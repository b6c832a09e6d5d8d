//! Soak: many requests, clients that leave, engines that die, reloads; afterwards nothing may be left over.
//!
//! Two pools with a model each: `steady`, whose engines are never touched, and `brittle`, whose engines are killed and
//! started again. Two kinds of requests (`clients.rs`): *finite* ones, which their client reads to the end, and *endless*
//! ones, which would run for minutes and which their client leaves: at once (queued or not), at the head
//! of the answer, or after some content. That makes the accounts exact:
//!
//! 1. per pool: sum over outcomes in `sluice_requests_total` = requests sent, and `completed` = answers read to the end
//! 2. every gauge of the gateway (in flight, outstanding tokens, prefill tokens, queue) is 0
//! 3. every engine runs and queues nothing: an abort that an engine missed would still be running (or, after minutes,
//!    have finished, which account 4 finds)
//! 4. steady: no request failed (a reload drops nothing), the engines finished as many as clients read, and
//!    `left after content <= aborts seen by the engines <= client_gone <= all that left`
//!
//! For clients that left before any content it is open whether an engine had begun to work for them: the request may
//! have been queued, shed, or still on its way through the engine's front end, whose head leaves first. Hence the
//! inequalities, and account 3. Aborts of a killed engine are lost with its counters, hence `steady`.
//!
//! Everything random follows from `SLUICE_SOAK_SEED`, except what the operating system schedules. Size: by default small
//! enough for `cargo test`; `SLUICE_SOAK_REQUESTS=100000` is the real one. `SLUICE_SOAK_ENGINE` chooses the engines (`sim`:
//! processes of `sluice sim`; `mock`: that of `benches/overhead`), `SLUICE_BIN` another build of the program. The whole
//! test has a deadline; waits are for conditions.

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

use std::ffi::OsString;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use sluice::base::Rng;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use clients::{Crowd, Tally};
use engines::{Engine, Kind};
use gateway::Gateway;
use page::Page;

/// Requests when nothing else is said: a few seconds.
const REQUESTS: u64 = 600;
/// Time for everything beside the requests themselves: start, restarts, draining.
const OVERHEAD: Duration = Duration::from_secs(90);
/// Time allowed per request; 100,000 get 500 s.
const PER_REQUEST: Duration = Duration::from_millis(5);
/// Time for the last counters to settle after the last client has left.
const SETTLE: Duration = Duration::from_secs(30);
/// Pause between two looks at a condition.
const LOOK: Duration = Duration::from_millis(50);

/// Names of the two pools, which are also their models.
const POOLS: [&str; 2] = ["steady", "brittle"];
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
#[ignore = "needs `sluice serve` and `sluice sim`"]
async fn nothing_is_left_over_after_clients_leave_engines_die_and_the_gateway_reloads() {
    let (requests, seed) = (setting("SLUICE_SOAK_REQUESTS", REQUESTS), setting("SLUICE_SOAK_SEED", 1));
    println!("soak: {requests} requests, seed {seed}");
    timeout(limit(requests), soak(requests, seed)).await.expect("the soak took longer than its deadline").unwrap();
}

/// The measuring stick itself: without a gateway in between, every client that leaves is an abort in the engine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_gateway_the_engines_see_every_client_that_leaves() {
    let (requests, seed) = (setting("SLUICE_SOAK_REQUESTS", REQUESTS), setting("SLUICE_SOAK_SEED", 1));
    let kind = Kind::from_env(Kind::Mock);
    let direct = async {
        let engines = [Engine::start(kind, POOLS[0]).await?, Engine::start(kind, POOLS[1]).await?];
        let tallies = Crowd::new([engines[0].port, engines[1].port], requests, seed).run().await?;
        for (engine, tally) in engines.iter().zip(&tallies) {
            println!("{tally:?}");
            ensure!(tally.failed == 0 && tally.shed == 0, "an engine failed a request: {tally:?}");
            ensure!(tally.left_at_once > 0 && tally.left_at_head > 0 && tally.left_in_content > 0, "{tally:?}");
            // An engine may not have read yet what a client sent before it left: its counts are waited for.
            eventually(async || {
                let page = idle(engine).await?;
                aborts_fit(tally, aborted(&page), tally.left())?;
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
    for pool in [STEADY, STEADY, BRITTLE, BRITTLE] {
        engines.push(Engine::start(kind, POOLS[pool]).await?);
    }
    let ports: Vec<u16> = engines.iter().map(|e| e.port).collect();
    let mut gateway = Gateway::start(&ports[..2], &ports[2..]).await?;
    let crowd = Crowd::new([gateway.port; 2], requests, seed);
    let clients = tokio::spawn(crowd.run());
    let brittle = &mut engines[2..];
    let (mut kills, mut reloads) = (0_u64, 0_u64);
    let mut rng = Rng::new(seed ^ 0xC4A0_5000);
    while !clients.is_finished() {
        // One engine at a time dies, so that `brittle` always has one left; the pauses are the disturbance's own rhythm.
        let victim = &mut brittle[rng.below(2)];
        sleep(Duration::from_millis(100 + rng.below(400) as u64)).await;
        victim.kill().await;
        kills += 1;
        gateway.reload()?;
        reloads += 1;
        sleep(Duration::from_millis(50 + rng.below(300) as u64)).await;
        victim.revive().await?;
    }
    let tallies = clients.await??;
    println!("{kills} kills, {reloads} reloads");
    POOLS.iter().zip(&tallies).for_each(|(pool, tally)| println!("{pool}: {tally:?}"));
    ensure!(gateway.runs()?, "the gateway ended by itself:\n{}", gateway.log());

    let page = eventually(async || closed(Page::fetch(gateway.admin).await?, &tallies)).await.context(gateway.log())?;
    let gone = outcome(&page, STEADY, "client_gone");
    eventually(async || {
        let mut pages = Vec::new();
        for engine in &engines {
            pages.push(idle(engine).await?);
        }
        steady_accounts(&tallies[STEADY], gone, &pages[..2])
    })
    .await?;
    gateway.stop().await
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

fn outcome(page: &Page, pool: usize, outcome: &str) -> u64 {
    page.sum("sluice_requests_total", &[("pool", POOLS[pool]), ("outcome", outcome)])
}

/// The accounts of the pool whose engines never died; `gone` is the gateway's count of clients that left.
fn steady_accounts(steady: &Tally, gone: u64, engines: &[Page]) -> anyhow::Result<()> {
    let aborts: u64 = engines.iter().map(aborted).sum();
    let all = steady.left();
    ensure!(steady.failed == 0, "requests to engines that never died failed: {:?}", steady.failures);
    equal("finished by the steady engines", engines.iter().map(finished).sum(), steady.completed)?;
    aborts_fit(steady, aborts, gone)?;
    ensure!(gone <= all, "the gateway recorded {gone} clients gone, only {all} left");
    let sure = steady.left_in_content;
    println!("steady: {sure} left a running answer <= {aborts} aborts in engines <= {gone} gone <= {all} left");
    Ok(())
}

/// Engines saw every client that left a running answer, and no abort that nobody (`most`) caused.
fn aborts_fit(tally: &Tally, aborts: u64, most: u64) -> anyhow::Result<()> {
    let sure = tally.left_in_content;
    ensure!(sure <= aborts, "{sure} clients left a running answer, the engines saw only {aborts} aborts");
    ensure!(aborts <= most, "the engines saw {aborts} aborts, only {most} clients are known to have left");
    Ok(())
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

/// The gateway's page, if its accounts are closed.
fn closed(page: Page, tallies: &[Tally; 2]) -> anyhow::Result<Page> {
    for gauge in ["sluice_in_flight", "sluice_outstanding_tokens", "sluice_prefill_tokens", "sluice_queue_length"] {
        ensure!(page.has(gauge), "no metric {gauge}");
        page.all_zero(gauge)?;
    }
    let sent = tallies.iter().map(|t| t.sent).sum();
    equal("outcomes recorded", page.sum("sluice_requests_total", &[]), sent)?;
    for (i, tally) in tallies.iter().enumerate() {
        equal(
            &format!("outcomes of {}", POOLS[i]),
            page.sum("sluice_requests_total", &[("pool", POOLS[i])]),
            tally.sent,
        )?;
        equal(&format!("completed in {}", POOLS[i]), outcome(&page, i, "completed"), tally.completed)?;
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
