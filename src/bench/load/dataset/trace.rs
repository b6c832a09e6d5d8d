//! Published traces: arrival times and lengths of real requests.
//!
//! - BurstGPT (CC BY 4.0): each `Model` is a class. Rows with 0 response tokens were failures and
//!   are left out. Session columns, which only newer files have, are not used.
//! - Azure LLM inference traces (CC BY 4.0): times are wall clock with seven decimals.
//! - Mooncake and similar traces: JSON lines that may name the blocks of a prompt.

use csv::StringRecord;
use serde_json::Value;

use super::error::{DatasetError, bad_row};
use super::item::{Item, ItemPrompt, Items, MAX_ITEMS};
use super::jsonl::{keys, objects};
use super::options::TraceKeys;

struct Columns<'a> {
    file: &'a str,
    names: StringRecord,
}

struct CsvRow {
    fields: StringRecord,
    line: usize,
}

fn open_csv<'a>(text: &'a str, file: &'a str) -> Result<(Columns<'a>, csv::Reader<&'a [u8]>), DatasetError> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).flexible(true).from_reader(text.as_bytes());
    let names = reader.headers().map_err(|error| bad_row(file, 1, format!("not CSV: {error}")))?.clone();
    if names.is_empty() {
        return Err(DatasetError::Empty { file: file.to_owned(), why: ": it is empty".into() });
    }
    Ok((Columns { file, names }, reader))
}

impl Columns<'_> {
    fn find(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|found| found.eq_ignore_ascii_case(name))
    }

    fn require(&self, name: &str, hint: &str) -> Result<usize, DatasetError> {
        self.find(name).ok_or_else(|| DatasetError::Column {
            file: self.file.to_owned(),
            missing: name.to_owned(),
            found: self.names.iter().collect::<Vec<_>>().join(", "),
            hint: hint.to_owned(),
        })
    }

    fn rows(&self, reader: csv::Reader<&[u8]>) -> impl Iterator<Item = Result<CsvRow, DatasetError>> {
        reader.into_records().take(MAX_ITEMS).map(|record| {
            let fields = record.map_err(|error| bad_row(self.file, 0, format!("not CSV: {error}")))?;
            let line = fields.position().map_or(0, csv::Position::line) as usize;
            Ok(CsvRow { fields, line })
        })
    }

    fn number(&self, row: &CsvRow, column: usize) -> Result<f64, DatasetError> {
        let text = row.fields.get(column).unwrap_or_default();
        let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
        let why = || format!("'{text}' in column '{}' is not a number", &self.names[column]);
        number.ok_or_else(|| bad_row(self.file, row.line, why()))
    }
}

fn synthetic_item(at: f64, class: u32, input: f64, output: f64) -> Item {
    let tokens = (input as u32).max(1);
    let prompt = ItemPrompt::Made { tokens, blocks: [].into(), block: 1 };
    Item { at: Some(at), class, adapter: None, output: (output as u32).max(1), prompt }
}

pub(super) fn burstgpt(text: &str, file: &str) -> Result<Items, DatasetError> {
    let (columns, reader) = open_csv(text, file)?;
    let hint = "a BurstGPT file has Timestamp, Model, Request tokens, Response tokens and more";
    let timestamp = columns.require("Timestamp", hint)?;
    let [input, output] = [columns.require("Request tokens", hint)?, columns.require("Response tokens", hint)?];
    let model = columns.find("Model");
    let (mut items, mut failed) = (Items::default(), 0);
    for row in columns.rows(reader) {
        let row = row?;
        let tokens = columns.number(&row, output)?;
        let at = columns.number(&row, timestamp)?;
        let input = columns.number(&row, input)?;
        if tokens <= 0.0 {
            failed += 1;
            continue;
        }
        let class = items.class(model.and_then(|model| row.fields.get(model)).unwrap_or("all"));
        items.list.push(synthetic_item(at, class, input, tokens));
    }
    if failed > 0 {
        items.notes.push(format!("{failed} rows without a response are left out"));
    }
    Ok(items)
}

pub(super) fn azure(text: &str, file: &str) -> Result<Items, DatasetError> {
    let (columns, reader) = open_csv(text, file)?;
    let hint = "an Azure trace has TIMESTAMP, ContextTokens and GeneratedTokens";
    let timestamp = columns.require("TIMESTAMP", hint)?;
    let [input, output] = [columns.require("ContextTokens", hint)?, columns.require("GeneratedTokens", hint)?];
    let mut items = Items::default();
    for next in columns.rows(reader) {
        let next = next?;
        let written = next.fields.get(timestamp).unwrap_or_default();
        let why = || format!("'{written}' is not a time like 2023-11-16 18:15:46.6805900");
        let at = wall_clock(written).ok_or_else(|| bad_row(file, next.line, why()))?;
        let input = columns.number(&next, input)?;
        let output = columns.number(&next, output)?;
        let class = items.class("all");
        items.list.push(synthetic_item(at, class, input, output));
    }
    Ok(items)
}

/// Seconds since 1970 of a time like `2023-11-16 18:15:46.6805900`. A time zone is ignored, because
/// only differences matter.
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
    for object in objects(text, file) {
        let (line, entry) = object?;
        let number = |key: &str| {
            let value = entry.get(key).ok_or_else(|| DatasetError::Column {
                file: file.to_owned(),
                missing: key.to_owned(),
                found: format!("{}, line {line}", keys(Some(&entry))),
                hint: "name the keys with --timed-trace-label-timestamp, -input-length, -output-length, -hash-ids"
                    .into(),
            })?;
            let number = value.as_f64().filter(|number| *number >= 0.0);
            number.ok_or_else(|| bad_row(file, line, format!("`{key}` is not a number of 0 or more")))
        };
        let at = number(&labels.timestamp)? / labels.per_second;
        let (input, output) = (number(&labels.input)?, number(&labels.output)?);
        let class = items.class(entry.get("type").and_then(Value::as_str).unwrap_or("all"));
        let mut item = synthetic_item(at, class, input, output);
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

fn hashed(name: &Value) -> u64 {
    twox_hash::XxHash3_64::oneshot(name.to_string().as_bytes())
}
