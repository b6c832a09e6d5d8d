//! The gateway under soak: a process of `sluice serve` with two pools, reloaded while it works.
//!
//! Slots are few, so that requests queue; each reload writes the same file with other limits and sends SIGHUP.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

/// Time for the gateway to accept connections, and to end after SIGTERM with nothing in flight.
const PATIENCE: Duration = Duration::from_secs(20);
/// Slots per backend, in turn at each reload: fewer than there are clients.
const SLOTS: [u32; 3] = [12, 6, 24];

/// A running gateway.
pub(crate) struct Gateway {
    /// Where clients connect.
    pub(crate) port: u16,
    /// Where the metrics are.
    pub(crate) admin: u16,
    child: Child,
    folder: TempDir,
    backends: [Vec<u16>; 2],
    reloads: usize,
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

impl Gateway {
    /// Start it in front of these engines and wait until it accepts clients.
    pub(crate) async fn start(steady: &[u16], brittle: &[u16]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let (port, admin, backends) = (free_port()?, free_port()?, [steady.to_vec(), brittle.to_vec()]);
        let config = folder.path().join("sluice.toml");
        fs::write(&config, text(port, admin, &backends, SLOTS[0]))?;
        let log = fs::File::create(folder.path().join("log"))?;
        let child = Command::new(crate::binary())
            .args(["serve", "--config"])
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()?;
        let mut gateway = Self { port, admin, child, folder, backends, reloads: 0 };
        let deadline = Instant::now() + PATIENCE;
        for port in [port, admin] {
            while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
                if !gateway.runs()? || Instant::now() > deadline {
                    bail!("the gateway did not start:\n{}", gateway.log());
                }
                sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(gateway)
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("sluice.toml")
    }

    /// Write other limits and tell the gateway to read them.
    pub(crate) fn reload(&mut self) -> anyhow::Result<()> {
        self.reloads += 1;
        let slots = SLOTS[self.reloads % SLOTS.len()];
        // A new file in place of the old one: a reload never reads half of it.
        let fresh = self.folder.path().join("fresh.toml");
        fs::write(&fresh, text(self.port, self.admin, &self.backends, slots))?;
        fs::rename(&fresh, self.config())?;
        Ok(kill(self.pid()?, Signal::SIGHUP)?)
    }

    /// Whether the process still runs.
    pub(crate) fn runs(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// The end of what it logged.
    pub(crate) fn log(&self) -> String {
        let text = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// SIGTERM; with nothing in flight it ends with 0 and soon.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        kill(self.pid()?, Signal::SIGTERM)?;
        let status = timeout(PATIENCE, self.child.wait()).await.context("did not end after SIGTERM")??;
        ensure!(status.success(), "ended with {status}:\n{}", self.log());
        Ok(())
    }

    fn pid(&self) -> anyhow::Result<Pid> {
        Ok(Pid::from_raw(i32::try_from(self.child.id().context("the gateway has ended")?)?))
    }
}

fn text(port: u16, admin: u16, backends: &[Vec<u16>; 2], slots: u32) -> String {
    let mut text = format!("[server]\nlisten = \"127.0.0.1:{port}\"\nadmin = \"127.0.0.1:{admin}\"\n");
    for (name, ports) in crate::POOLS.iter().zip(backends) {
        text += &format!(
            "\n[[model]]\nname = \"{name}\"\n\n[[pool]]\nname = \"{name}\"\nmodels = [\"{name}\"]\nslots = {slots}\n\
             queue = {{ length = 256, timeout = \"10s\", order = \"shortest_first\" }}\n\
             long_prefix = {{ threshold = \"5k\", slots = 2 }}\n"
        );
        for (i, port) in ports.iter().enumerate() {
            text += &format!("[[pool.backend]]\nname = \"{name}-{i}\"\nurl = \"http://127.0.0.1:{port}\"\n");
        }
    }
    text
}
