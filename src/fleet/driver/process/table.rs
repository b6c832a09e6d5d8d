//! The system's process table: the processes of an engine, and the process that listens on a port.
//!
//! No process is chosen by name: an unrelated `vllm serve` must survive, and vLLM's children rename
//! themselves. A process belongs to an engine if one of these holds:
//! - it is in the session or process group of the engine's leader;
//! - it started with the engine's [`MARK`] in its environment, and the gateway's user owns it;
//! - the parent belongs, directly or through other processes;
//! - it belonged earlier, and is the same process (id and start time).
//!
//! Each rule covers a gap of the others: a child may leave the session, overwrite the environment
//! (with a title longer than the command line), or lose the parent. A child that does all three
//! between two scans is missed. Linux only. Another user's environment and sockets cannot be read.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};

use procfs::process::{FDTarget, Process, Stat, all_processes};

use crate::driver::PortOwner;
use sluice_config::owner::own_user;

/// The environment variable that all processes of an engine inherit.
pub(crate) const MARK: &str = "SLUICE_ENGINE";
/// Longest chain of parents that is followed.
const DEPTH_MAX: usize = 64;

/// In messages, the holder of a socket that no readable process has.
const HIDDEN_HOLDER: &str = "a process that is ending or belongs to another user";

/// A process id, and the start time in clock ticks since boot.
pub(crate) type ProcessId = (i32, u64);

/// A process at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessEntry {
    pub(crate) pid: i32,
    /// The name of the command, or one that the process chose; for messages only.
    pub(crate) name: String,
    /// `Z`: ended and not reaped; `X`: about to disappear.
    pub(crate) state: char,
    pub(crate) parent: i32,
    pub(crate) group: i32,
    pub(crate) session: i32,
    /// Clock ticks since boot.
    pub(crate) started: u64,
    /// Threads that have not ended, plus the first one even if it has.
    pub(crate) threads: i64,
}

impl From<Stat> for ProcessEntry {
    fn from(stat: Stat) -> Self {
        Self {
            pid: stat.pid,
            name: stat.comm,
            state: stat.state,
            parent: stat.ppid,
            group: stat.pgrp,
            session: stat.session,
            started: stat.starttime,
            threads: stat.num_threads,
        }
    }
}

impl ProcessEntry {
    /// Reads one process; `None` if it is gone.
    pub(crate) fn read(pid: i32) -> Option<Self> {
        Some(Process::new(pid).ok()?.stat().ok()?.into())
    }

    /// Whether the process runs. `Z` is the state of the first thread. If that thread has ended,
    /// descriptors cannot be read, but other threads keep memory and sockets. After SIGKILL, this
    /// state lasts until the last thread has freed the memory.
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self.state, 'Z' | 'X') || self.threads > 1
    }

    pub(crate) fn id(&self) -> ProcessId {
        (self.pid, self.started)
    }

    /// For messages: `pid 71 (vllm)`.
    pub(crate) fn describe(&self) -> String {
        format!("pid {} ({})", self.pid, self.name)
    }
}

pub(crate) fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap_or_default()
}

/// All processes, without any that disappear during the reading.
pub(crate) fn all() -> Vec<ProcessEntry> {
    let Ok(processes) = all_processes() else { return Vec::new() };
    processes.filter_map(|process| Some(process.ok()?.stat().ok()?.into())).collect()
}

/// Identifies this boot: process ids and start times of other boots are meaningless.
pub(crate) fn boot_id() -> String {
    procfs::sys::kernel::random::boot_id().unwrap_or_default()
}

/// The mark in the environment of a process; `None` if absent, unreadable or overwritten.
pub(crate) fn mark_of(pid: i32) -> Option<String> {
    let environment = Process::new(pid).ok()?.environ().ok()?;
    Some(environment.get(OsStr::new(MARK))?.to_string_lossy().into_owned())
}

/// The user that a process acts as; `None` if the process is gone.
pub(crate) fn user_of(pid: i32) -> Option<u32> {
    Process::new(pid).ok()?.uid().ok()
}

/// The features that the processes of one engine share.
#[derive(Clone, Debug)]
pub(crate) struct Membership<'a> {
    pub(crate) leader: i32,
    /// When the leader started; older processes do not belong.
    pub(crate) started: u64,
    pub(crate) mark: &'a str,
    /// Processes found to belong earlier.
    pub(crate) known: &'a HashSet<ProcessId>,
}

