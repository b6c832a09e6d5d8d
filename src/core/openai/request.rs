//! Reads the fields of a request that the gateway needs, in one pass and without a tree.
//!
//! [`read`] checks that the body is UTF-8 and one JSON object, and takes the fields that decide
//! routing, bounds and rewriting. It is otherwise no stricter than vLLM: as in pydantic, `"8"` and
//! `8.0` are 8 and `"true"` is true; unknown members are skipped; the engine checks ranges and
//! combinations. It is stricter only about UTF-16 and UTF-32, which Python guesses, and about
//! nesting over [`MAX_DEPTH`](super::scan::MAX_DEPTH), whose bound in vLLM depends on Python's
//! version. A byte order mark is skipped and passed on.
//!
//! `null` counts as absent. If a member is given twice, the last one counts, as in Python; only a
//! second `priority` is refused. Members are recognised by their decoded key, so a client cannot
//! show one `model` to the gateway and another to the engine. Cost: a chat body of 400 KB takes 40
//! us, or 110 us if it consists of escapes.

use std::borrow::Cow;

use super::not_continued::{self, NotContinued};
use super::prefix::PromptParts;
use super::prompt;
use super::request_error::RequestError;
use super::rewrite::{EditPoints, OptionsPoints};
use super::route::Route;
use super::scan::{JsonKind, Scanner, Span};
use super::shape::{PromptShape, TextShape};

/// The largest `n`; equal to vLLM's bound (`VLLM_MAX_N_SEQUENCES`).
pub const MAX_SEQUENCES: u32 = 16_384;

/// The output bound of `/v1/completions` if the client gives none (OpenAI's and vLLM's default).
pub const COMPLETIONS_DEFAULT_OUTPUT: u64 = 16;

/// The fields of a request that the gateway acts on. Only model, user, session and ids of responses
/// are borrowed from the body.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestView<'a> {
    /// The route of the request.
    pub route: Route,
    /// The requested model; `None` if absent, null or empty (vLLM then serves its base model).
    pub model: Option<Cow<'a, str>>,
    /// Whether the client wants a stream.
    pub stream: bool,
    /// The client's bound on output tokens per sequence, as sent: `max_completion_tokens` before
    /// `max_tokens`, or `max_output_tokens`. [`RequestView::output_bound`] is the bound that
    /// applies.
    pub max_output: Option<u64>,
    /// Tokens that the engine must generate before a stop ends the answer.
    pub min_tokens: u64,
    /// Whether the response repeats the prompt before the output (`echo`).
    pub echo: bool,
    /// Whether the engine ignores the end-of-sequence token, so that the output has exactly
    /// `max_output` tokens.
    pub ignore_eos: bool,
    /// Sequences per prompt (`n`, on routes that generate); 1..=[`MAX_SEQUENCES`].
    pub n: u32,
    /// Prompts or inputs in the request; at least 1.
    pub prompts: u32,
    /// Size and kind of the text of all prompts together.
    pub shape: PromptShape,
    /// Positions of the parts of the prompt in the body; empty for a form.
    pub prompt_parts: PromptParts,
    /// Scheduling priority (lower is earlier), if given; numbers beyond 64 bits are clamped.
    pub priority: Option<i64>,
    /// The end user that the client names: `user` or `safety_identifier`.
    pub user: Option<Cow<'a, str>>,
    /// The conversation that the client names: `session_id` or `prompt_cache_key`.
    pub session: Option<Cow<'a, str>>,
    /// Offset in the body of the first value with prompt text.
    pub prompt_start: Option<usize>,
    /// Whether the engine generates the response after it has answered the request (`background` of
    /// `/v1/responses`).
    pub background: bool,
    /// The stored response that the prompt continues (`previous_response_id` of `/v1/responses`).
    pub previous_response: Option<Cow<'a, str>>,
    /// The id under which the engine must store the response (`request_id` of `/v1/responses`).
    pub response_id: Option<Cow<'a, str>>,
    /// Whether the client requested the usage event at the end of a stream.
    pub include_usage: bool,
    /// Whether the client requested usage in every event.
    pub continuous_usage: bool,
    /// Whether the engine's count of prompt tokens counts the text in `shape`. Not if the prompt is
    /// truncated, continues a stored response or is rendered by the client's template, or if
    /// `shape` includes members of unknown meaning.
    pub usage_measures_shape: bool,
    /// The reason from the first member that makes the answer depend on more than the prompt and
    /// the text so far. Only read for chats, completions and Messages.
    pub not_continued: Option<NotContinued>,
    /// Positions at which the body can be edited; they borrow nothing and outlive the view.
    pub edits: EditPoints,
}

