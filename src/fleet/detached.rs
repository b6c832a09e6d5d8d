//! Starts a newer gateway, which takes over, as a process that is not a child of this one.
//!
//! systemd waits for the end of a new main process only if that is a child of systemd. So a shell
//! starts the new gateway and ends, and the nearest reaper above this process adopts it. Meanwhile
//! this process is no reaper.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Command;

use nix::sys::prctl;

/// Starts `program` with one more environment variable. Blocks for the milliseconds that a shell
/// takes.
///
/// # Errors
/// There is no shell, or it failed. If `program` cannot be started, only the shell's stderr shows
/// it.
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