/// The processes of an engine in `table`, including ended ones, but never this process.
///
/// The system does not reuse the id of a session or group that has processes. So the session counts
/// while it contains the leader or another known process of the engine. Otherwise the engine had
/// ended, and another session may have the id.
pub(crate) fn members(table: &[ProcessEntry], engine: &Membership<'_>) -> Vec<ProcessEntry> {
    let own = own_pid();
    let mut found: HashSet<i32> = HashSet::new();
    let together = |entry: &ProcessEntry| [entry.session, entry.group, entry.pid].contains(&engine.leader);
    let is_leader = |entry: &ProcessEntry| entry.id() == (engine.leader, engine.started);
    let user = own_user();
    let marked = |entry: &ProcessEntry| {
        mark_of(entry.pid).is_some_and(|mark| mark == engine.mark)
            && (is_leader(entry) || user_of(entry.pid) == Some(user))
    };
    let known = |entry: &ProcessEntry| engine.known.contains(&entry.id());
    let reused = table.iter().any(|entry| entry.pid == engine.leader && entry.started != engine.started);
    let mut in_session = table.iter().filter(|entry| entry.started >= engine.started && together(entry));
    let is_led = !reused && in_session.any(|entry| is_leader(entry) || known(entry) || marked(entry));
    for entry in table.iter().filter(|entry| entry.pid != own && entry.started >= engine.started) {
        if (is_led && together(entry)) || known(entry) || marked(entry) {
            found.insert(entry.pid);
        }
    }
    // Children of members, to any depth; a parent may follow the child in the table.
    let parents: HashMap<i32, i32> = table.iter().map(|entry| (entry.pid, entry.parent)).collect();
    for entry in table.iter().filter(|entry| entry.pid != own) {
        let (mut chain, mut at) = (Vec::new(), entry.pid);
        while at > 1 && at != own && !found.contains(&at) && chain.len() < DEPTH_MAX {
            chain.push(at);
            at = parents.get(&at).copied().unwrap_or_default();
        }
        if found.contains(&at) {
            found.extend(chain);
        }
    }
    table.iter().filter(|entry| found.contains(&entry.pid)).cloned().collect()
}

/// The sockets that listen on `port` at any local address, by inode. `None` if neither table (IPv4,
/// IPv6) can be read.
fn listening_sockets(port: u16) -> Option<HashSet<u64>> {
    let tables: Vec<File> = ["/proc/net/tcp", "/proc/net/tcp6"].into_iter().flat_map(File::open).collect();
    if tables.is_empty() {
        return None;
    }
    Some(tables.into_iter().flat_map(|table| listening_in(BufReader::new(table), port)).collect())
}

/// The sockets in one table that listen on `port`. The kernel writes the table in pieces while
/// sockets come and go, so invalid lines are skipped. It lists listening sockets first. The rest is
/// not read, because with thousands of connections the kernel takes milliseconds to write it.
fn listening_in(table: impl BufRead, port: u16) -> impl Iterator<Item = u64> {
    const LISTEN: &str = "0A";
    let read = |line: std::io::Result<String>| {
        let line = line.ok()?;
        let mut fields = line.split_whitespace();
        let (local, state) = (fields.nth(1)?, fields.nth(1)?);
        let port = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
        Some((port, state == LISTEN, fields.nth(5).and_then(|inode| inode.parse().ok())))
    };
    let entries = table.lines().filter_map(read).take_while(|(_, listens, _)| *listens);
    entries.filter_map(move |(at, _, inode)| inode.filter(|_| at == port))
}

/// The sockets of the set that a process holds open; none if the descriptors cannot be read.
fn held_sockets(pid: i32, sockets: &HashSet<u64>) -> HashSet<u64> {
    let descriptors = Process::new(pid).and_then(|process| process.fd()).into_iter().flatten().flatten();
    let inodes = descriptors.filter_map(|descriptor| match descriptor.target {
        FDTarget::Socket(inode) => Some(inode),
        _ => None,
    });
    inodes.filter(|inode| sockets.contains(inode)).collect()
}

/// The process that listens on `port`, as seen from an engine with these processes.
pub(crate) fn port_owner(port: u16, engine: &HashSet<i32>) -> PortOwner {
    let Some(mut sockets) = listening_sockets(port) else { return PortOwner::Unknown };
    if sockets.is_empty() {
        return PortOwner::Free;
    }
    for pid in engine {
        for inode in held_sockets(*pid, &sockets) {
            sockets.remove(&inode);
        }
    }
    if sockets.is_empty() {
        return PortOwner::Engine;
    }
    PortOwner::Other(holder(&sockets).map_or_else(|| HIDDEN_HOLDER.to_owned(), |entry| entry.describe()))
}

