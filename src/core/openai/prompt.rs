//! Finds the prompt in a body: which fields of which route become prompt tokens.
//!
//! Estimates and exact counts must agree on the parts of the prompt, so one walk reports the parts
//! to a [`PromptSink`]. Text is everything that the model reads: strings, text parts, tool
//! definitions and tool calls. Media are reported as parts, because their base64 would look like a
//! hundred thousand tokens. The walk is lenient inside messages, because the engine validates them.
//!
//! The walk may report too much, never too little: a prompt field that is given twice is reported
//! twice, and a long value of unknown meaning counts as text ([`other`]), because a chat template
//! may render it. Bound: inside more than [`WALK_DEPTH`] containers the walk counts everything as
//! text, because a client chooses the depth.

use super::request_error::RequestError;
use super::route::Route;
use super::scan::{JsonKind, Scanner};
use super::shape::{PromptShape, PromptSink, TextShape};

/// Least number of bytes in a tensor per prompt token: 512 values of 16 bits. Models of 8B have
/// 4,096 values, so such a prompt is overestimated eightfold. A tensor that torch expands (sparse,
/// or with strides of 0) may have more rows than its bytes suggest. That is accepted, because
/// `--enable-prompt-embeds` is only for clients that the engine trusts, as vLLM says.
pub const EMBEDDING_BYTES: u64 = 1_024;

/// Nesting depth that the walk enters. Messages whose parts hold nested results have about ten.
const WALK_DEPTH: u32 = 32;

/// Reads the value of member `key` if it belongs to the prompt of `route`, and returns whether it
/// does; if not, nothing is consumed. If the value is a list of prompts, raises `prompts` to the
/// number of them.
pub fn member<S: PromptSink>(
    scanner: &mut Scanner<'_>,
    route: Route,
    key: &[u8],
    sink: &mut S,
    prompts: &mut u32,
) -> Result<bool, RequestError> {
    let Some((name, field)) = field(route, key) else { return Ok(false) };
    let kind = scanner.kind()?;
    let fits = match field {
        _ if kind == JsonKind::Null => {
            scanner.skip()?;
            return Ok(true);
        }
        Field::Messages | Field::Batch | Field::Ids => kind == JsonKind::Array,
        Field::Content | Field::Raw | Field::Questions | Field::Media => true,
        Field::Prompts | Field::Tensors => !matches!(kind, JsonKind::Number | JsonKind::Bool),
    };
    if !fits {
        let expected = if matches!(field, Field::Prompts | Field::Tensors) { "a string or a list" } else { "a list" };
        return Err(RequestError::WrongType { param: name, expected, got: kind.label() });
    }
    match field {
        Field::Messages => messages(scanner, sink)?,
        Field::Content => content(scanner, sink)?,
        Field::Raw => raw(scanner, sink)?,
        // If several members are lists, the longest list counts, whatever the order of the members.
        Field::Ids | Field::Prompts => *prompts = prompt_list(scanner, sink)?.max(*prompts),
        Field::Batch => *prompts = batch(scanner, sink)?.max(*prompts),
        Field::Questions => *prompts = questions(scanner, sink)?.max(*prompts),
        Field::Media => media(scanner, sink)?,
        Field::Tensors => *prompts = tensors(scanner, sink)?.max(*prompts),
    }
    Ok(true)
}

/// Values of unknown members up to this many bytes are not counted. The fixed cost of a message
/// already covers a role, a type or an id.
const SHORT: usize = 64;

/// Members that never become prompt tokens, whatever their length.
const NOT_PROMPT: &[&[u8]] = &[
    b"allowed_token_ids",
    b"audio",
    b"bad_words",
    b"cache_salt",
    b"container",
    b"ec_transfer_params",
    b"guided_choice",
    b"guided_grammar",
    b"guided_json",
    b"guided_regex",
    b"include",
    b"kv_transfer_params",
    b"logit_bias",
    b"logprob_token_ids",
    b"media_io_kwargs",
    b"metadata",
    b"mm_processor_kwargs",
    b"model",
    b"output_config",
    b"prediction",
    b"prompt_cache_key",
    b"request_id",
    b"response_format",
    b"safety_identifier",
    b"session_id",
    b"stop",
    b"stop_sequences",
    b"stop_token_ids",
    b"stream_options",
    b"structured_outputs",
    b"text",
    b"user",
    b"vllm_xargs",
];

/// Takes the value of a member that [`member`] does not know. It counts as text, because a newer
/// engine or a chat template may render it, unless it is short or known to stay out of the prompt.
/// Returns whether it counts.
pub fn other<S: PromptSink>(scanner: &mut Scanner<'_>, key: &[u8], sink: &mut S) -> Result<bool, RequestError> {
    if NOT_PROMPT.contains(&key) {
        scanner.skip()?;
        return Ok(false);
    }
    long(scanner, sink)
}

/// As [`other`], for a form field, whose value is plain text.
pub fn other_field(name: &[u8], value: &[u8], shape: &mut PromptShape) {
    if !NOT_PROMPT.contains(&name) && value.len() > SHORT {
        shape.text.add(TextShape::of_plain(value));
    }
}

