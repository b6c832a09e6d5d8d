//! Configurations that change while the gateway runs, and while no gateway runs.
//!
//! After any change of the file, the gateway stops an engine only when its successor can start and
//! other backends serve its models. No engine keeps running that is no longer configured.

use std::time::Duration;

use anyhow::ensure;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use sluice_fleet::EngineView;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::load::Load;
use crate::ports::free_port;
use crate::rig::{ENGINES, Rig};

const LIMIT: Duration = Duration::from_secs(240);

pub(crate) async fn engines(rig: &Rig) -> anyhow::Result<Vec<EngineView>> {
    Ok(rig.status().await?.pools[0].backends.iter().filter_map(|backend| backend.engine.clone()).collect())
}

async fn all_run_with(rig: &Rig, settings: &str) -> anyhow::Result<()> {
    rig.until(&format!("all run with {settings}"), async |rig| {
        let engines = engines(rig).await?;
        Ok(engines.len() == ENGINES.len() && engines.iter().all(|e| e.settings == settings && e.step == "serve"))
    })
    .await
}

/// Ends the load, which must have no losses, and stops the gateway, which must leave no process.
pub(crate) async fn ends_well(load: Load, mut rig: Rig) -> anyhow::Result<()> {
    load.end_without_loss(&rig).await?;
    rig.stop_all().await?;
    Ok(())
}

/// Each engine keeps its old flags until its turn to restart comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flags_that_changed_while_the_gateway_was_down_are_rolled_out_and_invalid_ones_stop_no_engine() {
    let rolled = async {
        let mut rig = Rig::start("").await?;
        let before = rig.processes()?;
        rig.kill().await?;
        rig.edit("max-num-seqs = 64", "max-num-seqs = 40, max-num-batched-tokens = 8")?;
        rig.run().await?;
        rig.until("the mistake is logged", async |rig| Ok(rig.log().contains("keeps its old configuration"))).await?;
        rig.settled().await?;
        ensure!(rig.log().contains("max_num_batched_tokens (8)"), "{}", rig.log());
        ensure!(rig.processes()? == before, "{before:?} became {:?}", rig.processes()?);
        all_run_with(&rig, "max-num-seqs=64").await?;
        rig.kill().await?;
        rig.edit("max-num-seqs = 40, max-num-batched-tokens = 8", "max-num-seqs = 48")?;
        rig.run().await?;
        let load = Load::on(rig.port);
        all_run_with(&rig, "max-num-seqs=48").await?;
        ends_well(load, rig).await
    };
    timeout(LIMIT, rolled).await.expect("took longer than allowed").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_no_longer_configured_is_stopped_by_the_next_gateway() {
    let cleared = async {
        let mut rig = Rig::start("").await?;
        ensure!(!rig.processes_of("b")?.is_empty(), "{:?}", rig.processes()?);
        let others = [rig.processes_of("a")?, rig.processes_of("c")?];
        rig.kill().await?;
        // Another engine, d, takes the port of b.
        rig.edit("name = \"b\"\n[pool.backend.launch]", "name = \"d\"\n[pool.backend.launch]")?;
        rig.run().await?;
        rig.settled().await?;
        ensure!(rig.processes_of("b")?.is_empty(), "{}", rig.log());
        ensure!(!rig.processes_of("d")?.is_empty(), "{}", rig.log());
        ensure!(others == [rig.processes_of("a")?, rig.processes_of("c")?], "other engines were changed");
        ensure!(rig.log().contains("stopped: it ran, and is no longer configured as it was"), "{}", rig.log());
        rig.stop_all().await?;
        anyhow::Ok(())
    };
    timeout(LIMIT, cleared).await.expect("took longer than allowed").unwrap();
}

