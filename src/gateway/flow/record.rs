//! The record of a finished request: exactly one for each request, however it ended.
//!
//! A [`RecordGuard`] is created when the request has been received. When dropped, it hands the
//! record to the [`Recorder`], so a request whose task is cancelled is recorded too. The initial
//! outcome is `client_gone`, because a task is dropped before it sets another outcome only when the
//! client leaves.
//!
//! Plain data: the request path measures durations. Labels come from the configuration and from
//! backends, never from clients. Prompts and responses never enter a record. The path or the model
//! name of a refused request does, within a bound.

mod guard;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use smallvec::SmallVec;

use super::trace::RequestTrace;
use crate::estimate::PromptEstimate;
use crate::experiment::{Assigned, CopyOutcome, Ending, Observation};
use crate::origin::Origin;
use sluice_core::meter::StreamStats;
use sluice_core::openai::{EngineTimes, NotContinued, PromptPrefix, Route, ShedReason};

pub use guard::RecordGuard;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The client received the whole response.
    Completed,
    /// The client left: while queued, before the first token, or while streaming.
    ClientGone,
    /// Refused early, because there was no capacity.
    Shed(ShedReason),
    /// A backend failed and no other could take the request.
    UpstreamError(UpstreamFault),
    /// A stage took too long.
    Timeout(Stage),
    /// The client's fault: a bad request, a wrong key, or a 4xx of the engine.
    Refused,
}

/// How a backend failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UpstreamFault {
    /// No connection.
    Connect,
    /// The connection broke before the response was complete.
    Broken,
    /// A status other than 2xx and 4xx, usually 5xx.
    Status,
    /// An error event inside the stream.
    InStream,
    /// The backend was found hung, and all streams were aborted.
    Hung,
    /// The backend refuses the gateway's credentials.
    Credentials,
}

/// The stage that took too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Sending the request: the backend stopped reading.
    Send,
    /// The first token of a stream, or the first byte of another response.
    FirstByte,
    /// The next byte of a response that had begun.
    Idle,
    /// The whole response: the gateway stopped, and `server.drain_timeout` had passed.
    Drain,
}

impl Outcome {
    /// Every label.
    pub const LABELS: [&str; 6] = ["completed", "client_gone", "shed", "upstream_error", "timeout", "refused"];

    /// The label used in metrics and the access log.
    pub fn label(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::ClientGone => "client_gone",
            Self::Shed(_) => "shed",
            Self::UpstreamError(_) => "upstream_error",
            Self::Timeout(_) => "timeout",
            Self::Refused => "refused",
        }
    }

    /// The cause, for the access log; empty if the label suffices.
    pub fn detail(self) -> &'static str {
        match self {
            Self::Completed | Self::ClientGone | Self::Refused => "",
            Self::Shed(shed) => shed.label(),
            Self::UpstreamError(UpstreamFault::Connect) => "connect",
            Self::UpstreamError(UpstreamFault::Broken) => "broken",
            Self::UpstreamError(UpstreamFault::Status) => "status",
            Self::UpstreamError(UpstreamFault::InStream) => "in_stream",
            Self::UpstreamError(UpstreamFault::Hung) => "hung",
            Self::UpstreamError(UpstreamFault::Credentials) => "credentials",
            Self::Timeout(Stage::Send) => "send",
            Self::Timeout(Stage::FirstByte) => "first_byte",
            Self::Timeout(Stage::Idle) => "idle",
            Self::Timeout(Stage::Drain) => "drain",
        }
    }
}

/// Why an attempt was repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RetryReason {
    /// No connection.
    Connect,
    /// A reused connection was closed.
    StaleConnection,
    /// The connection broke, or a stream ended without an end marker.
    Broken,
    /// A status after which another engine may serve the request (`elsewhere.rs`).
    Status,
    /// An error event after which another engine may serve the request or continue the stream.
    InStream,
    /// The first token or byte or the next token did not come in time, or the backend stopped
    /// reading the request.
    Timeout,
    /// Cancelled because the backend hung.
    Hung,
    /// The engine does not serve the model, the route, the rank or a prompt of this length.
    NotServed,
    /// The engine leaves service, and another one had room for the rest of the stream.
    Moved,
}

