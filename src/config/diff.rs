//! The changes of a reload: the difference between the running configuration and a new one.
//!
//! Both are compared key by key. Pools, models and API keys are identified by name, and backends by
//! name and address. So a backend that moved counts as one removed and one added, and the new one
//! gets no counter of the old one. The definition of a configuration key says if only a restart
//! applies a change.
//!
//! A change is named like a key of `--set`: `pool.short.queue.length`. Secrets are compared, never
//! shown.

use std::collections::BTreeMap;
use std::fmt;

use super::key::{Applied, Fallback, Field, KeySpec};
use super::root::Config;
use super::setting::{Shown, ShownTable, join};

/// One thing that a reload changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The key, with names instead of positions.
    path: String,
    difference: Difference,
    applied: Applied,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Difference {
    Added,
    Removed,
    /// A change whose values are not shown.
    Changed,
    Value {
        from: String,
        to: String,
    },
}

impl Change {
    /// A changed key that keeps the running value until a restart.
    pub fn after_restart(path: &str) -> Self {
        Self { path: path.to_owned(), difference: Difference::Changed, applied: Applied::AfterRestart }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.difference {
            Difference::Added => write!(f, "{}: added", self.path)?,
            Difference::Removed => write!(f, "{}: removed", self.path)?,
            Difference::Changed => write!(f, "{}: changed", self.path)?,
            Difference::Value { from, to } => write!(f, "{}: {from} -> {to}", self.path)?,
        }
        f.write_str(match self.applied {
            Applied::AtOnce => "",
            // In an upgrade, the successor process reads the file again and makes its own sockets
            // and threads.
            Applied::AfterRestart if self.path.starts_with("server.") => {
                "; needs a restart or an upgrade, the running value stays"
            }
            Applied::AfterRestart => "; needs a restart, the running value stays",
            Applied::ByEngineRestart => "; the engine is restarted in its turn",
        })
    }
}

/// All changes from `old` to `new`, in the order of the definitions.
pub fn changes(old: &Config, new: &Config) -> Vec<Change> {
    let mut comparison = Comparison { applied: Applied::AtOnce, changes: Vec::new() };
    comparison.tables(String::new(), &old.shown(), &new.shown());
    comparison.changes
}

struct Comparison {
    /// When the changes that are now compared are applied: by the rule of the innermost enclosing
    /// key whose changes are not applied at once.
    applied: Applied,
    changes: Vec<Change>,
}

impl Comparison {
    fn add(&mut self, path: String, difference: Difference) {
        self.changes.push(Change { path, difference, applied: self.applied });
    }

    fn tables(&mut self, path: String, old: &ShownTable, new: &ShownTable) {
        for ((Field { key, .. }, old), (_, new)) in
            old.items.iter().zip(&new.items).filter(|((_, old), (_, new))| old != new)
        {
            let outer = self.applied;
            if key.applied != Applied::AtOnce {
                self.applied = key.applied;
            }
            let path = join(&path, key.name);
            match (old, new) {
                (Shown::Table(old), Shown::Table(new)) => self.tables(path, old, new),
                (Shown::Tables(old), Shown::Tables(new)) => self.lists(&path, old, new),
                (Shown::Free(old), Shown::Free(new)) => self.free_tables(&path, old, new),
                (Shown::Nothing, Shown::Table(_)) => self.add(path, Difference::Added),
                (Shown::Table(_), Shown::Nothing) => self.add(path, Difference::Removed),
                (Shown::Secret { .. }, _) | (_, Shown::Secret { .. }) => self.add(path, Difference::Changed),
                _ => self.add(path, Difference::Value { from: value(key, old), to: value(key, new) }),
            }
            self.applied = outer;
        }
    }

    fn lists(&mut self, path: &str, old: &[ShownTable], new: &[ShownTable]) {
        let element = |table: &ShownTable| format!("{path}.{}", segment(table.name()));
        let [before, after] =
            [old, new].map(|list| list.iter().map(|table| (&table.identity, table)).collect::<BTreeMap<_, _>>());
        for table in old {
            match after.get(&table.identity) {
                Some(other) => self.tables(element(table), table, other),
                None => self.add(element(table), Difference::Removed),
            }
        }
        for table in new.iter().filter(|table| !before.contains_key(&table.identity)) {
            self.add(element(table), Difference::Added);
        }
    }

    /// Compares tables of free keys. Values are not shown, because an environment may hold secrets.
    fn free_tables(&mut self, path: &str, old: &[(String, Shown)], new: &[(String, Shown)]) {
        for (name, _) in old.iter().filter(|entry| !new.contains(entry)) {
            let kept = new.iter().any(|(other, _)| other == name);
            self.add(format!("{path}.{name}"), if kept { Difference::Changed } else { Difference::Removed });
        }
        for (name, _) in new.iter().filter(|(name, _)| !old.iter().any(|(other, _)| other == name)) {
            self.add(format!("{path}.{name}"), Difference::Added);
        }
    }
}

fn value(key: &KeySpec, shown: &Shown) -> String {
    match (shown, key.fallback) {
        (Shown::Value(value), _) => value.clone(),
        (_, Fallback::Nothing(meaning)) => meaning.to_owned(),
        _ => "none".to_owned(),
    }
}

/// A name as a segment of a path, without quotes unless `--set` needs them.
fn segment(quoted: &str) -> &str {
    let name = quoted.trim_matches('"');
    if name.is_empty() || name.contains(['.', '[', '=', '\\']) { quoted } else { name }
}
