//! Usage and errors, in an event of a stream or in a whole JSON response.
//!
//! The dialects name the same numbers differently: `prompt_tokens` / `input_tokens`,
//! `completion_tokens` / `output_tokens`, cached tokens in `prompt_tokens_details.cached_tokens`,
//! `input_tokens_details.cached_tokens` or `cache_read_input_tokens`. Rerank and score report only
//! `total_tokens`, which then counts as the prompt. Anthropic's `input_tokens` leaves out the
//! tokens that were read from the cache or written to it, so both numbers are added to it.
//!
//! An error is an object under `error` (vLLM since 0.11, OpenAI, Anthropic), a bare string under
//! `error` (vLLM's 401, and while it scales), or flat, with `"object":"error"` (vLLM up to 0.10).
//! `code` may be a number or a string of digits; any other string is ignored. Messages are cut to
//! [`MAX_MESSAGE`] bytes.

use serde::{Deserialize, Serialize};

use super::engine_times::{self, EngineTimes};
use super::output_text;
use super::scan::{JsonKind, ScanError, Scanner};

/// Bytes of an upstream's error message that are kept, for logs.
pub const MAX_MESSAGE: usize = 512;

/// The finish reason of a request that the engine ended, as vLLM does with running requests at
/// shutdown. The response is well-formed but incomplete.
pub(super) const ABORT: &[u8] = b"abort";

labels! {
    /// How the generation of an answer ended, according to the engine.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum FinishReason {
        /// The model ended the answer, or a stop word did.
        Stop = "stop",
        /// The answer reached the bound on tokens.
        Length = "length",
        /// The model calls a tool.
        ToolCalls = "tool_calls",
        /// The answer was withheld, or the model refused.
        ContentFilter = "content_filter",
        /// Any other reason.
        Other = "other",
    }
}

impl FinishReason {
    /// The reason with this name in any dialect.
    pub(super) fn of(name: &[u8]) -> Self {
        match name {
            b"stop" | b"end_turn" | b"stop_sequence" | b"completed" | b"COMPLETE" | b"STOP_SEQUENCE" => Self::Stop,
            b"length" | b"max_tokens" | b"max_output_tokens" | b"MAX_TOKENS" => Self::Length,
            b"tool_calls" | b"function_call" | b"tool_use" | b"TOOL_CALL" => Self::ToolCalls,
            b"content_filter" | b"refusal" => Self::ContentFilter,
            _ => Self::Other,
        }
    }
}

/// The answer as a response describes it. Of several choices, the last one counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// How the answer ended.
    pub finish: Option<FinishReason>,
    /// Whether the answer is marked as a refusal: it has a refusal text, or a content filter ended
    /// it. A refusal in the words of an answer is not recognised.
    pub refused: bool,
}

impl Answer {
    /// Takes the values that `later` has and keeps the others.
    pub fn update(&mut self, later: Self) {
        self.finish = later.finish.or(self.finish);
        self.refused |= later.refused;
    }

    pub(super) fn finished(&mut self, reason: FinishReason) {
        self.update(Self { finish: Some(reason), refused: reason == FinishReason::ContentFilter });
    }
}

/// Token counts that a response reports; `None` if not reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// Tokens of the prompt (all prompts of the request).
    pub prompt: Option<u64>,
    /// Tokens generated (all sequences of the request).
    pub completion: Option<u64>,
    /// Prompt tokens that came from the prefix cache.
    pub cached: Option<u64>,
}

impl UpstreamError {
    /// The error for a request that the engine ended. The request is not at fault, so another
    /// backend may take it, as after a 503.
    pub fn aborted() -> Self {
        Self { code: Some(503), message: "the engine ended the request early (finish reason abort)".to_owned() }
    }
}

impl TokenUsage {
    /// Takes every count that `later` reports and keeps the others.
    pub fn update(&mut self, later: Self) {
        self.prompt = later.prompt.or(self.prompt);
        self.completion = later.completion.or(self.completion);
        self.cached = later.cached.or(self.cached);
    }
}

/// An error that an upstream reports in a response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpstreamError {
    /// The status in the error, if any. If it is 503 and no content came before, the request may go
    /// to another backend.
    pub code: Option<u16>,
    /// The message, cut to [`MAX_MESSAGE`] bytes.
    pub message: String,
}

