//! The client of one request, which implements [`Downstream`] without a socket.
//!
//! It counts token events in the bytes that it receives, as `sluice bench` does, so it measures the
//! gateway from outside. The network between gateway and client has no delay.

use std::future::pending;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http::header::RETRY_AFTER;
use memchr::memmem::Finder;
use tokio::time::{Instant, sleep_until};

use sluice_bench::{Api, Outcome, Record, RequestFailure};
use sluice_gateway::flow::record::{Outcome as GatewayOutcome, Record as GatewayRecord};
use sluice_gateway::flow::{ClientGone, Downstream, ResponseHead};
use sluice_gateway::telemetry::totals::{TotalsTable, TotalsView};
use sluice_online::observe::Observer;

/// Texts that are in each token event and in no other event: one for completions, one for chats.
static TOKEN_EVENTS: LazyLock<[Finder<'static>; 2]> =
    LazyLock::new(|| ["\"text\":\"", "\"delta\":{\"content\":"].map(Finder::new));

#[derive(Debug)]
pub(crate) struct LabClient {
    api: Api,
    sent: Instant,
    leave_after: Option<u32>,
    deadline: Option<Instant>,
    status: Option<StatusCode>,
    retry_after: Option<Duration>,
    events: u32,
    first: Option<Instant>,
    last: Option<Instant>,
    gaps: Vec<f64>,
    finished: bool,
    aborted: bool,
    left: bool,
    timed_out: bool,
}

impl LabClient {
    /// A client that sends its request now. It disconnects after `leave_after` token events, or
    /// gives up after `timeout`. `events`: expected token events.
    pub(crate) fn new(api: Api, leave_after: Option<u32>, timeout: Option<Duration>, events: u32) -> Self {
        let sent = Instant::now();
        Self {
            api,
            sent,
            leave_after,
            deadline: timeout.map(|timeout| sent + timeout),
            status: None,
            retry_after: None,
            events: 0,
            first: None,
            last: None,
            gaps: Vec::with_capacity(events.saturating_sub(1) as usize),
            finished: false,
            aborted: false,
            left: false,
            timed_out: false,
        }
    }

    pub(crate) fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Fills in the client's measurements, and the gateway's pool, backend and queue wait.
    pub(crate) fn complete(self, record: &mut Record, gateway: Option<&GatewayRecord>, output_tokens: u32) {
        let since = |at: Option<Instant>| at.map_or(0.0, |at| (at - self.sent).as_secs_f64());
        let routed = gateway.filter(|gateway| gateway.backend.is_some());
        record.pool = routed.and_then(|gateway| gateway.pool.clone());
        record.backend = routed.and_then(|gateway| gateway.backend.clone());
        record.queue_wait = gateway.map(|gateway| gateway.queue_wait.as_secs_f64());
        let complete = self.finished && !self.aborted && self.status == Some(StatusCode::OK) && self.first.is_some();
        if self.timed_out {
            record.outcome = Outcome::Failed(RequestFailure::Timeout.to_string().into());
        } else if complete && !self.left {
            record.outcome = Outcome::Completed;
            record.output_tokens = Some(u64::from(output_tokens));
            (record.ttft, record.latency) = (since(self.first), since(self.last));
            record.itls = self.gaps;
        } else if self.left {
            record.outcome = Outcome::Left;
        } else {
            record.outcome = Outcome::Failed(reason(self.status, gateway.map(|gateway| gateway.outcome)).into());
        }
    }

    fn count(&mut self, bytes: &[u8]) {
        let kind = usize::from(self.api == Api::Chat);
        let events = TOKEN_EVENTS[kind].find_iter(bytes).count();
        if events == 0 {
            return;
        }
        let now = Instant::now();
        for _ in 0..events {
            match self.last.replace(now) {
                None => self.first = Some(now),
                Some(last) => self.gaps.push((now - last).as_secs_f64()),
            }
        }
        self.events += events as u32;
    }
}

fn reason(status: Option<StatusCode>, outcome: Option<GatewayOutcome>) -> String {
    let status = match status {
        None => "no response".to_owned(),
        Some(StatusCode::OK) => "stream cut".to_owned(),
        Some(status) => format!("status {}", status.as_u16()),
    };
    match outcome {
        Some(outcome) if !outcome.detail().is_empty() => format!("{status} ({} {})", outcome.label(), outcome.detail()),
        Some(outcome) => format!("{status} ({})", outcome.label()),
        None => status,
    }
}

impl Downstream for LabClient {
    async fn head(&mut self, head: ResponseHead) -> Result<(), ClientGone> {
        self.status = Some(head.status);
        let seconds = head.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        self.retry_after = seconds.map(Duration::from_secs);
        Ok(())
    }

    async fn body(&mut self, bytes: Bytes, more: bool) -> Result<(), ClientGone> {
        self.count(&bytes);
        // A client that leaves before the first token leaves at the first bytes. The load
        // generator's client leaves at the latest after 100 ms.
        if self.leave_after.is_some_and(|events| self.events >= events) && !more {
            self.left = true;
            return Err(ClientGone);
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), ClientGone> {
        self.finished = true;
        Ok(())
    }

    fn abort(&mut self) {
        self.aborted = true;
    }

    async fn gone(&mut self) {
        if self.left {
            return;
        }
        match self.deadline {
            Some(at) => sleep_until(at).await,
            None => pending().await,
        }
        self.timed_out = true;
    }
}

/// The gateway's record of the request that ended last. The online tuner gets each record, too.
#[derive(Clone, Debug)]
pub(crate) struct LastRecord {
    last: Arc<parking_lot::Mutex<Option<Box<GatewayRecord>>>>,
    observer: Arc<Observer>,
    totals: Arc<TotalsTable>,
    start: Instant,
}

impl LastRecord {
    pub(crate) fn new(start: Instant) -> Self {
        Self { last: Arc::default(), observer: Arc::default(), totals: Arc::default(), start }
    }

    pub(crate) fn observer(&self) -> &Arc<Observer> {
        &self.observer
    }

    pub(crate) fn totals(&self) -> TotalsView {
        self.totals.view()
    }

    /// Takes the record, right after the caller's own request has ended.
    pub(crate) fn take(&self) -> Option<Box<GatewayRecord>> {
        self.last.lock().take()
    }
}

impl sluice_gateway::flow::Recorder for LastRecord {
    fn record(&self, record: &GatewayRecord) {
        self.observer.record(record, self.start.elapsed());
        self.totals.count(record);
        *self.last.lock() = Some(Box::new(record.clone()));
    }
}

/// Seconds from the start of the run, the unit of records.
pub(crate) fn seconds(at: Duration) -> f64 {
    at.as_secs_f64()
}
