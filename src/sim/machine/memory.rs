//! The size of the KV cache, computed as vLLM does at start-up.
//!
//! ```text
//! KV bytes = utilisation x memory    all memory that vLLM may use
//!          - weights                 layers, output head, and embedding table unless tied
//!          - activations             peak of one full step: grows with the token budget
//!                                    and with sequences x vocabulary
//!          - reserved                allocated by libraries outside PyTorch while vLLM measures
//!          - graphs                  vLLM's estimate for all captured sizes; twice with LoRA
//!          - LoRA slots              max_loras adapters of max_lora_rank
//! blocks   = KV bytes / (16 tokens x bytes per token), rounded down
//! ```
//!
//! All sizes are per GPU of a tensor-parallel group. The parts match the reports of vLLM 0.22.1 on
//! an H200 with Llama-3.1-8B (weights 15.00 GiB, activations 1.17 GiB at 8,192 tokens). Together
//! they give the reported 916,816 tokens at a utilisation of 0.92, and 912,000 with one adapter
//! slot of rank 16. An error means that vLLM would refuse to start.

use super::gpu::{GIB, Gpu};
use super::graphs::{GraphMode, Graphs};
use super::layout::Layout;
use super::model::Model;

const BLOCK: u32 = 16;
/// Memory that vLLM reserves for the first (largest) graph of a model with [`GRAPH_LAYERS`] layers.
/// vLLM captures graphs of the two largest sizes, and counts every further graph like the second
/// one.
const FIRST_GRAPH: f64 = 134.0 * MIB;
/// Memory for each further piecewise graph.
const PIECEWISE_GRAPH: f64 = 6.0 * MIB;
/// As [`PIECEWISE_GRAPH`] with [`Graphs::is_sparse`] sizes, where the second graph cannot reuse the
/// memory of the first. Measured once: vLLM estimated 16.3 GiB for 41 piecewise and 35 full graphs
/// up to 1,280 tokens, which then used 0.92 GiB.
const SPARSE_GRAPH: f64 = 410.0 * MIB;
/// Memory for each full graph.
const FULL_GRAPH: f64 = 2.0 * MIB;
const GRAPH_LAYERS: f64 = 32.0;
/// Peak memory of a full step, in bf16 values per token, as a multiple of the hidden width.
const HIDDEN_COPIES: f64 = 8.2;
/// Added to [`HIDDEN_COPIES`], as a multiple of the MLP's inner width.
const INNER_COPIES: f64 = 3.0;
/// Copies of the fp32 logits during the warm-up of the sampler.
const LOGIT_COPIES: f64 = 3.0;
/// Bytes of norms and of the tables of the position encoding.
const EXTRA_WEIGHTS: f64 = 51.0e6;
/// Bytes of LoRA buffers that do not depend on the number of slots.
const LORA_FIXED: f64 = 22.0e6;
const MIB: f64 = (1u64 << 20) as f64;

/// Settings that determine the size of the cache, named like vLLM's flags. The defaults describe
/// the measured server.
#[derive(Clone, Debug, PartialEq)]
pub struct MemorySettings {
    /// `--gpu-memory-utilization`: share of the GPU's memory.
    pub utilisation: f64,
    /// `--max-num-seqs`.
    pub max_num_seqs: u32,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: u32,
    /// Group size and number formats.
    pub layout: Layout,
    /// `--max-loras` and `--max-lora-rank`, if LoRA is enabled.
    pub lora: Option<(u32, u32)>,
    /// CUDA graphs.
    pub graphs: Graphs,
    /// `--kv-cache-memory-bytes`: the size of the cache. The weights must still fit.
    pub kv_cache_bytes: Option<u64>,
    /// Bytes that other processes use.
    pub occupied_bytes: f64,
}

impl Default for MemorySettings {
    fn default() -> Self {
        Self {
            utilisation: 0.92,
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            layout: Layout::default(),
            lora: None,
            graphs: Graphs::chosen(256, 8192, None),
            kv_cache_bytes: None,
            occupied_bytes: 0.0,
        }
    }
}

/// The parts of one GPU's memory, bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvBudget {
    /// Blocks of 16 tokens, including the null block.
    pub blocks: u32,
    /// Bytes available for the cache.
    pub available: f64,
    /// Bytes per token in the cache.
    pub per_token: f64,
    /// Bytes of the weights.
    pub weights: f64,
    /// Peak bytes of a full step.
    pub activations: f64,
    /// Bytes of CUDA graphs.
    pub graphs: f64,
    /// Bytes of adapter slots.
    pub lora: f64,
}

impl KvBudget {
    /// Tokens in all blocks, as vLLM logs them.
    pub fn tokens(&self) -> u32 {
        self.blocks.saturating_mul(BLOCK)
    }

    /// The longest context that fits the cache, in tokens. One block is kept empty. vLLM prints
    /// this estimate when `--max-model-len` does not fit.
    pub fn longest(&self) -> u32 {
        self.blocks.saturating_sub(1).saturating_mul(BLOCK)
    }
}

