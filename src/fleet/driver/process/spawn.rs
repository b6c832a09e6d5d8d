//! Spawns an engine in a session of its own, with its output in a log file.
//!
//! Unsafe code is forbidden in this project, so no code of ours can run between fork and exec. The session therefore comes
//! from the `setsid` program of util-linux. It replaces itself by the engine without a fork unless it leads a process group,
//! which a newly spawned child does not; so the child's process id is the engine's.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use nix::sys::prctl;

use super::table::MARK;
use crate::launch::{LaunchPlan, find_program};

/// Makes this process the parent of descendants whose own parent ended. Once is enough.
fn become_subreaper() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        if let Err(error) = prctl::set_child_subreaper(true) {
            tracing::warn!(%error, "cannot become the reaper of orphaned engine processes; init reaps them instead");
        }
    });
}

/// Starts the engine that `plan` describes, with its output in `log` and `mark` in its environment.
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
