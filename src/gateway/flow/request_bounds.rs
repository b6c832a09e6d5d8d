//! The most usage that a request can cause. An engine's report is believed only within these
//! bounds.
//!
//! They follow from the bytes of the request. Where bytes say too little (images and other media,
//! stored conversations, output without `max_tokens`), the bounds follow from the engine's context
//! limit. See [`UsageBounds`] for the bounds that follow from the output. All bounds are wide, so
//! that the count of every engine that counts tokens is within them.

use sluice_core::meter::UsageBounds;
use sluice_core::meter::usage::LONGEST_TOKEN;
use sluice_core::openai::{RequestView, Route};

/// The most prompt tokens for each byte of a request: one, and more where a tokenizer normalizes
/// one character into several.
const TOKENS_PER_BYTE: u64 = 4;
/// Prompt tokens that a chat template, a default system prompt or a tool parser may add to each
/// prompt.
const TEMPLATE_TOKENS: u64 = 16_384;
/// The context limit of an engine that reports none, and the highest limit that is believed. It is
/// above the longest of today (10M).
const CONTEXT_MAX: u64 = 1 << 24;
/// How often an engine may generate for one request of `/v1/responses`. The engine calls tools,
/// reads the whole conversation again each time, and adds up the tokens of all turns.
const TURNS_MAX: u64 = 32;
/// Factor on the permitted output, because engines may count a stop token, or drafted tokens.
const OUTPUT_SLACK: u64 = 2;

/// The bounds of one request, before the limits of an engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestBounds {
    prompt_min: u64,
    /// The most prompt tokens that the bytes can become.
    prompt_max: u64,
    /// Number of prompts that have a part outside the bytes of the request.
    unseen_prompts: u64,
    /// The output that the request permits for each sequence.
    output_max: Option<u64>,
    sequences: u64,
    turns: u64,
    /// Bytes of media in the request, each at most a token of output.
    media: u64,
    output_is_generated: bool,
}

impl RequestBounds {
    /// The bounds of a request of `bytes` bytes, whose text has at most `at_most` tokens.
    pub(super) fn new(view: &RequestView<'_>, bytes: usize, at_most: u64) -> Self {
        let (bytes, prompts) = (bytes as u64, u64::from(view.prompts));
        let is_response = view.route == Route::Responses;
        let has_media = view.shape.media_parts > 0 || view.shape.has_tensors || view.route.is_multipart();
        let text = view.shape.text.plain + view.shape.text.marks + view.shape.text.wide;
        let is_measured = view.route.generates() && view.usage_measures_shape && !has_media;
        Self {
            prompt_min: if is_measured { text / LONGEST_TOKEN } else { 0 },
            prompt_max: at_most
                .max(bytes)
                .saturating_mul(TOKENS_PER_BYTE)
                .saturating_add(TEMPLATE_TOKENS.saturating_mul(prompts)),
            unseen_prompts: if has_media || is_response { prompts } else { 0 },
            output_max: view.output_bound().filter(|_| view.route.generates()),
            sequences: view.sequences(),
            turns: if is_response { TURNS_MAX } else { 1 },
            media: if view.route.is_multipart() { bytes } else { 0 },
            output_is_generated: view.route.generates() && !view.echo,
        }
    }

    /// The bounds at an engine with this context limit.
    pub(super) fn at_engine(&self, max_model_len: Option<u64>) -> UsageBounds {
        let context = max_model_len.unwrap_or(CONTEXT_MAX).min(CONTEXT_MAX);
        let unseen = context.saturating_mul(self.unseen_prompts).saturating_mul(self.turns);
        let output = self.output_max.map_or(context, |most| most.saturating_mul(OUTPUT_SLACK));
        let of_all = output.saturating_add(1).saturating_mul(self.sequences).saturating_mul(self.turns);
        UsageBounds {
            prompt_min: self.prompt_min,
            prompt_max: self.prompt_max.saturating_add(unseen),
            completion_max: of_all.saturating_add(self.media),
            output_is_generated: self.output_is_generated,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::openai::request;

    fn bounds(route: Route, body: &str, max_model_len: Option<u64>) -> UsageBounds {
        let view = request::read(route, body.as_bytes()).unwrap();
        RequestBounds::new(&view, body.len(), 0).at_engine(max_model_len)
    }

    #[test]
    fn bytes_bound_the_prompt_and_the_context_limit_bounds_media_and_stored_conversations() {
        let text = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;
        let plain = bounds(Route::ChatCompletions, text, Some(8_192));
        assert_eq!(plain.prompt_max, 4 * text.len() as u64 + TEMPLATE_TOKENS);
        assert_eq!((plain.prompt_min, plain.completion_max), (0, 8_193));
        let image = r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#;
        let image = bounds(Route::ChatCompletions, image, Some(1 << 20));
        assert!((1 << 20..(1 << 20) + 20_000).contains(&image.prompt_max), "{image:?}");
        let stored = r#"{"model":"m","input":"more","previous_response_id":"resp_1"}"#;
        assert!(bounds(Route::Responses, stored, Some(8_192)).prompt_max > 32 * 8_192);
        let unknown = bounds(Route::Responses, stored, None);
        assert!(unknown.prompt_max < 1_000_000_000 && unknown.completion_max < 1_000_000_000, "{unknown:?}");
    }

    #[test]
    fn the_output_that_is_permitted_bounds_the_completion_of_all_sequences() {
        let body = r#"{"model":"m","prompt":["a","b"],"n":3,"max_tokens":10}"#;
        let found = bounds(Route::Completions, body, None);
        assert_eq!((found.completion_max, found.output_is_generated), (126, true));
        let echo = bounds(Route::Completions, r#"{"prompt":"a","echo":true}"#, None);
        assert_eq!((echo.completion_max, echo.output_is_generated), (33, false));
        let long = format!(r#"{{"prompt":"{}"}}"#, "word ".repeat(2_000));
        assert_eq!(bounds(Route::Completions, &long, None).prompt_min, 10_000 / LONGEST_TOKEN);
        let embeddings = bounds(Route::Embeddings, &long.replace("prompt", "input"), None);
        assert_eq!((embeddings.prompt_min, embeddings.output_is_generated), (0, false));
    }
}
