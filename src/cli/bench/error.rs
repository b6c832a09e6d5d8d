//! Why a command of `sluice bench` ended without a result, and the exit code for it.
//!
//! Wrong flags and datasets exit with 2, failures of servers and of the system with 1. A complete
//! result is no error, even if the server did badly.

/// Why a command ended early.
pub(super) enum CommandError {
    /// Wrong flags, or a dataset that cannot be read: exit code 2.
    Usage(anyhow::Error),
    /// A failure of a server or of the system: exit code 1.
    Failed(anyhow::Error),
}

pub(super) fn usage(error: impl Into<anyhow::Error>) -> CommandError {
    CommandError::Usage(error.into())
}

pub(super) fn failed(error: impl Into<anyhow::Error>) -> CommandError {
    CommandError::Failed(error.into())
}
