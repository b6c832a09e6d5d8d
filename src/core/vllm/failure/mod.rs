//! Why an engine failed: a class, the line of the log that shows it, and advice for the operator.
//!
//! [`diagnose`] reads the last lines of a log. [`FailureClass`] says whether the same settings may
//! succeed later, and what to change. Nothing here reads a clock or a file.

mod advice;
mod class;
mod diagnose;
mod fold;
mod suggestion;

pub use class::{FailureClass, Retryable};
pub use diagnose::{CAUSE_MAX, CORE_DIED, Diagnosis, Exit, LOG, LogRules, diagnose, diagnose_by};
pub use suggestion::FlagSuggestion;

#[cfg(test)]
mod tests;
