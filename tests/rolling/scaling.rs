//! Autoscaling that the gateway applies: engines are stopped and started under load without losing
//! a request.
//!
//! Reloads change `min` and `max`, and so the number of wanted engines. The tests of the scaler
//! cover its own decisions.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use crate::config::{controlled, ends_well, engines, long_stream};
use crate::load::Load;
use crate::rig::{ENGINES, LOOK, Rig};

const LIMIT: Duration = Duration::from_secs(240);
/// The line of the file that the first reload replaces.
const MODELS: &str = "models = [\"m\"]\n";

fn autoscale(min: u32, max: u32) -> String {
    format!(
        "{MODELS}autoscale = {{ apply = true, min = {min}, max = {max}, down_after = \"1s\", idle_after = \"2s\" }}\n"
    )
}

/// The current bounds of the number of engines, as a part of the file that reloads replace.
struct Bounds(String);

impl Bounds {
    async fn set(&mut self, rig: &Rig, min: u32, max: u32) -> anyhow::Result<()> {
        let next = autoscale(min, max);
        rig.reconfigure(&self.0, &next).await?;
        self.0 = next;
        Ok(())
    }
}

async fn steps(rig: &Rig) -> anyhow::Result<Vec<String>> {
    Ok(engines(rig).await?.into_iter().map(|engine| engine.step).collect())
}

/// Waits until the engines are in these steps. Then idle engines must have no processes, and every
/// other engine must have at least one.
async fn until_steps(rig: &Rig, wanted: [&str; 3]) -> anyhow::Result<()> {
    rig.until(&format!("the engines are {wanted:?}"), async |rig| Ok(steps(rig).await? == wanted)).await?;
    for (name, step) in ENGINES.iter().zip(wanted) {
        let processes = rig.processes_of(name)?;
        ensure!(processes.is_empty() == (step == "idle"), "{name} is {step} and has processes {processes:?}");
    }
    Ok(())
}

async fn comes_through(rig: &Rig, load: &Load) -> anyhow::Result<()> {
    let before = load.completed();
    rig.until("requests come through", async |_| Ok(load.completed() > before + 20)).await
}

/// Scales down, up and down again, with a drain that ends early, an operator's drain, and a new
/// configuration of the engines.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_are_not_wanted_are_stopped_and_started_again_without_losing_a_request() {
    let scaled = async {
        let rig = Rig::start("").await?;
        let load = Load::on(rig.port);
        comes_through(&rig, &load).await?;
        let mut bounds = Bounds(MODELS.to_owned());
        bounds.set(&rig, 1, 1).await?;
        until_steps(&rig, ["serve", "idle", "idle"]).await?;
        rig.until("the status says why it is stopped", async |rig| {
            let status = rig.status().await?;
            let stopped = &status.pools[0].backends[2];
            let engine = stopped.engine.as_ref().context("the gateway runs it")?;
            ensure!(stopped.state == "idle" && engine.why.is_none() && engine.crashes_total == 0, "{stopped:?}");
            Ok(engine.detail == "stopped: 1 of 3 engines wanted")
        })
        .await?;
        comes_through(&rig, &load).await?;
        bounds.set(&rig, 3, 3).await?;
        until_steps(&rig, ["serve", "serve", "serve"]).await?;

        // While a stream runs on c, the gateway does not stop c. Meanwhile c is wanted again, and
        // goes on in the same process.
        for other in ["a", "b"] {
            rig.drain(other).await?;
        }
        let stream = long_stream(rig.port).await?;
        for other in ["a", "b"] {
            rig.enable(other).await?;
        }
        let before = rig.processes_of("c")?;
        bounds.set(&rig, 2, 2).await?;
        rig.until("c drains", async |rig| Ok(steps(rig).await?[2] == "drain")).await?;
        comes_through(&rig, &load).await?;
        bounds.set(&rig, 3, 3).await?;
        until_steps(&rig, ["serve", "serve", "serve"]).await?;
        ensure!(rig.processes_of("c")? == before, "it was restarted");
        ensure!(
            !rig.log().contains("requests were still running"),
            "only the limit of the drain ended it:\n{}",
            rig.log()
        );
        drop(stream);

        // If an operator takes an engine out of rotation, another engine takes its place.
        bounds.set(&rig, 2, 2).await?;
        until_steps(&rig, ["serve", "serve", "idle"]).await?;
        rig.drain("b").await?;
        until_steps(&rig, ["serve", "serve", "serve"]).await?;
        rig.enable("b").await?;
        until_steps(&rig, ["serve", "serve", "idle"]).await?;

        // The flags change while only one engine is wanted, so another engine runs during the
        // restart of that engine.
        bounds.set(&rig, 1, 1).await?;
        until_steps(&rig, ["serve", "idle", "idle"]).await?;
        rig.reconfigure("max-num-seqs = 64", "max-num-seqs = 48").await?;
        rig.until("all have the new flags", async |rig| {
            let engines = engines(rig).await?;
            Ok(engines.iter().all(|engine| engine.settings == "max-num-seqs=48" && engine.change.is_none()))
        })
        .await?;
        until_steps(&rig, ["serve", "idle", "idle"]).await?;
        ends_well(load, rig).await
    };
    timeout(LIMIT, scaled).await.expect("took longer than allowed").unwrap();
}

