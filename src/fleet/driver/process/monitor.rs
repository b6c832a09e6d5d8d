//! Watches one running engine: the log, the end, and the processes.
//!
//! One thread per engine, because it reads files. Every [`READ_INTERVAL`] it reads the log and
//! checks for the leader's end. Every [`SCAN_INTERVAL`] it scans the process table, to remember
//! processes that may later leave the session and lose their parent. Dropping the monitor ends the
//! thread, not the engine.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::device::{DeviceUse, Devices, MemoryInUse};
use super::engine_log::{EngineLog, READ_INTERVAL};
use super::mark::{self, ProcessIdentity};
use super::spawn;
use super::table::{self, ProcessEntry, ProcessId};
use crate::driver::{EngineFailure, EngineIdentity};
use crate::launch::LaunchPlan;
use sluice_core::vllm::failure::{Exit, FailureClass};

const SCAN_INTERVAL: Duration = Duration::from_secs(2);

/// An engine that runs, or has ended and was not stopped.
#[derive(Debug)]
pub(super) struct Monitor {
    pub(super) identity: ProcessIdentity,
    /// Memory in use before the start.
    pub(super) baseline: Option<MemoryInUse>,
    /// Whether a stop failed and reported that memory was not free, so that the next stop does not
    /// wait.
    pub(super) memory_reported: AtomicBool,
    shared: Arc<Shared>,
    /// `None` while the engine sleeps next to another one.
    device_use: Mutex<Option<DeviceUse>>,
}

#[derive(Debug)]
struct Shared {
    identity: ProcessIdentity,
    log: Arc<EngineLog>,
    /// Whether the leader is a child of this process, so that the exit status can be read.
    child: bool,
    exit: watch::Sender<Option<Exit>>,
    known: Mutex<HashSet<ProcessId>>,
    dropped: AtomicBool,
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.dropped.store(true, Ordering::Relaxed);
    }
}

impl Monitor {
    pub(super) fn start(
        plan: &LaunchPlan,
        mark: String,
        log: &Arc<EngineLog>,
        devices: &Devices,
        baseline: Option<MemoryInUse>,
    ) -> Result<Self, EngineFailure> {
        let file = log.begin().map_err(|error| {
            let cause = format!("cannot write the engine's log {}: {error}", log.path().display());
            EngineFailure::new(FailureClass::CommandFailed, cause)
        })?;
        let child = spawn::spawn(plan, file, &mark)
            .map_err(|error| EngineFailure::new(FailureClass::ProgramMissing, format!("{}: {error}", plan.argv[0])))?;
        let leader = i32::try_from(child.id())
            .map_err(|_| EngineFailure::new(FailureClass::CommandFailed, "a process id of over 31 bits"))?;
        // The leader is not reaped before the stop, so the entry exists even if it has ended.
        let started = ProcessEntry::read(leader).map_or(0, |entry| entry.started);
        let identity = ProcessIdentity { leader, started, boot: table::boot_id(), mark };
        Ok(Self::watch(identity, true, log, devices, baseline))
    }

    /// Takes control of an earlier gateway's engine; `None` unless processes remain and one carries
    /// the engine's mark.
    pub(super) fn adopt(
        identity: ProcessIdentity,
        log: &Arc<EngineLog>,
        devices: &Devices,
        baseline: Option<MemoryInUse>,
    ) -> Option<Self> {
        if identity.boot != table::boot_id() {
            return None;
        }
        let table = table::all();
        if !mark::carries(&table, &identity) {
            return None;
        }
        let mut members = table::members(&table, &identity.membership(&HashSet::new()));
        members.retain(ProcessEntry::is_alive);
        if members.is_empty() {
            return None;
        }
        let leader = members.iter().find(|entry| entry.id() == (identity.leader, identity.started));
        let child = leader.is_some_and(|entry| entry.parent == table::own_pid());
        let leader_gone = leader.is_none();
        log.resume();
        let monitor = Self::watch(identity, child, log, devices, baseline);
        if leader_gone {
            monitor.shared.exit.send_replace(Some(Exit::Unseen));
        }
        Some(monitor)
    }