impl<'a> RequestView<'a> {
    /// A request whose body was not read.
    pub fn empty(route: Route) -> Self {
        Self {
            route,
            model: None,
            stream: false,
            max_output: None,
            min_tokens: 0,
            echo: false,
            ignore_eos: false,
            n: 1,
            prompts: 1,
            shape: PromptShape::default(),
            prompt_parts: PromptParts::default(),
            priority: None,
            user: None,
            session: None,
            prompt_start: None,
            background: false,
            previous_response: None,
            response_id: None,
            include_usage: false,
            continuous_usage: false,
            usage_measures_shape: true,
            not_continued: None,
            edits: EditPoints::default(),
        }
    }

    /// The most tokens that one sequence can produce: `max_output`, the default of
    /// `/v1/completions`, or 0 on routes that do not generate. `None` if only the context length
    /// bounds it.
    pub fn output_bound(&self) -> Option<u64> {
        match self.route {
            route if !route.generates() || route.is_job() => Some(0),
            Route::Completions => self.max_output.or(Some(COMPLETIONS_DEFAULT_OUTPUT)),
            _ => self.max_output,
        }
    }

    /// Sequences that the engine decodes for this request: prompts times `n`. On routes that do not
    /// generate it is one, because inputs take prefill but no decoding.
    pub fn sequences(&self) -> u64 {
        match self.route.generates() && !self.route.is_job() {
            true => u64::from(self.prompts) * u64::from(self.n),
            false => 1,
        }
    }
}

/// Reads a JSON body that was sent to `route`. For multipart routes see
/// [`multipart::read`](super::multipart::read).
///
/// # Errors
/// If the body is not a JSON object, or a field that matters here has a type that vLLM refuses too.
pub fn read(route: Route, body: &[u8]) -> Result<RequestView<'_>, RequestError> {
    // Most bodies are ASCII; checking for ASCII takes a third of the time.
    if !body.is_ascii()
        && let Err(error) = std::str::from_utf8(body)
    {
        return Err(RequestError::NotUtf8 { at: error.valid_up_to() });
    }
    let mut scanner = Scanner::new(body);
    let kind = scanner.kind()?;
    if kind != JsonKind::Object {
        // If the JSON is broken, that error is reported, not the kind of the value.
        scanner.skip()?;
        scanner.end()?;
        return Err(RequestError::NotAnObject { got: kind.label() });
    }
    let mut view = RequestView::empty(route);
    let mut limits = Limits::default();
    view.edits = EditPoints::json(scanner.position() + 1);
    let (mut single, mut single_ids) = (TextShape::default(), 0u64);
    let mut before_member = scanner.position() + 1;
    scanner.object(|scanner, key| {
        view.edits.saw_member();
        let key = key.bytes();
        let (before, before_ids, mut prompts) = (view.shape.text, view.shape.token_ids, 1);
        scanner.kind()?;
        let start = scanner.position();
        if route == Route::Messages && view.not_continued.is_none() {
            view.not_continued = not_continued::of_message_member(&key, &mut scanner.clone())?;
        }
        let is_prompt = prompt::member(scanner, route, &key, &mut view.shape, &mut prompts)?;
        if !is_prompt {
            field(scanner, &key, &mut view, &mut limits)?;
            let is_priority = *key == *b"priority";
            if is_priority && !view.edits.set_priority(before_member, scanner.position()) {
                return Err(RequestError::SentTwice { param: "priority" });
            }
        } else {
            if prompts == 1 {
                single.add(view.shape.text.since(before));
                single_ids += view.shape.token_ids - before_ids;
            }
            view.prompts = view.prompts.max(prompts);
            view.prompt_start.get_or_insert(start);
        }
        before_member = scanner.position();
        view.prompt_parts.add(&key, Span { start, end: before_member }, is_prompt);
        Ok::<_, RequestError>(())
    })?;
    scanner.end()?;
    // On a route that generates but does not stream, engines ignore the field.
    view.stream &= route.streams() || !route.generates();
    if matches!(route, Route::Rerank | Route::Score | Route::GenerativeScoring | Route::Decisions) {
        // These routes compare one text with many, and the engine reads it with each of them.
        let others = u64::from(view.prompts - 1);
        view.shape.text.add(single.times(others));
        view.shape.token_ids = view.shape.token_ids.saturating_add(single_ids.saturating_mul(others));
    }
    view.max_output = match route {
        Route::Responses => limits.max_output_tokens,
        Route::ChatCompletions | Route::ChatBatch => limits.max_completion_tokens.or(limits.max_tokens),
        _ => limits.max_tokens,
    };
    view.n = limits.n.unwrap_or(1);
    Ok(view)
}

