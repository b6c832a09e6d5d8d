//! Changes of settings with `fleet.rollback = "wake"`. The old engine sleeps next to the new one,
//! and its process serves again when the change fails or is taken back.
//!
//! Two simulated engines under load. Each GPU is a lock file, so an engine that is awake keeps
//! another one from starting on it. `nvidia-smi` is a script that shows as used the memory that a
//! file names.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use sluice_fleet::{EngineView, LastChange};
use tokio::time::{Instant, sleep, timeout};

use crate::load::Load;
use crate::program::binary;
use crate::rig::{LOOK, Rig, TIMEOUT};

/// Time limit of a test.
const LIMIT: Duration = Duration::from_secs(240);
/// The simulated duration of a cold start in seconds.
const START: &str = "4";
/// MiB in use, of [`MIB`], on a GPU on which one engine sleeps.
const ASLEEP_MIB: &str = "2600";
const MIB: &str = "143771";

/// A gateway with the engines a and b, and further lines of `[fleet]`. Each test has other `ports`.
async fn rig(ports: &str, used_mib: &str, fleet: &str) -> anyhow::Result<Rig> {
    let folder = tempfile::tempdir()?;
    let (bin, used) = (folder.path().join("bin"), folder.path().join("used"));
    fs::create_dir(&bin)?;
    fs::write(&used, used_mib)?;
    let program = bin.join("nvidia-smi");
    let script =
        format!("#!/bin/sh\ncase \"$*\" in *memory.total*) echo 0, {MIB} ;; *) echo 0, $(cat {used:?}) ;; esac\n");
    fs::write(&program, script)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let mut text = format!(
        "[health]\nprobe_interval = \"100ms\"\n[fleet]\nrollback = \"wake\"\ngrace = \"500ms\"\nramp = \"150ms\"\n\
         warm_up = 1\nheadroom = 1.0\nports = {ports:?}\n{fleet}\n[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nmodels = [\"m\"]\n"
    );
    for name in ["a", "b"] {
        text += &format!(
            "[[pool.backend]]\nname = {name:?}\n[pool.backend.launch]\n\
             command = [{:?}, \"sim\", \"m\", \"--sim-model\", \"llama-3.2-1b\", \"--sim-speed\", \"20\", \"--sim-startup\", \
             {START:?}, \"--sim-wake\", \"0.2\", \"--sim-device\", {:?}]\n\
             env = {{ RIG = {:?} }}\nargs = {{ enable-sleep-mode = true, max-num-seqs = 64 }}\n",
            binary(),
            folder.path().join(format!("gpu-{name}")),
            folder.path(),
        );
    }
    let rig = Rig::serving(folder, [0; 3], &text).await?;
    rig.settled().await?;
    Ok(rig)
}

async fn engine(rig: &Rig, name: &str) -> anyhow::Result<EngineView> {
    let backends = rig.status().await?.pools.into_iter().flat_map(|pool| pool.backends);
    let mut engines = backends.filter_map(|backend| backend.engine);
    engines.find(|engine| engine.backend == format!("p/{name}")).context("no such engine")
}

/// Waits for the end of a change. Returns it with the steps on the way, and with the time since the
/// engine left the step `since`.
async fn ended(rig: &Rig, id: u64, since: &str) -> anyhow::Result<(LastChange, BTreeSet<String>, Duration)> {
    let (deadline, mut seen, mut from) = (Instant::now() + TIMEOUT, BTreeSet::new(), Instant::now());
    loop {
        let engine = engine(rig, "a").await?;
        if engine.step == since {
            from = Instant::now();
        }
        seen.insert(engine.step);
        if let Some(last) = engine.last_change.filter(|last| last.id >= id && engine.change.is_none()) {
            return Ok((last, seen, from.elapsed()));
        }
        ensure!(Instant::now() < deadline, "no end; seen: {seen:?}\n{}", rig.log());
        sleep(LOOK).await;
    }
}

/// The first processes of the engines of the backend `a`, of which one or two run.
fn leaders(rig: &Rig) -> anyhow::Result<BTreeSet<i32>> {
    let is_server = |command: &str| command.contains(" sim m ");
    let own = rig.processes_of("a")?;
    let all = rig.processes()?;
    Ok(all.into_iter().filter(|(pid, command)| own.contains(pid) && is_server(command)).map(|(pid, _)| pid).collect())
}

