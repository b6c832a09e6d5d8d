//! What a driver reports when an engine did not start, become ready or stop, and what it warns of before a start.
//!
//! The classes, their advice and the diagnosis of logs are `vllm::failure`'s; this file adds how the process ended and how
//! far its start had got.

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
    /// The line of the log that gives the reason, or what was observed.
    pub cause: Option<String>,
    /// What the operator can do.
    pub advice: String,
    /// A flag value that would work, when the engine named one.
    pub suggestion: Option<FlagSuggestion>,
    /// How the engine's first process ended, if it did.
    pub exit: Option<Exit>,
    /// The phase that the start had reached.
    pub phase: StartPhase,
}

impl EngineFailure {
    /// A failure that is not diagnosed from a log.
    pub fn new(class: FailureClass, cause: impl Into<String>) -> Self {
        Self::of(Diagnosis::plain(class, Some(cause.into())), None, StartPhase::Launching)
    }

    /// A diagnosis with the exit and the phase of the start.
    pub fn of(diagnosis: Diagnosis, exit: Option<Exit>, phase: StartPhase) -> Self {
        let Diagnosis { class, cause, advice, suggestion } = diagnosis;
        Self { class, cause, advice, suggestion, exit, phase }
    }

    /// Several failures as one, in the class and with the advice of the first; `None` without any.
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

    /// Without the secrets of its engine.
    pub(crate) fn redacted(mut self, redactor: &Redactor) -> Self {
        self.cause = self.cause.map(|cause| redactor.apply(cause).into_owned());
        self
    }

    /// Whether the same settings may succeed later.
    pub fn retry(&self) -> Retryable {
        self.class.retry()
    }
}
