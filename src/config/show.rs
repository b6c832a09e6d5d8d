//! A resolved configuration as TOML: every key with its value, and the value's origin as a comment.
//!
//! `sluice check` prints this page. It can be used as a file: reading it gives the same
//! configuration again (except plain-text secrets, which are masked). Paths are shown as resolved.
//! Keys without a value, except tables, are shown as comments, so that an operator sees that they
//! exist.

use std::fmt::{self, Display};

use super::key::{Fallback, Field, Shape};
use super::origin::Origins;
use super::root::Config;
use super::setting::{Shown, ShownTable, bare, join};

/// Column at which the comments begin, if the line is short enough.
const COMMENT_COLUMN: usize = 48;

/// A configuration that prints itself as TOML.
pub struct Resolved<'c> {
    /// The configuration to print.
    pub config: &'c Config,
    /// The origin of each value; `None`: print no comments.
    pub origins: Option<&'c Origins>,
}

impl Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Resolved { config: self, origins: None }.fmt(f)
    }
}

impl Display for Resolved<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut page = Page { f, origins: self.origins, separator: "" };
        page.keys(&self.config.shown(), "", "")
    }
}

struct Page<'p, 'f> {
    f: &'p mut fmt::Formatter<'f>,
    origins: Option<&'p Origins>,
    separator: &'static str,
}

impl Page<'_, '_> {
    /// The keys of a table: first the values, then the tables. `header` is the name of the table in
    /// TOML, `path` its path with positions.
    fn keys(&mut self, table: &ShownTable, header: &str, path: &str) -> fmt::Result {
        for (field, shown) in &table.items {
            match shown {
                Shown::Value(value) | Shown::Secret { shown: value, .. } => self.value(field.key.name, value, path)?,
                Shown::Nothing => self.nothing(field)?,
                Shown::Table(_) | Shown::Tables(_) | Shown::Free(_) => {}
            }
        }
        for (field, shown) in &table.items {
            let below = |parent: &str| join(parent, field.key.name);
            let (header, path) = (below(header), below(path));
            match shown {
                Shown::Table(table) => {
                    self.header(format_args!("[{header}]"))?;
                    self.keys(table, &header, &path)?;
                }
                Shown::Tables(tables) => {
                    for (index, table) in tables.iter().enumerate() {
                        self.header(format_args!("[[{header}]]"))?;
                        self.keys(table, &header, &format!("{path}[{index}]"))?;
                    }
                }
                Shown::Free(values) if !values.is_empty() => {
                    self.header(format_args!("[{header}]"))?;
                    values.iter().try_for_each(|(name, shown)| match shown {
                        Shown::Value(value) | Shown::Secret { shown: value, .. } => self.value(name, value, &path),
                        _ => Ok(()),
                    })?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn header(&mut self, header: fmt::Arguments<'_>) -> fmt::Result {
        let separator = std::mem::replace(&mut self.separator, "\n");
        writeln!(self.f, "{separator}{header}")
    }

    fn value(&mut self, key: &str, value: &str, path: &str) -> fmt::Result {
        let line = format!("{} = {value}", bare(key));
        let Some(origins) = self.origins else { return writeln!(self.f, "{line}") };
        writeln!(self.f, "{line:COMMENT_COLUMN$} # {}", origins.of(&format!("{path}.{key}")))
    }

    fn nothing(&mut self, field: &Field) -> fmt::Result {
        match (field.key.fallback, field.shape) {
            (_, Shape::Table(_)) => Ok(()),
            (Fallback::Nothing(meaning), _) if self.origins.is_some() => {
                writeln!(self.f, "# {}: {meaning}", field.key.name)
            }
            _ => Ok(()),
        }
    }
}
