//! Requests read from files: conversations, published traces, and the gateway's own access log.
//!
//! | name | file | gives |
//! |---|---|---|
//! | `sharegpt` | JSON array (or lines) of `conversations` | text of turn 1, length of turn 2 |
//! | `custom` | JSON lines with `prompt`, `output_tokens` | text |
//! | `burstgpt` | CSV `Timestamp`, `Model`, `Request tokens`, `Response tokens` | lengths, times |
//! | `azure` | CSV `TIMESTAMP,ContextTokens,GeneratedTokens` | lengths, times |
//! | `mooncake` | JSON lines, times in ms, blocks of 512 tokens | lengths, times, shared prefixes |
//! | `timed_trace` | the same with configurable units, blocks and keys | the same |
//! | `access_log` | the gateway's access log | lengths, times, adapters |
//! | `access_log` | the gateway's records | the same, and shared prefixes |
//!
//! Traces hold lengths, so prompts are generated; blocks with equal names get equal tokens. Times
//! are seconds from the first request. Bounds: [`MAX_FILE`], [`MAX_ITEMS`].

mod error;
mod item;
mod counter;
mod options;
mod jsonl;
mod access_log;
mod prompts;
mod trace;

use std::path::Path;

use crate::seed::{Purpose, rng_for};

pub use counter::{BYTES_PER_TOKEN, TokenCounter};
pub use error::{DatasetError, MAX_FILE};
pub use item::{Item, ItemPrompt, Items, MAX_ITEMS};
pub use options::{DatasetFormat, ReadOptions, TraceKeys};

/// Reads the file at `path`.
pub fn load(path: &Path, format: &DatasetFormat, options: &ReadOptions<'_>) -> Result<Items, DatasetError> {
    let file = path.display().to_string();
    let io = |error| DatasetError::Io(file.clone(), error);
    if std::fs::metadata(path).map_err(io)?.len() > MAX_FILE {
        return Err(DatasetError::TooLarge(file));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    if bytes.starts_with(&[0x1f, 0x8b]) {
        return Err(io(std::io::Error::other("it is compressed; unpack it first (gunzip)")));
    }
    parse(&String::from_utf8_lossy(&bytes), &file, format, options)
}

/// Reads `text`, the content of `file`.
pub fn parse(text: &str, file: &str, format: &DatasetFormat, options: &ReadOptions<'_>) -> Result<Items, DatasetError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut items = match format {
        DatasetFormat::ShareGpt => prompts::sharegpt(text, file, options)?,
        DatasetFormat::Custom => prompts::custom(text, file, options)?,
        DatasetFormat::BurstGpt => trace::burstgpt(text, file)?,
        DatasetFormat::Azure => trace::azure(text, file)?,
        DatasetFormat::Timed(keys) => trace::timed(text, file, keys)?,
        DatasetFormat::AccessLog => access_log::access_log(text, file, options)?,
    };
    if items.list.is_empty() {
        let why = items.notes.first().map_or(String::new(), |note| format!(": {note}"));
        return Err(DatasetError::Empty { file: file.to_owned(), why });
    }
    items.begin_at_zero();
    if items.list[0].at.is_none()
        && let Some(seed) = options.shuffle
    {
        shuffle(&mut items.list, seed);
    }
    let limit = if options.limit == 0 { MAX_ITEMS } else { options.limit.min(MAX_ITEMS) };
    items.list.truncate(limit);
    if let Some(output) = options.output {
        items.list.iter_mut().for_each(|item| item.output = output.max(1));
    }
    Ok(items)
}

fn shuffle(list: &mut [Item], seed: u64) {
    let mut rng = rng_for(seed, Purpose::Shuffle, 0);
    for last in (1..list.len()).rev() {
        list.swap(last, rng.below(last + 1));
    }
}

#[cfg(test)]
mod tests;
