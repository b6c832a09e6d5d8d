//! The driver that spawns engines itself.
//!
//! An engine gets a session and a process group of its own, writes its own log file, and carries a mark in its environment.
//! It outlives the gateway on purpose: a gateway that was killed finds it again by its trace or its mark.
//!
//! Unsafe code is forbidden here, so nothing can run between fork and exec. A session of its own therefore comes from the
//! `setsid` program of util-linux, which replaces itself by the engine and keeps the process id; where it is missing, the
//! engine gets a process group only. The gateway declares itself reaper of orphans, so that an engine process whose parent
//! was killed becomes our child and can be waited for.
//!
//! The leader is waited for without being reaped until [`Driver::stop`]: as long as it is a zombie its number cannot be
//! given to another process, so a signal to its group cannot hit a stranger. Every end must be followed by a stop.

mod device;
mod monitor;
mod log;
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
    AdapterRank, Driver, DriverKind, EngineFailure, EngineIdentity, EngineSettings, EngineStatus, Notice, PortOwner,
    StartProgress, StopRules, Stopped,
};
use crate::launch::{Flags, LaunchPlan, rank_of_adapters, sequences};
use device::Devices;
use log::Log;
use monitor::Monitor;
use sluice_core::vllm::failure::{Exit, FailureClass, diagnose};
use sluice_gateway::config::Launch;
use table::Row;

fn mark_prefix(folder: &Path, name: &str) -> String {
    format!("{}#{name}#", folder.display())
}

/// Whether any process of an engine lives that was started for the backend `name` with this `folder`.
pub(crate) fn is_running(folder: &Path, name: &str) -> bool {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let prefix = mark_prefix(&folder, name);
    let marked = |row: &Row| row.lives() && table::mark_of(row.pid).is_some_and(|mark| mark.starts_with(&prefix));
    table::all().iter().any(marked)
}

/// Runs one backend's engine as a child of the gateway.
#[derive(Debug)]
pub struct ProcessDriver {
    name: String,
    launch: Launch,
    folder: PathBuf,
    log: Arc<Log>,
    flags: Flags,
    devices: Devices,
    /// The engine under command. Taken by start, adopt and stop for as long as they take, so that they cannot overlap.
    run: Mutex<Option<Arc<Monitor>>>,
    /// The same for those who only look.
    seen: parking_lot::Mutex<Option<Arc<Monitor>>>,
}

impl ProcessDriver {
    /// A driver for the backend called `name` (unique in the gateway, such as `short/gpu0`), which keeps logs and what it
    /// learns about the engine's program in `folder`. Starts nothing.
    pub fn new(name: &str, launch: Launch, folder: &Path) -> Self {
        // The mark holds the folder; it must be the same however the folder was written.
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Self {
            name: name.to_owned(),
            log: Arc::new(Log::new(&folder, name)),
            flags: Flags::new(&folder),
            devices: Devices::of(&launch),
            launch,
            folder,
            run: Mutex::default(),
            seen: parking_lot::Mutex::default(),
        }
    }

    /// What all marks of this backend's engines begin with.
    fn mark_prefix(&self) -> String {
        mark_prefix(&self.folder, &self.name)
    }

    fn monitor(&self) -> Option<Arc<Monitor>> {
        self.seen.lock().clone()
    }

    fn set(&self, run: &mut Option<Arc<Monitor>>, monitor: Option<Arc<Monitor>>) {
        run.clone_from(&monitor);
        *self.seen.lock() = monitor;
    }

    /// Waits until the memory of the engine's devices is back at what it was.
    ///
    /// # Errors
    /// It is not, for the first time, on devices that are known to be the engine's.
    async fn memory_back(
        &self,
        monitor: &Monitor,
        baseline: &device::InUse,
        rules: StopRules,
    ) -> Result<Option<bool>, EngineFailure> {
        let told = monitor.memory_told.load(Ordering::Relaxed);
        let patience = if told { Duration::ZERO } else { rules.memory };
        let now = match self.devices.back(baseline, patience).await {
            Ok(back) => return Ok(back),
            Err(now) => now,
        };
        let what = |(index, used): (&u16, &u64)| {
            format!("gpu {index}: {used} MiB in use, {} before the start", baseline.get(index).unwrap_or(&0))
        };
        let cause = now.iter().map(what).collect::<Vec<_>>().join(", ");
        if self.devices.are_known() && !told {
            monitor.memory_told.store(true, Ordering::Relaxed);
            return Err(EngineFailure::new(FailureClass::MemoryKept, cause));
        }
        let why = if told { "told before" } else { "may be anybody's: `gpu` of this backend is not set" };
        tracing::warn!(backend = %self.name, "device memory is not back after a stop ({why}): {cause}");
        Ok(Some(false))
    }