/// The second of two reloads wins, even over changes that the first reload has started.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_latest_of_several_reloads_wins() {
    let rolled = async {
        let rig = Rig::start("").await?;
        let load = Load::on(rig.port);
        rig.until("requests come through", async |_| Ok(load.completed() > 20)).await?;
        rig.reconfigure("max-num-seqs = 64", "max-num-seqs = 40").await?;
        rig.until("one is being changed", async |rig| Ok(engines(rig).await?.iter().any(|e| e.change.is_some())))
            .await?;
        rig.reconfigure("max-num-seqs = 40", "max-num-seqs = 48").await?;
        all_run_with(&rig, "max-num-seqs=48").await?;
        let outdated =
            |line: &&Value| line["life"]["step"] == "start" && line["life"]["wanted"]["args"]["max-num-seqs"] == 40;
        let journal = rig.journal()?;
        let started: std::collections::BTreeSet<_> =
            journal.iter().filter(outdated).filter_map(|line| line["backend"].as_str()).collect();
        ensure!(started.len() <= 1, "{started:?} were started with outdated settings");
        // This reload returns to the first settings, just after the last engine was changed.
        rig.reconfigure("max-num-seqs = 48", "max-num-seqs = 64").await?;
        all_run_with(&rig, "max-num-seqs=64").await?;
        ends_well(load, rig).await
    };
    timeout(LIMIT, rolled).await.expect("took longer than allowed").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_stops_in_the_middle_of_a_rollout_leaves_no_process() {
    let stopped = async {
        let mut rig = Rig::start("").await?;
        rig.reconfigure("max-num-seqs = 64", "max-num-seqs = 40").await?;
        rig.until("one is being changed", async |rig| Ok(engines(rig).await?.iter().any(|e| e.change.is_some())))
            .await?;
        rig.stop_all().await?;
        // The next gateway starts all engines with the settings of the file.
        rig.run().await?;
        all_run_with(&rig, "max-num-seqs=40").await?;
        rig.stop().await
    };
    timeout(LIMIT, stopped).await.expect("took longer than allowed").unwrap();
}

/// New flags that prevent the start are rolled back; another reload of the same file retries them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_that_was_rolled_back_can_be_repeated() {
    let repeated = async {
        let rig = Rig::start("").await?;
        let load = Load::on(rig.port);
        std::fs::write(rig.path("fault.a"), "start-fails")?;
        rig.reconfigure("max-num-seqs = 64", "max-num-seqs = 40").await?;
        rig.until("it is rolled back", async |rig| {
            let engines = engines(rig).await?;
            Ok(engines.iter().any(|e| e.last_change.as_ref().is_some_and(|last| last.outcome == "rolled_back")))
        })
        .await?;
        all_run_with(&rig, "max-num-seqs=64").await?;
        rig.reconfigure("max-num-seqs = 40", "max-num-seqs = 40").await?;
        all_run_with(&rig, "max-num-seqs=40").await?;
        ends_well(load, rig).await
    };
    timeout(LIMIT, repeated).await.expect("took longer than allowed").unwrap();
}

/// A changed environment or name replaces engines, one at a time and without lost requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_are_replaced_under_load_and_a_reverted_reload_leaves_them_running() {
    let replaced = async {
        let rig = Rig::start("").await?;
        let load = Load::on(rig.port);
        rig.until("requests come through", async |_| Ok(load.completed() > 20)).await?;
        let before = rig.processes()?;
        for _ in 0..5 {
            rig.reconfigure("env = { RIG", "env = { MORE = \"1\", RIG").await?;
            rig.reconfigure("env = { MORE = \"1\", RIG", "env = { RIG").await?;
        }
        // An engine that was started before this reload may still have the variable until its turn
        // to restart comes.
        rig.until("none has the variable", async |rig| rig.all_have("MORE=1", false)).await?;
        rig.settled().await?;
        let here = |rig: &Rig| ENGINES.map(|name| rig.processes_of(name).unwrap_or_default().len());
        ensure!(here(&rig) == [2, 2, 2], "{:?} of {before:?}", rig.processes()?);
        rig.reconfigure("env = { RIG", "env = { MORE = \"1\", RIG").await?;
        rig.until("all are replaced", async |rig| {
            let status = rig.status().await?;
            let ready = status.pools[0].backends.iter().filter(|backend| backend.state == "ready").count();
            ensure!(ready >= ENGINES.len() - 1, "only {ready} ready");
            rig.all_have("MORE=1", true)
        })
        .await?;
        rig.settled().await?;
        // The name changes; the position in the file does not.
        rig.reconfigure("name = \"b\"\n[pool.backend.launch]", "name = \"d\"\n[pool.backend.launch]").await?;
        rig.until("b is gone", async |rig| Ok(rig.processes_of("b")?.is_empty())).await?;
        rig.settled().await?;
        ensure!(rig.processes_of("d")?.len() == 2, "{:?}", rig.processes()?);
        ends_well(load, rig).await
    };
    timeout(LIMIT, replaced).await.expect("took longer than allowed").unwrap();
}

