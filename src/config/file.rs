//! A configuration as it was written: TOML with the place of every value, before anything is
//! checked.
//!
//! serde would stop at the first problem, but a report must list every problem. So this is a tree
//! of values, each with an [`Origin`]; `set.rs` changes it, `table.rs` reads it key by key. All
//! syntax errors are reported too, because the parser goes on after an error. TOML's dates are read
//! as texts.

use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::origin::Origin;
use super::problem::{Problem, Situation};

#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) root: Table,
}

pub(super) type Table = BTreeMap<String, Entry>;

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) value: Value,
    pub(super) origin: Origin,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Text(String),
    Int(i64),
    Float(f64),
    Bool(bool),
    List(Vec<Entry>),
    Table(Table),
}

impl Value {
    /// Describes the value for messages about a wrong type.
    pub(super) fn kind(&self) -> String {
        match self {
            Self::Text(text) if text.chars().count() > 40 => "a long text".to_owned(),
            Self::Text(text) => format!("the text \"{text}\""),
            Self::Int(number) => format!("the number {number}"),
            Self::Float(number) => format!("the number {number}"),
            Self::Bool(flag) => format!("{flag}"),
            Self::List(_) => "a list".to_owned(),
            Self::Table(_) => "a table".to_owned(),
        }
    }

    pub(super) fn table(&self) -> Option<&Table> {
        if let Self::Table(table) = self { Some(table) } else { None }
    }

    /// The elements of a list; none for other values.
    pub(super) fn elements(&self) -> &[Entry] {
        if let Self::List(elements) = self { elements } else { &[] }
    }

    /// The text, or the texts of a list.
    pub(super) fn texts(&self) -> Vec<String> {
        match self {
            Self::Text(text) => vec![text.clone()],
            _ => self.elements().iter().flat_map(|element| element.value.texts()).collect(),
        }
    }
}

impl Document {
    /// Reads TOML. The error lists every place where the text is not TOML.
    pub(super) fn parse(text: &str) -> Result<Self, Vec<Problem>> {
        let lines = Lines::of(text);
        let (table, errors) = DeTable::parse_recoverable(text);
        let problem = |error: &toml::de::Error| {
            let origin = lines.origin(error.span().map_or(0, |span| span.start));
            let mut message = error.message().lines().collect::<Vec<_>>().join("; ");
            // For a duplicate key, the parser names neither the key nor the remedy.
            if let (true, Some(key)) = (message == "duplicate key", error.span().and_then(|span| text.get(span))) {
                message = format!("the key {key} is set twice; remove one of the two");
            }
            Problem::new(String::new(), origin, Situation::Syntax { message })
        };
        if !errors.is_empty() {
            return Err(errors.iter().map(problem).collect());
        }
        let mut problems = Vec::new();
        let origin = |offset| lines.origin(offset);
        let root = table_of(table.get_ref(), "", &origin, &mut problems);
        if problems.is_empty() { Ok(Self { root }) } else { Err(problems) }
    }

    /// Reads one TOML value, as on the right of `=`. `None` if `text` is not one value.
    pub(super) fn value(text: &str, origin: Origin) -> Option<Entry> {
        let text = format!("x = {text}");
        let table = DeTable::parse(&text).ok()?;
        if table.get_ref().len() != 1 {
            return None;
        }
        let mut problems = Vec::new();
        let mut entries = table_of(table.get_ref(), "", &|_| origin, &mut problems);
        // A number that is too large becomes a text, which no key for numbers accepts.
        if problems.is_empty() { entries.remove("x") } else { None }
    }

    /// Reads a value as it is written in `--set`: TOML, or plain text if the text is not TOML.
    pub(super) fn value_or_text(text: &str, origin: Origin) -> Value {
        Self::value(text, origin).map_or_else(|| Value::Text(text.to_owned()), |entry| entry.value)
    }

    /// The entry at a path such as `pool[0].spill[1]`. An error is the origin of the nearest entry
    /// above it.
    pub(super) fn find(&self, path: &str) -> Result<&Entry, Origin> {
        let mut segments = path.split(['.', '[']).map(|segment| segment.trim_end_matches(']'));
        let first = segments.next().and_then(|key| self.root.get(key)).ok_or(Origin::Default)?;
        segments.try_fold(first, |entry, segment| {
            let below = match &entry.value {
                Value::Table(table) => table.get(segment),
                value => segment.parse().ok().and_then(|index: usize| value.elements().get(index)),
            };
            below.ok_or(entry.origin)
        })
    }

