//! A model as a list of sizes: layers, widths, heads. A few lines of TOML, built in or from a file.
//!
//! Only dense decoders with grouped-query attention and a gated MLP can be described. Numbers of
//! parameters and bytes follow from the sizes.

use serde::Deserialize;

use super::preset::{ProfileError, find, parse};

const MODELS: &[(&str, &str)] = &[
    ("llama-3.2-1b", include_str!("model/llama-3.2-1b.toml")),
    ("llama-3.1-8b", include_str!("model/llama-3.1-8b.toml")),
    ("qwen2.5-7b", include_str!("model/qwen2.5-7b.toml")),
    ("llama-3.1-70b", include_str!("model/llama-3.1-70b.toml")),
];

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
    /// Longest context that the model supports, tokens.
    pub max_model_len: u32,
}

impl Model {
    /// Names of the built-in models.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MODELS.iter().map(|(name, _)| *name)
    }

    /// The built-in model with this name, or the model in the file at this path.
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        let text = find("model", name, MODELS)?;
        let needed = "layers hidden intermediate heads kv_heads head_dim vocabulary tied_embeddings max_model_len";
        let model: Self = parse("model", name, &text, &needed.split(' ').collect::<Vec<_>>())?;
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

    /// The built-in model for a model name as given to vLLM, such as
    /// `meta-llama/Llama-3.1-8B-Instruct`. Case, the organisation and any text after the size are
    /// ignored.
    pub fn of_served(name: &str) -> Option<Self> {
        let plain = |text: &str| text.to_ascii_lowercase().replace(['_', '.', '-'], "");
        let wanted = plain(name);
        let (known, _) = MODELS.iter().find(|(known, _)| wanted.contains(&plain(known)))?;
        Self::load(known).ok()
    }

    /// Parameters of the layers, by which every token is multiplied.
    pub fn layer_parameters(&self) -> f64 {
        let [hidden, heads, kv_heads, dim, inner] =
            [self.hidden, self.heads, self.kv_heads, self.head_dim, self.intermediate].map(f64::from);
        let attention = 2.0 * hidden * heads * dim + 2.0 * hidden * kv_heads * dim;
        f64::from(self.layers) * (attention + 3.0 * hidden * inner)
    }

    /// Parameters of the output head, by which only sampled tokens are multiplied.
    pub fn head_parameters(&self) -> f64 {
        f64::from(self.hidden) * f64::from(self.vocabulary)
    }

    /// Bytes of KV cache per token, with `element` bytes per value: keys and values of every layer.
    pub fn kv_bytes_per_token(&self, element: f64) -> f64 {
        2.0 * f64::from(self.layers) * f64::from(self.kv_heads) * f64::from(self.head_dim) * element
    }

    /// Parameters that one rank of an adapter adds: for each linear layer, a row of A and a column
    /// of B.
    pub fn adapter_elements_per_rank(&self) -> f64 {
        let [hidden, heads, kv_heads, dim, inner] =
            [self.hidden, self.heads, self.kv_heads, self.head_dim, self.intermediate].map(f64::from);
        let (query, key) = (heads * dim, kv_heads * dim);
        let attention = 2.0 * (hidden + query) + 2.0 * (hidden + key);
        f64::from(self.layers) * (attention + 3.0 * (hidden + inner))
    }
}
