//! The requests of one client connection: local responses, refusals before the body, and the request path.
//!
//! Order of checks, cheapest first: framing and host (400, 501; see `head.rs`), the size of the headers (431), the route (404,
//! 405), the key (401), the declared size of the body (413), the body (413, 408, 400). If a request is refused before its body
//! is read, the connection is closed after the client had time to read the response. A request whose body is still arriving
//! when the gateway stops is refused at once (503); when complete it would be refused, too.
//!
//! Only the routes of the API reach an engine. Its control routes (sleep, LoRA loading, profiling, metrics) cannot be reached
//! from the client port.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode, Version};
use pingora::apps::{HttpPersistentSettings, HttpServerApp, ReusedHttpStream};
use pingora::http::RequestHeader;
use pingora::protocols::Stream;
use pingora::protocols::http::ServerSession;
use pingora::server::ShutdownWatch;
use tokio::time::{Instant, timeout};

use super::after::{self, LINGER, LINGER_CLOSING, Next, SETTLE, client_address, end};
use super::body::{self, BodyError, MinRate};
use super::clients::ClientLimits;
use super::downstream::DownstreamConnection;
use super::head::{self, HeadTimes, NoHead};
use super::headers::{self, RequestIds};
use super::socket::ClientHandle;
use super::upstream::UpstreamConnector;
use crate::config::limits::RETRY_AFTER_MIN;
use crate::flow::keys::{ApiKey, KeyError};
use crate::flow::record::client_text;
use crate::flow::{
    Downstream, ERROR_CODE, Flow, IncomingRequest, Outcome, RecordGuard, RequestTrace, ResponseHead, RoutingTable,
    refuse,
};
use crate::telemetry::Telemetry;
use sluice_core::openai::{ErrorFormat, Refusal, Route, RouteHint, ShedReason};

/// Paths that the gateway serves itself, with GET and HEAD.
const LOCAL_PATHS: [&str; 3] = ["/health", "/ready", "/v1/models"];

/// Responses that the gateway generates itself, besides refusals.
pub trait LocalRoutes: std::fmt::Debug + Send + Sync {
    /// Whether a pool has a backend that could take a request.
    fn ready(&self) -> bool;

    /// The body of `/v1/models` for the client with this key; `None` where no key is required.
    fn models(&self, table: &RoutingTable, key: Option<&ApiKey>) -> Bytes;
}

/// The request path between sockets. Not generic here, so that it is compiled once, with this crate.
pub type ProxyFlow = Flow<UpstreamConnector, Arc<Telemetry>>;

/// The client side of the gateway.
#[derive(Debug)]
pub struct Gateway {
    pub(super) flow: Arc<ProxyFlow>,
    local: Box<dyn LocalRoutes>,
    pub(super) clients: Arc<ClientLimits>,
    seed: u64,
    /// Number of requests so far. Request ids are generated from it and the seed.
    served: AtomicU64,
}

/// A response of the gateway itself.
struct LocalResponse {
    status: StatusCode,
    body: Bytes,
}

/// A request whose head was checked and whose body was read.
struct AcceptedRequest {
    route: Route,
    /// `None` where no key is required.
    key: Option<ApiKey>,
    body: Bytes,
    /// The configuration in force when the body was complete.
    table: Arc<RoutingTable>,
}

/// Why a request was not accepted.
enum Rejected {
    Refused(Refusal),
    /// Refused, and the connection is closed: the end of the request is not known, or there are too many connections.
    Unreadable(Refusal),
    /// The client left; no response can reach it.
    ClientGone,
}

impl From<Refusal> for Rejected {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Gateway {
    /// A gateway whose generated request ids start from `seed`.
    pub fn new(flow: Arc<ProxyFlow>, local: Box<dyn LocalRoutes>, clients: Arc<ClientLimits>, seed: u64) -> Self {
        Self { flow, local, clients, seed, served: AtomicU64::new(0) }
    }

    /// Waits for a request and reads its head.
    async fn read_head(&self, session: &mut ServerSession, shutdown: &ShutdownWatch) -> Result<(), NoHead> {
        let times = {
            let server = &self.flow.routing_table().config.server;
            HeadTimes { idle: server.keepalive, head: server.header_timeout }
        };
        // `head::read` has its own deadlines: those of pingora restart with each read.
        session.set_keepalive(Some(0));
        session.set_read_timeout(None);
        // Keep pipelined requests. Bytes after a body do not mean that the client disconnected.
        session.set_pipelining_enabled(true);
        head::read(session, times, shutdown).await
    }