/// The running engines stay running and the stopped ones stay stopped when the gateway is upgraded,
/// killed or stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_gateway_takes_over_what_runs_and_leaves_stopped_what_is_stopped() {
    let taken = async {
        let mut rig = Rig::start("").await?;
        let load = Load::on(rig.port);
        comes_through(&rig, &load).await?;
        let mut bounds = Bounds(MODELS.to_owned());
        bounds.set(&rig, 1, 2).await?;
        until_steps(&rig, ["serve", "serve", "idle"]).await?;
        let starts = |rig: &Rig| -> anyhow::Result<usize> {
            let is_start = |line: &serde_json::Value| line["backend"] == "p/c" && line["life"]["step"] == "start";
            Ok(rig.journal()?.iter().filter(|line| is_start(line)).count())
        };
        let (before, started) = (rig.processes()?, starts(&rig)?);
        rig.upgrade().await?;
        load.end_without_loss(&rig).await?;
        until_steps(&rig, ["serve", "serve", "idle"]).await?;
        rig.kill().await?;
        rig.run().await?;
        until_steps(&rig, ["serve", "serve", "idle"]).await?;
        ensure!(rig.processes()? == before, "{before:?} became {:?}", rig.processes()?);
        rig.stop_all().await?;
        rig.run().await?;
        until_steps(&rig, ["serve", "serve", "idle"]).await?;
        ensure!(starts(&rig)? == started, "c was started");
        // Without autoscaling all engines run.
        rig.reconfigure(&bounds.0, MODELS).await?;
        until_steps(&rig, ["serve", "serve", "serve"]).await?;
        rig.stop().await
    };
    timeout(LIMIT, taken).await.expect("took longer than allowed").unwrap();
}

/// Engines that commands start and stop. One of them fails to start, and another engine takes its
/// place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_run_by_commands_are_scaled_and_one_that_fails_is_replaced() {
    let scaled = async {
        let mut rig = Rig::start("").await?;
        rig.stop().await?;
        for (name, port) in ENGINES.iter().zip(rig.ports).filter(|(name, _)| **name != "b") {
            let described = rig.described(name)?;
            rig.edit(&described, &controlled(&rig, name, port))?;
        }
        rig.run().await?;
        rig.settled().await?;
        let load = Load::on(rig.port);
        comes_through(&rig, &load).await?;
        let mut bounds = Bounds(MODELS.to_owned());
        bounds.set(&rig, 1, 1).await?;
        rig.until("two are stopped", async |rig| Ok(steps(rig).await? == ["serve", "idle", "idle"])).await?;
        comes_through(&rig, &load).await?;
        std::fs::write(rig.path("fault.b"), "start-fails")?;
        bounds.set(&rig, 2, 2).await?;
        rig.until("c serves for b", async |rig| Ok(steps(rig).await? == ["serve", "hold", "serve"])).await?;
        comes_through(&rig, &load).await?;
        rig.enable("b").await?;
        // The cause is fixed, but two other engines serve already.
        rig.until("b is idle", async |rig| Ok(steps(rig).await? == ["serve", "idle", "serve"])).await?;
        ends_well(load, rig).await
    };
    timeout(LIMIT, scaled).await.expect("took longer than allowed").unwrap();
}

