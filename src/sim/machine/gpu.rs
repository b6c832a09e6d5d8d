//! A GPU as the vendor describes it: memory, bandwidth, FLOPs. A few lines of TOML, built in or
//! from a file.
//!
//! No value is measured. The shares of the peaks that an engine reaches are in [`Constants`]. The
//! file of a GPU can override single constants.

use serde::Deserialize;

use super::constants::Constants;
use super::preset::{ProfileError, find, parse};

const GPUS: &[(&str, &str)] = &[
    ("h200", include_str!("gpu/h200.toml")),
    ("h100-80", include_str!("gpu/h100-80.toml")),
    ("a100-80", include_str!("gpu/a100-80.toml")),
    ("rtx3080-10", include_str!("gpu/rtx3080-10.toml")),
    ("l4", include_str!("gpu/l4.toml")),
];

/// Bytes of a GiB.
pub const GIB: f64 = (1u64 << 30) as f64;

/// A GPU with the peaks that the vendor states.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Name as shown by the driver.
    #[serde(default)]
    pub title: String,
    /// Memory that PyTorch sees, GiB.
    pub memory_gib: f64,
    /// Memory of the CUDA context, GiB. It is never free, and vLLM does not count it.
    pub context_gib: f64,
    /// Memory that libraries allocate outside PyTorch while vLLM profiles its memory, GiB.
    pub reserved_gib: f64,
    /// Peak memory bandwidth, 10^9 bytes per second.
    pub bandwidth_gb_per_s: f64,
    /// Peak rate of dense bf16 matrix products with fp32 accumulation, 10^12 FLOP per second.
    pub bf16_tflops: f64,
    /// Number of streaming multiprocessors. Each computes one tile at a time.
    pub multiprocessors: u32,
    /// Peak rate in fp8, 10^12 FLOP per second. `None`: the GPU has no fp8 arithmetic, so weights
    /// are unpacked to bf16.
    pub fp8_tflops: Option<f64>,
    /// Bandwidth to the other GPUs of a tensor-parallel group, one direction, 10^9 bytes per
    /// second.
    pub link_gb_per_s: Option<f64>,
    /// Time of an all-reduce of a few kilobytes in a tensor-parallel group, microseconds.
    pub link_latency_us: Option<f64>,
    /// Overrides entries of [`Efficiency`](super::constants::Efficiency) for this GPU; usually
    /// empty.
    #[serde(default)]
    pub efficiency: toml::Table,
    /// Overrides entries of [`KernelConstants`](super::constants::KernelConstants).
    #[serde(default)]
    pub kernel: toml::Table,
    /// Overrides entries of [`StepConstants`](super::constants::StepConstants).
    #[serde(default)]
    pub step: toml::Table,
    /// Overrides entries of [`HostConstants`](super::constants::HostConstants).
    #[serde(default)]
    pub host: toml::Table,
    /// Overrides entries of [`FrontEndRates`](super::constants::FrontEndRates).
    #[serde(default)]
    pub front_end: toml::Table,
}

impl Gpu {
    /// Names of the built-in GPUs.
    pub fn names() -> impl Iterator<Item = &'static str> {
        GPUS.iter().map(|(name, _)| *name)
    }

    /// The built-in GPU with this name (an unambiguous prefix is enough; case and punctuation are
    /// ignored), or the GPU in the file at this path.
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        let text = find("GPU", name, GPUS)?;
        let gpu: Self = parse(
            "GPU",
            name,
            &text,
            &["memory_gib", "context_gib", "reserved_gib", "bandwidth_gb_per_s", "bf16_tflops", "multiprocessors"],
        )?;
        let optional = [gpu.fp8_tflops, gpu.link_gb_per_s].map(|value| value.unwrap_or(1.0));
        let positive = [gpu.memory_gib, gpu.bandwidth_gb_per_s, gpu.bf16_tflops].into_iter().chain(optional);
        if gpu.multiprocessors == 0 || positive.into_iter().any(|value| !(value.is_finite() && value > 0.0)) {
            let error = "sizes and rates must be above 0".to_owned();
            return Err(ProfileError::Wrong { what: "GPU", name: name.to_owned(), error });
        }
        Constants::fitted().with_overrides(gpu.overrides(), name)?;
        Ok(gpu)
    }

    pub(super) fn overrides(&self) -> [(&'static str, &toml::Table); 5] {
        let Self { efficiency, kernel, step, host, front_end, .. } = self;
        [("efficiency", efficiency), ("kernel", kernel), ("step", step), ("host", host), ("front_end", front_end)]
    }
}
