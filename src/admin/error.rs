//! Why an operation of the admin API is refused.
//!
//! Operators read these messages unchanged, so each names the problem and, unless it is obvious,
//! the remedy.

use sluice_fleet::{LogError, RestartError};

/// Why a reload failed and changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReloadError {
    /// The new configuration is not valid.
    #[error("the configuration has problems; nothing was changed")]
    Problems(Vec<String>),
    /// The gateway was started without a file.
    #[error("the gateway was started from flags, so there is no file to reload; start it with sluice serve FILE")]
    NoFile,
}

/// Why a restart of an engine is refused.
#[derive(Debug, thiserror::Error)]
pub enum BackendRestartError {
    /// There is no such backend.
    #[error(transparent)]
    Unknown(#[from] NoSuchBackend),
    /// The engine cannot be restarted now.
    #[error(transparent)]
    Cannot(#[from] RestartError),
}

/// Why there is no log of a backend's engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendLogError {
    /// There is no such backend.
    #[error(transparent)]
    Unknown(#[from] NoSuchBackend),
    /// The gateway has no log of the engine.
    #[error(transparent)]
    Cannot(#[from] LogError),
}

/// There is no such backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSuchBackend {
    /// No pool has that name.
    #[error("there is no pool '{pool}'; pools are: {known}")]
    Pool {
        /// The requested name.
        pool: String,
        /// The names that exist.
        known: String,
    },
    /// No backend of the pool has that name.
    #[error("there is no backend '{backend}' in pool '{pool}'; its backends are: {known}")]
    Backend {
        /// The pool's name.
        pool: String,
        /// The requested name.
        backend: String,
        /// The names that exist.
        known: String,
    },
}
