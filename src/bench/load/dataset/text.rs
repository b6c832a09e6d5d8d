//! Datasets that hold the prompts themselves: conversations of ShareGPT, and prompts of one's own.
//!
//! ShareGPT is read as `vllm bench serve` does: conversations of two turns or more, the first turn is the prompt, the length
//! of the second that of the answer; kept when prompt and answer have 4 tokens or more (the answer is not asked when its
//! length is given), the prompt 1024 or fewer and both together 2048 or fewer.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tokenizers::Tokenizer;

use super::{BYTES_PER_TOKEN, DatasetError, Item, ItemPrompt, Items, Reading, lines, row};

/// Fewest tokens of prompt and answer.
const MIN_TOKENS: u32 = 4;
/// Most tokens of a prompt.
const MAX_PROMPT: u32 = 1024;
/// Most tokens of both.
const MAX_BOTH: u32 = 2048;

/// Counts the tokens of a text.
#[derive(Debug, Default)]
pub enum Counter {
    /// By their bytes.
    #[default]
    Bytes,
    /// By a tokenizer, special tokens included as a server would add them.
    Exact(Box<Tokenizer>),
}

impl Counter {
    /// With the tokenizer at `path`: a `tokenizer.json`, or the folder that holds one.
    ///
    /// # Errors
    /// There is none that can be used.
    pub fn exact(path: &Path) -> Result<Self, DatasetError> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let bad = |error: tokenizers::Error| DatasetError::Tokenizer(file.display().to_string(), error.to_string());
        Ok(Self::Exact(Box::new(Tokenizer::from_file(&file).map_err(bad)?)))
    }

    /// Tokens of `text`; at least 1.
    pub fn count(&self, text: &str) -> u32 {
        let count = match self {
            Self::Bytes => text.len().div_ceil(BYTES_PER_TOKEN),
            Self::Exact(tokenizer) => tokenizer
                .encode_fast(text, true)
                .map_or_else(|_| text.len().div_ceil(BYTES_PER_TOKEN), |encoding| encoding.get_ids().len()),
        };
        u32::try_from(count).unwrap_or(u32::MAX).max(1)
    }

    /// Ids in the tokenizer's vocabulary without added tokens; nothing when there is no tokenizer.
    pub fn vocabulary(&self) -> Option<u32> {
        match self {
            Self::Bytes => None,
            Self::Exact(tokenizer) => u32::try_from(tokenizer.get_vocab_size(false)).ok(),
        }
    }

    fn note(&self, items: &mut Items) {
        if let Self::Bytes = self {
            items.notes.push(format!(
                "lengths of texts are estimated at {BYTES_PER_TOKEN} bytes a token; give --tokenizer for exact ones"
            ));
        }
    }
}

/// Reads conversations: one JSON array, or one object a line.
pub(super) fn sharegpt(text: &str, file: &str, reading: &Reading<'_>) -> Result<Items, DatasetError> {
    let entries: Vec<Value> = if text.trim_start().starts_with('[') {
        serde_json::from_str(text).map_err(|error| row(file, error.line(), format!("not JSON: {error}")))?
    } else {
        objects(text, file)?.into_iter().map(|(_, entry)| entry).collect()
    };
    let mut items = Items::default();
    items.class("all");
    let (mut none, mut short, mut unfit) = (0, 0, 0);
    for entry in &entries {
        let Some(turns) = entry.get("conversations").and_then(Value::as_array) else {
            none += 1;
            continue;
        };
        let said = |turn: usize| turns.get(turn).and_then(|turn| turn.get("value")).and_then(Value::as_str);
        let (Some(prompt), Some(answer)) = (said(0), said(1)) else {
            short += 1;
            continue;
        };
        let tokens = reading.counter.count(prompt);
        let output = reading.output.unwrap_or_else(|| reading.counter.count(answer));
        let fits = tokens >= MIN_TOKENS
            && (reading.output.is_some() || output >= MIN_TOKENS)
            && tokens <= MAX_PROMPT
            && tokens.saturating_add(output) <= MAX_BOTH;
        if !fits {
            unfit += 1;
            continue;
        }
        items.list.push(text_item(prompt, tokens, output));
    }
    if none == entries.len() && none > 0 {
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
            "{kept} of {} conversations are used ({short} have fewer than two turns, {unfit} are shorter than {MIN_TOKENS} \
             tokens, or longer than {MAX_PROMPT} in the prompt or {MAX_BOTH} in all)",
            entries.len()
        ));
    }
    reading.counter.note(&mut items);
    Ok(items)
}

/// Reads prompts: JSON lines with `prompt`, and `output_tokens` unless a length is given for all.
pub(super) fn custom(text: &str, file: &str, reading: &Reading<'_>) -> Result<Items, DatasetError> {
    let mut items = Items::default();
    items.class("all");
    for (line, entry) in objects(text, file)? {
        let missing = |missing: &str, hint: &str| DatasetError::Column {
            file: file.to_owned(),
            missing: missing.into(),
            found: format!("{}, line {line}", keys(Some(&entry))),
            hint: hint.into(),
        };
        let prompt = entry.get("prompt").ok_or_else(|| missing("prompt", "each line needs one"))?;
        let prompt = prompt.as_str().ok_or_else(|| row(file, line, "`prompt` is not a text"))?;
        let output = match reading.output {
            Some(output) => output,
            None => {
                let hint = "add it to each line, or give --custom-output-len";
                let output = entry.get("output_tokens").ok_or_else(|| missing("output_tokens", hint))?;
                let output = output.as_u64().filter(|output| *output > 0).and_then(|output| u32::try_from(output).ok());
                output.ok_or_else(|| row(file, line, "`output_tokens` is not a number above 0"))?
            }
        };
        items.list.push(text_item(prompt, reading.counter.count(prompt), output));
    }
    reading.counter.note(&mut items);
    Ok(items)
}

fn text_item(text: &str, tokens: u32, output: u32) -> Item {
    let prompt = ItemPrompt::Text { text: Arc::from(text), tokens };
    Item { at: None, class: 0, adapter: None, output, prompt }
}

/// One JSON object in each line.
pub(super) fn objects(text: &str, file: &str) -> Result<Vec<(usize, Value)>, DatasetError> {
    let mut objects = Vec::new();
    for (line, text) in lines(text) {
        let value: Value = serde_json::from_str(text).map_err(|error| row(file, line, format!("not JSON: {error}")))?;
        if !value.is_object() {
            return Err(row(file, line, "not a JSON object"));
        }
        objects.push((line, value));
    }
    Ok(objects)
}

/// The keys of an object, for a message.
pub(super) fn keys(value: Option<&Value>) -> String {
    match value.and_then(Value::as_object) {
        Some(map) => map.keys().cloned().collect::<Vec<_>>().join(", "),
        None => "no keys".into(),
    }
}