/// The process that holds one of these sockets. `None`: the holder belongs to another user, or is
/// ending and has closed the descriptors before the socket.
fn holder(sockets: &HashSet<u64>) -> Option<ProcessEntry> {
    all().into_iter().find(|entry| !held_sockets(entry.pid, sockets).is_empty())
}

/// Whether a socket listens on `port` that no readable process holds.
pub(crate) fn is_held_in_hiding(port: u16) -> bool {
    listening_sockets(port).is_some_and(|sockets| !sockets.is_empty() && holder(&sockets).is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(pid: i32, parent: i32, session: i32, started: u64) -> ProcessEntry {
        ProcessEntry { pid, name: "x".into(), state: 'S', parent, group: session, session, started, threads: 1 }
    }

    fn found(table: &[ProcessEntry], known: &[ProcessId]) -> Vec<i32> {
        let known = known.iter().copied().collect();
        let engine = Membership { leader: 9_000_001, started: 50, mark: "no-engine", known: &known };
        members(table, &engine).into_iter().map(|entry| entry.pid).collect()
    }

    #[test]
    fn this_process_is_in_the_table_and_shows_its_port() {
        let own = own_pid();
        assert!(all().iter().any(|entry| entry.pid == own && entry.is_alive()));
        assert_eq!(
            ProcessEntry::read(own).map(|entry| entry.parent),
            Some(std::os::unix::process::parent_id().cast_signed())
        );
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let sockets = listening_sockets(socket.local_addr().unwrap().port()).unwrap();
        assert_eq!(held_sockets(own, &sockets).len(), 1);
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        assert_eq!(boot_id(), boot.trim(), "the journal compares it with what older gateways wrote");
    }

    #[test]
    fn a_line_that_cannot_be_read_hides_no_other() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0\n\
             1: 0100007F:1F40 00000000:0000 0A 00000000:000\n\
             2: garbage\n\
             3: 00000000000000000000000000000000:1F40 0:0000 0A 00000000:00000000 00:00000000 00000000 0 0 13 1 0 100 0 0 10 0\n\
             4: 0100007F:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 14 1 0 100 0 0 10 0\n\
             5: 0100007F:1F40 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 12 1 0 20 4 30 10 -1\n";
        assert_eq!(listening_in(table.as_bytes(), 0x1F40).collect::<Vec<_>>(), [11, 13]);
    }

    #[test]
    fn a_process_that_is_gone_is_read_as_none() {
        assert_eq!((ProcessEntry::read(i32::MAX), mark_of(i32::MAX)), (None, None));
        assert!(held_sockets(i32::MAX, &HashSet::from([1])).is_empty());
    }

    #[test]
    fn members_are_found_by_session_by_descent_and_by_memory() {
        let (leader, by_session, child, grandchild, remembered) =
            (9_000_001, 9_000_002, 9_000_003, 9_000_004, 9_000_005);
        let table = [
            entry(grandchild, child, grandchild, 70),
            entry(leader, 1, leader, 50),
            entry(by_session, 1, leader, 60),
            entry(child, by_session, child, 65),
            entry(remembered, 1, remembered, 80),
            entry(9_000_006, 1, 9_000_006, 90),
        ];
        assert_eq!(found(&table, &[(remembered, 80)]), [grandchild, leader, by_session, child, remembered]);
        // The remembered id was reused by a process that started later.
        assert_eq!(found(&table, &[(remembered, 79)]), [grandchild, leader, by_session, child]);
    }

    #[test]
    fn a_session_whose_id_was_reused_does_not_count() {
        let table = [entry(9_000_001, 1, 9_000_001, 500), entry(9_000_002, 9_000_001, 9_000_001, 501)];
        assert!(found(&table, &[]).is_empty());
        let older = [entry(9_000_002, 1, 9_000_001, 40)];
        assert!(found(&older, &[]).is_empty(), "older than the leader");
    }

    #[test]
    fn a_session_in_which_no_process_is_known_any_more_does_not_count() {
        // The engine has ended. A process with the leader's id began a session and ended, so the
        // children there are foreign.
        let foreign = entry(9_000_002, 1, 9_000_001, 60);
        assert!(found(std::slice::from_ref(&foreign), &[]).is_empty());
        assert_eq!(found(&[foreign, entry(9_000_003, 1, 9_000_001, 55)], &[(9_000_003, 55)]), [9_000_002, 9_000_003]);
    }
}