    /// The same document with every value attributed to `origin`.
    pub(super) fn attributed_to(mut self, origin: Origin) -> Self {
        fn walk(entry: &mut Entry, origin: Origin) {
            entry.origin = origin;
            match &mut entry.value {
                Value::List(entries) => entries.iter_mut().for_each(|entry| walk(entry, origin)),
                Value::Table(table) => table.values_mut().for_each(|entry| walk(entry, origin)),
                Value::Text(_) | Value::Int(_) | Value::Float(_) | Value::Bool(_) => {}
            }
        }
        self.root.values_mut().for_each(|entry| walk(entry, origin));
        self
    }
}

type Place<'a> = dyn Fn(usize) -> Origin + 'a;

fn table_of(table: &DeTable<'_>, path: &str, place: &Place<'_>, problems: &mut Vec<Problem>) -> Table {
    let mut entries = Table::new();
    for (key, value) in table {
        let name = key.get_ref().to_string();
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let origin = place(key.span().start);
        entries.insert(name, Entry { value: value_of(value, &path, origin, place, problems), origin });
    }
    entries
}

fn value_of(
    value: &Spanned<DeValue<'_>>,
    path: &str,
    origin: Origin,
    place: &Place<'_>,
    problems: &mut Vec<Problem>,
) -> Value {
    let mut out_of_range = |text: &str| {
        let situation = Situation::Number { text: text.to_owned() };
        problems.push(Problem::new(path.to_owned(), origin, situation));
    };
    match value.get_ref() {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(digits) => {
            let number = i64::from_str_radix(&digits.as_str().replace('_', ""), digits.radix());
            Value::Int(number.unwrap_or_else(|_| {
                out_of_range(digits.as_str());
                0
            }))
        }
        DeValue::Float(digits) => Value::Float(digits.as_str().replace('_', "").parse().unwrap_or_else(|_| {
            out_of_range(digits.as_str());
            0.0
        })),
        DeValue::Boolean(flag) => Value::Bool(*flag),
        DeValue::Datetime(date) => Value::Text(date.to_string()),
        DeValue::Array(items) => {
            let entry = |(index, item): (usize, &Spanned<DeValue<'_>>)| {
                let origin = place(item.span().start);
                let path = format!("{path}[{index}]");
                Entry { value: value_of(item, &path, origin, place, problems), origin }
            };
            Value::List(items.iter().enumerate().map(entry).collect())
        }
        DeValue::Table(table) => Value::Table(table_of(table, path, place, problems)),
    }
}

struct Lines<'t> {
    text: &'t str,
    starts: Vec<usize>,
}

impl<'t> Lines<'t> {
    fn of(text: &'t str) -> Self {
        let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Self { text, starts }
    }

    fn origin(&self, offset: usize) -> Origin {
        let line = self.starts.partition_point(|start| *start <= offset).max(1);
        let before = self.text.get(self.starts[line - 1]..offset).unwrap_or("");
        Origin::File { line, column: before.chars().count() + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_knows_its_line_and_column() {
        let document = Document::parse("# one\n[server]\n  listen = \"x\"\n[[pool]]\n[[pool]]\n").unwrap();
        let Value::Table(server) = &document.root["server"].value else { panic!("a table") };
        assert_eq!(document.root["server"].origin, Origin::File { line: 2, column: 2 });
        assert_eq!(server["listen"].origin, Origin::File { line: 3, column: 3 });
        let Value::List(pools) = &document.root["pool"].value else { panic!("a list") };
        assert!(matches!(pools[1].origin, Origin::File { line: 5, .. }));
    }

    #[test]
    fn all_syntax_errors_are_reported() {
        let problems = Document::parse("a = \nb = 1\nc = ]\n").unwrap_err();
        let line =
            |number| move |problem: &Problem| matches!(problem.origin(), Origin::File { line, .. } if line == number);
        assert!(problems.iter().any(line(1)) && problems.iter().any(line(3)), "{problems:?}");
    }

    #[test]
    fn a_number_that_does_not_fit_is_a_problem_and_not_a_zero() {
        assert!(Document::parse("a = 99999999999999999999").is_err());
    }
}
