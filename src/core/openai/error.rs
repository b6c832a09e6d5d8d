//! The only table from refusals to HTTP: status, type, code, message, `Retry-After`.
//!
//! Shapes: OpenAI's `{"error":{"message","type","param","code"}}`, Anthropic's
//! `{"type":"error","error":{"type","message"}}` on `/v1/messages`, and both as an SSE event once a
//! stream has begun. `code` is a word such as `queue_full`: it separates the reasons behind one
//! 503, and the gateway's errors from the engine's, whose code is an integer. Types follow OpenAI's
//! vocabulary, since client libraries branch on them.
//!
//! An upgrade (WebSocket, h2c) or CONNECT gets **501**, as in HAProxy, because the request is
//! well-formed. A wrong key is 401, a valid key for the wrong model 403, an unknown model 404 as in
//! vLLM. Overload is 503, as in vLLM; 429 is only for a key's own limit. A message never repeats
//! the body, a key, or an upstream's address; a repeated model name is cut to [`MAX_NAME_SHOWN`]
//! characters.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::limit::{KeyLimit, TooLarge};
use super::route_hint::RouteHint;

/// Valid model names that an "unknown model" message lists; enough to spot a typo.
pub const MAX_NAMES_SHOWN: usize = 20;
/// Characters of a client's name that a message repeats.
pub const MAX_NAME_SHOWN: usize = 128;

/// The error shape that a client expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorFormat {
    /// `{"error":{"message","type","param","code"}}`
    OpenAi,
    /// `{"type":"error","error":{"type","message"}}`
    Anthropic,
}

/// Why a request was shed: refused early so that other requests meet their deadlines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ShedReason {
    /// The pool's queue has no place left.
    QueueFull,
    /// The request waited for the pool's queue timeout.
    QueueTimeout,
    /// No backend of the pool is ready.
    NoBackend,
    /// The engines that could serve the request are starting.
    EngineStarting,
    /// The gateway drains before it stops.
    ShuttingDown,
    /// There are too many client connections, in all or from this address.
    Connections,
    /// The request bodies fill the memory for bodies.
    BodyMemory,
}

impl ShedReason {
    /// Every reason, in the order of declaration.
    pub const ALL: [Self; 7] = [
        Self::QueueFull,
        Self::QueueTimeout,
        Self::NoBackend,
        Self::EngineStarting,
        Self::ShuttingDown,
        Self::Connections,
        Self::BodyMemory,
    ];

    /// The value of the `reason` label and of `code`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::QueueTimeout => "queue_timeout",
            Self::NoBackend => "no_backend",
            Self::EngineStarting => "engine_starting",
            Self::ShuttingDown => "shutting_down",
            Self::Connections => "too_many_connections",
            Self::BodyMemory => "body_memory_full",
        }
    }

    /// Whether the reason is lack of room, now or in time. Otherwise the request could not be
    /// served at all.
    pub const fn is_for_room(self) -> bool {
        matches!(self, Self::QueueFull | Self::QueueTimeout)
    }

    const fn message(self) -> &'static str {
        match self {
            Self::QueueFull => "the queue for this model is full; try again later",
            Self::QueueTimeout => "no capacity became free in time; try again later",
            Self::NoBackend => "no backend for this model is ready; try again later",
            Self::EngineStarting => "the engines for this model are starting; try again later",
            Self::ShuttingDown => "the gateway is shutting down; send the request again",
            Self::Connections => "too many connections are open; close some, or try again later",
            Self::BodyMemory => "the memory for request bodies is used up; try again later",
        }
    }
}

