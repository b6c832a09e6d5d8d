//! Starts a process that is no child of this one: a newer gateway that is to take over.
//!
//! systemd waits for the end of its main process only if that is a child of its own. So a shell starts the process and ends, and
//! the process becomes a child of the nearest reaper above this one. For that moment this process is no reaper of orphans itself.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Command;

use nix::sys::prctl;

/// Starts `program` with a variable in its environment. Blocks for the milliseconds that a shell takes.
///
/// # Errors
/// There is no shell, or it failed. That the program cannot be started, the shell says on stderr.
pub fn start_detached(program: &Path, arguments: Vec<OsString>, (name, value): (&str, String)) -> io::Result<()> {
    let reaps = prctl::get_child_subreaper()?;
    prctl::set_child_subreaper(false)?;
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "\"$@\" </dev/null &", "sh"]).arg(program).args(arguments).env(name, value);
    let ended = command.status();
    prctl::set_child_subreaper(reaps)?;
    match ended? {
        status if status.success() => Ok(()),
        status => Err(io::Error::other(format!("the shell ended with {status}"))),
    }
}
