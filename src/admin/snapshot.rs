//! What the live page is sent: the state of the gateway every second, and what changes slowly less often.
//!
//! | event | every | what |
//! |---|---|---|
//! | `status` | second | `/admin/status`, with the time |
//! | `report` | [`REPORT_TURNS`] s | the last five minutes by class and pool, failures, slowest requests, models, experiments, the tuner |
//! | `hour` | [`HOUR_TURNS`] s | the last hour by class and pool |
//!
//! Each is a JSON object. All are made once, whatever the number of listeners, and an event of a kind replaces the one before.
//!
//! Bounds: as many backends, pools, models and experiments as the configuration has; the rest has bounds of its own. With 200
//! backends in ten pools a `status` has about 100 KiB (see the test below).

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::control::Control;
use super::status::{ModelStatus, Status};
use crate::experiment::ExperimentReport;
use crate::online::TunerReport;
use crate::telemetry::{HistoryReport, RequestView, Resolution};

/// Seconds between two events `report`.
pub(super) const REPORT_TURNS: u64 = 2;
/// Seconds between two events `hour`.
pub(super) const HOUR_TURNS: u64 = 15;
/// Requests in each list of a `report`.
pub(super) const LISTED: usize = 20;

/// The event `report`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The last five minutes.
    pub recent: HistoryReport,
    /// The last requests that were shed or failed.
    pub requests: RequestLists,
    /// What clients may ask for.
    pub models: Vec<ModelStatus>,
    /// Experiments, without quantiles and history.
    pub experiments: Vec<ExperimentReport>,
    /// The tuner.
    pub tuner: TunerReport,
}

/// The response to `/admin/requests`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RequestLists {
    /// How many finished requests can be looked up.
    pub kept: usize,
    /// When the oldest of them was over.
    pub since: Option<String>,
    /// The last that were shed or failed, the latest first.
    pub failures: Vec<RequestView>,
    /// The slowest of those that are kept.
    pub slowest: Vec<RequestView>,
}

impl RequestLists {
    /// The lists now.
    pub(super) fn of(control: &dyn Control) -> Self {
        let telemetry = control.telemetry();
        let (kept, since) = telemetry.finished();
        Self {
            kept,
            since: since.map(|time| format!("{time:.3}")),
            failures: telemetry.failures(LISTED),
            slowest: telemetry.slowest(LISTED),
        }
    }
}

/// The latest event of each kind, as it is sent, with the turn in which it was made. A clone shares the bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Frames {
    pub(super) events: [(u64, Bytes); 3],
}

impl Frames {
    /// The events after this turn, the first of which is 1; those that are not due stay.
    pub(super) fn next(mut self, control: &dyn Control, turn: u64) -> Self {
        let [status, report, hour] = &mut self.events;
        let due = |every: u64| (turn - 1).is_multiple_of(every);
        *status = (turn, status_event(control));
        if due(REPORT_TURNS) {
            *report = (turn, report_event(control));
        }
        if due(HOUR_TURNS) {
            *hour = (turn, event("hour", &control.telemetry().history(Resolution::Coarse)));
        }
        self
    }
}

fn status_event(control: &dyn Control) -> Bytes {
    #[derive(Serialize)]
    struct Timed {
        time: String,
        #[serde(flatten)]
        status: Status,
    }
    event("status", &Timed { time: format!("{:.3}", Timestamp::now()), status: control.status() })
}

fn report_event(control: &dyn Control) -> Bytes {
    let report = Report {
        recent: control.telemetry().history(Resolution::Fine),
        requests: RequestLists::of(control),
        models: control.models(),
        experiments: control.experiments(),
        tuner: control.tuner(),
    };
    event("report", &report)
}

/// An event of an event stream. JSON has no line feeds, so it is one line.
fn event(name: &str, data: &impl Serialize) -> Bytes {
    // Cannot fail: all keys are strings.
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n").into()
}