/// The only other backend dies while an engine drains for a restart: the engine is not stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_becomes_the_last_one_while_it_drains_is_not_stopped() {
    let spared = async {
        let mut rig = Rig::start("").await?;
        for other in ["b", "c"] {
            rig.drain(other).await?;
        }
        let before = rig.processes_of("a")?;
        let stream = long_stream(rig.port).await?;
        rig.enable("c").await?;
        rig.until("c is ready", async |rig| Ok(rig.status().await?.pools[0].backends[2].state == "ready")).await?;
        let id = rig.restart("a", &["max-num-seqs=48".to_owned()], &["cut"]).await?;
        std::fs::write(rig.path("fault.c"), "start-hangs")?;
        for pid in rig.processes_of("c")? {
            kill(Pid::from_raw(pid), Signal::SIGKILL)?;
        }
        rig.until("the failure is noticed", async |rig| Ok(rig.status().await?.pools[0].backends[2].state != "ready"))
            .await?;
        drop(stream);
        rig.until("the change ends", async |rig| {
            let last = engines(rig).await?[0].last_change.clone();
            Ok(last.is_some_and(|last| last.id == id))
        })
        .await?;
        let last = engines(&rig).await?[0].last_change.clone().unwrap_or_default();
        ensure!(last.outcome == "aborted", "{last:?}");
        let why = last.why.unwrap_or_default();
        ensure!(why.contains("while it drained: no other backend"), "{why}");
        ensure!(rig.processes_of("a")? == before, "it was stopped");
        rig.stop().await
    };
    timeout(LIMIT, spared).await.expect("took longer than allowed").unwrap();
}

/// Opens a stream of 100,000 tokens and waits for the status of its response.
pub(crate) async fn long_stream(port: u16) -> anyhow::Result<TcpStream> {
    let body = r#"{"model":"m","prompt":"x","max_tokens":100000,"ignore_eos":true,"stream":true}"#;
    let mut socket = TcpStream::connect(("127.0.0.1", port)).await?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(head.as_bytes()).await?;
    let mut begun = [0; 12];
    timeout(LIMIT / 4, socket.read_exact(&mut begun)).await??;
    ensure!(begun.ends_with(b"200"), "{}", String::from_utf8_lossy(&begun));
    Ok(socket)
}

