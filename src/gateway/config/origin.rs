//! Where a value came from: a default, a line of the file, `--set`, or the command line.
//!
//! The reader notes one origin per key it asks for, also for keys that nobody wrote, so the table is
//! complete: `sluice check` can print every setting with who decided it, and a problem can point at
//! the place that caused it. Paths are written as in problems: `pool[0].queue.length`.

use std::collections::BTreeMap;
use std::fmt;

/// Who decided a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// Nobody: `defaults.rs`.
    #[default]
    Default,
    /// The configuration file.
    File {
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
    },
    /// `--set` on the command line, the how-manieth from 1.
    Set(usize),
    /// Another flag, such as `--backend`.
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { line, .. } => write!(f, "line {line}"),
            Self::Set(_) => f.write_str("--set"),
            Self::Flag => f.write_str("command line"),
        }
    }
}

/// The origin of every key of a configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Origins(BTreeMap<String, Origin>);

impl Origins {
    /// Who decided the value at `path`; a default where nothing was noted.
    pub fn of(&self, path: &str) -> Origin {
        self.0.get(path).copied().unwrap_or_default()
    }

    /// All keys that were asked for, with who decided them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Origin)> {
        self.0.iter().map(|(path, origin)| (path.as_str(), *origin))
    }

    pub(super) fn note(&mut self, path: String, origin: Origin) {
        self.0.insert(path, origin);
    }
}
