//! A GPU and a model as data: a few lines of TOML each, built in or from a file of the user.
//!
//! A name without `/` that does not end in `.toml` is a built-in one; anything else is the path of a file. Missing
//! numbers are all named at once, wrong ones by their key. Nothing here is measured: peaks are the vendor's, sizes
//! are the model's; what an engine reaches of them is in [`Constants`](super::Constants).

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::constants::Constants;

const GPUS: &[(&str, &str)] = &[
    ("h200", include_str!("gpu/h200.toml")),
    ("h100-80", include_str!("gpu/h100-80.toml")),
    ("a100-80", include_str!("gpu/a100-80.toml")),
    ("rtx3080-10", include_str!("gpu/rtx3080-10.toml")),
    ("l4", include_str!("gpu/l4.toml")),
];

const MODELS: &[(&str, &str)] = &[
    ("llama-3.2-1b", include_str!("model/llama-3.2-1b.toml")),
    ("llama-3.1-8b", include_str!("model/llama-3.1-8b.toml")),
    ("qwen2.5-7b", include_str!("model/qwen2.5-7b.toml")),
    ("llama-3.1-70b", include_str!("model/llama-3.1-70b.toml")),
];

/// Bytes of a GiB.
pub const GIB: f64 = (1u64 << 30) as f64;

/// Why a profile cannot be used. Each text says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// No built-in has this name.
    #[error("unknown {what} '{name}'; built in: {known}; or give the path of a TOML file")]
    Unknown {
        /// `GPU` or `model`.
        what: &'static str,
        /// What was asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The file cannot be read.
    #[error("cannot read the {what} profile {path}: {error}")]
    Unreadable {
        /// `GPU` or `model`.
        what: &'static str,
        /// Where.
        path: String,
        /// Why.
        error: String,
    },
    /// Numbers are missing.
    #[error("the {what} profile {name} lacks {keys}; give each as a number")]
    Missing {
        /// `GPU`, `model` or `constants`.
        what: &'static str,
        /// Which profile.
        name: String,
        /// The keys.
        keys: String,
    },
    /// A value is wrong.
    #[error("the {what} profile {name}: {error}")]
    Wrong {
        /// `GPU`, `model` or `constants`.
        what: &'static str,
        /// Which profile.
        name: String,
        /// Key and reason.
        error: String,
    },
}

/// A GPU: what the vendor promises.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Name that the driver shows.
    #[serde(default)]
    pub title: String,
    /// Memory that PyTorch sees, GiB.
    pub memory_gib: f64,
    /// Memory of the CUDA context, GiB: never free, and not counted by vLLM.
    pub context_gib: f64,
    /// Memory that libraries take outside PyTorch while vLLM measures, GiB.
    pub reserved_gib: f64,
    /// Peak memory bandwidth, 10^9 bytes per second.
    pub bandwidth_gb_per_s: f64,
    /// Peak of dense bf16 products with 32-bit sums, 10^12 FLOP per second.
    pub bf16_tflops: f64,
    /// The same in fp8; none where the chip has no fp8 arithmetic (weights are unpacked to bf16 then).
    pub fp8_tflops: Option<f64>,
    /// Bandwidth to the other GPUs of a group, one direction, 10^9 bytes per second. Only groups need it.
    pub link_gb_per_s: Option<f64>,
    /// One all-reduce of a few kilobytes in a group, microseconds. Only groups need it.
    pub link_latency_us: Option<f64>,
    /// Replaces entries of [`Efficiency`](super::Efficiency) for this GPU; empty for most.
    #[serde(default)]
    pub efficiency: toml::Table,
    /// Replaces entries of [`StepConstants`](super::StepConstants).
    #[serde(default)]
    pub step: toml::Table,
    /// Replaces entries of [`FrontEndRates`](super::FrontEndRates).
    #[serde(default)]
    pub front_end: toml::Table,
}

/// A dense decoder with grouped-query attention and a gated MLP, in bf16.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Transformer layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Width of the MLP.
    pub intermediate: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Size of a head.
    pub head_dim: u32,
    /// Rows of the output head.
    pub vocabulary: u32,
    /// Whether the output head is the embedding table.
    pub tied_embeddings: bool,
    /// Longest context the model was made for, tokens.
    pub max_model_len: u32,
}

impl Gpu {
    /// Names of the built-in GPUs.
    pub fn names() -> impl Iterator<Item = &'static str> {
        GPUS.iter().map(|(name, _)| *name)
    }

    /// The built-in GPU with this name (or the only one that begins so; case and signs do not count), or the one in the
    /// file at this path.
    ///
    /// # Errors
    /// An unknown name (with those that exist), an unreadable file, missing or wrong numbers (with their keys).
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        let text = find("GPU", name, GPUS)?;
        let gpu: Self = parse(
            "GPU",
            name,
            &text,
            &["memory_gib", "context_gib", "reserved_gib", "bandwidth_gb_per_s", "bf16_tflops"],
        )?;
        let optional = [gpu.fp8_tflops, gpu.link_gb_per_s].map(|value| value.unwrap_or(1.0));
        let positive = [gpu.memory_gib, gpu.bandwidth_gb_per_s, gpu.bf16_tflops].into_iter().chain(optional);
        if positive.into_iter().any(|value| !(value.is_finite() && value > 0.0)) {
            let error = "sizes and rates must be above 0".to_owned();
            return Err(ProfileError::Wrong { what: "GPU", name: name.to_owned(), error });
        }
        Constants::fitted().on(&gpu, name)?;
        Ok(gpu)
    }
}

