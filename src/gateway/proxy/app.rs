//! The requests of one client connection: local responses, refusals before the body, and the request path.
//!
//! Order of checks, cheapest first: request line and headers (400, 431), an upgrade (501), the route (404, 405), the key
//! (401), the announced size (413), the body (413, 408). A request that is refused with its body unread closes the
//! connection, after the client had time to read the response.
//!
//! Only the routes of this table reach an engine; its control routes (sleep, LoRA loading, profiling,
//! metrics) are never reachable from the client port.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode};
use pingora::apps::{HttpPersistentSettings, HttpServerApp, ReusedHttpStream};
use pingora::http::RequestHeader;
use pingora::protocols::http::ServerSession;
use pingora::server::ShutdownWatch;
use tokio::time::{Instant, timeout};

use super::body::{self, BodyError};
use super::downstream::DownstreamConnection;
use super::headers;
use crate::flow::keys::{ApiKey, KeyError};
use crate::flow::{
    Downstream, Flow, IncomingRequest, RecordGuard, Recorder, ResponseHead, RoutingTable, Upstream, refuse,
};
use sluice_core::openai::{ErrorFormat, Refusal, Route};

/// Paths that the gateway serves itself, with GET and HEAD.
const LOCAL_PATHS: [&str; 3] = ["/health", "/ready", "/v1/models"];

/// What the gateway serves itself, besides refusals.
pub trait LocalRoutes: Send + Sync + 'static {
    /// Whether at least one backend of every pool could take a request.
    fn ready(&self) -> bool;

    /// The body of `/v1/models` for the client with this key; `None` where no key is required.
    fn models(&self, table: &RoutingTable, key: Option<&ApiKey>) -> Bytes;
}

/// The client side of the gateway.
#[derive(Debug)]
pub struct Gateway<U, R, L> {
    flow: Arc<Flow<U, R>>,
    local: L,
    seed: u64,
    /// Requests so far; with the seed it makes a request id.
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
}

/// Why a request was not accepted.
enum Rejected {
    Refused(Refusal),
    /// The client left; no response can reach it.
    ClientGone,
}

impl From<Refusal> for Rejected {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl<U: Upstream, R: Recorder, L: LocalRoutes> Gateway<U, R, L> {
    /// A gateway whose generated request ids start from `seed`.
    pub fn new(flow: Arc<Flow<U, R>>, local: L, seed: u64) -> Self {
        Self { flow, local, seed, served: AtomicU64::new(0) }
    }

    /// Waits for a request and reads its head; false when there is none to serve.
    async fn read_head(&self, session: &mut ServerSession, shutdown: &ShutdownWatch) -> bool {
        let (keepalive, header_timeout) = {
            let server = &self.flow.routing_table().config.server;
            (server.keepalive, server.header_timeout)
        };
        session.set_keepalive(Some(keepalive.as_secs().max(1)));
        // A pipelined request is kept for its turn; bytes after a body are not a client that left.
        session.set_pipelining_enabled(true);
        let mut stop = shutdown.clone();
        let read = tokio::select! {
            biased;
            read = timeout(keepalive + header_timeout, session.read_request()) => read,
            // Between requests a connection is closed at once when the gateway stops.
            _ = stop.wait_for(|stopping| *stopping) => return false,
        };
        match read {
            Ok(Ok(request)) => request,
            Ok(Err(error)) => {
                refuse_head(session, &error, &self.flow).await;
                false
            }
            Err(_) => false,
        }
    }

    /// Serves one request; whether the connection may be used for another.
    async fn serve(&self, session: &mut ServerSession) -> bool {
        let table = self.flow.routing_table();
        let number = self.served.fetch_add(1, Ordering::Relaxed);
        let request_id = headers::request_id(&session.req_header().headers, self.seed, number);
        let path = session.req_header().uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        let bare = path.split('?').next().unwrap_or("/");
        let route = Route::from_path(bare);
        if let Some(response) = self.local_response(session, bare, &table) {
            return self.send_local(session, response, &request_id).await;
        }
        let begun = Instant::now();
        match self.accept(session, &table, route).await {
            Ok(accepted) => {
                let incoming = incoming(session, table, accepted, path, Arc::clone(&request_id));
                let mut client = DownstreamConnection::new(session);
                self.flow.run(incoming, &mut client).await;
                client.is_finished()
            }
            Err(rejected) => {
                let record = RecordGuard::new(self.flow.recorder(), route, request_id, begun);
                self.reject(session, rejected, route, record).await
            }
        }
    }

    /// Refuses a request, whose body may not have been read; whether the connection may be used for another.
    async fn reject(
        &self,
        session: &mut ServerSession,
        rejected: Rejected,
        route: Option<Route>,
        mut record: RecordGuard<'_, R>,
    ) -> bool {
        let unread = !session.is_body_done();
        if unread {
            session.set_keepalive(None);
        }
        let Rejected::Refused(refusal) = rejected else { return false };
        let mut client = DownstreamConnection::new(session);
        let format = route.map_or(ErrorFormat::OpenAi, Route::error_format);
        refuse(&mut client, &refusal, format, &mut record).await;
        let finished = client.is_finished();
        if unread && finished {
            body::linger(session).await;
        }
        finished && !unread
    }

