//! Sends one request and measures its stream: HTTP/1.1, keep-alive, one task for each request.
//!
//! Times are those of a client: TTFT from the moment given by the caller (just before the request is sent; connection
//! set-up is inside) to the first token event, ITL between token events, E2EL to the last token event. All events in one
//! piece of the network share the time at which the piece was read.
//!
//! An answer counts as completed when the status is 200, at least one token event came, no message was an error and the
//! stream said `[DONE]`. Everything else is a [`Failure`] with a reason, and failures have no timing: a fast refusal must
//! not improve a percentile. A client that leaves on purpose closes its connection, which is how vLLM learns of it.
//!
//! Several targets are taken in turn. What the gateway says of itself in its headers is kept beside the timing.

use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::client::events::{EventReader, Message};
use crate::client::target::{Target, Wire};
use crate::error::BenchError;
use crate::load::body::Api;
use crate::load::workload::Question;

/// Token events of one answer; a stream with more is taken for one that never ends.
pub const MAX_EVENTS: usize = 1 << 20;
/// Bytes of a refusal's body that are read so that its connection can be used again.
const MAX_REFUSAL: usize = 64 << 10;
/// Characters of a refusal's message that are kept, for one refusal of each status.
const MAX_REASON: usize = 300;
/// Statuses whose messages are kept.
const MAX_REASONS: usize = 16;
/// How long a client that leaves before the first token waits for it.
const LEAVE_WAITING: Duration = Duration::from_millis(100);
/// Connections opened at the same time.
const OPENING: usize = 32;
/// How long opening may take: the first must not grow too old meanwhile.
const OPEN_LIMIT: Duration = Duration::from_secs(2);
/// Names of pools, backends and arms that are kept; those of a configuration are far fewer.
const MAX_NAMES: usize = 4_096;

/// What a client saw of a completed answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// Start to first token event.
    pub ttft: Duration,
    /// Start to last token event.
    pub e2el: Duration,
    /// Gaps between successive token events: one fewer than there were events.
    pub gaps: Vec<Duration>,
    /// Completion tokens by the server's usage; the number of events when it sent none.
    pub output_tokens: u64,
    /// Prompt tokens by the server's usage, when it sent one.
    pub prompt_tokens: Option<u64>,
    /// Those found in the prefix cache, when the server says so.
    pub cached_tokens: Option<u64>,
    /// The answer, when the question wanted it.
    pub text: Option<String>,
}

/// Why a request has no timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Failure {
    /// No connection could be made.
    Connect,
    /// The connection broke before an answer began.
    NoAnswer,
    /// A status other than 200.
    Status(u16),
    /// An error object inside the stream, with its code when that was a number.
    InStream(Option<u16>),
    /// The server gave the answer up: `finish_reason` is `abort`.
    Aborted,
    /// The stream ended before `[DONE]`.
    Cut,
    /// The stream ended properly without a single token event.
    Empty,
    /// Bytes that are not an event stream of this API.
    Malformed,
    /// More than [`MAX_EVENTS`] events.
    Endless,
    /// Not finished within the request's time limit.
    Timeout,
    /// We left on purpose: no failure of anybody.
    Left,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("no connection"),
            Self::NoAnswer => f.write_str("connection broke before the answer"),
            Self::Status(status) => write!(f, "status {status}"),
            Self::InStream(Some(code)) => write!(f, "error {code} in the stream"),
            Self::InStream(None) => f.write_str("error in the stream"),
            Self::Aborted => f.write_str("given up by the server (abort)"),
            Self::Cut => f.write_str("stream cut"),
            Self::Empty => f.write_str("stream without tokens"),
            Self::Malformed => f.write_str("not an event stream"),
            Self::Endless => f.write_str("stream without end"),
            Self::Timeout => f.write_str("timed out"),
            Self::Left => f.write_str("left on purpose"),
        }
    }
}

