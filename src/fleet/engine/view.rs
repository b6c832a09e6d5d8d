//! One engine as it is shown: in the admin API, in `sluice backend list` and in `sluice status`.
//!
//! Read when somebody looks and kept nowhere else. Fields are only ever added.

use serde::{Deserialize, Serialize};

use super::context::{EngineContext, now_ms};
use super::engine_task::shown;
use super::lifecycle::{Ended, Outcome};

/// An engine that the gateway runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineView {
    /// `pool/backend`.
    pub backend: String,
    /// Who runs it: process, command.
    pub driver: String,
    /// The step of its life.
    pub step: String,
    /// Since the step began.
    pub seconds: f64,
    /// How far the step is.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// Its flags, `name=value` with spaces between.
    pub settings: String,
    /// The last that were good, where they differ from those.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_good: Option<String>,
    /// The planned change under way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<u64>,
    /// How the last change ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_change: Option<LastChange>,
    /// What the configuration asks for and why it is not done yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// Restarts that nobody asked for, within fleet.restart_window.
    pub restarts: usize,
    /// What went wrong last, while it still matters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// How a change ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastChange {
    /// Which.
    pub id: u64,
    /// done, aborted, rolled_back, failed or held.
    pub outcome: String,
    /// Why it is not done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl From<&Ended> for LastChange {
    fn from(ended: &Ended) -> Self {
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
    let spec = context.spec.load_full();
    let state = context.state.lock();
    let life = &state.life;
    EngineView {
        backend: spec.name.to_string(),
        driver: context.driver.kind().label().to_owned(),
        step: life.step.label().to_owned(),
        seconds: state.since.elapsed().as_secs_f64(),
        detail: state.detail.clone(),
        settings: shown(&life.wanted.settings),
        last_good: (life.good.settings != life.wanted.settings).then(|| shown(&life.good.settings)),
        change: life.change.as_ref().map(|change| change.id),
        last_change: life.ended.as_ref().map(LastChange::from),
        waits: state.waits.clone(),
        restarts: life.restarts_within(&spec.life_rules(), now_ms()),
        why: life.why.clone(),
    }
}
