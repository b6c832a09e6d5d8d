//! `sluice backend list|drain|restart|logs|enable`: the backends of a running gateway, and its
//! engines.
//!
//! `--wait` shows progress on stderr and waits: `drain` until no request is in flight, `enable`
//! until the backend is in rotation, `restart` until the change has an outcome.
//!
//! Exit codes: 0 done; 1 refused, failed, or rolled back (the message says why, and the remedy); 2
//! wrong usage.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use serde_json::Value;

use super::admin_command::{AdminPort, exit_code, usage, with_client};
use super::backend_list::{self, activity};
use super::backend_logs::{self, LogsArgs};
use super::terminal::stdout_width;
use sluice_admin::status::{BackendStatus, Status};
use sluice_admin::{AdminClient, AdminClientError, RESTART_TIMEOUT, RestartOptions, encode, flag};

const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Failed polls after which `--wait` gives up. They take 30 s, in which a gateway can restart.
const FAILED_POLLS_MAX: u32 = 150;

/// Backends of a running gateway, and the engines it runs.
#[derive(Clone, Debug, clap::Args)]
pub struct BackendArgs {
    #[command(flatten)]
    port: AdminPort,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Show backends and engines
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Show every column, however wide: addresses, last changes, flags
        #[arg(long, conflicts_with = "json")]
        wide: bool,
    },
    /// Take a backend out of rotation; running requests finish
    Drain {
        /// The backend, such as gpu0 or short/gpu0
        name: String,
        /// Wait until the backend has no requests in flight
        #[arg(long)]
        wait: bool,
    },
    /// Restart an engine that the gateway runs, optionally with other flags, without losing
    /// requests
    ///
    /// If the engine does not start with the new flags, or dies or hangs before it has served for
    /// fleet.settle, the gateway starts it again with the previous flags. `sluice backend list`
    /// says why.
    Restart {
        /// The backend, such as gpu0 or short/gpu0
        name: String,
        /// Change a flag of the engine, such as max-num-seqs=32 or --max-num-seqs=32 (repeatable)
        #[arg(long = "set", value_name = "FLAG=VALUE", allow_hyphen_values = true)]
        set: Vec<String>,
        /// Drop earlier changes of flags: start from the flags in the configuration
        #[arg(long)]
        reset: bool,
        /// Restart even if no other backend can serve the same models: requests wait in the queue
        #[arg(long)]
        hold: bool,
        /// Cut requests that outlast the drain (fleet.drain), instead of giving up the restart
        #[arg(long)]
        cut: bool,
        /// Wait until the restarted engine serves, and first until a ramp in progress ends
        #[arg(long)]
        wait: bool,
    },
    /// Print the log of an engine that the gateway runs, or the output of the commands (control)
    Logs(LogsArgs),
    /// Put a backend back into rotation; an engine on hold is started again
    Enable {
        /// The backend, such as gpu0 or short/gpu0
        name: String,
        /// Wait until the backend is in rotation
        #[arg(long)]
        wait: bool,
    },
}

