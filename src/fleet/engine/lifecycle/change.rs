//! Planned changes of an engine's settings: requested, under way, ended.
//!
//! A change goes through drain, stop and start. `S` are the settings, opaque here. The serialized
//! shapes are part of the journal.

use serde::{Deserialize, Serialize};

use super::blocked::RestartBlocked;

/// How long an old engine is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Keep {
    /// Until the new settings have settled.
    Settling,
    /// Until they have settled, and the tuner has ended the change.
    Trial,
}

/// An engine that sleeps next to the present one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Kept<S> {
    /// The settings that it runs with.
    pub(crate) setup: S,
    pub(crate) keep: Keep,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ChangeRequest<S> {
    /// Number of the change; grows.
    pub id: u64,
    /// The new settings.
    pub to: S,
    /// Cut requests that outlast the drain, instead of giving the change up.
    pub cut: bool,
    /// Continue even if no other backend can serve the engine's models.
    pub hold: bool,
    /// Keep the old engine asleep for this long, if both engines fit.
    pub keep: Option<Keep>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Change<S> {
    /// Number of the change; grows.
    pub id: u64,
    /// The settings before the change.
    pub from: S,
    /// The new settings.
    pub to: S,
    /// See [`ChangeRequest::cut`].
    pub cut: bool,
    /// See [`ChangeRequest::hold`].
    #[serde(default)]
    pub hold: bool,
    /// See [`ChangeRequest::keep`].
    #[serde(default)]
    pub keep: Option<Keep>,
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
    /// The new settings did not work; the old ones are back.
    RolledBack(String),
    /// Neither new nor old settings worked so far. The good settings are retried, as after a crash.
    Failed(String),
    /// Neither worked, and no retry is left. An operator must find the cause.
    Held(String),
}

/// The last change that ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EndedChange {
    /// Number of the change.
    pub id: u64,
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Requested settings that are not in force.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct TakenBack<S> {
    /// The change that requested them; 0 if it was refused before it began.
    pub id: u64,
    /// The requested settings.
    pub asked: S,
    /// Why they are not in force.
    pub why: String,
}

/// Why a command is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefused {
    /// The command does not fit the present step.
    #[error(transparent)]
    Blocked(#[from] RestartBlocked),
    /// The engine left the configuration, or the gateway stops.
    #[error("it is being shut down")]
    ShuttingDown,
}