/// Where the gateway says that a request went; nothing without a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// `x-sluice-pool`.
    pub pool: Option<Arc<str>>,
    /// `x-sluice-backend`.
    pub backend: Option<Arc<str>>,
    /// `x-sluice-arm`.
    pub arm: Option<Arc<str>>,
    /// Time in its queue, of `server-timing`.
    pub queue: Option<Duration>,
}

/// Sends requests to one server, or to several in turn.
#[derive(Debug)]
pub struct Client {
    api: Api,
    path: String,
    targets: Vec<Target>,
    turn: AtomicUsize,
    headers: HeaderMap,
    limit: Duration,
    /// The message of the first refusal of each status.
    reasons: Mutex<BTreeMap<u16, String>>,
    names: Mutex<BTreeMap<String, Arc<str>>>,
}

impl Client {
    /// A client for the servers at `urls` (`http://host:port`, a path prefix is kept); no request
    /// may take longer than `limit`.
    ///
    /// # Errors
    /// No url, or one that cannot be used.
    pub fn new(urls: &[String], api: Api, limit: Duration) -> Result<Self, BenchError> {
        if urls.is_empty() {
            return Err(BenchError::NoTarget);
        }
        let targets = urls.iter().map(|url| Target::new(url)).collect::<Result<_, _>>()?;
        Ok(Self {
            api,
            path: api.path().to_owned(),
            targets,
            turn: AtomicUsize::new(0),
            headers: HeaderMap::new(),
            limit,
            reasons: Mutex::default(),
            names: Mutex::default(),
        })
    }

    /// The same client with `headers` (an API key, say) on every request.
    #[must_use]
    pub fn with_headers(self, headers: HeaderMap) -> Self {
        Self { headers, ..self }
    }

    /// The same client with requests to `path` instead of the API's usual one.
    ///
    /// # Errors
    /// It is no path.
    pub fn with_path(self, path: &str) -> Result<Self, BenchError> {
        let sound = path.starts_with('/') && path.parse::<http::uri::PathAndQuery>().is_ok();
        if sound { Ok(Self { path: path.to_owned(), ..self }) } else { Err(BenchError::BadPath(path.to_owned())) }
    }

    /// Addresses of the servers.
    pub fn urls(&self) -> Vec<String> {
        self.targets.iter().map(|target| target.url.clone()).collect()
    }

    /// Path of the requests.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What is sent with every request.
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// What servers said with the first refusal of each status.
    pub fn reasons(&self) -> BTreeMap<u16, String> {
        self.reasons.lock().clone()
    }

    /// Opens `count` connections, spread over the servers, a few at a time; those that cannot be opened in time are left to
    /// the requests. They are used while they are fresh or not at all.
    pub async fn open(&self, count: usize) {
        let opening = async {
            for begin in (0..count).step_by(OPENING) {
                let all =
                    (begin..count.min(begin + OPENING)).map(|turn| self.targets[turn % self.targets.len()].open());
                futures_all(all).await;
            }
        };
        // What is open by then is open.
        let _ = tokio::time::timeout(OPEN_LIMIT, opening).await;
    }

    /// The answer to a GET of `path` from each server, in their order: status and body of at most `max` bytes. None may take
    /// longer than `limit`.
    pub async fn get_each(&self, path: &str, max: usize, limit: Duration) -> Vec<Result<(u16, Bytes), Failure>> {
        let mut answers = Vec::with_capacity(self.targets.len());
        for target in &self.targets {
            let answer = target.get(path, &self.headers, max);
            answers.push(tokio::time::timeout(limit, answer).await.unwrap_or(Err(Failure::Timeout)));
        }
        answers
    }

    /// The status of a POST of nothing to `path` of each server, in their order.
    pub async fn post_each(&self, path: &str) -> Vec<Result<u16, Failure>> {
        let mut answers = Vec::with_capacity(self.targets.len());
        for target in &self.targets {
            let make = || target.request(Method::POST, path, &self.headers, Bytes::new());
            let sent = tokio::time::timeout(self.limit, target.send(make)).await.unwrap_or(Err(Failure::Timeout));
            answers.push(sent.map(|(_, response)| response.status().as_u16()));
        }
        answers
    }

