//! The driver that runs an engine as a child process of the gateway.
//!
//! An engine has a separate session and process group, writes a log file, and carries a mark in the
//! environment. It outlives a crash of the gateway on purpose: the next gateway finds it by
//! identity and mark. Without the mark no process is taken over or ended, whatever the journal says
//! (`mark.rs`).
//!
//! The gateway reaps orphans. An engine process whose parent was killed becomes a child of the
//! gateway, which can wait for it. The leader is not reaped before [`Driver::stop`]. While the
//! leader is a zombie, the process id is not reused, so a signal to the group cannot hit another
//! process. So a stop must follow every end.

mod device;
mod engine_log;
mod mark;
mod monitor;
mod spawn;
mod stop;
pub(crate) mod table;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Mutex, watch};

use crate::driver::{
    AdapterRank, Driver, DriverKind, EngineFailure, EngineIdentity, EngineSettings, EngineStatus, LogLines, Notice,
    PortOwner, Redactor, SharedDriver, StartProgress, StopRules, Stopped,
};
use crate::launch::{
    InstalledFlagsCache, LaunchPlan, can_run_twice, gpus, max_adapter_rank, memory_share, schedules_by_priority,
    sequences, sleeps,
};
use device::{Devices, MemoryInUse};
use engine_log::EngineLog;
use mark::{Marks, ProcessIdentity};
use monitor::Monitor;
use sluice_config::Launch;
use sluice_core::engines::EngineKind;
use sluice_core::vllm::failure::{Exit, FailureClass, diagnose_by};
use table::ProcessEntry;

/// The end of the name of a second engine's log.
const SECOND: &str = ".second";

/// Whether a process runs that a gateway with this state `folder` started for the backend `name`.
pub fn is_running(folder: &Path, name: &str) -> bool {
    Marks::new(folder, name).is_carried()
}

/// Runs one backend's engine as a child process.
#[derive(Debug)]
pub struct ProcessDriver {
    name: String,
    engine: EngineKind,
    launch: Launch,
    marks: Marks,
    folder: PathBuf,
    /// Whether this is the second of two engines of the backend ([`Driver::beside`]).
    is_second: bool,
    log: Arc<EngineLog>,
    flags: InstalledFlagsCache,
    devices: Devices,
    /// The controlled engine. Start, adopt and stop hold the lock, so that they cannot overlap.
    running: Mutex<Option<Arc<Monitor>>>,
    /// The same engine, for readers that must not wait for that lock.
    current: parking_lot::Mutex<Option<Arc<Monitor>>>,
}

impl ProcessDriver {
    /// A driver for the backend `name` (unique in the gateway, such as `short/gpu0`). Logs and the
    /// program's flag list are in `folder`. Starts nothing.
    pub fn new(name: &str, launch: Launch, folder: &Path) -> Self {
        Self::of_kind(EngineKind::default(), name, launch, folder)
    }

    /// [`new`](Self::new) for an engine of this kind.
    pub fn of_kind(engine: EngineKind, name: &str, launch: Launch, folder: &Path) -> Self {
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Self::numbered(engine, name, launch, (folder, false))
    }

    fn numbered(engine: EngineKind, name: &str, launch: Launch, (folder, is_second): (PathBuf, bool)) -> Self {
        let log = if is_second { format!("{name}{SECOND}") } else { name.to_owned() };
        let log = EngineLog::new(&folder, &log, Redactor::of_launch(&launch)).of_form(&engine.rules().log.form);
        Self {
            name: name.to_owned(),
            engine,
            marks: Marks::new(&folder, name),
            log: Arc::new(log),
            flags: InstalledFlagsCache::new(&folder),
            devices: Devices::of(&launch),
            folder,
            is_second,
            launch,
            running: Mutex::default(),
            current: parking_lot::Mutex::default(),
        }
    }

    /// A driver for checks in a process that is not the gateway: it writes nothing.
    pub fn for_checks(engine: EngineKind, name: &str, launch: Launch, folder: &Path) -> Self {
        let driver = Self::of_kind(engine, name, launch, folder);
        Self { flags: InstalledFlagsCache::without_writing(folder), ..driver }
    }

    fn monitor(&self) -> Option<Arc<Monitor>> {
        self.current.lock().clone()
    }

    fn set(&self, running: &mut Option<Arc<Monitor>>, monitor: Option<Arc<Monitor>>) {
        running.clone_from(&monitor);
        *self.current.lock() = monitor;
    }

