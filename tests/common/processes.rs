//! Processes that a test has started, itself or through a gateway.
//!
//! A variable in the environment of a process marks it; children inherit the mark.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Whether the environment of a process has a variable (`NAME=value`) for which `is` holds. The
/// environment of a process that has ended is empty.
pub(crate) fn has(pid: i32, is: impl Fn(&[u8]) -> bool) -> bool {
    let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environ.split(|byte| *byte == 0).any(is)
}

pub(crate) fn with(is: impl Fn(&[u8]) -> bool) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| has(*pid, &is)).collect()
}

/// Kills these processes, so that a failed test leaves none behind.
pub(crate) fn kill_with(is: impl Fn(&[u8]) -> bool) {
    for pid in with(is) {
        // The process may have ended by now.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}