/// The backend becomes external, and another process starts an engine on the same port.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_becomes_external_gets_requests_again() {
    let handed = async {
        let mut rig = Rig::start("").await?;
        let port = rig.ports[1];
        let url = format!("[[pool.backend]]\nname = \"b\"\nurl = \"http://127.0.0.1:{port}\"\n");
        rig.reconfigure(&rig.described("b")?, &url).await?;
        rig.until("its engine is gone", async |rig| Ok(rig.processes_of("b")?.is_empty())).await?;
        let mut theirs = tokio::process::Command::new(crate::program::binary())
            .args(["sim", "m", "--port", &port.to_string(), "--sim-startup", "0", "--sim-orphan", "0"])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        // If probes failed meanwhile, the backend is in probation, which only a served request
        // ends.
        let load = Load::on(rig.port);
        rig.until("it is in rotation", async |rig| {
            let status = rig.status().await?;
            let backend = status.pools[0].backends.iter().find(|backend| backend.name == "b");
            Ok(backend.is_some_and(|backend| backend.state == "ready" && backend.engine.is_none()))
        })
        .await?;
        load.end_without_loss(&rig).await?;
        theirs.kill().await?;
        rig.stop().await
    };
    timeout(LIMIT, handed).await.expect("took longer than allowed").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_without_a_port_are_given_one_and_keep_it() {
    let given = async {
        let mut rig = Rig::start("").await?;
        let before = rig.processes()?;
        let ports = rig.ports;
        // The changed port of a running engine takes effect only with the next gateway.
        let other = free_port();
        rig.reconfigure(&format!("port = {}\n", ports[0]), &format!("port = {other}\n")).await?;
        ensure!(rig.log().contains("launch.port: changed; needs a restart"), "{}", rig.log());
        rig.settled().await?;
        ensure!(rig.processes()? == before, "{before:?} became {:?}", rig.processes()?);
        rig.stop().await?;
        rig.edit(&format!("port = {other}\n"), "")?;
        rig.edit(&format!("port = {}\n", ports[1]), "")?;
        rig.edit("[fleet]\n", "[fleet]\nports = \"14000-15999\"\n")?;
        rig.run().await?;
        rig.settled().await?;
        let given: Value = serde_json::from_slice(&std::fs::read(rig.path(".sluice/ports.json"))?)?;
        let first = |name: &str| given[name].as_u64().filter(|port| (14_000..16_000).contains(port));
        ensure!(first("p/a").is_some() && first("p/b").is_some() && first("p/a") != first("p/b"), "{given}");
        let running = rig.processes()?;
        rig.kill().await?;
        rig.run().await?;
        rig.settled().await?;
        ensure!(rig.processes()? == running, "the engines were not adopted: {}", rig.log());
        rig.stop().await
    };
    timeout(LIMIT, given).await.expect("took longer than allowed").unwrap();
}

/// Adapters on serving engines are loaded, moved, retried after a failure, and unloaded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapters_follow_the_configuration_without_a_restart() {
    let followed = async {
        let mut rig = Rig::start("").await?;
        for (folder, rank) in [("one", 8), ("two", 64)] {
            std::fs::create_dir(rig.path(folder))?;
            std::fs::write(rig.path(folder).join("adapter_config.json"), format!("{{\"r\": {rank}}}"))?;
        }
        rig.reconfigure("max-num-seqs = 64", "max-num-seqs = 64, enable-lora = true, max-lora-rank = 16").await?;
        all_run_with(&rig, "enable-lora=true max-lora-rank=16 max-num-seqs=64").await?;
        let before = rig.processes()?;
        let model = "[[model]]\nname = \"m\"\n";
        let adapter = |folder: &str| format!("{model}[[model]]\nname = \"ad\"\nadapter = \"{folder}\"\n");
        rig.edit("models = [\"m\"]", "models = [\"m\", \"ad\"]")?;
        rig.reconfigure(model, &adapter("one")).await?;
        loaded_from(&rig, Some("one")).await?;
        // An adapter rank above the engines' maximum fails the whole reload: the old adapter stays.
        let refused = rig.reconfigure("adapter = \"one\"", "adapter = \"two\"").await.unwrap_err().to_string();
        ensure!(refused.contains("invalid_config"), "{refused}");
        let why = "adapter 'ad' has rank 64, above max-lora-rank 16";
        rig.until("the reason is logged", async |rig| Ok(rig.log().contains(why))).await?;
        loaded_from(&rig, Some("one")).await?;
        // The gateway's checks cannot find that this folder is incomplete. The engine finds it, and
        // the old adapter stays loaded.
        std::fs::write(rig.path("two/adapter_config.json"), "")?;
        rig.reconfigure("adapter = \"two\"", "adapter = \"two\"").await?;
        rig.until("the failure is logged", async |rig| Ok(rig.log().contains("tried again every"))).await?;
        loaded_from(&rig, Some("one")).await?;
        // A gateway that adopts the engines does not stop them because of the incomplete folder.
        rig.kill().await?;
        rig.run().await?;
        rig.settled().await?;
        ensure!(rig.processes()? == before, "{before:?} became {:?}", rig.processes()?);
        std::fs::write(rig.path("two/adapter_config.json"), "{\"r\": 16}")?;
        loaded_from(&rig, Some("two")).await?;
        rig.edit("models = [\"m\", \"ad\"]", "models = [\"m\"]")?;
        rig.reconfigure(&adapter("two"), model).await?;
        loaded_from(&rig, None).await?;
        ensure!(rig.processes()? == before, "an engine was restarted");
        rig.stop().await
    };
    timeout(LIMIT, followed).await.expect("took longer than allowed").unwrap();
}