    fn watch(
        identity: ProcessIdentity,
        child: bool,
        log: &Arc<EngineLog>,
        devices: &Devices,
        baseline: Option<MemoryInUse>,
    ) -> Self {
        let shared = Arc::new(Shared {
            identity: identity.clone(),
            log: Arc::clone(log),
            child,
            exit: watch::Sender::new(None),
            known: Mutex::default(),
            dropped: AtomicBool::new(false),
        });
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || watched.run());
        if let Err(error) = thread {
            // Without the thread, an end is detected only by probes, and the log is not read.
            tracing::error!(%error, "cannot start the thread that watches an engine");
        }
        let memory_reported = AtomicBool::new(false);
        Self { identity, baseline, memory_reported, shared, device_use: Mutex::new(Some(devices.register_engine())) }
    }

    /// Sets whether the engine counts as a user of its devices.
    pub(super) fn count_as_user(&self, devices: &Devices, counts: bool) {
        let mut device_use = self.device_use.lock();
        match counts {
            true if device_use.is_none() => *device_use = Some(devices.register_engine()),
            true => {}
            false => *device_use = None,
        }
    }

    /// The identity by which the gateway finds the engine, which listens on `port`, after a
    /// restart.
    pub(super) fn engine_identity(&self, port: u16) -> EngineIdentity {
        let ProcessIdentity { leader, started, boot, mark } = self.identity.clone();
        let baseline = self.baseline.as_ref();
        let baseline = baseline.map(|in_use| in_use.iter().map(|(index, used)| (*index, *used)).collect());
        EngineIdentity::Process { pid: leader, started, boot, mark, baseline, port: Some(port) }
    }

    /// How the leader ended, if it did.
    pub(super) fn exit(&self) -> Option<Exit> {
        self.shared.check_for_exit();
        *self.shared.exit.borrow()
    }

    pub(super) async fn wait_for_exit(&self) -> Exit {
        let mut exit = self.shared.exit.subscribe();
        // The sender lives as long as `self`.
        match exit.wait_for(Option::is_some).await.map(|exit| *exit) {
            Ok(Some(exit)) => exit,
            _ => std::future::pending().await,
        }
    }

    pub(super) fn members(&self) -> Vec<ProcessEntry> {
        self.shared.scan()
    }

    /// Reaps the leader and returns the exit. Then the process id must not be signalled any more.
    pub(super) fn reap_leader(&self) -> Option<Exit> {
        let exit = self.exit();
        if self.shared.child {
            let _ = waitpid(Pid::from_raw(self.identity.leader), Some(WaitPidFlag::WNOHANG));
        }
        exit
    }
}

impl Shared {
    fn run(&self) {
        let mut scanned: Option<Instant> = None;
        while !self.dropped.load(Ordering::Relaxed) {
            self.log.read_new();
            self.check_for_exit();
            if scanned.is_none_or(|at| at.elapsed() >= SCAN_INTERVAL) {
                self.scan();
                scanned = Some(Instant::now());
            }
            std::thread::sleep(READ_INTERVAL);
        }
    }

    /// Records the end of the leader, without reaping it.
    fn check_for_exit(&self) {
        if self.exit.borrow().is_some() {
            return;
        }
        let leader = self.identity.leader;
        let exit = if self.child {
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            match waitid(Id::Pid(Pid::from_raw(leader)), flags) {
                Ok(WaitStatus::Exited(_, code)) => Exit::Code(code),
                Ok(WaitStatus::Signaled(_, signal, _)) => Exit::Signal(signal as i32),
                Ok(_) => return,
                // Other code in this process reaped it.
                Err(_) => Exit::Unseen,
            }
        } else {
            match ProcessEntry::read(leader) {
                Some(entry) if entry.is_alive() && entry.started == self.identity.started => return,
                _ => Exit::Unseen,
            }
        };
        // Reads the leader's last lines before publishing the end.
        while self.log.read_new() {}
        self.exit.send_if_modified(|known| known.is_none() && known.replace(exit).is_none());
    }

    /// Returns the living members and remembers them. Reaps ended members that became our children.
    fn scan(&self) -> Vec<ProcessEntry> {
        let mut known = self.known.lock();
        let members = table::members(&table::all(), &self.identity.membership(&known));
        let own = table::own_pid();
        let ended = |entry: &&ProcessEntry| entry.state == 'Z' && entry.parent == own;
        for entry in members.iter().filter(ended).filter(|entry| entry.pid != self.identity.leader) {
            let _ = waitpid(Pid::from_raw(entry.pid), Some(WaitPidFlag::WNOHANG));
        }
        let living: Vec<ProcessEntry> = members.into_iter().filter(ProcessEntry::is_alive).collect();
        *known = living.iter().map(ProcessEntry::id).collect();
        living
    }
}