/// Usage and error of a whole (not streamed) JSON response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseSummary {
    /// The usage, if the response reports it.
    pub usage: Option<TokenUsage>,
    /// The times that the engine measured, if the response has them.
    pub times: Option<EngineTimes>,
    /// The error, if the response is one.
    pub error: Option<UpstreamError>,
    /// The answer as the response describes it; empty in the Responses dialect.
    pub answer: Answer,
    /// Bytes of output as written; see [`output_text`].
    pub text: u64,
}

/// Reads the JSON body of any route's response. Unreadable parts are ignored: the gateway does not
/// validate responses.
pub fn read(body: &[u8]) -> ResponseSummary {
    let mut reader = ResponseReader::default();
    reader.read(body);
    reader.summary()
}

/// Reads a response in one piece or in several parts (see
/// [`Condenser`](super::condense::Condenser)).
#[derive(Clone, Debug, Default)]
pub struct ResponseReader {
    summary: ResponseSummary,
    flat: FlatError,
    aborted: bool,
}

impl ResponseReader {
    /// Takes the next part, or the whole response.
    pub fn read(&mut self, part: &[u8]) {
        let Self { summary, flat, aborted } = self;
        let mut scanner = Scanner::new(part);
        // From a body that breaks off, the members before the break are used.
        let _ = scanner.object(|scanner, key| {
            match &*key.bytes() {
                b"usage" => summary.usage = usage(scanner)?,
                b"metrics" => summary.times = engine_times::read(scanner)?,
                b"meta" if scanner.kind()? == JsonKind::Object => {
                    let billed = billed_units(scanner)?;
                    summary.usage = summary.usage.or(billed);
                }
                b"error" => summary.error = error(scanner)?,
                b"choices" if scanner.kind()? == JsonKind::Array => *aborted |= choices(scanner, summary)?,
                b"stop_reason" | b"finish_reason" if scanner.kind()? == JsonKind::String => {
                    summary.answer.finished(FinishReason::of(scanner.text()?.raw));
                }
                b"output" | b"content" | b"text" => summary.text += output_text::bytes(scanner)?,
                b"message" if scanner.kind()? == JsonKind::Object => summary.text += output_text::bytes(scanner)?,
                key => flat.member(scanner, key)?,
            }
            Ok::<_, ScanError>(())
        });
    }

    /// The values from all parts.
    pub fn summary(self) -> ResponseSummary {
        let Self { mut summary, flat, aborted } = self;
        summary.error = summary.error.or(flat.found()).or_else(|| aborted.then(UpstreamError::aborted));
        summary
    }
}

/// Takes `meta` of Cohere's responses, which counts tokens in `billed_units`.
fn billed_units(scanner: &mut Scanner<'_>) -> Result<Option<TokenUsage>, ScanError> {
    let mut found = None;
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"billed_units" => found = usage(scanner)?,
            _ => drop(scanner.skip()?),
        }
        Ok::<_, ScanError>(())
    })?;
    Ok(found)
}

/// Reads the choices into `summary`. Returns whether a choice has the finish reason `abort`.
fn choices(scanner: &mut Scanner<'_>, summary: &mut ResponseSummary) -> Result<bool, ScanError> {
    let ResponseSummary { answer, text, .. } = summary;
    let mut aborted = false;
    scanner.array(|scanner| {
        if scanner.kind()? != JsonKind::Object {
            return scanner.skip().map(drop);
        }
        scanner.object(|scanner, key| {
            match &*key.bytes() {
                b"finish_reason" if scanner.kind()? == JsonKind::String => {
                    let reason = scanner.text()?.raw;
                    aborted |= reason == ABORT;
                    answer.finished(FinishReason::of(reason));
                }
                b"message" if scanner.kind()? == JsonKind::Object => {
                    scanner.object(|scanner, key| {
                        match &*key.bytes() {
                            b"refusal" if scanner.kind()? == JsonKind::String => {
                                let refusal = scanner.text()?.raw.len() as u64;
                                answer.refused |= refusal > 0;
                                *text += refusal;
                            }
                            key if output_text::is_output(key) => *text += output_text::bytes(scanner)?,
                            _ => drop(scanner.skip()?),
                        }
                        Ok::<_, ScanError>(())
                    })?;
                }
                b"text" => *text += output_text::bytes(scanner)?,
                _ => drop(scanner.skip()?),
            }
            Ok::<_, ScanError>(())
        })?;
        Ok::<_, ScanError>(())
    })?;
    Ok(aborted)
}

