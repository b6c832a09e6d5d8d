//! Ends an engine and everything that descends from it, and sees that nothing is left.
//!
//! 1. SIGTERM to the leader, which ends its own children in order: with `--shutdown-timeout` it lets requests finish, which a
//!    signal to the whole group would cut short. Members that outlive it are told too.
//! 2. After the grace, SIGKILL to the group and to every member, again and again: new ones may have been born meanwhile.
//! 3. The leader is reaped last. Until then its number, and so its session's, cannot become anybody else's.
//!
//! A member is signalled by its number right after it was read with its start time. A number that is given away within those
//! microseconds would be hit; there are four million of them on today's systems, handed out in turn.

use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use tokio::time::{Instant, sleep};

use super::monitor::Monitor;
use super::table::Row;
use crate::driver::{EngineFailure, StopRules, Stopped};
use sluice_core::vllm::failure::FailureClass;

/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// Ends all processes of an engine.
///
/// # Errors
/// [`FailureClass::WontDie`] when some are left; a second stop tries again.
pub(super) async fn processes(monitor: &Monitor, rules: StopRules) -> Result<Stopped, EngineFailure> {
    let leader = monitor.trace.leader;
    let grace_ends = Instant::now() + rules.grace;
    let mut orphans: Option<u32> = None;
    if monitor.exit().is_none() {
        signal_one(&monitor.members(), leader, Signal::SIGTERM);
    }
    let mut left = members(monitor).await;
    while !left.is_empty() && Instant::now() < grace_ends {
        if orphans.is_none() && monitor.exit().is_some() {
            orphans = Some(u32::try_from(left.len()).unwrap_or(u32::MAX));
            left.iter().for_each(|row| signal(row, Signal::SIGTERM));
        }
        sleep(LOOK_EVERY).await;
        left = members(monitor).await;
    }
    let forced = !left.is_empty();
    let kill_ends = Instant::now() + rules.kill;
    while !left.is_empty() {
        if left.iter().any(|row| row.group == leader) {
            // Also reaches what was born since the look. The number is the group's: a member was just seen in it.
            let _ = killpg(Pid::from_raw(leader), Signal::SIGKILL);
        }
        left.iter().for_each(|row| signal(row, Signal::SIGKILL));
        sleep(LOOK_EVERY).await;
        left = members(monitor).await;
        if !left.is_empty() && Instant::now() >= kill_ends {
            let who: Vec<String> = left.iter().map(|row| format!("{}, state {}", row.described(), row.state)).collect();
            return Err(EngineFailure::new(
                FailureClass::WontDie,
                format!("still there after SIGKILL: {}", who.join("; ")),
            ));
        }
    }
    Ok(Stopped { exit: monitor.reap_leader(), forced, orphans: orphans.unwrap_or_default(), memory_back: None })
}

/// The living members: a scan reads one file per process of the system.
async fn members(monitor: &Monitor) -> Vec<Row> {
    // A few milliseconds at most hosts' numbers of processes; the runtime has other threads for requests.
    tokio::task::yield_now().await;
    monitor.members()
}

fn signal_one(members: &[Row], pid: i32, what: Signal) {
    if let Some(row) = members.iter().find(|row| row.pid == pid) {
        signal(row, what);
    }
}

/// Signals a process if it is still the one that was seen.
fn signal(row: &Row, what: Signal) {
    if Row::of(row.pid).is_some_and(|now| now.started == row.started && now.lives()) {
        // An error means that it is gone, which is what is wanted, or not ours to signal, which the next look shows.
        let _ = kill(Pid::from_raw(row.pid), what);
    }
}
