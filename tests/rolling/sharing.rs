//! Two models on one simulated GPU (`launch.share`). One engine is awake while the other sleeps,
//! and requests for both models are served.
//!
//! The GPU is a lock file, so an engine fails if it wakes while another one is awake. Clients of
//! both models send without a pause, so each turn ends while requests run and wait.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::ensure;
use tokio::time::{Instant, sleep, timeout};

use crate::load::Load;
use crate::program::binary;
use crate::rig::{LOOK, Rig};

/// Time limit of a test.
const LIMIT: Duration = Duration::from_secs(240);
/// The simulated time that waking takes, and that falling asleep takes.
const WAKE: Duration = Duration::from_millis(300);
/// Number of turns that each engine gets in the test.
const TURNS: u64 = 3;

/// A gateway with the models a and b on one GPU, and further lines of `[fleet]`. Each test has
/// other `ports`, because the gateway of another test could take the port of an engine while this
/// engine is stopped.
async fn rig(ports: &str, fleet: &str) -> anyhow::Result<Rig> {
    let folder = tempfile::tempdir()?;
    let mut text = format!(
        "[health]\nprobe_interval = \"100ms\"\n[fleet]\ngrace = \"500ms\"\nramp = \"0s\"\nwarm_up = 0\n\
         share_stay = \"1s\"\nshare_hold = \"60s\"\nports = {ports:?}\n{fleet}\n"
    );
    for model in ["a", "b"] {
        text += &format!(
            "[[model]]\nname = \"{model}\"\n[[pool]]\nname = \"{model}\"\nmodels = [\"{model}\"]\n\
             [[pool.backend]]\nname = \"{model}\"\n[pool.backend.launch]\nshare = \"gpu0\"\n\
             command = [{:?}, \"sim\", \"{model}\", \"--sim-speed\", \"20\", \"--sim-wake\", \"{}\", \"--sim-device\", {:?}]\n\
             env = {{ RIG = {:?} }}\n",
            binary(),
            WAKE.as_secs_f64(),
            folder.path().join("gpu0"),
            folder.path(),
        );
    }
    Rig::serving(folder, [0; 3], &text).await
}

