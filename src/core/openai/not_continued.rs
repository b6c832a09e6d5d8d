//! The table of eligibility: why an interrupted stream is not continued on another engine.
//!
//! A stream is continued by sending the text so far with the request, so that the new engine goes
//! on after the text. That is exact only if the answer depends on nothing but prompt and text. Each
//! row is a reason why the answer depends on more, or why the gateway did not try; the log and the
//! metric have the row's label. The client then gets the error event that ends a broken stream.
//!
//! All other streams are eligible: one streamed answer in plain text to a chat, to a message of
//! Anthropic's form that has only texts, or to a completion of one text prompt. A request with
//! tools is eligible until the answer calls a tool. A request with stop strings is eligible,
//! because an engine holds back characters with which a stop string may begin. Only a text that
//! ends with the beginning of a stop string is not continued.
//!
//! | known from | rows |
//! |---|---|
//! | configuration and headers | `off`, `header` |
//! | the request ([`of_member`]; `flow/continuation/eligible.rs`) | `route` to `extensions` |
//! | the answer so far ([`KeptText`](super::kept_text::KeptText)) | `tool_call` to `unreadable` |
//! | the end of the text (`flow/continuation`) | `stop_prefix` to `usage_unknown` |
//! | engines and limits (`flow/forward`) | `attempts` to `other_model` |

use super::scan::{JsonKind, ScanError, Scanner};

labels! {
    /// Why a stream was not continued.
    #[derive(Hash)]
    pub enum NotContinued {
        /// `retry.continue` is `off`.
        Off = "off",
        /// The client sent `x-sluice-no-continue`.
        Header = "header",
        /// The route is not chats, completions or Messages, or the request is a copy for a shadow
        /// arm.
        Route = "route",
        /// The response is not streamed.
        NotStreamed = "not_streamed",
        /// With `n` or several prompts, some choices may have ended and others not.
        Choices = "choices",
        /// `best_of` or beam search: the text so far does not determine the answer.
        Search = "search",
        /// Images, sounds or tensors in the prompt.
        Media = "media",
        /// The prompt is token ids, or the client wants token ids back.
        TokenIds = "token_ids",
        /// The answer repeats the prompt.
        Echo = "echo",
        /// The answer must fit between two texts.
        Suffix = "suffix",
        /// The prompt is truncated, so a longer one would lose other tokens.
        Truncated = "truncated",
        /// The client itself continues a message.
        OwnContinuation = "own_continuation",
        /// A schema, grammar or forced tool call: the engine's automaton starts at the beginning.
        StructuredOutput = "structured_output",
        /// The client wants log probabilities. Tokens whose text the first engine did not send
        /// would be reported twice.
        Logprobs = "logprobs",
        /// The client wants log probabilities of the prompt, and the text so far would be part of
        /// that prompt.
        PromptLogprobs = "prompt_logprobs",
        /// A seed promises that the answer can be repeated.
        Seed = "seed",
        /// Penalties or forbidden words count the answer's tokens, but not the prompt's.
        Penalties = "penalties",
        /// The request has a budget of thinking tokens, which the new engine would grant again as a
        /// whole.
        ThinkingBudget = "thinking_budget",
        /// Extensions of the engine whose state the gateway does not know: transferred caches,
        /// extra arguments.
        Extensions = "extensions",
        /// A request of Anthropic's form with more than texts: it cannot be written exactly as a
        /// chat.
        Translation = "translation",
        /// A tool call has begun.
        ToolCall = "tool_call",
        /// Reasoning has begun, which chat templates drop from earlier messages.
        Reasoning = "reasoning",
        /// The model refuses in a separate field.
        Refusal = "refusal",
        /// The text so far is longer than the gateway keeps.
        TooLong = "too_long",
        /// The gateway's memory for kept texts and requests is used up.
        Memory = "memory",
        /// The client has received a part of an event that was too long to be held.
        InsideEvent = "inside_event",
        /// The text has a replacement character, because some tokens were not valid UTF-8.
        ReplacementCharacter = "replacement_character",
        /// The answer or the request cannot be read.
        Unreadable = "unreadable",
        /// The text ends with the beginning of a stop string, which the new engine would not see.
        StopPrefix = "stop_prefix",
        /// The answer is complete except for the usage, which only the engine knew.
        UsageUnknown = "usage_unknown",
        /// The request was continued as often as is allowed.
        Attempts = "attempts",
        /// Two engines died while they served the request.
        Suspect = "suspect",
        /// Too many tokens were prefilled again within the last minute.
        Budget = "budget",
        /// No other engine of the pool had room in time.
        NoEngine = "no_engine",
        /// The other engine refused the request, because the chat template cannot continue a
        /// message.
        Refused = "refused",
        /// The other engine's continuation does not begin where the text so far ended.
        Differs = "differs",
        /// The other engine answers under another model name.
        OtherModel = "other_model",
    }
}

