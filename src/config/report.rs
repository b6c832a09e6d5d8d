//! The results of reading a configuration: problems, the origin of every key, and the document
//! itself.
//!
//! Reading never stops at a problem. A wrong value is replaced by the default, so that the rest of
//! the file is checked too. If the report has an error, the caller gets no `Config`. A rule about
//! several keys first asks [`Report::is_sound`], so that it does not repeat a problem of one of the
//! keys.
//!
//! Environment variables, files and the machine are read through [`Surroundings`], so that a test
//! can replace them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::file::{Document, Entry, Table, Value};
use super::key::Field;
use super::machine::Machine;
use super::origin::{Origin, Origins};
use super::problem::{Problem, Situation, Suggestion};

/// The inputs of a configuration besides the file.
pub struct Surroundings<'s> {
    /// Reads an environment variable.
    pub env: &'s dyn Fn(&str) -> Option<String>,
    /// The folder at which relative paths start, which is the folder of the configuration file.
    pub folder: PathBuf,
    /// The resources of the machine, on which some defaults depend.
    pub machine: Machine,
}

impl Surroundings<'_> {
    /// This process and this machine, with relative paths starting at `folder`.
    pub fn of_process(folder: &Path) -> Self {
        // Absolute, so that printed paths mean the same in any folder.
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Self { env: &|name| std::env::var(name).ok(), folder, machine: Machine::of_process() }
    }
}

/// Names to which other parts of the configuration refer. The position of a name is the id.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// The names of each model: first the name, then the aliases.
    pub(super) models: Vec<Vec<String>>,
    pub(super) pools: Vec<String>,
}

impl Names {
    /// The names in a document, before any of it was checked.
    fn written(document: &Document) -> Self {
        let tables = |key: &str| -> Vec<&Table> {
            let elements = document.root.get(key).map_or(&[][..], |entry| entry.value.elements());
            elements.iter().filter_map(|element| element.value.table()).collect()
        };
        let texts = |table: &Table, key: &str| table.get(key).map(|entry| entry.value.texts()).unwrap_or_default();
        let name = |table: &&Table| texts(table, "name").concat();
        let names = |model: &&Table| [vec![name(model)], texts(model, "aliases")].concat();
        Self { models: tables("model").iter().map(names).collect(), pools: tables("pool").iter().map(name).collect() }
    }
}

/// A key: the place in the tree and in the file.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) path: String,
    pub(super) origin: Origin,
}

pub(super) struct Report<'s> {
    pub(super) surroundings: &'s Surroundings<'s>,
    pub(super) names: Names,
    pub(super) problems: Vec<Problem>,
    pub(super) origins: Origins,
    /// The keys of the whole configuration, to find the table of a misplaced key.
    pub(super) keys: &'static [Field],
    document: &'s Document,
}

impl<'s> Report<'s> {
    pub(super) fn new(document: &'s Document, surroundings: &'s Surroundings<'s>) -> Self {
        let (problems, origins) = (Vec::new(), Origins::default());
        Self { surroundings, names: Names::written(document), problems, origins, keys: &[], document }
    }

    pub(super) fn add(&mut self, place: &Place, situation: Situation) {
        self.problems.push(Problem::new(place.path.clone(), place.origin, situation));
    }

    pub(super) fn add_at(&mut self, path: &str, situation: Situation) {
        let place = self.place(path);
        self.add(&place, situation);
    }

    /// Adds a problem at a key whose value cannot be used.
    pub(super) fn refuse<T>(&mut self, path: &str, situation: Situation) -> Option<T> {
        self.add_at(path, situation);
        None
    }

    /// The place of a key. If the key was not written, it has the origin of the nearest written
    /// table.
    pub(super) fn place(&self, path: &str) -> Place {
        let origin = self.document.find(path).map_or_else(|nearest| nearest, |entry| entry.origin);
        Place { path: path.to_owned(), origin }
    }

    pub(super) fn is_written(&self, path: &str) -> bool {
        self.document.find(path).is_ok()
    }

    /// Whether no error was reported at `path` or below it.
    pub(super) fn is_sound(&self, path: &str) -> bool {
        let below =
            |found: &str| found.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
        !self.problems.iter().any(|problem| !problem.situation().is_warning() && below(problem.path()))
    }

    /// Whether an unknown key of the table at `path` was probably meant to be `key`.
    pub(super) fn is_misspelt(&self, path: &str, key: &str) -> bool {
        let in_table = |found: &str| {
            found.strip_prefix(path).and_then(|rest| rest.strip_prefix('.')).is_some_and(|name| !name.contains('.'))
        };
        let means = |situation: &Situation| matches!(situation, Situation::UnknownKey { suggestion: Suggestion::Near(name) } if name == key);
        self.problems.iter().any(|problem| in_table(problem.path()) && means(problem.situation()))
    }

    /// The position of `text` in the list at `path`.
    pub(super) fn position(&self, path: &str, text: &str) -> Option<usize> {
        let found = self.document.find(path).ok()?;
        let is_it = |element: &Entry| matches!(&element.value, Value::Text(written) if written == text);
        found.value.elements().iter().position(is_it)
    }
}

/// Names that must be unique, with the path of each.
#[derive(Default)]
pub(super) struct Claimed(BTreeMap<String, String>);

impl Claimed {
    /// Takes a name, or reports that it is taken. Skips a name that already has a problem.
    pub(super) fn claim(&mut self, name: &str, path: String, report: &mut Report<'_>) {
        if !report.is_sound(&path) {
            return;
        }
        if let Some(first) = self.0.get(name) {
            report.add_at(&path, Situation::Duplicate { name: name.to_owned(), first: first.clone() });
        } else {
            self.0.insert(name.to_owned(), path);
        }
    }
}
