//! Checks the devices of all engines together: that the GPUs and MIG slices exist, and that the
//! memory of a device is enough for the engines on it.
//!
//! `nvidia-smi -L` lists the devices. Without it, names cannot be checked, and two names of one GPU
//! count as two devices. Memory is checked for vLLM, whose flag says which part of a device it
//! takes; engines of one `share` take turns, so the largest of them counts. Bounds:
//! [`LIST_TIMEOUT`] for the list, [`LIST_BYTES`] of it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use crate::engine::spec::EngineSpec;
use crate::launch::memory_share;
use sluice_config::{Gpu, Target};
use sluice_core::engines::EngineKind;

/// Longest wait for `nvidia-smi`; without the persistence daemon the first call takes seconds.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// The part of the list that is read: a line has about 100 bytes, and 8 GPUs have 56 slices.
const LIST_BYTES: usize = 1 << 20;
/// Excess of a sum of shares by rounding: 3 times 0.33 and 0.01 fit.
const ROUNDING: f64 = 1e-6;

/// The GPUs of this machine, with their MIG slices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstalledDevices(Vec<InstalledGpu>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct InstalledGpu {
    index: u16,
    name: String,
    slices: Vec<String>,
}

/// A GPU, or one slice of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    gpu: String,
    slice: Option<String>,
}

impl InstalledDevices {
    /// The devices that `nvidia-smi` of the `PATH` lists; `None` if it cannot be run.
    pub async fn read() -> Option<Self> {
        Self::read_with("nvidia-smi".as_ref()).await
    }

    async fn read_with(program: &OsStr) -> Option<Self> {
        let mut command = Command::new(program);
        command.arg("-L").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let output = timeout(LIST_TIMEOUT, command.output()).await.ok()?.ok()?;
        let text = &output.stdout[..output.stdout.len().min(LIST_BYTES)];
        output.status.success().then(|| Self::parse(&String::from_utf8_lossy(text)))
    }

    /// Reads lines such as `GPU 0: NVIDIA H200 (UUID: GPU-1a2b)`, and below them the slices, such
    /// as ` MIG 1g.18gb Device 0: (UUID: MIG-3c4d)`.
    fn parse(text: &str) -> Self {
        let mut gpus: Vec<InstalledGpu> = Vec::new();
        for line in text.lines() {
            let Some((before, name)) = line.rsplit_once("(UUID: ") else { continue };
            let name = name.trim_end().trim_end_matches(')').to_owned();
            let index = before.strip_prefix("GPU ").and_then(|rest| rest.split(':').next()?.trim().parse().ok());
            match (index, gpus.last_mut()) {
                (Some(index), _) => gpus.push(InstalledGpu { index, name, slices: Vec::new() }),
                (None, Some(gpu)) if name.starts_with("MIG-") => gpu.slices.push(name),
                (None, _) => {}
            }
        }
        Self(gpus)
    }

    /// The place of a device. CUDA accepts the beginning of a name if it is unique.
    fn find(&self, device: &Gpu) -> Option<Place> {
        let whole = |gpu: &InstalledGpu| Place { gpu: gpu.index.to_string(), slice: None };
        match device {
            Gpu::Index(index) => self.0.iter().find(|gpu| gpu.index == *index).map(whole),
            Gpu::Name(name) if device.is_slice() => self.0.iter().find_map(|gpu| {
                let slice = gpu.slices.iter().find(|slice| slice.starts_with(name.as_str()))?;
                Some(Place { slice: Some(slice.clone()), ..whole(gpu) })
            }),
            Gpu::Name(name) => self.0.iter().find(|gpu| gpu.name.starts_with(name.as_str())).map(whole),
        }
    }

    fn slices_of(&self, gpu: &str) -> usize {
        self.0.iter().find(|installed| installed.index.to_string() == gpu).map_or(0, |gpu| gpu.slices.len())
    }

    fn missing(&self, device: &Gpu) -> String {
        let listed = |names: Vec<String>| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        if device.is_slice() {
            let slices = self.0.iter().flat_map(|gpu| gpu.slices.clone()).collect();
            return format!("there is no slice {device}; nvidia-smi -L lists the slices: {}", listed(slices));
        }
        let gpus = self.0.iter().map(|gpu| format!("{} ({})", gpu.index, gpu.name)).collect();
        format!("there is no GPU {device}; nvidia-smi -L lists the GPUs: {}", listed(gpus))
    }
}

/// The result of [`check_devices`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFindings {
    /// Positions of engines that could not start, and why.
    pub refused: Vec<(usize, String)>,
    /// Facts that prevent no start.
    pub remarks: Vec<String>,
}

