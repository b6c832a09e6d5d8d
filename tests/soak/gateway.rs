//! The gateway under test is a process of `sluice serve` with up to four pools, which is reloaded
//! while requests run.
//!
//! Each model has a pool for short prompts on two engines, and a pool for long prompts on a third
//! engine. Every valid reload applies the next of [`SETTINGS`]: slots, permits, token budgets,
//! queues, orders, policies and spill lists. In two of the settings, each model has one pool for
//! all prompts. There are fewer slots than clients, so that requests queue, spill and are shed.
//! Every eighth file is invalid and must change nothing.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::Signal;
use tempfile::TempDir;
use tokio::process::Child;
use tokio::time::{Instant, sleep, timeout};

use crate::ports::free_port;
use crate::serve::{self, serve};

/// Time limit until the gateway accepts connections, and until it ends after SIGTERM with nothing
/// in flight.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The last line that the gateway logs when it starts.
const SERVES: &str = "metrics and live page on";
/// One file in this many is invalid.
const WRONG_EVERY: u64 = 8;
/// Engines of each model; the last one is for long prompts.
pub(crate) const ENGINES: usize = 3;

/// The settings of both models' pools in one file.
struct Settings {
    /// Whether long prompts have a separate pool.
    split: bool,
    /// Slots for each engine, in the short pool and in the long pool.
    slots: [u32; 2],
    /// Permits for each engine, in the short pool and in the long pool.
    permits: [u32; 2],
    /// Maximum number of outstanding tokens on each engine.
    tokens: u64,
    /// Maximum number of waiting requests in each pool.
    queue: u32,
    order: &'static str,
    policy: &'static str,
    /// Whether the short pool may spill, and whether the long pool may.
    spill: [bool; 2],
}

const SETTINGS: [Settings; 6] = [
    Settings {
        split: true,
        slots: [8, 4],
        permits: [1, 2],
        tokens: 4_000_000,
        queue: 64,
        order: "shortest_first",
        policy: "least_work",
        spill: [false, true],
    },
    Settings {
        split: true,
        slots: [4, 3],
        permits: [1, 1],
        tokens: 1_000_000,
        queue: 24,
        order: "fifo",
        policy: "two_choices",
        spill: [true, true],
    },
    Settings {
        split: false,
        slots: [5, 0],
        permits: [1, 0],
        tokens: 2_000_000,
        queue: 48,
        order: "shortest_first",
        policy: "round_robin",
        spill: [false, false],
    },
    Settings {
        split: true,
        slots: [12, 6],
        permits: [0, 2],
        tokens: 4_000_000,
        queue: 16,
        order: "shortest_first",
        policy: "least_work",
        spill: [true, false],
    },
    Settings {
        split: false,
        slots: [8, 0],
        permits: [2, 0],
        tokens: 600_000,
        queue: 64,
        order: "fifo",
        policy: "least_work",
        spill: [false, false],
    },
    Settings {
        split: true,
        slots: [6, 2],
        permits: [2, 1],
        tokens: 2_000_000,
        queue: 32,
        order: "shortest_first",
        policy: "least_work",
        spill: [false, true],
    },
];

pub(crate) struct Gateway {
    pub(crate) port: u16,
    pub(crate) admin: u16,
    /// Number of reloads so far, first of valid files, then of invalid files.
    pub(crate) reloads: [u64; 2],
    child: Child,
    folder: TempDir,
    engines: Vec<u16>,
}

impl Gateway {
    /// Starts the gateway in front of these engines, [`ENGINES`] per model, and waits until it
    /// accepts clients.
    pub(crate) async fn start(engines: Vec<u16>) -> anyhow::Result<Self> {
        let mut gateway = Self::start_with(|own| text(own, &engines, &SETTINGS[0])).await?;
        gateway.engines = engines;
        Ok(gateway)
    }

