//! `sluice backend list|drain|restart|enable`: backends of a running gateway, and the engines that it runs.
//!
//! A backend is named as in the configuration, `gpu0`, or `short/gpu0` where two pools have one of that name. With `--wait`
//! a command stays until what it began has ended and says on stderr how it goes on: `drain` until nothing is in flight,
//! `enable` until it is in rotation, `restart` until the change has an outcome.
//! Exit codes: 0 done; 1 refused, failed, or rolled back (the message says why and what to do); 2 wrong usage.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{ContentArrangement, Table};
use serde_json::{Value, json};

use crate::admin::status::{BackendStatus, Status};
use crate::admin::{Client, ClientError, RESTART_TIMEOUT, encode, flag, query};
use crate::config;
use crate::fleet::EngineView;

/// Between two looks with `--wait`.
const EVERY: Duration = Duration::from_millis(200);
/// Looks without an answer until `--wait` gives up: a gateway that is being restarted comes back within this time.
const MISSES_MAX: u32 = 150;

/// Backends of a running gateway, and the engines it runs.
#[derive(Clone, Debug, clap::Args)]
pub struct BackendArgs {
    /// The admin port
    #[arg(long, value_name = "URL", global = true, default_value_t = format!("http://{}", config::DEFAULT_ADMIN))]
    pub admin: String,
    /// The admin token, if the gateway has one
    #[arg(long, value_name = "TOKEN", global = true, env = "SLUICE_ADMIN_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
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
    },
    /// Take a backend out of rotation; running requests finish
    Drain {
        /// The backend, such as gpu0 or short/gpu0
        name: String,
        /// Stay until nothing is in flight
        #[arg(long)]
        wait: bool,
    },
    /// Restart an engine that the gateway runs, with other flags if wanted, without losing a request
    Restart {
        /// The backend, such as gpu0 or short/gpu0
        name: String,
        /// Change a flag of the engine, such as max-num-seqs=32 (repeatable)
        #[arg(long = "set", value_name = "FLAG=VALUE")]
        set: Vec<String>,
        /// Forget flags changed earlier: start from the configuration
        #[arg(long)]
        reset: bool,
        /// Go on although no other backend can stand in: requests wait in the queue
        #[arg(long)]
        hold: bool,
        /// Cut requests that outlast the drain (fleet.drain), instead of giving the restart up
        #[arg(long)]
        cut: bool,
        /// Stay until it serves again
        #[arg(long)]
        wait: bool,
    },
    /// Put a backend back into rotation; an engine that holds is tried again
    Enable {
        /// The backend, such as gpu0 or short/gpu0
        name: String,
        /// Stay until it is in rotation
        #[arg(long)]
        wait: bool,
    },
}

/// Why a command did not do what it should.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("there is no backend '{name}'; there are: {known}")]
    Unknown { name: String, known: String },
    #[error("'{name}' is in more than one pool; write one of: {found}")]
    Ambiguous { name: String, found: String },
    #[error("{0}")]
    Ended(String),
}