impl RetryReason {
    /// Every reason.
    pub const ALL: [Self; 9] = [
        Self::Connect,
        Self::StaleConnection,
        Self::Broken,
        Self::Status,
        Self::InStream,
        Self::Timeout,
        Self::Hung,
        Self::NotServed,
        Self::Moved,
    ];

    /// Whether the backend has failed the request. The other reasons are no fault of the backend.
    fn is_failure(self) -> bool {
        !matches!(self, Self::StaleConnection | Self::NotServed | Self::Moved)
    }

    /// The label used in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::StaleConnection => "stale_connection",
            Self::Broken => "broken",
            Self::Status => "status",
            Self::InStream => "in_stream",
            Self::Timeout => "timeout",
            Self::Hung => "hung",
            Self::NotServed => "not_served",
            Self::Moved => "moved",
        }
    }
}

/// One finished request.
#[derive(Clone, Debug)]
pub struct Record {
    /// The request id given to the client.
    pub request_id: Arc<str>,
    /// The id sent upstream, which is unique; the engine's log has it.
    pub upstream_id: Arc<str>,
    /// The trace of the request, with the times at which waits and attempts began. `None`: the
    /// trace is unknown and not sampled.
    pub trace: Option<Box<RequestTrace>>,
    /// The API route; `None` for a path that is not served.
    pub route: Option<Route>,
    /// The path that is not served, without the query, as [`client_text`]. For the access log only.
    pub path: Option<Box<str>>,
    /// The name of the key, if keys are used.
    pub key: Option<Arc<str>>,
    /// The model's label.
    pub model: Option<Arc<str>>,
    /// The model that the client asked for and may not use, as [`client_text`]. For the access log
    /// only.
    pub refused_model: Option<Box<str>>,
    /// The home pool.
    pub home: Option<Arc<str>>,
    /// The class; `None` until the request is placed.
    pub class: Option<Arc<str>>,
    /// The pool in which the request ran.
    pub pool: Option<Arc<str>>,
    /// The backend on which the request ran, or the last one tried.
    pub backend: Option<Arc<str>>,
    /// The label of the arm of an experiment that served the request.
    pub arm: Option<Arc<str>>,
    /// The arm that the request was assigned to, whether the arm could serve it or not.
    pub assigned: Option<Assigned>,
    /// The outcome of a copy for a shadow arm; `None`: a client sent the request.
    pub copy: Option<CopyOutcome>,
    /// Whether a stream was requested.
    pub stream: bool,
    /// The estimated length of the prompt.
    pub estimate: Option<PromptEstimate>,
    /// The status that the client got; `None` if the client left before.
    pub status: Option<StatusCode>,
    /// The outcome.
    pub outcome: Outcome,
    /// The reason of a refusal: the `code` of the gateway's error, or [`engine_refusal`].
    pub refused: Option<&'static str>,
    /// The client's address, if the access log or the records need it.
    pub client: Option<IpAddr>,
    /// The origin under which the outcome counts.
    pub origin: Origin,
    /// Why attempts were repeated.
    pub retries: SmallVec<[RetryReason; 2]>,
    /// The pools and backends of the repeated attempts, in the order of `retries`.
    pub retried_on: SmallVec<[[Arc<str>; 2]; 1]>,
    /// How often another engine continued the stream, after its engine had failed or while it left
    /// service.
    pub continued: u32,
    /// Tokens of prompt and text that these engines prefilled again, as estimated.
    pub prefilled_again: u64,
    /// Why no engine continued a stream that broke.
    pub not_continued: Option<NotContinued>,
    /// Time to read and estimate.
    pub estimate_time: Duration,
    /// Time spent waiting for leases, all attempts together.
    pub queue_wait: Duration,
    /// Time to get a connection, all attempts together.
    pub connect_time: Duration,
    /// How long bytes of the response waited for the client to take them.
    pub client_wait: Duration,
    /// Whether the engine was not read for a while, because the bytes waiting for the client had
    /// reached their bound. Later times then say nothing about the engine.
    pub held_up: bool,
    /// From the receipt of the request to the end of the response.
    pub total: Duration,
    /// TTFT, ITL, TPOT, E2EL and token counts, as far as the response went.
    pub stats: Option<StreamStats>,
    /// TTFT from the time at which the request had been sent upstream.
    pub backend_ttft: Option<Duration>,
    /// Prompt tokens that the engine was expected to have in the prefix cache.
    pub expected_cached: u64,
    /// Hashes of prefixes of the prompt, if it was read. Records show them only through a secret
    /// key.
    pub prefix: Option<Arc<PromptPrefix>>,
    /// Number of sequences: prompts or inputs times `n`.
    pub sequences: u32,
    /// Whether the home pool has objectives.
    pub has_objectives: bool,
    /// Whether every objective of the home pool was met. `None`: there are none, or the outcome
    /// says nothing about them.
    pub slo_met: Option<bool>,
}

