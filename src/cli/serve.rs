//! `sluice serve`: runs the gateway until a signal stops it.
//!
//! - SIGTERM, SIGINT: stop in order. A second signal (a SIGTERM only if a second or more after the
//!   first) ends running requests with an error event and gives engines two seconds before they are
//!   killed. A third signal ends the gateway at once; it names the engines that it leaves.
//! - SIGHUP: reload the configuration file. SIGUSR1: reopen the access log and the records.
//! - SIGUSR2: start the program file with `--upgrade`. The new process takes over, and this process
//!   ends with its last request.
//!
//! During the start, SIGTERM and SIGINT end the process while the configuration is checked. With
//! `--upgrade` they do so until the takeover, and the running gateway goes on. Other signals wait
//! until the gateway serves. Exit codes: 0 stopped or handed over; 1 a socket could not be opened,
//! no takeover, or requests were cut; 2 wrong usage; 78 the configuration is not valid, or names a
//! file, folder or port range that cannot be used.

mod until_stop;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};

use super::admin_command::{exit_code, usage};
use super::check::EXIT_CONFIG;
use super::config_file::{ConfigFile, NoFile};
use sluice_config::{Config, Flags, Loaded, Problems, Surroundings};
use sluice_core::base::Tokens;
use sluice_gateway::telemetry::log;
use sluice_serve::checks::{self, Purpose};
use sluice_serve::upgrade::{self, Door, take_over};
use sluice_serve::{Running, Sockets, Source, StartError, systemd};
use until_stop::{STARTED_BY, Signals};

/// Run the gateway.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Signals:
  SIGHUP            reload the configuration file; if it is not valid, nothing changes
  SIGUSR1           open the access log and the records anew, after they were renamed
  SIGUSR2           start the program file anew with --upgrade, after it was replaced
  SIGTERM, SIGINT   finish running requests and stop; a second one cuts them (SIGTERM: a second later or more)

Health checks, on the client port:
  GET /health       200 while the gateway runs
  GET /ready        200 while a pool has a backend that takes requests, and the gateway is not stopping; else 503

