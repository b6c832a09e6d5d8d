//! The layout of a model on GPUs, for the memory arithmetic and the profile: size of the group and
//! number formats.
//!
//! A group has at least one GPU.

/// The layout of a model on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// GPUs that share the model, at least 1.
    pub tensor_parallel: u32,
    /// Whether the linear layers are in fp8 (`--quantization fp8`).
    pub fp8_weights: bool,
    /// Whether the KV cache is in fp8 (`--kv-cache-dtype fp8`).
    pub fp8_kv: bool,
}

impl Default for Layout {
    fn default() -> Self {
        Self { tensor_parallel: 1, fp8_weights: false, fp8_kv: false }
    }
}
