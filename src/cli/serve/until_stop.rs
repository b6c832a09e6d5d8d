//! Serves until a signal arrives or a newer gateway has taken over, then ends in order.
//!
//! A stop signal also ends a handover that has begun; other signals wait.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use sluice_fleet::start_detached;
use sluice_serve::upgrade::Door;
use sluice_serve::{App, Running, systemd};

/// The variable that names the process which started this one at SIGUSR2.
pub(super) const STARTED_BY: &str = "SLUICE_STARTED_BY";

/// A SIGTERM within this time after another one counts as the same signal, because the shell's
/// `timeout` sends one to the program and one to the process group.
const SAME_SIGNAL: Duration = Duration::from_secs(1);

pub(super) struct Signals {
    stops: StopSignals,
    reload: Signal,
    reopen: Signal,
    upgrade: Signal,
}

struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    /// Time of the last SIGTERM that counted.
    terminated: Option<Instant>,
}

impl StopSignals {
    /// Returns at SIGINT, and at a SIGTERM that does not repeat the one before.
    async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => {}
                _ = self.interrupt.recv() => return,
            }
            let now = Instant::now();
            if self.terminated.is_none_or(|before| now.duration_since(before) >= SAME_SIGNAL) {
                self.terminated = Some(now);
                return;
            }
        }
    }
}

impl Signals {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            stops: StopSignals {
                terminate: signal(SignalKind::terminate())?,
                interrupt: signal(SignalKind::interrupt())?,
                terminated: None,
            },
            reload: signal(SignalKind::hangup())?,
            reopen: signal(SignalKind::user_defined1())?,
            upgrade: signal(SignalKind::user_defined2())?,
        })
    }

    pub(super) async fn stop(&mut self) {
        self.stops.next().await;
    }
}

/// Serves until the gateway stops or has handed over. `program`: the program that SIGUSR2 starts.
pub(super) async fn serve(
    mut running: Running,
    door: Option<Door>,
    signals: &mut Signals,
    program: Option<PathBuf>,
) -> ExitCode {
    match wait(&mut running, door.as_ref(), signals, program).await {
        Some(successor) => {
            drop(door);
            systemd::notify(&format!("MAINPID={successor}"));
            drain(running, signals).await
        }
        None => {
            systemd::notify("STOPPING=1");
            if let Some(door) = door {
                door.remove();
            }
            stop(running, signals).await
        }
    }
}

/// Waits for a stop signal (`None`), or until a newer gateway has taken over, and returns the
/// process id of that gateway. Handles all other signals.
async fn wait(
    running: &mut Running,
    door: Option<&Door>,
    signals: &mut Signals,
    program: Option<PathBuf>,
) -> Option<u32> {
    let next_visitor = async || match door {
        Some(door) => (door, door.visitor().await),
        None => std::future::pending().await,
    };
    loop {
        tokio::select! {
            () = signals.stops.next() => return None,
            _ = signals.reload.recv() => {
                // A reload runs on another thread, because it may run an engine's program to list
                // the flags.
                let reloader = Arc::clone(&running.app().reloader);
                drop(tokio::task::spawn_blocking(move || reloader.run()));
            }
            _ = signals.reopen.recv() => {
                running.app().core.telemetry.reopen();
                tracing::info!("SIGUSR1: the access log and the records are opened anew");
            }
            _ = signals.upgrade.recv() => match &program {
                Some(program) if door.is_some() => start_successor(program.clone()).await,
                _ => tracing::error!("SIGUSR2: no upgrade: this gateway was started without a configuration file, or could not open its socket (see the log of its start)"),
            },
            (door, visitor) = next_visitor() => {
                let mut is_stopped = false;
                let stop = async {
                    signals.stop().await;
                    is_stopped = true;
                };
                if let Some(successor) = running.hand_over(door, visitor, stop).await {
                    return Some(successor);
                }
                if is_stopped {
                    return None;
                }
            }
        }
    }
}

