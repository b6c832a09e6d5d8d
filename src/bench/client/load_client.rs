//! The client of the load generator: sends one request and returns the timing.
//!
//! TTFT counts from the caller's start, just before the request is sent, to the first token event,
//! so it includes connection set-up. ITL counts between token events, E2EL to the last one.
//! Failures have no timing. A client that leaves on purpose closes the connection, by which vLLM
//! notices it.
//!
//! Requests go to several targets in turn. The gateway's routing headers are kept. A request is
//! sent again only if an idle connection was dead (`target`).

use std::collections::BTreeMap;
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

use crate::client::failure::RequestFailure;
pub use crate::client::stream::Timing;
use crate::client::stream::read_stream;
use crate::client::target::{HttpConnection, Target};
use crate::client::tls::{TlsSettings, Trust};
use crate::error::BenchError;
use crate::load::body::Api;
use crate::load::workload::LoadRequest;

/// The longest error body, in bytes, that is read to the end so that the connection can be reused.
const MAX_REFUSAL: usize = 64 << 10;
const MAX_REASON: usize = 300;
const MAX_REASONS: usize = 16;
/// Time after which a client leaves if it leaves before the first token.
const LEAVE_WAITING: Duration = Duration::from_millis(100);
const OPENING: usize = 32;
/// Time limit for opening connections in advance, so that the first connections are not idle for
/// long.
const OPEN_LIMIT: Duration = Duration::from_secs(2);
/// The most names of pools, backends and arms that are kept.
const MAX_NAMES: usize = 4_096;

/// How the gateway routed a request, by the response headers. Empty without a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingInfo {
    /// `x-sluice-pool`.
    pub pool: Option<Arc<str>>,
    /// `x-sluice-backend`.
    pub backend: Option<Arc<str>>,
    /// `x-sluice-arm`.
    pub arm: Option<Arc<str>>,
    /// Time in the gateway's queue, from `server-timing`.
    pub queue: Option<Duration>,
}

/// Sends requests to one server, or to several in turn.
#[derive(Debug)]
pub struct LoadClient {
    api: Api,
    path: String,
    targets: Vec<Target>,
    turn: AtomicUsize,
    headers: HeaderMap,
    limit: Duration,
    tls: TlsSettings,
    reasons: Mutex<BTreeMap<u16, String>>,
    names: Mutex<BTreeMap<String, Arc<str>>>,
}

impl LoadClient {
    /// A client for the servers at `urls` (`http://host:port` or `https://host`, with an optional
    /// path prefix). Each request has the timeout `limit`.
    pub fn new(urls: &[String], api: Api, limit: Duration) -> Result<Self, BenchError> {
        Self::trusting(Trust::System, urls, api, limit)
    }

    /// As [`LoadClient::new`], but `trust` says which https servers are trusted.
    pub fn trusting(trust: Trust, urls: &[String], api: Api, limit: Duration) -> Result<Self, BenchError> {
        let tls = TlsSettings::new(trust);
        if urls.is_empty() {
            return Err(BenchError::NoTarget);
        }
        let targets = urls.iter().map(|url| Target::new(url, &tls)).collect::<Result<_, _>>()?;
        Ok(Self {
            api,
            path: api.path().to_owned(),
            targets,
            turn: AtomicUsize::new(0),
            headers: HeaderMap::new(),
            limit,
            tls,
            reasons: Mutex::default(),
            names: Mutex::default(),
        })
    }

    /// A client of other servers, with the same settings.
    pub fn to(&self, urls: &[String]) -> Result<Self, BenchError> {
        Ok(Self::trusting(self.tls.trust, urls, self.api, self.limit)?.with_headers(self.headers.clone()))
    }

    /// Adds `headers` to every request.
    #[must_use]
    pub fn with_headers(self, headers: HeaderMap) -> Self {
        Self { headers, ..self }
    }

    /// Sends requests to `path` instead of the API's default path.
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

    pub(crate) fn tls(&self) -> &TlsSettings {
        &self.tls
    }

    /// Headers of every request.
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// The first error message of each status.
    pub fn reasons(&self) -> BTreeMap<u16, String> {
        self.reasons.lock().clone()
    }

    /// Opens `count` connections over the servers, 32 at a time, within 2 s.
    pub async fn open(&self, count: usize) {
        let opening = async {
            for begin in (0..count).step_by(OPENING) {
                let all =
                    (begin..count.min(begin + OPENING)).map(|turn| self.targets[turn % self.targets.len()].open());
                futures_all(all).await;
            }
        };
        let _ = tokio::time::timeout(OPEN_LIMIT, opening).await;
    }

    /// Sends GET `path` to each server in turn, with the timeout `limit`. Returns status and body
    /// of at most `max` bytes.
    pub async fn get_each(&self, path: &str, max: usize, limit: Duration) -> Vec<Result<(u16, Bytes), RequestFailure>> {
        let mut responses = Vec::with_capacity(self.targets.len());
        for target in &self.targets {
            let response = target.get(path, &self.headers, max);
            responses.push(tokio::time::timeout(limit, response).await.unwrap_or(Err(RequestFailure::Timeout)));
        }
        responses
    }

