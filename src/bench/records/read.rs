//! Reads records: lines of JSON that the gateway wrote.
//!
//! A line that is not a record is an error, because a report on half of a day would mislead. The
//! exception is a last line without a line feed, which the gateway is writing or a crash cut off.
//! Copies for shadow arms and requests that generate no text are left out and counted.
//!
//! Bounds: [`LINE_MAX`], [`ENTRIES_MAX`], [`NAMES_MAX`].

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{BufRead, Read as _, Write};
use std::sync::Arc;

use serde::Deserialize;

use super::{ENTRIES_MAX, Entry};
use sluice_core::openai::Route;
use sluice_core::openai::prefix::RECORD_VERSION;

/// The longest line in bytes; the gateway writes at most 3,000.
const LINE_MAX: u64 = 1 << 20;
/// The most different names of pools, backends, models and reasons.
const NAMES_MAX: usize = 100_000;

/// Why records cannot be read.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Debug, thiserror::Error)]
pub enum RecordsError {
    #[error("{file}, line {line}: {reason}; give files that the gateway wrote for [records], or its access log")]
    Line { file: String, line: u32, reason: String },
    #[error(
        "{file}, line {line}: a record of version {version}, and this sluice reads {RECORD_VERSION}; use the sluice that wrote it"
    )]
    Version { file: String, line: u32, version: u32 },
    #[error(
        "{file} is {this}, and the files before it are {others}: the same requests would count twice; give one kind"
    )]
    Mixed { file: String, this: &'static str, others: &'static str },
    #[error("more than {0} {1}; give fewer files")]
    TooMany(usize, &'static str),
    #[error("cannot read {0}: {1}")]
    Io(String, std::io::Error),
}

#[derive(Deserialize)]
struct Line<'a> {
    version: Option<u32>,
    #[serde(borrow)]
    time: Cow<'a, str>,
    total_ms: f64,
    #[serde(borrow)]
    outcome: Cow<'a, str>,
    #[serde(default, borrow)]
    route: Cow<'a, str>,
    #[serde(borrow)]
    home: Option<Cow<'a, str>>,
    #[serde(borrow)]
    class: Option<Cow<'a, str>>,
    #[serde(borrow)]
    pool: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    backend: Cow<'a, str>,
    #[serde(default, borrow)]
    model: Cow<'a, str>,
    copy: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    detail: Cow<'a, str>,
    #[serde(default)]
    retries: Vec<String>,
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    queue_ms: f64,
    ttft_ms: Option<f64>,
    backend_ttft_ms: Option<f64>,
    tpot_ms: Option<f64>,
    e2el_ms: Option<f64>,
    prompt_tokens: Option<u64>,
    estimate_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    token_events: Option<u64>,
    cached_tokens: Option<u64>,
    slo_met: Option<bool>,
}

/// The records of some files.
#[derive(Debug, Default)]
pub struct Day {
    /// The records; after [`Day::sort`] in the order of arrival.
    pub entries: Vec<Entry>,
    /// Notes on lines left out, for the report.
    pub notes: Vec<String>,
    copies: usize,
    other: usize,
    kind: Option<&'static str>,
    names: HashSet<Arc<str>>,
}

impl Day {
    /// Adds the records of the file called `file`.
    pub fn read(&mut self, file: &str, mut text: impl BufRead) -> Result<(), RecordsError> {
        let name = self.name(file)?;
        let mut line = Vec::new();
        for number in 1_u32.. {
            line.clear();
            let read = (&mut text).take(LINE_MAX).read_until(b'\n', &mut line);
            if read.map_err(|error| RecordsError::Io(file.to_owned(), error))? == 0 {
                break;
            }
            let is_whole = line.ends_with(b"\n");
            let bad = |reason: String| RecordsError::Line { file: file.to_owned(), line: number, reason };
            match serde_json::from_slice(&line) {
                Ok(line) => self.add(&line, &name, number)?,
                Err(_) if line.trim_ascii().is_empty() => {}
                Err(_) if !is_whole && number > 1 && line.starts_with(b"{") && (line.len() as u64) < LINE_MAX => {
                    self.notes.push(format!("The last line of {file} was cut off and is left out."));
                }
                Err(error) => return Err(bad(format!("not a record ({error})"))),
            }
        }
        Ok(())
    }

