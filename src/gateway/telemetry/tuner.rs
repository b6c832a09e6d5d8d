//! Metrics of the online tuner, read at scrape time from a view that `serve` passes in.
//!
//! The limits that the tuner moves are in the families of backends. The metrics here show the
//! tuner's changes, and whether it may make any.

use super::exposition::Page;
use super::families::{self, Family};

/// The state of the tuner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TunerView {
    /// `off`, `advise`, `approve` or `apply`.
    pub mode: String,
    /// Whether the tuner makes no changes whatever its mode.
    pub frozen: bool,
    /// Changes that the tuner proposes now.
    pub proposals: usize,
    /// Events by kind, with counts.
    pub events: Vec<(&'static str, u64)>,
}

/// All modes, one of which is in force.
const MODES: [&str; 4] = ["off", "advise", "approve", "apply"];

pub(super) const FAMILIES: [Family; 4] =
    [families::TUNER_EVENTS, families::TUNER_MODE, families::TUNER_FROZEN, families::TUNER_PROPOSALS];

pub(super) fn add(view: &TunerView, page: &mut Page) {
    for (event, count) in &view.events {
        page.add(&families::TUNER_EVENTS, &[event], *count as f64);
    }
    page.add_states(&families::TUNER_MODE, &[], MODES, &view.mode);
    page.add(&families::TUNER_FROZEN, &[], f64::from(u8::from(view.frozen)));
    page.add(&families::TUNER_PROPOSALS, &[], view.proposals as f64);
}
