//! Spawns a process with a session and a log file of its own.
//!
//! Why `setsid` of util-linux: see the head of `process`. It replaces itself by the engine without a fork when it is not
//! the leader of a group, which a child just spawned is not; so the child's id is the engine's.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use nix::sys::prctl;

use super::table::MARK;
use crate::launch::{LaunchPlan, find_program};

/// Makes this process the one that orphans of its descendants are given to. Once is enough.
fn reap_orphans() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        if let Err(error) = prctl::set_child_subreaper(true) {
            tracing::warn!(%error, "cannot become the reaper of orphans; those of engines go to init");
        }
    });
}

/// Starts the engine that `plan` describes, with its output in `log` and `mark` in its environment.
pub(super) fn spawn(plan: &LaunchPlan, log: File, mark: &str) -> io::Result<Child> {
    reap_orphans();
    let (program, arguments) = plan.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = match find_program("setsid") {
        Some(setsid) => {
            let mut command = Command::new(setsid);
            command.arg(program);
            command
        }
        None => {
            tracing::warn!("no setsid program: the engine gets a process group, but not a session of its own");
            let mut command = Command::new(program);
            command.process_group(0);
            command
        }
    };
    command.args(arguments).envs(&plan.env).env(MARK, mark);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn()
}