/// Waits until each engine serves `ad` from this folder of the rig, or with `None`, until no engine
/// serves it.
async fn loaded_from(rig: &Rig, folder: Option<&str>) -> anyhow::Result<()> {
    let wanted = folder.map(|folder| rig.path(folder).display().to_string());
    rig.until(&format!("the adapter is that of {folder:?}"), async |rig| {
        for port in rig.ports {
            let client = sluice_admin::AdminClient::new(&format!("127.0.0.1:{port}"), None)?;
            let list: Value = client.get("/v1/models").await?;
            let card = list["data"].as_array().into_iter().flatten().find(|card| card["id"] == "ad");
            if card.and_then(|card| card["root"].as_str()) != wanted.as_deref() {
                return Ok(false);
            }
        }
        Ok(true)
    })
    .await
}

/// Engines that commands start and stop: restarts, a kill of the gateway, and a crash.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_run_by_commands_are_restarted_recovered_and_adopted() {
    let commanded = async {
        let mut rig = Rig::start("").await?;
        rig.stop().await?;
        for (name, port) in ENGINES.iter().zip(rig.ports) {
            let described = rig.described(name)?;
            rig.edit(&described, &controlled(&rig, name, port))?;
        }
        rig.run().await?;
        rig.settled().await?;
        let load = Load::on(rig.port);
        rig.until("requests come through", async |_| Ok(load.completed() > 20)).await?;
        for name in ["a", "b"] {
            let id = rig.restart(name, &["max-num-seqs=48".to_owned()], &[]).await?;
            rig.until("it is done", async |rig| {
                let engines = engines(rig).await?;
                let last = engines.iter().filter_map(|e| e.last_change.as_ref()).find(|last| last.id == id);
                ensure!(last.is_none_or(|last| last.outcome == "done"), "{last:?}");
                Ok(last.is_some())
            })
            .await?;
        }
        load.end_without_loss(&rig).await?;
        let before = rig.processes()?;
        rig.kill().await?;
        rig.run().await?;
        rig.settled().await?;
        ensure!(rig.processes()? == before, "{before:?} became {:?}", rig.processes()?);
        let crashed: i32 = std::fs::read_to_string(rig.path("pid.c"))?.trim().parse()?;
        kill(Pid::from_raw(crashed), Signal::SIGKILL)?;
        rig.until("c is restarted", async |rig| Ok(engines(rig).await?[2].restarts == 1)).await?;
        rig.settled().await?;
        ensure!(std::fs::read_to_string(rig.path("pid.c"))?.trim() != crashed.to_string(), "the same process");
        let bad = rig.restart("a", &["max-num-seqs=many".to_owned()], &[]).await.unwrap_err().to_string();
        ensure!(bad.contains("these settings would not start"), "{bad}");
        rig.stop_all().await?;
        anyhow::Ok(())
    };
    timeout(LIMIT, commanded).await.expect("took longer than allowed").unwrap();
}

