//! Planned changes of an engine's settings: what is requested, what is under way, and how it ended.
//!
//! A change goes through drain, stop and start. `S` are the settings, opaque here. Serialized shapes are part of the journal.

use serde::{Deserialize, Serialize};

use super::blocked::RestartBlocked;

/// A planned change that is requested.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ChangeRequest<S> {
    /// Its number; grows.
    pub id: u64,
    /// What is to run.
    pub to: S,
    /// Requests that outlast the drain's deadline are cut, instead of the change being given up.
    pub cut: bool,
    /// It goes on although no other backend can serve the engine's models.
    pub hold: bool,
}

/// A planned change under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Change<S> {
    /// Its number; grows.
    pub id: u64,
    /// What ran before.
    pub from: S,
    /// What is to run.
    pub to: S,
    /// See [`ChangeRequest::cut`].
    pub cut: bool,
    /// See [`ChangeRequest::hold`].
    #[serde(default)]
    pub hold: bool,
    /// Why the new settings were given up, if they were.
    pub failed: Option<String>,
}

/// How a change ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome", content = "why")]
pub enum Outcome {
    /// The new settings serve.
    Done,
    /// Nothing was stopped; the old engine serves.
    Aborted(String),
    /// The new settings did not come up; the old ones serve again.
    RolledBack(String),
    /// Neither came up so far; the good settings are tried again, as after a crash.
    Failed(String),
    /// Neither came up; an operator has to find the cause.
    Held(String),
}

/// The last change and how it ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EndedChange {
    /// Its number.
    pub id: u64,
    /// How it ended.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Settings that were asked for and are not in force.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct TakenBack<S> {
    /// The change that asked for them; 0: it was refused before it began.
    pub id: u64,
    /// What was asked for.
    pub asked: S,
    /// Why it is not in force.
    pub why: String,
}

/// Why a command does not fit the present step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefused {
    /// Not now.
    #[error(transparent)]
    Blocked(#[from] RestartBlocked),
    /// It was taken out of the configuration, or the gateway stops.
    #[error("it is being shut down")]
    ShuttingDown,
}