/// Takes the value of a member of a request. If the answer to a request with this value cannot be
/// continued, returns the reason.
pub(super) fn of_member(key: &[u8], scanner: &mut Scanner<'_>) -> Result<Option<NotContinued>, ScanError> {
    use NotContinued as Why;
    let (why, is_harmless) = match key {
        b"logprobs" => (Why::Logprobs, !is_true_or_number(scanner)?),
        b"return_token_ids" | b"return_tokens_as_token_ids" => (Why::TokenIds, !is_true(scanner)?),
        b"use_beam_search" => (Why::Search, !is_true(scanner)?),
        b"best_of" => (Why::Search, is_number(scanner, 1.0)?),
        b"presence_penalty" | b"frequency_penalty" => (Why::Penalties, is_number(scanner, 0.0)?),
        b"bad_words" => (Why::Penalties, is_empty(scanner)?),
        b"prompt_logprobs" => (Why::PromptLogprobs, is_null(scanner)?),
        b"seed" => (Why::Seed, is_null(scanner)?),
        b"suffix" => (Why::Suffix, is_null(scanner)?),
        b"truncate_prompt_tokens" => (Why::Truncated, is_null(scanner)?),
        b"continue_final_message" | b"add_generation_prompt" => (Why::OwnContinuation, is_null(scanner)?),
        b"response_format" => (Why::StructuredOutput, is_plain_text(scanner)?),
        b"tool_choice" => (Why::StructuredOutput, is_free_choice(scanner)?),
        b"structured_outputs" | b"guided_json" | b"guided_regex" | b"guided_choice" | b"guided_grammar" => {
            (Why::StructuredOutput, is_null(scanner)?)
        }
        b"thinking_token_budget" => (Why::ThinkingBudget, is_null(scanner)?),
        b"kv_transfer_params"
        | b"ec_transfer_params"
        | b"vllm_xargs"
        | b"logits_processors"
        | b"repetition_detection" => (Why::Extensions, is_null(scanner)?),
        _ => return Ok(None),
    };
    Ok((!is_harmless).then_some(why))
}

/// As [`of_member`], for a member of Anthropic's Messages. Only a chat can be continued, so every
/// member must be expressible in a chat.
pub(super) fn of_message_member(key: &[u8], scanner: &mut Scanner<'_>) -> Result<Option<NotContinued>, ScanError> {
    let is_harmless = match key {
        b"model"
        | b"messages"
        | b"system"
        | b"stream"
        | b"max_tokens"
        | b"stop_sequences"
        | b"temperature"
        | b"top_p"
        | b"top_k"
        | b"cache_salt"
        | b"chat_template_kwargs"
        | b"metadata"
        | b"service_tier" => true,
        _ => is_empty(scanner)?,
    };
    Ok((!is_harmless).then_some(NotContinued::Translation))
}

fn is_null(scanner: &mut Scanner<'_>) -> Result<bool, ScanError> {
    Ok(scanner.kind()? == JsonKind::Null)
}

fn is_empty(scanner: &mut Scanner<'_>) -> Result<bool, ScanError> {
    Ok(matches!(scanner.kind()?, JsonKind::Null) || scanner.skip_raw()?.iter().all(|byte| b"[] \n\t\r".contains(byte)))
}

/// Whether the value may be true. A string counts as true, whatever it says.
fn is_true(scanner: &mut Scanner<'_>) -> Result<bool, ScanError> {
    Ok(match scanner.kind()? {
        JsonKind::Null => false,
        JsonKind::Bool => scanner.boolean()?,
        JsonKind::Number => number(scanner)? != Some(0.0),
        JsonKind::String | JsonKind::Object | JsonKind::Array => true,
    })
}

