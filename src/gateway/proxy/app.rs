//! The requests of one client connection: refusals before the body, and the request path.
//!
//! Order of checks, cheapest first: framing and host (400, 501; see `head.rs`), size of the headers
//! (431), route (404, 405), key (401), coding (415) and declared size of the body (413), the body
//! (413, 408, 400). A refusal before the body is read closes the connection, after the client had
//! time to read the response. A request whose body is still arriving when the gateway stops is
//! refused at once (503).
//!
//! Only the routes of the API reach an engine, not control routes (sleep, LoRA loading, profiling,
//! metrics).

use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, EXPECT};
use http::{HeaderMap, Method, Version};
use pingora::apps::{HttpPersistentSettings, HttpServerApp, ReusedHttpStream};
use pingora::http::RequestHeader;
use pingora::protocols::http::ServerSession;
use pingora::server::ShutdownWatch;
use tokio::time::{Instant, timeout};

use super::after::{self, LINGER, LINGER_CLOSING, Next, SETTLE, end, peer, shown};
use super::body::{self, BodyError, MinRate};
use super::client_handle::ClientHandle;
use super::clients::ClientLimits;
use super::cors::{self, CrossOrigin};
use super::decode::{self, Coding};
use super::downstream::DownstreamConnection;
use super::engine_origins::{Asker, EngineOrigins};
use super::head::{self, HeadTimes, NoHead, too_many};
use super::headers::{self, RequestIds};
use super::local::{self, LocalResponse, LocalRoutes};
use super::proxy_flow::{ProxyFlow, refuse_head};
use super::trust;
use super::tunnel;
use crate::flow::keys::ApiKey;
use crate::flow::record::client_text;
use crate::flow::{IncomingRequest, Outcome, RecordGuard, RequestTrace, RoutingTable, refuse};
use crate::origin::Origin;
use crate::shares::{Owner, network};
use crate::telemetry::Telemetry;
use sluice_config::limits::RETRY_AFTER_MIN;
use sluice_core::openai::route::canonical;
use sluice_core::openai::{Refusal, Route, ShedReason, invocation};

/// The client side of the gateway.
#[derive(Debug)]
pub struct Gateway {
    pub(super) flow: Arc<ProxyFlow>,
    local: Box<dyn LocalRoutes>,
    pub(super) clients: Arc<ClientLimits>,
    origins: Arc<EngineOrigins>,
    seed: u64,
    /// Number of requests so far, part of generated request ids.
    served: AtomicU64,
}

struct AcceptedRequest {
    route: Route,
    key: Option<ApiKey>,
    body: Bytes,
    /// The configuration in force when the body was complete.
    table: Arc<RoutingTable>,
}