/// Starts the program file, perhaps a newer one, with the arguments of this process and
/// `--upgrade`.
async fn start_successor(program: PathBuf) {
    let mut arguments: Vec<_> = std::env::args_os().skip(1).filter(|argument| argument != "--upgrade").collect();
    arguments.push("--upgrade".into());
    let shown = program.display().to_string();
    let by = (STARTED_BY, std::process::id().to_string());
    match tokio::task::spawn_blocking(move || start_detached(&program, arguments, by)).await {
        Ok(Ok(())) => tracing::info!("SIGUSR2: started {shown} to take over"),
        Ok(Err(error)) => tracing::error!("SIGUSR2: {shown} cannot be started: {error}"),
        Err(error) => tracing::error!("SIGUSR2: {shown} cannot be started: {error}"),
    }
}

/// Serves open requests to their end, while another process accepts connections.
async fn drain(running: Running, signals: &mut Signals) -> ExitCode {
    let (ending, app) = (running.ending(), Arc::clone(running.app()));
    let mut draining = std::pin::pin!(running.drain());
    let cut = tokio::select! {
        cut = &mut draining => cut,
        () = signals.stop() => {
            let (in_flight, waiting) = app.admission().load();
            tracing::info!(in_flight, waiting, "stopping: connections without a request are closed; a second signal aborts running requests");
            app.core.flow.close();
            ending.stop();
            tokio::select! {
                cut = &mut draining => cut,
                () = signals.stop() => {
                    app.core.fleet.shut_down_fast();
                    (&mut draining).await
                }
            }
        }
    };
    ended(cut)
}

async fn stop(running: Running, signals: &mut Signals) -> ExitCode {
    let lame_duck = running.leave();
    if !lame_duck.is_zero() {
        tracing::info!(
            "stopping in {lame_duck:?}: /ready is 503, requests are still served; a second signal stops now"
        );
        let _ = tokio::time::timeout(lame_duck, signals.stop()).await;
    }
    let (in_flight, waiting) = running.app().admission().load();
    tracing::info!(in_flight, waiting, "stopping: no new requests; a second signal aborts running requests");
    let app = Arc::clone(running.app());
    let mut stopping = std::pin::pin!(running.stop());
    let cut = tokio::select! {
        cut = &mut stopping => cut,
        () = signals.stop() => match stop_fast(&app, stopping.as_mut(), signals).await {
            Ok(cut) => cut,
            Err(code) => return code,
        },
    };
    ended(cut)
}

/// Stops after the second signal. Returns the number of requests that were cut, or the exit code
/// after a third signal.
async fn stop_fast(
    app: &App,
    mut stopping: std::pin::Pin<&mut impl Future<Output = usize>>,
    signals: &mut Signals,
) -> Result<usize, ExitCode> {
    let (in_flight, waiting) = app.admission().load();
    let requests = match in_flight + waiting {
        0 => "",
        _ => "requests are cut, ",
    };
    tracing::warn!(
        in_flight,
        waiting,
        "second signal: {requests}engines are killed soon; a third one ends sluice at once"
    );
    app.core.fleet.shut_down_fast();
    tokio::select! {
        cut = &mut stopping => Ok(cut),
        () = signals.stop() => {
            let left = app.core.fleet.running();
            let left = if left.is_empty() { "no engine".to_owned() } else { left.join(", ") };
            tracing::warn!("third signal: ended at once; left running: {left}");
            Err(ExitCode::FAILURE)
        }
    }
}

fn ended(cut: usize) -> ExitCode {
    if cut == 0 {
        tracing::info!("stopped");
        return ExitCode::SUCCESS;
    }
    let requests = if cut == 1 { "request that still ran was" } else { "requests that still ran were" };
    tracing::warn!("stopped; {cut} {requests} cut, after server.drain_timeout or at a second signal");
    ExitCode::FAILURE
}