/// Takes a value; counts it as text if it is long.
fn long<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<bool, RequestError> {
    let raw = scanner.skip_raw()?;
    let counts = raw.len() > SHORT;
    if counts {
        sink.json(raw);
    }
    Ok(counts)
}

/// The form in which a field holds prompt text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    /// A conversation.
    Messages,
    /// A list of conversations.
    Batch,
    /// A string or parts.
    Content,
    /// One prompt or a list of prompts, each text or token ids.
    Prompts,
    /// A list of token ids.
    Ids,
    /// One tensor or a list of tensors, each in base64.
    Tensors,
    /// JSON that a template renders.
    Raw,
    /// Named questions; each is a separate prompt.
    Questions,
    /// A list of images, recordings or videos.
    Media,
}

fn field(route: Route, key: &[u8]) -> Option<(&'static str, Field)> {
    use Field::{Batch, Content, Ids, Media, Messages, Prompts, Questions, Raw, Tensors};
    let found = match key {
        b"messages" => ("messages", if route == Route::ChatBatch { Batch } else { Messages }),
        b"texts" => ("texts", Prompts),
        b"images" => ("images", Media),
        b"audio" => ("audio", Media),
        b"videos" => ("videos", Media),
        b"inputs" => ("inputs", Prompts),
        b"state" => ("state", Raw),
        b"questions" => ("questions", Questions),
        b"prompt_embeds" => ("prompt_embeds", Tensors),
        b"prompt" => ("prompt", Prompts),
        b"input" => {
            ("input", if matches!(route, Route::Responses | Route::ResponseTokens) { Content } else { Prompts })
        }
        b"system" => ("system", Content),
        b"instructions" => ("instructions", Content),
        b"query" => ("query", if route == Route::GenerativeScoring { Prompts } else { Content }),
        b"queries" => ("queries", Prompts),
        b"documents" => ("documents", if route == Route::Rerank || route == Route::Score { Prompts } else { Raw }),
        b"items" => ("items", Prompts),
        b"text_1" => ("text_1", Prompts),
        b"text_2" => ("text_2", Prompts),
        b"data_1" => ("data_1", Prompts),
        b"data_2" => ("data_2", Prompts),
        b"tokens" => ("tokens", Ids),
        b"tools" => ("tools", Raw),
        b"functions" => ("functions", Raw),
        _ => return None,
    };
    let names: &[&str] = match route {
        Route::ChatCompletions => &["messages", "tools", "functions", "documents"],
        Route::ChatBatch => &["messages"],
        Route::Completions => &["prompt", "prompt_embeds"],
        Route::Embeddings | Route::Pooling | Route::Classify => &["input", "messages"],
        Route::Responses | Route::ResponseTokens => &["input", "instructions", "tools"],
        Route::Messages | Route::CountTokens => &["messages", "system", "tools"],
        Route::Tokenize => &["prompt", "messages", "tools"],
        Route::Detokenize => &["tokens"],
        Route::Rerank => &["query", "documents"],
        Route::CohereChat => &["messages", "tools", "documents"],
        Route::CohereEmbed => &["texts", "images", "inputs"],
        Route::GenerativeScoring => &["query", "items"],
        Route::Decisions => &["state", "questions", "instructions", "images", "audio", "videos"],
        Route::Score => &["text_1", "text_2", "queries", "documents", "items", "data_1", "data_2", "query"],
        // Forms, requests without a JSON body, and jobs, whose cost is not counted in tokens.
        _ => &[],
    };
    names.contains(&found.0).then_some(found)
}

fn messages<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<(), RequestError> {
    scanner.array(|scanner| {
        sink.message();
        content(scanner, sink)
    })?;
    Ok(())
}

/// Lengths of the prompts in a list, in bytes as written in the body.
#[derive(Default)]
struct Lengths {
    count: u32,
    longest: u64,
    all: u64,
}

impl Lengths {
    /// Ends the prompt that began at `start`.
    fn add(&mut self, start: usize, scanner: &Scanner<'_>) {
        let bytes = (scanner.position() - start) as u64;
        self.count = self.count.saturating_add(1);
        self.longest = self.longest.max(bytes);
        self.all += bytes;
    }

    fn end<S: PromptSink>(self, sink: &mut S) -> u32 {
        if self.count > 1 {
            sink.listed(self.longest, self.all);
        }
        self.count.max(1)
    }
}

fn questions<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<u32, RequestError> {
    if scanner.kind()? != JsonKind::Object {
        return raw(scanner, sink).map(|()| 1);
    }
    let mut lengths = Lengths::default();
    scanner.object(|scanner, _| {
        let start = scanner.position();
        raw(scanner, sink)?;
        lengths.add(start, scanner);
        Ok::<_, RequestError>(())
    })?;
    Ok(lengths.end(sink))
}

fn media<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<(), RequestError> {
    if scanner.kind()? != JsonKind::Array {
        scanner.skip()?;
        sink.media();
        return Ok(());
    }
    scanner.array(|scanner| {
        scanner.skip()?;
        sink.media();
        Ok::<_, RequestError>(())
    })?;
    Ok(())
}

