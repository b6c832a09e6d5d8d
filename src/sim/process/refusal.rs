//! Start-up errors with vLLM's texts. The process exits with code 1, or with 2 if argparse reports
//! the error.
//!
//! Each error has the stage at which vLLM reports it. Settings are checked first, then the port is
//! bound. Whether the KV cache fits is known only when the engine has loaded the weights. The
//! process that fails prints the cause, and the parent adds that its engine failed.

use crate::machine::GIB;
use crate::machine::memory::MemoryError;

/// The stage at which a start fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// While arguments are read.
    Arguments,
    /// While settings are checked.
    Settings,
    /// When the engine checks the free memory.
    Memory,
    /// While the weights are loaded.
    Weights,
    /// When the KV cache is sized.
    Cache,
    /// When the sampler is warmed up, after the capture of graphs.
    WarmUp,
    /// When adapters are loaded, after the engine is ready.
    Adapters,
}

/// A start-up error.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("no model was named; write `sluice sim MODEL`")]
    NoModel,
    #[error("argument {0}")]
    Argument(String),
    #[error(
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{0}'. \
         Use `repo_type` argument if needed."
    )]
    NoFolder(String),
    #[error("OSError: {0}")]
    Folder(String),
    #[error(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for {class}\n{field}\n  Input should be {bound} \
         [type={kind}, input_value={value}, input_type={value_type}]\n    For further information visit \
         https://errors.pydantic.dev/2.14/v/{kind}"
    )]
    Bound {
        class: &'static str,
        field: &'static str,
        bound: String,
        kind: &'static str,
        value: String,
        value_type: &'static str,
    },
    #[error(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for {class}\n  Value error, {text} \
         [type=value_error, input_value=ArgsKwargs((), {{...}}), input_type=ArgsKwargs]\n    For further information visit \
         https://errors.pydantic.dev/2.14/v/value_error"
    )]
    Together { class: &'static str, text: String },
    #[error("{kind}: {text}")]
    Other { kind: &'static str, text: String, stage: Stage },
    #[error("{text}")]
    Memory { text: String, stage: Stage },
}

const ADVICE: &str = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.";

impl Refusal {
    /// The stage at which the start fails.
    pub fn stage(&self) -> Stage {
        match self {
            Self::Other { stage, .. } | Self::Memory { stage, .. } => *stage,
            Self::Argument(_) => Stage::Arguments,
            _ => Stage::Settings,
        }
    }

    /// Whether the engine's process fails, and not the parent.
    pub fn is_engine(&self) -> bool {
        (Stage::Memory..=Stage::WarmUp).contains(&self.stage())
    }

    /// The error for a longest context of `wanted` tokens when the cache holds `fits`. `per_token`
    /// and `available` in bytes.
    pub fn too_long(wanted: u32, fits: u32, per_token: f64, available: f64) -> Self {
        let needed = f64::from(wanted) * per_token / GIB;
        let text = format!(
            "ValueError: To serve at least one request with the model's max seq len ({wanted}), ({} GiB KV cache is needed, \
             which is larger than the available KV cache memory ({} GiB). Based on the available memory, the estimated \
             maximum model length is {fits}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when \
             initializing the engine. {ADVICE}",
            gib(needed),
            gib(available / GIB)
        );
        Self::Memory { text, stage: Stage::Cache }
    }

    /// The error for a failed memory computation. `hint`: advice of the simulator, which vLLM does
    /// not give.
    pub fn memory(error: MemoryError, hint: Option<String>) -> Self {
        let stage = match error {
            MemoryError::Occupied { .. } => Stage::Memory,
            MemoryError::Weights { .. } => Stage::Weights,
            MemoryError::NoCache { .. } => Stage::Cache,
            MemoryError::Sampler { .. } => Stage::WarmUp,
        };
        let mut text = match error {
            MemoryError::Occupied { free, total, wanted } => format!(
                "ValueError: Free memory on device cuda:0 ({:.2}/{:.2} GiB) on startup is less than desired GPU memory \
                 utilization ({:.2}, {:.2} GiB). Decrease GPU memory utilization or reduce GPU memory used by other \
                 processes.",
                free / GIB,
                total / GIB,
                wanted / total,
                wanted / GIB
            ),
            MemoryError::Weights { weights, free } => format!(
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {:.2} GiB. GPU 0 has a total capacity of \
                 {:.2} GiB of which {:.2} MiB is free.",
                (weights - free).max(0.0) / GIB,
                free / GIB,
                0.0
            ),
            MemoryError::NoCache { .. } => {
                "ValueError: No available memory for the cache blocks. Try increasing \
                 `gpu_memory_utilization` when initializing the engine. "
                    .to_owned()
                    + ADVICE
            }
            MemoryError::Sampler { seqs } => format!(
                "RuntimeError: CUDA out of memory occurred when warming up sampler with {seqs} dummy requests. Please try \
                 lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
            ),
        };
        if let Some(hint) = hint {
            text.push('\n');
            text.push_str(&hint);
        }
        Self::Memory { text, stage }
    }

    /// The log line of the engine before the error, if vLLM writes one.
    pub fn log_line(&self) -> Option<&'static str> {
        (self.stage() == Stage::Weights).then_some(
            "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for weights, \
             increasing --tensor-parallel-size, or using --quantization. See \
             https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more tips.",
        )
    }

    pub(crate) fn below(class: &'static str, field: &'static str, least: i64, value: i64) -> Self {
        let bound = format!("greater than or equal to {least}");
        Self::Bound { class, field, bound, kind: "greater_than_equal", value: value.to_string(), value_type: "int" }
    }
}

/// Two decimals, as Python prints a rounded number.
fn gib(value: f64) -> String {
    let text = format!("{:?}", (value * 100.0).round() / 100.0);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_has_vllms_text_and_estimate() {
        let text = Refusal::too_long(4_000_000, 2_097_024, 512.0, GIB).to_string();
        assert!(text.starts_with(
            "ValueError: To serve at least one request with the model's max seq len (4000000), (1.91 GiB KV cache is needed, \
             which is larger than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated \
             maximum model length is 2097024. Try increasing"
        ));
    }

    #[test]
    fn memory_is_refused_where_vllm_notices() {
        let occupied = MemoryError::Occupied { free: 36.75 * GIB, total: 79.11 * GIB, wanted: 0.92 * 79.11 * GIB };
        let refusal = Refusal::memory(occupied, None);
        assert!(
            refusal
                .to_string()
                .contains("(36.75/79.11 GiB) on startup is less than desired GPU memory utilization (0.92, 72.78 GiB)")
        );
        assert!(refusal.is_engine() && !Refusal::below("SchedulerConfig", "max_num_seqs", 1, 0).is_engine());
        let sampler = Refusal::memory(MemoryError::Sampler { seqs: 1024 }, None);
        assert!(sampler.to_string().contains("warming up sampler with 1024 dummy requests"));
    }
}