enum Rejected {
    Refused(Refusal),
    /// Refused, and the connection is closed: the end of the request is unknown, or there are too
    /// many connections.
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
        Self { flow, local, clients, origins: Arc::default(), seed, served: AtomicU64::new(0) }
    }

    fn client(&self, session: &ServerSession, table: &RoutingTable) -> Option<IpAddr> {
        let (headers, from) = (&session.req_header().headers, peer(session)?);
        Some(trust::client(headers, from, &table.config.server, &self.clients.proxies))
    }

    async fn read_head(&self, session: &mut ServerSession, shutdown: &ShutdownWatch) -> Result<(), NoHead> {
        let times = {
            let server = &self.flow.routing_table().config.server;
            HeadTimes { idle: server.keepalive, head: server.header_timeout }
        };
        // `head::read` has deadlines for the whole head, while pingora's deadlines restart with
        // each read.
        session.set_keepalive(Some(0));
        session.set_read_timeout(None);
        // Keeps pipelined requests, so that bytes after a body do not count as a disconnect.
        session.set_pipelining_enabled(true);
        head::read(session, times, shutdown).await
    }

    async fn serve(&self, session: &mut ServerSession, shutdown: &ShutdownWatch) -> Next {
        let table = self.flow.routing_table();
        let number = self.served.fetch_add(1, Ordering::Relaxed);
        let ids = headers::request_ids(&session.req_header().headers, self.seed, number);
        let sent = session.req_header().uri.path_and_query().map_or("/", |path| path.as_str());
        let path = canonical(sent).into_owned();
        let bare = path.split('?').next().unwrap_or("/");
        let route = table.route(bare);
        let begun = Instant::now();
        let may_upgrade = route.is_some_and(Route::is_tunnel);
        let mut checked = head::check(session, may_upgrade).map_err(Rejected::Unreadable);
        let client = self.client(session, &table);
        let has_place = has_place(session, client);
        let is_served = checked.is_ok() && has_place;
        let mut origin = self.origin(&table, &session.req_header().headers);
        let page = origin.asks_engines();
        if is_served {
            let request = session.req_header();
            let is_preflight = cors::is_preflight(&request.method, &request.headers);
            if let Some(page) = page.as_ref().filter(|_| is_preflight) {
                self.origins.wait(&self.flow, page, Asker::Anyone).await;
            }
            let response = match origin.preflight(&request.method, &request.headers) {
                None => local::response(&*self.local, !self.flow.is_leaving(), request, bare, &table),
                Some(Ok(headers)) => Some(LocalResponse::to_preflight(headers)),
                Some(Err(refusal)) => {
                    checked = Err(refusal.into());
                    None
                }
            };
            if let Some(response) = response {
                let may_ask = || !is_preflight && headers::authenticate(&request.headers, &table).is_ok();
                if let Some(page) = page.as_ref().filter(|_| may_ask()) {
                    self.origins.wait(&self.flow, page, Asker::Accepted).await;
                }
                return self.send_local(session, response, &ids.client, origin).await;
            }
        }
        let trace = headers::trace(&session.req_header().headers, &table.config, self.seed, number);
        let accepted = match checked {
            Ok(()) if !has_place => Err(Rejected::Unreadable(too_many())),
            Ok(()) => self.accept(session, table, route.ok_or(bare), client, shutdown).await,
            Err(rejected) => Err(rejected),
        };
        match accepted {
            Ok(accepted) => {
                if let Some(page) = &page {
                    self.origins.refresh(&self.flow, page, Asker::Accepted);
                }
                let is_tunnel = accepted.route.is_tunnel();
                let incoming = incoming(session, accepted, path, ids, trace, client);
                if is_tunnel {
                    return Box::pin(tunnel::serve(&self.flow, session, incoming, origin)).await;
                }
                let pause = incoming.routing.timeouts().send;
                let mut client = DownstreamConnection::new(session, origin, pause);
                self.flow.run(incoming, &mut client).await;
                if client.end().await { Next::Request } else { Next::CLOSE }
            }
            Err(rejected) => {
                let mut record = RecordGuard::new(self.flow.recorder(), route, ids.client, begun);
                record.trace = trace;
                record.client = shown(client, &self.flow.routing_table().config);
                if route.is_none() {
                    // The query is left out, because it may contain credentials.
                    record.path = path.split('?').next().map(client_text);
                }
                self.reject(session, rejected, record, origin).await
            }
        }
    }

    fn origin(&self, table: &RoutingTable, headers: &HeaderMap) -> CrossOrigin {
        match &table.config.server.cors {
            Some(policy) => CrossOrigin::of(policy, headers),
            None => CrossOrigin::of_engines(&self.origins, headers),
        }
    }

    /// Refuses a request whose body may not have been read.
    async fn reject(
        &self,
        session: &mut ServerSession,
        rejected: Rejected,
        mut record: RecordGuard<'_, Arc<Telemetry>>,
        origin: CrossOrigin,
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
        let format = headers::error_format(&session.req_header().headers, &canonical(session.req_header().uri.path()));
        let mut client = DownstreamConnection::new(session, origin, self.pause());
        refuse(&mut client, &refusal, format, &mut record).await;
        match client.end().await {
            true if !unread => Next::Request,
            true => self.after_refusal(),
            false => Next::CLOSE,
        }
    }

    /// Sends a response of the gateway itself. If the request's body is not read, the connection
    /// ends.
    async fn send_local(
        &self,
        session: &mut ServerSession,
        response: LocalResponse,
        request_id: &str,
        origin: CrossOrigin,
    ) -> Next {
        let unread = !session.is_body_done();
        if unread {
            session.set_keepalive(None);
        }
        match response.send(session, request_id, origin, self.pause()).await {
            Ok(()) if unread => self.after_refusal(),
            Ok(()) => Next::Request,
            Err(_) => Next::CLOSE,
        }
    }

    /// The longest time for which a client may accept no byte.
    fn pause(&self) -> Duration {
        self.flow.routing_table().timeouts().send
    }

    fn after_refusal(&self) -> Next {
        // A shutdown does not wait for clients that keep sending.
        Next::Close { linger: if self.flow.is_closing() { LINGER_CLOSING } else { LINGER } }
    }

    async fn accept(
        &self,
        session: &mut ServerSession,
        table: Arc<RoutingTable>,
        route: Result<Route, &str>,
        client: Option<IpAddr>,
        shutdown: &ShutdownWatch,
    ) -> Result<AcceptedRequest, Rejected> {
        let (route, key) = self.check_head(session, &table, route)?;
        let coding = Coding::of(&session.req_header().headers)?;
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
        let owner = match &key {
            Some(key) => Owner::Key(Arc::clone(key.name())),
            None => Owner::network(client.unwrap_or(Ipv4Addr::UNSPECIFIED.into())),
        };
        let mut stop = shutdown.clone();
        let read = tokio::select! {
            biased;
            read = body::read(session, limit, min_rate, self.clients.body(owner.clone())) => read,
            // A client that never completes the request would delay the shutdown.
            _ = stop.wait_for(|stopping| *stopping) => Err(BodyError::Stopping),
        };
        match read {
            Ok(body) => {
                let body = match coding {
                    Some(coding) => decode::decode(coding, body, limit, &self.clients, owner).await?,
                    None => body,
                };
                self.recheck(session, table, route, key, body)
            }
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

    /// Checks the key again, with the configuration in force when the body is complete, because
    /// receiving the body may take long.
    fn recheck(
        &self,
        session: &ServerSession,
        table: Arc<RoutingTable>,
        route: Route,
        key: Option<ApiKey>,
        body: Bytes,
    ) -> Result<AcceptedRequest, Rejected> {
        let current = self.flow.routing_table();
        let key = if Arc::ptr_eq(&table, &current) {
            key
        } else {
            headers::authenticate(&session.req_header().headers, &current)?
        };
        let route = if route == Route::Invocations { invocation::route(&body).map_err(Refusal::from)? } else { route };
        Ok(AcceptedRequest { route, key, body, table: current })
    }

    /// Checks request line and headers, except framing and host, cheapest check first. `route` is
    /// `Err(path)` if the path is no route of the API.
    fn check_head(
        &self,
        session: &ServerSession,
        table: &RoutingTable,
        route: Result<Route, &str>,
    ) -> Result<(Route, Option<ApiKey>), Refusal> {
        if headers::too_large(&session.req_header().headers) {
            return Err(Refusal::HeadersTooLarge);
        }
        let route = route.map_err(|path| local::refusal(session.req_header(), path, table))?;
        if !route.takes(session.req_header().method.as_str()) {
            return Err(Refusal::MethodNotAllowed { allow: route.methods() });
        }
        if route == Route::Invocations {
            headers::check_invocation(&session.req_header().headers)?;
        }
        let key = headers::authenticate(&session.req_header().headers, table)?;
        if route.is_tunnel() && !tunnel::is_wanted(session) {
            let message = "this path is a WebSocket: connect with HTTP/1.1 and Upgrade: websocket".to_owned();
            return Err(Refusal::BadRequest { message, param: None });
        }
        Ok((route, key))
    }

    /// Serves one request of a connection; `None`: the connection has ended.
    #[expect(clippy::manual_async_fn, reason = "an async function would store the session, 680 bytes, twice")]
    pub(super) fn serve_next<'a>(
        self: &'a Arc<Self>,
        mut session: ServerSession,
        shutdown: &'a ShutdownWatch,
    ) -> impl Future<Output = Option<ReusedHttpStream>> + Send + 'a {
        async move {
            let next = match self.read_head(&mut session, shutdown).await {
                Ok(()) => {
                    if self.flow.is_closing() || self.flow.is_handed_over() {
                        session.set_keepalive(None);
                    }
                    // Boxed, as below: a connection that waits for a request needs no room for one.
                    Box::pin(self.serve(&mut session, shutdown)).await
                }
                Err(NoHead::Closed) => return None,
                Err(NoHead::Refused(refusal)) => {
                    Box::pin(refuse_head(&mut session, &refusal, &self.flow)).await;
                    Next::Close { linger: LINGER }
                }
            };
            if let Next::Close { linger } = next {
                end(&mut session, linger).await;
                return None;
            }
            after::end_stream(&mut session).await;
            let mut settings = HttpPersistentSettings::for_session(&session);
            let (stream, ahead) = timeout(SETTLE, Box::pin(session.finish())).await.ok()?.ok()??.into_parts();
            if let Some(client) = ClientHandle::below(&stream) {
                client.state.next_request(ahead.as_deref().unwrap_or_default());
            }
            if let Some(ahead) = ahead {
                settings.set_pipelined_prefix(ahead);
            }
            Some(ReusedHttpStream::new(stream, Some(settings)))
        }
    }
}

