//! The trait that every driver implements, and the values that it returns.
//!
//! The header of this folder's `mod.rs` has the rules. If a driver cannot support a method, it
//! returns `Unknown`, `None` or a failure of class `not_ours`.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::failure::{EngineFailure, Notice};
use super::identity::EngineIdentity;
use super::progress::StartProgress;
use super::settings::EngineSettings;
use sluice_config::ArgValue;
use sluice_core::vllm::failure::Exit;

sluice_core::labels! {
    /// How the engine is run.
    #[derive(Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum DriverKind {
        /// As a child process of the gateway.
        Process = "process",
        /// By commands of the operator.
        Command = "command",
        /// In a pod of a StatefulSet.
        Kubernetes = "kubernetes",
        /// Outside the gateway's control: it can only be drained and probed.
        External = "external",
    }
}

/// The state of an engine, as far as the driver knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineStatus {
    /// No engine was started, or it was stopped.
    Absent,
    /// The engine runs, but need not be ready.
    Running,
    /// The engine ended by itself and was not cleaned up by a stop.
    Ended(Exit),
    /// The driver cannot find out the state.
    Unknown,
}

/// Which process listens on the engine's port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortOwner {
    /// No process.
    Free,
    /// Only processes of this engine.
    Engine,
    /// Another process, for a message: `pid 71 (vllm)`.
    Other(String),
    /// Unknown here: another host, user or network namespace.
    Unknown,
}

/// Time limits of a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopRules {
    /// From SIGTERM to SIGKILL. Should exceed the engine's `--shutdown-timeout`.
    pub grace: Duration,
    /// From SIGKILL to the end of the last process.
    pub kill: Duration,
    /// From the end of the last process until the engine's port is free, or held by a known
    /// process.
    pub port: Duration,
    /// From the end of `port` until the device's memory is free.
    pub memory: Duration,
}

impl Default for StopRules {
    /// `grace` is 10 s, far longer than an idle vLLM takes; `kill` is 10 s. `port` is 2 s: the
    /// kernel closes the sockets of an ended process within milliseconds, and a port taken by
    /// another user's process costs this wait. `memory` is 2 min, far longer than the observed
    /// seconds: memory that stays in use needs an operator.
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { grace: seconds(10), kill: seconds(10), port: seconds(2), memory: seconds(120) }
    }
}

/// The result of a stop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// How the leader ended; `None` if there was no leader, or the end of the leader was not
    /// observed.
    pub exit: Option<Exit>,
    /// Whether SIGKILL was needed.
    pub forced: bool,
    /// Processes that outlived their leader and were killed.
    pub orphans: u32,
    /// Whether the device's memory is free; `None` if unknown. `false` without an error: another
    /// process may hold the memory, or an earlier stop already failed because of it.
    pub memory_back: Option<bool>,
}

/// LoRA adapters that an engine can load while it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterRank {
    /// Adapters up to this rank.
    UpTo(i64),
    /// No adapters can be loaded: the reason and the remedy.
    None(String),
    /// The driver cannot find out the rank.
    Unknown,
}

/// Lines of an engine's log, with secrets masked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogLines {
    /// Oldest first.
    pub lines: Vec<String>,
    /// The `after` with which the next call continues the log. The number grows over all starts of
    /// the engine while the gateway runs.
    pub next: u64,
    /// A remark if this is not the engine's own log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Controls one backend's engine. The header of this folder's `mod.rs` has the rules.
#[async_trait]
pub trait Driver: Send + Sync + fmt::Debug {
    /// How the engine is run.
    fn kind(&self) -> DriverKind;

    /// Checks whether an engine could start with these settings. Changes nothing. Returns remarks
    /// that do not prevent a start.
    ///
    /// # Errors
    /// The settings are wrong, or cannot be applied (`managed_elsewhere`) or checked
    /// (`cluster_refused`, `not_ours`).
    async fn check(&self, settings: &EngineSettings) -> Result<Vec<Notice>, EngineFailure>;

    /// The largest rank of adapters that an engine with these settings can load while it serves.
    fn adapter_rank(&self, _settings: &EngineSettings) -> AdapterRank {
        AdapterRank::Unknown
    }

    /// Sequences that an engine with these settings runs at once, over all ranks; `None` if not
    /// set.
    fn sequences(&self, settings: &EngineSettings) -> Option<i64> {
        let ranks = settings.int("data-parallel-size").unwrap_or(1).max(1);
        Some(settings.int("max-num-seqs")?.saturating_mul(ranks))
    }

