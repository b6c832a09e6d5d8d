//! Why a tuning cannot begin or go on.
//!
//! A setting that does not start or meets no objective is an outcome and not an error. Each text
//! says what to change.

use std::path::PathBuf;

use sluice_bench::BenchError;
use sluice_fleet::{JournalError, PortsError};
use sluice_lab::LabError;
use sluice_lab::error::BadMeasure;

/// Why a tuning cannot begin or go on.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// A file cannot be read or understood.
    #[error("{path}: {reason}")]
    File {
        /// The path.
        path: String,
        /// The mistake.
        reason: String,
    },
    /// A condition cannot be read.
    #[error("the condition '{text}': {why}")]
    Condition {
        /// The text of the condition.
        text: String,
        /// The mistake.
        why: String,
    },
    /// A dimension makes no sense.
    #[error("the dimension '{key}' {why}")]
    Dimension {
        /// The key of the dimension.
        key: String,
        /// The mistake.
        why: String,
    },
    /// No setting is left.
    #[error("the space is empty: {0}")]
    EmptySpace(String),
    /// Too many settings.
    #[error("the space has more than {0} settings; give fewer values or more constraints")]
    TooLarge(usize),
    /// The configured engines cannot be tuned.
    #[error("{0}")]
    Deployment(String),
    /// An engine does not start or stop, but not because of the setting.
    #[error("{0}")]
    Engine(String),
    /// An engine ended under load.
    #[error("an engine ended under load: {0}")]
    Died(String),
    /// The engines' folder cannot be used.
    #[error(transparent)]
    Folder(#[from] JournalError),
    /// An engine has no port.
    #[error(transparent)]
    Ports(#[from] PortsError),
    /// The load cannot be sent.
    #[error(transparent)]
    Load(#[from] BenchError),
    /// The goal makes no sense.
    #[error("{0}")]
    Goal(String),
    /// The journal cannot be written.
    #[error(
        "the journal {path} cannot be written: {source}; what it holds is intact: make room and run again with --resume"
    )]
    JournalWrite {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The journal cannot be used.
    #[error("the journal {path}: {reason}")]
    Journal {
        /// The path.
        path: PathBuf,
        /// The reason, and the remedy.
        reason: String,
    },
    /// A measure has an unknown name.
    #[error(transparent)]
    Measure(#[from] BadMeasure),
    /// The laboratory fails.
    #[error(transparent)]
    Lab(#[from] LabError),
}
