//! The only table from refusals to HTTP: status, type, code, message, `Retry-After`.
//!
//! Shapes: OpenAI's `{"error":{"message","type","param","code"}}`, Anthropic's
//! `{"type":"error","error":{"type","message"}}` on `/v1/messages`, and both as an SSE event once a
//! stream has begun. `code` is a word such as `queue_full`. It distinguishes the reasons for a 503.
//! It also distinguishes the gateway's errors from an engine's errors, whose `code` is an integer.
//! Types follow OpenAI's vocabulary, because client libraries branch on them.
//!
//! A refused upgrade (WebSocket, h2c) or CONNECT gets **501**, as in HAProxy, because the request
//! is well-formed. A wrong key is 401, a valid key for the wrong model 403, an unknown model 404 as
//! in vLLM. Overload is 503, as in vLLM; 429 is only for a key's own limit. A message never repeats
//! the body, a key, or an upstream's address; a repeated model name is cut to [`MAX_NAME_SHOWN`]
//! characters.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::limit::{KeyLimit, TooLarge};
use super::route::ErrorFormat;
use super::route_hint::RouteHint;

/// Valid model names that an "unknown model" message lists; enough to spot a typo.
pub const MAX_NAMES_SHOWN: usize = 20;
/// Characters of a client's name that a message repeats.
pub const MAX_NAME_SHOWN: usize = 128;

labels! {
    /// Why a request was shed: refused early so that other requests meet their deadlines.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum ShedReason {
        /// The pool's queue has no place left.
        QueueFull = "queue_full",
        /// The request waited for the pool's queue timeout.
        QueueTimeout = "queue_timeout",
        /// No backend of the pool is ready.
        NoBackend = "no_backend",
        /// The engines that could serve the request are starting.
        EngineStarting = "engine_starting",
        /// The gateway drains before it stops.
        ShuttingDown = "shutting_down",
        /// There are too many client connections, in all or from this address.
        Connections = "too_many_connections",
        /// The request bodies fill the memory for bodies.
        BodyMemory = "body_memory_full",
    }
}