/// Runs the command.
pub fn run(args: &BackendArgs) -> ExitCode {
    let usage = |error: &dyn std::fmt::Display| {
        eprintln!("{error}");
        ExitCode::from(2)
    };
    if let Command::Restart { set, .. } = &args.command
        && let Some(error) = set.iter().find_map(|set| flag(set).err())
    {
        return usage(&error);
    }
    let client = match Client::new(&args.admin, args.token.as_deref()) {
        Ok(client) => client,
        Err(error) => return usage(&error),
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(act(&client, &args.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn act(client: &Client, command: &Command) -> Result<(), Failed> {
    let status: Status = client.get("/admin/status").await?;
    match command {
        Command::List { json } => list(&status, *json),
        Command::Drain { name, wait } => {
            let path = path(&status, name)?;
            tell(client, &path, "/drain").await?;
            if *wait {
                follow(client, &path, |backend| (backend.in_flight == 0).then_some(Ok(()))).await?;
            }
            say(&format!("{path} is out of rotation"));
        }
        Command::Enable { name, wait } => {
            let path = path(&status, name)?;
            tell(client, &path, "/enable").await?;
            if *wait {
                follow(client, &path, |backend| match backend.engine.as_ref().map(|engine| engine.step.as_str()) {
                    Some("hold") => Some(Err(why(backend))),
                    _ => matches!(backend.state.as_str(), "ready" | "probation").then_some(Ok(())),
                })
                .await?;
            }
            say(&format!("{path} is enabled"));
        }
        Command::Restart { name, set, reset, hold, cut, wait } => {
            let path = path(&status, name)?;
            let switches = [(*reset, "reset"), (*hold, "hold"), (*cut, "cut")];
            let switches: Vec<&str> = switches.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
            let begun = tell(client, &path, &format!("/restart{}", query(set, &switches))).await?;
            let id = begun["change"].as_u64().unwrap_or(0);
            let notices = begun["notices"].as_array().into_iter().flatten().filter_map(Value::as_str);
            notices.for_each(|notice| eprintln!("{path}: {notice}"));
            if !*wait {
                say(&format!("restart {id} of {path} has begun; sluice backend list shows how it goes on"));
                return Ok(());
            }
            follow(client, &path, |backend| outcome(backend, id)).await?;
            say(&format!("{path} serves with its new settings"));
        }
    }
    Ok(())
}

/// How change `id` ended, if it has.
fn outcome(backend: &BackendStatus, id: u64) -> Option<Result<(), String>> {
    let Some(engine) = &backend.engine else { return Some(Err("it is no longer run by the gateway".to_owned())) };
    let last = engine.last_change.as_ref().filter(|last| last.id >= id)?;
    let why = last.why.clone().unwrap_or_default();
    Some(match last.outcome.as_str() {
        "done" => Ok(()),
        "aborted" => Err(format!("not restarted, the old engine goes on: {why}")),
        "failed" => Err(format!("neither the new settings nor the old ones came up; it is tried again: {why}")),
        "rolled_back" => Err(format!("the new settings failed, the old ones serve again: {why}")),
        _ => Err(format!("it holds; change the settings or fix the cause, then: sluice backend enable. {why}")),
    })
}

fn why(backend: &BackendStatus) -> String {
    backend.engine.as_ref().and_then(|engine| engine.why.clone()).unwrap_or_else(|| "it holds".to_owned())
}

/// `pool/backend`, each part as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Path {
    pool: String,
    backend: String,
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.pool, self.backend)
    }
}

/// The backend that a name means.
fn path(status: &Status, name: &str) -> Result<Path, Failed> {
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

async fn tell(client: &Client, path: &Path, action: &str) -> Result<Value, ClientError> {
    let path = format!("/admin/backends/{}/{}{action}", encode(&path.pool), encode(&path.backend));
    // Before a restart begins, the installed vLLM may be asked for its flags.
    client.post_within(&path, RESTART_TIMEOUT).await
}

/// Looks until `ended` says so, and tells on stderr how it goes on.
async fn follow(
    client: &Client,
    path: &Path,
    ended: impl Fn(&BackendStatus) -> Option<Result<(), String>>,
) -> Result<(), Failed> {
    let (mut misses, mut teller) = (0, Teller::default());
    loop {
        let status: Status = match client.get("/admin/status").await {
            Ok(status) => status,
            Err(ClientError::Unreachable { .. }) if misses < MISSES_MAX => {
                misses += 1;
                tokio::time::sleep(EVERY).await;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        misses = 0;
        let pool = status.pools.iter().find(|pool| pool.name == path.pool);
        let backend = pool.and_then(|pool| pool.backends.iter().find(|backend| backend.name == path.backend));
        let Some(backend) = backend else { return Err(Failed::Ended(format!("{path} is no longer configured"))) };
        if let Some(result) = ended(backend) {
            teller.end();
            return result.map_err(|why| Failed::Ended(format!("{path}: {why}")));
        }
        teller.tell(path, backend);
        tokio::time::sleep(EVERY).await;
    }
}

/// Progress: one line that is written over on a terminal; elsewhere one line per step.
#[derive(Default)]
struct Teller {
    last: String,
}

impl Teller {
    fn tell(&mut self, path: &Path, backend: &BackendStatus) {
        let terminal = std::io::stderr().is_terminal();
        let line = match &backend.engine {
            Some(engine) if terminal => format!("{path}: {}, {} in flight", doing(engine), backend.in_flight),
            // A line for each phase, not for each second of it.
            Some(engine) => format!("{path}: {}", doing(engine).split(',').next().unwrap_or_default()),
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

/// What an engine is doing, for people: `start: loading weights, 12 s (20 s in all)`.
pub(super) fn doing(engine: &EngineView) -> String {
    match (engine.detail.as_str(), &engine.why, &engine.waits) {
        ("", Some(why), _) => format!("{}: {why}", engine.step),
        ("", None, Some(waits)) => format!("{}; its new configuration waits: {waits}", engine.step),
        ("", None, None) => engine.step.clone(),
        (detail, ..) => format!("{}: {detail}", engine.step),
    }
}

fn list(status: &Status, as_json: bool) {
    if as_json {
        let backends = status
            .pools
            .iter()
            .flat_map(|pool| pool.backends.iter().map(|backend| json!({ "pool": pool.name, "backend": backend })));
        say(&Value::Array(backends.collect()).to_string());
        return;
    }
    let mut table = Table::new();
    table.load_preset(UTF8_HORIZONTAL_ONLY);
    if std::io::stdout().is_terminal() {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(["backend", "url", "state", "in flight", "slots", "engine", "restarts", "last change", "flags"]);
    for pool in &status.pools {
        for backend in &pool.backends {
            let engine = backend.engine.clone().unwrap_or_default();
            let last = engine.last_change.as_ref().map_or_else(
                || "-".to_owned(),
                |last| match &last.why {
                    Some(why) => format!("{} ({}): {why}", last.id, last.outcome),
                    None => format!("{} ({})", last.id, last.outcome),
                },
            );
            let ours = backend.engine.is_some();
            table.add_row([
                format!("{}/{}", pool.name, backend.name),
                backend.url.clone(),
                backend.state.clone(),
                backend.in_flight.to_string(),
                backend.slots.limit.unwrap_or_default().to_string(),
                if ours { doing(&engine) } else { "run by somebody else".to_owned() },
                if ours { engine.restarts.to_string() } else { "-".to_owned() },
                last,
                if ours { engine.settings.clone() } else { "-".to_owned() },
            ]);
        }
    }
    say(&table.to_string());
}

/// On stdout; who does not read it any more misses nothing.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::PoolStatus;
    use crate::fleet::LastChange;

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
        for (word, said) in
            [("aborted", "the old engine goes on"), ("rolled_back", "old ones serve"), ("held", "holds")]
        {
            let said_then = outcome(&with(word, 4), 4).unwrap().unwrap_err();
            assert!(said_then.contains(said) && said_then.contains("reason"), "{said_then}");
        }
    }
}