    /// Serves one request.
    async fn serve(&self, session: &mut ServerSession, shutdown: &ShutdownWatch) -> Next {
        let table = self.flow.routing_table();
        let number = self.served.fetch_add(1, Ordering::Relaxed);
        let ids = headers::request_ids(&session.req_header().headers, self.seed, number);
        let path = session.req_header().uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        let bare = path.split('?').next().unwrap_or("/");
        let route = Route::from_path(bare);
        let begun = Instant::now();
        let checked = head::check(session).map_err(Rejected::Unreadable);
        if checked.is_ok()
            && !is_refused(session)
            && let Some(response) = self.local_response(session, bare, &table)
        {
            let sent = self.send_local(session, response, &ids.client).await;
            return if sent { Next::Request } else { Next::CLOSE };
        }
        let trace = headers::trace(&session.req_header().headers, &table.config, self.seed, number);
        let accepted = match checked {
            Ok(()) if is_refused(session) => Err(shed(ShedReason::Connections)),
            Ok(()) => self.accept(session, table, route, shutdown).await,
            Err(rejected) => Err(rejected),
        };
        match accepted {
            Ok(accepted) => {
                let incoming = incoming(session, accepted, path, ids, trace);
                let mut client = DownstreamConnection::new(session);
                self.flow.run(incoming, &mut client).await;
                if client.is_finished() { Next::Request } else { Next::CLOSE }
            }
            Err(rejected) => {
                let mut record = RecordGuard::new(self.flow.recorder(), route, ids.client, begun);
                record.trace = trace;
                record.client = client_address(session, &self.flow.routing_table().config);
                if route.is_none() {
                    // Without the query, which may contain credentials.
                    record.path = path.split('?').next().map(client_text);
                }
                self.reject(session, rejected, record).await
            }
        }
    }

    /// Refuses a request, whose body may not have been read.
    async fn reject(
        &self,
        session: &mut ServerSession,
        rejected: Rejected,
        mut record: RecordGuard<'_, Arc<Telemetry>>,
    ) -> Next {
        let (refusal, unread) = match rejected {
            Rejected::Refused(refusal) => (refusal, !session.is_body_done()),
            Rejected::Unreadable(refusal) => (refusal, true),
            Rejected::ClientGone => return Next::CLOSE,
        };
        if let Refusal::Shed { reason, .. } = refusal {
            record.outcome = Outcome::Shed(reason);
        }
        if unread {
            session.set_keepalive(None);
        }
        let format = headers::error_format(&session.req_header().headers, session.req_header().uri.path());
        let mut client = DownstreamConnection::new(session);
        refuse(&mut client, &refusal, format, &mut record).await;
        match client.is_finished() {
            true if !unread => Next::Request,
            // A shutdown does not wait for clients that keep sending.
            true if self.flow.is_closing() => Next::Close { linger: LINGER_CLOSING },
            true => Next::Close { linger: LINGER },
            false => Next::CLOSE,
        }
    }

    /// Checks the head of a request and reads its body.
    async fn accept(
        &self,
        session: &mut ServerSession,
        table: Arc<RoutingTable>,
        route: Option<Route>,
        shutdown: &ShutdownWatch,
    ) -> Result<AcceptedRequest, Rejected> {
        let (route, key) = self.check_head(session, &table, route)?;
        let limit = table.config.server.max_body.0;
        if body::declared_size(session).is_some_and(|size| size > limit) {
            return Err(Refusal::BodyTooLarge { limit }.into());
        }
        match expectation(session) {
            Some(true) => session.write_continue_response().await.map_err(|_| Rejected::ClientGone)?,
            Some(false) => return Err(Refusal::ExpectationFailed.into()),
            None => {}
        }
        let min_rate = MinRate::new(table.config.server.body_timeout, table.config.server.body_min_rate.0);
        let mut stop = shutdown.clone();
        let read = tokio::select! {
            biased;
            read = body::read(session, limit, min_rate, self.clients.body()) => read,
            // It would be refused anyway when complete, and a client that never completes it would delay the shutdown.
            _ = stop.wait_for(|stopping| *stopping) => Err(BodyError::Stopping),
        };
        match read {
            Ok(body) => self.admit(session, table, route, key, body),
            Err(BodyError::TooLarge) => Err(Refusal::BodyTooLarge { limit }.into()),
            Err(BodyError::TooSlow) => Err(Refusal::BodyTimeout.into()),
            Err(BodyError::Malformed) => {
                let message = "the chunks of the body are malformed".to_owned();
                Err(Rejected::Unreadable(Refusal::BadRequest { message, param: None }))
            }
            Err(BodyError::NoMemory) => Err(shed(ShedReason::BodyMemory)),
            Err(BodyError::Stopping) => Err(shed(ShedReason::ShuttingDown)),
            Err(BodyError::ClientGone) => Err(Rejected::ClientGone),
        }
    }

