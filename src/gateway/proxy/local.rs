//! Paths that the gateway serves itself, and answers to preflights of browsers.
//!
//! | path | methods | response |
//! |---|---|---|
//! | `/health` | GET, HEAD | 200 while the gateway runs |
//! | `/ready` | GET, HEAD | 200 while a pool has a backend that could take a request |
//! | `/ping` | GET, HEAD, POST | as `/ready`: SageMaker sends requests while it is 200 |
//! | `/v1/models` | GET, HEAD | the models that the client's key may use |
//! | `/v1/models/{id}` | GET, HEAD | one model; names may contain slashes, plain or encoded |
//!
//! The first three need no key. A gateway that is leaving (see `Flow::leave`) is not ready,
//! whatever the state of the backends. Other paths are routes of the API, or refused ([`refusal`]).

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode};
use percent_encoding::percent_decode_str;
use pingora::http::RequestHeader;
use pingora::protocols::http::ServerSession;

use super::cors::CrossOrigin;
use super::downstream::DownstreamConnection;
use super::headers;
use crate::flow::keys::ApiKey;
use crate::flow::{ClientGone, Downstream, ResponseHead, RoutingTable};
use sluice_core::openai::{Refusal, RouteHint};

const MODELS: &str = "/v1/models/";

/// Responses that the gateway generates itself, besides refusals.
pub trait LocalRoutes: std::fmt::Debug + Send + Sync {
    /// Whether a pool has a backend that could take a request.
    fn ready(&self) -> bool;

    /// The body of `/v1/models` for this key, which is `None` if no key is required.
    fn models(&self, table: &RoutingTable, key: Option<&ApiKey>) -> Bytes;

    /// The card of the model or alias `name`, if this key may use it.
    fn model(&self, table: &RoutingTable, key: Option<&ApiKey>, name: &str) -> Option<Bytes>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LocalPath<'a> {
    Health,
    Ready,
    Ping,
    Models,
    /// A model; the text is the rest of the path, as the client sent it.
    Model(&'a str),
}

pub(super) struct LocalResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl LocalResponse {
    fn of(status: StatusCode, body: Bytes) -> Self {
        Self { status, headers: HeaderMap::with_capacity(4), body }
    }

    pub(super) fn to_preflight(headers: HeaderMap) -> Self {
        Self { status: StatusCode::NO_CONTENT, headers, body: Bytes::new() }
    }
}

impl<'a> LocalPath<'a> {
    /// `path` is in canonical form, `sent` as the client wrote it; both are without the query.
    fn of(path: &str, sent: &'a str) -> Option<Self> {
        Some(match path {
            "/health" => Self::Health,
            "/ready" => Self::Ready,
            "/ping" => Self::Ping,
            "/v1/models" => Self::Models,
            // A model's name may begin with a slash, which the canonical form does not keep.
            _ if path.starts_with(MODELS) => Self::Model(&sent[sent.find("models/")? + "models/".len()..]),
            _ => return None,
        })
    }

    fn takes(self, method: &Method) -> bool {
        self.methods().split(", ").any(|one| one == method.as_str())
    }

    fn methods(self) -> &'static str {
        if self == Self::Ping { "GET, HEAD, POST" } else { "GET, HEAD" }
    }
}

/// The names that the rest of a path may mean: with or without the slashes at both ends, decoded.
fn names(rest: &str) -> [Cow<'_, str>; 2] {
    [rest, rest.trim_matches('/')].map(|rest| percent_decode_str(rest).decode_utf8_lossy())
}

/// The response for a path that the gateway serves itself, if it is one. `is_ready`: whether the
/// gateway itself takes requests.
pub(super) fn response(
    local: &dyn LocalRoutes,
    is_ready: bool,
    request: &RequestHeader,
    path: &str,
    table: &RoutingTable,
) -> Option<LocalResponse> {
    let of = LocalPath::of(path, request.uri.path()).filter(|of| of.takes(&request.method))?;
    let empty = |ok: bool| {
        let status = if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        Some(LocalResponse::of(status, Bytes::new()))
    };
    let body = match of {
        LocalPath::Health => return empty(true),
        LocalPath::Ready | LocalPath::Ping => return empty(is_ready && local.ready()),
        LocalPath::Models => local.models(table, headers::authenticate(&request.headers, table).ok()?.as_ref()),
        LocalPath::Model(rest) => {
            let key = headers::authenticate(&request.headers, table).ok()?;
            names(rest).iter().find_map(|name| local.model(table, key.as_ref(), name))?
        }
    };
    Some(LocalResponse::of(StatusCode::OK, body))
}

/// The refusal of any other path that is no route of the API.
pub(super) fn refusal(request: &RequestHeader, path: &str, table: &RoutingTable) -> Refusal {
    let Some(of) = LocalPath::of(path, request.uri.path()) else {
        return Refusal::UnknownRoute { hint: RouteHint::of(path) };
    };
    if !of.takes(&request.method) {
        return Refusal::MethodNotAllowed { allow: of.methods() };
    }
    match (headers::authenticate(&request.headers, table), of) {
        (Err(refusal), _) => refusal,
        (Ok(key), LocalPath::Model(rest)) => {
            let [_, model] = names(rest).map(Cow::into_owned);
            let valid = table.models_for(key.as_ref()).map(|model| model.name.to_string()).collect();
            Refusal::UnknownModel { model, valid }
        }
        (Ok(_), _) => Refusal::UnknownRoute { hint: None },
    }
}

impl LocalResponse {
    pub(super) async fn send(
        self,
        session: &mut ServerSession,
        request_id: &str,
        origin: CrossOrigin,
        pause: Duration,
    ) -> Result<(), ClientGone> {
        let Self { status, mut headers, body } = self;
        if status != StatusCode::NO_CONTENT {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        }
        if !body.is_empty() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Ok(id) = HeaderValue::from_str(request_id) {
            headers.insert(HeaderName::from_static("x-request-id"), id);
        }
        let has_body = session.req_header().method != Method::HEAD && !body.is_empty();
        let mut client = DownstreamConnection::new(session, origin, pause);
        client.head(ResponseHead { status, headers }).await?;
        if has_body {
            client.body(body, true).await?;
        }
        client.finish().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_model_may_contain_slashes() {
        let names = |path: &'static str| {
            let canonical = sluice_core::openai::route::canonical(path);
            match LocalPath::of(&canonical, path) {
                Some(LocalPath::Model(rest)) => names(rest).map(Cow::into_owned),
                other => panic!("{path}: {other:?}"),
            }
        };
        assert_eq!(names("/v1/models/org/name"), ["org/name", "org/name"]);
        assert_eq!(names("/v1/models/org%2Fname/"), ["org/name/", "org/name"]);
        assert_eq!(names("/v1/models//models/llama"), ["/models/llama", "models/llama"]);
        assert_eq!(names("//v1//models/%2Fmodels%2Fllama"), ["/models/llama", "/models/llama"]);
        assert_eq!(names("/v1/models/caf%C3%A9"), ["café", "café"]);
        assert_eq!(LocalPath::of("/v1/models", "/v1/models/"), Some(LocalPath::Models));
        assert_eq!(LocalPath::of("/v1/modelsx", "/v1/modelsx"), None);
    }
}