/// A backend whose engine is started and stopped by shell commands, as a service manager would.
pub(crate) fn controlled(rig: &Rig, name: &str, port: u16) -> String {
    let (pid, sluice) = (rig.path(&format!("pid.{name}")), crate::program::binary());
    let (pid, sluice, folder) = (pid.display(), sluice.display(), rig.path("").display().to_string());
    let folder = folder.trim_end_matches('/');
    let start = format!(
        "RIG={folder} setsid {sluice} sim m --sim-speed 20 --max-model-len 131072 --port {port} \"$@\" \
         >{folder}/{name}.out 2>&1 </dev/null & echo $! >{pid}"
    );
    // The command stops the whole process group, because an engine process outlives an API server
    // that was killed.
    let stop = format!(
        "p=$(cat {pid}); kill -- -$p; for i in $(seq 40); do kill -0 -- -$p || exit 0; sleep 0.05; done; kill -9 -- -$p"
    );
    format!(
        "[[pool.backend]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{port}\"\n[pool.backend.control]\n\
         start = [\"bash\", \"-c\", {start:?}, \"start\", \"{{args}}\"]\nstop = [\"bash\", \"-c\", {stop:?}]\n\
         status = [\"bash\", \"-c\", \"kill -0 $(cat {pid})\"]\nargs = {{ max-num-seqs = 64 }}\n"
    )
}

/// Two engines swap devices in one reload without losing a request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_swap_their_devices_never_share_one() {
    let swapped = async {
        let mut rig = Rig::start("").await?;
        rig.stop().await?;
        for (gpu, name) in ENGINES.iter().enumerate() {
            let described = rig.described(name)?;
            rig.edit(&described, &described.replace("env = {", &format!("gpu = [{gpu}]\nenv = {{")))?;
        }
        rig.run().await?;
        rig.settled().await?;
        let load = Load::on(rig.port);
        rig.until("requests come through", async |_| Ok(load.completed() > 20)).await?;
        for (name, from, to) in [("a", 0, 1), ("b", 1, 0)] {
            let described = rig.described(name)?;
            rig.edit(&described, &described.replace(&format!("gpu = [{from}]"), &format!("gpu = [{to}]")))?;
        }
        rig.reconfigure("[fleet]\n", "[fleet]\n").await?;
        rig.until("both have moved", async |rig| {
            let on = ["a", "b", "c"].map(|name| devices_of(rig, name).unwrap_or_default());
            for (one, two) in [(0, 1), (1, 2), (0, 2)] {
                ensure!(on[one].is_disjoint(&on[two]), "two on one device: {on:?}");
            }
            let there = |at: usize, gpu: &str| on[at].len() == 1 && on[at].contains(gpu);
            Ok(there(0, "1") && there(1, "0") && there(2, "2"))
        })
        .await?;
        rig.settled().await?;
        ends_well(load, rig).await
    };
    timeout(LIMIT, swapped).await.expect("took longer than allowed").unwrap();
}

fn devices_of(rig: &Rig, name: &str) -> anyhow::Result<std::collections::BTreeSet<String>> {
    let visible = |pid: &i32| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let list = environ.split(|byte| *byte == 0).find_map(|word| word.strip_prefix(b"CUDA_VISIBLE_DEVICES="));
        list.map(|list| String::from_utf8_lossy(list).into_owned())
    };
    Ok(rig.processes_of(name)?.iter().filter_map(visible).collect())
}

/// A backend changes from `launch` to commands while no gateway runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_moved_to_the_command_driver_replaces_the_running_one() {
    let handed = async {
        let mut rig = Rig::start("").await?;
        rig.kill().await?;
        let described = rig.described("a")?;
        rig.edit(&described, &controlled(&rig, "a", rig.ports[0]))?;
        let before = rig.processes_of("a")?;
        rig.run().await?;
        rig.settled().await?;
        let left = rig.processes_of("a")?;
        ensure!(left.iter().all(|pid| !before.contains(pid)), "{left:?} of {before:?} still run:\n{}", rig.log());
        let now: i32 = std::fs::read_to_string(rig.path("pid.a"))?.trim().parse()?;
        ensure!(!before.contains(&now) && kill(Pid::from_raw(now), None).is_ok(), "the engine does not run");
        rig.stop_all().await?;
        anyhow::Ok(())
    };
    timeout(LIMIT, handed).await.expect("took longer than allowed").unwrap();
}