    /// Waits until the memory of the devices is back at the value before the start.
    ///
    /// # Errors
    /// The memory is not back on devices known to be the engine's, and no earlier stop reported
    /// this.
    async fn wait_for_memory(
        &self,
        monitor: &Monitor,
        baseline: &MemoryInUse,
        rules: StopRules,
    ) -> Result<Option<bool>, EngineFailure> {
        let reported = monitor.memory_reported.load(Ordering::Relaxed);
        let limit = if reported { Duration::ZERO } else { rules.memory };
        let now = match self.devices.wait_for_memory(baseline, limit).await {
            Ok(back) => return Ok(back),
            Err(now) => now,
        };
        let describe = |(index, used): (&u16, &u64)| {
            format!("gpu {index}: {used} MiB in use, {} before the start", baseline.get(index).unwrap_or(&0))
        };
        let cause = now.iter().map(describe).collect::<Vec<_>>().join(", ");
        if self.devices.are_known() && !reported {
            monitor.memory_reported.store(true, Ordering::Relaxed);
            return Err(EngineFailure::new(FailureClass::MemoryKept, cause));
        }
        let why = match reported {
            true => "an earlier stop already reported it",
            false => "another process may hold it; set `gpu` of this backend to wait for its own devices only",
        };
        tracing::warn!(backend = %self.name, "device memory is still in use after a stop ({why}): {cause}");
        Ok(Some(false))
    }

    /// Another process that already listens on the engine's port.
    fn port_holder(&self) -> Option<String> {
        match table::port_owner(self.launch.port, &HashSet::new()) {
            PortOwner::Other(holder) => Some(holder),
            _ => None,
        }
    }
}

/// Refuses a second engine next to `running`.
fn require_none(running: Option<&Arc<Monitor>>, found: &str) -> Result<(), EngineFailure> {
    match running {
        None => Ok(()),
        Some(monitor) => {
            let cause = format!("{found}: pid {}", monitor.identity.leader);
            Err(EngineFailure::new(FailureClass::PortInUse, cause))
        }
    }
}

#[async_trait]
impl Driver for ProcessDriver {
    fn kind(&self) -> DriverKind {
        DriverKind::Process
    }

    async fn check(&self, settings: &EngineSettings) -> Result<Vec<Notice>, EngineFailure> {
        let installed = self.flags.read(self.engine, &self.launch).await;
        Ok(LaunchPlan::new(self.engine, &self.launch, settings, installed.as_ref())?.notices)
    }

    fn adapter_rank(&self, settings: &EngineSettings) -> AdapterRank {
        max_adapter_rank(self.engine, &self.launch, settings)
    }

    fn sequences(&self, settings: &EngineSettings) -> Option<i64> {
        sequences(self.engine, &self.launch, settings)
    }

    fn schedules_by_priority(&self, settings: &EngineSettings) -> bool {
        schedules_by_priority(self.engine, &self.launch, settings)
    }

    fn sleeps(&self, settings: &EngineSettings) -> bool {
        sleeps(&self.launch, settings)
    }

    fn beside(&self, port: u16) -> Option<SharedDriver> {
        let launch = Launch { port, ..self.launch.clone() };
        let folder = (self.folder.clone(), !self.is_second);
        Some(Arc::new(Self::numbered(self.engine, &self.name, launch, folder)))
    }

    fn port(&self) -> Option<u16> {
        Some(self.launch.port)
    }

    fn asleep_bytes(&self, settings: &EngineSettings) -> Option<u64> {
        self.log.weights()?.checked_mul(gpus(&self.launch, settings))
    }

    async fn check_room(&self, settings: &EngineSettings) -> Result<(), String> {
        if !can_run_twice(&self.launch, settings) {
            return Err("its flags fix ports (port, data-parallel-size)".to_owned());
        }
        let share = memory_share(&self.launch, settings).ok_or("the memory that it takes of the devices is unknown")?;
        self.devices.check_room(share).await
    }

    fn set_aside(&self, aside: bool) {
        if let Some(monitor) = self.monitor() {
            monitor.count_as_user(&self.devices, !aside);
        }
    }

    fn log_path(&self) -> Option<&Path> {
        Some(self.log.path())
    }

    fn mark_ready(&self) {
        self.log.mark_ready();
    }

