//! `sluice serve`: runs the gateway until a signal stops it.
//!
//! SIGTERM and SIGINT stop it in order. A second one cuts that short: requests that run get an error event, and engines have
//! two seconds to end before they are killed. A third one ends the gateway at once, and it says which engines it leaves.
//! SIGHUP reloads the configuration file. SIGUSR1 opens the access log anew, as after a rotation.
//! Exit codes: 0 stopped in order, 1 a socket could not be opened or requests were cut at the end, 78
//! the configuration is not valid (nothing was bound).

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::check::EXIT_CONFIG;
use crate::base::Tokens;
use crate::config::{Config, Flags, Loaded, Problems, Surroundings};
use crate::serve::{self, Running, Source};
use crate::telemetry::log;

/// Run the gateway.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Signals:
  SIGHUP            reload the configuration file; if it is not valid, nothing changes
  SIGUSR1           open the access log anew, after it was renamed
  SIGTERM, SIGINT   finish running requests and stop; a second one cuts them

Health checks, on the client port:
  GET /health       200 while the gateway runs
  GET /ready        200 while every pool has a backend that takes requests, and the gateway is not stopping; else 503

Metrics are at /metrics on the admin port.")]
#[command(group(clap::ArgGroup::new("what").required(true).multiple(false).args(["config", "backend"])))]
pub struct ServeArgs {
    /// The configuration file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A vLLM server, such as http://127.0.0.1:8000 (repeatable; instead of a file)
    #[arg(long, value_name = "URL")]
    pub backend: Vec<String>,
    /// A vLLM server for long prompts (repeatable): makes a short and a long pool
    #[arg(long, value_name = "URL", requires = "backend")]
    pub long: Vec<String>,
    /// Prompts of this many tokens or more are long [default: 5k]
    #[arg(long, value_name = "TOKENS", requires = "long")]
    pub threshold: Option<Tokens>,
    /// Address for clients, with --backend [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS", conflicts_with = "config")]
    pub listen: Option<String>,
    /// Address for metrics and the admin API, with --backend [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS", conflicts_with = "config")]
    pub admin: Option<String>,
    /// Change one value, such as pool.short.slots=32 or server.listen=0.0.0.0:8080 (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Runs the command.
pub fn run(args: &ServeArgs) -> ExitCode {
    if let Err(error) = survive_reopen() {
        eprintln!("cannot handle signals: {error}");
        return ExitCode::FAILURE;
    }
    let (loaded, source) = match load(args) {
        Ok(loaded) => loaded,
        Err(problems) => {
            eprintln!("{problems}");
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    if let Err(error) = log::init(&loaded.config.log) {
        eprintln!("{error} (sluice explain start)");
        return ExitCode::FAILURE;
    }
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(loaded.config.server.threads)
        .thread_name("sluice")
        .enable_all()
        .build();
    match runtime {
        Ok(runtime) => {
            let code = runtime.block_on(serve(loaded.config, source));
            super::runtime::end(runtime);
            code
        }
        Err(error) => {
            tracing::error!("cannot start threads: {error}");
            ExitCode::FAILURE
        }
    }
}

/// From here on SIGUSR1 does not end the process, as it would by default: tokio's handler stays when this runtime has gone.
/// Blocking the signal instead would block it in engines, too.
fn survive_reopen() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _context = runtime.enter();
    signal(SignalKind::user_defined1()).map(drop)
}

fn load(args: &ServeArgs) -> Result<(Loaded, Source), Problems> {
    if let Some(path) = &args.config {
        let loaded = Config::load(path, &args.set)?;
        return Ok((loaded, Source::File { path: path.clone(), sets: args.set.clone() }));
    }
    let flags = Flags {
        backends: args.backend.clone(),
        long: args.long.clone(),
        threshold: args.threshold,
        listen: args.listen.clone(),
        admin: args.admin.clone(),
    };
    let here = PathBuf::from(".");
    let loaded = Config::from_flags(&flags, &args.set, &Surroundings::of_process(&here))?;
    Ok((loaded, Source::Fixed))
}

async fn serve(config: Config, source: Source) -> ExitCode {
    // First of all: a signal during the start must not kill the process, it is handled once the gateway runs.
    let mut signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => {
            tracing::error!("cannot listen for signals: {error}");
            return ExitCode::FAILURE;
        }
    };
    let scheme = if config.server.tls.is_some() { "https" } else { "http" };
    let running = match serve::start(config, source).await {
        Ok(running) => running,
        Err(error) => {
            tracing::error!("{error} (sluice explain start)");
            return ExitCode::FAILURE;
        }
    };
    tracing::info!("serving clients on {scheme}://{}", running.client_address());
    tracing::info!("metrics and live page on http://{}", running.admin_address());
    wait_for_stop(&running, &mut signals).await;
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
    let orderly = tokio::select! {
        orderly = &mut stopping => orderly,
        () = signals.stop() => {
            let (in_flight, waiting) = app.admission().load();
            tracing::warn!(in_flight, waiting, "second signal: requests are cut, engines are killed soon; a third one ends sluice at once");
            app.fleet.shut_down_fast();
            tokio::select! {
                _ = &mut stopping => false,
                () = signals.stop() => {
                    let left = app.fleet.running();
                    let left = if left.is_empty() { "no engine".to_owned() } else { left.join(", ") };
                    tracing::warn!("third signal: ended at once; left running: {left}");
                    return ExitCode::FAILURE;
                }
            }
        }
    };
    if orderly {
        tracing::info!("stopped");
        return ExitCode::SUCCESS;
    }
    tracing::warn!("stopped; requests that still ran after server.drain_timeout, or at a second signal, were cut");
    ExitCode::FAILURE
}

/// Waits for SIGTERM or SIGINT; reloads on SIGHUP, reopens the access log on SIGUSR1.
async fn wait_for_stop(running: &Running, signals: &mut Signals) {
    loop {
        tokio::select! {
            _ = signals.terminate.recv() => return,
            _ = signals.interrupt.recv() => return,
            _ = signals.reload.recv() => {
                // The result is logged.
                let _ = running.app().reload();
            }
            _ = signals.reopen.recv() => {
                running.app().telemetry.reopen();
                tracing::info!("SIGUSR1: the access log and the records are opened anew");
            }
        }
    }
}

/// The signals that the gateway handles.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    reload: Signal,
    reopen: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            reload: signal(SignalKind::hangup())?,
            reopen: signal(SignalKind::user_defined1())?,
        })
    }

    /// Returns at SIGTERM or SIGINT.
    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Raises the limit on open files to the most that is allowed: every connection takes a descriptor.
pub(super) fn raise_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::warn!("cannot raise the limit of open files from {soft} to {hard}: {error}");
    }
}
