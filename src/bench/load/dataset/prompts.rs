//! Datasets with prompts as text: ShareGPT conversations and custom prompts.
//!
//! ShareGPT is read as by `vllm bench serve`. The first turn of a conversation is the prompt, and
//! the second, which it must have, gives the output length. A conversation is kept if the prompt
//! has 4 to 1024 tokens, the output at least 4 (unless the user gives the length), and both
//! together at most 2048.

use std::sync::Arc;

use serde_json::Value;

use super::error::{DatasetError, bad_row};
use super::item::{Item, ItemPrompt, Items};
use super::jsonl::{keys, objects};
use super::options::ReadOptions;

const MIN_TOKENS: u32 = 4;
const MAX_PROMPT: u32 = 1024;
const MAX_BOTH: u32 = 2048;

/// Reads conversations: one JSON array, or one object a line.
pub(super) fn sharegpt(text: &str, file: &str, options: &ReadOptions<'_>) -> Result<Items, DatasetError> {
    let entries: Vec<Value> = if text.trim_start().starts_with('[') {
        serde_json::from_str(text).map_err(|error| bad_row(file, error.line(), format!("not JSON: {error}")))?
    } else {
        objects(text, file).map(|object| object.map(|(_, entry)| entry)).collect::<Result<_, _>>()?
    };
    let mut items = Items::default();
    items.class("all");
    let (mut no_list, mut too_few_turns, mut wrong_length) = (0, 0, 0);
    for entry in &entries {
        let Some(turns) = entry.get("conversations").and_then(Value::as_array) else {
            no_list += 1;
            continue;
        };
        let said = |turn: usize| turns.get(turn).and_then(|turn| turn.get("value")).and_then(Value::as_str);
        let (Some(prompt), Some(answer)) = (said(0), said(1)) else {
            too_few_turns += 1;
            continue;
        };
        let tokens = options.counter.count(prompt);
        let output = options.output.unwrap_or_else(|| options.counter.count(answer));
        let fits = tokens >= MIN_TOKENS
            && (options.output.is_some() || output >= MIN_TOKENS)
            && tokens <= MAX_PROMPT
            && tokens.saturating_add(output) <= MAX_BOTH;
        if !fits {
            wrong_length += 1;
            continue;
        }
        items.list.push(text_item(prompt, tokens, output));
    }
    if no_list == entries.len() && no_list > 0 {
        return Err(DatasetError::Column {
            file: file.to_owned(),
            missing: "conversations".into(),
            found: keys(entries.first()),
            hint: "a ShareGPT file is a JSON array of objects with a list `conversations` of `{\"from\", \"value\"}`"
                .into(),
        });
    }
    let kept = items.list.len();
    if kept < entries.len() {
        items.notes.insert(0, format!(
            "{kept} of {} conversations are used ({no_list} have no list `conversations`, {too_few_turns} have fewer \
             than two turns, {wrong_length} are shorter than {MIN_TOKENS} tokens, or longer than {MAX_PROMPT} in the \
             prompt or {MAX_BOTH} in all)",
            entries.len()
        ));
    }
    options.counter.note_estimate(&mut items);
    Ok(items)
}

pub(super) fn custom(text: &str, file: &str, options: &ReadOptions<'_>) -> Result<Items, DatasetError> {
    let mut items = Items::default();
    items.class("all");
    let mut unused = 0;
    for object in objects(text, file) {
        let (line, entry) = object?;
        let missing = |missing: &str, hint: &str| DatasetError::Column {
            file: file.to_owned(),
            missing: missing.into(),
            found: format!("{}, line {line}", keys(Some(&entry))),
            hint: hint.into(),
        };
        let prompt = entry.get("prompt").ok_or_else(|| missing("prompt", "each line needs one"))?;
        let prompt = prompt.as_str().ok_or_else(|| bad_row(file, line, "`prompt` is not a string"))?;
        let output = match options.output {
            Some(output) => {
                unused +=
                    usize::from(entry.get("output_tokens").is_some_and(|own| own.as_u64() != Some(output.into())));
                output
            }
            None => {
                let hint = "add it to each line, or give --custom-output-len";
                let output = entry.get("output_tokens").ok_or_else(|| missing("output_tokens", hint))?;
                // As Python's `int()` reads it: 12, 12.0 or "12".
                let number = output.as_f64().or_else(|| output.as_str()?.trim().parse().ok());
                let output =
                    number.filter(|output| (1.0..f64::from(u32::MAX)).contains(output)).map(|output| output as u32);
                output.ok_or_else(|| bad_row(file, line, "`output_tokens` is not a number above 0"))?
            }
        };
        items.list.push(text_item(prompt, options.counter.count(prompt), output));
    }
    if let (Some(output), true) = (options.output, unused > 0) {
        items.notes.push(format!(
            "`output_tokens` of the file is not used: {output} tokens are asked for in every line, as by `vllm bench serve` \
             (--custom-output-len -1 uses `output_tokens`)"
        ));
    }
    options.counter.note_estimate(&mut items);
    Ok(items)
}

fn text_item(text: &str, tokens: u32, output: u32) -> Item {
    let prompt = ItemPrompt::Text { text: Arc::from(text), tokens };
    Item { at: None, class: 0, adapter: None, output, prompt }
}
