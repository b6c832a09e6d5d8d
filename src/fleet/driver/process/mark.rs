//! The mark by which the processes of an engine are known: a value in the environment that they
//! inherit.
//!
//! `FOLDER#BACKEND#TOKEN.START`: the folder of the state, the backend, a digest of both by the
//! random key of the folder, and the time of the start. Only the gateway's user can read the key
//! and the environment of its engines, so no other process has the token: not one that a forged
//! journal names, and not one that got the id of an engine. A process counts only if the user of
//! the gateway owns it, too ([`carries`]).
//!
//! A mark of an earlier version has no token. An engine with one is taken over by the journal that
//! describes it, as long as it has exactly the mark, the process id and the start time that the
//! journal says; it is never found otherwise.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::table::{self, Membership, ProcessEntry, ProcessId};
use crate::state_folder;
use sluice_gateway::owner::own_user;

/// The user that may act for all others.
const ROOT: u32 = 0;

/// Identifies the processes of an engine over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProcessIdentity {
    pub(super) leader: i32,
    pub(super) started: u64,
    pub(super) boot: String,
    pub(super) mark: String,
}

impl ProcessIdentity {
    /// What its processes have in common. `known`: those that were found to belong to it earlier.
    pub(super) fn membership<'a>(&'a self, known: &'a HashSet<ProcessId>) -> Membership<'a> {
        Membership { leader: self.leader, started: self.started, mark: &self.mark, known }
    }
}

/// The marks of the engines of one backend.
#[derive(Clone, Debug)]
pub(super) struct Marks {
    folder: PathBuf,
    name: String,
}

impl Marks {
    /// Those of a backend of the gateway with this state `folder`.
    pub(super) fn new(folder: &Path, name: &str) -> Self {
        // The mark contains the folder; it must be the same however the folder was written.
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Self { folder, name: name.to_owned() }
    }

    /// What all marks of the backend begin with, also those of earlier versions.
    fn prefix(&self) -> String {
        format!("{}#{}#", self.folder.display(), self.name)
    }

    fn token(&self, key: &[u8; state_folder::KEY_BYTES]) -> String {
        state_folder::digest(key, format!("engine {}", self.prefix()).as_bytes())
    }

    /// A mark for an engine that is about to start. The key is created where there is none.
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

    /// Whether the journal may describe an engine by this mark: one with the token, or one of an
    /// earlier version.
    pub(super) fn may_be_recorded(&self, mark: &str) -> bool {
        let is_earlier = || {
            let rest = mark.strip_prefix(&self.prefix());
            rest.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
        };
        self.has_token(mark) || is_earlier()
    }

    /// The processes of the own user that carry a mark with the token, with it.
    pub(super) fn find(&self) -> impl Iterator<Item = (ProcessEntry, String)> {
        let own = own_user();
        let marked = move |entry: ProcessEntry| {
            let mark = table::mark_of(entry.pid).filter(|mark| self.has_token(mark))?;
            (table::user_of(entry.pid) == Some(own)).then_some((entry, mark))
        };
        table::all().into_iter().filter(ProcessEntry::is_alive).filter_map(marked)
    }

    /// Whether a process of the own user carries a mark of the backend, perhaps of an earlier
    /// version. For decisions that touch no process.
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

/// Whether the processes that an identity describes are an engine of this user: one of them carries
/// its mark, and is not older. The leader may have changed its user since its start, where the
/// gateway is root's. Otherwise a process of another user does not count, whatever it carries.
///
/// The session and the group of the gateway itself are never an engine.
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
        // A leader that lost its environment is known by what it leads.
        Some(leader) if is_leader(leader) => carriers.iter().any(leads),
        // The leader is gone, or another process has its id: what carries the mark is left of the
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
        // Another key, as in a copy that was made without it.
        std::fs::write(one.path().join("key"), [7; 32]).unwrap();
        assert!(!marks.may_be_recorded(&mark));
    }
}
