//! Finds the prompt in a body: which fields of which route become prompt tokens.
//!
//! Every route has its own form of prompt (a string, a list, messages with parts, a query and its
//! documents, token ids), and estimates and exact counts must agree on what belongs to it. So the walk
//! is written once and reports to a [`PromptSink`].
//!
//! Text is what the model reads: strings, text parts, tool definitions and tool calls. Media are not text, because their
//! base64 would look like a hundred thousand tokens; they are reported as parts. The walk is lenient inside messages (a
//! part of unknown type is searched for text), because the engine validates them. Only a value that can never be a prompt
//! is refused.
//!
//! A prompt field that is given twice is reported twice, so an estimate may be too high, never too low.

use super::request_error::RequestError;
use super::route::Route;
use super::scan::{JsonKind, Scanner};
use super::shape::PromptSink;

/// Reads the value of member `key` if it belongs to the prompt of `route`. Returns whether it does; if not, nothing is
/// consumed. `prompts` is set to the number of prompts in a field that holds a list of them.
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
        Field::Messages | Field::Ids => kind == JsonKind::Array,
        Field::Content | Field::Raw => true,
        Field::Prompts => !matches!(kind, JsonKind::Number | JsonKind::Bool),
    };
    if !fits {
        let expected = if field == Field::Prompts { "a string or a list" } else { "a list" };
        return Err(RequestError::WrongType { param: name, expected, got: kind.name() });
    }
    match field {
        Field::Messages => messages(scanner, sink)?,
        Field::Content => content(scanner, sink)?,
        Field::Raw => raw(scanner, sink)?,
        Field::Ids | Field::Prompts => *prompts = prompt_list(scanner, sink)?,
    }
    Ok(true)
}

/// How a field holds prompt text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    /// A conversation.
    Messages,
    /// A string or parts.
    Content,
    /// One prompt or a list of prompts, each text or token ids.
    Prompts,
    /// A list of token ids.
    Ids,
    /// JSON that a template renders.
    Raw,
}

fn field(route: Route, key: &[u8]) -> Option<(&'static str, Field)> {
    use Field::{Content, Ids, Messages, Prompts, Raw};
    let found = match key {
        b"messages" => ("messages", Messages),
        b"prompt" => ("prompt", Prompts),
        b"input" => ("input", if route == Route::Responses { Content } else { Prompts }),
        b"system" => ("system", Content),
        b"instructions" => ("instructions", Content),
        b"query" => ("query", Content),
        b"queries" => ("queries", Prompts),
        b"documents" => ("documents", if route == Route::ChatCompletions { Raw } else { Prompts }),
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
        Route::Completions => &["prompt"],
        Route::Embeddings | Route::Pooling | Route::Classify => &["input", "messages"],
        Route::Responses => &["input", "instructions", "tools"],
        Route::Messages => &["messages", "system", "tools"],
        Route::Tokenize => &["prompt", "messages", "tools"],
        Route::Detokenize => &["tokens"],
        Route::Rerank => &["query", "documents"],
        Route::Score => &["text_1", "text_2", "queries", "documents", "items", "data_1", "data_2", "query"],
        Route::Transcriptions | Route::Translations => &[],
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

/// A string, a part, or a list of parts.
fn content<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<(), RequestError> {
    match scanner.kind()? {
        JsonKind::String => sink.text(scanner.text()?),
        JsonKind::Array => drop(scanner.array(|scanner| content(scanner, sink))?),
        JsonKind::Object => part(scanner, sink)?,
        JsonKind::Number | JsonKind::Bool | JsonKind::Null => drop(scanner.skip()?),
    }
    Ok(())
}

/// A message, an item or a part; the keys have the same meaning in all of them.
fn part<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<(), RequestError> {
    let mut media = false;
    scanner.object(|scanner, key| {
        match &*key.bytes() {
            b"content" | b"text" | b"input_text" | b"output" | b"arguments" | b"refusal" | b"thinking"
            | b"reasoning" | b"reasoning_content" | b"summary" => content(scanner, sink)?,
            b"tool_calls" | b"function_call" | b"input" => raw(scanner, sink)?,
            b"image_url" | b"input_audio" | b"audio_url" | b"video_url" | b"image_embeds" | b"audio_embeds"
            | b"image_pil" | b"input_image" | b"file" | b"file_data" | b"source" => {
                media |= scanner.kind()? != JsonKind::Null;
                scanner.skip()?;
            }
            _ => drop(scanner.skip()?),
        }
        Ok::<_, RequestError>(())
    })?;
    if media {
        sink.media();
    }
    Ok(())
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

/// One prompt or several; returns how many.
fn prompt_list<S: PromptSink>(scanner: &mut Scanner<'_>, sink: &mut S) -> Result<u32, RequestError> {
    if scanner.kind()? != JsonKind::Array {
        content(scanner, sink)?;
        return Ok(1);
    }
    if let Some(count) = scanner.integers()? {
        sink.token_ids(count);
        return Ok(1);
    }
    let mut prompts = 0u32;
    scanner.array(|scanner| {
        prompts = prompts.saturating_add(1);
        match scanner.integers()? {
            Some(count) => sink.token_ids(count),
            None => content(scanner, sink)?,
        }
        Ok::<_, RequestError>(())
    })?;
    Ok(prompts.max(1))
}