    /// Sorts the records by arrival and adds notes on lines left out.
    pub fn sort(&mut self) {
        self.entries.sort_by(|one, other| one.at.total_cmp(&other.at));
        let left_out = [(self.copies, "copies for shadow arms"), (self.other, "requests that generate no text")];
        let notes = left_out.iter().filter(|(count, _)| *count > 0);
        self.notes.extend(notes.map(|(count, what)| format!("{count} {what} are left out.")));
    }

    fn add(&mut self, line: &Line<'_>, file: &Arc<str>, number: u32) -> Result<(), RecordsError> {
        if let Some(version) = line.version.filter(|version| *version != RECORD_VERSION) {
            return Err(RecordsError::Version { file: file.to_string(), line: number, version });
        }
        let this = if line.version.is_some() { "records" } else { "an access log" };
        let others = *self.kind.get_or_insert(this);
        if this != others {
            return Err(RecordsError::Mixed { file: file.to_string(), this, others });
        }
        let bad = |reason: String| RecordsError::Line { file: file.to_string(), line: number, reason };
        let at = arrival(line).map_err(bad)?;
        if line.copy.is_some() {
            self.copies += 1;
        } else if !Route::from_label(&line.route).is_some_and(Route::generates) {
            self.other += 1;
        } else {
            let entry = self.entry(line, at, file, number)?;
            self.entries.push(entry);
        }
        if self.entries.len() > ENTRIES_MAX {
            return Err(RecordsError::TooMany(ENTRIES_MAX, "records"));
        }
        Ok(())
    }

    fn entry(&mut self, line: &Line<'_>, at: f64, file: &Arc<str>, number: u32) -> Result<Entry, RecordsError> {
        let home = line.home.as_deref().or(line.pool.as_deref());
        // Records of earlier versions have the home pool as the class.
        let class = line.class.as_deref().or(home).unwrap_or("(no class)");
        Ok(Entry {
            at,
            class: self.name(class)?,
            pool: self.name(line.pool.as_deref().or(home).unwrap_or("(no pool)"))?,
            backend: self.name(&line.backend)?,
            model: self.name(&line.model)?,
            outcome: self.name(&line.outcome)?,
            detail: self.name(&line.detail)?,
            retries: self.name(&line.retries.join(", "))?,
            file: Arc::clone(file),
            line: number,
            queue: line.queue_ms,
            ttft: line.ttft_ms.filter(|_| line.stream),
            engine: line.backend_ttft_ms.filter(|_| line.stream),
            tpot: line.tpot_ms,
            e2el: line.e2el_ms,
            prompt: line.prompt_tokens.or(line.estimate_tokens).unwrap_or(0),
            output: line.completion_tokens.or(line.token_events).unwrap_or(0),
            cached: line.cached_tokens.unwrap_or(0),
            met: line.slo_met,
        })
    }

    fn name(&mut self, text: &str) -> Result<Arc<str>, RecordsError> {
        if let Some(name) = self.names.get(text) {
            return Ok(Arc::clone(name));
        }
        if self.names.len() == NAMES_MAX {
            return Err(RecordsError::TooMany(NAMES_MAX, "names of pools, backends, models and reasons"));
        }
        let name: Arc<str> = text.into();
        self.names.insert(Arc::clone(&name));
        Ok(name)
    }
}

/// Copies the lines about requests that arrived from `from` until before `to`, seconds since 1970.
/// Skips lines that are not records, which [`Day::read`] has reported.
pub fn copy_between(text: impl BufRead, (from, to): (f64, f64), out: &mut impl Write) -> std::io::Result<()> {
    for line in text.split(b'\n') {
        let line = line?;
        let at = serde_json::from_slice::<Line<'_>>(&line).ok().and_then(|line| arrival(&line).ok());
        if at.is_some_and(|at| at >= from && at < to) {
            out.write_all(&line)?;
            out.write_all(b"\n")?;
        }
    }
    Ok(())
}

fn arrival(line: &Line<'_>) -> Result<f64, String> {
    let ended: jiff::Timestamp =
        line.time.parse().map_err(|_| format!("`time` '{}' is not a time (RFC 3339)", line.time))?;
    Ok(ended.as_microsecond() as f64 / 1e6 - line.total_ms / 1e3)
}