/// Why an engine does not start. Sizes are in bytes.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum MemoryError {
    #[error("{free:.2} of {total:.2} GiB are free, but {wanted:.2} GiB are requested; lower the utilisation", free = free / GIB, total = total / GIB, wanted = wanted / GIB)]
    Occupied { free: f64, total: f64, wanted: f64 },
    #[error("the weights need {weights:.2} GiB, but only {free:.2} GiB are free; use more GPUs or --quantization fp8", weights = weights / GIB, free = free / GIB)]
    Weights { weights: f64, free: f64 },
    #[error("the sampler's warm-up with {seqs} requests does not fit; lower max_num_seqs or the utilisation")]
    Sampler { seqs: u32 },
    #[error("no memory is left for the KV cache ({available:.2} GiB); raise the utilisation", available = available / GIB)]
    NoCache { available: f64 },
}

/// The memory of `model` on `gpu` with these settings.
///
/// # Errors
/// The reason for which vLLM would not start.
pub fn kv_budget(gpu: &Gpu, model: &Model, settings: &MemorySettings) -> Result<KvBudget, MemoryError> {
    let total = gpu.memory_gib * GIB;
    let free = total - settings.occupied_bytes;
    let wanted = settings.utilisation * total;
    if wanted > free {
        return Err(MemoryError::Occupied { free, total, wanted });
    }
    let Layout { tensor_parallel, fp8_weights, fp8_kv } = settings.layout;
    let group = f64::from(tensor_parallel.max(1));
    let weights = weight_bytes(model, fp8_weights) / group;
    let (context, reserved) = (gpu.context_gib * GIB, gpu.reserved_gib * GIB);
    if weights > free - context {
        return Err(MemoryError::Weights { weights, free: free - context });
    }
    let activations = activation_bytes(model, settings, group);
    let logits = LOGIT_COPIES * 4.0 * f64::from(settings.max_num_seqs) * f64::from(model.vocabulary);
    let graphs = graph_bytes(model, settings);
    let lora = settings.lora.map_or(0.0, |(slots, rank)| {
        LORA_FIXED + 2.0 * f64::from(slots) * f64::from(rank) * model.adapter_elements_per_rank() / group
    });
    let available = match settings.kv_cache_bytes {
        Some(bytes) => bytes as f64,
        None => wanted - weights - activations - reserved - graphs - lora,
    };
    let per_token = model.kv_bytes_per_token(if fp8_kv { 1.0 } else { 2.0 }) / group.min(f64::from(model.kv_heads));
    let blocks = (available / per_token / f64::from(BLOCK)).max(0.0) as u32;
    if blocks == 0 {
        return Err(MemoryError::NoCache { available });
    }
    if weights + context + reserved + available + graphs + lora + logits > free {
        return Err(MemoryError::Sampler { seqs: settings.max_num_seqs });
    }
    Ok(KvBudget { blocks, available, per_token, weights, activations, graphs, lora })
}

/// Bytes of all parameters. Embeddings and the output head are always bf16.
fn weight_bytes(model: &Model, fp8: bool) -> f64 {
    let tables = if model.tied_embeddings { 1.0 } else { 2.0 };
    model.layer_parameters() * if fp8 { 1.0 } else { 2.0 } + tables * model.head_parameters() * 2.0 + EXTRA_WEIGHTS
}

/// Peak bytes of a full step or of the sampler, whichever is larger.
fn activation_bytes(model: &Model, settings: &MemorySettings, group: f64) -> f64 {
    let tokens = f64::from(settings.max_num_batched_tokens);
    let (hidden, inner) = (f64::from(model.hidden), f64::from(model.intermediate) / group);
    let step = 2.0 * tokens * (HIDDEN_COPIES * hidden + INNER_COPIES * inner);
    let logits = LOGIT_COPIES * 4.0 * f64::from(settings.max_num_seqs) * f64::from(model.vocabulary);
    step.max(logits)
}

