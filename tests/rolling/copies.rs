//! A pool of equal processes from one table (`launch.copies`): serial workers that a reload adds
//! and removes, and that restart one by one, without losing a job.
//!
//! A worker is `sluice sim` with a path of its own. The gateway treats the worker as a program that
//! does one job at a time and lists no models.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::program::binary;
use crate::rig::Rig;

/// Time limit of the test.
const LIMIT: Duration = Duration::from_secs(120);
/// Jobs that are sent together.
const JOBS: usize = 12;

async fn workers() -> anyhow::Result<Rig> {
    let folder = tempfile::tempdir()?;
    let text = format!(
        "[fleet]\ngrace = \"500ms\"\nramp = \"0s\"\n[health]\nprobe_interval = \"100ms\"\n\
         [[model]]\nname = \"painter\"\n[[pool]]\nname = \"p\"\nengine = \"serial\"\nmodels = [\"painter\"]\n\
         routes = [\"/reset_mm_cache\"]\n[[pool.backend]]\nname = \"w\"\n[pool.backend.launch]\n\
         command = [{:?}, \"sim\", \"m\", \"--sim-speed\", \"20\"]\ncopies = 3\ngpu = [0, \"MIG-1a2b\"]\n\
         env = {{ RIG = {:?}, VLLM_SERVER_DEV_MODE = \"1\" }}\n",
        binary(),
        folder.path(),
    );
    Rig::serving(folder, [0; 3], &text).await
}

async fn job(port: u16) -> anyhow::Result<String> {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).await?;
    let head = "POST /reset_mm_cache HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}";
    socket.write_all(head.as_bytes()).await?;
    let mut response = String::new();
    timeout(LIMIT / 4, socket.read_to_string(&mut response)).await??;
    ensure!(response.starts_with("HTTP/1.1 200"), "{response}");
    let backend = response.lines().find_map(|line| line.strip_prefix("x-sluice-backend: "));
    Ok(backend.context("no backend in the head")?.to_owned())
}

/// Sends jobs until each of these workers has done at least one. Fails if another worker has done a
/// job.
async fn use_all(port: u16, names: &[&str]) -> anyhow::Result<()> {
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < names.len() {
        seen.extend(jobs(port).await?);
    }
    ensure!(seen.iter().map(String::as_str).eq(names.iter().copied()), "{seen:?} did the jobs");
    Ok(())
}

/// Sends [`JOBS`] jobs at once. Returns the names of the workers that did them.
async fn jobs(port: u16) -> anyhow::Result<Vec<String>> {
    let mut sent: Vec<_> = (0..JOBS).map(|_| tokio::spawn(job(port))).collect();
    let mut workers = Vec::new();
    for job in sent.drain(..) {
        workers.push(job.await??);
    }
    workers.sort();
    workers.dedup();
    Ok(workers)
}

async fn serves(rig: &Rig, names: &[&str]) -> anyhow::Result<()> {
    rig.until(&format!("{names:?} serve"), async |rig| {
        let status = rig.status().await?;
        let backends = &status.pools[0].backends;
        let serving = backends.iter().filter(|backend| backend.state == "ready").map(|backend| backend.name.as_str());
        Ok(serving.eq(names.iter().copied()) && backends.len() == names.len())
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_are_backends_that_a_reload_adds_and_removes_and_that_restart_one_by_one() {
    let pooled = async {
        let mut rig = workers().await?;
        serves(&rig, &["w-0", "w-1", "w-2"]).await?;
        use_all(rig.port, &["w-0", "w-1", "w-2"]).await?;
        let of = |name: &str| rig.processes_of(name);
        let [zero, one, two] = ["w-0", "w-1", "w-2"].map(of);
        let (zero, one, two) = (zero?, one?, two?);
        for (process, device) in [(&zero, "0"), (&one, "MIG-1a2b"), (&two, "0")] {
            let variable = format!("CUDA_VISIBLE_DEVICES={device}");
            let has = |pid: &i32| crate::processes::has(*pid, |word: &[u8]| word == variable.as_bytes());
            ensure!(!process.is_empty() && process.iter().all(has), "{process:?} lacks {variable}");
        }
        rig.reconfigure("copies = 3", "copies = 4").await?;
        serves(&rig, &["w-0", "w-1", "w-2", "w-3"]).await?;
        ensure!(rig.processes_of("w-2")? == two, "the others stay");
        rig.reconfigure("copies = 4", "copies = 2").await?;
        serves(&rig, &["w-0", "w-1"]).await?;
        rig.until("the processes of the others end", async |rig| {
            Ok(rig.processes_of("w-2")?.is_empty() && rig.processes_of("w-3")?.is_empty())
        })
        .await?;
        ensure!((rig.processes_of("w-0")?, rig.processes_of("w-1")?) == (zero.clone(), one.clone()));
        use_all(rig.port, &["w-0", "w-1"]).await?;
        let change = rig.restart("w-1", &[], &["hold"]).await?;
        while rig.status().await?.pools[0].backends[1]
            .engine
            .as_ref()
            .is_none_or(|engine| engine.last_change.as_ref().is_none_or(|ended| ended.id < change))
        {
            jobs(rig.port).await?;
        }
        serves(&rig, &["w-0", "w-1"]).await?;
        ensure!(rig.processes_of("w-0")? == zero && rig.processes_of("w-1")? != one, "only one restarted");
        rig.stop().await
    };
    timeout(LIMIT, pooled).await.expect("took longer than allowed").unwrap();
}
