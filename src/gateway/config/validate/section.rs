//! Reading one table key by key, with types, bounds and defaults, without ever stopping at a problem.
//!
//! A key that is absent or wrong yields its default, so that reading goes on and the rest of the file
//! is checked too; what is wrong is in the [`Report`], and a report with errors never becomes a
//! `Config`. Each key that is asked for counts as known: [`Section::finish`] reports every other key
//! that was written, which is why the known keys need no second list that could disagree.

use std::fmt::Display;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::super::choice::Choice;
use super::super::file::{Entry, Table, Value};
use super::super::origin::{Origin, Origins};
use super::super::problem::{Problem, Situation};
use super::super::suggest::Suggestion;
use super::super::{LogFormat, LogLevel, OnExit, OnStart, Order, Policy, UsageInjection};
use super::Surroundings;
use sluice_core::base::{ByteSize, Period, Tokens};

/// What was found out so far: problems, and the origin of every key.
pub(super) struct Report<'s> {
    pub(super) around: &'s Surroundings<'s>,
    pub(super) problems: Vec<Problem>,
    pub(super) origins: Origins,
}

impl Report<'_> {
    pub(super) fn add(&mut self, place: &Place, situation: Situation) {
        self.problems.push(Problem::new(place.path.clone(), place.origin, situation));
    }
}

/// A key: where it is in the tree and in the file.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) path: String,
    pub(super) origin: Origin,
}

/// One table that is being read.
pub(super) struct Section<'d> {
    pub(super) place: Place,
    table: &'d Table,
    asked: Vec<&'static str>,
}

static EMPTY: Table = Table::new();

impl<'d> Section<'d> {
    pub(super) fn root(table: &'d Table) -> Self {
        Self { place: Place { path: String::new(), origin: Origin::Default }, table, asked: Vec::new() }
    }

    /// The place of a key, written or not; where it is not, the origin is that of its table.
    pub(super) fn place_of(&self, key: &str) -> Place {
        let path = if self.place.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.place.path) };
        Place { path, origin: self.table.get(key).map_or(self.place.origin, |entry| entry.origin) }
    }

    /// Whether `key` was written.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// What was written for `key`, which is a known key from now on.
    pub(super) fn entry(&mut self, key: &'static str, report: &mut Report<'_>) -> Option<&'d Entry> {
        self.asked.push(key);
        let entry = self.table.get(key);
        report.origins.note(self.place_of(key).path, entry.map_or(Origin::Default, |entry| entry.origin));
        entry
    }

    /// The value of `key`, or nothing when it is absent or wrong.
    pub(super) fn optional<T: Read>(&mut self, key: &'static str, report: &mut Report<'_>) -> Option<T> {
        let entry = self.entry(key, report)?;
        match T::read(entry) {
            Ok(value) => Some(value),
            Err(situation) => {
                report.add(&self.place_of(key), situation);
                None
            }
        }
    }

    /// The value of `key`, or its default.
    pub(super) fn value<T: Read>(&mut self, key: &'static str, default: T, report: &mut Report<'_>) -> T {
        self.optional(key, report).unwrap_or(default)
    }

    /// The value of a key that must be written.
    pub(super) fn required<T: Read>(
        &mut self,
        key: &'static str,
        hint: &'static str,
        report: &mut Report<'_>,
    ) -> Option<T> {
        if !self.table.contains_key(key) {
            report.add(&self.place_of(key), Situation::Missing { hint });
        }
        self.optional(key, report)
    }

    /// The value of `key` if it is within bounds; a problem, and nothing, if it is not.
    pub(super) fn optional_within<T: Read + PartialOrd + Display>(
        &mut self,
        key: &'static str,
        bounds: RangeInclusive<T>,
        report: &mut Report<'_>,
    ) -> Option<T> {
        let value: T = self.optional(key, report)?;
        if bounds.contains(&value) {
            return Some(value);
        }
        let (min, max) = (bounds.start().to_string(), bounds.end().to_string());
        report.add(&self.place_of(key), Situation::OutOfRange { found: value.to_string(), min, max });
        None
    }

    /// The value of `key` within bounds, or its default.
    pub(super) fn within<T: Read + PartialOrd + Display>(
        &mut self,
        key: &'static str,
        default: T,
        bounds: RangeInclusive<T>,
        report: &mut Report<'_>,
    ) -> T {
        self.optional_within(key, bounds, report).unwrap_or(default)
    }

    /// The table at `key`; nothing when it is absent or not a table.
    pub(super) fn section(&mut self, key: &'static str, report: &mut Report<'_>) -> Option<Section<'d>> {
        let entry = self.entry(key, report)?;
        section_of(entry, self.place_of(key), report)
    }

    /// The table at `key`, or an empty one, whose keys then all have their defaults.
    pub(super) fn section_or_empty(&mut self, key: &'static str, report: &mut Report<'_>) -> Section<'d> {
        let place = self.place_of(key);
        self.section(key, report).unwrap_or(Section { place, table: &EMPTY, asked: Vec::new() })
    }

    /// The elements of the list at `key` with their places; at most `max`.
    pub(super) fn list(
        &mut self,
        key: &'static str,
        max: usize,
        report: &mut Report<'_>,
    ) -> Option<Vec<(Place, &'d Entry)>> {
        let entry = self.entry(key, report)?;
        let place = self.place_of(key);
        let Value::List(elements) = &entry.value else {
            report.add(&place, Situation::WrongType { wanted: "a list", found: entry.value.kind() });
            return None;
        };
        if elements.len() > max {
            report.add(&place, Situation::TooMany { found: elements.len(), max });
        }
        let numbered = elements.iter().take(max).enumerate();
        let placed = |(index, entry): (usize, &'d Entry)| {
            (Place { path: format!("{}[{index}]", place.path), origin: entry.origin }, entry)
        };
        Some(numbered.map(placed).collect())
    }

    /// The tables of the list at `key`; at most `max`.
    pub(super) fn sections(&mut self, key: &'static str, max: usize, report: &mut Report<'_>) -> Vec<Section<'d>> {
        let elements = self.list(key, max, report).unwrap_or_default();
        elements.into_iter().filter_map(|(place, entry)| section_of(entry, place, report)).collect()
    }

    /// The texts of the list at `key`, with their places; nothing when it is absent or not a list.
    pub(super) fn texts(
        &mut self,
        key: &'static str,
        max: usize,
        report: &mut Report<'_>,
    ) -> Option<Vec<(Place, String)>> {
        let elements = self.list(key, max, report)?;
        let mut texts = Vec::new();
        for (place, entry) in elements {
            match String::read(entry) {
                Ok(text) => texts.push((place, text)),
                Err(situation) => report.add(&place, situation),
            }
        }
        Some(texts)
    }

    /// All keys of a table whose keys are free, such as `env`.
    pub(super) fn all(&self) -> impl Iterator<Item = (&'d str, &'d Entry)> + use<'d> {
        self.table.iter().map(|(key, entry)| (key.as_str(), entry))
    }

    /// Reports every key that was written and never asked for.
    pub(super) fn finish(self, report: &mut Report<'_>) {
        for key in self.table.keys().filter(|key| !self.asked.contains(&key.as_str())) {
            let suggestion = Suggestion::for_name(key, self.asked.iter().copied());
            report.add(&self.place_of(key), Situation::UnknownKey { suggestion });
        }
    }
}