/// Sends a request on a new connection. Returns the head and the body of the response, and the time
/// until its end.
async fn ask(port: u16) -> anyhow::Result<(String, String, Duration)> {
    let body = r#"{"model":"m","prompt":"x","max_tokens":8,"ignore_eos":true,"stream":true}"#;
    let began = Instant::now();
    let mut socket = TcpStream::connect(("127.0.0.1", port)).await?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(head.as_bytes()).await?;
    let mut response = String::new();
    timeout(LIMIT / 2, socket.read_to_string(&mut response)).await??;
    let (head, rest) = response.split_once("\r\n\r\n").context("no response")?;
    Ok((head.to_ascii_lowercase(), rest.to_owned(), began.elapsed()))
}

async fn status_of(port: u16, path: &str) -> anyhow::Result<String> {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).await?;
    socket.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await?;
    let mut response = String::new();
    timeout(LIMIT / 4, socket.read_to_string(&mut response)).await??;
    Ok(response.get(9..12).unwrap_or_default().to_owned())
}

/// A pool without requests has no engine. The next requests wait for an engine, and get an error if
/// it does not start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_without_requests_has_no_engine_and_the_next_requests_wait_for_one() {
    let slept = async {
        let rig = Rig::start("").await?;
        let load = Load::on(rig.port);
        let mut bounds = Bounds(MODELS.to_owned());
        bounds.set(&rig, 0, 3).await?;
        comes_through(&rig, &load).await?;
        load.end_without_loss(&rig).await?;
        // During the first minute after the start, the scaler stops no engine.
        let deadline = Instant::now() + LIMIT / 2;
        while steps(&rig).await? != ["idle"; 3] {
            ensure!(Instant::now() < deadline, "{:?}\n{}", steps(&rig).await?, rig.log());
            sleep(LOOK).await;
        }
        until_steps(&rig, ["idle", "idle", "idle"]).await?;
        ensure!(status_of(rig.port, "/ready").await? == "200", "its pool serves the next request");
        let asked = tokio::join!(ask(rig.port), ask(rig.port), ask(rig.port));
        for answered in [asked.0?, asked.1?, asked.2?] {
            let (head, body, took) = answered;
            ensure!(head.starts_with("http/1.1 200") && body.contains("[DONE]"), "{head}\n{body}\n{}", rig.log());
            ensure!(took > Duration::from_millis(500), "an engine had to start: {took:?}");
        }
        until_steps(&rig, ["serve", "idle", "idle"]).await?;
        until_steps(&rig, ["idle", "idle", "idle"]).await?;
        // When the start fails, the gateway answers the waiting request at once. A later request
        // starts an engine again.
        std::fs::write(rig.path("fault.a"), "start-fails")?;
        let (head, body, took) = ask(rig.port).await?;
        ensure!(head.starts_with("http/1.1 503") && head.contains("retry-after: "), "{head}\n{body}");
        ensure!(body.contains("engine_starting") && took < Duration::from_secs(30), "{body} after {took:?}");
        let (head, body, _) = ask(rig.port).await?;
        ensure!(head.starts_with("http/1.1 200") && body.contains("[DONE]"), "{head}\n{body}\n{}", rig.log());
        let mut rig = rig;
        rig.stop_all().await?;
        Ok::<(), anyhow::Error>(())
    };
    timeout(LIMIT, slept).await.expect("took longer than allowed").unwrap();
}
