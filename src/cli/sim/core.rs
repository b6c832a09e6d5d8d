//! The engine's process: a child named `VLLM::EngineCore` that only holds the GPU.
//!
//! The steps run in the parent, but a supervisor sees the same processes as with vLLM: a second
//! process in the same group, with workers below it for several GPUs. The child ends when the
//! parent shuts down, and outlives a parent that was killed, for `--sim-orphan` seconds. The GPU is
//! a file (`--sim-device`) that the child locks and in which it records the memory use. A second
//! engine cannot take the file until the child has ended.
//!
//! The child is this program again, with a name as the only argument and options in the
//! environment. The child's output is closed, so that an orphan holds no pipe of the process that
//! started the parent. While the engine sleeps, the child frees the device ([`Holder`]).

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Environment variable with the role of a child.
const ROLE: &str = "SLUICE_SIM_PROCESS";
/// The process id of the parent. The child cannot ask the system for it, because the parent may be
/// killed before the child runs.
const PARENT: &str = "SLUICE_SIM_PARENT";
const DEVICE: &str = "SLUICE_SIM_DEVICE";
const BYTES: &str = "SLUICE_SIM_BYTES";
const WORKERS: &str = "SLUICE_SIM_WORKERS";
const ORPHAN: &str = "SLUICE_SIM_ORPHAN";
/// The child writes this to stdout when it holds the device.
const READY: &[u8] = b"ready\n";
/// Orders of the parent about the device, and the answer that an order was obeyed.
const TAKE: u8 = b't';
const FREE: u8 = b'f';
const DONE: u8 = b'd';
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
const READY_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub(super) struct EngineCoreOptions {
    pub(super) device: Option<PathBuf>,
    /// Bytes of GPU memory that the engine uses.
    pub(super) bytes: f64,
    /// Number of worker processes; 0 for one GPU.
    pub(super) workers: u32,
    pub(super) orphan: Duration,
}

/// Bytes of the device that another process uses; 0 if the device is free.
pub(super) fn occupied(device: &Path) -> anyhow::Result<f64> {
    let mut file = open(device)?;
    match file.try_lock() {
        Ok(()) => Ok(0.0),
        Err(std::fs::TryLockError::WouldBlock) => {
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            Ok(text.split_whitespace().nth(1).and_then(|bytes| bytes.parse().ok()).unwrap_or(0.0))
        }
        Err(std::fs::TryLockError::Error(error)) => Err(error).context("--sim-device cannot be locked"),
    }
}

fn open(device: &Path) -> anyhow::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(device);
    file.with_context(|| {
        format!("argument --sim-device: cannot open {}; give a file that can be written", device.display())
    })
}

fn command(name: &str, role: &str) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0(name).env(ROLE, role).env(PARENT, std::process::id().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    Ok(command)
}

pub(super) async fn spawn(options: &EngineCoreOptions) -> anyhow::Result<Child> {
    let mut command = command("VLLM::EngineCore", "engine")?;
    if let Some(device) = &options.device {
        command.env(DEVICE, device);
    }
    command.env(BYTES, options.bytes.to_string()).env(WORKERS, options.workers.to_string());
    command.env(ORPHAN, options.orphan.as_secs_f64().to_string()).stdin(Stdio::piped());
    let mut child = command.spawn().context("the engine's process does not start")?;
    let mut received = [0; READY.len()];
    let mut stdout = child.stdout.take().context("the engine's process has no output")?;
    let read = tokio::time::timeout(READY_TIMEOUT, stdout.read_exact(&mut received)).await;
    match read {
        Ok(Ok(_)) if received == READY => {
            child.stdout = Some(stdout);
            Ok(child)
        }
        _ => {
            let _ = child.kill().await;
            anyhow::bail!("the engine's process did not get the device")
        }
    }
}

/// Runs the child if this process is one.
pub fn run_child() -> Option<ExitCode> {
    let role = std::env::var(ROLE).ok()?;
    let name = if role == "engine" { c"VLLM::EngineCore" } else { c"VLLM::Worker_TP" };
    // `ps -o comm` shows this name.
    let _ = nix::sys::prctl::set_name(name);
    Some(if role == "engine" { engine() } else { worker() })
}

fn number(name: &str) -> f64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(0.0)
}

fn is_orphan() -> bool {
    f64::from(parent_id()) != number(PARENT)
}

/// The device of the engine, locked, with the memory in use written into the file.
fn take(device: &Path) -> Option<File> {
    let mut file = open(device).ok()?;
    file.try_lock().ok()?;
    let note = format!("{} {}\n", std::process::id(), number(BYTES));
    file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(note.as_bytes())).ok()?;
    Some(file)
}

/// The parent's side of the child that holds the device. An order is one byte, and so is the
/// answer.
pub(super) struct Holder {
    orders: ChildStdin,
    answers: ChildStdout,
}

impl Holder {
    pub(super) fn of(child: &mut Child) -> Option<Self> {
        Some(Self { orders: child.stdin.take()?, answers: child.stdout.take()? })
    }

    /// Takes the device or frees it. Returns whether that was possible.
    pub(super) async fn hold(&mut self, held: bool) -> bool {
        let asked = self.orders.write_all(&[if held { TAKE } else { FREE }]).await;
        let mut answer = [0];
        asked.is_ok() && self.answers.read_exact(&mut answer).await.is_ok() && answer[0] == DONE
    }
}

/// Obeys the parent's orders about the device until the parent has ended.
fn obey(device: Option<OsString>, mut held: Option<File>) {
    let (mut orders, mut answers) = (std::io::stdin(), std::io::stdout());
    let mut order = [0];
    while orders.read_exact(&mut order).is_ok() {
        let possible = match order[0] {
            TAKE => {
                held = held.or_else(|| take(Path::new(device.as_ref()?)));
                device.is_none() || held.is_some()
            }
            _ => {
                held = None;
                true
            }
        };
        if answers.write_all(&[if possible { DONE } else { b'n' }]).and_then(|()| answers.flush()).is_err() {
            break;
        }
    }
    // An orphan holds the device until its process ends.
    std::mem::forget(held);
}

fn engine() -> ExitCode {
    let device = std::env::var_os(DEVICE);
    let mut held = None;
    if let Some(device) = &device {
        held = take(Path::new(device));
        if held.is_none() {
            return ExitCode::FAILURE;
        }
    }
    let mut workers = Vec::new();
    for rank in 0..number(WORKERS) as u32 {
        let Ok(command) = self::command(&format!("VLLM::Worker_TP{rank}"), "worker") else { return ExitCode::FAILURE };
        let mut command = command.into_std();
        command.stdout(Stdio::null());
        workers.extend(command.spawn());
    }
    let mut out = std::io::stdout();
    let _ = out.write_all(READY).and_then(|()| out.flush());
    std::thread::spawn(move || obey(device, held));
    let orphan_for = Duration::from_secs_f64(number(ORPHAN).max(0.0));
    let mut orphaned: Option<Instant> = None;
    loop {
        std::thread::sleep(CHECK_INTERVAL);
        if is_orphan() && orphaned.get_or_insert_with(Instant::now).elapsed() > orphan_for {
            break;
        }
    }
    for mut worker in workers {
        let _ = worker.kill();
        let _ = worker.wait();
    }
    ExitCode::SUCCESS
}

/// Runs a worker until the engine's process ends, as in vLLM.
fn worker() -> ExitCode {
    while !is_orphan() {
        std::thread::sleep(CHECK_INTERVAL);
    }
    ExitCode::SUCCESS
}