    /// Sends `question` and reads its answer to the end. Times count from `start`: now, just before.
    ///
    /// # Errors
    /// Why there is no timing.
    pub async fn ask(&self, question: &Question, start: Instant) -> Result<Timing, Failure> {
        self.ask_placed(question, start, &mut Place::default()).await
    }

    /// As [`Client::ask`], and tells where it went, also when it failed.
    ///
    /// # Errors
    /// Why there is no timing.
    pub async fn ask_placed(&self, question: &Question, start: Instant, place: &mut Place) -> Result<Timing, Failure> {
        let target = &self.targets[self.turn.fetch_add(1, Ordering::Relaxed) % self.targets.len()];
        let exchange = self.exchange(target, question, start, place);
        let exchange = tokio::time::timeout(self.limit, exchange);
        if question.leave_after != Some(0) {
            return exchange.await.unwrap_or(Err(Failure::Timeout));
        }
        let limit = LEAVE_WAITING.min(self.limit);
        tokio::time::timeout(limit, exchange).await.unwrap_or(Ok(Err(Failure::Left))).unwrap_or(Err(Failure::Timeout))
    }

    async fn exchange(
        &self,
        target: &Target,
        question: &Question,
        start: Instant,
        place: &mut Place,
    ) -> Result<Timing, Failure> {
        let make = || {
            let mut request = target.request(Method::POST, &self.path, &self.headers, question.body.clone());
            request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            request
        };
        let (mut wire, response) = target.send(make).await?;
        *place = self.place(response.headers());
        if response.status() != StatusCode::OK {
            let status = response.status().as_u16();
            if let Some(body) = drain(&mut wire, response.into_body()).await {
                self.note_reason(status, &body);
                target.put_back(wire).await;
            }
            return Err(Failure::Status(status));
        }
        let timing = read_stream(self.api, &mut wire, response.into_body(), question, start).await?;
        target.put_back(wire).await;
        Ok(timing)
    }

    fn note_reason(&self, status: u16, body: &[u8]) {
        let mut reasons = self.reasons.lock();
        if reasons.len() < MAX_REASONS && !reasons.contains_key(&status) {
            let json: Option<serde_json::Value> = serde_json::from_slice(body).ok();
            let message = json.as_ref().and_then(|json| json.pointer("/error/message").or(json.get("message")));
            let message = message.and_then(serde_json::Value::as_str).map(str::to_owned);
            let message = message.unwrap_or_else(|| String::from_utf8_lossy(body).trim().to_owned());
            reasons.insert(status, message.chars().take(MAX_REASON).collect());
        }
    }

    fn place(&self, headers: &HeaderMap) -> Place {
        let named =
            |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).and_then(|text| self.name(text));
        let timing = headers.get("server-timing").and_then(|value| value.to_str().ok());
        Place {
            pool: named("x-sluice-pool"),
            backend: named("x-sluice-backend"),
            arm: named("x-sluice-arm"),
            queue: timing.and_then(|timing| span_of(timing, "queue")),
        }
    }

    fn name(&self, text: &str) -> Option<Arc<str>> {
        let mut names = self.names.lock();
        if let Some(name) = names.get(text) {
            return Some(name.clone());
        }
        let name: Arc<str> = text.into();
        (names.len() < MAX_NAMES).then(|| names.insert(text.to_owned(), name.clone()));
        Some(name)
    }
}

