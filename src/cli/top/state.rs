//! The state of the view: the last samples of the gateway, and the operator's choices.
//!
//! Samples and keys change the state, and the view reads it. The code here is pure. Bound:
//! [`SAMPLES_MAX`] histograms, and the latest sample.

use std::collections::VecDeque;

use serde::Deserialize;

use super::histogram::{Histogram, MEASURES};
use sluice_admin::Status;
use sluice_admin::snapshot::RequestLists;
use sluice_admin::status::{BackendStatus, PoolStatus};
use sluice_gateway::telemetry::{HistoryReport, HistoryRow};

/// Samples whose histograms are kept: the latest, and ten seconds before it.
const SAMPLES_MAX: usize = 11;

#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) status: Status,
    pub(super) histograms: [Histogram; MEASURES.len()],
    /// The last five minutes by class, short prompts first; empty if the gateway does not say.
    pub(super) classes: Vec<HistoryRow>,
    /// The last finished requests, or why they are unknown.
    pub(super) requests: Result<RequestLists, String>,
}

/// The response to `/admin/history`, without the last hour.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Recent {
    pub(super) recent: HistoryReport,
}

impl Sample {
    pub(super) fn of(status: Status, page: &str, recent: Recent, requests: Result<RequestLists, String>) -> Self {
        let mut classes = recent.recent.classes;
        classes.retain(|row| row.class.as_ref().is_some_and(|class| !class.is_empty()));
        classes.sort_by(|one, other| prompt(one).total_cmp(&prompt(other)));
        Self { status, histograms: MEASURES.map(|(_, family)| Histogram::parse(page, family)), classes, requests }
    }
}

/// Mean tokens of the prompts of a class.
pub(super) fn prompt(row: &HistoryRow) -> f64 {
    row.prompt_tokens as f64 / row.completed.max(1) as f64
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Up,
    Down,
    Left,
    Right,
    /// Shows the slowest requests in place of the histogram, or back.
    Slowest,
    Pause,
}

#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub(super) status: Option<Status>,
    pub(super) classes: Vec<HistoryRow>,
    /// See [`Sample`]; `None` before the first sample.
    pub(super) requests: Option<Result<RequestLists, String>>,
    pub(super) shows_slowest: bool,
    histograms: VecDeque<[Histogram; MEASURES.len()]>,
    /// Why the gateway could not be read, and the number of failed attempts.
    pub(super) failure: Option<(String, u32)>,
    pub(super) paused: bool,
    pub(super) selected: usize,
    pub(super) measure: usize,
}

impl State {
    pub(super) fn add(&mut self, sample: Sample) {
        self.failure = None;
        if self.paused {
            return;
        }
        if self.histograms.len() == SAMPLES_MAX {
            self.histograms.pop_front();
        }
        self.histograms.push_back(sample.histograms);
        self.status = Some(sample.status);
        self.classes = sample.classes;
        self.requests = Some(sample.requests);
        self.selected = self.selected.min(self.backends().count().saturating_sub(1));
    }

    pub(super) fn fail(&mut self, why: String) {
        let attempts = self.failure.as_ref().map_or(0, |(_, attempts)| *attempts);
        self.failure = Some((why, attempts + 1));
        // The earlier samples are dropped, because after a gap the histogram would cover more than
        // the shown seconds.
        self.histograms.clear();
    }

    pub(super) fn apply(&mut self, order: Order) {
        let last = self.backends().count().saturating_sub(1);
        match order {
            Order::Up => self.selected = self.selected.saturating_sub(1),
            Order::Down => self.selected = (self.selected + 1).min(last),
            Order::Left => self.measure = (self.measure + MEASURES.len() - 1) % MEASURES.len(),
            Order::Right => self.measure = (self.measure + 1) % MEASURES.len(),
            Order::Slowest => self.shows_slowest = !self.shows_slowest,
            Order::Pause => self.paused = !self.paused,
        }
    }

    pub(super) fn backends(&self) -> impl Iterator<Item = (&PoolStatus, &BackendStatus)> {
        let pools = self.status.iter().flat_map(|status| &status.pools);
        pools.flat_map(|pool| pool.backends.iter().map(move |backend| (pool, backend)))
    }

