//! The system's table of processes, read from `/proc`: who belongs to an engine, and who listens on a port.
//!
//! Nothing is ever chosen by its name: an unrelated `vllm serve` of somebody else's must survive whatever we do, and vLLM's
//! own children rename themselves. A process belongs to an engine when one of these holds:
//! - it is in the session or the process group of the engine's leader;
//! - the environment it was started with carries the engine's [`MARK`];
//! - its parent belongs, directly or through others;
//! - it was seen to belong earlier, and is still the same process (same id and same start time).
//!
//! Each covers a hole of the others: a child may leave the session, overwrite its environment (a title longer than its
//! command line does), or lose its parent. A child that does all three between two looks is missed.
//!
//! Linux only. Processes of other users show their session and parent, but neither environment nor sockets.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

use crate::driver::PortOwner;

/// The environment variable that all processes of an engine inherit.
pub(crate) const MARK: &str = "SLUICE_ENGINE";

/// A process at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) pid: i32,
    /// First word of its command or what it called itself; for messages only.
    pub(crate) name: String,
    /// `Z` is ended and not reaped, `X` is going.
    pub(crate) state: char,
    pub(crate) parent: i32,
    pub(crate) group: i32,
    pub(crate) session: i32,
    /// Clock ticks since boot.
    pub(crate) started: u64,
}

impl Row {
    /// Reads one process; `None` when it is gone.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// `pid (name) state ppid pgrp session ...`; the name may hold spaces and parentheses.
    fn parse(text: &str) -> Option<Self> {
        let (pid, rest) = text.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse().ok();
        Some(Self {
            pid: pid.parse().ok()?,
            name: name.to_owned(),
            state: fields.first()?.chars().next()?,
            parent: number(1)?,
            group: number(2)?,
            session: number(3)?,
            started: fields.get(19)?.parse().ok()?,
        })
    }

    /// Whether it still runs.
    pub(crate) fn lives(&self) -> bool {
        !matches!(self.state, 'Z' | 'X')
    }

    /// What identifies it over time.
    pub(crate) fn identity(&self) -> (i32, u64) {
        (self.pid, self.started)
    }

    /// For messages: `pid 71 (vllm)`.
    pub(crate) fn described(&self) -> String {
        format!("pid {} ({})", self.pid, self.name)
    }
}

/// All processes at one moment.
pub(crate) fn all() -> Vec<Row> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter_map(Row::of).collect()
}

/// Identifies this boot: process ids and start times of another one mean nothing.
pub(crate) fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The engine's mark in a process's environment; `None` when it has none, hides it or has overwritten it.
pub(crate) fn mark_of(pid: i32) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let value_in = |entry: &[u8]| {
        let value = entry.strip_prefix(MARK.as_bytes())?.strip_prefix(b"=")?;
        Some(String::from_utf8_lossy(value).into_owned())
    };
    environment.split(|byte| *byte == 0).find_map(value_in)
}

/// Whose members are looked for.
#[derive(Clone, Debug)]
pub(crate) struct Kin<'a> {
    /// The leader of the session.
    pub(crate) leader: i32,
    /// When the leader started; nothing older belongs.
    pub(crate) started: u64,
    /// The value of [`MARK`].
    pub(crate) mark: &'a str,
    /// Those that were seen to belong earlier.
    pub(crate) known: &'a HashSet<(i32, u64)>,
}

/// The processes of an engine in `table`, the ended ones too. Never this process itself.
///
/// The number of a session is not given away while anybody is in it. So it is believed unless the leader's id belongs to a
/// process that is not the leader: then the session had died out before.
pub(crate) fn members(table: &[Row], kin: &Kin<'_>) -> Vec<Row> {
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let mut found: HashSet<i32> = HashSet::new();
    let reused = table.iter().any(|row| row.pid == kin.leader && row.started != kin.started);
    for row in table.iter().filter(|row| row.pid != own && row.started >= kin.started) {
        let together = row.session == kin.leader || row.group == kin.leader || row.pid == kin.leader;
        let marked = || mark_of(row.pid).is_some_and(|mark| mark == kin.mark);
        if (together && !reused) || kin.known.contains(&row.identity()) || marked() {
            found.insert(row.pid);
        }
    }
    // Children of members, to any depth; a parent may stand behind its child in the table.
    let parents: HashMap<i32, i32> = table.iter().map(|row| (row.pid, row.parent)).collect();
    for row in table.iter().filter(|row| row.pid != own) {
        let (mut line, mut at) = (Vec::new(), row.pid);
        while at > 1 && at != own && !found.contains(&at) && line.len() < 64 {
            line.push(at);
            at = parents.get(&at).copied().unwrap_or_default();
        }
        if found.contains(&at) {
            found.extend(line);
        }
    }
    table.iter().filter(|row| found.contains(&row.pid)).cloned().collect()
}

