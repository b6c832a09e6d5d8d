//! The seam between the supervisor and what runs engines: one small trait, and the words that cross it.
//!
//! A [`Driver`] commands one backend's engine. It says what can be started, starts it, finds it again, stops it and shows
//! its log; it decides nothing: when to drain, restart or give up is the supervisor's. Three exist: `process` (we spawn the
//! engine), `command` (the user's start, stop and status commands: systemd, docker, ssh, kubectl) and `external` (a URL:
//! drain and probe, never restart). One that speaks to Kubernetes would be a fourth [`DriverKind`] and nothing else.
//!
//! Rules for every driver:
//! - [`Driver::check`] finds what can be found before anything is stopped, and changes nothing;
//! - [`Driver::start`] returns when the engine was started, not when it is ready: readiness is `fleet::ready`'s, the same
//!   for all drivers;
//! - at most one engine at a time: a second start is refused until the first was stopped;
//! - [`Driver::stop`] returns `Ok` only when nothing of the engine is left that it can know of; it may be repeated;
//! - a future that is dropped leaves a state that `status`, `adopt` and `stop` can deal with.
//!
//! Draining is not a driver's: requests end before [`Driver::stop`] is called.

mod command;
mod external;
pub(crate) mod process;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::Instant;

use sluice_core::vllm::failure::{Diagnosis, Exit, FailureClass, FlagSuggestion, Retryable};
use sluice_core::vllm::logs::StartPhase;
use sluice_gateway::config::ArgValue;

pub use command::CommandDriver;
pub(crate) use command::{MISSES, STATUS_EVERY};
pub use external::ExternalDriver;
pub use process::ProcessDriver;

/// `--max-lora-rank` where nothing is said, in vLLM.
pub(crate) const LORA_RANK: i64 = 16;

/// Who runs the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverKind {
    /// We spawn it.
    Process,
    /// Commands of the user's do.
    Command,
    /// Somebody else: it can be drained and probed only.
    External,
}

impl DriverKind {
    /// Whether the gateway may stop and start it.
    pub fn can_restart(self) -> bool {
        self != Self::External
    }

    /// `process`, `command`, `external`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Command => "command",
            Self::External => "external",
        }
    }
}

/// What changes from one start of a backend to the next. Everything else (program, port, devices, environment) is the
/// backend's configuration and belongs to its driver.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineSettings {
    /// Flags of the engine without their dashes, as in `launch.args`; `_` in a name is read as `-` (see [`dashed`]).
    pub args: BTreeMap<String, ArgValue>,
}

/// The name of a flag as vLLM reads it: `_` is `-`, but not behind a dot, where names of JSON's keys stand.
pub fn dashed(name: &str) -> String {
    match name.split_once('.') {
        Some((flag, keys)) => format!("{}.{keys}", flag.replace('_', "-")),
        None => name.replace('_', "-"),
    }
}

impl EngineSettings {
    /// These settings with some changed; a name is found whether it is written with `-` or `_`.
    pub fn with(&self, changes: &BTreeMap<String, ArgValue>) -> Self {
        let all = self.args.iter().chain(changes);
        Self { args: all.map(|(name, value)| (dashed(name), value.clone())).collect() }
    }

    /// A whole number that was set: `int("max-num-seqs")`.
    pub fn int(&self, flag: &str) -> Option<i64> {
        let wanted = dashed(flag);
        let (_, value) = self.args.iter().find(|(name, _)| dashed(name) == wanted)?;
        match value {
            ArgValue::Int(number) => Some(*number),
            _ => None,
        }
    }
}

/// How an engine can be found again after the gateway died. Goes into the journal before the start is believed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "snake_case")]
pub enum EngineIdentity {
    /// A process of ours. A process id alone may have been given to another process since.
    Process {
        /// The leader of its session and process group.
        pid: i32,
        /// When it started, clock ticks since boot.
        started: u64,
        /// The boot it belongs to: ids and ticks begin anew with each.
        boot: String,
        /// The value of `SLUICE_ENGINE` in the environment of all its processes.
        mark: String,
        /// What its devices had in use before it started: index and MiB. Missing where that could not be told.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        baseline: Option<Vec<(u16, u64)>>,
    },
    /// The user's commands know it.
    Command,
    /// Nobody starts it here.
    External,
}