impl ShedReason {
    /// Whether the pool has no room, now or before the queue timeout. With other reasons, the
    /// request would be refused even if there were room.
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

/// An error response of the gateway, not of a backend. The text is the message for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The body or a field of it is invalid.
    #[error("{message}")]
    BadRequest {
        /// The fault, and the accepted values.
        message: String,
        /// The field at fault.
        param: Option<&'static str>,
    },
    /// No model was named and no default exists.
    #[error("'model' is missing; name one of /v1/models")]
    NoModel,
    /// No backend could take the request, even an empty one.
    #[error("{}", .0.message("a backend"))]
    ExceedsBackend(TooLarge),
    /// The request alone exceeds the amount that the key may use at once.
    #[error("{}", .0.message("this API key"))]
    ExceedsKey(TooLarge),
    /// The body has more bytes than the configured limit.
    #[error("the body is over the limit of {limit} bytes")]
    BodyTooLarge {
        /// The limit, bytes.
        limit: u64,
    },
    /// A compressed body expands too much.
    #[error("the body becomes more than {times} times larger when decoded; send it plain")]
    BodyExpands {
        /// Largest allowed factor of expansion.
        times: u64,
    },
    /// Two engines died, each while it served a request with this body.
    #[error("two backends failed while they served this request; it is refused for {seconds} more seconds, change it")]
    SuspectedCrash {
        /// Seconds for which the gateway still refuses the body.
        seconds: u64,
    },
    /// A `Content-Encoding` that the gateway does not read.
    #[error("this Content-Encoding is not read; compress the body once, with gzip, zstd or deflate, or send it plain")]
    EncodingNotSupported,
    /// The body came too slowly.
    #[error("the body did not arrive in time")]
    BodyTimeout,
    /// The head came too slowly.
    #[error("the request headers did not arrive in time")]
    HeaderTimeout,
    /// The header section is over the limit.
    #[error("the request headers are too large")]
    HeadersTooLarge,
    /// No key, and one is required.
    #[error("an API key is required; send 'Authorization: Bearer <key>'")]
    NoKey,
    /// The key is not configured.
    #[error("this API key is not valid; its SHA-256 must be in auth.keys of the gateway")]
    BadKey,
    /// The preflight of a web page whose origin is not in `server.cors`.
    #[error("pages of '{}' may not use this gateway; add the origin to server.cors", shown(.origin))]
    OriginNotAllowed {
        /// The page's origin.
        origin: String,
    },
    /// The key may not use this model.
    #[error("this API key may not use the model '{}'", shown(.model))]
    ModelForbidden {
        /// The requested model.
        model: String,
    },
    /// No pool serves this model.
    #[error("{}", unknown(.model, .valid))]
    UnknownModel {
        /// The requested model.
        model: String,
        /// Names that this key may use; the first [`MAX_NAMES_SHOWN`] are shown.
        valid: Vec<String>,
    },
    /// No stored response of this id is known for this key.
    #[error(
        "no response '{}' is known for this API key; it was made through another gateway, too long ago, or \
         before this one started", shown(.id)
    )]
    UnknownResponse {
        /// The id in the path, or of the response that the request continues.
        id: String,
    },
    /// The path is not served.
    #[error("this path is not served here; {}", hint_or_page(.hint.as_ref()))]
    UnknownRoute {
        /// A served path that the client may have meant.
        hint: Option<RouteHint>,
    },
    /// The path is served, but not with this method.
    #[error("this path takes only {allow}")]
    MethodNotAllowed {
        /// The served methods, for the `Allow` header: `"POST"` or `"GET, HEAD"`.
        allow: &'static str,
    },
    /// An expectation other than `100-continue`.
    #[error("the only supported expectation is '100-continue'")]
    ExpectationFailed,
    /// The requests of a key exceed its limit.
    #[error("{}", .limit.message(shown(.key), (*.retry_after).max(1)))]
    KeyLimit {
        /// The name of the key.
        key: String,
        /// The limit.
        limit: KeyLimit,
        /// Seconds after which a retry makes sense.
        retry_after: u64,
    },
    /// A WebSocket outside `/v1/realtime`, another upgrade, or CONNECT.
    #[error("connection upgrades are not supported; send plain HTTP/1.1")]
    UpgradeRefused,
    /// A transfer coding other than `chunked`.
    #[error("the only supported Transfer-Encoding is 'chunked'")]
    CodingNotSupported,
    /// The gateway refuses the request early.
    #[error("{}", .reason.message())]
    Shed {
        /// The reason.
        reason: ShedReason,
        /// Seconds until a retry, from the measured drain rate.
        retry_after: u64,
    },
    /// The engine reported in the stream, before any content, that it is overloaded.
    #[error("{message}")]
    UpstreamBusy {
        /// The engine's message.
        message: String,
        /// Seconds until a retry, from the engine's response or the measured drain rate.
        retry_after: u64,
    },
    /// The upstream broke before the first byte, and no other backend could take the request.
    #[error("the backend failed before it responded")]
    UpstreamBroke,
    /// The upstream refused the credentials of the gateway, and no other backend could take the
    /// request.
    #[error("the backend refuses the gateway's credentials; its operator must set the backend's api_key")]
    UpstreamRefusedGateway,
    /// The upstream did not respond in time, and no other backend could take the request.
    #[error("the backend did not respond in time")]
    UpstreamTimeout,
    /// A bug in the gateway.
    #[error("the gateway failed; see its log")]
    Internal,
}

const INVALID: &str = "invalid_request_error";
const AUTHENTICATION: &str = "authentication_error";
const RATE_LIMIT: &str = "rate_limit_error";
const PERMISSION: &str = "permission_error";
const NOT_FOUND: &str = "not_found_error";
const UNAVAILABLE: &str = "service_unavailable";
const SERVER: &str = "server_error";

