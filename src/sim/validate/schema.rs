//! The fields of the routes' bodies, in the order in which vLLM 0.32 declares them.
//!
//! Only names and types; their meaning is in [`super`]. Unknown fields are allowed, as in vLLM, and a field that
//! is not simulated is still checked for its type.

use super::pydantic::{Field, INT, Type};

const fn optional(name: &'static str, takes: Type) -> Field {
    Field { name, takes, nullable: true, required: false }
}

const fn plain(name: &'static str, takes: Type) -> Field {
    Field { name, takes, nullable: false, required: false }
}

const fn required(name: &'static str, takes: Type) -> Field {
    Field { name, takes, nullable: false, required: true }
}

const TRUNCATE: Type = Type::Int(-1, i64::MAX);
const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Fields that both generating routes declare after their own.
macro_rules! sampling {
    ($($own:expr),* $(,)?) => {
        &[
            $($own,)*
            plain("use_beam_search", Type::Bool),
            optional("top_k", INT),
            optional("min_p", Type::Float),
            optional("repetition_penalty", Type::Float),
            plain("length_penalty", Type::Float),
            optional("stop_token_ids", Type::Ints(i64::MIN)),
            plain("include_stop_str_in_output", Type::Bool),
            plain("ignore_eos", Type::Bool),
            plain("min_tokens", INT),
            plain("skip_special_tokens", Type::Bool),
            plain("spaces_between_special_tokens", Type::Bool),
            optional("truncate_prompt_tokens", TRUNCATE),
            optional("truncation_side", Type::Literal(&["left", "right"])),
            optional("prompt_logprobs", INT),
            optional("allowed_token_ids", Type::Ints(i64::MIN)),
            plain("bad_words", Type::Texts),
            optional("structured_outputs", Type::Dict),
            plain("priority", INT),
            plain("request_id", Type::Text),
            optional("session_id", Type::Text),
            optional("return_tokens_as_token_ids", Type::Bool),
            optional("return_token_ids", Type::Bool),
            optional("cache_salt", Type::Text),
            optional("kv_transfer_params", Type::Dict),
            optional("ec_transfer_params", Type::Dict),
            optional("vllm_xargs", Type::Dict),
            optional("stream_interval", Type::Int(1, i64::MAX)),
        ]
    };
}

/// `/v1/chat/completions`; `messages` is checked by `messages.rs`.
pub(super) const CHAT: &[Field] = sampling![
    required("messages", Type::Any),
    optional("model", Type::Text),
    optional("frequency_penalty", Type::Float),
    optional("logit_bias", Type::Weights),
    optional("logprobs", Type::Bool),
    optional("top_logprobs", INT),
    optional("max_tokens", INT),
    optional("max_completion_tokens", INT),
    optional("n", INT),
    optional("presence_penalty", Type::Float),
    optional("seed", INT),
    optional("stop", Type::Stop),
    optional("stream", Type::Bool),
    optional("stream_options", Type::Dict),
    optional("temperature", Type::Float),
    optional("top_p", Type::Float),
    optional("reasoning_effort", Type::Literal(EFFORTS)),
    plain("include_reasoning", Type::Bool),
    optional("parallel_tool_calls", Type::Bool),
    optional("user", Type::Text),
    plain("echo", Type::Bool),
    plain("add_generation_prompt", Type::Bool),
    plain("continue_final_message", Type::Bool),
    plain("add_special_tokens", Type::Bool),
    optional("chat_template", Type::Text),
    optional("chat_template_kwargs", Type::Dict),
];

/// `/v1/completions`; `prompt` is checked by `messages.rs`.
pub(super) const COMPLETION: &[Field] = sampling![
    optional("model", Type::Text),
    optional("prompt", Type::Any),
    optional("echo", Type::Bool),
    optional("frequency_penalty", Type::Float),
    optional("logit_bias", Type::Weights),
    optional("logprobs", INT),
    optional("max_tokens", INT),
    plain("n", INT),
    optional("presence_penalty", Type::Float),
    optional("seed", INT),
    optional("stop", Type::Stop),
    optional("stream", Type::Bool),
    optional("stream_options", Type::Dict),
    optional("suffix", Type::Text),
    optional("temperature", Type::Float),
    optional("top_p", Type::Float),
    optional("user", Type::Text),
    plain("add_special_tokens", Type::Bool),
];

/// `/v1/responses`
pub(crate) const RESPONSES: &[Field] = &[
    optional("background", Type::Bool),
    required("input", Type::Any),
    optional("instructions", Type::Text),
    optional("max_output_tokens", INT),
    optional("max_tool_calls", INT),
    optional("metadata", Type::Dict),
    optional("model", Type::Text),
    optional("logit_bias", Type::Weights),
    optional("parallel_tool_calls", Type::Bool),
    optional("previous_response_id", Type::Text),
    plain("service_tier", Type::Literal(&["auto", "default", "flex", "scale", "priority"])),
    optional("store", Type::Bool),
    optional("stream", Type::Bool),
    optional("temperature", Type::Float),
    optional("top_logprobs", INT),
    optional("top_p", Type::Float),
    optional("top_k", INT),
    optional("min_p", Type::Float),
    optional("truncation", Type::Literal(&["auto", "disabled"])),
    optional("user", Type::Text),
    optional("presence_penalty", Type::Float),
    optional("frequency_penalty", Type::Float),
    plain("request_id", Type::Text),
    plain("priority", INT),
    optional("cache_salt", Type::Text),
    optional("repetition_penalty", Type::Float),
    optional("seed", INT),
    optional("stop", Type::Stop),
    optional("stop_token_ids", Type::Ints(i64::MIN)),
    plain("ignore_eos", Type::Bool),
];

/// `/v1/messages`
pub(crate) const MESSAGES: &[Field] = &[
    required("model", Type::Text),
    required("messages", Type::Any),
    required("max_tokens", INT),
    optional("metadata", Type::Dict),
    optional("stop_sequences", Type::Texts),
    optional("stream", Type::Bool),
    optional("system", Type::Any),
    optional("temperature", Type::Float),
    optional("top_k", INT),
    optional("top_p", Type::Float),
    optional("cache_salt", Type::Text),
];

/// `/v1/messages/count_tokens`
pub(crate) const COUNT_TOKENS: &[Field] =
    &[required("model", Type::Text), required("messages", Type::Any), optional("system", Type::Any)];

/// `/detokenize`
pub(crate) const DETOKENIZE: &[Field] = &[optional("model", Type::Text), required("tokens", Type::Ints(0))];

/// `/v1/load_lora_adapter`
pub(crate) const LOAD_ADAPTER: &[Field] =
    &[required("lora_name", Type::Text), required("lora_path", Type::Text), plain("load_inplace", Type::Bool)];

/// `/v1/unload_lora_adapter`
pub(crate) const UNLOAD_ADAPTER: &[Field] = &[required("lora_name", Type::Text), optional("lora_int_id", INT)];
