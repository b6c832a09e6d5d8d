//! A validated request of a generating route: the values that the engine needs, with vLLM's
//! defaults.
//!
//! `max_tokens` is 16 for completions and the rest of the context for chats, where
//! `max_completion_tokens` has priority. A limit that does not fit the rest of the context is
//! lowered. A limit or a prompt that is longer than the whole context is refused.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::body::RequestBody;
use super::prompt::{self, Prompt, TextModel};
use super::pydantic::FieldReader;
use super::request_kind::RequestKind;
use super::shape::Shape;
use super::{rules, sampling};
use crate::http::error_body::ErrorBody;

const COMPLETION_TOKENS: i64 = 16;

#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerLimits<'a> {
    pub(crate) max_model_len: u32,
    pub(crate) max_logprobs: i64,
    pub(crate) auto_tools: bool,
    /// Name of the model in error messages.
    pub(crate) name: &'a str,
}

/// A valid request.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// The route.
    pub kind: RequestKind,
    /// Prompts, at least one.
    pub prompts: Vec<Prompt>,
    /// Choices per prompt.
    pub n: u32,
    /// Limits on output tokens, one for each prompt.
    pub limits: Vec<u32>,
    /// Minimum output tokens.
    pub min_tokens: u32,
    /// Whether to generate exactly the limit.
    pub ignore_eos: bool,
    /// Whether to stream the response.
    pub stream: bool,
    /// Whether to end the stream with a usage chunk.
    pub include_usage: bool,
    /// Whether to add usage to every chunk.
    pub continuous_usage: bool,
    /// Request id from the body.
    pub request_id: Option<String>,
    /// Role of a chat's response, if it is not `assistant`.
    pub role: Option<String>,
    /// Whether to repeat the prompt in the response.
    pub echo: bool,
    /// Whether to return only the prompt (`echo` with `max_tokens` 0).
    pub only_echo: bool,
    /// Alternatives to show for each output token.
    pub logprobs: Option<u32>,
    /// Alternatives to show for each prompt token.
    pub prompt_logprobs: Option<u32>,
    /// Whether to return token ids.
    pub return_token_ids: bool,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// Whether the output includes the stop string that ended it.
    pub include_stop: bool,
    /// The only tokens that the output may have; empty means any token.
    pub forced: Vec<u32>,
    /// Tokens per event. The server's interval applies if it is larger.
    pub stream_interval: u32,
    /// Scheduling priority; lower runs first.
    pub priority: i64,
    /// The data-parallel rank that the header `X-data-parallel-rank` names.
    pub rank: Option<i64>,
    /// The name of the request in KV events: the header `X-Session-ID`.
    pub session: Option<Arc<str>>,
    /// Part of the key of the prefix cache.
    pub cache_salt: Option<String>,
    /// The shape that the output must have.
    pub shape: Option<Shape>,
    /// Whether tokens that begin a sequence are put before the prompt of a completion.
    pub special_tokens: bool,
}

