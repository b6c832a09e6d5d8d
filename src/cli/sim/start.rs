//! The process from start to end: start-up with log lines, serving, shutdown.
//!
//! As in vLLM the port is bound early and listens late, so that clients are refused until
//! everything is ready. The engine's process starts and ends with this process, except after
//! SIGKILL.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow};
use tokio::net::{TcpListener, TcpSocket};
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior};

use super::core::EngineCoreOptions;
use super::flags::{SimFlags, Startup};
use super::{cache, core};
use sluice_core::vllm::args::ServeArgs;
use sluice_core::vllm::secrets::mask_command;
use sluice_sim::http::server;
use sluice_sim::observe::log::{Level, Log, LogSource};
use sluice_sim::process::startup::{Event, Surroundings, length, plan, refused};
use sluice_sim::{Fault, Handle, MemoryOrder, Refusal, SimConfig, Snapshot};

/// Interval at which vLLM's watchdog checks the engine. The watchdog ends the server if the engine
/// is dead.
const WATCHDOG: Duration = Duration::from_secs(5);
const STATS_EVERY: Duration = Duration::from_secs(10);
/// Clients that may wait to be accepted, as in uvicorn.
const BACKLOG: u32 = 2048;

/// Runs the process until it ends. With `refusal` the start fails with that error.
pub(super) fn run(mut config: SimConfig, args: &ServeArgs, flags: &SimFlags, refusal: Option<Refusal>) -> ExitCode {
    let pid = std::process::id();
    let quiet = ["warning", "error", "critical"].contains(&args.text("uvicorn-log-level").unwrap_or("info"));
    let access = args.switch("disable-uvicorn-access-log") != Some(true) && !quiet;
    config.log = Log::On { api: pid, engine: pid, access, sglang: config.sglang.is_some() };
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(async {
        // A signal that arrives while the handlers are registered is lost.
        let mut signals = match Signals::new() {
            Ok(signals) => signals,
            Err(error) => {
                eprintln!("cannot start: {error}");
                return ExitCode::FAILURE;
            }
        };
        let mut process = SimProcess { config, child: None };
        let started = tokio::select! {
            started = process.start(args, flags, refusal) => started,
            number = signals.next() => ended_by(number),
        };
        let served = match started {
            Ok(handle) => process.serve(handle, args, signals).await.map_err(|error| error.to_string()),
            Err(text) => Err(text),
        };
        let code = match served {
            Ok(()) => ExitCode::SUCCESS,
            Err(text) => {
                eprintln!("Traceback (most recent call last):\n{text}");
                ExitCode::FAILURE
            }
        };
        process.end_child().await;
        code
    })
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt })
    }

    async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
        }
    }
}

/// Ends the process as the signal does by default. Until the process serves, that orphans the
/// engine, as in vLLM.
fn ended_by(number: i32) -> Result<Handle, String> {
    signal_hook::low_level::emulate_default_handler(number).map_err(|error| error.to_string())?;
    Err(format!("ended by signal {number}"))
}

struct SimProcess {
    config: SimConfig,
    child: Option<Child>,
}

impl SimProcess {
    async fn start(&mut self, args: &ServeArgs, flags: &SimFlags, refusal: Option<Refusal>) -> Result<Handle, String> {
        let folder = cache::folder(&self.config);
        let host = args.text("host").unwrap_or("0.0.0.0").to_owned();
        let port = args.int("port").unwrap_or(8000);
        let (arguments, address) = (shown(args), format!("{host}:{port}"));
        let cache_folder = folder.parent().and_then(std::path::Path::parent).unwrap_or(&folder).display().to_string();
        let mut around = Surroundings { cached: false, cache: &cache_folder, arguments: &arguments, address: &address };
        let cold = length(&plan(&self.config, &around));
        around.cached = cache::is_warm(&folder);
        let mut events = plan(&self.config, &around);
        if let Some(refusal) = &refusal {
            events = refused(events, refusal);
        }
        let pace = match flags.startup {
            Startup::Real => 1.0 / flags.speed,
            Startup::Cold(wanted) => wanted.as_secs_f64() / cold.as_secs_f64().max(1e-3),
        };
        if let Some(Fault::SlowStart(longer)) = flags.fault {
            tokio::time::sleep(longer).await;
        }
        let mut socket = None;
        for event in events {
            match event {
                Event::Wait(time) => tokio::time::sleep(time.mul_f64(pace)).await,
                Event::Line(source_process, level, source, text) => {
                    let text = match &socket {
                        // If the port was given as 0, it is known only now.
                        Some((_, bound)) if port == 0 => text.replace(&address, &format!("{bound}")),
                        _ => text,
                    };
                    self.config.log.line(source_process, level, source, &text);
                }
                Event::Bind => socket = Some(bind(&host, port).await.map_err(|error| format!("{error:#}"))?),
                // A start that will fail must not lock the device.
                Event::Spawn => self.spawn(flags, flags.device.clone().filter(|_| refusal.is_none())).await?,
                Event::Compiled => cache::keep(&folder),
            }
        }
        if let Some(refusal) = refusal {
            return Err(match refusal.is_engine() {
                true => "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): \
                         {'EngineCore': 1}"
                    .to_owned(),
                false => refusal.to_string(),
            });
        }
        let log = self.config.log;
        log.uvicorn(&format!("Started server process [{}]", std::process::id()));
        log.uvicorn("Waiting for application startup.");
        let handle = socket
            .context("no socket")
            .and_then(|(socket, _)| listen(socket))
            .and_then(|listener| Ok(server::spawn(self.config.clone(), listener)?))
            .map_err(|error| format!("{error:#}"))?;
        log.uvicorn("Application startup complete.");
        log.ready();
        Ok(handle)
    }

