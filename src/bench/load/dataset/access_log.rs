//! The gateway's access log as a workload, to replay recorded traffic.
//!
//! A line has the time at which a request ended, so the request arrived at `time - total_ms`.
//! Prompt tokens are the engine's count, otherwise the gateway's estimate. Failed requests are
//! replayed, too, with the median of the known output lengths. Requests that generate no text are
//! left out. So are copies for shadow arms, because the gateway makes new copies in a replay.
//! Models other than the run's model become adapters.
//!
//! The log holds no prompts, so prompts of the recorded lengths are generated.
//!
//! The gateway's records ([records]) add hashes of the beginnings of prompts, so that requests
//! share prefixes as they did. There is a hash every [`STEP`] bytes (less often in long prompts).
//! The file's average ratio of tokens to bytes converts the bytes.

use serde_json::Value;

use super::error::{DatasetError, bad_row};
use super::item::{Item, ItemPrompt, Items};
use super::jsonl::{keys, objects};
use super::options::ReadOptions;
use sluice_core::base::hash_two;
use sluice_core::openai::Route;
use sluice_core::openai::prefix::{RECORD_VERSION, STEP, ends};

#[derive(Default)]
struct Seen {
    outputs: Vec<u64>,
    waiting: Vec<usize>,
    /// Bytes and tokens of all prompts with hashes.
    hashed: (u64, u64),
}

pub(super) fn access_log(text: &str, file: &str, options: &ReadOptions<'_>) -> Result<Items, DatasetError> {
    let mut items = Items::default();
    let mut seen = Seen::default();
    let (mut copies, mut other, mut unknown) = (0, 0, 0);
    let (text, torn) = whole_lines(text);
    for object in objects(text, file) {
        let (line, entry) = object?;
        let at = arrival(&entry, file, line)?;
        let route = entry.get("route").and_then(Value::as_str).and_then(Route::from_label);
        if entry.get("copy").is_some() {
            copies += 1;
        } else if !route.is_some_and(Route::generates) {
            other += 1;
        } else if !add(&mut items, &mut seen, &entry, at, options) {
            unknown += 1;
        }
    }
    let Seen { mut outputs, waiting, hashed: (bytes, tokens) } = seen;
    outputs.sort_unstable();
    let median = outputs.get(outputs.len() / 2).copied().unwrap_or(1);
    waiting.iter().for_each(|&index| items.list[index].output = u32::try_from(median).unwrap_or(u32::MAX));
    if bytes > 0 {
        let block = (STEP as f64 * tokens as f64 / bytes as f64).round().max(1.0);
        items.list.iter_mut().for_each(|item| item.prompt.set_block(block as u32));
    }
    items.note(usize::from(torn), "line was cut off at the end of the file and is left out");
    items.note(copies, "copies for shadow arms are left out");
    items.note(other, "requests that generate no text are left out");
    items.note(unknown, "requests of unknown length are left out");
    items.note(waiting.len(), &format!("requests had no response; their output length is the median, {median} tokens"));
    Ok(items)
}

/// Drops an incomplete last line. Returns whether there was one.
fn whole_lines(text: &str) -> (&str, bool) {
    let begin = text.rfind('\n').map_or(0, |end| end + 1);
    let is_torn = begin > 0 && begin < text.len() && serde_json::from_str::<Value>(&text[begin..]).is_err();
    (if is_torn { &text[..begin] } else { text }, is_torn)
}

fn arrival(entry: &Value, file: &str, line: usize) -> Result<f64, DatasetError> {
    let missing = |key: &str| DatasetError::Column {
        file: file.to_owned(),
        missing: key.to_owned(),
        found: format!("{}, line {line}", keys(Some(entry))),
        hint: "give the gateway's records or access log ([records] or [access_log] in its configuration)".into(),
    };
    if let Some(version) = entry.get("version").filter(|version| **version != RECORD_VERSION) {
        let why = format!(
            "a record of version {version}, and this sluice reads {RECORD_VERSION}; use the sluice that wrote it"
        );
        return Err(bad_row(file, line, why));
    }
    let time = entry.get("time").and_then(Value::as_str).ok_or_else(|| missing("time"))?;
    let time: jiff::Timestamp =
        time.parse().map_err(|_| bad_row(file, line, format!("`time` '{time}' is not a time (RFC 3339)")))?;
    let total = entry.get("total_ms").and_then(Value::as_f64).ok_or_else(|| missing("total_ms"))?;
    Ok(time.as_microsecond() as f64 / 1e6 - total / 1e3)
}

/// Adds a request; `false`: the length is unknown.
fn add(items: &mut Items, seen: &mut Seen, entry: &Value, at: f64, options: &ReadOptions<'_>) -> bool {
    let count = |key: &str| entry.get(key).and_then(Value::as_u64).filter(|count| *count > 0);
    let Some(tokens) = count("prompt_tokens").or_else(|| count("estimate_tokens")) else { return false };
    let output = count("completion_tokens");
    // Records of earlier versions have no class, so the home pool is used.
    let class = ["class", "home", "pool"].into_iter().find_map(|key| entry.get(key)?.as_str());
    let class = items.class(class.unwrap_or("all"));
    let adapter = items.adapter(entry.get("model").and_then(Value::as_str), options.model);
    let blocks = blocks(entry.get("prefix").and_then(Value::as_array).map_or(&[], Vec::as_slice));
    if let Some(bytes) = count("prompt_bytes").filter(|_| !blocks.is_empty()) {
        seen.hashed = (seen.hashed.0 + bytes, seen.hashed.1 + tokens);
    }
    match output {
        Some(output) => seen.outputs.push(output),
        None => seen.waiting.push(items.list.len()),
    }
    let prompt =
        ItemPrompt::Made { tokens: u32::try_from(tokens).unwrap_or(u32::MAX), blocks: blocks.into(), block: 1 };
    let output = u32::try_from(output.unwrap_or(1)).unwrap_or(u32::MAX);
    items.list.push(Item { at: Some(at), class, adapter, output, prompt });
    true
}

/// Names of the blocks of [`STEP`] bytes at the beginning of a prompt. Two prompts have the same
/// names up to the end of the longest beginning that they have in common.
fn blocks(hashes: &[Value]) -> Vec<u64> {
    let mut names = Vec::new();
    let hashes = hashes.iter().map_while(|hash| u64::from_str_radix(hash.as_str()?, 16).ok());
    for (end, hash) in ends().zip(hashes) {
        while (names.len() + 1) * STEP <= end {
            names.push(hash_two(hash, names.len() as u64));
        }
    }
    names
}