/// As [`is_true`]; a number is true even if it is 0. `logprobs` of a completion is a number.
fn is_true_or_number(scanner: &mut Scanner<'_>) -> Result<bool, ScanError> {
    Ok(scanner.kind()? == JsonKind::Number || is_true(scanner)?)
}

fn is_number(scanner: &mut Scanner<'_>, wanted: f64) -> Result<bool, ScanError> {
    Ok(match scanner.kind()? {
        JsonKind::Null => true,
        JsonKind::Number => number(scanner)? == Some(wanted),
        _ => false,
    })
}

fn number(scanner: &mut Scanner<'_>) -> Result<Option<f64>, ScanError> {
    Ok(std::str::from_utf8(scanner.number()?).ok().and_then(|text| text.parse().ok()))
}

fn is_plain_text(scanner: &mut Scanner<'_>) -> Result<bool, ScanError> {
    let mut is_plain = true;
    match scanner.kind()? {
        JsonKind::Null => {}
        JsonKind::Object => {
            scanner.object(|scanner, key| {
                if &*key.bytes() == b"type" && scanner.kind()? == JsonKind::String {
                    is_plain = &*scanner.text()?.bytes() == b"text";
                } else {
                    scanner.skip()?;
                }
                Ok::<_, ScanError>(())
            })?;
        }
        _ => is_plain = false,
    }
    Ok(is_plain)
}

/// Whether a `tool_choice` does not force a tool call.
fn is_free_choice(scanner: &mut Scanner<'_>) -> Result<bool, ScanError> {
    Ok(match scanner.kind()? {
        JsonKind::Null => true,
        JsonKind::String => matches!(&*scanner.text()?.bytes(), b"auto" | b"none"),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_hinders_only_with_a_value_that_matters() {
        use NotContinued as Why;
        for (key, harmless, harmful, why) in [
            ("logprobs", &["null", "false"][..], &["true", "0", "5", "\"yes\""][..], Why::Logprobs),
            ("return_token_ids", &["null", "false", "0"], &["true", "1"], Why::TokenIds),
            ("use_beam_search", &["false"], &["true"], Why::Search),
            ("best_of", &["null", "1"], &["2", "\"3\""], Why::Search),
            ("presence_penalty", &["null", "0", "0.0"], &["0.1", "-1"], Why::Penalties),
            ("frequency_penalty", &["0"], &["1.5"], Why::Penalties),
            ("bad_words", &["null", "[]", "[ ]"], &["[\"x\"]"], Why::Penalties),
            ("prompt_logprobs", &["null"], &["0", "1"], Why::PromptLogprobs),
            ("seed", &["null"], &["0", "7"], Why::Seed),
            ("suffix", &["null"], &["\"\"", "\"x\""], Why::Suffix),
            ("truncate_prompt_tokens", &["null"], &["-1", "8"], Why::Truncated),
            ("continue_final_message", &["null"], &["true", "false"], Why::OwnContinuation),
            ("add_generation_prompt", &["null"], &["true", "false"], Why::OwnContinuation),
            (
                "response_format",
                &["null", r#"{"type":"text"}"#, "{}"],
                &[r#"{"type":"json_object"}"#, r#"{"x":{"type":"text"},"type":"json_schema"}"#, "\"text\""],
                Why::StructuredOutput,
            ),
            (
                "tool_choice",
                &["null", "\"auto\"", "\"none\""],
                &["\"required\"", r#"{"type":"function"}"#],
                Why::StructuredOutput,
            ),
            ("structured_outputs", &["null"], &[r#"{"regex":"a"}"#], Why::StructuredOutput),
            ("guided_regex", &["null"], &["\"a\""], Why::StructuredOutput),
            ("thinking_token_budget", &["null"], &["9"], Why::ThinkingBudget),
            ("vllm_xargs", &["null"], &["{}"], Why::Extensions),
            ("temperature", &["0", "1"], &[], Why::Off),
        ] {
            let of = |value: &str| of_member(key.as_bytes(), &mut Scanner::new(value.as_bytes())).unwrap();
            for value in harmless {
                assert_eq!(of(value), None, "{key}: {value}");
            }
            for value in harmful {
                assert_eq!(of(value), Some(why), "{key}: {value}");
            }
        }
    }
}
