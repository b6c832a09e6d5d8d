//! Spawns an engine in a new session, with the output in a log file.
//!
//! Unsafe code is forbidden in this project, so none of our code can run between fork and exec. So
//! util-linux's `setsid` makes the session. It replaces itself by the engine. It forks before that
//! only if it leads a process group. A new child leads no group, so the process id of the child is
//! also the engine's.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use nix::sys::prctl;

use super::table::MARK;
use crate::launch::{LaunchPlan, find_program};

/// Makes this process the parent of descendants whose parent ended. Later calls do nothing.
fn become_subreaper() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        if let Err(error) = prctl::set_child_subreaper(true) {
            tracing::warn!(%error, "cannot become the reaper of orphaned engine processes; init reaps them instead");
        }
    });
}

/// Starts the engine of `plan`, with the output in `log` and `mark` in the environment.
pub(super) fn spawn(plan: &LaunchPlan, log: File, mark: &str) -> io::Result<Child> {
    become_subreaper();
    let (program, arguments) = plan.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = match find_program("setsid") {
        Some(setsid) => {
            let mut command = Command::new(setsid);
            command.arg(program);
            command
        }
        None => {
            tracing::warn!("no setsid program in PATH: the engine gets a process group, but no session of its own");
            let mut command = Command::new(program);
            command.process_group(0);
            command
        }
    };
    command.args(arguments).envs(&plan.env).env(MARK, mark);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn()
}