    /// Checks the key again, and takes the configuration in force, when the body is complete: receiving it may take long.
    fn admit(
        &self,
        session: &ServerSession,
        table: Arc<RoutingTable>,
        route: Route,
        key: Option<ApiKey>,
        body: Bytes,
    ) -> Result<AcceptedRequest, Rejected> {
        let current = self.flow.routing_table();
        let key = if Arc::ptr_eq(&table, &current) { key } else { authenticate(session, &current)? };
        Ok(AcceptedRequest { route, key, body, table: current })
    }

    /// Checks request line and headers, except framing and host, cheapest check first.
    fn check_head(
        &self,
        session: &ServerSession,
        table: &RoutingTable,
        route: Option<Route>,
    ) -> Result<(Route, Option<ApiKey>), Refusal> {
        if headers::too_large(&session.req_header().headers) {
            return Err(Refusal::HeadersTooLarge);
        }
        let route = route.ok_or_else(|| self.not_a_route(session, table))?;
        if !route.takes(session.req_header().method.as_str()) {
            return Err(Refusal::MethodNotAllowed { allow: route.methods() });
        }
        Ok((route, authenticate(session, table)?))
    }

    /// The response on routes that the gateway serves itself.
    fn local_response(&self, session: &ServerSession, path: &str, table: &RoutingTable) -> Option<LocalResponse> {
        let method = &session.req_header().method;
        if method != Method::GET && method != Method::HEAD {
            return None;
        }
        let empty = |ok: bool| {
            let status = if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            Some(LocalResponse { status, body: Bytes::new() })
        };
        match path {
            "/health" => empty(true),
            "/ready" => empty(self.local.ready() && !self.flow.is_leaving()),
            "/v1/models" => self.list_models(session, table),
            _ => None,
        }
    }

    /// The models that the client may use. `None` without a valid key where one is required.
    fn list_models(&self, session: &ServerSession, table: &RoutingTable) -> Option<LocalResponse> {
        let key = headers::client_key(&session.req_header().headers);
        let key = table.keys.authenticate(key.as_deref()).ok()?;
        Some(LocalResponse { status: StatusCode::OK, body: self.local.models(table, key.as_ref()) })
    }

    /// The refusal of a path that is neither a route of the API nor served by the gateway itself.
    fn not_a_route(&self, session: &ServerSession, table: &RoutingTable) -> Refusal {
        let request = session.req_header();
        if !LOCAL_PATHS.contains(&request.uri.path()) {
            return Refusal::UnknownRoute { hint: RouteHint::of(request.uri.path()) };
        }
        match request.method {
            // Only the list of models requires a key.
            Method::GET | Method::HEAD => {
                authenticate(session, table).err().unwrap_or(Refusal::UnknownRoute { hint: None })
            }
            _ => Refusal::MethodNotAllowed { allow: "GET, HEAD" },
        }
    }

