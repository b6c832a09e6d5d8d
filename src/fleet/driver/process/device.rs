//! Memory in use on an engine's devices, as `nvidia-smi` reports it.
//!
//! The memory of an ended process may stay in use for a moment. An engine that starts then fails
//! with "Free memory on device ... is less than desired", or measures too little free memory. So
//! after a stop, memory must return to the value before the start, within [`SLACK_MIB`], in two
//! readings in a row.
//!
//! There is no wait without `nvidia-smi`, or when engines of this gateway share a device. If an
//! engine's devices are unknown, all devices are watched. Memory that stays in use then causes a
//! warning, not a failure, because another process may hold it.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use sluice_config::{Gpu, Launch};

/// MiB that a CUDA context or a monitoring tool may have taken since the engine's start.
const SLACK_MIB: u64 = 256;
/// MiB of a CUDA context, which an engine takes before it compares the free memory with its share.
const CONTEXT_MIB: u64 = 768;
/// Longest wait for `nvidia-smi`; without the persistence daemon the first call takes seconds.
const SMI_TIMEOUT: Duration = Duration::from_secs(10);
const READ_INTERVAL: Duration = Duration::from_millis(500);

/// MiB in use, by device index.
pub(super) type MemoryInUse = BTreeMap<u16, u64>;

/// A pseudo device of every engine, to count all engines if devices are unknown.
const ANY_DEVICE: u16 = u16::MAX;

/// Running engines of this process per device.
static ENGINES_ON_DEVICE: Mutex<Option<HashMap<u16, u32>>> = Mutex::new(None);

#[derive(Debug)]
pub(super) struct Devices {
    program: OsString,
    /// Device indices; empty: unknown, so all are watched.
    indices: Vec<u16>,
}

/// While this lives, one engine counts as using these devices.
#[derive(Debug)]
pub(super) struct DeviceUse(Vec<u16>);

impl Drop for DeviceUse {
    fn drop(&mut self) {
        let mut engines = ENGINES_ON_DEVICE.lock();
        let counts = engines.get_or_insert_default();
        for index in &self.0 {
            if let Some(count) = counts.get_mut(index) {
                *count = count.saturating_sub(1);
            }
        }
    }
}

impl Devices {
    /// The devices with these indices, read with `program` (`nvidia-smi`).
    pub(super) fn new(program: impl Into<OsString>, indices: Vec<u16>) -> Self {
        Self { program: program.into(), indices }
    }

    /// The devices of an engine: as configured, else from the engine's `CUDA_VISIBLE_DEVICES`, else
    /// from the gateway's.
    pub(super) fn of(launch: &Launch) -> Self {
        let inherited = || std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let visible = launch
            .env
            .get("CUDA_VISIBLE_DEVICES")
            .map(|list| list.expose().to_owned())
            .or_else(inherited)
            .unwrap_or_default();
        // Names such as GPU-1a2b... are no indices, so the devices are unknown.
        let indices: Option<Vec<u16>> = visible.split(',').map(|index| index.trim().parse().ok()).collect();
        let configured = || launch.gpu.iter().map(index).collect::<Option<Vec<u16>>>();
        let indices = if launch.gpu.is_empty() { indices } else { configured() };
        Self::new("nvidia-smi", indices.unwrap_or_default())
    }

    /// Counts an engine on these devices while the result lives.
    pub(super) fn register_engine(&self) -> DeviceUse {
        let mut engines = ENGINES_ON_DEVICE.lock();
        let counts = engines.get_or_insert_default();
        let used: Vec<u16> = self.indices.iter().copied().chain([ANY_DEVICE]).collect();
        for index in &used {
            *counts.entry(*index).or_default() += 1;
        }
        DeviceUse(used)
    }

    pub(super) fn are_known(&self) -> bool {
        !self.indices.is_empty()
    }

    fn are_shared(&self) -> bool {
        let mut engines = ENGINES_ON_DEVICE.lock();
        let counts = engines.get_or_insert_default();
        // Any other engine may be on an unknown device.
        let watched = if self.indices.is_empty() { &[ANY_DEVICE][..] } else { &self.indices };
        watched.iter().any(|index| counts.get(index).is_some_and(|count| *count > 1))
    }

    /// Memory in use now; `None` if it cannot be read.
    pub(super) async fn memory_in_use(&self) -> Option<MemoryInUse> {
        self.query("memory.used").await
    }

    /// Checks that each device can give `share` of the memory to another engine, next to the memory
    /// in use now.
    ///
    /// # Errors
    /// The device that cannot give the memory, or that the memory cannot be read.
    pub(super) async fn check_room(&self, share: f64) -> Result<(), String> {
        let (Some(used), Some(total)) = (self.memory_in_use().await, self.query("memory.total").await) else {
            return Err("nvidia-smi does not show the memory of the devices".to_owned());
        };
        for (index, total) in total {
            let used = used.get(&index).copied().unwrap_or(total);
            let left = total.saturating_sub(used.saturating_add(CONTEXT_MIB));
            if (left as f64) < share * total as f64 {
                return Err(format!(
                    "gpu {index}: {used} of {total} MiB are in use, so gpu-memory-utilization = {share} does not fit"
                ));
            }
        }
        Ok(())
    }

    /// A property of the devices, in MiB; `None` if it cannot be read.
    async fn query(&self, property: &str) -> Option<MemoryInUse> {
        let mut command = Command::new(&self.program);
        command.args([&format!("--query-gpu=index,{property}"), "--format=csv,noheader,nounits"]);
        command.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let output = timeout(SMI_TIMEOUT, command.output()).await.ok()?.ok()?;
        if !output.status.success() {
            return None;
        }
        let in_use = parse(&String::from_utf8_lossy(&output.stdout), &self.indices);
        (!in_use.is_empty()).then_some(in_use)
    }

