//! The trait that every driver implements, and the values it returns.
//!
//! The rules for implementations are in the header of this folder's `mod.rs`. The four drivers implement all methods;
//! a method that a driver cannot support returns `Unknown`, `None` or a failure of class `not_ours`.

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
use sluice_core::vllm::failure::Exit;
use sluice_gateway::config::ArgValue;

/// What runs the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverKind {
    /// The gateway starts it as a child process.
    Process,
    /// Commands of the operator start and stop it.
    Command,
    /// It is in a pod of a StatefulSet.
    Kubernetes,
    /// It runs outside the gateway's control: it can only be drained and probed.
    External,
}

impl DriverKind {
    /// Whether the gateway may stop and start the engine.
    pub fn can_restart(self) -> bool {
        self != Self::External
    }

    /// `process`, `command`, `kubernetes`, `external`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Command => "command",
            Self::Kubernetes => "kubernetes",
            Self::External => "external",
        }
    }
}

/// The current state of an engine, as far as its driver can determine it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineStatus {
    /// No engine was started, or it was stopped.
    Absent,
    /// It runs. This does not mean that it is ready.
    Running,
    /// It ended by itself and was not yet cleaned up by a stop.
    Ended(Exit),
    /// It cannot be determined from here.
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

/// Time limits of a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopRules {
    /// From SIGTERM to SIGKILL. Should exceed the engine's own `--shutdown-timeout`.
    pub grace: Duration,
    /// From SIGKILL until the last process must be gone.
    pub kill: Duration,
    /// After that, until the engine's port must be free, or held by a process that can be named.
    pub port: Duration,
    /// After that, until the device's memory must be free again.
    pub memory: Duration,
}

impl Default for StopRules {
    /// 10 s, which is far longer than vLLM takes when no request runs; 10 s; 2 s, since the kernel closes the sockets of an
    /// ended process within milliseconds, and a port that another user's process has taken costs this wait; 2 min, far longer
    /// than the seconds that memory was observed to take, because an engine whose memory is given up on needs the attention of
    /// an operator.
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { grace: seconds(10), kill: seconds(10), port: seconds(2), memory: seconds(120) }
    }
}

/// The result of a stop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// How the leader ended; `None` if there was none, or its end was not observed.
    pub exit: Option<Exit>,
    /// Whether SIGKILL was needed.
    pub forced: bool,
    /// Processes that had outlived their leader and were killed.
    pub orphans: u32,
    /// Whether the device's memory is free again; `None` where it cannot be read. `false` without an error means that the
    /// memory is not known to be the engine's, or that an earlier stop already reported it.
    pub memory_back: Option<bool>,
}

/// Which LoRA adapters an engine can load while it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterRank {
    /// Adapters of up to this rank.
    UpTo(i64),
    /// No adapters: why, and what to set.
    None(String),
    /// It cannot be determined from here.
    Unknown,
}

/// Lines of an engine's log, secrets masked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogLines {
    /// Oldest first.
    pub lines: Vec<String>,
    /// What to ask for next, to follow the log: a number that grows over all starts of the engine under one gateway.
    pub next: u64,
    /// What these lines are, where they are not the engine's own log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Controls one backend's engine. The header of this folder's `mod.rs` has the rules.
#[async_trait]
pub trait Driver: Send + Sync + fmt::Debug {
    /// What runs the engine.
    fn kind(&self) -> DriverKind;

    /// Checks whether an engine could be started with these settings. Returns remarks that do not prevent a start.
    ///
    /// # Errors
    /// What is wrong with the settings: classes whose `retry` is `Never`. Nothing was changed.
    async fn check(&self, settings: &EngineSettings) -> Result<Vec<Notice>, EngineFailure>;

    /// The largest rank of an adapter that an engine with these settings can load while it serves.
    fn adapter_rank(&self, settings: &EngineSettings) -> AdapterRank;

    /// The number of sequences that an engine with these settings runs at once, over all its ranks, if they are set.
    fn sequences(&self, settings: &EngineSettings) -> Option<i64> {
        let ranks = settings.int("data-parallel-size").unwrap_or(1).max(1);
        Some(settings.int("max-num-seqs")?.saturating_mul(ranks))
    }

    /// Whether an engine with these settings schedules by priority. No, if the settings do not show
    /// it.
    fn schedules_by_priority(&self, settings: &EngineSettings) -> bool {
        let names = ["scheduling-policy", "scheduling_policy"];
        let policy = names.iter().find_map(|name| settings.args.get(*name));
        matches!(policy, Some(ArgValue::Text(policy)) if policy == "priority")
    }

    /// Where the engine's log is, if it is on this machine.
    fn log_path(&self) -> Option<&Path> {
        None
    }

    /// Records that the engine is ready, even if its log does not show it.
    fn mark_ready(&self) {}

    /// Starts an engine. The result identifies it after a restart of the gateway.
    ///
    /// # Errors
    /// An engine runs already, the program is missing, the port is taken, or the command failed. No engine runs then.
    async fn start(&self, settings: &EngineSettings) -> Result<EngineIdentity, EngineFailure>;

    /// Searches for a running engine of this backend that this driver does not control yet, without a journal: the gateway
    /// may have died between a start and its journal entry. Pass the result to [`Driver::adopt`].
    async fn find_running(&self) -> Option<EngineIdentity>;

    /// The flags that the engine which was found has, where the driver can tell: others may have changed them.
    fn running_settings(&self) -> Option<EngineSettings> {
        None
    }

    /// Takes control of an engine that an earlier gateway started; `false` when none of its processes is left. When its
    /// leader is gone and only descendants are left, its status is [`EngineStatus::Ended`], and it must be stopped.
    ///
    /// # Errors
    /// It cannot be determined, or another engine runs.
    async fn adopt(&self, identity: &EngineIdentity) -> Result<bool, EngineFailure>;

    /// Stops the engine and all its descendants, and waits until the device's memory is free again.
    ///
    /// # Errors
    /// `wont_die` or `memory_kept`: no engine may be started on that device until a repeated stop succeeds; after
    /// `memory_kept` it does. `command_failed`, `not_ours`.
    async fn stop(&self, rules: StopRules) -> Result<Stopped, EngineFailure>;

    /// The current state of the engine. An engine that ended stays [`EngineStatus::Ended`] until it is stopped, which also
    /// ends the processes it left.
    async fn status(&self) -> EngineStatus;

    /// Returns when the engine has ended; never when no engine runs or its end cannot be observed.
    async fn wait_for_exit(&self) -> Exit;

    /// Which process listens on the engine's port.
    async fn port_owner(&self) -> PortOwner;

    /// The last lines of its log, oldest first, at most `lines`; empty where there is no log.
    fn tail(&self, lines: usize) -> Vec<String>;

    /// Complete lines of its log from number `after` on, or the last ones without it, at most `most`; `None` where the driver
    /// has none.
    fn log_lines(&self, _after: Option<u64>, _most: usize) -> Option<LogLines> {
        None
    }

    /// How far the start is; `None` where there is no log to follow.
    fn progress(&self) -> Option<watch::Receiver<StartProgress>>;

    /// Whether an engine that was found has served before.
    fn is_warm(&self) -> bool {
        true
    }

    /// What an operator should know of an engine that serves.
    fn remark(&self) -> Option<String> {
        None
    }

    /// Why the engine ended, from its log. For an engine whose status is [`EngineStatus::Ended`].
    fn diagnose(&self, exit: Option<Exit>) -> EngineFailure;
}

/// A driver that several tasks share.
pub type SharedDriver = Arc<dyn Driver>;
