//! Why a command of `sluice bench` ended without a result, and the exit code: 2 for wrong flags and
//! datasets, 1 for failures of servers and of the system.
//!
//! A complete result is no error, even if the server did badly.

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
