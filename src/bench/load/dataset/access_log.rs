//! The gateway's access log as a workload, to replay recorded traffic.
//!
//! A line says when a request ended and how long it took, so it arrived at `time - total_ms`. Prompt tokens are those of the
//! engine's usage, otherwise the gateway's estimate. Shed and failed requests are replayed too: their output length is the
//! median of the known ones. Requests that do not generate text are left out. A model other than the configured one
//! becomes an adapter, since adapters are sent as `"model"`.
//!
//! The log holds no prompts, so prompts of the recorded lengths are generated. Shared prefixes are lost.

use serde_json::Value;

use super::error::{DatasetError, bad_row};
use super::item::{Item, ItemPrompt, Items};
use super::jsonl::{keys, objects};
use super::options::ReadOptions;

/// Routes that generate text, as named in the log.
const GENERATING: [&str; 4] = ["chat_completions", "completions", "responses", "messages"];

pub(super) fn access_log(text: &str, file: &str, options: &ReadOptions<'_>) -> Result<Items, DatasetError> {
    let mut items = Items::default();
    let mut outputs = Vec::new();
    let (mut other, mut unknown) = (0, 0);
    let mut waiting = Vec::new();
    for (line, entry) in objects(text, file)? {
        let missing = |key: &str| DatasetError::Column {
            file: file.to_owned(),
            missing: key.to_owned(),
            found: format!("{}, line {line}", keys(Some(&entry))),
            hint: "give the gateway's access log ([access_log] in its configuration)".into(),
        };
        let time = entry.get("time").and_then(Value::as_str).ok_or_else(|| missing("time"))?;
        let time: jiff::Timestamp =
            time.parse().map_err(|_| bad_row(file, line, format!("`time` '{time}' is not a time (RFC 3339)")))?;
        let total = entry.get("total_ms").and_then(Value::as_f64).ok_or_else(|| missing("total_ms"))?;
        let route = entry.get("route").and_then(Value::as_str).unwrap_or("");
        if !GENERATING.contains(&route) {
            other += 1;
            continue;
        }
        let count = |key: &str| entry.get(key).and_then(Value::as_u64).filter(|count| *count > 0);
        let Some(tokens) = count("prompt_tokens").or_else(|| count("estimate_tokens")) else {
            unknown += 1;
            continue;
        };
        let output = count("completion_tokens");
        outputs.extend(output);
        let at = time.as_microsecond() as f64 / 1e6 - total / 1e3;
        let class = items.class(entry.get("home").or(entry.get("pool")).and_then(Value::as_str).unwrap_or("all"));
        let adapter = items.adapter(entry.get("model").and_then(Value::as_str), options.model);
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let prompt = ItemPrompt::Made { tokens, blocks: [].into(), block: 1 };
        if output.is_none() {
            waiting.push(items.list.len());
        }
        let output = u32::try_from(output.unwrap_or(1)).unwrap_or(u32::MAX);
        items.list.push(Item { at: Some(at), class, adapter, output, prompt });
    }
    outputs.sort_unstable();
    let median = outputs.get(outputs.len() / 2).copied().unwrap_or(1);
    waiting.iter().for_each(|&index| items.list[index].output = u32::try_from(median).unwrap_or(u32::MAX));
    items.note(other, "requests that generate no text are left out");
    items.note(unknown, "requests of unknown length are left out");
    items.note(waiting.len(), &format!("requests had no response; their output length is the median, {median} tokens"));
    Ok(items)
}
