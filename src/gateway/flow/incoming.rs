//! A client's request, received whole, with the decisions made before the body was read.
//!
//! The routing table is loaded and the client's key is hashed once per request, before the body.
//! Both travel with the request, so every later stage sees one configuration even after a reload.
//! Only a request whose pool a reload has removed moves on to the newer table (see `admit.rs`).

use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Method};
use tokio::time::Instant;

use super::keys::ApiKey;
use super::routing_table::RoutingTable;
use super::trace::RequestTrace;
use crate::experiment::Assigned;
use crate::origin::Origin;
use sluice_core::openai::Route;

/// One request, received whole.
#[derive(Debug)]
pub struct IncomingRequest {
    /// The API route.
    pub route: Route,
    /// A method that the route takes.
    pub method: Method,
    /// Path and query as the client sent them.
    pub path: String,
    /// End-to-end headers for the backend, without hop-by-hop headers and without credentials for
    /// the gateway.
    pub headers: HeaderMap,
    /// The priority that the header `X-Vllm-Priority` asks for.
    pub priority: Option<i64>,
    /// `Content-Type`, for multipart bodies.
    pub content_type: String,
    /// The body.
    pub body: Bytes,
    /// When the last byte was received.
    pub arrived: Instant,
    /// Id returned to the client: the client's own id, if it sent a usable one.
    pub request_id: Arc<str>,
    /// Id sent upstream: unique, and different from a `request_id` that the client chose.
    pub upstream_id: Arc<str>,
    /// The trace that the request belongs to; `None`: the trace is unknown and not sampled.
    pub trace: Option<Box<RequestTrace>>,
    /// The configuration that the request is routed by.
    pub routing: Arc<RoutingTable>,
    /// The client's address, if the access log or the records need it.
    pub client: Option<IpAddr>,
    /// The origin under which the outcome of the request counts: the key, or without keys the
    /// client's network.
    pub origin: Origin,
    /// The client's key; `None` where the gateway requires none.
    pub key: Option<ApiKey>,
    /// Whether the client declines that another engine continues the answer.
    pub no_continue: bool,
    /// The shadow arm for which this is a copy; `None`: a client sent the request.
    pub copy_for: Option<Assigned>,
}
