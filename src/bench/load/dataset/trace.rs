//! Published traces: moments and lengths of requests that somebody really had.
//!
//! BurstGPT (CC BY 4.0): rows without an answer (0 response tokens) were failures and are left out; each `Model` is a class.
//! Older files lack the columns of sessions, which are not needed. Azure LLM inference traces (CC BY 4.0): wall clock with
//! seven digits. Mooncake and others like it: JSON lines with names of the prompt's blocks.
//!
//! CSV is read as these files are written: a header, commas, quotes around a field where it holds a comma.

use serde_json::Value;

use super::error::{DatasetError, row};
use super::item::{Item, ItemPrompt, Items, MAX_ITEMS};
use super::jsonl::{keys, lines, objects};
use super::options::TraceKeys;

/// A header and where its columns are.
struct Columns<'a> {
    file: &'a str,
    names: Vec<String>,
}

impl<'a> Columns<'a> {
    fn of(text: &str, file: &'a str) -> Result<Self, DatasetError> {
        let Some((_, header)) = lines(text).next() else {
            return Err(DatasetError::Empty { file: file.to_owned(), why: ": it is empty".into() });
        };
        Ok(Self { file, names: fields(header) })
    }

    fn find(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|found| found.eq_ignore_ascii_case(name))
    }

    fn need(&self, name: &str, hint: &str) -> Result<usize, DatasetError> {
        self.find(name).ok_or_else(|| DatasetError::Column {
            file: self.file.to_owned(),
            missing: name.to_owned(),
            found: self.names.join(", "),
            hint: hint.to_owned(),
        })
    }

    fn number(&self, row_fields: &[String], column: usize, line: usize) -> Result<f64, DatasetError> {
        let text = row_fields.get(column).map_or("", String::as_str);
        let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
        number
            .ok_or_else(|| row(self.file, line, format!("'{text}' in column '{}' is not a number", self.names[column])))
    }
}

/// The fields of a line of CSV.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            c => fields.last_mut().expect("there is always a last field").push(c),
        }
    }
    fields.iter_mut().for_each(|field| *field = field.trim().to_owned());
    fields
}

fn made(at: f64, class: u32, input: f64, output: f64) -> Item {
    let tokens = (input as u32).max(1);
    let prompt = ItemPrompt::Made { tokens, blocks: [].into(), block: 1 };
    Item { at: Some(at), class, adapter: None, output: (output as u32).max(1), prompt }
}

pub(super) fn burstgpt(text: &str, file: &str) -> Result<Items, DatasetError> {
    let columns = Columns::of(text, file)?;
    let hint = "a BurstGPT file has Timestamp, Model, Request tokens, Response tokens and more";
    let timestamp = columns.need("Timestamp", hint)?;
    let [input, output] = [columns.need("Request tokens", hint)?, columns.need("Response tokens", hint)?];
    let model = columns.find("Model");
    let (mut items, mut failed) = (Items::default(), 0);
    for (line, text) in lines(text).skip(1).take(MAX_ITEMS) {
        let fields = fields(text);
        let tokens = columns.number(&fields, output, line)?;
        let at = columns.number(&fields, timestamp, line)?;
        let input = columns.number(&fields, input, line)?;
        if tokens <= 0.0 {
            failed += 1;
            continue;
        }
        let class = items.class(model.and_then(|model| fields.get(model)).map_or("all", String::as_str));
        items.list.push(made(at, class, input, tokens));
    }
    if failed > 0 {
        items.notes.push(format!("{failed} rows without an answer are left out"));
    }
    Ok(items)
}

pub(super) fn azure(text: &str, file: &str) -> Result<Items, DatasetError> {
    let columns = Columns::of(text, file)?;
    let hint = "an Azure trace has TIMESTAMP, ContextTokens and GeneratedTokens";
    let timestamp = columns.need("TIMESTAMP", hint)?;
    let [input, output] = [columns.need("ContextTokens", hint)?, columns.need("GeneratedTokens", hint)?];
    let mut items = Items::default();
    for (line, text) in lines(text).skip(1).take(MAX_ITEMS) {
        let fields = fields(text);
        let written = fields.get(timestamp).map_or("", String::as_str);
        let at = wall_clock(written)
            .ok_or_else(|| row(file, line, format!("'{written}' is not a moment like 2023-11-16 18:15:46.6805900")))?;
        let input = columns.number(&fields, input, line)?;
        let output = columns.number(&fields, output, line)?;
        let class = items.class("all");
        items.list.push(made(at, class, input, output));
    }
    Ok(items)
}

/// Seconds since 1970 of `2023-11-16 18:15:46.6805900`, with or without an offset at its end, which is ignored: it is the
/// same in all rows, and only differences matter.
fn wall_clock(text: &str) -> Option<f64> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let date: jiff::civil::Date = date.parse().ok()?;
    let time = time.split(['+', 'Z', '-']).next()?;
    let mut seconds = 0.0;
    let mut parts = time.split(':');
    for unit in [3600.0, 60.0, 1.0] {
        let part: f64 = parts.next()?.parse().ok()?;
        seconds += part * unit;
    }
    let days = date.since(jiff::civil::date(1970, 1, 1)).ok()?.get_days();
    Some(f64::from(days) * 86_400.0 + seconds)
}

pub(super) fn timed(text: &str, file: &str, labels: &TraceKeys) -> Result<Items, DatasetError> {
    let mut items = Items::default();
    for (line, entry) in objects(text, file)? {
        let number = |key: &str| {
            let value = entry.get(key).ok_or_else(|| DatasetError::Column {
                file: file.to_owned(),
                missing: key.to_owned(),
                found: format!("{}, line {line}", keys(Some(&entry))),
                hint: "name the keys with --timed-trace-label-timestamp, -input-length, -output-length, -hash-ids"
                    .into(),
            })?;
            let number = value.as_f64().filter(|number| *number >= 0.0);
            number.ok_or_else(|| row(file, line, format!("`{key}` is not a number of 0 or more")))
        };
        let at = number(&labels.timestamp)? / labels.per_second;
        let (input, output) = (number(&labels.input)?, number(&labels.output)?);
        let class = items.class(entry.get("type").and_then(Value::as_str).unwrap_or("all"));
        let mut item = made(at, class, input, output);
        if let Some(names) = entry.get(&labels.hashes).and_then(Value::as_array) {
            let names = names.iter().map(|name| name.as_u64().unwrap_or_else(|| hashed(name)));
            if let ItemPrompt::Made { blocks, block, .. } = &mut item.prompt {
                (*blocks, *block) = (names.collect(), labels.block);
            }
        }
        items.list.push(item);
    }
    Ok(items)
}

/// A name that is not a number.
fn hashed(name: &Value) -> u64 {
    xxhash_rust::xxh3::xxh3_64(name.to_string().as_bytes())
}
