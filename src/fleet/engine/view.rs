//! One engine as shown in the admin API, in `sluice backend list` and in `sluice status`.
//!
//! Built for each request to the admin API, and not stored. Fields may be added, but not removed.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::context::{EngineContext, now_ms};
use super::journal::Setup;
use super::lifecycle::{EndedChange, Lifecycle, Outcome};
use crate::driver::EngineSettings;
use sluice_config::ArgValue;

/// The state of an engine for operators.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineView {
    /// `pool/backend`.
    pub backend: String,
    /// The driver: process, command, kubernetes.
    pub driver: String,
    /// The step of the life cycle.
    pub step: String,
    /// Seconds since the step began.
    pub seconds: f64,
    /// Progress of the step.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// Flags, as `name=value` separated by spaces.
    pub settings: String,
    /// The last good flags, if they differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_good: Option<String>,
    /// Flags of the old engine that is kept asleep for a return to them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
    /// Number of the planned change under way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<u64>,
    /// How the last change ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_change: Option<LastChange>,
    /// Requested flags that are not in force, and why: `max-num-seqs: 256 in force, 64 asked: it
    /// hangs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taken_back: Option<String>,
    /// Why the new configuration is not applied yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// Unplanned restarts within `fleet.restart_window`.
    pub restarts: usize,
    /// Starts after this gateway's first, planned or not.
    pub restarts_total: u64,
    /// How often the engine died, hung or did not come up.
    pub crashes_total: u64,
    /// When the running engine was started, seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started: Option<f64>,
    /// Duration of the last start, until the engine was in rotation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_seconds: Option<f64>,
    /// How often the engine woke from sleep.
    pub wakes_total: u64,
    /// Duration of the last wake.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_seconds: Option<f64>,
    /// The last failure, while it is relevant, or a remark of the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// How a change ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastChange {
    /// Number of the change.
    pub id: u64,
    /// `done`, `aborted`, `rolled_back`, `failed` or `held`.
    pub outcome: String,
    /// Why the outcome is not `done`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl From<&EndedChange> for LastChange {
    fn from(ended: &EndedChange) -> Self {
        let (outcome, why) = match &ended.outcome {
            Outcome::Done => ("done", None),
            Outcome::Aborted(why) => ("aborted", Some(why.clone())),
            Outcome::RolledBack(why) => ("rolled_back", Some(why.clone())),
            Outcome::Failed(why) => ("failed", Some(why.clone())),
            Outcome::Held(why) => ("held", Some(why.clone())),
        };
        Self { id: ended.id, outcome: outcome.to_owned(), why }
    }
}

pub(crate) fn of(context: &EngineContext) -> EngineView {
    let spec = context.spec();
    let state = context.state.lock();
    let life = &state.lifecycle;
    EngineView {
        backend: spec.name.to_string(),
        driver: context.driver().kind().label().to_owned(),
        step: life.step.label().to_owned(),
        seconds: state.since.elapsed().as_secs_f64(),
        detail: state.detail.clone(),
        settings: flag_line(&life.wanted.settings),
        last_good: (life.good.settings != life.wanted.settings).then(|| flag_line(&life.good.settings)),
        kept: life.kept.as_ref().map(|kept| flag_line(&kept.setup.settings)),
        change: life.change.as_ref().map(|change| change.id),
        last_change: life.ended.as_ref().map(LastChange::from),
        taken_back: taken_back(life, &spec.configured),
        waits: life.blocked.as_ref().map(ToString::to_string),
        restarts: life.restarts_within(&spec.restart_rules(), now_ms()),
        restarts_total: state.history.restarts,
        crashes_total: state.history.crashes,
        started: state.history.started,
        start_seconds: state.start_took.map(|took| took.as_secs_f64()),
        wakes_total: state.history.wakes,
        wake_seconds: state.wake_took.map(|took| took.as_secs_f64()),
        why: life.why.clone().or_else(|| context.driver().remark()),
    }
}

/// A text about requested flags that are not in force. Requests under an earlier configuration do
/// not count.
pub(crate) fn taken_back(life: &Lifecycle<Setup>, configured: &str) -> Option<String> {
    let taken_back = life.taken_back.as_ref().filter(|taken_back| taken_back.asked.configured == configured)?;
    let (asked, in_force) = (&taken_back.asked.settings.args, &life.wanted.settings.args);
    let names: BTreeSet<&String> = asked.keys().chain(in_force.keys()).collect();
    let shown = |value: Option<&ArgValue>| value.map_or_else(|| "no value".to_owned(), value_text);
    let differ = names.into_iter().filter(|name| asked.get(*name) != in_force.get(*name));
    let lines =
        differ.map(|name| format!("{name}: {} in force, {} asked", shown(in_force.get(name)), shown(asked.get(name))));
    let lines: Vec<String> = lines.collect();
    (!lines.is_empty()).then(|| format!("{}: {}", lines.join(", "), taken_back.why))
}

/// Flags on one line: `name=value`, separated by spaces.
pub(crate) fn flag_line(settings: &EngineSettings) -> String {
    let flags: Vec<String> =
        settings.args.iter().map(|(name, value)| format!("{name}={}", value_text(value))).collect();
    flags.join(" ")
}

fn value_text(value: &ArgValue) -> String {
    match serde_json::to_string(value) {
        Ok(text) => text.trim_matches('"').to_owned(),
        Err(_) => "?".to_owned(),
    }
}
