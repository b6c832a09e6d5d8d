//! `sluice serve` as a process, in a folder that has `sluice.toml` and the log.
//!
//! A test may start several gateways in one folder, one after the other: all append to one log.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

use crate::program::binary;

/// Starts a gateway with these further arguments. It is killed when the child is dropped. The
/// gateway finds programs in the folder `bin` before programs of the same name elsewhere.
pub(crate) fn serve(folder: &Path, arguments: &[&str]) -> anyhow::Result<Child> {
    let log = File::options().create(true).append(true).open(folder.join("log"))?;
    let mut command = Command::new(binary());
    command.arg("serve").args(arguments).arg("--config").arg(folder.join("sluice.toml"));
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", folder.join("bin").display()));
    command.current_dir(folder).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    Ok(command.kill_on_drop(true).spawn()?)
}

pub(crate) fn signal(child: &Child, signal: Signal) -> anyhow::Result<()> {
    let id = child.id().context("the gateway has ended")?;
    Ok(kill(Pid::from_raw(i32::try_from(id)?), signal)?)
}

pub(crate) fn log(folder: &Path, lines: usize) -> String {
    let text = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
