//! How a value of each type is read, checked and shown.
//!
//! [`Scalar`] is for one value, such as a number, a duration or a word. [`Setting`] is for
//! everything that a key can hold: a scalar, an optional value, a list or a table. A type that
//! implements `Scalar` can be the type of a field of a `table!`.
//!
//! Reading reports problems and goes on, so that the rest of the file is always checked.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::file::{Document, Entry, Value};
use super::key::{Field, KeySpec, Shape};
use super::origin::Origin;
use super::problem::Situation;
use super::report::{Names, Place, Report};

/// A value that a key can hold.
pub(super) trait Setting: Sized {
    /// The kind of value for the reference file.
    const SHAPE: Shape = Shape::Value;

    /// Reads the value written at `place`, and reports problems.
    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self>;

    /// The value that replaces a missing or wrong value if the key has no default, so that reading
    /// can go on.
    fn placeholder() -> Option<Self> {
        None
    }

    /// The value as the resolved page shows it.
    fn show(&self, names: &Names) -> Shown;

    /// Replaces the values of keys that need a restart by the running values.
    fn keep_running(&mut self, _running: &Self) {}
}

/// A value as it is shown, in TOML.
#[derive(Clone)]
pub(super) enum Shown {
    Value(String),
    /// A secret: the text to show, and the bytes to compare.
    Secret {
        shown: String,
        compared: Vec<u8>,
    },
    Nothing,
    Table(ShownTable),
    Tables(Vec<ShownTable>),
    /// A table whose keys the operator chose.
    Free(Vec<(String, Shown)>),
}

impl Shown {
    /// Appends all values, secrets too, so that two settings have the same bytes if and only if
    /// they mean the same. The bytes must not be stored or shown, only digests of them.
    pub(super) fn write_compared(&self, out: &mut Vec<u8>) {
        let mut part = |tag: u8, bytes: &[u8]| {
            out.push(tag);
            out.extend_from_slice(&bytes.len().to_le_bytes());
            out.extend_from_slice(bytes);
        };
        match self {
            Self::Value(value) => part(b'v', value.as_bytes()),
            Self::Secret { compared, .. } => part(b's', compared),
            Self::Nothing => part(b'n', &[]),
            Self::Table(table) => {
                part(b't', &[]);
                table.items.iter().for_each(|(field, shown)| {
                    Self::Value(field.key.name.to_owned()).write_compared(out);
                    shown.write_compared(out);
                });
            }
            Self::Tables(tables) => {
                part(b'l', &tables.len().to_le_bytes());
                tables.iter().for_each(|table| Self::Table(table.clone()).write_compared(out));
            }
            Self::Free(values) => {
                part(b'f', &values.len().to_le_bytes());
                values.iter().for_each(|(name, shown)| {
                    Self::Value(name.clone()).write_compared(out);
                    shown.write_compared(out);
                });
            }
        }
    }
}

/// A secret is compared by value, not by the place from which it is read.
impl PartialEq for Shown {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Value(one), Self::Value(two)) => one == two,
            (Self::Secret { compared: one, .. }, Self::Secret { compared: two, .. }) => one == two,
            (Self::Nothing, Self::Nothing) => true,
            (Self::Table(one), Self::Table(two)) => one == two,
            (Self::Tables(one), Self::Tables(two)) => one == two,
            (Self::Free(one), Self::Free(two)) => one == two,
            _ => false,
        }
    }
}

#[derive(Clone)]
pub(super) struct ShownTable {
    /// The identity of the table in a list. To a reload, a table with another identity is another
    /// table, not a changed one.
    pub(super) identity: String,
    /// The keys, in the order of their definition.
    pub(super) items: Vec<(&'static Field, Shown)>,
}

impl PartialEq for ShownTable {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
            && self.items.iter().map(|(_, shown)| shown).eq(other.items.iter().map(|(_, shown)| shown))
    }
}

impl ShownTable {
    /// A table that is identified by its name.
    pub(super) fn new(fields: &'static [Field], values: Vec<Shown>) -> Self {
        let items = fields.iter().zip(values).collect();
        let mut table = Self { identity: String::new(), items };
        table.identity = table.name().to_owned();
        table
    }

    /// The value of the key `name`, in TOML; empty if there is none.
    pub(super) fn name(&self) -> &str {
        let name = self.items.iter().find(|(field, _)| field.key.name == "name");
        if let Some((_, Shown::Value(name))) = name { name } else { "" }
    }
}

pub(super) trait Scalar: Sized + PartialEq {
    /// The words that the value can be, if it is one of a few.
    const WORDS: &'static [&'static str] = &[];

    /// Reads the value, or returns the problem with it.
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation>;

    /// The value as text, without quotes.
    fn text(&self, names: &Names) -> String;

    /// The value as TOML; a text unless the type says otherwise.
    fn toml(&self, names: &Names) -> String {
        quote(&self.text(names))
    }

    /// The number that is compared with the bounds.
    fn magnitude(&self) -> Option<f64> {
        None
    }

    fn placeholder() -> Option<Self> {
        None
    }
}

impl<T: Scalar> Setting for T {
    const SHAPE: Shape = if T::WORDS.is_empty() { Shape::Value } else { Shape::Word(T::WORDS) };

    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let parsed = T::parse(written, report).map_err(|situation| beyond_bounds(written, key).unwrap_or(situation));
        let read = parsed.and_then(|value| within_bounds(value, key, report));
        let checked = read.and_then(|value| match (&written.value, key.check) {
            (Value::Text(text), Some(check)) => check(text).map(|()| value),
            _ => Ok(value),
        });
        checked.map_err(|situation| report.add(place, situation)).ok()
    }

    fn placeholder() -> Option<Self> {
        <T as Scalar>::placeholder()
    }

    fn show(&self, names: &Names) -> Shown {
        Shown::Value(self.toml(names))
    }
}