/// An error response of the gateway, not of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// 400: the body or a field of it is invalid.
    BadRequest {
        /// The fault, and the accepted values.
        message: String,
        /// The field at fault.
        param: Option<&'static str>,
    },
    /// 400: no model was named and no default exists.
    NoModel,
    /// 400: no backend could take the request, even an empty one.
    ExceedsBackend(TooLarge),
    /// 400: the request alone exceeds the amount that the key may use at once.
    ExceedsKey(TooLarge),
    /// 413: the body is over the configured limit.
    BodyTooLarge {
        /// The limit, bytes.
        limit: u64,
    },
    /// 413: a compressed body expands too much.
    BodyExpands {
        /// Largest allowed factor of expansion.
        times: u64,
    },
    /// 422: engines died while they served a request with this body.
    SuspectedCrash {
        /// Seconds for which the gateway still refuses the body.
        seconds: u64,
    },
    /// 415: a `Content-Encoding` that the gateway does not read.
    EncodingNotSupported,
    /// 408: the body came too slowly.
    BodyTimeout,
    /// 408: the head came too slowly.
    HeaderTimeout,
    /// 431: the header section is over the limit.
    HeadersTooLarge,
    /// 401: no key, and one is required.
    NoKey,
    /// 401: the key is not configured.
    BadKey,
    /// 403: the preflight of a web page whose origin is not in `server.cors`.
    OriginNotAllowed {
        /// The page's origin.
        origin: String,
    },
    /// 403: the key may not use this model.
    ModelForbidden {
        /// The requested model.
        model: String,
    },
    /// 404: no pool serves this model.
    UnknownModel {
        /// The requested model.
        model: String,
        /// Names that this key may use; the first [`MAX_NAMES_SHOWN`] are shown.
        valid: Vec<String>,
    },
    /// 404: no stored response of this id is known for this key.
    UnknownResponse {
        /// The id in the path, or of the response that the request continues.
        id: String,
    },
    /// 404: the path is not served.
    UnknownRoute {
        /// A served path that the client may have meant.
        hint: Option<RouteHint>,
    },
    /// 405: the path is served, but not with this method.
    MethodNotAllowed {
        /// The served methods, for the `Allow` header: `"POST"` or `"GET, HEAD"`.
        allow: &'static str,
    },
    /// 417: an expectation other than `100-continue`.
    ExpectationFailed,
    /// 429: this key's own limit.
    KeyLimit {
        /// The name of the key.
        key: String,
        /// The limit.
        limit: KeyLimit,
        /// Seconds until a new try makes sense.
        retry_after: u64,
    },
    /// 501: a WebSocket or CONNECT.
    UpgradeRefused,
    /// 501: a transfer coding other than `chunked`.
    CodingNotSupported,
    /// 503: refused early.
    Shed {
        /// The reason.
        reason: ShedReason,
        /// Seconds, from the measured drain rate.
        retry_after: u64,
    },
    /// 503: the engine reported in the stream, before any content, that it is overloaded.
    UpstreamBusy {
        /// The engine's message.
        message: String,
        /// Seconds, from the engine's response or the measured drain rate.
        retry_after: u64,
    },
    /// 502: the upstream broke before the first byte, and no other backend could take the request.
    UpstreamBroke,
    /// 502: the upstream refused the credentials of the gateway, and no other backend could take
    /// the request.
    UpstreamRefusedGateway,
    /// 504: the upstream did not respond in time, and no other backend could take the request.
    UpstreamTimeout,
    /// 500: a bug in the gateway.
    Internal,
}

struct Row {
    status: u16,
    kind: &'static str,
    code: &'static str,
    message: Cow<'static, str>,
}

const INVALID: &str = "invalid_request_error";
const AUTHENTICATION: &str = "authentication_error";
const UNAVAILABLE: &str = "service_unavailable";
const SERVER: &str = "server_error";
const ROUTE: &str = "route_not_found";
const KEY_WANTED: &str = "an API key is required; send 'Authorization: Bearer <key>'";
const BAD_KEY: &str = "this API key is not valid; its SHA-256 must be in auth.keys of the gateway";
const BAD_PATH: &str = "this path is not served here; sluice's page .github/docs/clients.md lists the served paths";
const NOT_DECODED: &str =
    "this Content-Encoding is not read; compress the body once, with gzip, zstd or deflate, or send it plain";

