//! The commands of operators that run now, of all drivers of this process.
//!
//! The call that spawned a command waits for the command, and would fail if a driver reaped it as a
//! daemon. So a command is listed from the spawn to the end of the wait, and listed processes are
//! not reaped.

use std::collections::BTreeSet;
use std::io;

use parking_lot::{Mutex, MutexGuard};
use tokio::process::{Child, Command};

static RUNNING: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

/// The process ids of all commands. No command is spawned while the guard lives.
pub(super) fn all() -> MutexGuard<'static, BTreeSet<i32>> {
    RUNNING.lock()
}

/// A command is listed while this lives.
pub(super) struct RunningCommand(Option<i32>);

impl RunningCommand {
    /// Spawns and lists a command in one step, so that it cannot be reaped in between.
    pub(super) fn spawn(command: &mut Command) -> io::Result<(Child, Self)> {
        let mut running = RUNNING.lock();
        let child = command.spawn()?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok());
        running.extend(pid);
        Ok((child, Self(pid)))
    }

    /// The command's process group, if it was spawned with a separate one.
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