    async fn start(&self, settings: &EngineSettings) -> Result<EngineIdentity, EngineFailure> {
        let mut running = self.running.lock().await;
        require_none(running.as_ref(), "an engine of this backend was started and not stopped")?;
        let installed = self.flags.read(self.engine, &self.launch).await;
        let plan = LaunchPlan::new(self.engine, &self.launch, settings, installed.as_ref())?;
        if let Some(holder) = self.port_holder() {
            let cause = format!("port {} is held by {holder}", self.launch.port);
            return Err(EngineFailure::new(FailureClass::PortInUse, cause));
        }
        let baseline = self.devices.memory_in_use().await;
        let mark = self.marks.new_mark().map_err(|error| {
            let cause = format!("the key by which its processes are known cannot be written (fleet.state): {error}");
            EngineFailure::new(FailureClass::CommandFailed, cause)
        })?;
        let monitor = Monitor::start(&plan, mark, &self.log, &self.devices, baseline)?;
        let identity = monitor.engine_identity(self.launch.port);
        self.set(&mut running, Some(Arc::new(monitor)));
        Ok(identity)
    }

    async fn adopt(&self, identity: &EngineIdentity) -> Result<bool, EngineFailure> {
        let EngineIdentity::Process { pid, started, boot, mark, baseline, port: _ } = identity else {
            let cause = "the journal's entry does not describe a child process of the gateway";
            return Err(EngineFailure::new(FailureClass::NotOurs, cause));
        };
        if !self.marks.may_be_recorded(mark) {
            let (backend, pid) = (&self.name, *pid);
            tracing::error!(
                backend,
                pid,
                "the journal names a process that is no engine of this gateway; it is left alone"
            );
            return Ok(false);
        }
        let mut running = self.running.lock().await;
        require_none(running.as_ref(), "an engine of this backend is already controlled")?;
        let identity = ProcessIdentity { leader: *pid, started: *started, boot: boot.clone(), mark: mark.clone() };
        let baseline = baseline.as_ref().map(|in_use| in_use.iter().copied().collect());
        let Some(monitor) = Monitor::adopt(identity, &self.log, &self.devices, baseline) else { return Ok(false) };
        self.set(&mut running, Some(Arc::new(monitor)));
        Ok(true)
    }

    async fn find_running(&self, except: Option<&EngineIdentity>) -> Option<EngineIdentity> {
        // The leader if it lives; else any remaining process has the id of the session.
        let is_other = |mark: &str| !matches!(except, Some(EngineIdentity::Process { mark: own, .. }) if own == mark);
        let found = self.marks.find().filter(|(_, mark)| is_other(mark));
        let (entry, mark) = found.min_by_key(|(entry, _)| (entry.pid != entry.session, entry.started))?;
        let started = ProcessEntry::read(entry.session).map_or(entry.started, |leader| leader.started);
        let boot = table::boot_id();
        Some(EngineIdentity::Process { pid: entry.session, started, boot, mark, baseline: None, port: None })
    }

    async fn stop(&self, rules: StopRules) -> Result<Stopped, EngineFailure> {
        let mut running = self.running.lock().await;
        let Some(monitor) = running.clone() else {
            return Ok(Stopped { exit: None, forced: false, orphans: 0, memory_back: None });
        };
        let mut stopped = stop::stop_processes(&monitor, self.launch.port, rules).await?;
        // No process is left; only memory may still be in use.
        if let Some(baseline) = &monitor.baseline {
            stopped.memory_back = self.wait_for_memory(&monitor, baseline, rules).await?;
        }
        self.set(&mut running, None);
        Ok(stopped)
    }

    async fn status(&self) -> EngineStatus {
        match self.monitor() {
            None => EngineStatus::Absent,
            Some(monitor) => monitor.exit().map_or(EngineStatus::Running, EngineStatus::Ended),
        }
    }

    async fn wait_for_exit(&self) -> Exit {
        match self.monitor() {
            Some(monitor) => monitor.wait_for_exit().await,
            None => std::future::pending().await,
        }
    }

    async fn port_owner(&self) -> PortOwner {
        let members = self.monitor().map(|monitor| monitor.members()).unwrap_or_default();
        table::port_owner(self.launch.port, &members.into_iter().map(|entry| entry.pid).collect())
    }

    fn tail(&self, lines: usize) -> Vec<String> {
        self.log.tail(lines)
    }

    fn log_lines(&self, after: Option<u64>, most: usize) -> Option<LogLines> {
        Some(self.log.lines(after, most))
    }

    fn progress(&self) -> Option<watch::Receiver<StartProgress>> {
        Some(self.log.progress())
    }

    fn diagnose(&self, exit: Option<Exit>) -> EngineFailure {
        let phase = self.log.progress().borrow().phase;
        let lines = self.log.tail(engine_log::LINES_MAX);
        EngineFailure::of(diagnose_by(self.engine.rules().log, &lines, exit, phase), exit, phase)
    }
}

#[cfg(test)]
mod tests;