#[derive(Debug, thiserror::Error)]
pub(in crate::cli) enum Failed {
    #[error(transparent)]
    Client(#[from] AdminClientError),
    #[error("there is no backend '{name}'; there are: {known}")]
    Unknown { name: String, known: String },
    #[error("'{name}' is in more than one pool; write one of: {found}")]
    Ambiguous { name: String, found: String },
    #[error("{0}")]
    Ended(String),
}

/// Runs the command.
pub fn run(args: &BackendArgs) -> ExitCode {
    if let Command::Restart { set, .. } = &args.command
        && let Some(error) = set.iter().find_map(|set| flag(set).err())
    {
        return usage(&error);
    }
    with_client(&args.port, async |client| exit_code(act(client, &args.command).await))
}

async fn act(client: &AdminClient, command: &Command) -> Result<(), Failed> {
    let status: Status = client.get("/admin/status").await?;
    match command {
        Command::Logs(args) => {
            let path = path(&status, &args.name)?;
            backend_logs::run(client, (&path.pool, &path.backend), args).await?;
        }
        Command::List { json: true, .. } => print_line(&backend_list::json(&status)),
        Command::List { wide, .. } => print_line(&backend_list::table(&status, *wide, stdout_width())),
        Command::Drain { name, wait } => {
            let path = path(&status, name)?;
            post(client, &path, "/drain").await?;
            if *wait {
                follow(client, &path, |backend| (backend.in_flight == 0).then_some(Ok(()))).await?;
            }
            print_line(&format!("{path} is out of rotation"));
            if is_last(&status, &path) {
                eprintln!(
                    "{path}: no other backend of pool {} is in rotation: its requests wait (queue.timeout), go where it spills \
                     to, or are refused, until you run sluice backend enable {path}",
                    path.pool
                );
            }
        }
        Command::Enable { name, wait } => {
            let path = path(&status, name)?;
            post(client, &path, "/enable").await?;
            if *wait {
                follow(client, &path, |backend| match backend.engine.as_ref().map(|engine| engine.step.as_str()) {
                    Some("hold") => Some(Err(why(backend))),
                    _ => matches!(backend.state.as_str(), "ready" | "probation").then_some(Ok(())),
                })
                .await?;
            }
            print_line(&format!("{path} is enabled"));
        }
        Command::Restart { name, set, reset, hold, cut, wait } => {
            let path = path(&status, name)?;
            let flags: Vec<_> = set.iter().filter_map(|set| flag(set).ok()).collect();
            let flags = RestartOptions::of_flags(flags.iter().map(|(name, value)| (name, value)));
            let options = RestartOptions { reset: *reset, hold: *hold, cut: *cut, ..flags };
            if *wait {
                ramp_ends(client, &path).await?;
            }
            let begun = client.restart(&path.pool, &path.backend, &options).await?;
            let id = begun.change;
            begun.notices.iter().for_each(|notice| eprintln!("{path}: {notice}"));
            if !*wait {
                print_line(&format!("restart #{id} of {path} has started; sluice backend list shows its progress"));
                return Ok(());
            }
            follow(client, &path, |backend| outcome(backend, id)).await?;
            let with = if set.is_empty() && !*reset { "again" } else { "with its new settings" };
            print_line(&format!("{path} serves {with}"));
            if with != "again" {
                eprintln!("{path}: they are taken back if it dies or hangs within fleet.settle");
            }
        }
    }
    Ok(())
}

fn is_last(status: &Status, path: &Path) -> bool {
    let pool = status.pools.iter().find(|pool| pool.name == path.pool);
    let others = pool.into_iter().flat_map(|pool| &pool.backends).filter(|backend| backend.name != path.backend);
    !others.into_iter().any(|backend| matches!(backend.state.as_str(), "ready" | "probation"))
}

pub(in crate::cli) fn outcome(backend: &BackendStatus, id: u64) -> Option<Result<(), String>> {
    let Some(engine) = &backend.engine else { return Some(Err("the gateway no longer runs this engine".to_owned())) };
    let last = engine.last_change.as_ref().filter(|last| last.id >= id)?;
    let why = last.why.clone().unwrap_or_default();
    Some(match last.outcome.as_str() {
        "done" => Ok(()),
        "aborted" => Err(format!("not restarted, the engine keeps its settings: {why}")),
        "failed" => {
            Err(format!("the engine started with neither the new nor the old settings; the gateway retries: {why}"))
        }
        "rolled_back" => {
            Err(format!("the engine failed with the new settings and serves with the old ones again: {why}"))
        }
        _ => Err(format!(
            "the engine is on hold; change the settings or fix the cause, then run sluice backend enable: {why}"
        )),
    })
}

fn why(backend: &BackendStatus) -> String {
    backend.engine.as_ref().and_then(|engine| engine.why.clone()).unwrap_or_else(|| "the engine is on hold".to_owned())
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Path {
    pub(in crate::cli) pool: String,
    pub(in crate::cli) backend: String,
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.pool, self.backend)
    }
}

pub(in crate::cli) fn path(status: &Status, name: &str) -> Result<Path, Failed> {
    let all = status.pools.iter().flat_map(|pool| {
        let backends = pool.backends.iter().filter(|backend| backend.state != "removed");
        backends.map(|backend| Path { pool: pool.name.clone(), backend: backend.name.clone() })
    });
    let all: Vec<Path> = all.collect();
    let listed = |paths: &[&Path]| paths.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let found: Vec<&Path> = all.iter().filter(|path| path.backend == name || path.to_string() == name).collect();
    match found[..] {
        [one] => Ok(one.clone()),
        [] => Err(Failed::Unknown { name: name.to_owned(), known: listed(&all.iter().collect::<Vec<_>>()) }),
        _ => Err(Failed::Ambiguous { name: name.to_owned(), found: listed(&found) }),
    }
}

pub(in crate::cli) async fn post(client: &AdminClient, path: &Path, action: &str) -> Result<Value, AdminClientError> {
    let path = format!("/admin/backends/{}/{}{action}", encode(&path.pool), encode(&path.backend));
    client.post_within(&path, RESTART_TIMEOUT).await
}

/// Waits for the end of a ramp, during which the gateway refuses a restart.
async fn ramp_ends(client: &AdminClient, path: &Path) -> Result<(), Failed> {
    let is_over = |backend: &BackendStatus| {
        let in_ramp = backend.engine.as_ref().is_some_and(|engine| engine.step == "ramp");
        (!in_ramp).then_some(Ok(()))
    };
    match tokio::time::timeout(RESTART_TIMEOUT, follow(client, path, is_over)).await {
        Ok(ended) => ended,
        Err(_) => {
            let seconds = RESTART_TIMEOUT.as_secs();
            Err(Failed::Ended(format!("{path}: its ramp has not ended within {seconds} s; try again later")))
        }
    }
}

