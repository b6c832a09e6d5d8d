//! One client connection's requests: what is answered here, what is refused before its body, and what
//! goes down the request path.
//!
//! Order of checks, cheapest and most certain first: request line and headers (400, 431), an upgrade
//! (501), the route (404, 405), the key (401), the announced size (413), the body (413, 408). A request
//! that is refused with its body unread closes the connection, after the client had a chance to read why.
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

/// Paths that are answered here, with GET and HEAD.
const LOCAL_PATHS: [&str; 3] = ["/health", "/ready", "/v1/models"];

/// What the gateway answers itself, beside refusals.
pub trait LocalRoutes: Send + Sync + 'static {
    /// Whether at least one backend of every pool could take a request.
    fn ready(&self) -> bool;

    /// The body of `/v1/models` for the holder of a key; without keys there is no holder.
    fn models(&self, plan: &RoutingTable, holder: Option<&ApiKey<'_>>) -> Bytes;
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

/// A local answer.
struct LocalResponse {
    status: StatusCode,
    body: Bytes,
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
        let plan = self.flow.routing_table();
        let number = self.served.fetch_add(1, Ordering::Relaxed);
        let request_id = headers::request_id(&session.req_header().headers, self.seed, number);
        let path = session.req_header().uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        let bare = path.split('?').next().unwrap_or("/");
        let route = Route::from_path(bare);
        if let Some(answer) = self.answer(session, bare) {
            return self.send_local(session, answer, &request_id).await;
        }
        let begun = Instant::now();
        match self.before_body(session, &plan, route).await {
            Ok((route, body)) => {
                let incoming = incoming(session, &plan, route, path, body, Arc::clone(&request_id));
                let mut client = DownstreamConnection::new(session);
                self.flow.run(incoming, &mut client).await;
                client.is_finished()
            }
            Err(refusal) => {
                let record = RecordGuard::new(self.flow.recorder(), route, request_id, begun);
                self.refuse(session, refusal, route, record).await
            }
        }
    }

    /// Refuses a request, whose body may not have been read; whether the connection may be used for another.
    async fn refuse(
        &self,
        session: &mut ServerSession,
        refusal: Option<Refusal>,
        route: Option<Route>,
        mut record: RecordGuard<'_, R>,
    ) -> bool {
        let unread = !session.is_body_done();
        if unread {
            session.set_keepalive(None);
        }
        let Some(refusal) = refusal else { return false };
        let mut client = DownstreamConnection::new(session);
        let format = route.map_or(ErrorFormat::OpenAi, Route::error_format);
        refuse(&mut client, &refusal, format, &mut record).await;
        let finished = client.is_finished();
        if unread && finished {
            body::linger(session).await;
        }
        finished && !unread
    }

    /// Everything that is checked before the path of the request begins. `Err(None)`: nobody is there
    /// any more to be told.
    async fn before_body(
        &self,
        session: &mut ServerSession,
        plan: &RoutingTable,
        route: Option<Route>,
    ) -> Result<(Route, Bytes), Option<Refusal>> {
        if headers::too_large(&session.req_header().headers) {
            return Err(Some(Refusal::HeadersTooLarge));
        }
        if session.is_upgrade_req() {
            return Err(Some(Refusal::UpgradeRefused));
        }
        if body::is_framed_twice(session) {
            let message = "both Content-Length and Transfer-Encoding were sent; send one of them".to_owned();
            return Err(Some(Refusal::BadRequest { message, param: None }));
        }
        let Some(route) = route else { return Err(Some(self.not_a_route(session, plan))) };
        if session.req_header().method != Method::POST {
            return Err(Some(Refusal::MethodNotAllowed { allow: "POST" }));
        }
        key_refusal(session, plan).map_or(Ok(()), |refusal| Err(Some(refusal)))?;
        let limit = plan.config.server.max_body.0;
        let too_large = || Some(Refusal::BodyTooLarge { limit });
        if body::announced(session).is_some_and(|size| size > limit) {
            return Err(too_large());
        }
        match session.get_header(EXPECT).map(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
            Some(true) => session.write_continue_response().await.map_err(|_| None)?,
            Some(false) => return Err(Some(Refusal::ExpectationFailed)),
            None => {}
        }
        match body::read(session, limit, plan.config.server.body_timeout).await {
            Ok(body) => Ok((route, body)),
            Err(BodyError::TooLarge) => Err(too_large()),
            Err(BodyError::TooSlow) => Err(Some(Refusal::BodyTimeout)),
            Err(BodyError::ClientGone) => Err(None),
        }
    }

    /// The routes that are answered here.
    fn answer(&self, session: &ServerSession, path: &str) -> Option<LocalResponse> {
        let method = &session.req_header().method;
        if method != Method::GET && method != Method::HEAD {
            return None;
        }
        let status = |ok: bool| if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        match path {
            "/health" => Some(LocalResponse { status: StatusCode::OK, body: Bytes::new() }),
            "/ready" => Some(LocalResponse {
                status: status(self.local.ready() && !self.flow.is_closing()),
                body: Bytes::new(),
            }),
            "/v1/models" => self.list(session),
            _ => None,
        }
    }

    /// The models that the sender of a request may use; nothing without a key that is asked for.
    fn list(&self, session: &ServerSession) -> Option<LocalResponse> {
        let plan = self.flow.routing_table();
        let holder = match plan.keys.is_open() {
            true => None,
            false => {
                let key = headers::client_key(&session.req_header().headers);
                Some(plan.keys.recognise(key.as_deref()).ok()?)
            }
        };
        Some(LocalResponse { status: StatusCode::OK, body: self.local.models(&plan, holder.as_ref()) })
    }

    /// Why a path that leads to no engine was not answered here either.
    fn not_a_route(&self, session: &ServerSession, plan: &RoutingTable) -> Refusal {
        let request = session.req_header();
        if !LOCAL_PATHS.contains(&request.uri.path()) {
            return Refusal::UnknownRoute;
        }
        match request.method {
            // Only the list of models asks for a key.
            Method::GET | Method::HEAD => key_refusal(session, plan).unwrap_or(Refusal::UnknownRoute),
            _ => Refusal::MethodNotAllowed { allow: "GET, HEAD" },
        }
    }

    async fn send_local(&self, session: &mut ServerSession, answer: LocalResponse, request_id: &str) -> bool {
        let mut map = HeaderMap::with_capacity(3);
        map.insert(CONTENT_LENGTH, HeaderValue::from(answer.body.len()));
        if !answer.body.is_empty() {
            map.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Ok(id) = HeaderValue::from_str(request_id) {
            map.insert(HeaderName::from_static("x-request-id"), id);
        }
        let head_only = session.req_header().method == Method::HEAD;
        let mut client = DownstreamConnection::new(session);
        let sent = async {
            client.head(ResponseHead { status: answer.status, headers: map }).await?;
            if !head_only {
                client.body(answer.body, true).await?;
            }
            client.finish().await
        };
        sent.await.is_ok()
    }
}

/// What is wrong with the key of a request, where keys are asked for.
fn key_refusal(session: &ServerSession, plan: &RoutingTable) -> Option<Refusal> {
    if plan.keys.is_open() {
        return None;
    }
    let key = headers::client_key(&session.req_header().headers);
    plan.keys.recognise(key.as_deref()).err().map(|error| match error {
        KeyError::Missing => Refusal::NoKey,
        KeyError::Unknown => Refusal::BadKey,
    })
}

fn incoming(
    session: &mut ServerSession,
    plan: &RoutingTable,
    route: Route,
    path: String,
    body: Bytes,
    request_id: Arc<str>,
) -> Box<IncomingRequest> {
    // Everything that pingora reads in them has been read: they are taken, not copied.
    let sent = take_headers(session);
    let ours = !plan.keys.is_open();
    let content_type = sent.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let key = if ours { headers::client_key(&sent) } else { None };
    let headers = headers::for_engine(sent, ours);
    Box::new(IncomingRequest { route, path, headers, content_type, body, arrived: Instant::now(), request_id, key })
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

/// Answers a request whose head could not be read.
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