impl Refusal {
    fn row(&self) -> Row {
        let row = |status, kind, code, message: &'static str| Row { status, kind, code, message: message.into() };
        let with_message = |status, kind, code, message: String| Row { status, kind, code, message: message.into() };
        match self {
            Self::BadRequest { message, .. } => with_message(400, INVALID, "invalid_request", message.clone()),
            Self::NoModel => row(400, INVALID, "model_missing", "'model' is missing; name one of /v1/models"),
            Self::ExceedsBackend(limit) => with_message(400, INVALID, "exceeds_backend", limit.message("a backend")),
            Self::ExceedsKey(limit) => with_message(400, INVALID, "exceeds_key_limit", limit.message("this API key")),
            Self::BodyTooLarge { limit } => {
                with_message(413, INVALID, "body_too_large", format!("the body is over the limit of {limit} bytes"))
            }
            Self::BodyExpands { times } => {
                let message = format!("the body becomes more than {times} times larger when decoded; send it plain");
                with_message(413, INVALID, "body_expands", message)
            }
            Self::SuspectedCrash { seconds } => {
                let message = format!(
                    "two backends failed while they served this request; it is refused for {seconds} more seconds, change it"
                );
                with_message(422, INVALID, "suspected_crash", message)
            }
            Self::EncodingNotSupported => row(415, INVALID, "content_encoding_not_supported", NOT_DECODED),
            Self::BodyTimeout => row(408, INVALID, "body_timeout", "the body did not arrive in time"),
            Self::HeaderTimeout => row(408, INVALID, "header_timeout", "the request headers did not arrive in time"),
            Self::HeadersTooLarge => row(431, INVALID, "headers_too_large", "the request headers are too large"),
            Self::NoKey => row(401, AUTHENTICATION, "missing_api_key", KEY_WANTED),
            Self::BadKey => row(401, AUTHENTICATION, "invalid_api_key", BAD_KEY),
            Self::OriginNotAllowed { origin } => {
                let message =
                    format!("pages of '{}' may not use this gateway; add the origin to server.cors", shown(origin));
                with_message(403, "permission_error", "origin_not_allowed", message)
            }
            Self::ModelForbidden { model } => {
                let message = format!("this API key may not use the model '{}'", shown(model));
                with_message(403, "permission_error", "model_forbidden", message)
            }
            Self::UnknownModel { model, valid } => {
                with_message(404, "not_found_error", "model_not_found", unknown(model, valid))
            }
            Self::UnknownResponse { id } => {
                let message = format!(
                    "no response '{}' is known for this API key; it was made through another gateway, too long ago, or \
                     before this one started",
                    shown(id)
                );
                with_message(404, "not_found_error", "response_not_found", message)
            }
            Self::UnknownRoute { hint: None } => row(404, "not_found_error", ROUTE, BAD_PATH),
            Self::UnknownRoute { hint: Some(hint) } => {
                with_message(404, "not_found_error", ROUTE, format!("this path is not served here; {hint}"))
            }
            Self::MethodNotAllowed { allow } => {
                with_message(405, INVALID, "method_not_allowed", format!("this path takes only {allow}"))
            }
            Self::ExpectationFailed => {
                row(417, INVALID, "expectation_failed", "the only supported expectation is '100-continue'")
            }
            Self::KeyLimit { key, limit, retry_after } => {
                let message = limit.message(shown(key), (*retry_after).max(1));
                with_message(429, "rate_limit_error", "rate_limit_exceeded", message)
            }
            Self::UpgradeRefused => {
                row(501, INVALID, "upgrade_not_supported", "connection upgrades are not supported; send plain HTTP/1.1")
            }
            Self::CodingNotSupported => {
                row(501, INVALID, "transfer_coding_not_supported", "the only supported Transfer-Encoding is 'chunked'")
            }
            Self::Shed { reason, .. } => row(503, UNAVAILABLE, reason.label(), reason.message()),
            Self::UpstreamBusy { message, .. } => with_message(503, UNAVAILABLE, "upstream_busy", message.clone()),
            Self::UpstreamBroke => row(502, SERVER, "upstream_broke", "the backend failed before it responded"),
            Self::UpstreamRefusedGateway => row(
                502,
                SERVER,
                "upstream_refused_gateway",
                "the backend refuses the gateway's credentials; its operator must set the backend's api_key",
            ),
            Self::UpstreamTimeout => row(504, SERVER, "upstream_timeout", "the backend did not respond in time"),
            Self::Internal => row(500, SERVER, "internal_error", "the gateway failed; see its log"),
        }
    }

    /// The HTTP status.
    pub fn status(&self) -> u16 {
        self.row().status
    }