/// Fields that overlap in meaning. They are combined once the whole body was read.
#[derive(Default)]
struct Limits {
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    max_output_tokens: Option<u64>,
    n: Option<u32>,
}

fn field<'a>(
    scanner: &mut Scanner<'a>,
    key: &[u8],
    view: &mut RequestView<'a>,
    limits: &mut Limits,
) -> Result<(), RequestError> {
    if view.not_continued.is_none() && matches!(view.route, Route::ChatCompletions | Route::Completions) {
        view.not_continued = not_continued::of_member(key, &mut scanner.clone())?;
    }
    match key {
        b"model" => {
            let (span, model) = model(scanner)?;
            view.edits.set_model_span(span);
            view.model = model;
        }
        b"stream" => view.stream = boolean(scanner, "stream")?.unwrap_or(false),
        b"background" if view.route == Route::Responses => {
            view.background = boolean(scanner, "background")?.unwrap_or(false);
        }
        b"request_id" if view.route == Route::Responses => view.response_id = text(scanner, "request_id")?,
        b"stream_options" => {
            let options = stream_options(scanner)?;
            view.include_usage = options.include.unwrap_or(false);
            view.continuous_usage = options.continuous.unwrap_or(false) && view.include_usage;
            view.edits.set_options(options.points);
        }
        b"max_tokens" => limits.max_tokens = amount(scanner, "max_tokens")?,
        b"max_completion_tokens" => limits.max_completion_tokens = amount(scanner, "max_completion_tokens")?,
        b"max_output_tokens" => limits.max_output_tokens = amount(scanner, "max_output_tokens")?,
        b"min_tokens" => view.min_tokens = amount(scanner, "min_tokens")?.unwrap_or(0),
        b"ignore_eos" => view.ignore_eos = boolean(scanner, "ignore_eos")?.unwrap_or(false),
        b"echo" if matches!(view.route, Route::Completions | Route::ChatCompletions) => {
            view.echo = boolean(scanner, "echo")?.unwrap_or(false);
        }
        b"n" if view.route.generates() => limits.n = sequences(scanner, "n")?,
        b"priority" => {
            let clamp = |n: i128| n.clamp(i64::MIN.into(), i64::MAX.into()) as i64;
            view.priority = integer(scanner, "priority")?.map(clamp);
        }
        b"user" | b"safety_identifier" => view.user = name(scanner)?.or(view.user.take()),
        b"session_id" | b"prompt_cache_key" => view.session = name(scanner)?.or(view.session.take()),
        // With `tool_choice: "none"` engines leave the tools out of the prompt.
        b"truncate_prompt_tokens"
        | b"truncation"
        | b"chat_template"
        | b"chat_template_kwargs"
        | b"prompt"
        | b"prompt_embeds"
        | b"previous_response_id"
        | b"previous_input_messages"
        | b"tool_choice" => {
            if key == b"previous_response_id" && view.route == Route::Responses {
                view.previous_response = text(&mut scanner.clone(), "previous_response_id")?;
            }
            view.usage_measures_shape &= is_default(scanner.clone(), key)?;
            prompt::other(scanner, key, &mut view.shape)?;
        }
        key => view.usage_measures_shape &= !prompt::other(scanner, key, &mut view.shape)?,
    }
    Ok(())
}

