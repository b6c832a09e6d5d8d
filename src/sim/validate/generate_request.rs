//! A validated request of a generating route: what the engine needs to generate, with vLLM's defaults.
//!
//! `max_tokens` is 16 for completions and the rest of the context for chats; `max_completion_tokens` wins; a limit that does
//! not fit the context is clamped; a prompt that is longer than the context is refused.

use super::body::RequestBody;
use super::prompt::{self, Prompt, TextModel};
use super::pydantic::FieldReader;
use super::request_kind::RequestKind;
use super::{rules, sampling};
use crate::http::error_body::ErrorBody;

/// Default of `max_tokens` for completions.
const COMPLETION_TOKENS: i64 = 16;

/// What a server was started with, as far as requests depend on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerLimits<'a> {
    /// `--max-model-len`, tokens.
    pub(crate) max_model_len: u32,
    /// `--max-logprobs`.
    pub(crate) max_logprobs: i64,
    /// `--enable-auto-tool-choice`.
    pub(crate) auto_tools: bool,
    /// Name of the model in refusals.
    pub(crate) name: &'a str,
}

/// A request that can be served.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Route.
    pub kind: RequestKind,
    /// Prompts, at least one.
    pub prompts: Vec<Prompt>,
    /// Choices per prompt.
    pub n: u32,
    /// Limits on output tokens, one for each prompt.
    pub limits: Vec<u32>,
    /// Fewest output tokens.
    pub min_tokens: u32,
    /// Generate exactly the limit.
    pub ignore_eos: bool,
    /// Answer as a stream.
    pub stream: bool,
    /// End the stream with a usage chunk.
    pub include_usage: bool,
    /// Usage on every chunk.
    pub continuous_usage: bool,
    /// Id chosen in the body.
    pub request_id: Option<String>,
    /// Who speaks in the answer of a chat, when it is not the assistant.
    pub role: Option<String>,
    /// Repeat the prompt in the answer.
    pub echo: bool,
    /// Nothing but the prompt is wanted (`echo` with `max_tokens` 0).
    pub only_echo: bool,
    /// Alternatives to show for each output token.
    pub logprobs: Option<u32>,
    /// Alternatives to show for each prompt token.
    pub prompt_logprobs: Option<u32>,
    /// Show ids of tokens.
    pub return_token_ids: bool,
    /// TextModel that end the answer.
    pub stop: Vec<String>,
    /// Tokens that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// Show the text that ended it.
    pub include_stop: bool,
    /// Tokens that output is limited to; empty when there is no limit.
    pub forced: Vec<u32>,
    /// Tokens per event; at least the server's.
    pub stream_interval: u32,
    /// Lower goes first.
    pub priority: i64,
    /// Part of the prefix cache's key.
    pub cache_salt: Option<String>,
}

impl GenerateRequest {
    /// What a body asks for.
    ///
    /// # Errors
    /// What vLLM answers after it found the model: template, context overflow, sampling parameters (400).
    pub(crate) fn new(
        kind: RequestKind,
        body: &RequestBody,
        texts: &TextModel,
        limits: ServerLimits<'_>,
    ) -> Result<Self, ErrorBody> {
        let fields = &body.fields;
        let length = limits.max_model_len;
        let asked_chat = fields.int("max_completion_tokens").filter(|_| kind == RequestKind::Chat);
        let asked =
            asked_chat.or(fields.int("max_tokens")).or((kind == RequestKind::Completion).then_some(COMPLETION_TOKENS));
        if kind == RequestKind::Completion && fields.get("suffix").is_some_and(|suffix| !suffix.is_null()) {
            let text = "suffix is only supported for models with FIM completion rendering";
            return Err(ErrorBody::bad_request(Some("suffix"), text.to_owned()));
        }
        if kind == RequestKind::Chat {
            rules::check_rendering(fields, limits.auto_tools)?;
        }
        if let Some(asked) = asked.filter(|asked| *asked > i64::from(length)) {
            let name = if asked_chat.is_some() { "max_completion_tokens" } else { "max_tokens" };
            let message = format!(
                "{name}={asked} cannot be greater than max_model_len={length}. Please request fewer output tokens. \
                 (parameter={name}, value={asked})"
            );
            return Err(ErrorBody::bad_request(Some(name), message));
        }
        let mut prompts = match kind {
            RequestKind::Chat => vec![texts.of_chat(fields, limits.name, length)?],
            RequestKind::Completion => texts.of_completion(fields, body.ids.as_ref(), length)?,
        };
        truncate(fields.int("truncate_prompt_tokens"), length, &mut prompts);
        prompts.iter().try_for_each(|prompt| prompt::check_length(prompt, length))?;
        let echo = fields.truth("echo");
        let only_echo = echo && kind == RequestKind::Completion && asked == Some(0);
        let mut rooms = Vec::with_capacity(prompts.len());
        sampling::check_bias(fields)?;
        for prompt in &prompts {
            let room = i64::from(length) - i64::from(prompt.tokens());
            let limit = if only_echo { 1.min(room) } else { asked.unwrap_or(room).min(room) };
            sampling::check(fields, limit)?;
            rooms.push(limit as u32);
        }
        let logprobs = match kind {
            RequestKind::Chat => fields.truth("logprobs").then(|| fields.int("top_logprobs").unwrap_or(0)),
            RequestKind::Completion => fields.int("logprobs"),
        };
        sampling::check_engine(fields, logprobs, limits.max_logprobs, texts.vocabulary.size())?;
        // -1 asks for the whole vocabulary, which is more than anybody reads.
        let count = |asked: i64| u32::try_from(asked).unwrap_or(MANY_LOGPROBS);
        let options = fields.get("stream_options");
        let option = |name: &str| options.is_some_and(|options| options[name].as_bool().unwrap_or(false));
        let implied = if echo && kind == RequestKind::Chat { Some(0) } else { logprobs.filter(|_| echo) };
        Ok(Self {
            kind,
            n: fields.int("n").map_or(1, |n| n as u32),
            limits: rooms,
            min_tokens: fields.int("min_tokens").map_or(0, |least| u32::try_from(least).unwrap_or(u32::MAX)),
            ignore_eos: fields.truth("ignore_eos"),
            stream: fields.truth("stream"),
            include_usage: option("include_usage"),
            continuous_usage: option("continuous_usage_stats"),
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
            cache_salt: fields.text("cache_salt").map(str::to_owned),
            prompts,
        })
    }
}

/// Log probabilities that are written where all of the vocabulary were asked for.
const MANY_LOGPROBS: u32 = 20;

/// Role of the last message of a chat that goes on without a new one.
fn last_role(fields: &serde_json::Map<String, serde_json::Value>) -> Option<String> {
    fields.get("add_generation_prompt").filter(|_| !fields.truth("add_generation_prompt"))?;
    Some(fields.get("messages")?.as_array()?.last()?["role"].as_str()?.to_owned())
}

/// `truncate_prompt_tokens`: the last so many tokens, or as many as the context holds for -1.
fn truncate(asked: Option<i64>, length: u32, prompts: &mut [Prompt]) {
    let Some(asked) = asked else { return };
    let keep = usize::try_from(asked).unwrap_or(length as usize).max(1);
    for prompt in prompts.iter_mut().filter(|prompt| prompt.ids.len() > keep) {
        prompt.ids = prompt.ids[prompt.ids.len() - keep..].into();
    }
}
