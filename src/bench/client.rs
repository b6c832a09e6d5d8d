//! Sends one request and measures its stream: HTTP/1.1, keep-alive, one task for each request.
//!
//! Times are those of a client: TTFT from the start moment (given by the caller; connection set-up is
//! inside) to the first token event, ITL between token events, E2EL to the last token event. All
//! events in one piece of the network share the time at which the piece was read.
//!
//! An answer counts as completed when the status is 200, at least one token event came, no message was
//! an error and the stream said `[DONE]`. Everything else is a [`Failure`] with a reason, and failures
//! have no timing: a fast refusal must not improve a percentile.
//!
//! Connections: idle ones are kept for [`IDLE_LIMIT`] (vLLM closes them after 5 s), the last used
//! first. When a reused connection turns out to be dead before any byte of an answer, the request is
//! sent once more on a fresh one, as every HTTP client does; its start moment stays. Nothing else is
//! ever retried. Several targets are taken in turn.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::BenchError;
use super::events::{EventReader, Message};
use super::workload::{Api, Question};

/// How long an idle connection is reused: below the 5 s after which vLLM closes it.
pub const IDLE_LIMIT: Duration = Duration::from_secs(4);
/// Token events of one answer; a stream with more is taken for one that never ends.
pub const MAX_EVENTS: usize = 1 << 20;
/// Bytes of a refusal's body that are read so that its connection can be used again.
const MAX_REFUSAL: usize = 64 << 10;

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
}

impl Timing {
    /// (E2EL - TTFT) / (output tokens - 1); nothing for answers of one token.
    pub fn tpot(&self) -> Option<Duration> {
        let steps = self.output_tokens.checked_sub(1).filter(|steps| *steps > 0)?;
        Some(self.e2el.saturating_sub(self.ttft).div_f64(steps as f64))
    }
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
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("no connection"),
            Self::NoAnswer => f.write_str("connection broke before the answer"),
            Self::Status(status) => write!(f, "status {status}"),
            Self::InStream(Some(code)) => write!(f, "error {code} in the stream"),
            Self::InStream(None) => f.write_str("error in the stream"),
            Self::Cut => f.write_str("stream cut"),
            Self::Empty => f.write_str("stream without tokens"),
            Self::Malformed => f.write_str("not an event stream"),
            Self::Endless => f.write_str("stream without end"),
            Self::Timeout => f.write_str("timed out"),
        }
    }
}

/// Sends requests to one server, or to several in turn.
#[derive(Debug)]
pub struct Client {
    api: Api,
    targets: Vec<Target>,
    turn: AtomicUsize,
    headers: HeaderMap,
    limit: Duration,
}

#[derive(Debug)]
struct Target {
    /// `host:port`, for connecting and for the Host header.
    authority: String,
    host: HeaderValue,
    /// What stands before the API's path, without a slash at its end.
    base: String,
    /// Bounded by the requests that were ever in flight at once.
    idle: Mutex<Vec<Idle>>,
}

#[derive(Debug)]
struct Idle {
    sender: SendRequest<Full<Bytes>>,
    since: Instant,
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
        Ok(Self { api, targets, turn: AtomicUsize::new(0), headers: HeaderMap::new(), limit })
    }

    /// The same client with `headers` (an API key, say) on every request.
    #[must_use]
    pub fn with_headers(self, headers: HeaderMap) -> Self {
        Self { headers, ..self }
    }

    /// Sends `question` and reads its answer to the end. `start` is the moment from which it is
    /// measured: when it was due, or now.
    ///
    /// # Errors
    /// Why there is no timing.
    pub async fn ask(&self, question: &Question, start: Instant) -> Result<Timing, Failure> {
        let target = &self.targets[self.turn.fetch_add(1, Ordering::Relaxed) % self.targets.len()];
        let exchange = self.exchange(target, question, start);
        tokio::time::timeout(self.limit, exchange).await.unwrap_or(Err(Failure::Timeout))
    }

    async fn exchange(&self, target: &Target, question: &Question, start: Instant) -> Result<Timing, Failure> {
        let (mut sender, response) = self.send(target, question).await?;
        if response.status() != StatusCode::OK {
            let status = response.status().as_u16();
            if drain(response.into_body()).await {
                target.put_back(sender);
            }
            return Err(Failure::Status(status));
        }
        let timing = read_stream(self.api, response.into_body(), start).await?;
        if sender.ready().await.is_ok() {
            target.put_back(sender);
        }
        Ok(timing)
    }

    async fn send(
        &self,
        target: &Target,
        question: &Question,
    ) -> Result<(SendRequest<Full<Bytes>>, Response<Incoming>), Failure> {
        while let Some(mut sender) = target.take_idle() {
            if sender.ready().await.is_err() {
                continue;
            }
            match sender.send_request(self.request(target, question)).await {
                Ok(response) => return Ok((sender, response)),
                // It died under us before a byte of an answer: the one case that is sent again.
                Err(error) if error.is_canceled() || error.is_incomplete_message() || error.is_closed() => break,
                Err(_) => return Err(Failure::NoAnswer),
            }
        }
        let mut sender = target.connect().await?;
        let response = sender.send_request(self.request(target, question)).await.map_err(|_| Failure::NoAnswer)?;
        Ok((sender, response))
    }

    fn request(&self, target: &Target, question: &Question) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(question.body.clone()));
        *request.method_mut() = Method::POST;
        // The base was parsed as part of a URI when the client was made; a path follows it.
        *request.uri_mut() = format!("{}{}", target.base, self.api.path()).parse().unwrap_or_default();
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert(HOST, target.host.clone());
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        request
    }
}

