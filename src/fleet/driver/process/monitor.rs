//! Keeps watch over one running engine: its log, its end, and who belongs to it.
//!
//! One thread per engine, because it reads files: it looks at the log and for the leader's end every
//! [`LOOK_EVERY`], and at the table of processes every [`SCAN_EVERY`], to remember processes that may leave the session and
//! lose their parent later. Dropping the monitor ends the thread, not the engine.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::device::{InUse, Tenancy};
use super::log::{LOOK_EVERY, Log};
use super::table::{self, Kin, Row};
use super::{ProcessDriver, spawn};
use crate::driver::{EngineFailure, EngineIdentity};
use crate::launch::LaunchPlan;
use sluice_core::vllm::failure::{Exit, FailureClass};

/// How often members are looked for while the engine runs.
const SCAN_EVERY: Duration = Duration::from_secs(2);

/// Which process it is, over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Track {
    pub(super) leader: i32,
    pub(super) started: u64,
    pub(super) boot: String,
    pub(super) mark: String,
}

impl Track {
    pub(super) fn public(self, baseline: Option<&InUse>) -> EngineIdentity {
        let baseline = baseline.map(|in_use| in_use.iter().map(|(index, used)| (*index, *used)).collect());
        EngineIdentity::Process { pid: self.leader, started: self.started, boot: self.boot, mark: self.mark, baseline }
    }

    /// For messages.
    pub(super) fn describe(&self) -> String {
        format!("pid {}", self.leader)
    }
}

/// A running engine, or one that has ended and was not cleaned up.
#[derive(Debug)]
pub(super) struct Monitor {
    pub(super) trace: Track,
    /// Memory in use before it started.
    pub(super) baseline: Option<InUse>,
    /// Whether a stop has failed because of the memory: then somebody knows, and the next one only looks.
    pub(super) memory_told: AtomicBool,
    shared: Arc<Shared>,
    _tenancy: Tenancy,
}

#[derive(Debug)]
struct Shared {
    trace: Track,
    log: Arc<Log>,
    /// Whether the leader is our child: only then its exit can be seen, and is.
    child: bool,
    exit: watch::Sender<Option<Exit>>,
    known: Mutex<HashSet<(i32, u64)>>,
    over: AtomicBool,
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
    }
}

impl Monitor {
    /// Starts an engine.
    pub(super) fn start(
        driver: &ProcessDriver,
        plan: &LaunchPlan,
        baseline: Option<InUse>,
    ) -> Result<Self, EngineFailure> {
        let path = driver.log.path().display().to_string();
        let file = driver.log.begin().map_err(|error| {
            EngineFailure::new(FailureClass::CommandFailed, format!("cannot write the engine's log {path}: {error}"))
        })?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mark = format!("{}{:x}", driver.mark_prefix(), since.as_nanos());
        let child = spawn::spawn(plan, file, &mark)
            .map_err(|error| EngineFailure::new(FailureClass::ProgramMissing, format!("{}: {error}", plan.argv[0])))?;
        let leader = i32::try_from(child.id())
            .map_err(|_| EngineFailure::new(FailureClass::CommandFailed, "a process id of over 31 bits"))?;
        // It is not reaped before its stop, so the row is there even when it has ended already.
        let started = Row::of(leader).map_or(0, |row| row.started);
        let trace = Track { leader, started, boot: table::boot(), mark };
        Ok(Self::keep(driver, trace, true, baseline))
    }

    /// Takes over what is left of an engine that an earlier gateway started; nothing when nothing is left.
    pub(super) fn adopt(driver: &ProcessDriver, trace: Track, baseline: Option<InUse>) -> Option<Self> {
        if trace.boot != table::boot() {
            return None;
        }
        let members = living(&trace, &HashSet::new());
        if members.is_empty() {
            return None;
        }
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        let leader = members.iter().find(|row| row.identity() == (trace.leader, trace.started));
        let child = leader.is_some_and(|row| row.parent == own);
        let gone = leader.is_none();
        driver.log.resume();
        let monitor = Self::keep(driver, trace, child, baseline);
        if gone {
            monitor.shared.exit.send_replace(Some(Exit::Unseen));
        }
        Some(monitor)
    }