/// Takes a usage object; `None` if it is null or reports nothing.
pub(super) fn usage(scanner: &mut Scanner<'_>) -> Result<Option<TokenUsage>, ScanError> {
    if scanner.kind()? != JsonKind::Object {
        scanner.skip()?;
        return Ok(None);
    }
    let mut found = TokenUsage::default();
    let (mut total, mut left_out) = (None, 0u64);
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"prompt_tokens" | b"input_tokens" => found.prompt = count(scanner)?.or(found.prompt),
            b"completion_tokens" | b"output_tokens" => found.completion = count(scanner)?.or(found.completion),
            b"cache_read_input_tokens" => {
                let read = count(scanner)?;
                left_out = left_out.saturating_add(read.unwrap_or(0));
                found.cached = read.or(found.cached);
            }
            b"cache_creation_input_tokens" => left_out = left_out.saturating_add(count(scanner)?.unwrap_or(0)),
            b"total_tokens" => total = count(scanner)?,
            // Cohere's counts: actual tokens, or billed tokens.
            b"tokens" | b"billed_units" if scanner.kind()? == JsonKind::Object => {
                found.update(usage(scanner)?.unwrap_or_default());
            }
            b"cached_tokens" => found.cached = count(scanner)?.or(found.cached),
            b"prompt_tokens_details" | b"input_tokens_details" => found.cached = cached(scanner)?.or(found.cached),
            _ => drop(scanner.skip()?),
        }
        Ok::<_, ScanError>(())
    })?;
    if found.prompt.is_none() {
        found.prompt = total.map(|total: u64| total.saturating_sub(found.completion.unwrap_or(0)));
    }
    found.prompt = found.prompt.map(|prompt: u64| prompt.saturating_add(left_out));
    Ok((found != TokenUsage::default()).then_some(found))
}

/// Takes the value of `error`; `None` if it is null.
pub(super) fn error(scanner: &mut Scanner<'_>) -> Result<Option<UpstreamError>, ScanError> {
    match scanner.kind()? {
        JsonKind::Null => scanner.skip().map(|_| None),
        JsonKind::String => Ok(Some(UpstreamError { code: None, message: message(scanner)? })),
        JsonKind::Object => {
            let mut found = UpstreamError::default();
            scanner.object(|scanner, key| {
                match &*key.bytes() {
                    b"code" => found.code = code(scanner)?,
                    b"message" => found.message = message(scanner)?,
                    _ => drop(scanner.skip()?),
                }
                Ok::<_, ScanError>(())
            })?;
            Ok(Some(found))
        }
        _ => scanner.skip().map(|_| Some(UpstreamError::default())),
    }
}

/// Collects the members of a flat error, which has no `error` key.
#[derive(Clone, Debug, Default)]
pub(super) struct FlatError {
    is_error: bool,
    fields: UpstreamError,
}

impl FlatError {
    /// Takes the value of `key`, of any kind.
    pub(super) fn member(&mut self, scanner: &mut Scanner<'_>, key: &[u8]) -> Result<(), ScanError> {
        match key {
            b"object" if scanner.kind()? == JsonKind::String => self.is_error = scanner.text()?.raw == b"error",
            b"code" => self.fields.code = code(scanner)?,
            b"message" if scanner.kind()? == JsonKind::String => self.fields.message = message(scanner)?,
            _ => drop(scanner.skip()?),
        }
        Ok(())
    }

    /// The error, if `object` marks it as one.
    pub(super) fn found(self) -> Option<UpstreamError> {
        self.is_error.then_some(self.fields)
    }

    /// The members as an error, for dialects that mark errors by the event's type.
    pub(super) fn into_fields(self) -> UpstreamError {
        self.fields
    }
}

fn cached(scanner: &mut Scanner<'_>) -> Result<Option<u64>, ScanError> {
    let mut found = None;
    if scanner.kind()? != JsonKind::Object {
        scanner.skip()?;
        return Ok(None);
    }
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"cached_tokens" => found = count(scanner)?,
            _ => drop(scanner.skip()?),
        }
        Ok::<_, ScanError>(())
    })?;
    Ok(found)
}