    /// The histogram of the chosen measure, and the seconds that it covers; `None`: since the
    /// gateway started.
    pub(super) fn histogram(&self) -> Option<(Histogram, Option<usize>)> {
        let latest = &self.histograms.back()?[self.measure];
        Some(match self.histograms.len() {
            1 => (latest.clone(), None),
            samples => (latest.since(&self.histograms[0][self.measure]), Some(samples - 1)),
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use sluice_admin::About;
    use sluice_admin::status::Used;
    use sluice_gateway::telemetry::{Quantiles, RequestView, Tails, WindowStats};

    /// A gateway with `backends` backends in two pools, the last backend ejected, after `requests`
    /// requests.
    pub(in crate::cli::top) fn sample(backends: usize, requests: usize) -> Sample {
        let some = |used, limit| Used { used, limit: Some(limit) };
        let backend = |index: usize| BackendStatus {
            name: format!("gpu{index}"),
            url: format!("http://127.0.0.1:{}", 8000 + index),
            state: if index + 1 == backends { "ejected" } else { "ready" }.to_owned(),
            reason: (index + 1 == backends).then(|| "failed connections, out for 4 s more".to_owned()),
            slots: some(12, 64),
            tokens: some(81_250, 400_000),
            prefill_tokens: some(0, 16_000),
            long_prefills: some(1, 1),
            tpot_ms: Some(6.25),
            ..BackendStatus::default()
        };
        let last_5_minutes = WindowStats {
            requests_per_second: 41.5,
            ttft_ms: Some(Quantiles { p50: 21.4, p99: 1_088.0, count: 2_490 }),
            tpot_ms: Some(Quantiles { p50: 6.2, p99: 11.9, count: 2_400 }),
            attainment: Some(0.987),
            shed: 3,
            ..WindowStats::default()
        };
        let pool = |name: &str, backends: Vec<BackendStatus>| PoolStatus {
            name: name.to_owned(),
            queue: some(3, 512),
            last_5_minutes: last_5_minutes.clone(),
            backends,
            ..PoolStatus::default()
        };
        let (short, long) = ((0..backends / 2).map(backend).collect(), (backends / 2..backends).map(backend).collect());
        let about = About {
            version: "0.1.0".into(),
            uptime_seconds: 5_025.0,
            listen: "127.0.0.1:8080".into(),
            config: Some("sluice.toml".into()),
            ..About::default()
        };
        let family = MEASURES[0].1;
        let page = format!(
            "{family}_bucket{{le=\"0.02\"}} {}\n{family}_bucket{{le=\"0.04\"}} {requests}\n{family}_bucket{{le=\"+Inf\"}} {requests}\n",
            requests / 4
        );
        let slow = RequestView { request_id: "req-1".into(), total_ms: 2_500.0, ..RequestView::default() };
        let requests = RequestLists { kept: 1, slowest: vec![slow], ..RequestLists::default() };
        let row = |class: &str, prompt_tokens: u64| HistoryRow {
            class: Some(class.into()),
            completed: 100,
            shed: 3,
            prompt_tokens,
            ttft_ms: Some(Tails { p50: 21.4, p90: 40.0, p99: 1_088.0 }),
            ..HistoryRow::default()
        };
        let classes = vec![row("long", 900_000), row("", 0), row("short", 20_000)];
        let recent = HistoryReport { classes, covered_seconds: 50.0, ..HistoryReport::default() };
        Sample::of(
            Status { about, pools: vec![pool("short", short), pool("long", long)], ..Status::default() },
            &page,
            Recent { recent },
            Ok(requests),
        )
    }

    #[test]
    fn the_histogram_covers_the_last_ten_seconds() {
        let mut state = State::default();
        assert_eq!(state.histogram(), None);
        state.add(sample(2, 100));
        let (all, seconds) = state.histogram().unwrap();
        assert_eq!((all.count(), seconds), (100.0, None), "the first sample is since the start");
        (1..=30).for_each(|second| state.add(sample(2, 100 + second * 10)));
        let (recent, seconds) = state.histogram().unwrap();
        assert_eq!((recent.count(), seconds), (100.0, Some(10)));
        assert_eq!(state.histograms.len(), SAMPLES_MAX);
    }

    #[test]
    fn a_failure_is_kept_until_the_gateway_responds_and_the_last_status_stays() {
        let mut state = State::default();
        state.add(sample(2, 100));
        state.fail("no response".to_owned());
        state.fail("no response".to_owned());
        assert_eq!(state.failure, Some(("no response".to_owned(), 2)));
        assert!(state.status.is_some() && state.histogram().is_none());
        state.add(sample(2, 100));
        assert_eq!(state.failure, None);
    }

    #[test]
    fn keys_move_within_the_backends_and_measures_and_a_pause_holds_the_numbers() {
        let mut state = State::default();
        state.apply(Order::Down);
        assert_eq!(state.selected, 0, "there is nothing yet");
        state.add(sample(3, 100));
        (0..9).for_each(|_| state.apply(Order::Down));
        assert_eq!(state.selected, 2);
        state.add(sample(2, 100));
        assert_eq!(state.selected, 1, "the backend has gone");
        state.apply(Order::Up);
        state.apply(Order::Up);
        state.apply(Order::Left);
        assert_eq!((state.selected, MEASURES[state.measure].0), (0, "E2EL"));
        state.apply(Order::Right);
        state.apply(Order::Pause);
        state.add(sample(2, 900));
        assert_eq!(state.histogram().map(|(all, _)| all.count()), Some(0.0), "as before the pause");
    }
}
