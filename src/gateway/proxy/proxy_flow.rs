//! The request path between sockets, and the refusal of a request that never reaches it.
//!
//! A head that cannot be read is refused before a route or a key is known. Bound: sending the
//! answer is given up after [`SETTLE`].

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use http::header::{ACCESS_CONTROL_ALLOW_ORIGIN, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use pingora::protocols::http::ServerSession;
use tokio::time::{Instant, timeout};

use super::after::{SETTLE, peer, shown};
use super::upstream::UpstreamConnector;
use crate::flow::{ERROR_CODE, Flow, Outcome, RecordGuard};
use crate::telemetry::Telemetry;
use sluice_config::Cors;
use sluice_core::openai::{ErrorFormat, Refusal};

/// The request path between sockets. This type is not generic, so that it is compiled once, with
/// this crate.
pub type ProxyFlow = Flow<UpstreamConnector, Arc<Telemetry>>;

pub(super) async fn refuse_head(session: &mut ServerSession, refusal: &Refusal, flow: &ProxyFlow) {
    session.set_keepalive(None);
    let mut record = RecordGuard::new(flow.recorder(), None, "-".into(), Instant::now());
    record.outcome = Outcome::Refused;
    record.refused = Some(refusal.code());
    record.client = shown(peer(session), &flow.routing_table().config);
    let mut parts = http::Response::new(()).into_parts().0;
    parts.status = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::BAD_REQUEST);
    record.status = Some(parts.status);
    let body = Bytes::from(refusal.body(ErrorFormat::OpenAi));
    parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    parts.headers.insert(ERROR_CODE, HeaderValue::from_static(refusal.code()));
    if flow.routing_table().config.server.cors == Some(Cors::Any) {
        parts.headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    }
    let response = pingora::http::ResponseHeader::from(parts);
    let _ = timeout(SETTLE, session.write_error_response(response, body)).await;
}
