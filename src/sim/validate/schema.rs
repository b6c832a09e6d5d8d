//! The fields of the routes' bodies, in the order in which vLLM 0.32 declares them.
//!
//! The header of [`super`] describes how they are checked. As in vLLM, unknown fields are allowed,
//! and a field that is not simulated is still checked for its type.

use super::pydantic::{Field, INT, Type};

const fn nullable(name: &'static str, takes: Type) -> Field {
    Field { name, takes, nullable: true, required: false }
}

const fn not_null(name: &'static str, takes: Type) -> Field {
    Field { name, takes, nullable: false, required: false }
}

const fn required(name: &'static str, takes: Type) -> Field {
    Field { name, takes, nullable: false, required: true }
}

const TRUNCATE: Type = Type::Int(-1, i64::MAX);
const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// The sampling fields, which chat and completions declare after their own fields.
macro_rules! sampling {
    ($($own:expr),* $(,)?) => {
        &[
            $($own,)*
            not_null("use_beam_search", Type::Bool),
            nullable("top_k", INT),
            nullable("min_p", Type::Float),
            nullable("repetition_penalty", Type::Float),
            not_null("length_penalty", Type::Float),
            nullable("stop_token_ids", Type::Ints(i64::MIN)),
            not_null("include_stop_str_in_output", Type::Bool),
            not_null("ignore_eos", Type::Bool),
            not_null("min_tokens", INT),
            not_null("skip_special_tokens", Type::Bool),
            not_null("spaces_between_special_tokens", Type::Bool),
            nullable("truncate_prompt_tokens", TRUNCATE),
            nullable("truncation_side", Type::Literal(&["left", "right"])),
            nullable("prompt_logprobs", INT),
            nullable("allowed_token_ids", Type::Ints(i64::MIN)),
            not_null("bad_words", Type::Texts),
            nullable("structured_outputs", Type::Dict),
            not_null("priority", INT),
            not_null("request_id", Type::Text),
            nullable("session_id", Type::Text),
            nullable("return_tokens_as_token_ids", Type::Bool),
            nullable("return_token_ids", Type::Bool),
            nullable("cache_salt", Type::Text),
            nullable("kv_transfer_params", Type::Dict),
            nullable("ec_transfer_params", Type::Dict),
            nullable("vllm_xargs", Type::Dict),
            nullable("stream_interval", Type::Int(1, i64::MAX)),
        ]
    };
}

/// `/v1/chat/completions`; `messages` is checked by `messages.rs`.
pub(super) const CHAT: &[Field] = sampling![
    required("messages", Type::Any),
    nullable("model", Type::Text),
    nullable("frequency_penalty", Type::Float),
    nullable("logit_bias", Type::Weights),
    nullable("logprobs", Type::Bool),
    nullable("top_logprobs", INT),
    nullable("max_tokens", INT),
    nullable("max_completion_tokens", INT),
    nullable("n", INT),
    nullable("presence_penalty", Type::Float),
    nullable("seed", INT),
    nullable("stop", Type::Stop),
    nullable("stream", Type::Bool),
    nullable("stream_options", Type::Dict),
    nullable("temperature", Type::Float),
    nullable("top_p", Type::Float),
    nullable("reasoning_effort", Type::Literal(EFFORTS)),
    not_null("include_reasoning", Type::Bool),
    nullable("parallel_tool_calls", Type::Bool),
    nullable("user", Type::Text),
    not_null("echo", Type::Bool),
    not_null("add_generation_prompt", Type::Bool),
    not_null("continue_final_message", Type::Bool),
    not_null("add_special_tokens", Type::Bool),
    nullable("chat_template", Type::Text),
    nullable("chat_template_kwargs", Type::Dict),
];

/// `/v1/completions`; `prompt` is checked by `messages.rs`.
pub(super) const COMPLETION: &[Field] = sampling![
    nullable("model", Type::Text),
    nullable("prompt", Type::Any),
    nullable("echo", Type::Bool),
    nullable("frequency_penalty", Type::Float),
    nullable("logit_bias", Type::Weights),
    nullable("logprobs", INT),
    nullable("max_tokens", INT),
    not_null("n", INT),
    nullable("presence_penalty", Type::Float),
    nullable("seed", INT),
    nullable("stop", Type::Stop),
    nullable("stream", Type::Bool),
    nullable("stream_options", Type::Dict),
    nullable("suffix", Type::Text),
    nullable("temperature", Type::Float),
    nullable("top_p", Type::Float),
    nullable("user", Type::Text),
    not_null("add_special_tokens", Type::Bool),
];

pub(crate) const RESPONSES: &[Field] = &[
    nullable("background", Type::Bool),
    required("input", Type::Any),
    nullable("instructions", Type::Text),
    nullable("max_output_tokens", INT),
    nullable("max_tool_calls", INT),
    nullable("metadata", Type::Dict),
    nullable("model", Type::Text),
    nullable("logit_bias", Type::Weights),
    nullable("parallel_tool_calls", Type::Bool),
    nullable("previous_response_id", Type::Text),
    not_null("service_tier", Type::Literal(&["auto", "default", "flex", "scale", "priority"])),
    nullable("store", Type::Bool),
    nullable("stream", Type::Bool),
    nullable("temperature", Type::Float),
    nullable("top_logprobs", INT),
    nullable("top_p", Type::Float),
    nullable("top_k", INT),
    nullable("min_p", Type::Float),
    nullable("truncation", Type::Literal(&["auto", "disabled"])),
    nullable("user", Type::Text),
    nullable("presence_penalty", Type::Float),
    nullable("frequency_penalty", Type::Float),
    not_null("request_id", Type::Text),
    not_null("priority", INT),
    nullable("cache_salt", Type::Text),
    nullable("repetition_penalty", Type::Float),
    nullable("seed", INT),
    nullable("stop", Type::Stop),
    nullable("stop_token_ids", Type::Ints(i64::MIN)),
    not_null("ignore_eos", Type::Bool),
];

pub(crate) const MESSAGES: &[Field] = &[
    required("model", Type::Text),
    required("messages", Type::Any),
    required("max_tokens", INT),
    nullable("metadata", Type::Dict),
    nullable("stop_sequences", Type::Texts),
    nullable("stream", Type::Bool),
    nullable("system", Type::Any),
    nullable("temperature", Type::Float),
    nullable("top_k", INT),
    nullable("top_p", Type::Float),
    nullable("cache_salt", Type::Text),
];

pub(crate) const COUNT_TOKENS: &[Field] =
    &[required("model", Type::Text), required("messages", Type::Any), nullable("system", Type::Any)];

pub(crate) const DETOKENIZE: &[Field] = &[nullable("model", Type::Text), required("tokens", Type::Ints(0))];

pub(crate) const LOAD_ADAPTER: &[Field] =
    &[required("lora_name", Type::Text), required("lora_path", Type::Text), not_null("load_inplace", Type::Bool)];

pub(crate) const UNLOAD_ADAPTER: &[Field] = &[required("lora_name", Type::Text), nullable("lora_int_id", INT)];
