//! A tunnel for a WebSocket: connects to the backend of the lease, passes on the handshake, and
//! then passes on bytes in both directions.
//!
//! | what | bound |
//! |---|---|
//! | bytes in memory | one read of [`PIECE`] for each direction |
//! | the client takes no byte, or the engine no whole piece | `timeouts.send` |
//! | no byte in either direction | `timeouts.realtime_idle` |
//! | the whole tunnel | `timeouts.realtime` |
//!
//! Another backend is tried only if the connection to the first one fails. When the gateway ends a
//! tunnel, the client gets a closing frame, if the engine's last frame was complete: 1001 after a
//! time limit, 1012 when the gateway stops or the engine leaves without a closing frame. While a
//! tunnel is open, silence of the engine is no sign of a hang, because either side may have nothing
//! to say.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::header::{CONNECTION, HeaderValue, UPGRADE};
use http::{HeaderMap, Method, StatusCode, Version};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, sleep_until, timeout};

use super::after::{LINGER, Next};
use super::client_handle::ClientHandle;
use super::cors::CrossOrigin;
use super::downstream::{DownstreamConnection, send};
use super::headers::{self, CREDENTIALS};
use super::proxy_flow::ProxyFlow;
use super::upstream::{HEAD_MAX, ParsedHead, take_head};
use super::web_socket::{FrameTracker, GOING_AWAY, RESTART};
use crate::connect::EngineStream;
use crate::flow::record::{Stage, UpstreamFault};
use crate::flow::{
    Downstream as _, IncomingRequest, Outcome, RecordGuard, ResponseHead, TunnelRequest, complete_head, refuse,
    tunnel_path,
};
use crate::pool::{BackendFault, Lease};
use crate::telemetry::{Telemetry, TunnelBytes};
use sluice_config::{Address, Timeouts};
use sluice_core::openai::Refusal;

/// The most bytes that one read of a direction takes.
const PIECE: usize = 16 << 10;
/// The most bytes of an answer that refuses the handshake.
const REFUSAL_MAX: usize = 64 << 10;

type Record<'a> = RecordGuard<'a, Arc<Telemetry>>;

/// Whether a request wants to become a WebSocket. Only HTTP/1.1 has such a request.
pub(super) fn is_wanted(session: &ServerSession) -> bool {
    let request = session.req_header();
    let web_socket = |value: &HeaderValue| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"websocket");
    request.version == Version::HTTP_11
        && session.is_upgrade_req()
        && request.headers.get_all(UPGRADE).iter().any(web_socket)
}

pub(super) async fn serve(
    flow: &ProxyFlow,
    session: &mut ServerSession,
    incoming: Box<IncomingRequest>,
    origin: CrossOrigin,
) -> Next {
    let pause = incoming.routing.timeouts().send;
    let (id, arrived) = (Arc::clone(&incoming.request_id), incoming.arrived);
    let mut record = RecordGuard::new(flow.recorder(), Some(incoming.route), id, arrived);
    record.upstream_id = Arc::clone(&incoming.upstream_id);
    (record.client, record.origin) = (incoming.client, incoming.origin);
    let opened = {
        let mut client = DownstreamConnection::new(session, origin, pause);
        let opened = match open(flow, &incoming, &mut client, &mut record).await {
            Ok(opened) => opened,
            Err(refusal) => {
                refuse(&mut client, &refusal, incoming.route.error_format(), &mut record).await;
                None
            }
        };
        match opened {
            Some(opened) => opened,
            None => return if client.end().await { Next::Close { linger: LINGER } } else { Next::CLOSE },
        }
    };
    let bytes = record.pool.as_deref().map(|pool| flow.recorder().tunnel_bytes(pool));
    run(session, opened, incoming.routing.timeouts(), bytes, &mut record).await;
    Next::CLOSE
}

/// A connection on which the engine has agreed to a WebSocket.
struct Opened {
    stream: EngineStream,
    head: ParsedHead,
    /// Bytes that the engine sent behind the head.
    ahead: BytesMut,
    lease: Lease,
}