/// The table of refusals: variant, status, `error.type`, `error.code`.
macro_rules! refusals {
    ($($variant:ident $status:literal $kind:ident $code:literal,)+) => {
        impl Refusal {
            fn row(&self) -> (u16, &'static str, &'static str) {
                match self {
                    $(Self::$variant { .. } => ($status, $kind, $code),)+
                    Self::Shed { reason, .. } => (503, UNAVAILABLE, reason.label()),
                }
            }
        }

        /// Every code of the client port. The error event of a stream that breaks has one of them.
        pub fn error_codes() -> impl Iterator<Item = &'static str> {
            [$($code),+].into_iter().chain(ShedReason::ALL.map(ShedReason::label))
        }
    };
}

refusals! {
    BadRequest 400 INVALID "invalid_request",
    NoModel 400 INVALID "model_missing",
    ExceedsBackend 400 INVALID "exceeds_backend",
    ExceedsKey 400 INVALID "exceeds_key_limit",
    NoKey 401 AUTHENTICATION "missing_api_key",
    BadKey 401 AUTHENTICATION "invalid_api_key",
    OriginNotAllowed 403 PERMISSION "origin_not_allowed",
    ModelForbidden 403 PERMISSION "model_forbidden",
    UnknownModel 404 NOT_FOUND "model_not_found",
    UnknownResponse 404 NOT_FOUND "response_not_found",
    UnknownRoute 404 NOT_FOUND "route_not_found",
    MethodNotAllowed 405 INVALID "method_not_allowed",
    BodyTimeout 408 INVALID "body_timeout",
    HeaderTimeout 408 INVALID "header_timeout",
    BodyTooLarge 413 INVALID "body_too_large",
    BodyExpands 413 INVALID "body_expands",
    EncodingNotSupported 415 INVALID "content_encoding_not_supported",
    ExpectationFailed 417 INVALID "expectation_failed",
    SuspectedCrash 422 INVALID "suspected_crash",
    KeyLimit 429 RATE_LIMIT "rate_limit_exceeded",
    HeadersTooLarge 431 INVALID "headers_too_large",
    Internal 500 SERVER "internal_error",
    UpgradeRefused 501 INVALID "upgrade_not_supported",
    CodingNotSupported 501 INVALID "transfer_coding_not_supported",
    UpstreamBroke 502 SERVER "upstream_broke",
    UpstreamRefusedGateway 502 SERVER "upstream_refused_gateway",
    UpstreamBusy 503 UNAVAILABLE "upstream_busy",
    UpstreamTimeout 504 SERVER "upstream_timeout",
}

impl Refusal {
    /// The HTTP status.
    pub fn status(&self) -> u16 {
        self.row().0
    }

    /// The value of `error.code`, which is also the reason in the label of the outcome
    /// `refused(reason)`.
    pub fn code(&self) -> &'static str {
        self.row().2
    }

    /// Seconds for the `Retry-After` header, at least 1; `None` if a retry alone does not help.
    pub fn retry_after(&self) -> Option<u64> {
        match self {
            Self::KeyLimit { retry_after, .. }
            | Self::Shed { retry_after, .. }
            | Self::UpstreamBusy { retry_after, .. } => Some((*retry_after).max(1)),
            // The network may have recovered. Official clients retry a 408 by themselves.
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
        let ((status, kind, code), message) = (self.row(), self.to_string());
        if format == ErrorFormat::Anthropic {
            return anthropic_error(status, &message).to_string().into_bytes();
        }
        let param = match self {
            Self::BadRequest { param, .. } => *param,
            Self::NoModel | Self::ModelForbidden { .. } | Self::UnknownModel { .. } => Some("model"),
            _ => None,
        };
        openai_error(kind, code, &message, param).to_string().into_bytes()
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
/// the connection. A blank line at the start ends the event in whose middle the stream may have
/// broken.
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

/// Anthropic's error type follows from the status.
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

fn hint_or_page(hint: Option<&RouteHint>) -> String {
    hint.map_or_else(|| "sluice's page .github/docs/clients.md lists the served paths".to_owned(), ToString::to_string)
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