/// Step, number of wakes and `wake_seconds` of both engines.
async fn engines(rig: &Rig) -> anyhow::Result<Vec<(String, u64, f64)>> {
    let pools = rig.status().await?.pools;
    let engines = pools.into_iter().filter_map(|pool| pool.backends.into_iter().next()?.engine);
    Ok(engines.map(|engine| (engine.step, engine.wakes_total, engine.wake_seconds.unwrap_or(0.0))).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_models_on_one_gpu_take_turns_and_no_request_is_lost() {
    let shared = async {
        let mut rig = rig("16000-16099", "").await?;
        ensure!(engines(&rig).await?.iter().all(|(step, ..)| matches!(&**step, "idle" | "recover" | "stop")));
        let began = Instant::now();
        let (a, b) = (Load::of(rig.port, "a"), Load::of(rig.port, "b"));
        let mut seen = BTreeSet::new();
        loop {
            let now = engines(&rig).await?;
            let awake = now.iter().filter(|(step, ..)| matches!(&**step, "serve" | "ramp" | "drain")).count();
            ensure!(awake <= 1, "two are awake: {now:?}\n{}", rig.log());
            seen.extend(now.iter().map(|(step, ..)| step.clone()));
            if now.iter().all(|(_, wakes, _)| *wakes >= TURNS) {
                let longest = now.iter().map(|(.., seconds)| *seconds).fold(0.0, f64::max);
                ensure!(longest >= WAKE.as_secs_f64(), "a wake takes its time: {now:?}");
                println!(
                    "{} switches in {:.1} s; the last wakes took {longest:.2} s at most; done: {} and {}; slowest: {:?} and {:?}",
                    now.iter().map(|(_, wakes, _)| wakes).sum::<u64>(),
                    began.elapsed().as_secs_f64(),
                    a.completed(),
                    b.completed(),
                    a.slowest(),
                    b.slowest()
                );
                break;
            }
            sleep(LOOK).await;
        }
        ensure!(["sleep", "asleep", "wake"].iter().all(|step| seen.contains(*step)), "not seen: {seen:?}");
        ensure!(a.completed() > 20 && b.completed() > 20, "{} and {}\n{}", a.completed(), b.completed(), rig.log());
        let (a, b) = tokio::join!(a.end(), b.end());
        ensure!(a.is_empty() && b.is_empty(), "lost: {a:#?}\n{b:#?}\n{}", rig.log());
        let processes = rig.processes()?;
        // The next gateway finds one engine asleep, and wakes it when the turn of this engine
        // comes.
        rig.kill().await?;
        rig.run().await?;
        rig.until("one sleeps and one serves", async |rig| {
            let steps: BTreeSet<String> = engines(rig).await?.into_iter().map(|(step, ..)| step).collect();
            Ok(steps == BTreeSet::from(["asleep".to_owned(), "serve".to_owned()]))
        })
        .await?;
        ensure!(rig.processes()? == processes, "{processes:?} became {:?}", rig.processes()?);
        let (a, b) = (Load::of(rig.port, "a"), Load::of(rig.port, "b"));
        rig.until("both models serve", async |_| Ok(a.completed() > 10 && b.completed() > 10)).await?;
        let (a, b) = tokio::join!(a.end(), b.end());
        ensure!(a.is_empty() && b.is_empty(), "lost: {a:#?}\n{b:#?}\n{}", rig.log());
        rig.stop_all().await?;
        Ok(())
    };
    timeout(LIMIT, shared).await.expect("took longer than allowed").unwrap();
}

/// The gateway stops an engine between its turns if the engine cannot sleep, or if it has slept for
/// too long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_without_sleep_is_stopped_and_a_long_sleep_ends_the_process() {
    let shared = async {
        let mut rig = rig("16100-16199", "asleep = \"500ms\"").await?;
        let load = Load::of(rig.port, "a");
        rig.until("a serves", async |_| Ok(load.completed() > 5)).await?;
        ensure!(load.end().await.is_empty(), "{}", rig.log());
        let load = Load::of(rig.port, "b");
        rig.until("b serves, and a is stopped", async |rig| {
            Ok(load.completed() > 5 && engines(rig).await?[0].0 == "idle")
        })
        .await?;
        ensure!(load.end().await.is_empty(), "{}", rig.log());
        rig.reconfigure("share = \"gpu0\"\n", "share = \"gpu0\"\nargs = { enable-sleep-mode = false }\n").await?;
        let (a, b) = (Load::of(rig.port, "a"), Load::of(rig.port, "b"));
        rig.until("both serve", async |_| Ok(a.completed() > 10 && b.completed() > 10)).await?;
        let (a, b) = tokio::join!(a.end(), b.end());
        ensure!(a.is_empty() && b.is_empty(), "lost: {a:#?}\n{b:#?}\n{}", rig.log());
        rig.stop().await
    };
    timeout(LIMIT, shared).await.expect("took longer than allowed").unwrap();
}

/// Requests for the model a take longer than `fleet.drain`, and at least one of them always runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_requests_of_one_model_do_not_keep_the_other_one_waiting_for_ever() {
    let shared = async {
        let mut rig = rig("16200-16299", "drain = \"100ms\"").await?;
        let a = Load::of(rig.port, "a");
        rig.until("a serves", async |_| Ok(a.completed() > 5)).await?;
        let b = Load::of(rig.port, "b");
        rig.until("b serves", async |_| Ok(b.completed() > 5)).await?;
        rig.until("it is the turn of a again", async |rig| Ok(engines(rig).await?[0].1 >= 2)).await?;
        let (a, b) = tokio::join!(a.end(), b.end());
        ensure!(a.is_empty() && b.is_empty(), "lost: {a:#?}\n{b:#?}\n{}", rig.log());
        rig.stop().await
    };
    timeout(LIMIT, shared).await.expect("took longer than allowed").unwrap();
}