    async fn spawn(&mut self, flags: &SimFlags, device: Option<PathBuf>) -> Result<(), String> {
        let group = self.config.profile.layout.tensor_parallel;
        let options = EngineCoreOptions {
            device,
            bytes: self.config.utilisation * self.config.profile.gpu.memory_gib * f64::from(1u32 << 30),
            workers: if group > 1 { group } else { 0 },
            orphan: flags.orphan,
        };
        let child = core::spawn(&options).await.map_err(|error| format!("RuntimeError: {error:#}"))?;
        if let Log::On { api, access, sglang, .. } = self.config.log {
            self.config.log = Log::On { api, engine: child.id().unwrap_or(api), access, sglang };
        }
        self.child = Some(child);
        Ok(())
    }

    async fn serve(&mut self, handle: Handle, args: &ServeArgs, mut signals: Signals) -> anyhow::Result<()> {
        let log = self.config.log;
        let report = stats(&handle, args, self.config.speed, log);
        let holder = self.child.as_mut().and_then(core::Holder::of);
        let mut orders = handle.memory_orders();
        let memory = async {
            let Some(mut holder) = holder else { return std::future::pending().await };
            while let Some(MemoryOrder { held, done }) = orders.recv().await {
                let _ = done.send(holder.hold(held).await);
            }
        };
        let gone = async {
            match &mut self.child {
                Some(child) => drop(child.wait().await),
                None => std::future::pending().await,
            }
        };
        let killed = tokio::select! {
            _ = signals.next() => None,
            () = handle.died() => Some(false),
            () = gone => Some(true),
            () = report => None,
            () = memory => None,
        };
        match killed {
            None => self.shut_down(handle).await,
            Some(killed) => {
                if killed {
                    handle.fault(Fault::Die);
                }
                self.end_after_engine_death(handle).await;
            }
        }
        Ok(())
    }

    /// Shuts down at once, or after the requests in flight have ended.
    async fn shut_down(&mut self, handle: Handle) {
        let (log, timeout) = (self.config.log, self.config.shutdown_timeout);
        let mode = if timeout.is_zero() { "abort" } else { "drain" };
        let seconds = timeout.as_secs();
        log.api("launcher.py:254", "[shutdown] API server: shutdown triggered");
        log.api(
            "launcher.py:270",
            &format!("[shutdown] API server: stopping engine client mode={mode} timeout={seconds}s"),
        );
        log.api("core_client.py:770", &format!("[shutdown] MPClient: start timeout={seconds}s"));
        if !timeout.is_zero() {
            let count = handle.snapshot().in_flight;
            log.engine("core.py:1635", &format!("[shutdown] EngineCore: start mode=drain timeout={seconds}s"));
            let text = format!("[shutdown] EngineCore: draining in-flight requests count={count} timeout={seconds}s");
            log.engine("core.py:1655", &text);
            handle.drain(timeout).await;
            log.engine(
                "core.py:1666",
                "[shutdown] EngineCore: request processing complete; starting resource teardown",
            );
        }
        log.api("core_client.py:772", "[shutdown] MPClient: stopping engine manager");
        log.api("utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore");
        log.engine("core.py:1454", "[shutdown] EngineCore: trigger received signal=SIGTERM");
        self.end_child().await;
        log.api("core_client.py:777", "[shutdown] MPClient: complete");
        log.api("launcher.py:279", "[shutdown] API server: engine client stopped");
        log.api("launcher.py:282", "[shutdown] API server: signalling HTTP server shutdown");
        log.api("launcher.py:304", "[shutdown] API server: shutting down FastAPI HTTP server");
        log.uvicorn("Shutting down");
        handle.shutdown().await;
        log.uvicorn("Waiting for application shutdown.");
        log.uvicorn("Application shutdown complete.");
    }

    /// Ends the process after the engine died. Requests fail until the watchdog acts.
    async fn end_after_engine_death(&mut self, handle: Handle) {
        let log = self.config.log;
        let error = |source, text: &str| log.line(LogSource::ApiServer, Level::Error, source, text);
        error("core_client.py:648", "Engine core proc EngineCore died unexpectedly, shutting down client.");
        error(
            "async_llm.py:906",
            "AsyncLLM output_handler failed.\nvllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See \
             stack trace (above) for the root cause.",
        );
        self.end_child().await;
        tokio::time::sleep(WATCHDOG).await;
        log.uvicorn("Shutting down");
        handle.shutdown().await;
        log.uvicorn("Application shutdown complete.");
    }