impl Target {
    fn new(url: &str) -> Result<Self, BenchError> {
        let bad = || BenchError::BadUrl(url.to_owned());
        let uri: Uri = url.parse().map_err(|_| bad())?;
        let host = uri.host().filter(|_| uri.scheme_str() == Some("http")).ok_or_else(bad)?;
        let authority = format!("{host}:{}", uri.port_u16().unwrap_or(80));
        let host = HeaderValue::from_str(&authority).map_err(|_| bad())?;
        let base = uri.path().trim_end_matches('/').to_owned();
        Ok(Self { authority, host, base, idle: Mutex::new(Vec::new()) })
    }

    fn take_idle(&self) -> Option<SendRequest<Full<Bytes>>> {
        let mut idle = self.idle.lock();
        let newest = idle.pop()?;
        if newest.since.elapsed() < IDLE_LIMIT {
            return Some(newest.sender);
        }
        // The newest is too old, so all the others are.
        idle.clear();
        None
    }

    fn put_back(&self, sender: SendRequest<Full<Bytes>>) {
        if !sender.is_closed() {
            self.idle.lock().push(Idle { sender, since: Instant::now() });
        }
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, Failure> {
        let socket = TcpStream::connect(&self.authority).await.map_err(|_| Failure::Connect)?;
        // A small request must leave at once; without this option the rest of the path is delayed, not wrong.
        let _ = socket.set_nodelay(true);
        let (sender, connection) = http1::handshake(TokioIo::new(socket)).await.map_err(|_| Failure::Connect)?;
        // Ends by itself when the sender is gone or the peer closes; its error is seen by the sender.
        tokio::spawn(connection);
        Ok(sender)
    }
}

/// Reads a refusal's body; false when it is too long to be worth it or broke.
async fn drain(mut body: Incoming) -> bool {
    let mut left = MAX_REFUSAL;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return false };
        let length = frame.data_ref().map_or(0, Bytes::len);
        match left.checked_sub(length) {
            Some(rest) => left = rest,
            None => return false,
        }
    }
    true
}

async fn read_stream(api: Api, mut body: Incoming, start: Instant) -> Result<Timing, Failure> {
    let mut reader = EventReader::new(api);
    let mut seen = Seen::default();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return Err(seen.failure().unwrap_or(Failure::Cut)) };
        let Some(piece) = frame.data_ref() else { continue };
        let now = Instant::now();
        let fed = reader.feed(piece, |message| seen.note(message, now));
        if let Some(failure) = seen.failure() {
            return Err(failure);
        }
        fed.map_err(|_| Failure::Malformed)?;
    }
    seen.finish(start)
}

/// What has been seen of a stream so far.
#[derive(Default)]
struct Seen {
    first: Option<Instant>,
    last: Option<Instant>,
    gaps: Vec<Duration>,
    output_tokens: Option<u64>,
    prompt_tokens: Option<u64>,
    error: Option<Option<u16>>,
    endless: bool,
    done: bool,
}