/// The reason of a refusal by an engine with `status`.
pub(super) fn engine_refusal(status: u16) -> &'static str {
    match status {
        400 => "engine_400",
        401 => "engine_401",
        403 => "engine_403",
        404 => "engine_404",
        413 => "engine_413",
        422 => "engine_422",
        429 => "engine_429",
        _ => "engine_4xx",
    }
}

impl Record {
    /// The cause of the outcome, for the access log and the live page; empty if the label suffices.
    pub fn detail(&self) -> &'static str {
        match self.outcome {
            Outcome::Refused => self.refused.unwrap_or_default(),
            outcome => outcome.detail(),
        }
    }

    /// E2EL of the engine. If it was not measured, the total time less the client's wait; `None` if
    /// the client's delay falsifies that too.
    pub fn e2el(&self) -> Option<Duration> {
        let measured = self.stats.as_ref().and_then(|stats| stats.e2el);
        let whole = || self.total.saturating_sub(self.client_wait);
        measured.or_else(|| (!self.held_up).then(whole))
    }

    /// Whether the request generates tokens. Only such requests count in TTFT, ITL, TPOT, E2EL and
    /// attainment: a call of `/tokenize` or `/v1/embeddings` takes milliseconds and says nothing
    /// about them.
    pub fn generates(&self) -> bool {
        self.route.is_some_and(Route::generates)
    }

    /// Judges a request that did not complete. A request that failed or was shed has missed the
    /// objectives, if there are any. A client that left and a refused request say nothing about
    /// them.
    pub(crate) fn judge(&mut self) {
        self.slo_met = match self.outcome {
            _ if !self.generates() => None,
            Outcome::Completed => self.slo_met,
            Outcome::ClientGone | Outcome::Refused => None,
            Outcome::Shed(_) | Outcome::UpstreamError(_) | Outcome::Timeout(_) => self.has_objectives.then_some(false),
        };
    }

    fn observation(&self, assigned: &Assigned) -> Observation {
        let stats = self.stats.as_ref().filter(|_| self.generates());
        // The latencies of a continued stream include the failure of an engine, or the move to
        // another one.
        let timed = |value: Option<f64>| value.filter(|_| self.continued == 0);
        let completed = stats.filter(|_| self.outcome == Outcome::Completed);
        let seconds = |time: Duration| time.as_secs_f64();
        let ttft = stats.and_then(|stats| stats.ttft);
        let e2el = completed.and_then(|stats| stats.e2el);
        let backend_ttft = self.backend_ttft.filter(|_| ttft.is_some());
        let decode = e2el.zip(ttft).map(|(e2el, ttft)| e2el.saturating_sub(ttft));
        let itl = stats.map(|stats| &stats.itl).filter(|itl| itl.count() > 0);
        let tokens = self.generated_tokens();
        let ending = match self.outcome {
            Outcome::Completed => Ending::Completed,
            Outcome::UpstreamError(_) => Ending::Failed,
            Outcome::Shed(ShedReason::ShuttingDown) | Outcome::Timeout(Stage::Drain) => Ending::Other,
            Outcome::Shed(_) | Outcome::Timeout(_) => Ending::Failed,
            Outcome::ClientGone | Outcome::Refused => Ending::Other,
        };
        // The queue of a pool that all arms share says nothing about one arm, since a single client
        // can fill it.
        let is_shed = matches!(self.outcome, Outcome::Shed(_));
        let lacked_room = is_shed || (assigned.fell_back && assigned.lacked_room);
        Observation {
            origin: self.origin,
            blamed: !(lacked_room && assigned.shares_pools()),
            stratum: assigned.stratum,
            cell: assigned.cell(),
            values: [
                ttft.map(seconds),
                timed(completed.and_then(|stats| stats.tpot).map(seconds)),
                timed(e2el.map(seconds)),
                timed(itl.map(|itl| itl.max_seconds())),
                self.backend.as_ref().map(|_| seconds(self.queue_wait)),
                backend_ttft.map(seconds),
                timed(backend_ttft.zip(decode).map(|(prefill, decode)| seconds(prefill + decode))),
                completed.filter(|_| tokens > 0).map(|_| tokens as f64 / 1e3),
            ],
            ending,
            missed: self.slo_met.filter(|_| ending != Ending::Other && self.continued == 0).map(|met| !met),
            fell_back: assigned.fell_back,
            cached: stats.and_then(|stats| stats.usage.cached.zip(stats.usage.prompt)),
            answer: completed.map(|stats| stats.answer).unwrap_or_default(),
        }
    }

    /// The times that the engine measured, unless another engine continued the stream.
    pub fn engine_times(&self) -> Option<EngineTimes> {
        self.stats.as_ref().filter(|_| self.continued == 0)?.times
    }

    /// The label of the arm to which the request was assigned and that could not serve it.
    pub fn fell_back_from(&self) -> Option<&str> {
        self.assigned.as_ref().filter(|assigned| assigned.fell_back).map(|assigned| &*assigned.arm().label)
    }

    /// Prompt tokens as the engine counted them; otherwise the estimate, if output shows that the
    /// prompt was read.
    pub fn prompt_tokens(&self) -> u64 {
        let Some(stats) = &self.stats else { return 0 };
        let estimate = || self.estimate.filter(|_| stats.ttft.is_some()).map_or(0, |estimate| estimate.tokens);
        stats.usage.prompt.unwrap_or_else(estimate)
    }

    /// Generated tokens as the engine counted them; otherwise one per event of a stream that
    /// carried tokens.
    pub fn generated_tokens(&self) -> u64 {
        self.stats.as_ref().map_or(0, StreamStats::generated)
    }
}

/// The most characters of a client's text that a record keeps.
pub const CLIENT_TEXT_MAX: usize = 256;

/// A client's text as a record keeps it: at most [`CLIENT_TEXT_MAX`] characters, without control
/// characters, which a terminal could obey.
pub fn client_text(text: &str) -> Box<str> {
    let plain = text.chars().map(|letter| if letter.is_control() { char::REPLACEMENT_CHARACTER } else { letter });
    plain.take(CLIENT_TEXT_MAX).collect::<String>().into()
}

/// A consumer of finished records: telemetry.
pub trait Recorder: Send + Sync + 'static {
    /// Called once per request. Must not block.
    fn record(&self, record: &Record);

    /// Called when an attempt has failed at a backend, named with its pool, and another attempt
    /// follows. Must not block.
    fn attempt_failed(&self, _on: &[Arc<str>; 2]) {}
}