    /// Waits until memory is back at `baseline`. `None`: unknown whether it is.
    ///
    /// # Errors
    /// The last reading, if memory is not back within `limit`.
    pub(super) async fn wait_for_memory(
        &self,
        baseline: &MemoryInUse,
        limit: Duration,
    ) -> Result<Option<bool>, MemoryInUse> {
        if self.are_shared() {
            return Ok(None);
        }
        let deadline = Instant::now() + limit;
        let mut good = 0;
        loop {
            let Some(now) = self.memory_in_use().await else { return Ok(None) };
            good = if is_back(&now, baseline) { good + 1 } else { 0 };
            if good == 2 {
                return Ok(Some(true));
            }
            if good == 0 && Instant::now() >= deadline {
                return Err(now);
            }
            sleep(READ_INTERVAL).await;
        }
    }
}

/// The index of a whole GPU. `nvidia-smi` lists no memory of slices in this form, so the devices of
/// an engine with names count as unknown.
fn index(device: &Gpu) -> Option<u16> {
    match device {
        Gpu::Index(index) => Some(*index),
        Gpu::Name(_) => None,
    }
}

fn is_back(now: &MemoryInUse, baseline: &MemoryInUse) -> bool {
    baseline.iter().all(|(index, before)| now.get(index).is_some_and(|used| *used <= before + SLACK_MIB))
}

/// Parses lines such as `0, 1234` for the devices in `wanted`, or for all devices if `wanted` is
/// empty.
fn parse(text: &str, wanted: &[u16]) -> MemoryInUse {
    let lines = text.lines().filter_map(|line| {
        let (index, used) = line.split_once(',')?;
        Some((index.trim().parse().ok()?, used.trim().parse().ok()?))
    });
    lines.filter(|(index, _)| wanted.is_empty() || wanted.contains(index)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::test_programs::write_program;

    /// A program that prints the first line of a list and removes it, except for the last line.
    fn smi(readings: &[&str]) -> (tempfile::TempDir, Devices) {
        let folder = tempfile::tempdir().unwrap();
        let (program, list) = (folder.path().join("smi"), folder.path().join("list"));
        fs::write(&list, readings.join("\n") + "\n").unwrap();
        let script = format!(
            "#!/bin/sh\nhead -1 {0} | tr ';' '\\n'\nif [ $(wc -l <{0}) -gt 1 ]; then sed -i 1d {0}; fi\n",
            list.display()
        );
        write_program(&program, &script);
        (folder, Devices::new(program, vec![61]))
    }

    #[tokio::test]
    async fn memory_is_back_when_two_readings_say_so() {
        let (_folder, devices) =
            smi(&["60, 9;61, 500", "61, 60000", "61, 600", "61, 9000", "61, 700", "61, 756", "61, 1"]);
        let baseline = devices.memory_in_use().await.unwrap();
        assert_eq!(baseline, BTreeMap::from([(61, 500)]));
        assert_eq!(devices.wait_for_memory(&baseline, Duration::from_secs(20)).await, Ok(Some(true)));
        assert_eq!(
            devices.memory_in_use().await.unwrap(),
            BTreeMap::from([(61, 1)]),
            "it took another number of readings"
        );
    }

    #[tokio::test]
    async fn memory_that_stays_in_use_is_an_error() {
        let (_folder, devices) = smi(&["61, 40000"]);
        let kept = devices.wait_for_memory(&BTreeMap::from([(61, 500)]), Duration::ZERO).await;
        assert_eq!(kept, Err(BTreeMap::from([(61, 40_000)])));
    }

    #[tokio::test]
    async fn an_engine_has_room_if_its_share_and_a_context_are_free() {
        for (in_use, share, fits) in [(2_600, 0.9, true), (9_300, 0.9, false), (2_600, 0.97, false), (0, 0.99, true)] {
            let (_folder, devices) = smi(&[&format!("61, {in_use}"), "61, 100000"]);
            assert_eq!(devices.check_room(share).await.is_ok(), fits, "{in_use} MiB in use, share {share}");
        }
        let (_folder, devices) = smi(&["60, 5"]);
        assert!(devices.check_room(0.1).await.unwrap_err().contains("nvidia-smi"), "its device is not shown");
    }

    #[test]
    fn the_devices_of_an_engine_are_those_that_it_may_see() {
        let indices = |gpu: &[Gpu], visible: Option<&str>| {
            let env =
                visible.map(|list| ("CUDA_VISIBLE_DEVICES".to_owned(), list.to_owned().into())).into_iter().collect();
            Devices::of(&Launch { gpu: gpu.to_vec(), env, ..Launch::of(vec!["vllm".to_owned()].into(), 1) }).indices
        };
        assert_eq!(indices(&[Gpu::Index(3)], Some("5")), [3]);
        assert!(indices(&[Gpu::Name("MIG-1".to_owned())], Some("5")).is_empty(), "a slice is no whole GPU");
        assert_eq!(indices(&[], Some("5, 7")), [5, 7]);
        assert!(indices(&[], Some("GPU-1a2b")).is_empty(), "a name is no index");
    }

    #[tokio::test]
    async fn without_a_program_or_with_two_engines_memory_is_not_waited_for() {
        let no_program = Devices::new("/nonexistent/nvidia-smi", vec![62]);
        assert_eq!(no_program.memory_in_use().await, None);
        let (_folder, devices) = smi(&["61, 40000"]);
        let (one, _two) = (devices.register_engine(), devices.register_engine());
        assert!(devices.are_shared());
        drop(one);
        assert!(!devices.are_shared());
    }
}
