//! Failures of an engine to start, become ready or stop, and remarks before a start.
//!
//! `vllm::failure` has the classes, their advice and the diagnosis of logs. This file adds how the
//! process ended, and the phase that the start had reached.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::redact::Redactor;
use sluice_core::vllm::failure::{Diagnosis, Exit, FailureClass, FlagSuggestion, Retryable};
use sluice_core::vllm::logs::StartPhase;

/// A remark on settings that does not prevent a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice(pub String);

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why an engine did not start, become ready, or stop.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{class}: {}{advice}", cause.as_deref().map(|cause| format!("{cause}; ")).unwrap_or_default())]
pub struct EngineFailure {
    /// The class, which decides the advice.
    pub class: FailureClass,
    /// The reason from the log, or an observation of the gateway.
    pub cause: Option<String>,
    /// The remedy for the operator.
    pub advice: String,
    /// A flag value that would work, if the engine named one.
    pub suggestion: Option<FlagSuggestion>,
    /// How the first process of the engine ended.
    pub exit: Option<Exit>,
    /// The phase that the start had reached.
    pub phase: StartPhase,
}

impl EngineFailure {
    /// A failure not diagnosed from a log.
    pub fn new(class: FailureClass, cause: impl Into<String>) -> Self {
        Self::of(Diagnosis::plain(class, Some(cause.into())), None, StartPhase::Launching)
    }

    /// The program in the key `key` is missing: `word`, the first word of the command. `problem`:
    /// such as "no such program".
    pub(crate) fn program_missing(key: &str, word: &str, problem: &str) -> Self {
        let search = if word.contains('/') { "" } else { "; the gateway searches for a name without a slash in PATH" };
        let advice = format!("install the program, or correct {key}{search}");
        Self { advice, ..Self::new(FailureClass::ProgramMissing, format!("{word}: {problem}")) }
    }

    /// A diagnosis, with the exit and the phase of the start.
    pub fn of(diagnosis: Diagnosis, exit: Option<Exit>, phase: StartPhase) -> Self {
        let Diagnosis { class, cause, advice, suggestion } = diagnosis;
        Self { class, cause, advice, suggestion, exit, phase }
    }

    /// Joins failures into one, with the class and the advice of the first. `None` without
    /// failures.
    pub(crate) fn joined(failures: Vec<Self>) -> Option<Self> {
        let mut failures = failures.into_iter();
        let mut first = failures.next()?;
        for next in failures {
            let cause = next.cause.unwrap_or_default();
            let cause = if next.class == first.class { cause } else { format!("{}: {cause}", next.class) };
            first.cause = Some(first.cause.map_or_else(|| cause.clone(), |before| format!("{before}; {cause}")));
        }
        Some(first)
    }

    pub(crate) fn redacted(mut self, redactor: &Redactor) -> Self {
        self.cause = self.cause.map(|cause| redactor.apply(cause).into_owned());
        self
    }

    /// Whether the same settings may succeed later.
    pub fn retry(&self) -> Retryable {
        self.class.retry()
    }
}