fn incoming(
    session: &mut ServerSession,
    accepted: AcceptedRequest,
    path: String,
    ids: RequestIds,
    trace: Option<Box<RequestTrace>>,
    client: Option<IpAddr>,
) -> Box<IncomingRequest> {
    let method = session.req_header().method.clone();
    // pingora no longer needs the headers, so they are moved, not copied.
    let mut sent = take_headers(session);
    let content_type = sent.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let AcceptedRequest { route, key, body, table: routing } = accepted;
    let priority = headers::take_priority(&mut sent);
    let no_continue = headers::take_no_continue(&mut sent);
    let headers = headers::for_engine(sent, routing.keys.is_required());
    let origin = request_origin(client, key.as_ref());
    let client = shown(client, &routing.config);
    let arrived = Instant::now();
    let RequestIds { client: request_id, upstream: upstream_id } = ids;
    Box::new(IncomingRequest {
        route,
        method,
        path,
        headers,
        priority,
        content_type,
        body,
        arrived,
        request_id,
        upstream_id,
        trace,
        routing,
        client,
        origin,
        key,
        no_continue,
        copy_for: None,
    })
}

/// The origin under which the outcome of a request counts: the key, or without keys the client's
/// network.
fn request_origin(client: Option<IpAddr>, key: Option<&ApiKey>) -> Origin {
    match key {
        Some(key) => Origin::of_key(key.name()),
        None => client.map_or(Origin::default(), |address| Origin::of_network(network(address))),
    }
}

