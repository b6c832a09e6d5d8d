//! The gateway under soak: a process of `sluice serve` with four pools, reloaded while it works.
//!
//! Each model has a pool for short prompts on two engines and one for long prompts on a third. Every reload
//! takes the next of [`TURNS`]: other slots, permits, token budgets, queues, orders, policies and spill lists, and in two of
//! them there is no long pool and its engine belongs to the other pool. Slots are fewer than clients, so that
//! requests queue, spill and are shed. Every eighth file is invalid and must change nothing.
//!
//! Its access log is kept: one line per request is what `records.rs` counts.

use std::fs;
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

use crate::ports::free_port;

/// Time for the gateway to accept connections, and to end after SIGTERM with nothing in flight.
const TIMEOUT: Duration = Duration::from_secs(20);
/// One file in this many is invalid.
const WRONG_EVERY: u64 = 8;
/// Engines of each model; the last one is for long prompts.
pub(crate) const ENGINES: usize = 3;

/// The settings of both models' pools in one file.
struct Turn {
    /// Long prompts have a pool of their own.
    split: bool,
    /// Slots per engine: short pool, long pool.
    slots: [u32; 2],
    /// Long prompts in prefill per engine: short pool, long pool.
    permits: [u32; 2],
    /// Outstanding tokens per engine.
    tokens: &'static str,
    /// Waiters per pool.
    queue: u32,
    order: &'static str,
    policy: &'static str,
    /// Short prompts may spill, long prompts may spill.
    spill: [bool; 2],
}

const TURNS: [Turn; 6] = [
    Turn {
        split: true,
        slots: [8, 4],
        permits: [1, 2],
        tokens: "4M",
        queue: 64,
        order: "shortest_first",
        policy: "least_work",
        spill: [false, true],
    },
    Turn {
        split: true,
        slots: [4, 3],
        permits: [1, 1],
        tokens: "1M",
        queue: 24,
        order: "fifo",
        policy: "two_choices",
        spill: [true, true],
    },
    Turn {
        split: false,
        slots: [5, 0],
        permits: [1, 0],
        tokens: "2M",
        queue: 48,
        order: "shortest_first",
        policy: "round_robin",
        spill: [false, false],
    },
    Turn {
        split: true,
        slots: [12, 6],
        permits: [0, 2],
        tokens: "4M",
        queue: 16,
        order: "shortest_first",
        policy: "least_work",
        spill: [true, false],
    },
    Turn {
        split: false,
        slots: [8, 0],
        permits: [2, 0],
        tokens: "600k",
        queue: 64,
        order: "fifo",
        policy: "least_work",
        spill: [false, false],
    },
    Turn {
        split: true,
        slots: [6, 2],
        permits: [2, 1],
        tokens: "2M",
        queue: 32,
        order: "shortest_first",
        policy: "prefix_affinity",
        spill: [false, true],
    },
];

/// A running gateway.
pub(crate) struct Gateway {
    /// Where clients connect.
    pub(crate) port: u16,
    /// Where the metrics are.
    pub(crate) admin: u16,
    /// Reloads so far, of valid and of invalid files.
    pub(crate) reloads: [u64; 2],
    child: Child,
    folder: TempDir,
    engines: Vec<u16>,
}

impl Gateway {
    /// Start it in front of these engines, [`ENGINES`] per model, and wait until it accepts clients.
    pub(crate) async fn start(engines: Vec<u16>) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let log = fs::File::create(folder.path().join("log"))?;
        let (port, admin) = (free_port(), free_port());
        let config = folder.path().join("sluice.toml");
        fs::write(&config, text([port, admin], &engines, &TURNS[0]))?;
        let child = Command::new(crate::binary())
            .args(["serve", "--config"])
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()?;
        let mut gateway = Self { port, admin, reloads: [0; 2], child, folder, engines };
        let deadline = Instant::now() + TIMEOUT;
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

    /// Write another file and make the gateway reload it.
    pub(crate) fn reload(&mut self) -> anyhow::Result<()> {
        let number = self.reloads[0] + self.reloads[1] + 1;
        let wrong = number.is_multiple_of(WRONG_EVERY);
        self.reloads[usize::from(wrong)] += 1;
        let mut text = text([self.port, self.admin], &self.engines, &TURNS[self.reloads[0] as usize % TURNS.len()]);
        if wrong {
            text += "slotz = 1\n";
        }
        // Renamed into place, so that a reload never reads half a file.
        let fresh = self.folder.path().join("fresh.toml");
        fs::write(&fresh, text)?;
        fs::rename(&fresh, self.folder.path().join("sluice.toml"))?;
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

    /// Its access log; complete only when it has stopped.
    pub(crate) fn access_log(&self) -> PathBuf {
        self.folder.path().join("access.jsonl")
    }

    /// SIGTERM; with nothing in flight it exits soon, with status 0.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        kill(self.pid()?, Signal::SIGTERM)?;
        let status = timeout(TIMEOUT, self.child.wait()).await.context("did not end after SIGTERM")??;
        ensure!(status.success(), "ended with {status}:\n{}", self.log());
        Ok(())
    }

    fn pid(&self) -> anyhow::Result<Pid> {
        Ok(Pid::from_raw(i32::try_from(self.child.id().context("the gateway has ended")?)?))
    }
}

fn text([port, admin]: [u16; 2], engines: &[u16], turn: &Turn) -> String {
    let mut text = format!(
        "[server]\nlisten = \"127.0.0.1:{port}\"\nadmin = \"127.0.0.1:{admin}\"\n\
         [access_log]\npath = \"access.jsonl\"\n\
         [health]\nprobe_interval = \"500ms\"\nejection_base = \"500ms\"\nejection_max = \"2s\"\n"
    );
    for (model, ports) in crate::MODELS.iter().zip(engines.chunks(ENGINES)) {
        text += &format!("[[model]]\nname = \"{model}\"\n");
        let (short, long) = if turn.split { ports.split_at(ENGINES - 1) } else { (ports, &[][..]) };
        let first = if turn.split { "prompt_tokens = { max = \"2k\" }\n" } else { "" };
        pool(&mut text, turn, model, 0, first, short);
        if turn.split {
            pool(&mut text, turn, model, 1, "prompt_tokens = { min = \"2k\" }\n", long);
        }
    }
    text
}

/// The pool for short (0) or long (1) prompts of a model.
fn pool(text: &mut String, turn: &Turn, model: &str, which: usize, range: &str, ports: &[u16]) {
    let names = [model.to_owned(), format!("{model}-long")];
    let spill = if turn.spill[which] { format!("{:?}", names[1 - which]) } else { String::new() };
    let (name, slots, permits) = (&names[which], turn.slots[which], turn.permits[which]);
    let Turn { tokens, queue, order, policy, .. } = turn;
    *text += &format!(
        "[[pool]]\nname = \"{name}\"\nmodels = [\"{model}\"]\n{range}slots = {slots}\ntokens = \"{tokens}\"\n\
         policy = \"{policy}\"\nspill = [{spill}]\nlong_prefix = {{ threshold = \"2k\", slots = {permits} }}\n\
         queue = {{ length = {queue}, timeout = \"10s\", order = \"{order}\" }}\n"
    );
    for port in ports {
        *text += &format!("[[pool.backend]]\nname = \"{model}-{port}\"\nurl = \"http://127.0.0.1:{port}\"\n");
    }
}