fn batch<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<u32, RequestError> {
    let mut lengths = Lengths::default();
    scanner.array(|scanner| {
        let start = scanner.position();
        match scanner.kind()? {
            JsonKind::Array => messages(scanner, sink)?,
            _ => content(scanner, sink)?,
        }
        lengths.add(start, scanner);
        Ok::<_, RequestError>(())
    })?;
    Ok(lengths.end(sink))
}

fn content<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<(), RequestError> {
    match scanner.kind()? {
        JsonKind::Array | JsonKind::Object if scanner.depth() >= WALK_DEPTH => raw(scanner, sink)?,
        JsonKind::String => sink.text(scanner.text()?),
        JsonKind::Array => {
            let mut first = true;
            scanner.array(|scanner| {
                // The engine joins the parts with line breaks, each of which separates tokens.
                if !std::mem::take(&mut first) {
                    sink.json(b"\n");
                }
                content(scanner, sink)
            })?;
        }
        JsonKind::Object => part(scanner, sink)?,
        JsonKind::Number | JsonKind::Bool | JsonKind::Null => drop(scanner.skip()?),
    }
    Ok(())
}

/// Takes a message, an item or a part; keys have the same meaning in all of them.
fn part<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<(), RequestError> {
    let (mut media, mut is_tensor, mut data) = (false, false, &b""[..]);
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"type" if scanner.kind()? == JsonKind::String => {
                let kind = scanner.text()?.raw;
                is_tensor = kind == b"prompt_embeds";
                if kind.len() > SHORT {
                    sink.json(kind);
                }
            }
            b"data" if scanner.kind()? == JsonKind::String => data = scanner.text()?.raw,
            b"content" | b"text" | b"input_text" | b"output" | b"arguments" | b"refusal" | b"thinking"
            | b"reasoning" | b"reasoning_content" | b"summary" => content(scanner, sink)?,
            // A signature only proves where a thinking text comes from, and chat templates do not
            // render signatures.
            b"signature" | b"encrypted_content" => drop(scanner.skip()?),
            b"tool_calls" | b"function_call" | b"input" => raw(scanner, sink)?,
            b"image_url" | b"input_audio" | b"audio_url" | b"video_url" | b"image_embeds" | b"audio_embeds"
            | b"image_pil" | b"input_image" | b"file" | b"file_data" | b"source" => {
                media |= scanner.kind()? != JsonKind::Null;
                scanner.skip()?;
            }
            // A template may render any other member: a name, extra members of a part.
            _ => drop(long(scanner, sink)?),
        }
        Ok::<_, RequestError>(())
    })?;
    if media {
        sink.media();
    }
    if is_tensor {
        sink.embeddings(embedded_tokens(data.len() as u64));
    } else if data.len() > SHORT {
        sink.json(data);
    }
    Ok(())
}

fn tensors<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<u32, RequestError> {
    let mut lengths = Lengths::default();
    let mut tensor = |scanner: &mut Scanner<'_>| {
        let start = scanner.position();
        sink.embeddings(embedded_tokens(scanner.skip_raw()?.len() as u64));
        lengths.add(start, scanner);
        Ok::<_, RequestError>(())
    };
    match scanner.kind()? {
        JsonKind::Array => drop(scanner.array(tensor)?),
        _ => tensor(scanner)?,
    }
    Ok(lengths.end(sink))
}

/// The most tokens in a tensor of this many bytes in base64.
fn embedded_tokens(base64: u64) -> u64 {
    (base64 / 4 * 3).div_ceil(EMBEDDING_BYTES)
}

fn raw<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<(), RequestError> {
    if scanner.kind()? == JsonKind::Null {
        scanner.skip()?;
        return Ok(());
    }
    let json = scanner.skip_raw()?;
    sink.json(json);
    Ok(())
}

/// Takes one prompt or several; returns their number.
///
/// An id may also be written as pydantic accepts it: `1.0`, `1e3`, `true`.
fn prompt_list<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<u32, RequestError> {
    if scanner.kind()? != JsonKind::Array {
        content(scanner, sink)?;
        return Ok(1);
    }
    if let Some(count) = scanner.integers()? {
        sink.token_ids(count);
        return Ok(1);
    }
    let (mut lengths, mut ids) = (Lengths::default(), 0);
    scanner.array(|scanner| {
        let kind = scanner.kind()?;
        let start = scanner.position();
        match kind {
            JsonKind::Number | JsonKind::Bool => {
                scanner.skip()?;
                ids += 1;
                return Ok(());
            }
            JsonKind::Array if scanner.depth() >= WALK_DEPTH => raw(scanner, sink)?,
            JsonKind::Array => drop(prompt_list(scanner, sink)?),
            _ => content(scanner, sink)?,
        }
        lengths.add(start, scanner);
        Ok::<_, RequestError>(())
    })?;
    sink.token_ids(ids);
    Ok(lengths.end(sink))
}
