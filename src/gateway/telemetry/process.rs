//! Metrics of the gateway's process: CPU, memory, file descriptors, start time.
//!
//! The values are read from `/proc` at scrape time. A system without `/proc` has no such metrics.
//! Ticks of `/proc/self/stat` are 1/100 s on every Linux (USER_HZ is part of its ABI).

use nix::sys::resource::{Resource, getrlimit};

const USER_HZ: f64 = 100.0;
/// Fields of `/proc/self/stat`, counted from the command's closing parenthesis.
const UTIME: usize = 11;
const STIME: usize = 12;
const START: usize = 19;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Process {
    /// User and system time.
    pub(super) cpu_seconds: f64,
    pub(super) resident_bytes: u64,
    pub(super) open_fds: u64,
    pub(super) max_fds: u64,
    /// Seconds since 1970.
    pub(super) start_seconds: f64,
}

/// Reads the state from `/proc`, if it is readable.
pub(super) fn read() -> Option<Process> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let ticks = |field: usize| -> Option<f64> { fields.get(field)?.parse().ok() };
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let resident_kib: u64 = value(&status, "VmRSS:")?;
    let boot: f64 = value(&std::fs::read_to_string("/proc/stat").ok()?, "btime")?;
    Some(Process {
        cpu_seconds: (ticks(UTIME)? + ticks(STIME)?) / USER_HZ,
        resident_bytes: resident_kib * 1024,
        open_fds: std::fs::read_dir("/proc/self/fd").ok()?.count() as u64,
        max_fds: getrlimit(Resource::RLIMIT_NOFILE).ok()?.0,
        start_seconds: boot + ticks(START)? / USER_HZ,
    })
}

/// The first word after `key` at the beginning of a line.
fn value<T: std::str::FromStr>(text: &str, key: &str) -> Option<T> {
    let line = text.lines().find(|line| line.starts_with(key))?;
    line[key.len()..].split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn our_own_process_is_readable_and_plausible() {
        let process = read().unwrap();
        assert!(process.resident_bytes > 1 << 20);
        assert!(process.open_fds >= 3 && process.open_fds <= process.max_fds);
        assert!(process.start_seconds > 1.5e9);
    }
}