    /// Sends an empty POST to `path` of each server in turn. Returns the statuses.
    pub async fn post_each(&self, path: &str) -> Vec<Result<u16, RequestFailure>> {
        let mut responses = Vec::with_capacity(self.targets.len());
        for target in &self.targets {
            let make = || target.request(Method::POST, path, &self.headers, Bytes::new());
            let sent =
                tokio::time::timeout(self.limit, target.send(make)).await.unwrap_or(Err(RequestFailure::Timeout));
            responses.push(sent.map(|(_, response)| response.status().as_u16()));
        }
        responses
    }

    /// Sends `request` and reads the whole response. Times count from `start`, just before the
    /// call.
    pub async fn send(&self, request: &LoadRequest, start: Instant) -> Result<Timing, RequestFailure> {
        self.send_with_routing(request, start, &mut RoutingInfo::default()).await
    }

    /// [`LoadClient::send`] that also sets `routing`, even if the request fails after the response
    /// head.
    pub async fn send_with_routing(
        &self,
        request: &LoadRequest,
        start: Instant,
        routing: &mut RoutingInfo,
    ) -> Result<Timing, RequestFailure> {
        let target = &self.targets[self.turn.fetch_add(1, Ordering::Relaxed) % self.targets.len()];
        let (limit, at_limit) = match request.leave_after {
            Some(0) if LEAVE_WAITING < self.limit => (LEAVE_WAITING, RequestFailure::ClientLeft),
            _ => (self.limit, RequestFailure::Timeout),
        };
        let exchange = self.exchange(target, request, start, routing);
        tokio::time::timeout(limit, exchange).await.unwrap_or(Err(at_limit))
    }

    async fn exchange(
        &self,
        target: &Target,
        request: &LoadRequest,
        start: Instant,
        routing: &mut RoutingInfo,
    ) -> Result<Timing, RequestFailure> {
        let make = || {
            let mut request = target.request(Method::POST, &self.path, &self.headers, request.body.clone());
            request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            request
        };
        let (mut connection, response) = target.send(make).await?;
        *routing = self.routing(response.headers());
        if response.status() != StatusCode::OK {
            let status = response.status().as_u16();
            if let Some(body) = drain(&mut connection, response.into_body()).await {
                self.record_reason(status, &body);
                target.put_back(connection).await;
            }
            return Err(RequestFailure::Status(status));
        }
        let timing = read_stream(self.api, &mut connection, response.into_body(), request, start).await?;
        target.put_back(connection).await;
        Ok(timing)
    }

    fn record_reason(&self, status: u16, body: &[u8]) {
        let mut reasons = self.reasons.lock();
        if reasons.len() < MAX_REASONS && !reasons.contains_key(&status) {
            let json: Option<serde_json::Value> = serde_json::from_slice(body).ok();
            let message = json.as_ref().and_then(|json| json.pointer("/error/message").or(json.get("message")));
            let message = message.and_then(serde_json::Value::as_str).map(str::to_owned);
            let message = message.unwrap_or_else(|| String::from_utf8_lossy(body).trim().to_owned());
            reasons.insert(status, message.chars().take(MAX_REASON).collect());
        }
    }

    fn routing(&self, headers: &HeaderMap) -> RoutingInfo {
        let named =
            |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).and_then(|text| self.name(text));
        let timing = headers.get("server-timing").and_then(|value| value.to_str().ok());
        RoutingInfo {
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

async fn futures_all<F: Future<Output = ()>>(all: impl Iterator<Item = F>) {
    let mut open: Vec<_> = all.map(Box::pin).collect();
    poll_fn(|context| {
        open.retain_mut(|future| future.as_mut().poll(context).is_pending());
        if open.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// The duration of the metric `name` in a `server-timing` header, which counts milliseconds.
fn span_of(timing: &str, name: &str) -> Option<Duration> {
    let metric = timing.split(',').find(|metric| metric.split(';').next().is_some_and(|found| found.trim() == name))?;
    let millis = metric.split(';').find_map(|part| part.trim().strip_prefix("dur="))?.parse::<f64>().ok()?;
    Duration::try_from_secs_f64(millis / 1e3).ok()
}

async fn drain(connection: &mut HttpConnection, mut body: Incoming) -> Option<Vec<u8>> {
    let mut read = Vec::new();
    while let Some(frame) = connection.drive(body.frame()).await {
        let frame = frame.ok()?;
        read.extend_from_slice(frame.data_ref().map_or(&[], |data| &data[..]));
        if read.len() > MAX_REFUSAL {
            return None;
        }
    }
    Some(read)
}

#[cfg(test)]
mod tests;
