//! Decides whether another engine may serve a request that one engine has answered: one table, for
//! heads, bodies and error events.
//!
//! The table applies only while the client has received no token of a response. `forward.rs` uses
//! it when a head has arrived, `pump.rs` when an event or a body says that the engine will not
//! serve the request. If no other engine has room, the client gets the answer of the last engine.
//!
//! | answer | meaning | a fault of the engine |
//! |---|---|---|
//! | 502 | the engine's own upstream failed | yes |
//! | 503, as status or in an event | the engine's admission control | no |
//! | 429, as status or in an event | the engine's limit for its callers | no |
//! | 500 in an event | the engine failed at this request | yes |
//! | 500 that says so | the engine core has died (`refused_here.rs`) | yes |
//! | 401 to the gateway's credentials | refuses the gateway | no: a state of the backend |
//! | 403 to the gateway's credentials | refuses gateway or request | no; a state if a probe fails |
//! | 404, 405 or 400 that says so | lacks model, route, length or rank | no (`refused_here.rs`) |
//! | 400 in an event that says so | lacks the rank | no (`refused_here.rs`) |
//!
//! Any other 500 as the status of a head goes to the client, because another engine would fail at
//! this request as well. A 401 or 403 to credentials of the client goes to the client, who sent
//! them.

use http::StatusCode;

use super::record::RetryReason;
use super::refused_here::{self, Refused};
use sluice_core::openai::UpstreamError;

/// The answer of an engine to a request that it has not begun to serve.
#[derive(Clone, Copy, Debug)]
pub(super) struct EngineAnswer<'a> {
    pub(super) status: StatusCode,
    /// The whole body of a refusal. `None` if it was not read, was longer than the gateway reads,
    /// or did not end properly. Without a body, a 404, 405 or 400 is no evidence that the engine
    /// does not serve such requests.
    pub(super) read: Option<&'a [u8]>,
    /// The error in the body or in the first event, if one was read.
    pub(super) error: Option<&'a UpstreamError>,
    pub(super) credentials: Credentials,
}

/// Whose credentials a request to an engine carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Credentials {
    /// The backend's `api_key`; or none, because the client's key was for the gateway.
    Gateway,
    /// The client's credentials as the client sent them, or none if the client sent none.
    Client,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Elsewhere {
    /// 502.
    Broken,
    /// 503: the engine has no room.
    Busy,
    /// 429: the engine limits its callers.
    Limited,
    /// An error event with code 500, or a 500 because the engine core has died.
    Failed,
    /// 401: the engine refuses the gateway's credentials.
    GatewayRefused,
    /// 403 to the gateway's credentials. A filter in front of an engine also answers 403 because of
    /// a request's content.
    Forbidden,
    /// The engine does not serve such requests; other engines may.
    NotServed(Refused),
}

impl Elsewhere {
    /// Whether the answer counts against the engine's health.
    pub(super) fn is_fault(self) -> bool {
        match self {
            Self::Broken | Self::Failed => true,
            Self::Busy | Self::Limited | Self::GatewayRefused | Self::Forbidden | Self::NotServed(_) => false,
        }
    }
}

impl EngineAnswer<'_> {
    /// Whether another engine may serve the request, and why.
    pub(super) fn elsewhere(&self) -> Option<Elsewhere> {
        // An error event comes after a head with status 200, so the code of the event replaces that
        // status.
        let event = self.error.filter(|_| self.status.is_success()).map(|error| error.code);
        match event.unwrap_or(Some(self.status.as_u16()))? {
            500 if event.is_some() || self.read.is_some_and(refused_here::is_dead) => Some(Elsewhere::Failed),
            502 if event.is_none() => Some(Elsewhere::Broken),
            503 => Some(Elsewhere::Busy),
            429 => Some(Elsewhere::Limited),
            401 if self.credentials == Credentials::Gateway && event.is_none() => Some(Elsewhere::GatewayRefused),
            400 if event.is_some() && self.error.is_some_and(|error| refused_here::lacks_rank(&error.message)) => {
                Some(Elsewhere::NotServed(Refused::Rank))
            }
            403 if self.credentials == Credentials::Gateway && event.is_none() => Some(Elsewhere::Forbidden),
            _ if event.is_none() => refused_here::judge(self.status, self.read?).map(Elsewhere::NotServed),
            _ => None,
        }
    }

    pub(super) fn retry_reason(&self) -> RetryReason {
        if self.status.is_success() { RetryReason::InStream } else { RetryReason::Status }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elsewhere(status: u16, event: Option<Option<u16>>, credentials: Credentials) -> Option<Elsewhere> {
        let error = event.map(|code| UpstreamError { code, message: String::new() });
        let status = StatusCode::from_u16(status).unwrap();
        EngineAnswer { status, read: Some(b"{}"), error: error.as_ref(), credentials }.elsewhere()
    }

    #[test]
    fn only_a_body_that_was_read_to_its_end_says_what_an_engine_does_not_serve() {
        let answer =
            |status, read| EngineAnswer { status, read, error: None, credentials: Credentials::Client }.elsewhere();
        for status in [StatusCode::NOT_FOUND, StatusCode::METHOD_NOT_ALLOWED] {
            assert_eq!(answer(status, Some(b"")), Some(Elsewhere::NotServed(Refused::Route)));
            assert_eq!(answer(status, None), None);
        }
    }

    #[test]
    fn a_500_says_that_another_engine_may_serve_the_request_only_if_the_engine_core_has_died() {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        let answer = |body: &'static str| EngineAnswer {
            status,
            read: Some(body.as_bytes()),
            error: None,
            credentials: Credentials::Client,
        };
        let dead = r#"{"error":{"message":"EngineCore encountered an issue. See stack trace","type":"x","code":500}}"#;
        let of_the_request = r#"{"error":{"message":"no: EngineCore encountered an issue","type":"x","code":500}}"#;
        assert_eq!(answer(dead).elsewhere(), Some(Elsewhere::Failed));
        assert_eq!(answer(of_the_request).elsewhere(), None);
        assert_eq!(answer("Internal Server Error").elsewhere(), None);
    }

    #[test]
    fn every_row_of_the_table() {
        for (status, event, gateway, client) in [
            (502, None, Some(Elsewhere::Broken), Some(Elsewhere::Broken)),
            (503, None, Some(Elsewhere::Busy), Some(Elsewhere::Busy)),
            (429, None, Some(Elsewhere::Limited), Some(Elsewhere::Limited)),
            (401, None, Some(Elsewhere::GatewayRefused), None),
            (403, None, Some(Elsewhere::Forbidden), None),
            (200, Some(Some(503)), Some(Elsewhere::Busy), Some(Elsewhere::Busy)),
            (200, Some(Some(429)), Some(Elsewhere::Limited), Some(Elsewhere::Limited)),
            (200, Some(Some(500)), Some(Elsewhere::Failed), Some(Elsewhere::Failed)),
            (200, Some(Some(401)), None, None),
            (200, Some(Some(400)), None, None),
            (200, Some(None), None, None),
            (200, None, None, None),
            (400, None, None, None),
            (404, None, None, None),
            (500, None, None, None),
            (504, None, None, None),
            // The code in the body of an error response does not replace the status of the head.
            (400, Some(Some(503)), None, None),
        ] {
            assert_eq!(elsewhere(status, event, Credentials::Gateway), gateway, "{status} {event:?}, gateway");
            assert_eq!(elsewhere(status, event, Credentials::Client), client, "{status} {event:?}, client");
        }
    }
}