/// Takes the headers out of a session. From now on, pingora reads only the request line.
fn take_headers(session: &mut ServerSession) -> HeaderMap {
    let version = session.req_header().version;
    let Ok(mut bare) = RequestHeader::build(Method::POST, b"/", Some(0)) else {
        return session.req_header().headers.clone();
    };
    bare.set_version(version);
    http::request::Parts::from(std::mem::replace(session.req_header_mut(), bare)).headers
}

impl HttpServerApp for Gateway {
    // Written without `async_trait`, which would store the session twice.
    fn process_new_http<'a, 'b, 'c>(
        self: &'a Arc<Self>,
        session: ServerSession,
        shutdown: &'b ShutdownWatch,
    ) -> Pin<Box<dyn Future<Output = Option<ReusedHttpStream>> + Send + 'c>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(self.serve_next(session, shutdown))
    }
}

fn shed(reason: ShedReason) -> Rejected {
    Rejected::Refused(Refusal::Shed { reason, retry_after: RETRY_AFTER_MIN.as_secs() })
}

/// Whether the connection may begin a request. HTTP/2 streams were counted in `http2.rs`.
fn has_place(session: &ServerSession, client: Option<IpAddr>) -> bool {
    let Some(socket) = ClientHandle::of(session) else { return true };
    let connection = socket.state.connection();
    connection.begin(client.unwrap_or(connection.address()))
}

/// Whether `Expect` asks for `100 Continue`; `Some(false)`: it asks for something else; `None`:
/// there is no such header, or HTTP/1.0 ignores it (RFC 9110, 10.1.1).
fn expectation(session: &ServerSession) -> Option<bool> {
    let request = session.req_header();
    let expected = request.headers.get(EXPECT).filter(|_| request.version > Version::HTTP_10)?;
    Some(expected.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}
