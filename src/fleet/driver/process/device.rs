//! Memory of the devices an engine uses, as `nvidia-smi` tells it.
//!
//! A process that is gone may still hold device memory for a moment, and an engine that starts in that moment fails with
//! "Free memory on device ... is less than desired" or mis-measures what it has. So memory in use is noted before a start,
//! and after a stop it must come back to that, within [`SLACK_MIB`], in two readings one after the other.
//!
//! Where there is no `nvidia-smi`, nothing is known and nothing is waited for. When two engines of this gateway share a
//! device, their memory cannot be told apart and is not waited for either. When the devices of an engine are not known, all
//! are watched, and what stays in use on them may be anybody's: that is worth a warning and forbids nothing.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use sluice_gateway::config::Launch;

/// What a context or a monitor may take meanwhile, MiB.
const SLACK_MIB: u64 = 256;
/// Longest wait for `nvidia-smi`; its first call without the persistence daemon takes seconds.
const ASK_WITHIN: Duration = Duration::from_secs(10);
/// Pause between readings.
const READ_EVERY: Duration = Duration::from_millis(500);

/// MiB in use, by index of the device.
pub(super) type InUse = BTreeMap<u16, u64>;

/// Stands among the devices for every engine, so that engines whose devices are not known are counted too.
const ANY: u16 = u16::MAX;

/// How many running engines of this process use each device.
static TENANTS: Mutex<Option<HashMap<u16, u32>>> = Mutex::new(None);

/// The devices of one engine.
#[derive(Debug)]
pub(super) struct Devices {
    program: OsString,
    /// By index; empty: all that there are.
    indices: Vec<u16>,
}

/// An engine's presence on its devices; leaves when dropped.
#[derive(Debug)]
pub(super) struct Tenancy(Vec<u16>);

impl Drop for Tenancy {
    fn drop(&mut self) {
        let mut tenants = TENANTS.lock();
        let counts = tenants.get_or_insert_default();
        for index in &self.0 {
            if let Some(count) = counts.get_mut(index) {
                *count = count.saturating_sub(1);
            }
        }
    }
}

impl Devices {
    /// The devices with these indices, asked about through `program` (`nvidia-smi`).
    pub(super) fn new(program: impl Into<OsString>, indices: Vec<u16>) -> Self {
        Self { program: program.into(), indices }
    }

    /// Those that an engine may see: as configured, else as `CUDA_VISIBLE_DEVICES` says, in its environment or ours.
    pub(super) fn of(launch: &Launch) -> Self {
        let inherited = || std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let visible = launch.env.get("CUDA_VISIBLE_DEVICES").cloned().or_else(inherited).unwrap_or_default();
        // Names such as GPU-1a2b... are no indices: then nothing is known.
        let indices: Option<Vec<u16>> = visible.split(',').map(|index| index.trim().parse().ok()).collect();
        let indices = if launch.gpu.is_empty() { indices.unwrap_or_default() } else { launch.gpu.clone() };
        Self::new("nvidia-smi", indices)
    }

    /// Notes that an engine uses them.
    pub(super) fn enter(&self) -> Tenancy {
        let mut tenants = TENANTS.lock();
        let counts = tenants.get_or_insert_default();
        let used: Vec<u16> = self.indices.iter().copied().chain([ANY]).collect();
        for index in &used {
            *counts.entry(*index).or_default() += 1;
        }
        Tenancy(used)
    }

    /// Whether it is known which ones they are.
    pub(super) fn are_known(&self) -> bool {
        !self.indices.is_empty()
    }

    fn shared(&self) -> bool {
        let mut tenants = TENANTS.lock();
        let counts = tenants.get_or_insert_default();
        // Which device is whose cannot be told without their indices: then every other engine may be on it.
        let watched = if self.indices.is_empty() { &[ANY][..] } else { &self.indices };
        watched.iter().any(|index| counts.get(index).is_some_and(|count| *count > 1))
    }