/// Leases a backend, connects and makes the handshake. `None`: the client has an answer, or has
/// left.
async fn open(
    flow: &ProxyFlow,
    incoming: &IncomingRequest,
    client: &mut DownstreamConnection<'_>,
    record: &mut Record<'_>,
) -> Result<Option<Opened>, Refusal> {
    let mut request = flow.accept_tunnel(incoming, record).await?;
    let Some((lease, mut stream)) = connect(flow, incoming, &mut request, client, record).await? else {
        return Ok(None);
    };
    let model = record.model.clone().unwrap_or_default();
    let head = request_head(lease.address(), &tunnel_path(incoming, &model), incoming);
    let limit = incoming.routing.first_byte(false, 0);
    let mut ahead = BytesMut::new();
    let answered = async {
        stream.write_all(&head).await.ok()?;
        stream.flush().await.ok()?;
        read_head(&mut stream, &mut ahead).await
    };
    let answered = tokio::select! {
        answered = timeout(limit, answered) => answered,
        () = client.gone() => return Ok(None),
    };
    let head = match answered {
        Ok(Some(head)) => head,
        Ok(None) => {
            record.outcome = Outcome::UpstreamError(UpstreamFault::Broken);
            lease.failure(BackendFault::Response, Instant::now());
            return Err(Refusal::UpstreamBroke);
        }
        Err(_) => {
            record.outcome = Outcome::Timeout(Stage::FirstByte);
            lease.failure(BackendFault::Timeout, Instant::now());
            return Err(Refusal::UpstreamTimeout);
        }
    };
    // Only the handshake counts for the engine's health, because a WebSocket may stay open for an
    // hour.
    if head.status.is_server_error() {
        lease.failure(BackendFault::Response, Instant::now());
    } else {
        lease.success(Instant::now());
    }
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        return Ok(Some(Opened { stream, head, ahead, lease }));
    }
    pass_on_refusal(stream, head, ahead, client, record).await;
    Ok(None)
}

/// Leases a backend and connects to it, or to another one.
async fn connect(
    flow: &ProxyFlow,
    incoming: &IncomingRequest,
    request: &mut TunnelRequest,
    client: &mut DownstreamConnection<'_>,
    record: &mut Record<'_>,
) -> Result<Option<(Lease, EngineStream)>, Refusal> {
    loop {
        let Some(lease) = flow.lease_for_tunnel(request, client, record).await? else { return Ok(None) };
        let begun = Instant::now();
        let dialled = tokio::select! {
            dialled = flow.upstream().dial(lease.address()) => dialled,
            () = client.gone() => return Ok(None),
        };
        record.connect_time += begun.elapsed();
        match dialled {
            Ok(stream) => return Ok(Some((lease, stream))),
            Err(_) if request.not_connected(lease, incoming.routing.config.retry.attempts, record) => {}
            Err(_) => {
                record.outcome = Outcome::UpstreamError(UpstreamFault::Connect);
                return Err(Refusal::UpstreamBroke);
            }
        }
    }
}

/// The handshake, as the client sent it. Values come from parsed headers, so they contain no line
/// breaks.
fn request_head(to: &Address, path: &str, incoming: &IncomingRequest) -> BytesMut {
    let mut head = BytesMut::with_capacity(512);
    let fixed = "\r\nconnection: Upgrade\r\nupgrade: websocket\r\n";
    for part in ["GET ", &to.endpoint.prefix, path, " HTTP/1.1\r\nhost: ", &to.authority, fixed] {
        head.put_slice(part.as_bytes());
    }
    for (name, value) in &incoming.headers {
        if to.api_key.is_some() && CREDENTIALS.contains(name) {
            continue;
        }
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            head.put_slice(part);
        }
    }
    if let Some(key) = &to.api_key {
        for part in ["authorization: Bearer ", key.expose(), "\r\n"] {
            head.put_slice(part.as_bytes());
        }
    }
    head.put_slice(b"\r\n");
    head
}

/// Reads the head of the engine's answer; `None`: the connection broke, or the head cannot be read.
async fn read_head(stream: &mut EngineStream, ahead: &mut BytesMut) -> Option<ParsedHead> {
    loop {
        match take_head(ahead) {
            Ok(Some(head)) => return Some(head),
            Ok(None) if ahead.len() <= HEAD_MAX => {}
            Ok(None) | Err(_) => return None,
        }
        ahead.reserve(PIECE);
        if stream.read_buf(ahead).await.ok()? == 0 {
            return None;
        }
    }
}

