//! Many upgrades in a row, under open streams and new connections.
//!
//! Two engines in this process count their requests. Each gateway is a process, which takes over
//! from the gateway before while that one still serves streams. There are three kinds of clients
//! (`clients.rs`). The test checks:
//!
//! 1. no connection was refused or reset, no stream cut, no request refused;
//! 2. neither the sequences on an engine nor its long prompts in prefill ever exceeded the limits
//!    of one gateway, and both reached these limits;
//! 3. at the end no gateway and no engine holds anything, every gateway has ended with status 0,
//!    and their common access log has each request once.
//!
//! `SLUICE_UPGRADES` (default 3), `SLUICE_UPGRADE_STREAMS` (60) and `SLUICE_UPGRADE_RATE` (40
//! connections per second) set the size.

mod clients;
mod engine;
mod gateways;

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::ensure;
use tokio::time::timeout;

use crate::setting;
use clients::Clients;
use engine::CountingEngine;
use gateways::Gateways;

/// Time allowed for start and end.
const OVERHEAD: Duration = Duration::from_secs(120);
/// Time allowed per upgrade.
const PER_UPGRADE: Duration = Duration::from_secs(15);
/// Maximum number of long prompts in prefill on one engine.
const PERMITS: u32 = 1;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrades_cut_no_stream_refuse_no_connection_and_keep_the_limits() {
    let upgrades = setting("SLUICE_UPGRADES", 3);
    let limit = OVERHEAD + PER_UPGRADE * u32::try_from(upgrades).unwrap();
    timeout(limit, upgrade(upgrades)).await.expect("took longer than allowed").unwrap();
}

async fn upgrade(upgrades: u64) -> anyhow::Result<()> {
    raise_file_limit()?;
    let (streams, rate) = (setting("SLUICE_UPGRADE_STREAMS", 60), setting("SLUICE_UPGRADE_RATE", 40));
    // The streams alone take nearly all slots, so that other requests wait now and then.
    let slots = u32::try_from(streams / 2)? + 2;
    let engines = [CountingEngine::start().await?, CountingEngine::start().await?];
    let mut gateways = Gateways::start(&engines, slots, PERMITS).await?;
    let clients = Clients::begin(gateways.address(), usize::try_from(streams)?, rate);
    gateways.until("all streams are open", || clients.open() as u64 >= streams).await?;
    for _ in 0..upgrades {
        gateways.upgrade().await?;
    }
    let tally = clients.end().await;
    let most = gateways.most();
    let left = gateways.end().await?;
    println!(
        "{upgrades} upgrades under {streams} streams and {rate} new connections per second: {} responses, {} of streams and {} on kept connections; {} failed; at most {most} gateways at once",
        tally.completed(),
        tally.streams,
        tally.kept,
        tally.failures.len()
    );
    for (number, engine) in engines.iter().enumerate() {
        let peaks = (engine.most_running(), engine.most_prefilling());
        println!(
            "engine {number}: at most {} of {slots} sequences, {} of {PERMITS} long prompts in prefill",
            peaks.0, peaks.1
        );
        ensure!(peaks.0 <= slots && peaks.1 <= PERMITS, "engine {number} had {peaks:?} at once");
        ensure!(peaks.0 == slots && peaks.1 == PERMITS, "too little load to judge the limits: {peaks:?}");
        ensure!(engine.running() == 0, "{} sequences are left on engine {number}", engine.running());
    }
    ensure!(tally.failures.is_empty(), "{:#?}\n{}", &tally.failures[..tally.failures.len().min(20)], gateways.log());
    ensure!(left.is_empty(), "the last gateway still holds {left:?}");
    let logged = gateways.access_log()?;
    let ids: BTreeSet<&String> = logged.iter().collect();
    ensure!(ids.len() == logged.len(), "a request was logged twice");
    ensure!(logged.len() as u64 == tally.completed(), "{} requests logged, {} sent", logged.len(), tally.completed());
    Ok(())
}

/// Raises the limit of open files, because this process has the client's end and the engine's end
/// of each stream.
fn raise_file_limit() -> anyhow::Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}
