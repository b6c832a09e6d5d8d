//! GPU and model of a server: sizes from the model's name or folder, tensor parallelism and number
//! formats from the flags, and vLLM's defaults for the GPU.
//!
//! Invalid combinations are refused with vLLM's messages.

use std::path::Path;

use super::flags::at_least;
use crate::machine::{Layout, Model, Profile};
use crate::process::model_folder::sizes_of_folder;
use crate::process::refusal::{Refusal, Stage};
use crate::validate::TextModel;
use sluice_core::vllm::args::ServeArgs;

/// Tokenizer and sizes of a model in a folder. For a model that is only a name: a made-up tokenizer
/// and no sizes.
pub(super) fn model_of(name: &str) -> Result<(TextModel, Option<Model>), Refusal> {
    let folder = Path::new(name);
    if folder.is_dir() {
        let texts = TextModel::of_folder(folder).map_err(|error| Refusal::Folder(error.to_string()))?;
        return Ok((texts, sizes_of_folder(folder)));
    }
    if name.starts_with(['/', '.', '~']) || name.matches('/').count() > 1 {
        return Err(Refusal::NoFolder(name.to_owned()));
    }
    Ok((TextModel::made_up(), None))
}

/// The profile's GPU with the model and the layout of the flags.
pub(super) fn laid_out(args: &ServeArgs, profile: Profile, model: Option<Model>) -> Result<Profile, Refusal> {
    let fp8 = |flag| args.text(flag).is_some_and(|text: &str| text.starts_with("fp8"));
    let group = at_least(args, "ParallelConfig", "tensor_parallel_size", 1, profile.layout.tensor_parallel)?;
    let layout = Layout {
        tensor_parallel: group,
        fp8_weights: profile.layout.fp8_weights || fp8("quantization"),
        fp8_kv: profile.layout.fp8_kv || fp8("kv-cache-dtype"),
    };
    if model.is_none() && layout == profile.layout {
        return Ok(profile);
    }
    let (gpu, model) = (profile.gpu, model.unwrap_or(profile.model));
    if !model.heads.is_multiple_of(group) {
        let text = format!(
            "Total number of attention heads ({}) must be divisible by tensor parallel size ({group}).",
            model.heads
        );
        return Err(Refusal::Other { kind: "ValueError", text, stage: Stage::Settings });
    }
    Profile::new(gpu, model, layout, &profile.constants).map_err(|error| Refusal::Other {
        kind: "ValueError",
        text: error.to_string(),
        stage: Stage::Settings,
    })
}

/// vLLM's defaults of `--max-num-seqs` and `--max-num-batched-tokens` on this GPU. `mode`:
/// `--performance-mode`.
pub(super) fn defaults(profile: &Profile, mode: Option<&str>) -> (u32, u32) {
    let gpu = &profile.gpu;
    let a100 = gpu.title.contains("A100");
    let (seqs, tokens) = match gpu.memory_gib {
        gib if gib >= 160.0 => (1024, 16_384),
        gib if gib >= 70.0 && !a100 => (1024, 8192),
        _ => (256, 2048),
    };
    let factor = if mode == Some("throughput") { 2 } else { 1 };
    (seqs * factor, tokens * factor)
}