/// Waits for all of a few futures, together.
async fn futures_all<F: Future<Output = ()>>(all: impl Iterator<Item = F>) {
    let mut open: Vec<_> = all.map(Box::pin).collect();
    poll_fn(|context| {
        open.retain_mut(|future| future.as_mut().poll(context).is_pending());
        if open.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// The duration of `name` in a `server-timing` header, which counts in milliseconds.
fn span_of(timing: &str, name: &str) -> Option<Duration> {
    let metric = timing.split(',').find(|metric| metric.split(';').next().is_some_and(|found| found.trim() == name))?;
    let millis = metric.split(';').find_map(|part| part.trim().strip_prefix("dur="))?.parse::<f64>().ok()?;
    Duration::try_from_secs_f64(millis / 1e3).ok()
}

/// Reads a refusal's body; nothing when it is too long to be worth it or broke.
async fn drain(wire: &mut Wire, mut body: Incoming) -> Option<Vec<u8>> {
    let mut read = Vec::new();
    while let Some(frame) = wire.drive(body.frame()).await {
        let frame = frame.ok()?;
        read.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
        if read.len() > MAX_REFUSAL {
            return None;
        }
    }
    Some(read)
}

async fn read_stream(
    api: Api,
    wire: &mut Wire,
    mut body: Incoming,
    question: &Question,
    start: Instant,
) -> Result<Timing, Failure> {
    let mut reader = EventReader::new(api);
    if question.keep_text {
        reader = reader.keeping_text();
    }
    let mut seen = Seen::default();
    let mut last = start;
    while let Some(frame) = wire.drive(body.frame()).await {
        let Ok(frame) = frame else { return Err(seen.failure().unwrap_or(Failure::Cut)) };
        let Some(piece) = frame.data_ref() else { continue };
        let now = Instant::now();
        last = now;
        let fed = reader.feed(piece, |message| seen.note(message, now));
        if let Some(failure) = seen.failure() {
            return Err(failure);
        }
        fed.map_err(|_| Failure::Malformed)?;
        if question.leave_after.is_some_and(|events| seen.events() >= events as usize && !seen.done) {
            return Err(Failure::Left);
        }
    }
    // A last line without its end counts as the original counts it; what is no message was cut, which is told below.
    let _ = reader.feed(b"\n", |message| seen.note(message, last));
    if let Some(failure) = seen.failure() {
        return Err(failure);
    }
    Ok(Timing { text: reader.into_text(), ..seen.finish(start)? })
}

/// What has been seen of a stream so far.
#[derive(Default)]
struct Seen {
    first: Option<Instant>,
    last: Option<Instant>,
    gaps: Vec<Duration>,
    output_tokens: Option<u64>,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    error: Option<Option<u16>>,
    endless: bool,
    done: bool,
    aborted: bool,
}

impl Seen {
    fn note(&mut self, message: Message, now: Instant) {
        self.done |= message.done;
        self.aborted |= message.aborted;
        if let Some(error) = message.error {
            self.error.get_or_insert(error.code);
        }
        if let Some(usage) = message.usage {
            self.output_tokens = Some(usage.completion_tokens);
            self.prompt_tokens = Some(usage.prompt_tokens);
            self.cached_tokens = usage.cached_tokens;
        }
        if !message.token {
            return;
        }
        match self.last.replace(now) {
            None => self.first = Some(now),
            Some(_) if self.gaps.len() + 1 >= MAX_EVENTS => self.endless = true,
            Some(previous) => self.gaps.push(now - previous),
        }
    }

    fn events(&self) -> usize {
        self.first.map_or(0, |_| self.gaps.len() + 1)
    }

    fn failure(&self) -> Option<Failure> {
        let failed = self.error.map(Failure::InStream).or(self.aborted.then_some(Failure::Aborted));
        failed.or(self.endless.then_some(Failure::Endless))
    }

    fn finish(self, start: Instant) -> Result<Timing, Failure> {
        if !self.done {
            return Err(Failure::Cut);
        }
        let (Some(first), Some(last)) = (self.first, self.last) else { return Err(Failure::Empty) };
        Ok(Timing {
            ttft: first.saturating_duration_since(start),
            e2el: last.saturating_duration_since(start),
            output_tokens: self.output_tokens.unwrap_or(self.gaps.len() as u64 + 1),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            text: None,
            gaps: self.gaps,
        })
    }
}

#[cfg(test)]
mod tests;