/// A whole number; any other value is not a count.
fn count(scanner: &mut Scanner<'_>) -> Result<Option<u64>, ScanError> {
    if scanner.kind()? != JsonKind::Number {
        scanner.skip()?;
        return Ok(None);
    }
    // Cohere writes counts as 5.0.
    let number = scanner.number()?;
    Ok(digits(number.split(|byte| *byte == b'.').next().unwrap_or_default()))
}

fn code(scanner: &mut Scanner<'_>) -> Result<Option<u16>, ScanError> {
    let number = match scanner.kind()? {
        JsonKind::Number => digits(scanner.number()?),
        JsonKind::String => digits(&scanner.text()?.bytes()),
        _ => scanner.skip().map(|_| None)?,
    };
    Ok(number.and_then(|code| u16::try_from(code).ok()))
}

/// The value of plain decimal digits.
pub(super) fn digits(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |sum, digit| {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        sum.checked_mul(10)?.checked_add(digit)
    })
}

fn message(scanner: &mut Scanner<'_>) -> Result<String, ScanError> {
    if scanner.kind()? != JsonKind::String {
        return scanner.skip().map(|_| String::new());
    }
    let text = scanner.text()?.decode();
    let mut end = text.len().min(MAX_MESSAGE);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    Ok(text[..end].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_found_under_all_its_names() {
        let full = |prompt, completion, cached| Some(TokenUsage { prompt, completion, cached });
        let of = |text: &str| read(text.as_bytes()).usage;
        assert_eq!(
            of(
                r#"{"choices":[{"x":{"usage":{"prompt_tokens":9}}}],"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#
            ),
            full(Some(5), Some(2), Some(4))
        );
        assert_eq!(
            of(r#"{"usage":{"input_tokens":5,"output_tokens":2,"input_tokens_details":{"cached_tokens":1}}}"#),
            full(Some(5), Some(2), Some(1))
        );
        let cached = r#"{"usage":{"input_tokens":5,"cache_read_input_tokens":3,"cache_creation_input_tokens":2}}"#;
        assert_eq!(of(cached), full(Some(10), None, Some(3)));
        assert_eq!(of(r#"{"usage":{"output_tokens":5,"cache_read_input_tokens":3}}"#), full(None, Some(5), Some(3)));
        assert_eq!(of(r#"{"usage":{"total_tokens":11}}"#), full(Some(11), None, None));
        assert_eq!(of(r#"{"meta":{"billed_units":{"input_tokens":4}}}"#), full(Some(4), None, None));
        let cohere =
            r#"{"usage":{"billed_units":{"input_tokens":5.0},"tokens":{"input_tokens":7.0,"output_tokens":2.0}}}"#;
        assert_eq!(of(cohere), full(Some(7), Some(2), None));
        assert_eq!(of(r#"{"usage":null}"#), None);
        assert_eq!(of(r#"{"usage":{"prompt_tokens":"x"}}"#), None);
        assert_eq!(of("[1,2"), None);
    }

    #[test]
    fn errors_are_found_in_all_their_shapes() {
        let of = |text: &str| read(text.as_bytes()).error;
        let error = |code, message: &str| Some(UpstreamError { code, message: message.into() });
        assert_eq!(of(r#"{"error":{"message":"busy","type":"x","param":null,"code":503}}"#), error(Some(503), "busy"));
        assert_eq!(of(r#"{"error":{"message":"busy","code":"503"}}"#), error(Some(503), "busy"));
        assert_eq!(of(r#"{"error":{"message":"busy","code":"rate_limit"}}"#), error(None, "busy"));
        assert_eq!(of(r#"{"object":"error","message":"old","type":"x","code":400}"#), error(Some(400), "old"));
        assert_eq!(of(r#"{"error":"Unauthorized"}"#), error(None, "Unauthorized"));
        assert_eq!(of(r#"{"object":"list","error":null}"#), None);
    }

    #[test]
    fn long_messages_are_cut_at_a_character() {
        let body = format!(r#"{{"error":{{"message":"{}"}}}}"#, "\u{e9}".repeat(400) + "x");
        assert_eq!(read(body.as_bytes()).error.unwrap().message.len(), MAX_MESSAGE);
    }
}
