//! Cross-origin requests of web pages (CORS, in the Fetch standard): who may read responses, and
//! preflights.
//!
//! Browsers send `Origin` with each such request, and a preflight (OPTIONS) before one with a key
//! or a JSON body. The gateway answers preflights itself, for every path and without a key, which
//! browsers do not send. The policy is `server.cors`, or else the policy of the engines
//! (`engine_origins.rs`). It applies to every response, also to refusals, so that a page can read
//! the error.
//!
//! A browser hides a response without `Access-Control-Allow-Origin` from the page. Without `Origin`
//! in a request, the response gets at most `Vary`, if it would depend on `Origin`.

use std::sync::Arc;

use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderValue, ORIGIN, VARY,
};
use http::{HeaderMap, Method};

use super::engine_origins::EngineOrigins;
use crate::flow::record::client_text;
use sluice_config::Cors;
use sluice_core::openai::Refusal;

/// Headers of responses that pages may read, besides the few that the standard always allows.
const EXPOSED: &str = "x-request-id, retry-after, x-sluice-error, x-sluice-backend, x-sluice-pool, x-sluice-arm, \
                       server-timing";
/// Methods that are served on some path.
const METHODS: &str = "GET, HEAD, POST, DELETE";
/// How long a browser may use the answer to a preflight, seconds. A changed policy takes effect
/// after that.
const MAX_AGE: &str = "600";
const PREFIX: &str = "access-control-";

/// The policy's decision about one request.
#[derive(Debug, Default)]
pub(super) struct CrossOrigin {
    allow: Allow,
    /// Whether another `Origin` would get another answer.
    varies: bool,
    /// Whether the engines' policy applies, so that an engine's own headers stay if the page is not
    /// allowed here.
    is_of_engines: bool,
    /// Whether the response answers a preflight, and so has the headers already.
    is_preflight: bool,
}

#[derive(Debug, Default)]
enum Allow {
    /// The page may not read the response, or no page asks.
    #[default]
    No,
    /// The page may read the response; the value of `Access-Control-Allow-Origin`.
    Yes(HeaderValue),
    /// Decided by the engines' answer about this origin at the time of the response.
    ByEngines(Arc<EngineOrigins>, HeaderValue),
}

impl From<Option<HeaderValue>> for Allow {
    fn from(allow: Option<HeaderValue>) -> Self {
        allow.map_or(Self::No, Self::Yes)
    }
}

fn origin(headers: &HeaderMap) -> Option<&HeaderValue> {
    let mut origins = headers.get_all(ORIGIN).iter();
    // A browser sends one origin. If there are several, none of them is certain.
    origins.next().filter(|_| origins.next().is_none())
}

impl CrossOrigin {
    pub(super) fn of(policy: &Cors, headers: &HeaderMap) -> Self {
        let origin = origin(headers);
        let (allow, varies) = match policy {
            Cors::Any => (origin.map(|_| HeaderValue::from_static("*")), false),
            Cors::Only(origins) => {
                let is_listed = |sent: &&HeaderValue| origins.iter().any(|origin| origin.as_bytes() == sent.as_bytes());
                (origin.filter(is_listed).cloned(), !origins.is_empty())
            }
        };
        Self { allow: allow.into(), varies, is_of_engines: false, is_preflight: false }
    }

    /// Leaves the decision to the engines' answer at the time of the response.
    pub(super) fn of_engines(origins: &Arc<EngineOrigins>, headers: &HeaderMap) -> Self {
        let allow = origin(headers).map_or(Allow::No, |page| Allow::ByEngines(Arc::clone(origins), page.clone()));
        Self { allow, varies: false, is_of_engines: true, is_preflight: false }
    }

    /// The origin that engines may be asked about.
    pub(super) fn asks_engines(&self) -> Option<HeaderValue> {
        match &self.allow {
            Allow::ByEngines(_, page) => Some(page.clone()),
            Allow::No | Allow::Yes(_) => None,
        }
    }

    fn settle(&mut self) {
        if let Allow::ByEngines(origins, page) = &self.allow {
            let allow = origins.known(page);
            self.varies = allow.as_ref().is_some_and(|allow| allow != "*");
            self.allow = allow.into();
        }
    }

    /// Replaces the headers about other origins in a response.
    pub(super) fn apply(mut self, headers: &mut HeaderMap) {
        self.settle();
        let is_allowed = matches!(self.allow, Allow::Yes(_));
        let replaces = !self.is_preflight && (is_allowed || !self.is_of_engines);
        while replaces && let Some(name) = headers.keys().find(|name| name.as_str().starts_with(PREFIX)).cloned() {
            headers.remove(name);
        }
        if self.varies && !headers.get_all(VARY).iter().any(names_origin) {
            headers.append(VARY, HeaderValue::from_static("Origin"));
        }
        if let Allow::Yes(allow) = self.allow {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allow);
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        }
    }

    /// The headers of the answer to a preflight, besides the headers of every response; `None`: no
    /// preflight.
    pub(super) fn preflight(&mut self, method: &Method, sent: &HeaderMap) -> Option<Result<HeaderMap, Refusal>> {
        let origin = sent.get(ORIGIN).filter(|_| is_preflight(method, sent))?;
        self.settle();
        if !matches!(self.allow, Allow::Yes(_)) {
            let origin = client_text(&String::from_utf8_lossy(origin.as_bytes())).to_string();
            return Some(Err(Refusal::OriginNotAllowed { origin }));
        }
        self.is_preflight = true;
        let mut headers = HeaderMap::with_capacity(6);
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS));
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE));
        // The gateway forwards unknown headers, and "*" would not include Authorization.
        if let Some(wanted) = sent.get(ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
        }
        Some(Ok(headers))
    }
}

pub(super) fn is_preflight(method: &Method, sent: &HeaderMap) -> bool {
    method == Method::OPTIONS && sent.contains_key(ORIGIN) && sent.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

/// Whether a `Vary` already names the origin, or everything.
fn names_origin(vary: &HeaderValue) -> bool {
    let mut names = vary.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    names.any(|name| name == b"*" || name.eq_ignore_ascii_case(ORIGIN.as_str().as_bytes()))
}