    /// The value of `error.code`, also the label of the outcome `refused(reason)`.
    pub fn code(&self) -> &'static str {
        self.row().code
    }

    /// Seconds for the `Retry-After` header, at least 1; `None` if a new try alone does not help.
    pub fn retry_after(&self) -> Option<u64> {
        match self {
            Self::KeyLimit { retry_after, .. }
            | Self::Shed { retry_after, .. }
            | Self::UpstreamBusy { retry_after, .. } => Some((*retry_after).max(1)),
            // The network may be better then. Official clients retry a 408 by themselves.
            Self::BodyTimeout | Self::HeaderTimeout => Some(1),
            _ => None,
        }
    }

    /// The value of the `Allow` header, on 405.
    pub fn allow(&self) -> Option<&'static str> {
        match self {
            Self::MethodNotAllowed { allow } => Some(allow),
            _ => None,
        }
    }

    /// The value of the `Accept-Encoding` header, on 415.
    pub fn accept_encoding(&self) -> Option<&'static str> {
        matches!(self, Self::EncodingNotSupported).then_some("gzip, zstd, deflate")
    }

    /// The JSON body.
    pub fn body(&self, format: ErrorFormat) -> Vec<u8> {
        let row = self.row();
        if format == ErrorFormat::Anthropic {
            return anthropic_error(row.status, &row.message).to_string().into_bytes();
        }
        let param = match self {
            Self::BadRequest { param, .. } => *param,
            Self::NoModel | Self::ModelForbidden { .. } | Self::UnknownModel { .. } => Some("model"),
            _ => None,
        };
        openai_error(row.kind, row.code, &row.message, param).to_string().into_bytes()
    }
}

/// Why a stream failed after the first byte was sent, with status 200.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamFailure {
    /// The upstream closed or reset the connection in the middle.
    UpstreamBroke,
    /// The upstream sent nothing for longer than the idle timeout.
    UpstreamIdle,
    /// The gateway stops, and the drain time is over.
    ShuttingDown,
}

/// The SSE event that ends a stream which failed after the first byte; the caller must then close
/// the connection. A blank line at the start separates it from an event in which the stream broke.
pub fn sse_error_event(failure: StreamFailure, format: ErrorFormat) -> Vec<u8> {
    let (kind, code, message) = match failure {
        StreamFailure::UpstreamBroke => (SERVER, "upstream_broke", "the backend failed during its response"),
        StreamFailure::UpstreamIdle => (SERVER, "upstream_timeout", "the backend stopped responding"),
        StreamFailure::ShuttingDown => (UNAVAILABLE, "shutting_down", "the gateway is shutting down"),
    };
    let value = match format {
        ErrorFormat::OpenAi => openai_error(kind, code, message, None),
        ErrorFormat::Anthropic => anthropic_error(500, message),
    };
    sse_error(value.to_string().as_bytes())
}

/// The event that ends a stream with an error. `body` must be one line.
pub fn sse_error(body: &[u8]) -> Vec<u8> {
    [&b"\n\nevent: error\ndata: "[..], body, b"\n\n"].concat()
}

fn openai_error(kind: &str, code: &str, message: &str, param: Option<&str>) -> Value {
    json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
}

/// Anthropic has one type for each status.
fn anthropic_error(status: u16, message: &str) -> Value {
    let kind = match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..=499 | 501 => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

fn unknown(model: &str, valid: &[String]) -> String {
    let mut message = format!("the model '{}' does not exist", shown(model));
    if !valid.is_empty() {
        message.push_str("; valid names: ");
        message.push_str(&valid[..valid.len().min(MAX_NAMES_SHOWN)].join(", "));
        if valid.len() > MAX_NAMES_SHOWN {
            message.push_str(&format!(" and {} more", valid.len() - MAX_NAMES_SHOWN));
        }
    }
    message
}

fn shown(name: &str) -> Cow<'_, str> {
    match name.char_indices().nth(MAX_NAME_SHOWN) {
        Some((at, _)) => Cow::Owned(format!("{}...", &name[..at])),
        None => Cow::Borrowed(name),
    }
}

impl From<super::RequestError> for Refusal {
    fn from(error: super::RequestError) -> Self {
        Self::BadRequest { param: error.param(), message: error.to_string() }
    }
}

#[cfg(test)]
mod tests;