Metrics are at /metrics on the admin port.")]
pub struct ServeArgs {
    #[command(flatten)]
    file: ConfigFile,
    /// A vLLM server, such as http://127.0.0.1:8000 (repeatable; instead of a file). Each server
    /// gets one long prompt at a time to prefill, and at most 256 sequences; with --long 64
    #[arg(long, value_name = "URL", conflicts_with = "the file")]
    pub backend: Vec<String>,
    /// A vLLM server for long prompts (repeatable): the gateway then has a short and a long pool.
    /// Each server of the long pool gets two long prompts at a time, and at most 16 sequences
    #[arg(long, value_name = "URL", requires = "backend")]
    pub long: Vec<String>,
    /// Prompts of this many tokens or more are long, with --backend [default: 5k]
    #[arg(long, value_name = "TOKENS", requires = "backend")]
    pub threshold: Option<Tokens>,
    /// Address for clients, with --backend [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS", requires = "backend")]
    pub listen: Option<String>,
    /// Address for metrics and the admin API, with --backend [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS", requires = "backend")]
    pub admin: Option<String>,
    /// Take the place of the gateway that runs with this file: no connection is refused, and no
    /// stream is cut
    #[arg(long, conflicts_with = "backend")]
    pub upgrade: bool,
    /// Change one value, such as pool.short.slots=32 or server.listen=0.0.0.0:8080 (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Runs the command.
pub fn run(args: &ServeArgs) -> ExitCode {
    // The path is read now, before an upgrade replaces the file.
    let program = std::env::current_exe();
    if let Err(error) = survive_signals() {
        return exit_code(Err(format!("cannot handle signals: {error}")));
    }
    let file = match args.file.path() {
        _ if !args.backend.is_empty() => None,
        Some(path) => Some(path),
        None => return usage(&NoFile { instead: ", or name engines: sluice serve --backend URL" }),
    };
    let (loaded, source) = match load(args, file) {
        Ok(loaded) => loaded,
        Err(problems) => {
            eprintln!("{problems}");
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    if let Err(error) = log::init(&loaded.config.log) {
        return exit_code(Err(format!("{error} (sluice explain start)")));
    }
    match &source {
        Source::File { path, .. } => tracing::info!("configuration: {}", whole_path(path)),
        Source::Fixed => tracing::info!("started from flags"),
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
            let code = runtime.block_on(check_and_serve(loaded, source, args.upgrade, program.ok()));
            super::runtime::end(runtime);
            code
        }
        Err(error) => {
            tracing::error!("cannot start threads: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Keeps SIGUSR1 and SIGUSR2 from ending the process, as they do by default. It works because
/// tokio's handlers stay after this runtime is gone. Blocked signals would stay blocked in engines,
/// too.
fn survive_signals() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _context = runtime.enter();
    let _ = signal(SignalKind::user_defined1())?;
    signal(SignalKind::user_defined2()).map(drop)
}

/// The name of the configuration in the log. A file has the whole path, because a relative path
/// does not name the folder.
fn whole_path(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string()
}

fn load(args: &ServeArgs, file: Option<PathBuf>) -> Result<(Loaded, Source), Problems> {
    if let Some(path) = file {
        let loaded = Config::load(&path, &args.set)?;
        return Ok((loaded, Source::File { path, sets: args.set.clone() }));
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

async fn check_and_serve(loaded: Loaded, source: Source, upgrade: bool, program: Option<PathBuf>) -> ExitCode {
    // This comes first, because a signal during the start must not kill the process.
    let mut signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => {
            tracing::error!("cannot listen for signals: {error}");
            return ExitCode::FAILURE;
        }
    };
    let checked = tokio::select! {
        checked = checks::check(&loaded, Purpose::Start) => checked,
        () = signals.stop() => {
            tracing::info!("stopped while the configuration was checked; nothing was started");
            return ExitCode::SUCCESS;
        }
    };
    match checked {
        Ok(remarks) => {
            remarks.iter().for_each(|remark| tracing::warn!("{remark}"));
            serve(loaded.config, source, upgrade, program, signals).await
        }
        Err(problems) => {
            eprintln!("{problems}");
            ExitCode::from(EXIT_CONFIG)
        }
    }
}

async fn serve(
    config: Config,
    source: Source,
    upgrade: bool,
    program: Option<PathBuf>,
    mut signals: Signals,
) -> ExitCode {
    let scheme = if config.server.tls.is_some() { "https" } else { "http" };
    // Without a file there is no upgrade, because the newer gateway would have no configuration.
    let folder = matches!(source, Source::File { .. }).then(|| upgrade::folder(&config));
    let stopped = Arc::new(AtomicBool::new(false));
    let mut beginning = std::pin::pin!(begin(config, source, folder, upgrade, Arc::clone(&stopped)));
    // A stop signal before this gateway serves leaves the running gateway in place.
    let begun = match Signals::new() {
        Ok(mut early) if upgrade => tokio::select! {
            begun = &mut beginning => begun,
            () = early.stop() => {
                stopped.store(true, Ordering::Relaxed);
                beginning.await
            }
        },
        _ => beginning.await,
    };
    let (running, door) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            let code = if matches!(error, StartError::Upgrade(_)) { "upgrade" } else { "start" };
            tracing::error!("{error} (sluice explain {code})");
            return if error.is_of_configuration() { ExitCode::from(EXIT_CONFIG) } else { ExitCode::FAILURE };
        }
    };
    tracing::info!("serving clients on {scheme}://{}", running.client_address());
    tracing::info!("metrics and live page on http://{}", running.admin_address());
    until_stop::serve(running, door, &mut signals, program).await
}

async fn begin(
    config: Config,
    source: Source,
    folder: Option<PathBuf>,
    upgrade: bool,
    stopped: Arc<AtomicBool>,
) -> Result<(Running, Option<Door>), StartError> {
    let (opened, door) = match upgrade {
        true => take_over(&config, stopped).await?,
        false => (Sockets::activated(&config).into(), None),
    };
    // If the running gateway started this process, that gateway reports it to systemd.
    let is_announced = opened.predecessor_pid().is_some_and(was_started_by);
    let running = sluice_serve::start_with(config, source, opened).await?;
    // Upgrades may be requested once the gateway is reported as ready.
    let door = door.or_else(|| folder.and_then(|folder| open_door(&folder)));
    if !is_announced {
        systemd::notify("READY=1");
    }
    Ok((running, door))
}

/// Whether the running gateway started this process, at SIGUSR2.
fn was_started_by(pid: u32) -> bool {
    std::env::var(STARTED_BY).is_ok_and(|by| by == pid.to_string())
}

fn open_door(folder: &Path) -> Option<Door> {
    match Door::open(folder) {
        Ok(door) => Some(door),
        Err(error) => {
            tracing::warn!("serve --upgrade cannot find this gateway: {error}");
            None
        }
    }
}

/// Raises the limit on open files to the allowed maximum, because every connection takes a
/// descriptor.
pub(super) fn raise_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::warn!("cannot raise the limit of open files from {soft} to {hard}: {error}");
    }
}