    /// Checks the head of a request and reads its body.
    async fn accept(
        &self,
        session: &mut ServerSession,
        table: &RoutingTable,
        route: Option<Route>,
    ) -> Result<AcceptedRequest, Rejected> {
        let (route, key) = self.check_head(session, table, route)?;
        let limit = table.config.server.max_body.0;
        if body::announced(session).is_some_and(|size| size > limit) {
            return Err(Refusal::BodyTooLarge { limit }.into());
        }
        match session.get_header(EXPECT).map(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
            Some(true) => session.write_continue_response().await.map_err(|_| Rejected::ClientGone)?,
            Some(false) => return Err(Refusal::ExpectationFailed.into()),
            None => {}
        }
        match body::read(session, limit, table.config.server.body_timeout).await {
            Ok(body) => Ok(AcceptedRequest { route, key, body }),
            Err(BodyError::TooLarge) => Err(Refusal::BodyTooLarge { limit }.into()),
            Err(BodyError::TooSlow) => Err(Refusal::BodyTimeout.into()),
            Err(BodyError::ClientGone) => Err(Rejected::ClientGone),
        }
    }

    /// Everything that request line and headers decide, cheapest check first.
    fn check_head(
        &self,
        session: &ServerSession,
        table: &RoutingTable,
        route: Option<Route>,
    ) -> Result<(Route, Option<ApiKey>), Refusal> {
        if headers::too_large(&session.req_header().headers) {
            return Err(Refusal::HeadersTooLarge);
        }
        if session.is_upgrade_req() {
            return Err(Refusal::UpgradeRefused);
        }
        if body::is_framed_twice(session) {
            let message = "both Content-Length and Transfer-Encoding were sent; send one of them".to_owned();
            return Err(Refusal::BadRequest { message, param: None });
        }
        let route = route.ok_or_else(|| self.not_a_route(session, table))?;
        if session.req_header().method != Method::POST {
            return Err(Refusal::MethodNotAllowed { allow: "POST" });
        }
        Ok((route, authenticate(session, table)?))
    }

    /// The response of the gateway itself, on the routes that have one.
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
            "/ready" => empty(self.local.ready() && !self.flow.is_closing()),
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

    /// The refusal of a path that leads to no engine and got no local response either.
    fn not_a_route(&self, session: &ServerSession, table: &RoutingTable) -> Refusal {
        let request = session.req_header();
        if !LOCAL_PATHS.contains(&request.uri.path()) {
            return Refusal::UnknownRoute;
        }
        match request.method {
            // Only the list of models requires a key.
            Method::GET | Method::HEAD => authenticate(session, table).err().unwrap_or(Refusal::UnknownRoute),
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
    routing: Arc<RoutingTable>,
    accepted: AcceptedRequest,
    path: String,
    request_id: Arc<str>,
) -> Box<IncomingRequest> {
    // pingora has read everything that it needs of the headers: they are moved, not copied.
    let sent = take_headers(session);
    let content_type = sent.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let headers = headers::for_engine(sent, routing.keys.is_required());
    let AcceptedRequest { route, key, body } = accepted;
    let arrived = Instant::now();
    Box::new(IncomingRequest { route, path, headers, content_type, body, arrived, request_id, routing, key })
}

/// Takes the headers out of a session and leaves a request line behind, which is all that pingora still looks at.
fn take_headers(session: &mut ServerSession) -> HeaderMap {
    let version = session.req_header().version;
    let Ok(mut bare) = RequestHeader::build(Method::POST, b"/", Some(0)) else {
        return session.req_header().headers.clone();
    };
    bare.set_version(version);
    http::request::Parts::from(std::mem::replace(session.req_header_mut(), bare)).headers
}

impl<U: Upstream, R: Recorder, L: LocalRoutes> HttpServerApp for Gateway<U, R, L> {
    /// Written out and not by `async_trait`, which keeps the session (680 bytes) twice in every open stream.
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
            if !self.read_head(&mut session, shutdown).await {
                return None;
            }
            if self.flow.is_closing() {
                session.set_keepalive(None);
            }
            if !self.serve(&mut session).await {
                session.shutdown().await;
                return None;
            }
            let settings = HttpPersistentSettings::for_session(&session);
            let reusable = timeout(SETTLE, session.finish()).await.ok()?.ok()??;
            Some(ReusedHttpStream::from_reusable_stream(reusable, settings))
        })
    }
}

/// How long the end of a request may take before its connection is given up.
const SETTLE: Duration = Duration::from_secs(5);

/// Refuses a request whose head could not be read.
async fn refuse_head<U: Upstream, R: Recorder>(session: &mut ServerSession, error: &pingora::Error, flow: &Flow<U, R>) {
    use pingora::ErrorType::InvalidHTTPHeader;
    if *error.etype() != InvalidHTTPHeader {
        return;
    }
    let text = error.to_string();
    let refusal =
        if text.contains("larger than") || text.contains("TooManyHeaders") || text.contains("too many headers") {
            Refusal::HeadersTooLarge
        } else {
            Refusal::BadRequest { message: "the request line or a header is malformed".to_owned(), param: None }
        };
    session.set_keepalive(None);
    let mut record = RecordGuard::new(flow.recorder(), None, "-".into(), Instant::now());
    record.outcome = crate::flow::Outcome::Refused;
    let mut parts = http::Response::new(()).into_parts().0;
    parts.status = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::BAD_REQUEST);
    record.status = Some(parts.status);
    let body = Bytes::from(refusal.body(ErrorFormat::OpenAi));
    parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    let response = pingora::http::ResponseHeader::from(parts);
    let _ = timeout(SETTLE, session.write_error_response(response, body)).await;
}
