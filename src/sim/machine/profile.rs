//! A profile: a GPU, a model and the fitted constants, combined into the rates that determine the
//! time of a step.
//!
//! ```text
//! Gpu (vendor's peaks) + Model (sizes) + Constants (shares, costs) -> Profile (effective rates)
//! gpu/*.toml             model/*.toml    constants.toml, host/*.toml
//! ```
//!
//! A group of `tensor_parallel` GPUs divides weights, KV cache and FLOPs, and adds two all-reduces
//! per layer. With fp8 weights the linear layers have half the bytes. The rate of these layers
//! differs only on a GPU with fp8 arithmetic.

use super::constants::{Constants, FrontEndRates, HostConstants, KernelConstants, StepConstants};
use super::gpu::Gpu;
use super::layout::Layout;
use super::memory::{MemorySettings, kv_budget};
use super::model::Model;
use super::preset::ProfileError;

/// Names that [`Profile::named`] knows, each for a GPU and a model.
pub const PROFILES: &[&str] = &["h200-llama-8b"];

/// A GPU and a model: shape, memory and rates.
#[derive(Clone, Debug)]
pub struct Profile {
    /// The GPU.
    pub gpu: Gpu,
    /// The model.
    pub model: Model,
    /// Group size and number formats.
    pub layout: Layout,
    /// The model's dimensions on one GPU of the group.
    pub shape: Shape,
    /// Size of the KV cache with vLLM's defaults, and these defaults.
    pub memory: Memory,
    /// Rates and costs of a step.
    pub cost: Rates,
    /// Costs of the API server in front of the engine.
    pub front_end: FrontEndRates,
    /// The constants of the profile, with the overrides of the GPU.
    pub constants: Constants,
}

/// Dimensions of the part of a model that is on one GPU.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Transformer layers.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// Query heads x head size.
    pub hidden: u32,
    /// Parameters by which every token is multiplied.
    pub linear_parameters: f64,
    /// Parameters by which sampled tokens are multiplied.
    pub head_parameters: f64,
    /// Bytes of weights read in every step.
    pub weight_bytes: f64,
    /// Bytes of KV cache per token.
    pub kv_bytes_per_token: f64,
    /// Longest context that the model supports, tokens.
    pub max_model_len: u32,
}

/// KV capacity and default limits.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Tokens that fit the KV cache; 0 if the model does not fit.
    pub kv_tokens: u32,
    /// Default of `--max-num-seqs`.
    pub max_num_seqs: u32,
    /// Default of `--max-num-batched-tokens`.
    pub max_num_batched_tokens: u32,
}

/// Rates and costs of a step on one GPU of the group.
#[derive(Clone, Debug)]
pub struct Rates {
    /// Effective bandwidth for weights, bytes per second.
    pub weights_per_s: f64,
    /// Effective bandwidth for the KV cache, bytes per second, in steps that only decode.
    pub kv_cache_per_s: f64,
    /// As `kv_cache_per_s`, in steps that also prefill.
    pub mixed_kv_cache_per_s: f64,
    /// Effective rate of the linear layers, FLOP per second.
    pub linear_flops_per_s: f64,
    /// As `linear_flops_per_s` for the output head, which stays in bf16.
    pub head_flops_per_s: f64,
    /// Tokens that linear layers with more than a tile could compute in addition without taking
    /// longer.
    pub idle_tokens: f64,
    /// Effective rate of the attention of prompts, FLOP per second.
    pub attention_flops_per_s: f64,
    /// Attention tiles that are computed at the same time.
    pub tiles_at_once: f64,
    /// All-reduces in a group, seconds per step.
    pub reduce_s_per_step: f64,
    /// All-reduces in a group, seconds per token.
    pub reduce_s_per_token: f64,
    /// Bytes of a LoRA adapter on one GPU, for each unit of the adapter's rank.
    pub adapter_bytes_per_rank: f64,
    /// How kernels use the GPU.
    pub kernel: KernelConstants,
    /// Fixed costs of a step.
    pub step: StepConstants,
    /// Costs of the engine's CPU.
    pub host: HostConstants,
}

impl Profile {
    /// The profile with this name from [`PROFILES`].
    pub fn named(name: &str) -> Option<Self> {
        let (gpu, model) = match name {
            "h200-llama-8b" => ("h200", "llama-3.1-8b"),
            _ => return None,
        };
        let (gpu, model) = (Gpu::load(gpu).ok()?, Model::load(model).ok()?);
        Self::new(gpu, model, Layout::default(), &Constants::fitted()).ok()
    }