/// The situation for a number that the type cannot hold. It names the bounds, because they say more
/// than the type.
fn beyond_bounds(written: &Entry, key: &KeySpec) -> Option<Situation> {
    let (Value::Int(number), Some((min, max))) = (&written.value, key.bounds) else { return None };
    let is_size = min.parse::<i64>().is_ok();
    is_size.then(|| Situation::OutOfRange { found: number.to_string(), min: min.to_owned(), max: max.to_owned() })
}

fn within_bounds<T: Scalar>(value: T, key: &KeySpec, report: &Report<'_>) -> Result<T, Situation> {
    let Some((min, max)) = key.bounds else { return Ok(value) };
    let bound = |text: &str| {
        let entry = Entry { value: Document::value_or_text(text, Origin::Default), origin: Origin::Default };
        T::parse(&entry, report).ok().and_then(|bound| bound.magnitude())
    };
    let (found, min_value, max_value) = (value.magnitude(), bound(min), bound(max));
    // The tests read a value of every key, so they would find a bound that cannot be read.
    debug_assert!(
        min_value.is_some() && max_value.is_some(),
        "{} has a bound that cannot be read: {min}, {max}",
        key.name
    );
    if min_value <= found && found <= max_value {
        return Ok(value);
    }
    Err(Situation::OutOfRange { found: value.text(&report.names), min: min.to_owned(), max: max.to_owned() })
}

impl<T: Setting> Setting for Option<T> {
    const SHAPE: Shape = T::SHAPE;

    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        T::read(written, place, key, report).map(Some)
    }

    fn placeholder() -> Option<Self> {
        Some(None)
    }

    fn show(&self, names: &Names) -> Shown {
        self.as_ref().map_or(Shown::Nothing, |value| value.show(names))
    }
}

impl<T: Setting> Setting for Vec<T> {
    const SHAPE: Shape = match T::SHAPE {
        Shape::Table(fields) => Shape::Tables(fields),
        _ => Shape::Value,
    };

    /// Wrong elements are left out.
    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let mut values = Vec::new();
        for (place, element) in elements(written, place, key, report)? {
            values.extend(T::read(element, &place, key, report));
        }
        Some(values)
    }

    fn placeholder() -> Option<Self> {
        Some(Vec::new())
    }

    fn show(&self, names: &Names) -> Shown {
        let (mut values, mut tables) = (Vec::new(), Vec::new());
        for shown in self.iter().map(|element| element.show(names)) {
            match shown {
                Shown::Value(value) => values.push(value),
                Shown::Table(table) => tables.push(table),
                _ => {}
            }
        }
        if matches!(Self::SHAPE, Shape::Tables(_)) { Shown::Tables(tables) } else { Shown::Value(list(&values)) }
    }
}

/// The elements of a list with their places. At most `max_entries` are read.
pub(super) fn elements<'w>(
    written: &'w Entry,
    place: &Place,
    key: &KeySpec,
    report: &mut Report<'_>,
) -> Option<Vec<(Place, &'w Entry)>> {
    let Value::List(elements) = &written.value else {
        report.add(place, wrong_type("a list", written));
        return None;
    };
    if elements.len() > key.max_entries {
        report.add(place, Situation::TooMany { found: elements.len(), max: key.max_entries });
    }
    let placed = |(index, element): (usize, &'w Entry)| {
        (Place { path: format!("{}[{index}]", place.path), origin: element.origin }, element)
    };
    Some(elements.iter().take(key.max_entries).enumerate().map(placed).collect())
}

/// A value of a table whose keys the operator chooses, such as `env`.
pub(super) trait FreeValue: Sized {
    /// Reads the value of the key `name`, or returns the problem with it.
    fn read_free(name: &str, written: &Entry, place: &Place, report: &mut Report<'_>) -> Result<Self, Situation>;

    /// The value as it is shown.
    fn show_free(&self) -> Shown;
}

impl<T: FreeValue> Setting for BTreeMap<String, T> {
    const SHAPE: Shape = Shape::Free;

    fn read(written: &Entry, place: &Place, _: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let Value::Table(written) = &written.value else {
            report.add(place, wrong_type("a table", written));
            return None;
        };
        let mut values = Self::new();
        for (name, entry) in written {
            let place = Place { path: format!("{}.{name}", place.path), origin: entry.origin };
            report.origins.note(place.path.clone(), entry.origin);
            match T::read_free(name, entry, &place, report) {
                Ok(value) => drop(values.insert(name.clone(), value)),
                Err(situation) => report.add(&place, situation),
            }
        }
        Some(values)
    }

    fn show(&self, _: &Names) -> Shown {
        Shown::Free(self.iter().map(|(name, value)| (name.clone(), value.show_free())).collect())
    }
}

/// The situation for a value of another type.
pub(super) fn wrong_type(wanted: &str, written: &Entry) -> Situation {
    Situation::WrongType { wanted: wanted.to_owned(), found: written.value.kind() }
}

pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

pub(super) fn list(values: &[String]) -> String {
    format!("[{}]", values.join(", "))
}

/// A key, quoted where TOML requires it.
pub(super) fn bare(key: &str) -> String {
    let plain = !key.is_empty() && key.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-".contains(letter));
    if plain { key.to_owned() } else { quote(key) }
}

pub(super) fn quote(value: &str) -> String {
    let mut out = String::with_capacity(value.len() + 2);
    out.push('"');
    for letter in value.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            '\n' => out.push_str("\\n"),
            // Writing to a String cannot fail.
            _ if letter.is_control() => drop(write!(out, "\\u{:04X}", u32::from(letter))),
            _ => out.push(letter),
        }
    }
    out.push('"');
    out
}