    /// Whether an engine with these settings schedules by priority; `false` if the settings do not
    /// show it.
    fn schedules_by_priority(&self, settings: &EngineSettings) -> bool {
        let names = ["scheduling-policy", "scheduling_policy"];
        let policy = names.iter().find_map(|name| settings.args.get(*name));
        matches!(policy, Some(ArgValue::Text(policy)) if policy == "priority")
    }

    /// Whether an engine with these settings can free the memory of its devices and take it back.
    fn sleeps(&self, _settings: &EngineSettings) -> bool {
        false
    }

    /// A driver for a second engine of the backend, which listens on `port`; `None` if two cannot
    /// run next to each other.
    fn beside(&self, _port: u16) -> Option<SharedDriver> {
        None
    }

    /// The port on which the engine listens, if the driver chooses it.
    fn port(&self) -> Option<u16> {
        None
    }

    /// Bytes of the memory of the host that the engine needs to sleep; `None`: unknown.
    fn asleep_bytes(&self, _settings: &EngineSettings) -> Option<u64> {
        None
    }

    /// Checks that an engine with these settings can run next to the present one, and gets as much
    /// memory of the devices next to the present users as it would get alone.
    ///
    /// # Errors
    /// Why it would not, or why that is unknown.
    async fn check_room(&self, _settings: &EngineSettings) -> Result<(), String> {
        Err("the memory of the devices is unknown".to_owned())
    }

    /// Records that the engine sleeps, and so is no user of its devices until the driver starts or
    /// adopts an engine, or this is called with `false`.
    fn set_aside(&self, _aside: bool) {}

    /// The engine's log file, if it is on this machine.
    fn log_path(&self) -> Option<&Path> {
        None
    }

    /// Records that the engine is ready, even if the log does not show it.
    fn mark_ready(&self) {}

    /// Starts an engine. The identity serves to find it after a restart of the gateway.
    ///
    /// # Errors
    /// An engine runs already, the program is missing, the port is taken, or the command failed.
    /// Except in the first case, no engine runs then.
    async fn start(&self, settings: &EngineSettings) -> Result<EngineIdentity, EngineFailure>;

    /// Searches without the journal for a running engine of this backend other than `except`, to
    /// pass to [`Driver::adopt`]: a gateway may have died between a start and the journal entry.
    async fn find_running(&self, except: Option<&EngineIdentity>) -> Option<EngineIdentity>;

    /// The flags of the found engine, if known. Another program may have changed them.
    fn running_settings(&self) -> Option<EngineSettings> {
        None
    }

    /// Takes control of an engine of an earlier gateway; `false` if it has no process left. If only
    /// descendants of the leader are left, the status is [`EngineStatus::Ended`], and the engine
    /// must be stopped.
    ///
    /// # Errors
    /// The state is unknown, or another engine runs.
    async fn adopt(&self, identity: &EngineIdentity) -> Result<bool, EngineFailure>;

    /// Stops the engine and its descendants, and waits until the device's memory is free.
    ///
    /// # Errors
    /// `wont_die` or `memory_kept`: no engine may start on that device until a repeated stop
    /// succeeds. After `memory_kept` the next stop succeeds. Also `command_failed` and `not_ours`.
    async fn stop(&self, rules: StopRules) -> Result<Stopped, EngineFailure>;

    /// The state of the engine. An ended engine stays [`EngineStatus::Ended`] until a stop, which
    /// also ends processes that it left.
    async fn status(&self) -> EngineStatus;

    /// Returns when the engine has ended; never if none runs or the end cannot be observed.
    async fn wait_for_exit(&self) -> Exit;

    /// Which process listens on the engine's port.
    async fn port_owner(&self) -> PortOwner {
        PortOwner::Unknown
    }

    /// The last `lines` lines of the log at most, oldest first; empty without a log.
    fn tail(&self, _lines: usize) -> Vec<String> {
        Vec::new()
    }

    /// At most `most` complete lines of the log: from number `after` on, or the last lines if
    /// `after` is `None`. Returns `None` if the driver has no log.
    fn log_lines(&self, _after: Option<u64>, _most: usize) -> Option<LogLines> {
        None
    }

    /// The progress of the start; `None` without a log.
    fn progress(&self) -> Option<watch::Receiver<StartProgress>> {
        None
    }

    /// Whether a found engine has served before.
    fn is_warm(&self) -> bool {
        true
    }

    /// A remark for operators about an engine that serves.
    fn remark(&self) -> Option<String> {
        None
    }

    /// Why an engine in state [`EngineStatus::Ended`] ended, from the log.
    fn diagnose(&self, exit: Option<Exit>) -> EngineFailure;
}

/// A driver that several tasks share.
pub type SharedDriver = Arc<dyn Driver>;
