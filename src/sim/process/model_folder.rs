//! Reads the folder of a model or of an adapter: its JSON files, never the weights.
//!
//! As in vLLM, a folder whose files cannot be read is reported as missing.

use std::path::Path;

use serde_json::Value;

use crate::machine::Model;

pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";

/// Checks that the path leads to an adapter of at most this rank.
pub(crate) fn check_adapter(name: &str, path: &str, max_rank: i64) -> Result<(), String> {
    let folder = Path::new(path);
    let missing = || format!("Loading lora {name} failed: No adapter found for {path}");
    let config = std::fs::read_to_string(folder.join(ADAPTER_CONFIG)).map_err(|_| missing())?;
    let config: Value = serde_json::from_str(&config).map_err(|_| missing())?;
    let rank = config["r"].as_i64().unwrap_or(0);
    if rank > max_rank {
        return Err(format!(
            "Call to add_lora method failed: Worker failed with error 'LoRA rank {rank} is greater than max_lora_rank \
             {max_rank}.', please check the stack trace above for the root cause"
        ));
    }
    Ok(())
}

/// Sizes of the model in a folder, from its `config.json`; `None` if that does not describe a dense
/// decoder.
pub(crate) fn sizes_of_folder(folder: &Path) -> Option<Model> {
    let config: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).ok()?).ok()?;
    let number =
        |name: &str| config[name].as_u64().and_then(|value| u32::try_from(value).ok()).filter(|value| *value > 0);
    let (hidden, heads) = (number("hidden_size")?, number("num_attention_heads")?);
    Some(Model {
        layers: number("num_hidden_layers")?,
        hidden,
        intermediate: number("intermediate_size")?,
        heads,
        kv_heads: number("num_key_value_heads").unwrap_or(heads),
        head_dim: number("head_dim").unwrap_or(hidden / heads),
        vocabulary: number("vocab_size")?,
        tied_embeddings: config["tie_word_embeddings"].as_bool().unwrap_or(false),
        max_model_len: number("max_position_embeddings")?,
    })
}
