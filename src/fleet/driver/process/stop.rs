//! Ends all processes of an engine.
//!
//! 1. SIGTERM to the leader, which ends the child processes in order. With `--shutdown-timeout`,
//!    requests can finish; a signal to the whole group would interrupt them. Then SIGTERM to
//!    processes that outlive the leader.
//! 2. After the grace period, SIGKILL to the group and every process, repeatedly, since new ones
//!    may have been started.
//! 3. Wait until the port is free, or a known process has it. Without this wait, a start could find
//!    the port taken while the kernel closes the engine's socket.
//! 4. Reap the leader. Until then the process and session ids cannot be reused.
//!
//! A process is signalled by id right after the start time was read. If the id were reused within
//! these microseconds, another process would get the signal; systems hand out four million ids in
//! turn.

use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use tokio::time::{Instant, sleep};

use super::monitor::Monitor;
use super::table::{self, ProcessEntry};
use crate::driver::{EngineFailure, StopRules, Stopped};
use sluice_core::vllm::failure::FailureClass;

const SCAN_INTERVAL: Duration = Duration::from_millis(25);

/// Ends all processes of an engine that was started on `port`.
///
/// # Errors
/// [`FailureClass::WontDie`] if processes are left. A second stop tries again.
pub(super) async fn stop_processes(monitor: &Monitor, port: u16, rules: StopRules) -> Result<Stopped, EngineFailure> {
    let orphans = terminate(monitor, rules.grace).await;
    let forced = kill_remaining(monitor, rules.kill).await?;
    wait_for_port(port, rules.port).await;
    Ok(Stopped { exit: monitor.reap_leader(), forced, orphans, memory_back: None })
}

/// Sends SIGTERM and waits for at most `grace`. Returns the number of processes that outlived the
/// leader.
async fn terminate(monitor: &Monitor, grace: Duration) -> u32 {
    let deadline = Instant::now() + grace;
    let mut orphans: Option<u32> = None;
    if monitor.exit().is_none()
        && let Some(leader) = monitor.members().iter().find(|entry| entry.pid == monitor.identity.leader)
    {
        signal(leader, Signal::SIGTERM);
    }
    let mut left = members(monitor).await;
    while !left.is_empty() && Instant::now() < deadline {
        if orphans.is_none() && monitor.exit().is_some() {
            // The list of processes may be older than the exit, and still contain the leader and
            // the last children.
            left = members(monitor).await;
            orphans = Some(u32::try_from(left.len()).unwrap_or(u32::MAX));
            left.iter().for_each(|entry| signal(entry, Signal::SIGTERM));
        }
        sleep(SCAN_INTERVAL).await;
        left = members(monitor).await;
    }
    orphans.unwrap_or_default()
}

/// Sends SIGKILL to remaining processes until all are gone. Returns whether any were left.
async fn kill_remaining(monitor: &Monitor, limit: Duration) -> Result<bool, EngineFailure> {
    let leader = monitor.identity.leader;
    let deadline = Instant::now() + limit;
    let mut left = members(monitor).await;
    let forced = !left.is_empty();
    while !left.is_empty() {
        if left.iter().any(|entry| entry.group == leader) {
            // Also reaches processes started since the scan. While the group has a member, no other
            // group gets the id.
            let _ = killpg(Pid::from_raw(leader), Signal::SIGKILL);
        }
        left.iter().for_each(|entry| signal(entry, Signal::SIGKILL));
        sleep(SCAN_INTERVAL).await;
        left = members(monitor).await;
        if !left.is_empty() && Instant::now() >= deadline {
            let left: Vec<String> =
                left.iter().map(|entry| format!("{}, state {}", entry.describe(), entry.state)).collect();
            let cause = format!("still running after SIGKILL: {}", left.join("; "));
            return Err(EngineFailure::new(FailureClass::WontDie, cause));
        }
    }
    Ok(forced)
}

/// Waits until no hidden process listens on the port. If the port is still taken after `limit`, the
/// next start reports it.
async fn wait_for_port(port: u16, limit: Duration) {
    let deadline = Instant::now() + limit;
    while table::is_held_in_hiding(port) && Instant::now() < deadline {
        sleep(SCAN_INTERVAL).await;
    }
}

/// The living members. A scan reads one file per process of the system.
async fn members(monitor: &Monitor) -> Vec<ProcessEntry> {
    // The scan takes a few milliseconds on most hosts. Other threads of the runtime serve requests
    // meanwhile.
    tokio::task::yield_now().await;
    monitor.members()
}

/// Signals a process if it is still the same.
fn signal(entry: &ProcessEntry, signal: Signal) {
    if ProcessEntry::read(entry.pid).is_some_and(|now| now.started == entry.started && now.is_alive()) {
        // An error means that the process is gone, or that we may not signal it. The next scan
        // shows that.
        let _ = kill(Pid::from_raw(entry.pid), signal);
    }
}