/// What a driver knows of its engine now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineStatus {
    /// Nothing was started, or it was stopped.
    Absent,
    /// It runs. Says nothing about readiness.
    Running,
    /// It ended, and has not been stopped (cleaned up) yet.
    Ended(Exit),
    /// Nobody here can tell.
    Unknown,
}

/// Which process listens on the engine's port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortOwner {
    /// No process listens.
    Free,
    /// Only processes of this engine listen.
    Engine,
    /// Another process listens, described for a message: `pid 71 (vllm)`.
    Other(String),
    /// It cannot be determined from here: another host, another user or another network namespace.
    Unknown,
}

/// How hard to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopRules {
    /// From SIGTERM to SIGKILL. Should exceed the engine's own `--shutdown-timeout`.
    pub grace: Duration,
    /// From SIGKILL until the last process must be gone.
    pub kill: Duration,
    /// After that, until the device's memory must be back.
    pub memory: Duration,
}

impl Default for StopRules {
    /// 10 s, which is long past what vLLM takes when nothing is in flight; 10 s; 2 min, long past the seconds that memory was
    /// seen to take, because who gives up here leaves an engine that somebody has to look at.
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { grace: seconds(10), kill: seconds(10), memory: seconds(120) }
    }
}

/// How a stop went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// How the leader ended; `None`: there was none, or it was not seen.
    pub exit: Option<Exit>,
    /// Whether SIGKILL (or the user's command by force) was needed.
    pub forced: bool,
    /// Processes that had outlived their leader and were killed.
    pub orphans: u32,
    /// Whether the device's memory was seen to be back; `None`: there is nothing here that tells. Not back, and no error:
    /// it is not known to be the engine's, or somebody was told before.
    pub memory_back: Option<bool>,
}

/// Which adapters an engine takes while it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterRank {
    /// Those of up to this rank.
    UpTo(i64),
    /// None at all: why, and what to set.
    None(String),
    /// It cannot be told from here.
    Unknown,
}

/// Something worth telling that does not forbid a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice(pub String);

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why an engine did not start, become ready, or stop.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{class}: {}{advice}", cause.as_deref().map(|cause| format!("{cause}; ")).unwrap_or_default())]
pub struct EngineFailure {
    /// What kind.
    pub class: FailureClass,
    /// The line of the log that says why, or what was seen.
    pub cause: Option<String>,
    /// What to do.
    pub advice: String,
    /// A value that would do, when the engine named one.
    pub suggestion: Option<FlagSuggestion>,
    /// How the leader ended, if it did.
    pub exit: Option<Exit>,
    /// The phase that the start had reached.
    pub phase: StartPhase,
}

impl EngineFailure {
    /// A failure that needs no log.
    pub fn new(class: FailureClass, cause: impl Into<String>) -> Self {
        Self::of(Diagnosis::plain(class, Some(cause.into())), None, StartPhase::Launching)
    }

    /// A diagnosis, and where it happened.
    pub fn of(diagnosis: Diagnosis, exit: Option<Exit>, phase: StartPhase) -> Self {
        let Diagnosis { class, cause, advice, suggestion } = diagnosis;
        Self { class, cause, advice, suggestion, exit, phase }
    }

    /// Whether the same settings may succeed later.
    pub fn retry(&self) -> Retryable {
        self.class.retry()
    }
}

/// How far a start is; the last value stays while the engine serves.
#[derive(Clone, Debug)]
pub struct StartProgress {
    /// The phase.
    pub phase: StartPhase,
    /// When the start began.
    pub started: Instant,
    /// When the phase began.
    pub phase_since: Instant,
    /// When the log last moved on.
    pub moved: Instant,
    /// The line that did.
    pub line: String,
}

