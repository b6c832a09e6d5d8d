//! The configuration file that a subcommand reads: `FILE`, `--config FILE`, or else
//! `./sluice.toml`.
//!
//! With the same words, `check` checks the file that `serve` uses.

use std::path::{Path, PathBuf};

const DEFAULT_FILE: &str = "sluice.toml";

/// The flags that name the configuration file.
#[derive(Clone, Debug, clap::Args)]
#[group(id = "the file", multiple = false)]
pub(super) struct ConfigFile {
    /// The configuration file [default: ./sluice.toml, if it exists]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Same as FILE
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
#[error("there is no ./{DEFAULT_FILE}; name a configuration file{instead} (--help says more)")]
pub(super) struct NoFile {
    pub(super) instead: &'static str,
}

impl ConfigFile {
    /// The file; `None` if none is named and there is no default file.
    pub(super) fn path(&self) -> Option<PathBuf> {
        let named = self.file.clone().or_else(|| self.config.clone());
        named.or_else(|| Some(PathBuf::from(DEFAULT_FILE)).filter(|path| Path::is_file(path)))
    }
}