impl Model {
    /// Names of the built-in models.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MODELS.iter().map(|(name, _)| *name)
    }

    /// The built-in model with this name, or the one in the file at this path.
    ///
    /// # Errors
    /// As [`Gpu::load`].
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        let text = find("model", name, MODELS)?;
        let needed = [
            "layers",
            "hidden",
            "intermediate",
            "heads",
            "kv_heads",
            "head_dim",
            "vocabulary",
            "tied_embeddings",
            "max_model_len",
        ];
        let model: Self = parse("model", name, &text, &needed)?;
        let wrong = |error: &str| ProfileError::Wrong { what: "model", name: name.to_owned(), error: error.to_owned() };
        let sizes = [model.layers, model.hidden, model.intermediate, model.heads, model.kv_heads, model.head_dim];
        if sizes.contains(&0) || model.vocabulary == 0 || model.max_model_len == 0 {
            return Err(wrong("sizes must be above 0"));
        }
        if !model.heads.is_multiple_of(model.kv_heads) {
            return Err(wrong("heads must be a multiple of kv_heads"));
        }
        Ok(model)
    }

    /// The built-in model that a served name speaks of, such as `meta-llama/Llama-3.1-8B-Instruct`.
    ///
    /// Case, folders and what follows the size do not matter.
    pub fn of_served(name: &str) -> Option<Self> {
        let plain = |text: &str| text.to_ascii_lowercase().replace(['_', '.', '-'], "");
        let wanted = plain(name);
        let (known, _) = MODELS.iter().find(|(known, _)| wanted.contains(&plain(known)))?;
        Self::load(known).ok()
    }

    /// Parameters of the layers: every token is multiplied by them.
    pub fn layer_parameters(&self) -> f64 {
        let [hidden, heads, kv_heads, dim, inner] =
            [self.hidden, self.heads, self.kv_heads, self.head_dim, self.intermediate].map(f64::from);
        let attention = 2.0 * hidden * heads * dim + 2.0 * hidden * kv_heads * dim;
        f64::from(self.layers) * (attention + 3.0 * hidden * inner)
    }

    /// Parameters of the output head: only tokens that are sampled from are multiplied by them.
    pub fn head_parameters(&self) -> f64 {
        f64::from(self.hidden) * f64::from(self.vocabulary)
    }

    /// Bytes of KV cache per token at this many bytes per element: keys and values of every layer.
    pub fn kv_bytes_per_token(&self, element: f64) -> f64 {
        2.0 * f64::from(self.layers) * f64::from(self.kv_heads) * f64::from(self.head_dim) * element
    }

    /// Elements that one rank of an adapter adds: a row in and a column out for each linear layer.
    pub fn adapter_elements_per_rank(&self) -> f64 {
        let [hidden, heads, kv_heads, dim, inner] =
            [self.hidden, self.heads, self.kv_heads, self.head_dim, self.intermediate].map(f64::from);
        let (query, key) = (heads * dim, kv_heads * dim);
        let attention = 2.0 * (hidden + query) + 2.0 * (hidden + key);
        f64::from(self.layers) * (attention + 3.0 * (hidden + inner))
    }
}

fn find(what: &'static str, name: &str, built_in: &[(&str, &'static str)]) -> Result<String, ProfileError> {
    if let Some((_, text)) = built_in.iter().find(|(known, _)| *known == name) {
        return Ok((*text).to_owned());
    }
    if name.contains('/') || name.ends_with(".toml") {
        return std::fs::read_to_string(name).map_err(|error| ProfileError::Unreadable {
            what,
            path: name.to_owned(),
            error: error.to_string(),
        });
    }
    // "RTX-3080" and "H100" too: letters and digits decide, and the beginning is enough where only one has it.
    let plain = |name: &str| name.to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "");
    let begins = |known: &str| plain(known).starts_with(&plain(name)) && !plain(name).is_empty();
    let mut alike = built_in.iter().filter(|(known, _)| begins(known));
    if let (Some((_, text)), None) = (alike.next(), alike.next()) {
        return Ok((*text).to_owned());
    }
    let known = built_in.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
    Err(ProfileError::Unknown { what, name: name.to_owned(), known })
}

/// Reads `text`; `needed` are the keys that have no default.
pub(super) fn parse<T: DeserializeOwned>(
    what: &'static str,
    name: &str,
    text: &str,
    needed: &[&str],
) -> Result<T, ProfileError> {
    let wrong = |error: String| ProfileError::Wrong { what, name: name.to_owned(), error };
    let table: toml::Table = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
    let missing: Vec<&str> = needed.iter().copied().filter(|key| !table.contains_key(*key)).collect();
    if !missing.is_empty() {
        return Err(ProfileError::Missing { what, name: name.to_owned(), keys: missing.join(", ") });
    }
    serde_path_to_error::deserialize(table).map_err(|error| wrong(error.to_string().trim_end().to_owned()))
}
