//! The origin of a value: a default, a line of the file, `--set`, the command line, or the admin
//! API.
//!
//! Reading notes one origin per key, also for absent keys. So `sluice check` can print each value's
//! origin, and a problem can point at the place that caused it. Paths are written as in problems:
//! `pool[0].queue.length`.

use std::collections::BTreeMap;
use std::fmt;

/// The origin of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The default of the key.
    #[default]
    Default,
    /// The configuration file.
    File {
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
    },
    /// The `--set` with this number on the command line, counted from 1.
    Set(usize),
    /// Another flag, such as `--backend`.
    Flag,
    /// The admin API.
    Api,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { line, .. } => write!(f, "line {line}"),
            Self::Set(_) => f.write_str("--set"),
            Self::Flag => f.write_str("command line"),
            Self::Api => f.write_str("admin API"),
        }
    }
}

/// The origin of every key of a configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Origins(BTreeMap<String, Origin>);

impl Origins {
    /// The origin of the value at `path`; a default if none was noted.
    pub fn of(&self, path: &str) -> Origin {
        self.0.get(path).copied().unwrap_or_default()
    }

    /// The origin of a table: the origin of the first key in it that was written.
    pub(super) fn nearest(&self, path: &str) -> Origin {
        let below =
            |key: &str| key.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
        let keys = self.0.range(path.to_owned()..).take_while(|(key, _)| key.starts_with(path));
        let written = keys.filter(|(key, origin)| below(key) && **origin != Origin::Default);
        written.map(|(_, origin)| *origin).min().unwrap_or_default()
    }

    pub(super) fn note(&mut self, path: String, origin: Origin) {
        self.0.insert(path, origin);
    }
}