impl Seen {
    fn note(&mut self, message: Message, now: Instant) {
        self.done |= message.done;
        if let Some(error) = message.error {
            self.error.get_or_insert(error.code);
        }
        if let Some(usage) = message.usage {
            self.output_tokens = Some(usage.completion_tokens);
            self.prompt_tokens = Some(usage.prompt_tokens);
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

    fn failure(&self) -> Option<Failure> {
        self.error.map(Failure::InStream).or(self.endless.then_some(Failure::Endless))
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
            gaps: self.gaps,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::mock::{Answer, MockEngine, completion_stream, question};

    const LIMIT: Duration = Duration::from_secs(20);

    async fn ask(answer: Answer) -> Result<Timing, Failure> {
        let engine = MockEngine::start(move |_| answer.clone()).await;
        let client = Client::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
        client.ask(&question(), Instant::now()).await
    }

    #[tokio::test]
    async fn a_stream_is_measured_event_by_event() {
        let pause = Duration::from_millis(30);
        let timing = ask(Answer::stream(completion_stream(4), pause)).await.unwrap();
        assert_eq!(timing.gaps.len(), 3);
        assert_eq!(timing.output_tokens, 4);
        assert_eq!(timing.prompt_tokens, Some(3));
        // The mock waits before each piece; a loaded machine can only make that longer.
        assert!(timing.ttft >= pause);
        assert!(timing.gaps.iter().all(|gap| *gap >= pause / 2), "{:?}", timing.gaps);
        assert_eq!(timing.e2el, timing.ttft + timing.gaps.iter().sum::<Duration>());
        assert!(timing.tpot().unwrap() >= pause / 2);
    }

    #[tokio::test]
    async fn an_error_in_the_stream_is_a_failure_although_the_status_is_200() {
        let mut pieces = completion_stream(2);
        pieces.truncate(2);
        pieces.push("data: {\"error\":{\"message\":\"engine died\",\"code\":500}}\n\n".into());
        pieces.push("data: [DONE]\n\n".into());
        assert_eq!(ask(Answer::stream(pieces, Duration::ZERO)).await, Err(Failure::InStream(Some(500))));
    }

    #[tokio::test]
    async fn a_stream_that_stops_early_is_cut_whether_the_connection_breaks_or_ends_politely() {
        let mut pieces = completion_stream(5);
        pieces.truncate(3);
        let polite = Answer::stream(pieces.clone(), Duration::ZERO);
        assert_eq!(ask(polite).await, Err(Failure::Cut));
        let broken = Answer { breaks: true, ..Answer::stream(pieces, Duration::ZERO) };
        assert_eq!(ask(broken).await, Err(Failure::Cut));
    }

    #[tokio::test]
    async fn refusals_and_nonsense_have_their_own_reasons() {
        let shed = Answer { status: 503, ..Answer::stream(vec!["{\"error\":{}}".into()], Duration::ZERO) };
        assert_eq!(ask(shed).await, Err(Failure::Status(503)));
        let html = Answer::stream(vec!["data: <html>\n\n".into()], Duration::ZERO);
        assert_eq!(ask(html).await, Err(Failure::Malformed));
        let empty = Answer::stream(vec!["data: [DONE]\n\n".into()], Duration::ZERO);
        assert_eq!(ask(empty).await, Err(Failure::Empty));
    }

    #[tokio::test]
    async fn a_refused_connection_is_a_failure_of_its_own() {
        // Bound and dropped, so that the port is free and nobody listens.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let client = Client::new(&[url], Api::Completions, LIMIT).unwrap();
        assert_eq!(client.ask(&question(), Instant::now()).await, Err(Failure::Connect));
    }

    #[tokio::test]
    async fn a_request_over_its_limit_is_a_timeout() {
        let engine = MockEngine::start(|_| Answer::stream(completion_stream(4), Duration::from_secs(600))).await;
        let client = Client::new(&[engine.url()], Api::Completions, Duration::from_millis(50)).unwrap();
        assert_eq!(client.ask(&question(), Instant::now()).await, Err(Failure::Timeout));
    }

    #[tokio::test]
    async fn connections_are_reused_and_a_dead_one_is_replaced() {
        let engine = MockEngine::start(|_| Answer::stream(completion_stream(2), Duration::ZERO)).await;
        let client = Client::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
        for _ in 0..3 {
            client.ask(&question(), Instant::now()).await.unwrap();
        }
        assert_eq!(engine.connections(), 1);
        let engine = engine.restart().await;
        client.ask(&question(), Instant::now()).await.unwrap();
        assert_eq!(engine.connections(), 1);
    }

    #[tokio::test]
    async fn several_targets_are_taken_in_turn() {
        let start = || MockEngine::start(|_| Answer::stream(completion_stream(1), Duration::ZERO));
        let (first, second) = (start().await, start().await);
        let client = Client::new(&[first.url(), second.url()], Api::Completions, LIMIT).unwrap();
        for _ in 0..6 {
            client.ask(&question(), Instant::now()).await.unwrap();
        }
        assert_eq!((first.requests(), second.requests()), (3, 3));
    }

    #[test]
    fn an_address_that_cannot_be_used_is_named() {
        let new = |url: &str| Client::new(&[url.into()], Api::Chat, LIMIT).map(|_| ());
        assert_eq!(new("localhost:8000"), Err(BenchError::BadUrl("localhost:8000".into())));
        assert_eq!(new("https://a"), Err(BenchError::BadUrl("https://a".into())));
        assert!(new("http://127.0.0.1:8000/prefix/").is_ok());
        assert_eq!(Client::new(&[], Api::Chat, LIMIT).map(|_| ()), Err(BenchError::NoTarget));
    }

    #[test]
    fn tpot_spreads_the_decode_time_over_all_tokens_but_the_first() {
        let timing = |output_tokens| Timing {
            ttft: Duration::from_millis(100),
            e2el: Duration::from_millis(400),
            gaps: vec![],
            output_tokens,
            prompt_tokens: None,
        };
        assert_eq!(timing(4).tpot(), Some(Duration::from_millis(100)));
        assert_eq!(timing(1).tpot(), None);
    }
}