/// Bytes reserved for graphs; twice as much with LoRA.
fn graph_bytes(model: &Model, settings: &MemorySettings) -> f64 {
    let (piecewise, full) = settings.graphs.counts();
    if piecewise + full == 0 {
        return 0.0;
    }
    let sparse = settings.graphs.is_sparse();
    let further = if sparse { SPARSE_GRAPH } else { PIECEWISE_GRAPH };
    // In this mode the second graph that vLLM captures is a full graph. Its memory was not
    // measured, and is assumed to equal the memory of a piecewise graph.
    let further_full = if sparse && settings.graphs.mode() == GraphMode::Full { SPARSE_GRAPH } else { FULL_GRAPH };
    let sets = if settings.lora.is_some() { 2.0 } else { 1.0 };
    let beyond_first = |count: usize| count.saturating_sub(1) as f64;
    let bytes = FIRST_GRAPH + further * beyond_first(piecewise) + further_full * beyond_first(full);
    sets * bytes * f64::from(model.layers) / GRAPH_LAYERS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(gpu: &str, model: &str, settings: MemorySettings) -> Result<KvBudget, MemoryError> {
        kv_budget(&Gpu::load(gpu).unwrap(), &Model::load(model).unwrap(), &settings)
    }

    #[test]
    fn an_h200_has_the_cache_that_it_reported() {
        let plain = budget("h200", "llama-3.1-8b", MemorySettings::default()).unwrap();
        assert_eq!(plain.tokens(), 916_816);
        let lora = MemorySettings { lora: Some((1, 16)), ..MemorySettings::default() };
        let tokens = budget("h200", "llama-3.1-8b", lora).unwrap().tokens();
        assert_eq!(tokens, 912_000);
    }

    #[test]
    fn half_the_number_format_or_half_the_group_leaves_more_room() {
        let tokens = |layout: Layout| {
            budget("h200", "llama-3.1-8b", MemorySettings { layout, ..MemorySettings::default() }).unwrap().tokens()
        };
        let plain = tokens(Layout::default());
        let fp8_kv = tokens(Layout { fp8_kv: true, ..Layout::default() });
        assert!(fp8_kv.abs_diff(2 * plain) <= 16, "{fp8_kv}");
        assert!(tokens(Layout { fp8_weights: true, ..Layout::default() }) > plain + 50_000);
        assert!(tokens(Layout { tensor_parallel: 2, ..Layout::default() }) > 2 * plain);
    }

    #[test]
    fn a_10_gb_card_refuses_bf16_weights_and_takes_fp8() {
        let small = MemorySettings {
            utilisation: 0.95,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            graphs: Graphs::chosen(64, 2048, None),
            ..MemorySettings::default()
        };
        let refused = budget("rtx3080-10", "llama-3.1-8b", small.clone()).unwrap_err();
        assert!(matches!(refused, MemoryError::Weights { .. }), "{refused}");
        let layout = Layout { fp8_weights: true, fp8_kv: true, tensor_parallel: 1 };
        let budget = budget("rtx3080-10", "llama-3.1-8b", MemorySettings { layout, ..small }).unwrap();
        assert!((500..20_000).contains(&budget.longest()), "{}", budget.longest());
    }

    #[test]
    fn every_refusal_says_what_to_do() {
        let at = |settings: MemorySettings| budget("l4", "llama-3.1-8b", settings).unwrap_err().to_string();
        let base = MemorySettings::default();
        assert!(at(MemorySettings { utilisation: 0.7, ..base.clone() }).contains("raise the utilisation"));
        assert!(at(MemorySettings { occupied_bytes: 8.0 * GIB, ..base.clone() }).contains("lower the utilisation"));
        let cache = MemorySettings { kv_cache_bytes: Some(6 << 30), max_num_seqs: 1024, ..base };
        assert!(at(cache).contains("lower max_num_seqs"));
    }

    #[test]
    fn graphs_cost_what_vllm_sets_aside_for_them() {
        let tokens = |graphs: Graphs| {
            let settings = MemorySettings { graphs, ..MemorySettings::default() };
            budget("h200", "llama-3.1-8b", settings).unwrap().tokens()
        };
        // The sizes that vLLM 0.22.1 reported.
        assert!(tokens(Graphs::none()).abs_diff(922_256) < 2000, "eager: {}", tokens(Graphs::none()));
        let wide = tokens(Graphs::chosen(256, 8192, Some(1280)));
        assert!(wide.abs_diff(914_320) < 500, "99 piecewise graphs: {wide}");
        let sizes = [1, 2, 4].into_iter().chain((8..=256).step_by(8)).chain([384, 512, 640, 768, 1024, 1280]);
        let sparse = Graphs::of_sizes(sizes.collect(), 256, 8192);
        assert_eq!(sparse.counts(), (41, 35));
        let gib = f64::from(tokens(sparse.clone())) * 131_072.0 / GIB;
        assert!((95.0..97.0).contains(&gib), "41 piecewise graphs leave 95 GiB: {gib}");
        assert!(tokens(sparse.with_mode(GraphMode::FullDecodeOnly)) > 914_320, "no graph of the sparse sizes");
    }

    #[test]
    fn every_mode_sets_aside_memory_for_its_graphs_alone() {
        let mib = |mode| {
            let graphs = Graphs::chosen(256, 8192, None).with_mode(mode);
            let settings = MemorySettings { graphs, ..MemorySettings::default() };
            (budget("h200", "llama-3.1-8b", settings).unwrap().graphs / MIB).round()
        };
        assert_eq!(mib(GraphMode::FullAndPiecewise), 134.0 + 50.0 * 6.0 + 34.0 * 2.0);
        assert_eq!(mib(GraphMode::Piecewise), 134.0 + 50.0 * 6.0);
        assert_eq!(mib(GraphMode::Full), 134.0 + 50.0 * 2.0);
        assert_eq!(mib(GraphMode::FullDecodeOnly), 134.0 + 34.0 * 2.0);
        assert_eq!(mib(GraphMode::None), 0.0);
    }
}
