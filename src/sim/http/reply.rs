//! Reads the body of a request, and builds a reply; used by all routes.
//!
//! Bodies are bounded by [`MAX_BODY`]. A larger body is refused with 413.

use std::convert::Infallible;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use serde_json::Value;

use crate::http::error_body::ErrorBody;
use crate::http::response_body::Disconnect;

/// Largest request body, bytes. 64 MiB hold the longest prompt of any model here.
pub(super) const MAX_BODY: usize = 64 << 20;

/// A response. Its body may end in an injected disconnect.
pub(super) type Reply = Response<UnsyncBoxBody<Bytes, Disconnect>>;

/// A reply with this text. An empty `content_type` leaves the header out.
pub(super) fn body(status: StatusCode, content_type: &'static str, text: String) -> Reply {
    let full = Full::new(Bytes::from(text)).map_err(|never: Infallible| match never {});
    let mut reply = Response::new(full.boxed_unsync());
    *reply.status_mut() = status;
    if !content_type.is_empty() {
        reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    }
    reply
}

pub(super) fn json_reply(value: &Value) -> Reply {
    body(StatusCode::OK, "application/json", value.to_string())
}

/// Text without a content type, as vLLM sends it.
pub(super) fn text_reply(text: String) -> Reply {
    body(StatusCode::OK, "", text)
}

pub(super) async fn read(request: Request<Incoming>) -> Result<Bytes, ErrorBody> {
    match Limited::new(request.into_body(), MAX_BODY).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(ErrorBody {
            status: 413,
            kind: "Request Entity Too Large",
            param: None,
            message: format!("the body is larger than {MAX_BODY} bytes"),
        }),
        Err(_) => Err(ErrorBody::client_gone()),
    }
}

pub(super) fn require_json(request: &Request<Incoming>) -> Result<(), ErrorBody> {
    let sent = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if sent.is_some_and(|sent| sent.to_ascii_lowercase().starts_with("application/json")) {
        return Ok(());
    }
    let message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed".to_owned();
    Err(ErrorBody { status: 400, kind: "Bad Request", param: None, message })
}
