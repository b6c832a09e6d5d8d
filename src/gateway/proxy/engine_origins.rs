//! What engines say of the origins of web pages, where `server.cors` is not set.
//!
//! A page that may use an engine may then use the gateway, too, as with nginx in between: vLLM up to 0.30 allows every
//! origin, later ones those of `--allowed-origins`. Its own answers (errors, `/v1/models`) need the same policy, so the
//! gateway asks one engine in rotation with a preflight of its own, and applies the answer to all responses.
//!
//! Bounds: an answer is used for [`FRESH`], and longer while no engine can be asked. At most [`ORIGINS_MAX`] are kept, and
//! [`ASKS_MAX`] are asked for at once; a page of another origin is then treated as not allowed.

use std::collections::HashMap;
use std::time::Duration;

use http::header::{
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, HeaderValue, ORIGIN,
};
use http::{HeaderMap, Method};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::flow::{Connection, Exchange, Flow, Recorder, Upstream, UpstreamRequest};
use crate::pool::BackendView;

/// How long an answer is used.
const FRESH: Duration = Duration::from_secs(60);
/// Origins whose answers are kept.
const ORIGINS_MAX: usize = 256;
/// Questions to engines at once.
const ASKS_MAX: usize = 8;
/// How long an engine may take to answer.
const ASK_TIME: Duration = Duration::from_secs(2);

/// The answers so far.
#[derive(Debug)]
pub(super) struct EngineOrigins {
    known: Mutex<HashMap<Box<[u8]>, Answer>>,
    asking: Semaphore,
}

#[derive(Clone, Debug)]
struct Answer {
    /// The value of `Access-Control-Allow-Origin`; `None`: the engine does not allow the origin.
    allow: Option<HeaderValue>,
    at: Instant,
}

impl Default for EngineOrigins {
    fn default() -> Self {
        Self { known: Mutex::default(), asking: Semaphore::new(ASKS_MAX) }
    }
}

impl EngineOrigins {
    /// The last answer about an origin, however old.
    pub(super) fn known(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        self.known.lock().get(origin.as_bytes())?.allow.clone()
    }

    /// What an engine says of an origin, which it is asked for unless it has been lately.
    pub(super) async fn of<U: Upstream, R: Recorder>(
        &self,
        flow: &Flow<U, R>,
        origin: HeaderValue,
    ) -> Option<HeaderValue> {
        let answer = self.known.lock().get(origin.as_bytes()).cloned();
        if let Some(answer) = answer.filter(|answer| answer.at.elapsed() < FRESH) {
            return answer.allow;
        }
        let asked = match self.asking.try_acquire() {
            Ok(_place) => ask(flow, &origin).await,
            Err(_) => None,
        };
        match asked {
            Some(allow) => self.keep(&origin, allow),
            None => self.known(&origin),
        }
    }

    fn keep(&self, origin: &HeaderValue, allow: Option<HeaderValue>) -> Option<HeaderValue> {
        let mut known = self.known.lock();
        if known.len() >= ORIGINS_MAX && !known.contains_key(origin.as_bytes()) {
            let oldest = known.iter().min_by_key(|(_, answer)| answer.at).map(|(origin, _)| origin.clone());
            oldest.and_then(|origin| known.remove(&origin));
        }
        known.insert(origin.as_bytes().into(), Answer { allow: allow.clone(), at: Instant::now() });
        allow
    }
}

/// Sends an engine a preflight. `None`: none answered.
async fn ask<U: Upstream, R: Recorder>(flow: &Flow<U, R>, origin: &HeaderValue) -> Option<Option<HeaderValue>> {
    let pools = flow.admission().view();
    let engine = pools.iter().flat_map(|pool| &pool.backends).find(|backend| BackendView::in_rotation(backend))?;
    let mut headers = HeaderMap::with_capacity(4);
    headers.insert(ORIGIN, origin.clone());
    headers.insert(ACCESS_CONTROL_REQUEST_METHOD, HeaderValue::from_static("POST"));
    headers.insert(ACCESS_CONTROL_REQUEST_HEADERS, HeaderValue::from_static("authorization, content-type"));
    let path = "/v1/chat/completions".to_owned();
    let request = UpstreamRequest { method: Method::OPTIONS, path, headers, ..UpstreamRequest::default() };
    let asked = async {
        let mut exchange = flow.upstream().send(&engine.address, &request, Connection::New).await.ok()?;
        exchange.head().await.ok()
    };
    let head = timeout(ASK_TIME, asked).await.ok()??;
    let allow = head.headers.get(ACCESS_CONTROL_ALLOW_ORIGIN);
    Some(allow.filter(|allow| head.status.is_success() && (*allow == "*" || *allow == origin)).cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_origins_are_kept_than_the_bound() {
        let origins = EngineOrigins::default();
        let origin = |number: usize| HeaderValue::from_str(&format!("https://{number}.example")).unwrap();
        for number in 0..ORIGINS_MAX + 10 {
            origins.keep(&origin(number), Some(HeaderValue::from_static("*")));
        }
        assert_eq!(origins.known.lock().len(), ORIGINS_MAX);
        assert!(origins.known(&origin(ORIGINS_MAX + 9)).is_some());
    }
}