impl StartProgress {
    /// A start that begins now.
    pub fn begin(now: Instant) -> Self {
        Self { phase: StartPhase::Launching, started: now, phase_since: now, moved: now, line: String::new() }
    }
}

/// One line for people: `compiling, 12 s (41 s in all)`.
impl fmt::Display for StartProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (phase, all) = (self.phase_since.elapsed().as_secs(), self.started.elapsed().as_secs());
        write!(f, "{}, {phase} s ({all} s in all)", self.phase)
    }
}

/// Commands one backend's engine. See the head of this file for the rules.
#[async_trait]
pub trait Driver: Send + Sync + fmt::Debug {
    /// Which one it is.
    fn kind(&self) -> DriverKind;

    /// Whether an engine could be started with these settings, and what is worth telling about them.
    ///
    /// # Errors
    /// What is wrong with them: classes that [`FailureClass::retry`] calls [`Retryable::Never`]. Nothing was changed.
    async fn check(&self, settings: &EngineSettings) -> Result<Vec<Notice>, EngineFailure>;

    /// The largest rank of an adapter that an engine with these settings takes while it serves.
    fn adapter_rank(&self, settings: &EngineSettings) -> AdapterRank;

    /// Sequences that an engine with these settings runs at once, over all its ranks, where they say so.
    fn sequences(&self, settings: &EngineSettings) -> Option<i64> {
        let ranks = settings.int("data-parallel-size").unwrap_or(1).max(1);
        Some(settings.int("max-num-seqs")?.saturating_mul(ranks))
    }

    /// Where its log is, if it is on this machine.
    fn log_path(&self) -> Option<&Path> {
        None
    }

    /// The engine was seen to be ready, whatever its log says or leaves out.
    fn mark_ready(&self) {}

    /// Starts an engine and says how to find it again.
    ///
    /// # Errors
    /// One runs already, the program is missing, the port is taken, or the command failed. Nothing runs then.
    async fn start(&self, settings: &EngineSettings) -> Result<EngineIdentity, EngineFailure>;

    /// Looks for an engine of this backend that runs and is not under command, whatever a journal says: it may have been
    /// lost between a start and the note of it. Give what is found to [`Driver::adopt`].
    async fn find_running(&self) -> Option<EngineIdentity>;

    /// Takes over what an earlier gateway started; `false` when nothing of it is left. When its leader is gone and only
    /// descendants are left, it is taken over as [`EngineStatus::Ended`], to be stopped.
    ///
    /// # Errors
    /// It cannot be told, or another one runs.
    async fn adopt(&self, trace: &EngineIdentity) -> Result<bool, EngineFailure>;

    /// Stops the engine and all that descends from it, and waits until the device is free again.
    ///
    /// # Errors
    /// [`FailureClass::WontDie`] or [`FailureClass::MemoryKept`]: nothing may be started on that device, until a repeated stop succeeds;
    /// after [`FailureClass::MemoryKept`] it does. [`FailureClass::CommandFailed`], [`FailureClass::NotOurs`].
    async fn stop(&self, rules: StopRules) -> Result<Stopped, EngineFailure>;

    /// What is known of the engine now. An engine that ended stays [`EngineStatus::Ended`] until it is stopped, which also ends
    /// what it left behind.
    async fn status(&self) -> EngineStatus;

    /// Returns when the engine has ended; never, when nobody here can tell or none runs.
    async fn wait_for_exit(&self) -> Exit;

    /// Who answers on the engine's port.
    async fn port_owner(&self) -> PortOwner;

    /// The last lines of its log, oldest first, at most `lines`; empty where there is no log.
    fn tail(&self, lines: usize) -> Vec<String>;

    /// How far the start is; `None` where there is no log to follow.
    fn progress(&self) -> Option<watch::Receiver<StartProgress>>;

    /// Why the engine ended, from its log; for an engine that [`Driver::status`] calls ended.
    fn diagnose(&self, exit: Option<Exit>) -> EngineFailure;
}

/// A driver as the supervisor holds it.
pub type SharedDriver = Arc<dyn Driver>;