fn section_of<'d>(entry: &'d Entry, place: Place, report: &mut Report<'_>) -> Option<Section<'d>> {
    if let Value::Table(table) = &entry.value {
        return Some(Section { place, table, asked: Vec::new() });
    }
    report.add(&place, Situation::WrongType { wanted: "a table", found: entry.value.kind() });
    None
}

/// A type that one value of a document can become.
pub(super) trait Read: Sized {
    /// Reads it, or says what is wrong with it.
    fn read(entry: &Entry) -> Result<Self, Situation>;
}

fn wrong<T>(wanted: &'static str, entry: &Entry) -> Result<T, Situation> {
    Err(Situation::WrongType { wanted, found: entry.value.kind() })
}

impl Read for String {
    fn read(entry: &Entry) -> Result<Self, Situation> {
        if let Value::Text(text) = &entry.value { Ok(text.clone()) } else { wrong("a text", entry) }
    }
}

impl Read for f64 {
    fn read(entry: &Entry) -> Result<Self, Situation> {
        match entry.value {
            Value::Float(number) if number.is_finite() => Ok(number),
            Value::Int(number) => Ok(number as f64),
            _ => wrong("a number", entry),
        }
    }
}

impl Read for SocketAddr {
    fn read(entry: &Entry) -> Result<Self, Situation> {
        let text = String::read(entry)?;
        text.replace("localhost:", "127.0.0.1:").parse().map_err(|_| Situation::Address { found: text })
    }
}

macro_rules! read_whole {
    ($($name:ty),*) => {$(
        impl Read for $name {
            fn read(entry: &Entry) -> Result<Self, Situation> {
                let whole = match entry.value {
                    Value::Int(number) => Self::try_from(number).ok(),
                    _ => None,
                };
                whole.map_or_else(|| wrong("a whole number that is not negative or too large", entry), Ok)
            }
        }
    )*};
}

read_whole!(u16, u32, usize);

impl Read for i32 {
    fn read(entry: &Entry) -> Result<Self, Situation> {
        let whole = if let Value::Int(number) = entry.value { Self::try_from(number).ok() } else { None };
        whole.map_or_else(|| wrong("a whole number", entry), Ok)
    }
}

fn unit<T: FromStr<Err: Display>>(text: &str) -> Result<T, Situation> {
    text.parse().map_err(|error: T::Err| Situation::Unit { reason: error.to_string() })
}

macro_rules! read_size {
    ($($name:ident: $wanted:literal),*) => {$(
        impl Read for $name {
            fn read(entry: &Entry) -> Result<Self, Situation> {
                match &entry.value {
                    Value::Text(text) => unit(text),
                    Value::Int(number) => u64::try_from(*number).map(Self).or_else(|_| wrong($wanted, entry)),
                    _ => wrong($wanted, entry),
                }
            }
        }
    )*};
}

read_size!(Tokens: "a number of tokens such as \"5k\"", ByteSize: "a size such as \"32MiB\"");

impl Read for Period {
    fn read(entry: &Entry) -> Result<Self, Situation> {
        match &entry.value {
            Value::Text(text) => unit(text),
            Value::Int(number) => unit(&number.to_string()),
            _ => wrong("a duration such as \"20s\"", entry),
        }
    }
}

macro_rules! read_choice {
    ($($name:ident),*) => {$(
        impl Read for $name {
            fn read(entry: &Entry) -> Result<Self, Situation> {
                let found = String::read(entry)?;
                let words = Self::WORDS.iter().map(|(word, _)| *word);
                let unknown = || Situation::UnknownChoice { suggestion: Suggestion::for_name(&found, words), found: found.clone() };
                Self::from_word(&found).ok_or_else(unknown)
            }
        }
    )*};
}

read_choice!(Policy, Order, UsageInjection, OnStart, OnExit, LogLevel, LogFormat);
