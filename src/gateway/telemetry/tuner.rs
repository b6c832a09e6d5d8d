//! Metrics of the online tuner, read at scrape time from a view that `serve` passes in.
//!
//! The limits that the tuner moves are in the families of backends, as any limit in force. The
//! metrics here show its changes, and whether it may make any.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{MetricFamily, MetricType};

use super::exposition::{describe, family_of};
use super::families;
use super::gauges::{counter_of, gauge};

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

pub(super) struct Tuner<F> {
    view: F,
    descs: Vec<Desc>,
}

impl<F: Fn() -> TunerView + Send + Sync> Tuner<F> {
    pub(super) fn new(view: F) -> Self {
        let all = [families::TUNER_EVENTS, families::TUNER_MODE, families::TUNER_FROZEN, families::TUNER_PROPOSALS];
        Self { view, descs: all.iter().map(describe).collect() }
    }
}

impl<F: Fn() -> TunerView + Send + Sync> Collector for Tuner<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let view = (self.view)();
        let events =
            view.events.iter().map(|(event, count)| counter_of(&families::TUNER_EVENTS, &[event], *count as f64));
        let modes = MODES.map(|mode| gauge(&families::TUNER_MODE, &[mode], f64::from(u8::from(mode == view.mode))));
        let frozen = gauge(&families::TUNER_FROZEN, &[], f64::from(u8::from(view.frozen)));
        let proposals = gauge(&families::TUNER_PROPOSALS, &[], view.proposals as f64);
        let all = [
            family_of(&families::TUNER_EVENTS, MetricType::COUNTER, events.collect()),
            family_of(&families::TUNER_MODE, MetricType::GAUGE, modes.to_vec()),
            family_of(&families::TUNER_FROZEN, MetricType::GAUGE, vec![frozen]),
            family_of(&families::TUNER_PROPOSALS, MetricType::GAUGE, vec![proposals]),
        ];
        all.into_iter().flatten().collect()
    }
}