    /// Starts the gateway with a configuration made for its two ports, and waits until its log says
    /// that it serves.
    pub(crate) async fn start_with(config: impl Fn([u16; 2]) -> String) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let (port, admin) = (free_port(), free_port());
        fs::write(folder.path().join("sluice.toml"), config([port, admin]))?;
        let child = serve(folder.path(), &[])?;
        let mut gateway = Self { port, admin, reloads: [0; 2], child, folder, engines: Vec::new() };
        let deadline = Instant::now() + TIMEOUT;
        // The log shows when the gateway serves. A connection would not, because the kernel
        // completes connections while the gateway still starts and opens descriptors.
        while !gateway.log().contains(SERVES) {
            if !gateway.runs()? || Instant::now() > deadline {
                bail!("the gateway did not start:\n{}", gateway.log());
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(gateway)
    }

    pub(crate) fn reload(&mut self) -> anyhow::Result<()> {
        let number = self.reloads[0] + self.reloads[1] + 1;
        let wrong = number.is_multiple_of(WRONG_EVERY);
        self.reloads[usize::from(wrong)] += 1;
        let mut text =
            text([self.port, self.admin], &self.engines, &SETTINGS[self.reloads[0] as usize % SETTINGS.len()]);
        if wrong {
            text += "slotz = 1\n";
        }
        // The file is renamed into place, so that a reload never reads an incomplete file.
        let fresh = self.folder.path().join("fresh.toml");
        fs::write(&fresh, text)?;
        fs::rename(&fresh, self.folder.path().join("sluice.toml"))?;
        serve::signal(&self.child, Signal::SIGHUP)
    }

    pub(crate) fn process(&self) -> anyhow::Result<u32> {
        self.child.id().context("the gateway has ended")
    }

    pub(crate) fn runs(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    pub(crate) fn log(&self) -> String {
        serve::log(self.folder.path(), 20)
    }

    /// The path of the access log, which is complete only when the gateway has stopped.
    pub(crate) fn access_log(&self) -> PathBuf {
        self.folder.path().join("access.jsonl")
    }

    /// Stops the gateway while nothing is in flight. It must exit within [`TIMEOUT`], with status
    /// 0.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        serve::signal(&self.child, Signal::SIGTERM)?;
        let status = timeout(TIMEOUT, self.child.wait()).await.context("did not end after SIGTERM")??;
        ensure!(status.success(), "ended with {status}:\n{}", self.log());
        Ok(())
    }
}

fn text([port, admin]: [u16; 2], engines: &[u16], settings: &Settings) -> String {
    let mut text = format!(
        "[server]\nlisten = \"127.0.0.1:{port}\"\nadmin = \"127.0.0.1:{admin}\"\n\
         [access_log]\npath = \"access.jsonl\"\n\
         [health]\nprobe_interval = \"500ms\"\nejection_base = \"500ms\"\nejection_max = \"2s\"\n"
    );
    for (model, ports) in crate::MODELS.iter().zip(engines.chunks(ENGINES)) {
        text += &format!("[[model]]\nname = \"{model}\"\n");
        let (short, long) = if settings.split { ports.split_at(ENGINES - 1) } else { (ports, &[][..]) };
        let first = if settings.split { "prompt_tokens = { max = \"2k\" }\n" } else { "" };
        pool(&mut text, settings, model, 0, first, short);
        if settings.split {
            pool(&mut text, settings, model, 1, "prompt_tokens = { min = \"2k\" }\n", long);
        }
    }
    text
}

/// Adds the pool for short (0) or long (1) prompts.
fn pool(text: &mut String, settings: &Settings, model: &str, which: usize, range: &str, ports: &[u16]) {
    let names = [model.to_owned(), format!("{model}-long")];
    let spill = if settings.spill[which] { format!("{:?}", names[1 - which]) } else { String::new() };
    let (name, slots, permits) = (&names[which], settings.slots[which], settings.permits[which]);
    let Settings { order, policy, .. } = settings;
    let scale = crate::scale();
    let (slots, permits, queue) = (slots * scale, permits * scale, settings.queue * scale);
    let tokens = settings.tokens * u64::from(scale);
    *text += &format!(
        "[[pool]]\nname = \"{name}\"\nmodels = [\"{model}\"]\n{range}slots = {slots}\ntokens = {tokens}\n\
         policy = \"{policy}\"\nspill = [{spill}]\nlong_prefix = {{ threshold = \"2k\", slots = {permits} }}\n\
         queue = {{ length = {queue}, timeout = \"10s\", order = \"{order}\" }}\n"
    );
    for port in ports {
        *text += &format!("[[pool.backend]]\nname = \"{model}-{port}\"\nurl = \"http://127.0.0.1:{port}\"\n");
    }
}
