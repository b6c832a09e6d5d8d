//! How busy the machine was while clients, attackers, engines and the gateway shared its cores.
//!
//! A response that is late because a thread waited for a core says nothing about the gateway. The
//! kernel counts such waits. `/proc/stat` has the time of all cores and the idle part of it, in
//! ticks. `/proc/PID/task/TID/schedstat` has for each thread the nanoseconds on a core, the
//! nanoseconds ready without a core, and the number of times that the thread was put on a core.

use std::fmt;
use std::fs;
use std::ops::{Add, Sub};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};

/// The machine counts as full if less than this share of the cores' time was idle.
const IDLE: f64 = 0.25;
/// The machine counts as full if the threads of the gateway, of the engines or of the honest
/// clients waited longer than this on average for a core. The TTFTs that are compared are hundreds
/// of times as long.
const WAIT: Duration = Duration::from_micros(100);

/// Scheduling of threads, since they started or between two moments.
#[derive(Clone, Copy, Default)]
pub(super) struct Threads {
    /// Nanoseconds on a core.
    ran: u64,
    /// Nanoseconds in which a thread was ready but had no core.
    waited: u64,
    /// Number of times that a thread was put on a core.
    turns: u64,
}

impl Threads {
    /// The sum over all threads of these processes, since they started.
    fn of(processes: &[u32]) -> anyhow::Result<Self> {
        let mut sum = Self::default();
        for process in processes {
            for task in fs::read_dir(format!("/proc/{process}/task"))? {
                // A thread that has ended in the meantime no longer has a file.
                sum = sum + Self::read(&task?.path().join("schedstat")).unwrap_or_default();
            }
        }
        Ok(sum)
    }

    /// Scheduling of the calling thread since it started.
    pub(super) fn own() -> anyhow::Result<Self> {
        Self::read(Path::new("/proc/thread-self/schedstat"))
    }

    fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path)?;
        let mut numbers = text.split_whitespace().map(str::parse);
        let mut next = || Ok::<u64, anyhow::Error>(numbers.next().context("schedstat is short")??);
        Ok(Self { ran: next()?, waited: next()?, turns: next()? })
    }

    /// Mean time for which a thread that became ready waited for a core.
    fn wait(&self) -> Duration {
        Duration::from_nanos(self.waited / self.turns.max(1))
    }
}

impl Add for Threads {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { ran: self.ran + other.ran, waited: self.waited + other.waited, turns: self.turns + other.turns }
    }
}

impl Sub for Threads {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        let Self { ran, waited, turns } = before;
        let [ran, waited] = [self.ran.saturating_sub(ran), self.waited.saturating_sub(waited)];
        Self { ran, waited, turns: self.turns.saturating_sub(turns) }
    }
}

impl fmt::Display for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ran, wait) = (self.ran as f64 / 1e9, self.wait().as_secs_f64() * 1e6);
        write!(f, "{ran:.1} s on a core and {wait:.0} µs of waiting for each of {} turns", self.turns)
    }
}

pub(super) struct Watch {
    gateway: u32,
    engines: Vec<u32>,
    /// Ticks of all cores, first in total, then idle.
    ticks: [u64; 2],
    /// Threads of the gateway, of the engines and of this process.
    threads: [Threads; 3],
}

impl Watch {
    pub(super) fn start(gateway: u32, engines: Vec<u32>) -> anyhow::Result<Self> {
        let threads = Self::threads(gateway, &engines)?;
        Ok(Self { gateway, engines, ticks: ticks()?, threads })
    }

    /// The load since the moment of `self`. `honest` is the scheduling of the thread of the honest
    /// clients, which has ended.
    pub(super) fn end(&self, honest: Threads) -> anyhow::Result<Load> {
        let [all, idle] = ticks()?;
        let idle = idle.saturating_sub(self.ticks[1]) as f64 / all.saturating_sub(self.ticks[0]).max(1) as f64;
        let [gateway, engines, own] = Self::threads(self.gateway, &self.engines)?;
        let [gateway, engines] = [gateway - self.threads[0], engines - self.threads[1]];
        Ok(Load { idle, gateway, engines, honest, attackers: own - self.threads[2] })
    }

    fn threads(gateway: u32, engines: &[u32]) -> anyhow::Result<[Threads; 3]> {
        Ok([Threads::of(&[gateway])?, Threads::of(engines)?, Threads::of(&[std::process::id()])?])
    }
}

/// Ticks of all cores since boot: in total, and idle.
fn ticks() -> anyhow::Result<[u64; 2]> {
    let text = fs::read_to_string("/proc/stat")?;
    let words = text.lines().next().unwrap_or_default().split_whitespace().skip(1);
    // The words are user nice system idle iowait irq softirq steal. The times of guests follow, but
    // they are already contained in user and nice.
    let counts: Vec<u64> = words.take(8).map_while(|word| word.parse().ok()).collect();
    let [.., idle, iowait, _, _, _] = counts[..] else { bail!("/proc/stat begins with {text:.100}") };
    Ok([counts.iter().sum(), idle + iowait])
}

/// How much of the machine a run used.
pub(super) struct Load {
    /// Share of the cores' time that was idle.
    idle: f64,
    gateway: Threads,
    engines: Threads,
    honest: Threads,
    /// The threads of the attackers, and all others of the test's process except the thread of the
    /// honest clients.
    attackers: Threads,
}

impl Load {
    /// If the machine was full, the reason why latency measured under this load says nothing about
    /// the gateway.
    pub(super) fn full(&self) -> Option<String> {
        let waits = [("the gateway", self.gateway), ("the engines", self.engines), ("the honest clients", self.honest)];
        let late = waits.into_iter().find(|(_, threads)| threads.wait() > WAIT);
        let late = late.map(|(who, threads)| format!("{who} waited {:?} for a core on average", threads.wait()));
        if self.idle < IDLE { Some(format!("the cores were idle for {:.0} %", self.idle * 1e2)) } else { late }
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { idle, gateway, engines, honest, attackers } = self;
        write!(f, "cores {:.0} % idle; gateway {gateway}; engines {engines};", idle * 1e2)?;
        write!(f, "\n  honest clients {honest}; attackers {attackers}")
    }
}