/// Polls until `ended` returns a result, and shows progress.
async fn follow(
    client: &AdminClient,
    path: &Path,
    ended: impl Fn(&BackendStatus) -> Option<Result<(), String>>,
) -> Result<(), Failed> {
    let (mut failures, mut progress) = (0, ProgressLine::default());
    loop {
        let status: Status = match client.get("/admin/status").await {
            Ok(status) => status,
            Err(AdminClientError::Unreachable { .. }) if failures < FAILED_POLLS_MAX => {
                failures += 1;
                tokio::time::sleep(POLL_INTERVAL).await;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        failures = 0;
        let pool = status.pools.iter().find(|pool| pool.name == path.pool);
        let backend = pool.and_then(|pool| pool.backends.iter().find(|backend| backend.name == path.backend));
        let Some(backend) = backend else { return Err(Failed::Ended(format!("{path} is no longer configured"))) };
        if let Some(result) = ended(backend) {
            progress.end();
            return result.map_err(|why| Failed::Ended(format!("{path}: {why}")));
        }
        progress.show(path, backend);
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// One line that is redrawn on a terminal, otherwise a line for each phase.
#[derive(Default)]
struct ProgressLine {
    last: String,
}

impl ProgressLine {
    fn show(&mut self, path: &Path, backend: &BackendStatus) {
        let terminal = std::io::stderr().is_terminal();
        let line = match &backend.engine {
            Some(engine) if terminal => format!("{path}: {}, {} in flight", activity(engine), backend.in_flight),
            // The seconds are left out, so that each phase has one line.
            Some(engine) => format!("{path}: {}", activity(engine).split(',').next().unwrap_or_default()),
            None => format!("{path}: {}, {} in flight", backend.state, backend.in_flight),
        };
        if terminal {
            eprint!("\r\x1b[2K{line}");
            let _ = std::io::stderr().flush();
        } else if line != self.last {
            eprintln!("{line}");
        }
        self.last = line;
    }

    fn end(&self) {
        if std::io::stderr().is_terminal() && !self.last.is_empty() {
            eprintln!();
        }
    }
}

fn print_line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_admin::status::PoolStatus;
    use sluice_fleet::{EngineView, LastChange};

    fn status() -> Status {
        let backend = |name: &str| BackendStatus { name: name.to_owned(), ..BackendStatus::default() };
        let pool = |name: &str, backends: &[&str]| PoolStatus {
            name: name.to_owned(),
            backends: backends.iter().map(|name| backend(name)).collect(),
            ..PoolStatus::default()
        };
        Status { pools: vec![pool("short", &["gpu0", "gpu1"]), pool("long", &["gpu1"])], ..Status::default() }
    }

    #[test]
    fn flags_of_a_restart_are_written_with_or_without_their_dashes() {
        use clap::Parser as _;
        let parsed = |words: &[&str]| {
            #[derive(clap::Parser)]
            struct Cli {
                #[command(flatten)]
                args: BackendArgs,
            }
            let cli = Cli::try_parse_from([&["backend", "restart", "gpu0"], words].concat());
            cli.map(|cli| match cli.args.command {
                Command::Restart { set, wait, reset, .. } => (set, wait, reset),
                other => panic!("{other:?}"),
            })
        };
        let set = ["--max-num-seqs=32", "--enable-lora=true", "x=1"].map(str::to_owned).to_vec();
        let words = ["--set", "--max-num-seqs=32", "--wait", "--set=--enable-lora=true", "--set", "x=1"];
        assert_eq!(parsed(&words).unwrap(), (set.clone(), true, false));
        let read: Vec<_> = set.iter().map(|set| flag(set).unwrap().0).collect();
        assert_eq!(read, ["max-num-seqs", "enable-lora", "x"]);
        assert!(parsed(&["--set"]).is_err() && flag("--wait").is_err(), "a switch is no flag with a value");
    }

    #[test]
    fn a_backend_is_named_alone_or_with_its_pool() {
        let status = status();
        let found = |name: &str| path(&status, name).map(|path| path.to_string()).map_err(|error| error.to_string());
        assert_eq!(found("gpu0").unwrap(), "short/gpu0");
        assert_eq!(found("long/gpu1").unwrap(), "long/gpu1");
        assert_eq!(found("gpu1").unwrap_err(), "'gpu1' is in more than one pool; write one of: short/gpu1, long/gpu1");
        let unknown = found("gpu2").unwrap_err();
        assert_eq!(unknown, "there is no backend 'gpu2'; there are: short/gpu0, short/gpu1, long/gpu1");
    }

    #[test]
    fn a_change_ends_with_its_own_outcome_and_not_with_that_of_an_earlier_one() {
        let with = |outcome: &str, id| BackendStatus {
            engine: Some(EngineView {
                last_change: Some(LastChange { id, outcome: outcome.to_owned(), why: Some("reason".to_owned()) }),
                ..EngineView::default()
            }),
            ..BackendStatus::default()
        };
        assert_eq!(outcome(&with("rolled_back", 3), 4), None);
        assert_eq!(outcome(&with("done", 4), 4), Some(Ok(())));
        for (word, text) in
            [("aborted", "keeps its settings"), ("rolled_back", "with the old ones again"), ("held", "on hold")]
        {
            let message = outcome(&with(word, 4), 4).unwrap().unwrap_err();
            assert!(message.contains(text) && message.contains("reason"), "{message}");
        }
    }
}
