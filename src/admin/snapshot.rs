//! The events of the live page: the state of the gateway every second, and slower changes less
//! often.
//!
//! | event | seconds | content |
//! |---|---|---|
//! | `status` | 1 | `/admin/status`, with the time |
//! | `report` | [`REPORT_TURNS`] | a [`Report`] |
//! | `minute` | [`MINUTE_TURNS`] | the last minute by engine and key, as `/admin/findings` has it |
//! | `hour` | [`HOUR_TURNS`] | the last hour by class and pool |
//!
//! Each event is a JSON object that replaces the previous one of its kind. It is made once for all
//! listeners.
//!
//! Bounds: the backends, pools, models and experiments of the configuration. With 200 backends in
//! ten pools, a `status` has about 100 KiB (`event_tests.rs`).

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::control::Control;
use super::status::{ModelStatus, Status};
use sluice_gateway::experiment::ExperimentReport;
use sluice_gateway::telemetry::{HistoryReport, RequestView, Resolution};
use sluice_online::tuner::report::TunerReport;

/// Seconds between `report` events.
pub(super) const REPORT_TURNS: u64 = 2;
/// Seconds between `minute` events.
pub(super) const MINUTE_TURNS: u64 = 5;
/// Seconds between `hour` events.
pub(super) const HOUR_TURNS: u64 = 15;
/// Most requests in each list.
pub(super) const LISTED: usize = 20;

/// The event `report`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The last five minutes by class and pool.
    pub recent: HistoryReport,
    /// Failures and slowest requests.
    pub requests: RequestLists,
    /// The models that clients may ask for.
    pub models: Vec<ModelStatus>,
    /// Experiments, without quantiles and history.
    pub experiments: Vec<ExperimentReport>,
    /// The online tuner.
    pub tuner: TunerReport,
}

/// The response to `/admin/requests`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RequestLists {
    /// Number of finished requests that can be looked up.
    pub kept: usize,
    /// When the oldest of these requests was over.
    pub since: Option<String>,
    /// The last requests that were shed or failed, latest first.
    pub failures: Vec<RequestView>,
    /// The slowest generating requests that are kept, slowest first.
    pub slowest: Vec<RequestView>,
}

impl RequestLists {
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

pub(super) const KINDS: usize = 4;

/// The latest event of each kind as shared bytes, with the turn in which it was made.
#[derive(Clone, Debug, Default)]
pub(super) struct Frames {
    pub(super) events: [(u64, Bytes); KINDS],
}

impl Frames {
    /// The events after turn number `turn`, which counts from 1. Events that are not due stay as
    /// they were.
    pub(super) fn next(mut self, control: &dyn Control, turn: u64) -> Self {
        let [status, report, minute, hour] = &mut self.events;
        let due = |every: u64| (turn - 1).is_multiple_of(every);
        *status = (turn, status_event(control));
        if due(REPORT_TURNS) {
            *report = (turn, report_event(control));
        }
        if due(MINUTE_TURNS) {
            *minute = (turn, event("minute", &control.diagnosis().for_page()));
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

/// The text of an event. JSON has no line feeds, so the data is one line.
fn event(name: &str, data: &impl Serialize) -> Bytes {
    // This cannot fail, because all keys are strings.
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n").into()
}