    /// The same profile where the CPU takes `factor` times as long: the engine's process and the
    /// API server.
    #[must_use]
    pub fn with_cpu_time(&self, factor: f64) -> Self {
        let mut slower = self.clone();
        let (host, front) = (&mut slower.cost.host, &mut slower.front_end);
        let times = [
            &mut host.step_us,
            &mut host.sequence_us,
            &mut host.launch_layer_us,
            &mut host.lora_launch_layer_us,
            &mut host.prompt_step_us,
            &mut front.request_us,
            &mut front.request_token_us,
            &mut front.token_us,
            &mut front.first_us,
            &mut front.first_token_us,
            &mut front.text_us,
            &mut front.text_token_us,
            &mut front.in_us,
            &mut front.out_us,
        ];
        times.into_iter().for_each(|time| *time *= factor);
        host.unpinned_gb_per_s /= factor;
        slower
    }

    /// Combines a GPU, a model and constants.
    ///
    /// # Errors
    /// The group cannot divide the model's heads, the GPU has no link for a group, or the constants
    /// that the GPU overrides are invalid.
    pub fn new(gpu: Gpu, model: Model, layout: Layout, constants: &Constants) -> Result<Self, ProfileError> {
        let wrong = |error: String| ProfileError::Wrong { what: "GPU", name: gpu.title.clone(), error };
        let group = layout.tensor_parallel.max(1);
        if !model.heads.is_multiple_of(group) {
            return Err(wrong(format!("{} heads cannot be divided among {group} GPUs; choose a divisor", model.heads)));
        }
        let (latency, link) = match (group, gpu.link_latency_us, gpu.link_gb_per_s) {
            (1, ..) => (0.0, f64::INFINITY),
            (_, Some(latency), Some(link)) => (latency * 1e-6, link * 1e9),
            _ => return Err(wrong("a group of GPUs needs link_gb_per_s and link_latency_us".to_owned())),
        };
        let constants = constants.with_overrides(gpu.overrides(), &gpu.title)?;
        let share = f64::from(group);
        // With fewer key heads than GPUs, key heads are replicated.
        let kv_share = f64::from(group.min(model.kv_heads));
        let weight_element = if layout.fp8_weights { 1.0 } else { 2.0 };
        let kv_element = if layout.fp8_kv { 1.0 } else { 2.0 };
        let Constants { efficiency, kernel, .. } = &constants;
        let (linear_tflops, idle_tokens) = match gpu.fp8_tflops {
            Some(fp8) if layout.fp8_weights => (fp8 * efficiency.fp8_linear, kernel.fp8_idle_tokens),
            _ => (gpu.bf16_tflops * efficiency.linear, 0.0),
        };
        let (layers, head) = (model.layer_parameters() / share, model.head_parameters() / share);
        let shape = Shape {
            layers: model.layers,
            heads: model.heads / group,
            hidden: model.heads * model.head_dim / group,
            linear_parameters: layers,
            head_parameters: head,
            weight_bytes: layers * weight_element + head * 2.0,
            kv_bytes_per_token: model.kv_bytes_per_token(kv_element) / kv_share,
            max_model_len: model.max_model_len,
        };
        let ring = 2.0 * (share - 1.0) / share;
        let reduces = 2.0 * f64::from(model.layers);
        let bandwidth = gpu.bandwidth_gb_per_s * 1e9;
        let cost = Rates {
            weights_per_s: bandwidth * constants.efficiency.bandwidth,
            kv_cache_per_s: bandwidth * constants.efficiency.kv_cache,
            mixed_kv_cache_per_s: bandwidth * constants.efficiency.mixed_kv_cache,
            linear_flops_per_s: linear_tflops * 1e12,
            head_flops_per_s: gpu.bf16_tflops * 1e12 * efficiency.linear,
            idle_tokens: idle_tokens * f64::from(gpu.multiprocessors),
            attention_flops_per_s: gpu.bf16_tflops * 1e12 * constants.efficiency.attention,
            tiles_at_once: f64::from(gpu.multiprocessors),
            reduce_s_per_step: reduces * latency,
            reduce_s_per_token: reduces * ring * f64::from(model.hidden) * 2.0 / link,
            adapter_bytes_per_rank: 2.0 * model.adapter_elements_per_rank() / share,
            kernel: constants.kernel.clone(),
            step: constants.step.clone(),
            host: constants.host.clone(),
        };
        let settings = MemorySettings { layout, ..MemorySettings::default() };
        let memory = Memory {
            kv_tokens: kv_budget(&gpu, &model, &settings).map_or(0, |budget| budget.tokens()),
            max_num_seqs: settings.max_num_seqs,
            max_num_batched_tokens: settings.max_num_batched_tokens,
        };
        Ok(Self { gpu, model, layout, shape, memory, cost, front_end: constants.front_end.clone(), constants })
    }
}