    /// A process that listens on the engine's port already.
    fn port_holder(&self) -> Option<String> {
        match table::owner(self.launch.port, &HashSet::new()) {
            PortOwner::Other(who) => Some(who),
            _ => None,
        }
    }
}

#[async_trait]
impl Driver for ProcessDriver {
    fn kind(&self) -> DriverKind {
        DriverKind::Process
    }

    async fn check(&self, settings: &EngineSettings) -> Result<Vec<Notice>, EngineFailure> {
        let known = self.flags.of(&self.launch).await;
        Ok(LaunchPlan::new(&self.launch, settings, known.as_ref())?.notices)
    }

    fn adapter_rank(&self, settings: &EngineSettings) -> AdapterRank {
        rank_of_adapters(&self.launch, settings)
    }

    fn sequences(&self, settings: &EngineSettings) -> Option<i64> {
        sequences(&self.launch, settings)
    }

    fn log_path(&self) -> Option<&Path> {
        Some(self.log.path())
    }

    fn mark_ready(&self) {
        self.log.mark_ready();
    }

    async fn start(&self, settings: &EngineSettings) -> Result<EngineIdentity, EngineFailure> {
        let mut run = self.run.lock().await;
        if let Some(monitor) = &*run {
            let cause = format!("an engine of this backend was started and not stopped: {}", monitor.trace.describe());
            return Err(EngineFailure::new(FailureClass::PortInUse, cause));
        }
        let known = self.flags.of(&self.launch).await;
        let plan = LaunchPlan::new(&self.launch, settings, known.as_ref())?;
        if let Some(who) = self.port_holder() {
            return Err(EngineFailure::new(
                FailureClass::PortInUse,
                format!("port {} is held by {who}", self.launch.port),
            ));
        }
        let baseline = self.devices.in_use().await;
        let monitor = Monitor::start(self, &plan, baseline)?;
        let trace = monitor.trace.clone().public(monitor.baseline.as_ref());
        self.set(&mut run, Some(Arc::new(monitor)));
        Ok(trace)
    }

    async fn adopt(&self, trace: &EngineIdentity) -> Result<bool, EngineFailure> {
        let EngineIdentity::Process { pid, started, boot, mark, baseline } = trace else {
            return Err(EngineFailure::new(FailureClass::NotOurs, "the trace is not one of a process"));
        };
        let mut run = self.run.lock().await;
        if let Some(monitor) = &*run {
            let cause = format!("an engine of this backend is under command already: {}", monitor.trace.describe());
            return Err(EngineFailure::new(FailureClass::PortInUse, cause));
        }
        let trace = monitor::Track { leader: *pid, started: *started, boot: boot.clone(), mark: mark.clone() };
        let baseline = baseline.as_ref().map(|in_use| in_use.iter().copied().collect());
        let Some(monitor) = Monitor::adopt(self, trace, baseline) else { return Ok(false) };
        self.set(&mut run, Some(Arc::new(monitor)));
        Ok(true)
    }

    async fn find_running(&self) -> Option<EngineIdentity> {
        let prefix = self.mark_prefix();
        let marked = table::all().into_iter().filter(Row::lives).filter_map(|row| {
            let mark = table::mark_of(row.pid)?;
            mark.starts_with(&prefix).then_some((row, mark))
        });
        // The leader if it lives; else whoever is left names the session that it led.
        let (row, mark) = marked.min_by_key(|(row, _)| (row.pid != row.session, row.started))?;
        let started = Row::of(row.session).map_or(row.started, |leader| leader.started);
        Some(EngineIdentity::Process { pid: row.session, started, boot: table::boot(), mark, baseline: None })
    }

    async fn stop(&self, rules: StopRules) -> Result<Stopped, EngineFailure> {
        let mut run = self.run.lock().await;
        let Some(monitor) = run.clone() else {
            return Ok(Stopped { exit: None, forced: false, orphans: 0, memory_back: None });
        };
        let mut stopped = stop::processes(&monitor, rules).await?;
        // From here on nothing of it is left; what is kept is only the memory.
        if let Some(baseline) = &monitor.baseline {
            stopped.memory_back = self.memory_back(&monitor, baseline, rules).await?;
        }
        self.set(&mut run, None);
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
        table::owner(self.launch.port, &members.into_iter().map(|row| row.pid).collect())
    }

    fn tail(&self, lines: usize) -> Vec<String> {
        self.log.tail(lines)
    }

    fn progress(&self) -> Option<watch::Receiver<StartProgress>> {
        Some(self.log.progress())
    }

    fn diagnose(&self, exit: Option<Exit>) -> EngineFailure {
        let phase = self.log.progress().borrow().phase;
        EngineFailure::of(diagnose(&self.log.tail(log::LINES_MAX), exit, phase), exit, phase)
    }
}

#[cfg(test)]
mod tests;