async fn within(test: impl Future<Output = anyhow::Result<()>>) {
    timeout(LIMIT, test).await.expect("took longer than allowed").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_fails_wakes_the_old_engine_and_loses_no_request() {
    within(async {
        let mut rig = rig("16300-16399", ASLEEP_MIB, "").await?;
        let old = leaders(&rig)?;
        let load = Load::on(rig.port);
        rig.until("it serves", async |_| Ok(load.completed() > 20)).await?;
        // With this value no memory is left for the KV cache, so the new engine does not start.
        let id = rig.restart("a", &["gpu-memory-utilization=0.01".to_owned()], &[]).await?;
        let (last, seen, took) = ended(&rig, id, "start").await?;
        ensure!(last.outcome == "rolled_back", "{last:?}\n{}", rig.log());
        ensure!(["sleep", "start", "wake"].iter().all(|step| seen.contains(*step)), "seen: {seen:?}\n{}", rig.log());
        ensure!(leaders(&rig)? == old, "{old:?} became {:?}\n{}", leaders(&rig)?, rig.log());
        println!("it serves {:.2} s after the start failed; a start takes {START} s", took.as_secs_f64());
        rig.settled().await?;
        let before = load.completed();
        rig.until("it serves on", async |_| Ok(load.completed() > before + 50)).await?;
        load.end_without_loss(&rig).await?;
        rig.stop_all().await?;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_is_killed_during_the_start_leaves_the_return_to_the_next_one() {
    within(async {
        let mut rig = rig("16700-16799", ASLEEP_MIB, "").await?;
        let old = leaders(&rig)?;
        let id = rig.restart("a", &["gpu-memory-utilization=0.01".to_owned()], &[]).await?;
        rig.until("the new one starts", async |rig| Ok(engine(rig, "a").await?.step == "start")).await?;
        rig.kill().await?;
        rig.run().await?;
        let (last, seen, _) = ended(&rig, id, "start").await?;
        ensure!(last.outcome == "rolled_back" && seen.contains("wake"), "{last:?}, seen: {seen:?}\n{}", rig.log());
        rig.settled().await?;
        ensure!(leaders(&rig)? == old, "{old:?} became {:?}\n{}", leaders(&rig)?, rig.log());
        rig.stop_all().await?;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_back_wakes_the_old_process_even_after_the_gateway_was_killed_and_upgraded() {
    within(async {
        let mut rig = rig("16400-16499", ASLEEP_MIB, "").await?;
        let old = leaders(&rig)?;
        let load = Load::on(rig.port);
        let id = rig.restart("a", &["max-num-seqs=32".to_owned()], &[]).await?;
        let (last, ..) = ended(&rig, id, "drain").await?;
        ensure!(last.outcome == "done", "{last:?}\n{}", rig.log());
        let both = leaders(&rig)?;
        ensure!(both.len() == 2 && both.is_superset(&old), "{old:?} became {both:?}\n{}", rig.log());
        let kept = engine(&rig, "a").await?.kept;
        ensure!(kept.as_deref().is_some_and(|kept| kept.contains("max-num-seqs=64")), "{kept:?}");
        let before = load.completed();
        rig.until("the new one serves", async |_| Ok(load.completed() > before + 50)).await?;
        load.end_without_loss(&rig).await?;
        rig.kill().await?;
        rig.run().await?;
        rig.settled().await?;
        ensure!(leaders(&rig)? == both, "{both:?} became {:?}\n{}", leaders(&rig)?, rig.log());
        let load = Load::on(rig.port);
        rig.upgrade().await?;
        rig.settled().await?;
        ensure!(leaders(&rig)? == both, "{both:?} became {:?}\n{}", leaders(&rig)?, rig.log());
        let id = rig.restart("a", &["max-num-seqs=64".to_owned()], &[]).await?;
        let (last, seen, took) = ended(&rig, id, "drain").await?;
        ensure!(last.outcome == "done" && seen.contains("wake"), "{last:?}, seen: {seen:?}\n{}", rig.log());
        ensure!(leaders(&rig)? == old, "{old:?} became {:?}\n{}", leaders(&rig)?, rig.log());
        println!("it serves {:.2} s after the drain; a start takes {START} s", took.as_secs_f64());
        let before = load.completed();
        rig.until("the old one serves", async |_| Ok(load.completed() > before + 50)).await?;
        load.end_without_loss(&rig).await?;
        rig.stop_all().await?;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_old_engine_is_stopped_once_the_settings_have_settled_or_if_the_gateway_stops() {
    within(async {
        let mut rig = rig("16500-16599", ASLEEP_MIB, "settle = \"500ms\"").await?;
        let load = Load::on(rig.port);
        for (at, seqs) in [32, 16, 8].into_iter().enumerate() {
            let before = leaders(&rig)?;
            let id = rig.restart("a", &[format!("max-num-seqs={seqs}")], &[]).await?;
            let (last, seen, _) = ended(&rig, id, "drain").await?;
            ensure!(last.outcome == "done" && seen.contains("sleep"), "{last:?}, seen: {seen:?}\n{}", rig.log());
            // After the last change, the gateway stops while it still keeps the old engine.
            if at < 2 {
                rig.until("the old one is gone", async |rig| Ok(leaders(rig)?.is_disjoint(&before))).await?;
                ensure!(leaders(&rig)?.len() == 1 && engine(&rig, "a").await?.kept.is_none(), "{}", rig.log());
            }
            let done = load.completed();
            rig.until("the new one serves", async |_| Ok(load.completed() > done + 20)).await?;
        }
        load.end_without_loss(&rig).await?;
        rig.stop_all().await?;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_room_on_the_device_the_old_engine_is_stopped_as_ever() {
    within(async {
        let mut rig = rig("16600-16699", "20000", "").await?;
        let old = leaders(&rig)?;
        let id = rig.restart("a", &["max-num-seqs=32".to_owned()], &[]).await?;
        let (last, seen, _) = ended(&rig, id, "drain").await?;
        ensure!(last.outcome == "done" && seen.contains("stop"), "{last:?}, seen: {seen:?}\n{}", rig.log());
        ensure!(leaders(&rig)?.is_disjoint(&old) && engine(&rig, "a").await?.kept.is_none(), "{}", rig.log());
        ensure!(rig.log().contains("gpu 0: 20000 of 143771 MiB are in use"), "{}", rig.log());
        rig.stop().await
    })
    .await;
}