    async fn end_child(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill().await;
        }
    }
}

/// Arguments as vLLM logs them, without secrets.
fn shown(args: &ServeArgs) -> String {
    let argv = mask_command(&args.to_argv(), "***").0;
    let model = args.model().unwrap_or_default();
    let rest = argv.iter().skip(usize::from(!model.is_empty())).map(String::as_str).collect::<Vec<_>>().join(" ");
    format!("'model_tag': '{model}', 'model': '{model}', 'argv': '{rest}'")
}

/// Binds without listening, so that clients, and a second server, are refused.
async fn bind(host: &str, port: i64) -> anyhow::Result<(TcpSocket, SocketAddr)> {
    let number = u16::try_from(port).map_err(|_| anyhow!("OverflowError: bind(): port must be 0-65535."))?;
    let host = if host.is_empty() { "0.0.0.0" } else { host };
    let mut found =
        tokio::net::lookup_host((host, number)).await.map_err(|error| anyhow!("socket.gaierror: {error}"))?;
    let address = found.next().ok_or_else(|| anyhow!("socket.gaierror: no address for '{host}'"))?;
    let socket = if address.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address).map_err(|error| {
        let text = match error.raw_os_error() {
            Some(98) => "Address already in use".to_owned(),
            Some(99) => "Cannot assign requested address".to_owned(),
            Some(13) => "Permission denied".to_owned(),
            _ => error.to_string(),
        };
        anyhow!("OSError: [Errno {}] {text}", error.raw_os_error().unwrap_or(0))
    })?;
    let bound = socket.local_addr()?;
    Ok((socket, bound))
}

fn listen(socket: TcpSocket) -> anyhow::Result<TcpListener> {
    socket.listen(BACKLOG).context("OSError: [Errno 98] Address already in use")
}

/// Logs throughput every ten seconds while the engine works, and once afterwards.
async fn stats(handle: &Handle, args: &ServeArgs, speed: f64, log: Log) {
    let seconds = std::env::var("VLLM_LOG_STATS_INTERVAL").ok().and_then(|text| text.parse::<f64>().ok());
    let every = seconds.filter(|every| *every > 0.0).map_or(STATS_EVERY, Duration::from_secs_f64);
    if args.switch("disable-log-stats") == Some(true) {
        return std::future::pending().await;
    }
    let mut ticks = tokio::time::interval_at(Instant::now() + every, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut before, mut active) = (Snapshot::default(), false);
    loop {
        ticks.tick().await;
        let now = handle.snapshot();
        let rate = |later: u64, earlier: u64| (later - earlier) as f64 / (every.as_secs_f64() * speed);
        let prompt = rate(now.prompt_tokens, before.prompt_tokens);
        let generated = rate(now.generated_tokens, before.generated_tokens);
        let busy = now.running + now.waiting > 0 || prompt + generated > 0.0;
        if busy || active {
            log.api("loggers.py:335", &line(&now, prompt, generated, now.preemptions - before.preemptions));
        }
        (before, active) = (now, busy);
    }
}

fn line(now: &Snapshot, prompt: f64, generated: f64, preemptions: u64) -> String {
    let deferred = if now.deferred > 0 { format!("Deferred: {} reqs, ", now.deferred) } else { String::new() };
    let preempted = if preemptions > 0 { format!("Preemptions: {preemptions}, ") } else { String::new() };
    let (queries, hits) = now.prefix;
    let rate = if queries == 0 { 0.0 } else { 100.0 * hits as f64 / queries as f64 };
    format!(
        "Engine 000: Avg prompt throughput: {prompt:.1} tokens/s, Avg generation throughput: {generated:.1} tokens/s, Running: \
         {} reqs, Waiting: {} reqs, {deferred}{preempted}GPU KV cache usage: {:.1}%, Prefix cache hit rate: {rate:.1}%",
        now.running,
        now.waiting - now.deferred,
        100.0 * now.kv_usage
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_vllms() {
        let now =
            Snapshot { running: 3, waiting: 2, deferred: 1, kv_usage: 0.125, prefix: (10, 4), ..Snapshot::default() };
        assert_eq!(
            line(&now, 12.34, 5.0, 0),
            "Engine 000: Avg prompt throughput: 12.3 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 3 reqs, \
             Waiting: 1 reqs, Deferred: 1 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 40.0%"
        );
    }

    #[tokio::test]
    async fn a_port_that_is_no_port_is_refused_as_python_refuses_it() {
        let text = |port| async move { bind("127.0.0.1", port).await.err().map(|error| error.to_string()) };
        assert_eq!(text(70_000).await.unwrap(), "OverflowError: bind(): port must be 0-65535.");
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        assert_eq!(text(i64::from(port)).await.unwrap(), "OSError: [Errno 98] Address already in use");
    }
}
