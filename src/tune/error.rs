//! Why a tuning cannot begin or go on.
//!
//! A setting that does not start or meets no objective is an outcome, not an error. Each text says
//! what to change.

use std::path::PathBuf;

use sluice_bench::BenchError;
use sluice_fleet::{JournalError, PortsError};
use sluice_lab::LabError;
use sluice_lab::error::BadMeasure;

/// Why a tuning cannot begin or go on.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    #[error("{path}: {reason}")]
    File { path: String, reason: String },
    #[error("the condition '{text}': {why}")]
    Condition { text: String, why: String },
    #[error("the bound '{text}': {why}")]
    Bound { text: String, why: String },
    #[error("the dimension '{key}' {why}")]
    Dimension { key: String, why: String },
    #[error("the space is empty: {0}")]
    EmptySpace(String),
    #[error("the space has more than {0} settings; give fewer values or more constraints")]
    TooLarge(usize),
    /// The configured engines cannot be tuned.
    #[error("{0}")]
    Deployment(String),
    /// An engine does not start or stop, but not because of the setting.
    #[error("{0}")]
    Engine(String),
    #[error("an engine ended under load: {0}")]
    Died(String),
    #[error(transparent)]
    Folder(#[from] JournalError),
    #[error(transparent)]
    Ports(#[from] PortsError),
    #[error(transparent)]
    Load(#[from] BenchError),
    /// The goal makes no sense.
    #[error("{0}")]
    Goal(String),
    #[error(
        "the journal {path} cannot be written: {source}; what it holds is intact: make room and run again with --resume"
    )]
    JournalWrite { path: PathBuf, source: std::io::Error },
    #[error("the journal {path}: {reason}")]
    Journal { path: PathBuf, reason: String },
    #[error(transparent)]
    Measure(#[from] BadMeasure),
    #[error(transparent)]
    Lab(#[from] LabError),
}
