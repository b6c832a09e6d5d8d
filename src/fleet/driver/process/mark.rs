//! The mark of an engine's processes: a value in the environment that they inherit.
//!
//! `FOLDER#BACKEND#TOKEN.START`: the state folder, the backend, a digest of both by the folder's
//! random key, and the start time. Only the gateway's user can read the key and the environment. So
//! neither a process that a forged journal names, nor one with the id of an ended engine, has the
//! token. A process must also belong to the gateway's user ([`carries`]).
//!
//! Marks of an earlier version have no token. The gateway takes over an engine with such a mark
//! only if mark, process id and start time are exactly as in the journal.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::table::{self, Membership, ProcessEntry, ProcessId};
use crate::state_folder;
use sluice_config::owner::own_user;

/// The id of root, which may act for all other users.
const ROOT: u32 = 0;

/// Identifies an engine's processes over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProcessIdentity {
    pub(super) leader: i32,
    pub(super) started: u64,
    pub(super) boot: String,
    pub(super) mark: String,
}

impl ProcessIdentity {
    /// The features that the engine's processes share. `known`: processes that were found to belong
    /// to the engine earlier.
    pub(super) fn membership<'a>(&'a self, known: &'a HashSet<ProcessId>) -> Membership<'a> {
        Membership { leader: self.leader, started: self.started, mark: &self.mark, known }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Marks {
    folder: PathBuf,
    name: String,
}

impl Marks {
    /// The marks of a backend of the gateway with this state `folder`.
    pub(super) fn new(folder: &Path, name: &str) -> Self {
        // The mark contains the folder, so it must not depend on the spelling of the path.
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Self { folder, name: name.to_owned() }
    }

    /// The beginning of all marks of the backend, including the marks of an earlier version.
    fn prefix(&self) -> String {
        format!("{}#{}#", self.folder.display(), self.name)
    }

    fn token(&self, key: &[u8; state_folder::KEY_BYTES]) -> String {
        state_folder::digest(key, format!("engine {}", self.prefix()).as_bytes())
    }

    /// Makes a mark for a new engine, and the key if it is missing.
    ///
    /// # Errors
    /// The key cannot be read or written.
    pub(super) fn new_mark(&self) -> io::Result<String> {
        state_folder::create(&self.folder)?;
        let token = self.token(&state_folder::key(&self.folder)?);
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Ok(format!("{}{token}.{:x}", self.prefix(), since.as_nanos()))
    }

    /// Whether a mark has the token of this folder and backend.
    pub(super) fn has_token(&self, mark: &str) -> bool {
        let Ok(key) = state_folder::existing_key(&self.folder) else { return false };
        let rest = mark.strip_prefix(&self.prefix()).and_then(|rest| rest.strip_prefix(&self.token(&key)));
        rest.is_some_and(|rest| rest.starts_with('.'))
    }

    /// Whether the journal may name this mark: it has the token, or the form of an earlier version.
    pub(super) fn may_be_recorded(&self, mark: &str) -> bool {
        let is_earlier = || {
            let rest = mark.strip_prefix(&self.prefix());
            rest.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
        };
        self.has_token(mark) || is_earlier()
    }

    /// The processes of the gateway's user that carry a mark with the token, and the marks.
    pub(super) fn find(&self) -> impl Iterator<Item = (ProcessEntry, String)> {
        let own = own_user();
        let marked = move |entry: ProcessEntry| {
            let mark = table::mark_of(entry.pid).filter(|mark| self.has_token(mark))?;
            (table::user_of(entry.pid) == Some(own)).then_some((entry, mark))
        };
        table::all().into_iter().filter(ProcessEntry::is_alive).filter_map(marked)
    }

    /// Whether a process of the gateway's user carries a mark of the backend, of this or an earlier
    /// version. Only for decisions that touch no process.
    pub(super) fn is_carried(&self) -> bool {
        let (own, prefix) = (own_user(), self.prefix());
        let marked = |entry: &ProcessEntry| {
            entry.is_alive()
                && table::mark_of(entry.pid).is_some_and(|mark| mark.starts_with(&prefix))
                && table::user_of(entry.pid) == Some(own)
        };
        table::all().iter().any(marked)
    }
}

/// Whether `table` has this user's engine of this identity: a process, not older than the engine,
/// carries the engine's mark. For a gateway of root, the leader may have changed user. Otherwise a
/// process of another user never counts, even with the mark. The session and group of the gateway
/// itself are never an engine.
pub(super) fn carries(table: &[ProcessEntry], identity: &ProcessIdentity) -> bool {
    let own = table.iter().find(|entry| entry.pid == table::own_pid());
    let is_own = |id: i32| own.is_some_and(|own| [own.pid, own.group, own.session].contains(&id));
    if identity.leader <= 1 || is_own(identity.leader) {
        return false;
    }
    let user = own_user();
    let is_leader = |entry: &ProcessEntry| entry.id() == (identity.leader, identity.started);
    let of_user = |entry: &ProcessEntry| {
        let owner = table::user_of(entry.pid);
        owner == Some(user) || (user == ROOT && owner.is_some() && is_leader(entry))
    };
    let marked = |entry: &&ProcessEntry| {
        entry.is_alive()
            && entry.started >= identity.started
            && table::mark_of(entry.pid).is_some_and(|mark| mark == identity.mark)
            && of_user(entry)
    };
    let carriers: Vec<&ProcessEntry> = table.iter().filter(marked).collect();
    let leads = |entry: &&ProcessEntry| [entry.pid, entry.group, entry.session].contains(&identity.leader);
    match table.iter().find(|entry| entry.pid == identity.leader && entry.is_alive()) {
        // A leader that lost the environment is identified by the processes that it leads.
        Some(leader) if is_leader(leader) => carriers.iter().any(leads),
        // The leader is gone, or the id was reused. Processes with the mark are the rest of the
        // engine.
        Some(_) | None => !carriers.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_known_by_the_key_of_its_folder_and_by_its_backend() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let marks = Marks::new(one.path(), "p/a");
        let mark = marks.new_mark().unwrap();
        assert!(marks.has_token(&mark) && marks.may_be_recorded(&mark), "{mark}");
        assert!(!Marks::new(one.path(), "p/b").may_be_recorded(&mark));
        assert!(!Marks::new(two.path(), "p/a").may_be_recorded(&mark));
        let earlier = format!("{}#p/a#18c0ffee", one.path().display());
        assert!(!marks.has_token(&earlier) && marks.may_be_recorded(&earlier));
        for forged in ["", "x", "#p/a#", &format!("{}#p/a#{}.1", one.path().display(), "0".repeat(16))] {
            assert!(!marks.may_be_recorded(forged), "{forged}");
        }
        // Another key makes the mark invalid, as in a copy of the folder without the key.
        std::fs::write(one.path().join("key"), [7; 32]).unwrap();
        assert!(!marks.may_be_recorded(&mark));
    }
}