    fn keep(driver: &ProcessDriver, trace: Track, child: bool, baseline: Option<InUse>) -> Self {
        let shared = Arc::new(Shared {
            trace: trace.clone(),
            log: Arc::clone(&driver.log),
            child,
            exit: watch::Sender::new(None),
            known: Mutex::default(),
            over: AtomicBool::new(false),
        });
        let watched = Arc::clone(&shared);
        let watching = std::thread::Builder::new().name("engine".to_owned()).spawn(move || watched.watch());
        if let Err(error) = watching {
            // Without it an end is seen at the next probe only, and the log shows nothing.
            tracing::error!(%error, "no thread to watch an engine");
        }
        let memory_told = AtomicBool::new(false);
        Self { trace, baseline, memory_told, shared, _tenancy: driver.devices.enter() }
    }

    /// How the leader ended, if it did.
    pub(super) fn exit(&self) -> Option<Exit> {
        self.shared.look_for_end();
        *self.shared.exit.borrow()
    }

    /// Returns when the leader has ended.
    pub(super) async fn wait_for_exit(&self) -> Exit {
        let mut exit = self.shared.exit.subscribe();
        // The sender lives as long as `self`.
        match exit.wait_for(Option::is_some).await.map(|exit| *exit) {
            Ok(Some(exit)) => exit,
            _ => std::future::pending().await,
        }
    }

    /// The living processes of the engine.
    pub(super) fn members(&self) -> Vec<Row> {
        self.shared.scan()
    }

    /// Takes the leader off the table of processes, and its exit with it. Nothing may be signalled by its number after.
    pub(super) fn reap_leader(&self) -> Option<Exit> {
        let exit = self.exit();
        if self.shared.child {
            let _ = waitpid(Pid::from_raw(self.trace.leader), Some(WaitPidFlag::WNOHANG));
        }
        exit
    }
}

fn living(trace: &Track, known: &HashSet<(i32, u64)>) -> Vec<Row> {
    let kin = Kin { leader: trace.leader, started: trace.started, mark: &trace.mark, known };
    let mut members = table::members(&table::all(), &kin);
    members.retain(Row::lives);
    members
}

impl Shared {
    fn watch(&self) {
        let mut scanned: Option<Instant> = None;
        while !self.over.load(Ordering::Relaxed) {
            self.log.look();
            self.look_for_end();
            if scanned.is_none_or(|at| at.elapsed() >= SCAN_EVERY) {
                self.scan();
                scanned = Some(Instant::now());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Sees whether the leader has ended, without reaping it.
    fn look_for_end(&self) {
        if self.exit.borrow().is_some() {
            return;
        }
        let exit = if self.child {
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            match waitid(Id::Pid(Pid::from_raw(self.trace.leader)), flags) {
                Ok(WaitStatus::Exited(_, code)) => Exit::Code(code),
                Ok(WaitStatus::Signaled(_, signal, _)) => Exit::Signal(signal as i32),
                Ok(_) => return,
                // Somebody else in this process reaped it.
                Err(_) => Exit::Unseen,
            }
        } else {
            match Row::of(self.trace.leader) {
                Some(row) if row.lives() && row.started == self.trace.started => return,
                _ => Exit::Unseen,
            }
        };
        // What it said last belongs to the end.
        while self.log.look() {}
        self.exit.send_if_modified(|known| known.is_none() && known.replace(exit).is_none());
    }

    /// The living members; remembers them, and reaps those that have become our children and ended.
    fn scan(&self) -> Vec<Row> {
        let mut known = self.known.lock();
        let kin = Kin { leader: self.trace.leader, started: self.trace.started, mark: &self.trace.mark, known: &known };
        let members = table::members(&table::all(), &kin);
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        for row in members.iter().filter(|row| row.state == 'Z' && row.parent == own && row.pid != self.trace.leader) {
            let _ = waitpid(Pid::from_raw(row.pid), Some(WaitPidFlag::WNOHANG));
        }
        let living: Vec<Row> = members.into_iter().filter(Row::lives).collect();
        *known = living.iter().map(Row::identity).collect();
        living
    }
}
