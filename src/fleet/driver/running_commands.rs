//! The commands of operators that run now, of all drivers of this process.
//!
//! They are not daemons: each is waited for by the call that spawned it, and that call would fail if another one reaped its
//! command. So a command is listed from its spawn to the end of the wait, and what is listed is not reaped.

use std::collections::BTreeSet;
use std::io;

use parking_lot::{Mutex, MutexGuard};
use tokio::process::{Child, Command};

static RUNNING: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

/// The process ids of all of them. While the guard lives, none is spawned.
pub(super) fn all() -> MutexGuard<'static, BTreeSet<i32>> {
    RUNNING.lock()
}

/// A command that is listed until this is dropped.
pub(super) struct RunningCommand(Option<i32>);

impl RunningCommand {
    /// Spawns and lists it in one step, so that no reaping falls between the two.
    pub(super) fn spawn(command: &mut Command) -> io::Result<(Child, Self)> {
        let mut running = RUNNING.lock();
        let child = command.spawn()?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok());
        running.extend(pid);
        Ok((child, Self(pid)))
    }

    /// Its process group, if it was spawned with one of its own.
    pub(super) fn group(&self) -> Option<i32> {
        self.0
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            RUNNING.lock().remove(&pid);
        }
    }
}