/// Whether a member leaves the prompt unchanged: null, no truncation, or a `tool_choice` with which
/// the engine renders the tools.
fn is_default(mut scanner: Scanner<'_>, key: &[u8]) -> Result<bool, RequestError> {
    Ok(match scanner.kind()? {
        JsonKind::Null => true,
        JsonKind::String => {
            let value = scanner.text()?.bytes();
            matches!((key, &*value), (b"tool_choice", b"auto" | b"required") | (b"truncation", b"disabled"))
        }
        JsonKind::Object | JsonKind::Array | JsonKind::Number | JsonKind::Bool => false,
    })
}

fn text<'a>(scanner: &mut Scanner<'a>, param: &'static str) -> Result<Option<Cow<'a, str>>, RequestError> {
    match scanner.kind()? {
        JsonKind::Null => scanner.skip().map(|_| None).map_err(Into::into),
        JsonKind::String => Ok(Some(scanner.text()?.decode())),
        kind => Err(RequestError::WrongType { param, expected: "a string", got: kind.label() }),
    }
}

/// A name that the client gives. `None` if it is empty or not a string, which the engine may
/// refuse.
fn name<'a>(scanner: &mut Scanner<'a>) -> Result<Option<Cow<'a, str>>, RequestError> {
    if scanner.kind()? != JsonKind::String {
        scanner.skip()?;
        return Ok(None);
    }
    let name = scanner.text()?.decode();
    Ok((!name.is_empty()).then_some(name))
}

fn model<'a>(scanner: &mut Scanner<'a>) -> Result<(Span, Option<Cow<'a, str>>), RequestError> {
    match scanner.kind()? {
        JsonKind::Null => Ok((scanner.skip()?, None)),
        JsonKind::String => {
            let start = scanner.position();
            let name = scanner.text()?.decode();
            Ok((Span { start, end: scanner.position() }, (!name.is_empty()).then_some(name)))
        }
        kind => Err(RequestError::WrongType { param: "model", expected: "a string", got: kind.label() }),
    }
}

#[derive(Default)]
struct StreamOptions {
    include: Option<bool>,
    continuous: Option<bool>,
    points: OptionsPoints,
}

fn stream_options(scanner: &mut Scanner<'_>) -> Result<StreamOptions, RequestError> {
    let mut options = StreamOptions::default();
    match scanner.kind()? {
        JsonKind::Null => options.points = OptionsPoints::replace(scanner.skip()?),
        JsonKind::Object => {
            options.points = OptionsPoints::object(scanner.position() + 1);
            let span = scanner.object(|scanner, key| {
                options.points.saw_member();
                scanner.kind()?;
                let start = scanner.position();
                match &*key.bytes() {
                    b"include_usage" => {
                        options.include = boolean(scanner, "stream_options.include_usage")?;
                        options.points.include = Some(Span { start, end: scanner.position() });
                    }
                    b"continuous_usage_stats" => {
                        options.continuous = boolean(scanner, "stream_options.continuous_usage_stats")?;
                        options.points.continuous = Some(Span { start, end: scanner.position() });
                        options.points.continuous_is_true = options.continuous == Some(true);
                    }
                    _ => drop(scanner.skip()?),
                }
                Ok::<_, RequestError>(())
            })?;
            options.points.span = span;
        }
        kind => {
            return Err(RequestError::WrongType { param: "stream_options", expected: "an object", got: kind.label() });
        }
    }
    Ok(options)
}