    /// Memory in use now; `None` where it cannot be told.
    pub(super) async fn in_use(&self) -> Option<InUse> {
        let mut command = Command::new(&self.program);
        command.args(["--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]);
        command.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let answer = timeout(ASK_WITHIN, command.output()).await.ok()?.ok()?;
        if !answer.status.success() {
            return None;
        }
        let in_use = parse(&String::from_utf8_lossy(&answer.stdout), &self.indices);
        (!in_use.is_empty()).then_some(in_use)
    }

    /// Waits until memory in use is back at `baseline`; the last reading when it is not back within `patience`.
    pub(super) async fn back(&self, baseline: &InUse, patience: Duration) -> Result<Option<bool>, InUse> {
        if self.shared() {
            return Ok(None);
        }
        let deadline = Instant::now() + patience;
        let mut good = 0;
        loop {
            let Some(now) = self.in_use().await else { return Ok(None) };
            good = if is_back(&now, baseline) { good + 1 } else { 0 };
            if good == 2 {
                return Ok(Some(true));
            }
            if good == 0 && Instant::now() >= deadline {
                return Err(now);
            }
            sleep(READ_EVERY).await;
        }
    }
}

fn is_back(now: &InUse, baseline: &InUse) -> bool {
    baseline.iter().all(|(index, before)| now.get(index).is_some_and(|used| *used <= before + SLACK_MIB))
}

/// Lines of `0, 1234`, those of `wanted` only.
fn parse(text: &str, wanted: &[u16]) -> InUse {
    let lines = text.lines().filter_map(|line| {
        let (index, used) = line.split_once(',')?;
        Some((index.trim().parse().ok()?, used.trim().parse().ok()?))
    });
    lines.filter(|(index, _)| wanted.is_empty() || wanted.contains(index)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A program that answers with the first line of a list and takes it off, until one is left.
    fn smi(answers: &[&str]) -> (tempfile::TempDir, Devices) {
        let folder = tempfile::tempdir().unwrap();
        let (program, list) = (folder.path().join("smi"), folder.path().join("list"));
        fs::write(&list, answers.join("\n") + "\n").unwrap();
        let script = format!(
            "#!/bin/sh\nhead -1 {0} | tr ';' '\\n'\nif [ $(wc -l <{0}) -gt 1 ]; then sed -i 1d {0}; fi\n",
            list.display()
        );
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        (folder, Devices::new(program, vec![61]))
    }

    #[tokio::test]
    async fn memory_is_back_when_two_readings_say_so() {
        let (_folder, devices) =
            smi(&["60, 9;61, 500", "61, 60000", "61, 600", "61, 9000", "61, 700", "61, 756", "61, 1"]);
        let baseline = devices.in_use().await.unwrap();
        assert_eq!(baseline, BTreeMap::from([(61, 500)]));
        assert_eq!(devices.back(&baseline, Duration::from_secs(20)).await, Ok(Some(true)));
        assert_eq!(devices.in_use().await.unwrap(), BTreeMap::from([(61, 1)]), "took another number of readings");
    }

    #[tokio::test]
    async fn memory_that_stays_taken_is_told() {
        let (_folder, devices) = smi(&["61, 40000"]);
        let kept = devices.back(&BTreeMap::from([(61, 500)]), Duration::ZERO).await;
        assert_eq!(kept, Err(BTreeMap::from([(61, 40_000)])));
    }

    #[test]
    fn the_devices_of_an_engine_are_those_that_it_may_see() {
        let indices = |gpu: &[u16], visible: Option<&str>| {
            let env = visible.map(|list| ("CUDA_VISIBLE_DEVICES".to_owned(), list.to_owned())).into_iter().collect();
            let (command, args) = (vec!["vllm".to_owned()], BTreeMap::new());
            Devices::of(&Launch { command, port: 1, gpu: gpu.to_vec(), env, args }).indices
        };
        assert_eq!(indices(&[3], Some("5")), [3]);
        assert_eq!(indices(&[], Some("5, 7")), [5, 7]);
        assert!(indices(&[], Some("GPU-1a2b")).is_empty(), "nothing is known of a name");
    }

    #[tokio::test]
    async fn without_a_program_or_with_two_tenants_nothing_is_known() {
        let nothing = Devices::new("/nonexistent/nvidia-smi", vec![62]);
        assert_eq!(nothing.in_use().await, None);
        let (_folder, devices) = smi(&["61, 40000"]);
        let (one, _two) = (devices.enter(), devices.enter());
        assert!(devices.shared());
        drop(one);
        assert!(!devices.shared());
    }
}