/// The sockets that listen on `port` on any local address, by inode. `None` when the table cannot be read.
pub(crate) fn listeners(port: u16) -> Option<HashSet<u64>> {
    let mut inodes = HashSet::new();
    let mut read = false;
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let Ok(text) = fs::read_to_string(table) else { continue };
        read = true;
        inodes.extend(text.lines().skip(1).filter_map(|line| listening(line, port)));
    }
    read.then_some(inodes)
}

/// The inode of a line of `/proc/net/tcp` that listens (state 0A) on `port`.
fn listening(line: &str, port: u16) -> Option<u64> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let (_, local) = fields.get(1)?.rsplit_once(':')?;
    let listens = *fields.get(3)? == "0A" && u16::from_str_radix(local, 16).ok()? == port;
    listens.then(|| fields.get(9)?.parse().ok())?
}

/// Which of the sockets a process holds open.
pub(crate) fn holds(pid: i32, sockets: &HashSet<u64>) -> HashSet<u64> {
    let Ok(entries) = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")) else { return HashSet::new() };
    let inodes = entries.filter_map(|entry| {
        let target = fs::read_link(entry.ok()?.path()).ok()?;
        target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    });
    inodes.filter(|inode| sockets.contains(inode)).collect()
}

/// Who listens on `port`, seen from an engine with these processes.
pub(crate) fn owner(port: u16, ours: &HashSet<i32>) -> PortOwner {
    let Some(mut sockets) = listeners(port) else { return PortOwner::Unknown };
    if sockets.is_empty() {
        return PortOwner::Free;
    }
    for pid in ours {
        for inode in holds(*pid, &sockets) {
            sockets.remove(&inode);
        }
    }
    if sockets.is_empty() {
        return PortOwner::Engine;
    }
    let other = all().into_iter().find(|row| !holds(row.pid, &sockets).is_empty());
    PortOwner::Other(other.map_or_else(|| "a process of another user".to_owned(), |row| row.described()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(pid: i32, parent: i32, session: i32, started: u64) -> Row {
        Row { pid, name: "x".into(), state: 'S', parent, group: session, session, started }
    }

    fn found(table: &[Row], known: &[(i32, u64)]) -> Vec<i32> {
        let known = known.iter().copied().collect();
        let kin = Kin { leader: 9_000_001, started: 50, mark: "nobody's", known: &known };
        members(table, &kin).into_iter().map(|row| row.pid).collect()
    }

    #[test]
    fn a_line_with_a_nasty_name_is_read() {
        let line = "71 (a b) (c) S 1 70 69 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 0 0";
        let row = Row::parse(line).unwrap();
        assert_eq!((row.pid, row.name.as_str(), row.state), (71, "a b) (c", 'S'));
        assert_eq!((row.parent, row.group, row.session, row.started), (1, 70, 69, 12345));
    }

    #[test]
    fn this_process_is_in_the_table_and_shows_its_port() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(all().iter().any(|row| row.pid == own && row.lives()));
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let sockets = listeners(socket.local_addr().unwrap().port()).unwrap();
        assert_eq!(holds(own, &sockets).len(), 1);
    }

    #[test]
    fn members_are_found_by_session_by_descent_and_by_memory() {
        let (leader, by_session, child, grandchild, remembered) =
            (9_000_001, 9_000_002, 9_000_003, 9_000_004, 9_000_005);
        let table = [
            row(grandchild, child, grandchild, 70),
            row(leader, 1, leader, 50),
            row(by_session, 1, leader, 60),
            row(child, by_session, child, 65),
            row(remembered, 1, remembered, 80),
            row(9_000_006, 1, 9_000_006, 90),
        ];
        assert_eq!(found(&table, &[(remembered, 80)]), [grandchild, leader, by_session, child, remembered]);
        // The id was given to another process since: a later start.
        assert_eq!(found(&table, &[(remembered, 79)]), [grandchild, leader, by_session, child]);
    }

    #[test]
    fn a_session_whose_number_is_anothers_by_now_is_not_believed() {
        let table = [row(9_000_001, 1, 9_000_001, 500), row(9_000_002, 9_000_001, 9_000_001, 501)];
        assert!(found(&table, &[]).is_empty());
        let older = [row(9_000_002, 1, 9_000_001, 40)];
        assert!(found(&older, &[]).is_empty(), "older than the leader");
    }
}