/// A boolean as pydantic reads one: also 0, 1 and the usual words.
fn boolean(scanner: &mut Scanner<'_>, param: &'static str) -> Result<Option<bool>, RequestError> {
    let kind = scanner.kind()?;
    let wrong = RequestError::WrongType { param, expected: "a boolean", got: kind.label() };
    match kind {
        JsonKind::Null => scanner.skip().map(|_| None).map_err(Into::into),
        JsonKind::Bool => Ok(Some(scanner.boolean()?)),
        JsonKind::Number => match as_integer(scanner.number()?) {
            Some(0) => Ok(Some(false)),
            Some(1) => Ok(Some(true)),
            _ => Err(wrong),
        },
        JsonKind::String => truth(&scanner.text()?.bytes()).map(Some).ok_or(wrong),
        JsonKind::Object | JsonKind::Array => Err(wrong),
    }
}

/// A boolean in words, as pydantic reads one.
pub(super) fn truth(word: &[u8]) -> Option<bool> {
    match word.to_ascii_lowercase().as_slice() {
        b"true" | b"t" | b"yes" | b"y" | b"on" | b"1" => Some(true),
        b"false" | b"f" | b"no" | b"n" | b"off" | b"0" => Some(false),
        _ => None,
    }
}

/// An integer as pydantic reads one: also `8.0`, `"8"` and booleans.
fn integer(scanner: &mut Scanner<'_>, param: &'static str) -> Result<Option<i128>, RequestError> {
    let kind = scanner.kind()?;
    let wrong = || RequestError::WrongType { param, expected: "an integer", got: kind.label() };
    match kind {
        JsonKind::Null => scanner.skip().map(|_| None).map_err(Into::into),
        JsonKind::Bool => Ok(Some(i128::from(scanner.boolean()?))),
        JsonKind::Number => {
            let expected = "an integer";
            as_integer(scanner.number()?).map(Some).ok_or(RequestError::OutOfRange { param, expected })
        }
        JsonKind::String => as_integer(scanner.text()?.decode().trim().as_bytes()).map(Some).ok_or_else(wrong),
        JsonKind::Object | JsonKind::Array => Err(wrong()),
    }
}

/// The value of a number that is an integer. Values beyond 64 bits are clamped to +-2^100.
fn as_integer(number: &[u8]) -> Option<i128> {
    let text = std::str::from_utf8(number).ok()?;
    if let Ok(value) = text.parse::<i64>() {
        return Some(value.into());
    }
    let value = text.parse::<f64>().ok()?;
    (value.is_finite() && value.fract() == 0.0).then(|| (value as i128).clamp(-(1 << 100), 1 << 100))
}

fn amount(scanner: &mut Scanner<'_>, param: &'static str) -> Result<Option<u64>, RequestError> {
    let Some(value) = integer(scanner, param)? else { return Ok(None) };
    if value < 0 {
        return Err(RequestError::OutOfRange { param, expected: "a number of tokens, 0 or more" });
    }
    Ok(Some(u64::try_from(value).unwrap_or(u64::MAX)))
}

fn sequences(scanner: &mut Scanner<'_>, param: &'static str) -> Result<Option<u32>, RequestError> {
    let Some(value) = integer(scanner, param)? else { return Ok(None) };
    match u32::try_from(value) {
        Ok(value @ 1..=MAX_SEQUENCES) => Ok(Some(value)),
        _ => Err(RequestError::OutOfRange { param, expected: "an integer from 1 to 16384" }),
    }
}

#[cfg(test)]
mod tests;
