//! The size of the KV cache from flags, and start-up errors that name the sizes that would fit.
//!
//! The utilisation is checked first, then [`kv_budget`], then the longest context against the
//! blocks. If the weights do not fit, the simulator names settings with which they fit in fp8.

use super::SimConfig;
use super::flags::at_least;
use crate::engine::BLOCK_TOKENS;
use crate::machine::{Graphs, Layout, Profile};
use crate::machine::{MemoryError, MemorySettings, kv_budget};
use crate::process::refusal::Refusal;
use sluice_core::vllm::args::ServeArgs;

impl SimConfig {
    pub(super) fn read_memory(&mut self, args: &ServeArgs, wanted: Option<u32>, occupied: f64) -> Result<(), Refusal> {
        let utilisation = args.float("gpu-memory-utilization").unwrap_or(self.utilisation);
        if !(utilisation > 0.0 && utilisation <= 1.0) {
            let (bound, kind) = match utilisation > 1.0 {
                true => ("less than or equal to 1", "less_than_equal"),
                false => ("greater than 0", "greater_than"),
            };
            let (bound, value) = (bound.to_owned(), format!("{utilisation:?}"));
            let field = "gpu_memory_utilization";
            return Err(Refusal::Bound { class: "CacheConfig", field, bound, kind, value, value_type: "float" });
        }
        self.utilisation = utilisation;
        let rank = args.int("max-lora-rank").and_then(|rank| u32::try_from(rank).ok()).unwrap_or(16);
        let settings = MemorySettings {
            utilisation,
            max_num_seqs: self.engine.max_num_seqs,
            max_num_batched_tokens: self.engine.max_num_batched_tokens,
            layout: self.profile.layout,
            lora: self.lora.then_some((self.engine.max_loras, rank)),
            graphs: self.graphs.clone(),
            kv_cache_bytes: args.int("kv-cache-memory-bytes").and_then(|bytes| u64::try_from(bytes).ok()),
            occupied_bytes: occupied,
        };
        let budget = kv_budget(&self.profile.gpu, &self.profile.model, &settings)
            .map_err(|error| Refusal::memory(error, hint(&self.profile, &settings, error, wanted)))?;
        self.engine.num_blocks = match args.int("num-gpu-blocks-override") {
            Some(_) => at_least(args, "CacheConfig", "num_gpu_blocks_override", 1, 1)?,
            None => budget.blocks,
        };
        self.budget = Some(budget);
        let fits = self.engine.num_blocks.saturating_sub(1).saturating_mul(BLOCK_TOKENS);
        let wanted = wanted.unwrap_or_else(|| self.profile.shape.max_model_len.min(fits).max(1));
        if wanted > fits {
            let available = f64::from(self.engine.num_blocks) * f64::from(BLOCK_TOKENS) * budget.per_token;
            return Err(Refusal::too_long(wanted, fits, budget.per_token, available));
        }
        self.max_model_len = wanted;
        Ok(())
    }
}

/// Advice if the weights do not fit or leave no memory for the cache: settings with which the model
/// fits the same GPU in fp8.
fn hint(profile: &Profile, settings: &MemorySettings, error: MemoryError, wanted: Option<u32>) -> Option<String> {
    if !matches!(error, MemoryError::Weights { .. } | MemoryError::NoCache { .. }) {
        return None;
    }
    let layout = Layout { fp8_weights: true, fp8_kv: true, ..settings.layout };
    if layout == settings.layout {
        return None;
    }
    // The first of these settings that fits: fewer sequences, then also more of the memory, then
    // also no graphs.
    let (seqs, share) = (settings.max_num_seqs.min(64), settings.utilisation.max(0.95));
    let graphs = match settings.graphs.largest() {
        0 => Graphs::none(),
        _ => Graphs::chosen(seqs, settings.max_num_batched_tokens, None).with_mode(settings.graphs.mode()),
    };
    let fp8 = MemorySettings { layout, max_num_seqs: seqs, graphs, ..settings.clone() };
    let more = MemorySettings { utilisation: share, ..fp8.clone() };
    let (few, most) =
        (format!("--max-num-seqs {seqs}"), format!("--max-num-seqs {seqs} --gpu-memory-utilization {share}"));
    let eager = format!("{most} --enforce-eager");
    let ways = [(fp8, few), (more.clone(), most), (MemorySettings { graphs: Graphs::none(), ..more }, eager)];
    let (budget, flags) =
        ways.into_iter().find_map(|(way, flags)| Some((kv_budget(&profile.gpu, &profile.model, &way).ok()?, flags)))?;
    let fits = budget.longest().min(profile.shape.max_model_len);
    let asked = wanted.map_or(String::new(), |wanted| format!(" instead of {wanted}"));
    Some(format!(
        "(advice of the simulator: with --quantization fp8 --kv-cache-dtype fp8 {flags} the weights fit; based on the \
         available memory, the estimated maximum model length is {fits}{asked})"
    ))
}