/// Passes on the answer of an engine that refused the handshake, with at most [`REFUSAL_MAX`] of
/// body.
async fn pass_on_refusal(
    mut stream: EngineStream,
    head: ParsedHead,
    mut body: BytesMut,
    client: &mut DownstreamConnection<'_>,
    record: &mut Record<'_>,
) {
    let length = head.headers.get(http::header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let length: usize = length.unwrap_or(0).min(REFUSAL_MAX);
    while body.len() < length {
        match timeout(Duration::from_secs(5), stream.read_buf(&mut body)).await {
            Ok(Ok(count)) if count > 0 => {}
            _ => break,
        }
    }
    body.truncate(length);
    let mut answer = ResponseHead { status: head.status, headers: head.headers };
    answer.headers.remove(http::header::TRANSFER_ENCODING);
    answer.headers.insert(http::header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    record.outcome = match head.status.is_server_error() {
        true => Outcome::UpstreamError(UpstreamFault::Status),
        false => Outcome::Refused,
    };
    complete_head(&mut answer, record);
    let sent = async {
        client.head(answer).await?;
        client.body(body.freeze(), true).await?;
        client.finish().await
    };
    if sent.await.is_err() {
        record.outcome = Outcome::ClientGone;
    }
}

enum End {
    Client,
    Engine,
    /// One side took no byte for too long.
    Stuck(Outcome),
    Limit,
    Stopped,
}

/// Sends the agreement to the client, and passes bytes on until the end.
async fn run(
    session: &mut ServerSession,
    opened: Opened,
    timeouts: &Timeouts,
    bytes: Option<TunnelBytes>,
    record: &mut Record<'_>,
) {
    let Opened { mut stream, head, mut ahead, lease } = opened;
    let _silence = lease.client_wait();
    let socket = ClientHandle::of(session).map(|client| Arc::clone(client.state));
    let pause = timeouts.send;
    if agree(session, head.headers, record).await.is_err() {
        return;
    }
    let mut frames = FrameTracker::default();
    let ends_at = Instant::now() + timeouts.realtime;
    let end = loop {
        if !ahead.is_empty() {
            let piece = ahead.split().freeze();
            frames.pass(&piece);
            let count = piece.len() as u64;
            if send(session.write_response_body(piece, false), socket.as_deref(), pause).await.is_err() {
                break End::Stuck(Outcome::ClientGone);
            }
            lease.record_progress(Instant::now());
            bytes.iter().for_each(|bytes| bytes.to_client.inc_by(count));
        }
        ahead.reserve(PIECE);
        let idle_at = Instant::now() + timeouts.realtime_idle;
        // The branches are polled in random order, so that a client that always sends does not hold
        // up the engine's bytes.
        let read = async {
            tokio::select! {
                read = session.read_request_body() => match read {
                    Ok(Some(sent)) => Ok(Some(sent)),
                    Ok(None) | Err(_) => Err(End::Client),
                },
                read = stream.read_buf(&mut ahead) => match read {
                    Ok(count) if count > 0 => Ok(None),
                    _ => Err(End::Engine),
                },
            }
        };
        let read = tokio::select! {
            biased;
            () = lease.abort_token().cancelled() => Err(End::Stopped),
            () = sleep_until(idle_at.min(ends_at)) => Err(End::Limit),
            read = read => read,
        };
        let sent = match read {
            Ok(Some(sent)) => sent,
            Ok(None) => continue,
            Err(end) => break end,
        };
        if let Err(end) = to_engine(&mut stream, &sent, &lease, (pause, ends_at)).await {
            break end;
        }
        bytes.iter().for_each(|bytes| bytes.to_engine.inc_by(sent.len() as u64));
    };
    let (outcome, code) = match end {
        End::Client | End::Engine => (Outcome::Completed, RESTART),
        End::Stuck(outcome) => (outcome, RESTART),
        End::Limit => (Outcome::Timeout(Stage::Idle), GOING_AWAY),
        End::Stopped => (Outcome::Timeout(Stage::Drain), RESTART),
    };
    record.outcome = outcome;
    if let (Some(frame), false) = (frames.closing(code), matches!(end, End::Client | End::Stuck(_))) {
        let closing = session.write_response_body(Bytes::copy_from_slice(&frame), false);
        let _ = timeout(pause.min(LINGER), closing).await;
    }
    let _ = timeout(LINGER, stream.shutdown()).await;
}

/// Writes bytes of the client to the engine, for at most `pause` and not beyond `ends_at`.
async fn to_engine(
    stream: &mut EngineStream,
    sent: &[u8],
    lease: &Lease,
    (pause, ends_at): (Duration, Instant),
) -> Result<(), End> {
    let written = timeout(pause, async {
        stream.write_all(sent).await?;
        stream.flush().await
    });
    tokio::select! {
        biased;
        () = lease.abort_token().cancelled() => Err(End::Stopped),
        () = sleep_until(ends_at) => Err(End::Limit),
        written = written => match written {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(End::Engine),
            Err(_) => Err(End::Stuck(Outcome::Timeout(Stage::Send))),
        },
    }
}

async fn agree(session: &mut ServerSession, mut headers: HeaderMap, record: &mut Record<'_>) -> Result<(), ()> {
    // The request path took the headers of the request. pingora passes bytes on only if the request
    // asked for an upgrade.
    let request = session.req_header_mut();
    request.set_method(Method::GET);
    request.insert_header(CONNECTION, "Upgrade").map_err(drop)?;
    request.insert_header(UPGRADE, "websocket").map_err(drop)?;
    headers::remove_hop_by_hop(&mut headers);
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    let mut answer = ResponseHead { status: StatusCode::SWITCHING_PROTOCOLS, headers };
    complete_head(&mut answer, record);
    let (mut parts, ()) = http::Response::new(()).into_parts();
    (parts.status, parts.headers) = (answer.status, answer.headers);
    session.write_response_header(Box::new(ResponseHeader::from(parts))).await.map_err(drop)
}