impl GenerateRequest {
    /// # Errors
    /// The errors that vLLM finds after it found the model: template, context overflow, sampling
    /// parameters (400).
    pub(crate) fn new(
        kind: RequestKind,
        body: &RequestBody,
        texts: &TextModel,
        limits: ServerLimits<'_>,
    ) -> Result<Self, ErrorBody> {
        let fields = &body.fields;
        let length = limits.max_model_len;
        check_route(kind, fields, limits.auto_tools)?;
        let requested = requested_tokens(kind, fields, length)?;
        let mut prompts = match kind {
            RequestKind::Chat => vec![texts.of_chat(fields, limits.name, length)?],
            RequestKind::Completion => texts.of_completion(fields, body.ids.as_ref(), length)?,
        };
        truncate(fields.int("truncate_prompt_tokens"), length, &mut prompts);
        prompts.iter().try_for_each(|prompt| prompt::check_length(prompt, length))?;
        let echo = fields.truth("echo");
        let only_echo = echo && kind == RequestKind::Completion && requested == Some(0);
        sampling::check_bias(fields)?;
        let mut output_limits = Vec::with_capacity(prompts.len());
        for prompt in &prompts {
            let room = i64::from(length) - i64::from(prompt.tokens());
            let limit = if only_echo { 1.min(room) } else { requested.unwrap_or(room).min(room) };
            sampling::check(fields, limit)?;
            output_limits.push(limit as u32);
        }
        let logprobs = match kind {
            RequestKind::Chat => fields.truth("logprobs").then(|| fields.int("top_logprobs").unwrap_or(0)),
            RequestKind::Completion => fields.int("logprobs"),
        };
        sampling::check_engine(fields, logprobs, limits.max_logprobs, texts.vocabulary.size())?;
        // -1 requests the whole vocabulary.
        let count = |requested: i64| u32::try_from(requested).unwrap_or(MANY_LOGPROBS);
        let implied = if echo && kind == RequestKind::Chat { Some(0) } else { logprobs.filter(|_| echo) };
        Ok(Self {
            kind,
            n: fields.int("n").map_or(1, |n| n as u32),
            limits: output_limits,
            min_tokens: fields.int("min_tokens").map_or(0, |least| u32::try_from(least).unwrap_or(u32::MAX)),
            ignore_eos: fields.truth("ignore_eos"),
            stream: fields.truth("stream"),
            include_usage: stream_option(fields, "include_usage"),
            continuous_usage: stream_option(fields, "continuous_usage_stats"),
            request_id: fields.text("request_id").map(str::to_owned),
            role: last_role(fields),
            echo,
            only_echo,
            logprobs: logprobs.map(count),
            prompt_logprobs: fields.int("prompt_logprobs").or(implied).map(count),
            return_token_ids: fields.truth("return_token_ids"),
            stop: sampling::stops(fields),
            stop_token_ids: sampling::ids(fields, "stop_token_ids"),
            include_stop: fields.truth("include_stop_str_in_output"),
            forced: sampling::forced(fields),
            stream_interval: fields.int("stream_interval").map_or(1, |every| u32::try_from(every).unwrap_or(u32::MAX)),
            priority: fields.int("priority").unwrap_or(0),
            rank: None,
            session: None,
            cache_salt: fields.text("cache_salt").map(str::to_owned),
            shape: Shape::of(fields).filter(|_| !only_echo),
            special_tokens: fields.get("add_special_tokens").is_none() || fields.truth("add_special_tokens"),
            prompts,
        })
    }
}

/// Checks the rules that only one of the two routes has.
fn check_route(kind: RequestKind, fields: &Map<String, Value>, auto_tools: bool) -> Result<(), ErrorBody> {
    match kind {
        RequestKind::Chat => rules::check_rendering(fields, auto_tools),
        RequestKind::Completion if fields.get("suffix").is_some_and(|suffix| !suffix.is_null()) => {
            let text = "suffix is only supported for models with FIM completion rendering";
            Err(ErrorBody::bad_request(Some("suffix"), text.to_owned()))
        }
        RequestKind::Completion => Ok(()),
    }
}

fn requested_tokens(kind: RequestKind, fields: &Map<String, Value>, length: u32) -> Result<Option<i64>, ErrorBody> {
    let (name, requested) = match (kind, fields.int("max_completion_tokens")) {
        (RequestKind::Chat, Some(tokens)) => ("max_completion_tokens", Some(tokens)),
        (RequestKind::Chat, None) => ("max_tokens", fields.int("max_tokens")),
        (RequestKind::Completion, _) => ("max_tokens", fields.int("max_tokens").or(Some(COMPLETION_TOKENS))),
    };
    let Some(tokens) = requested.filter(|tokens| *tokens > i64::from(length)) else { return Ok(requested) };
    let message = format!(
        "{name}={tokens} cannot be greater than max_model_len={length}. Please request fewer output tokens. \
         (parameter={name}, value={tokens})"
    );
    Err(ErrorBody::bad_request(Some(name), message))
}

fn stream_option(fields: &Map<String, Value>, name: &str) -> bool {
    fields.get("stream_options").and_then(Value::as_object).is_some_and(|options| options.truth(name))
}

/// Number of log probabilities returned if the whole vocabulary was requested.
const MANY_LOGPROBS: u32 = 20;

/// Role of the last message, for a chat that continues it.
fn last_role(fields: &Map<String, Value>) -> Option<String> {
    fields.get("add_generation_prompt").filter(|_| !fields.truth("add_generation_prompt"))?;
    Some(fields.get("messages")?.as_array()?.last()?["role"].as_str()?.to_owned())
}

/// Applies `truncate_prompt_tokens`: keeps this many last tokens. For -1, keeps as many as the
/// context holds.
fn truncate(requested: Option<i64>, length: u32, prompts: &mut [Prompt]) {
    let Some(requested) = requested else { return };
    let keep = usize::try_from(requested).unwrap_or(length as usize).max(1);
    for prompt in prompts.iter_mut().filter(|prompt| prompt.ids.len() > keep) {
        prompt.ids = prompt.ids[prompt.ids.len() - keep..].into();
    }
}