/// Whether the devices of an engine have to be looked up, because it names a GPU or a slice.
pub fn names_devices(specs: &[EngineSpec]) -> bool {
    specs.iter().flat_map(devices).any(|device| matches!(device, Gpu::Name(_)))
}

fn devices(spec: &EngineSpec) -> &[Gpu] {
    match &spec.target {
        Target::Launch(launch) => &launch.gpu,
        Target::Url(_) | Target::Control(..) | Target::Pod(..) => &[],
    }
}

/// Checks the devices of all engines of a configuration. `installed`: `None` if unknown.
pub fn check_devices(specs: &[EngineSpec], installed: Option<&InstalledDevices>) -> DeviceFindings {
    let mut found = DeviceFindings::default();
    let mut users: BTreeMap<Place, Vec<usize>> = BTreeMap::new();
    for (position, spec) in specs.iter().enumerate() {
        for device in devices(spec) {
            let place = match installed {
                None => Some(Place { gpu: device.to_string(), slice: None }),
                Some(installed) => installed.find(device),
            };
            match (place, installed) {
                (Some(place), _) => users.entry(place).or_default().push(position),
                (None, Some(installed)) => found.refused.push((position, installed.missing(device))),
                (None, None) => {}
            }
        }
    }
    for (place, engines) in &users {
        found.refused.extend(too_little_memory(specs, place, engines));
    }
    match installed {
        Some(installed) => slices(specs, installed, &users, &mut found),
        None if names_devices(specs) => found.remarks.push(
            "nvidia-smi cannot be run here, so it is not checked whether the named GPUs and slices exist".to_owned(),
        ),
        None => {}
    }
    found
}

/// Counts the slices in use, and finds GPUs that are used as a whole and by slices.
fn slices(
    specs: &[EngineSpec],
    installed: &InstalledDevices,
    users: &BTreeMap<Place, Vec<usize>>,
    found: &mut DeviceFindings,
) {
    let gpus: BTreeSet<&String> = users.keys().map(|place| &place.gpu).collect();
    for gpu in gpus {
        let exist = installed.slices_of(gpu);
        let of_gpu = || users.iter().filter(|(place, _)| place.gpu == *gpu);
        let used: Vec<&Vec<usize>> =
            of_gpu().filter(|(place, _)| place.slice.is_some()).map(|(_, engines)| engines).collect();
        let whole = of_gpu().find(|(place, _)| place.slice.is_none()).map(|(_, engines)| engines);
        match (whole, used.first()) {
            (Some(whole), Some(slice)) => {
                let (position, other) = (whole[0].max(slice[0]), whole[0].min(slice[0]));
                let other = &specs[other].name;
                found.refused.push((
                    position,
                    format!("gpu {gpu} is used as a whole and by slices, here and by {other}; name slices in both"),
                ));
            }
            (Some(whole), None) if exist > 0 => found.remarks.push(format!(
                "{}: gpu {gpu} is divided into {exist} slices, of which CUDA shows the engine only the first; name a slice",
                specs[whole[0]].name
            )),
            _ => {}
        }
        if !used.is_empty() {
            found.remarks.push(format!("gpu {gpu}: {} of {exist} slices are used", used.len()));
        }
    }
}

/// If the engines on a device take more than the whole memory, the last of them, and the failure.
fn too_little_memory(specs: &[EngineSpec], place: &Place, engines: &[usize]) -> Option<(usize, String)> {
    let mut parts: Vec<(&EngineSpec, f64)> = Vec::new();
    for spec in engines.iter().map(|at| &specs[*at]) {
        let Target::Launch(launch) = &spec.target else { continue };
        let part = memory_share(launch, &spec.settings).filter(|_| spec.address.engine == EngineKind::Vllm);
        let Some(part) = part else { continue };
        match parts.iter_mut().find(|(other, _)| other.share().is_some() && other.share() == spec.share()) {
            Some((_, most)) => *most = part.max(*most),
            None => parts.push((spec, part)),
        }
    }
    let sum: f64 = parts.iter().map(|(_, part)| part).sum();
    if parts.len() < 2 || sum <= 1.0 + ROUNDING {
        return None;
    }
    let listed: Vec<String> = parts.iter().map(|(spec, part)| format!("{} {part}", spec.name)).collect();
    let device = place.slice.as_deref().map_or_else(|| format!("gpu {}", place.gpu), str::to_owned);
    let why = format!(
        "the engines on {device} take {sum:.2} of its memory ({}); together they may take 1; set gpu-memory-utilization \
         of each, which is 0.9 or more by default, or let them take turns (share)",
        listed.join(", ")
    );
    Some((*engines.last()?, why))
}

#[cfg(test)]
mod tests;