    async fn send_local(&self, session: &mut ServerSession, response: LocalResponse, request_id: &str) -> bool {
        let mut map = HeaderMap::with_capacity(3);
        map.insert(CONTENT_LENGTH, HeaderValue::from(response.body.len()));
        if !response.body.is_empty() {
            map.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Ok(id) = HeaderValue::from_str(request_id) {
            map.insert(HeaderName::from_static("x-request-id"), id);
        }
        let head_only = session.req_header().method == Method::HEAD;
        let mut client = DownstreamConnection::new(session);
        let sent = async {
            client.head(ResponseHead { status: response.status, headers: map }).await?;
            if !head_only {
                client.body(response.body, true).await?;
            }
            client.finish().await
        };
        sent.await.is_ok()
    }
}

/// The client's key; `None` where none is required.
fn authenticate(session: &ServerSession, table: &RoutingTable) -> Result<Option<ApiKey>, Refusal> {
    if !table.keys.is_required() {
        return Ok(None);
    }
    let key = headers::client_key(&session.req_header().headers);
    table.keys.authenticate(key.as_deref()).map_err(|error| match error {
        KeyError::Missing => Refusal::NoKey,
        KeyError::Unknown => Refusal::BadKey,
    })
}

fn incoming(
    session: &mut ServerSession,
    accepted: AcceptedRequest,
    path: String,
    ids: RequestIds,
    trace: Option<Box<RequestTrace>>,
) -> Box<IncomingRequest> {
    let method = session.req_header().method.clone();
    // pingora no longer needs the headers, so they are moved and not copied.
    let sent = take_headers(session);
    let content_type = sent.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let AcceptedRequest { route, key, body, table: routing } = accepted;
    let headers = headers::for_engine(sent, routing.keys.is_required());
    let client = client_address(session, &routing.config);
    let arrived = Instant::now();
    let RequestIds { client: request_id, upstream: upstream_id } = ids;
    Box::new(IncomingRequest {
        route,
        method,
        path,
        headers,
        content_type,
        body,
        arrived,
        request_id,
        upstream_id,
        trace,
        routing,
        client,
        key,
        copy_for: None,
    })
}

/// Takes the headers out of a session. The request line stays, which is all that pingora still reads.
fn take_headers(session: &mut ServerSession) -> HeaderMap {
    let version = session.req_header().version;
    let Ok(mut bare) = RequestHeader::build(Method::POST, b"/", Some(0)) else {
        return session.req_header().headers.clone();
    };
    bare.set_version(version);
    http::request::Parts::from(std::mem::replace(session.req_header_mut(), bare)).headers
}

impl HttpServerApp for Gateway {
    /// Written without `async_trait`, which would store the session (680 bytes) twice for every open stream.
    fn process_new_http<'a, 'b, 'c>(
        self: &'a Arc<Self>,
        mut session: ServerSession,
        shutdown: &'b ShutdownWatch,
    ) -> Pin<Box<dyn Future<Output = Option<ReusedHttpStream>> + Send + 'c>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async move {
            let next = match self.read_head(&mut session, shutdown).await {
                Ok(()) => {
                    if self.flow.is_closing() || self.flow.is_handed_over() {
                        session.set_keepalive(None);
                    }
                    self.serve(&mut session, shutdown).await
                }
                Err(NoHead::Closed) => return None,
                Err(NoHead::Refused(refusal)) => {
                    refuse_head(&mut session, &refusal, &self.flow).await;
                    Next::Close { linger: LINGER }
                }
            };
            if let Next::Close { linger } = next {
                end(&mut session, linger).await;
                return None;
            }
            after::end_stream(&mut session).await;
            let settings = HttpPersistentSettings::for_session(&session);
            let (stream, ahead) = timeout(SETTLE, session.finish()).await.ok()?.ok()??.into_parts();
            if let Some(client) = ClientHandle::below(&stream) {
                client.state.next_request(ahead.as_deref().unwrap_or_default());
            }
            Some(reused(stream, ahead, settings))
        })
    }
}

fn reused(stream: Stream, ahead: Option<BytesMut>, mut settings: HttpPersistentSettings) -> ReusedHttpStream {
    if let Some(ahead) = ahead {
        settings.set_pipelined_prefix(ahead);
    }
    ReusedHttpStream::new(stream, Some(settings))
}

/// Refuses a request early; no pool is known yet.
fn shed(reason: ShedReason) -> Rejected {
    let refusal = Refusal::Shed { reason, retry_after: RETRY_AFTER_MIN.as_secs() };
    // A connection over the limit gets one response and is closed.
    if reason == ShedReason::Connections { Rejected::Unreadable(refusal) } else { Rejected::Refused(refusal) }
}

/// Whether there are too many connections for this one.
fn is_refused(session: &ServerSession) -> bool {
    ClientHandle::of(session).is_some_and(|client| client.state.is_refused())
}

/// Whether the client waits for `100 Continue`. `Some(false)`: another expectation. HTTP/1.0 has none (RFC 9110, 10.1.1).
fn expectation(session: &ServerSession) -> Option<bool> {
    let request = session.req_header();
    let expected = request.headers.get(EXPECT).filter(|_| request.version > Version::HTTP_10)?;
    Some(expected.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// Refuses a request whose head could not be read.
async fn refuse_head(session: &mut ServerSession, refusal: &Refusal, flow: &ProxyFlow) {
    session.set_keepalive(None);
    let mut record = RecordGuard::new(flow.recorder(), None, "-".into(), Instant::now());
    record.outcome = Outcome::Refused;
    record.refused = Some(refusal.code());
    record.client = client_address(session, &flow.routing_table().config);
    let mut parts = http::Response::new(()).into_parts().0;
    parts.status = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::BAD_REQUEST);
    record.status = Some(parts.status);
    let body = Bytes::from(refusal.body(ErrorFormat::OpenAi));
    parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    parts.headers.insert(ERROR_CODE, HeaderValue::from_static(refusal.code()));
    let response = pingora::http::ResponseHeader::from(parts);
    let _ = timeout(SETTLE, session.write_error_response(response, body)).await;
}
