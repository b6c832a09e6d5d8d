//! The engines' policy about origins of web pages, used if `server.cors` is not set.
//!
//! A page that may use an engine may also use the gateway. vLLM up to 0.30 allows every origin, and
//! later versions allow the origins of `--allowed-origins`. The gateway asks an engine in rotation
//! with a preflight, and applies the answer to all responses.
//!
//! An answer is used however old it is. A separate task renews it after [`FRESH`]. Only a preflight
//! or a response of the gateway itself waits for an answer, and only if none is known. A request
//! with an accepted key or a preflight makes the gateway ask. If no engine answers, it asks none
//! for [`FAILED_FOR`].
//!
//! Bounds: [`ORIGINS_MAX`] origins of at most [`ORIGIN_BYTES`]. Beyond that, unused origins are
//! dropped first, then origins that are not allowed, then the oldest. So origins that a client
//! makes up replace none in use. Open questions: [`ASKS_MAX`], [`ASKS_OF_ANYONE_MAX`] of them
//! without a key.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::header::{
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, HeaderValue, ORIGIN,
};
use http::{HeaderMap, Method};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::flow::{Connection, Exchange, Flow, Recorder, Upstream, UpstreamRequest};
use crate::pool::BackendView;
use sluice_config::Address;

/// Age from which an answer is renewed.
const FRESH: Duration = Duration::from_secs(60);
/// How long no engine is asked after a question that no engine answered.
const FAILED_FOR: Duration = Duration::from_secs(5);
const ORIGINS_MAX: usize = 256;
/// Bytes of the longest origin; host names have at most 253.
const ORIGIN_BYTES: usize = 280;
const ASKS_MAX: usize = 8;
/// The part of [`ASKS_MAX`] for requests without an accepted key.
const ASKS_OF_ANYONE_MAX: usize = 6;
/// How long one engine may take to answer.
const ENGINE_TIME: Duration = Duration::from_secs(1);
/// How long all engines together may take.
const ASK_TIME: Duration = Duration::from_secs(2);
/// The most engines that are asked, one after the other.
const ENGINES_MAX: usize = 4;

/// The value of `Access-Control-Allow-Origin`; `None`: the origin is not allowed.
type Allow = Option<HeaderValue>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    /// A request without a key, as preflights are.
    Anyone,
    /// A request whose key was accepted, or that needs none.
    Accepted,
}

#[derive(Debug, Default)]
pub(super) struct EngineOrigins {
    table: Mutex<Table>,
    /// Notified when a question ends.
    answered: Notify,
}

#[derive(Debug, Default)]
struct Table {
    /// The answer of an engine that allows every origin.
    any: Option<Answer>,
    by_origin: HashMap<Box<[u8]>, Answer>,
    asking: HashSet<Box<[u8]>>,
    /// The end of the last question that no engine answered.
    failed_at: Option<Instant>,
}

#[derive(Clone, Debug)]
struct Answer {
    allow: Allow,
    at: Instant,
    /// Whether a request with an accepted key has come from this origin.
    in_use: bool,
}

impl Table {
    fn answer(&self, origin: &HeaderValue) -> Option<&Answer> {
        self.any.as_ref().or_else(|| self.by_origin.get(origin.as_bytes()))
    }

    /// Takes a place for a question about an origin; `false`: no question is needed, or no place is
    /// free.
    fn begin(&mut self, origin: &HeaderValue, asker: Asker, now: Instant) -> bool {
        if asker == Asker::Accepted
            && let Some(answer) = self.by_origin.get_mut(origin.as_bytes())
        {
            answer.in_use = true;
        }
        let is_recent = |at: Instant, time| now.saturating_duration_since(at) < time;
        let places = if asker == Asker::Accepted { ASKS_MAX } else { ASKS_OF_ANYONE_MAX };
        let is_due = self.answer(origin).is_none_or(|answer| !is_recent(answer.at, FRESH))
            && self.failed_at.is_none_or(|at| !is_recent(at, FAILED_FOR))
            && origin.len() <= ORIGIN_BYTES
            && self.asking.len() < places;
        is_due && self.asking.insert(origin.as_bytes().into())
    }

    /// Ends a question. `said`: the answer of an engine; `None`: no engine answered.
    fn note(&mut self, origin: &HeaderValue, said: Option<Allow>, now: Instant) {
        let Some(allow) = said else {
            self.failed_at = Some(now);
            return;
        };
        self.failed_at = None;
        let known = self.by_origin.get(origin.as_bytes());
        let answer = Answer { in_use: known.is_some_and(|known| known.in_use), allow, at: now };
        if answer.allow.as_ref().is_some_and(|allow| allow == "*") {
            self.any = Some(answer);
            self.by_origin.clear();
            return;
        }
        self.any = None;
        self.by_origin.insert(origin.as_bytes().into(), answer);
        if self.by_origin.len() > ORIGINS_MAX {
            let rank = |answer: &Answer| (answer.in_use, answer.allow.is_some(), answer.at);
            let least = self.by_origin.iter().min_by_key(|(_, answer)| rank(answer));
            let least = least.map(|(origin, _)| origin.clone());
            least.and_then(|origin| self.by_origin.remove(&origin));
        }
    }
}

struct Question {
    origins: Arc<EngineOrigins>,
    origin: HeaderValue,
    said: Option<Allow>,
}

impl Question {
    fn end(mut self, said: Option<Allow>) {
        self.said = said;
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        {
            let mut table = self.origins.table.lock();
            table.note(&self.origin, self.said.take(), Instant::now());
            table.asking.remove(self.origin.as_bytes());
        }
        self.origins.answered.notify_waiters();
    }
}

impl EngineOrigins {
    /// The answer about an origin, however old, if known.
    pub(super) fn known(&self, origin: &HeaderValue) -> Allow {
        self.table.lock().answer(origin)?.allow.clone()
    }

    /// Asks an engine about an origin in a separate task, unless a fresh answer is known.
    pub(super) fn refresh<U, R>(self: &Arc<Self>, flow: &Arc<Flow<U, R>>, origin: &HeaderValue, asker: Asker)
    where
        U: Upstream + 'static,
        R: Recorder + 'static,
    {
        self.ask(origin, asker, |origin| ask(Arc::clone(flow), origin));
    }

    /// The same as [`Self::refresh`], but waits until an answer is known or all engines have failed
    /// to answer in time.
    pub(super) async fn wait<U, R>(self: &Arc<Self>, flow: &Arc<Flow<U, R>>, origin: &HeaderValue, asker: Asker)
    where
        U: Upstream + 'static,
        R: Recorder + 'static,
    {
        self.refresh(flow, origin, asker);
        self.answered(origin).await;
    }

    fn ask<F>(self: &Arc<Self>, origin: &HeaderValue, asker: Asker, ask: impl FnOnce(HeaderValue) -> F)
    where
        F: Future<Output = Option<Allow>> + Send + 'static,
    {
        if !self.table.lock().begin(origin, asker, Instant::now()) {
            return;
        }
        let question = Question { origins: Arc::clone(self), origin: origin.clone(), said: None };
        let asked = ask(origin.clone());
        tokio::spawn(async move { question.end(asked.await) });
    }

    async fn answered(&self, origin: &HeaderValue) {
        let is_over = || {
            let table = self.table.lock();
            table.answer(origin).is_some() || !table.asking.contains(origin.as_bytes())
        };
        let waiting = async {
            loop {
                let mut answered = pin!(self.answered.notified());
                answered.as_mut().enable();
                if is_over() {
                    return;
                }
                answered.await;
            }
        };
        let _ = timeout(ASK_TIME, waiting).await;
    }
}

/// Sends engines a preflight, until one answers.
async fn ask<U: Upstream, R: Recorder>(flow: Arc<Flow<U, R>>, origin: HeaderValue) -> Option<Allow> {
    let pools = flow.admission().view();
    let engines = pools.iter().flat_map(|pool| &pool.backends).filter(|backend| BackendView::in_rotation(backend));
    let asked = async {
        for engine in engines.take(ENGINES_MAX) {
            if let Ok(Some(allow)) = timeout(ENGINE_TIME, ask_one(flow.upstream(), &engine.address, &origin)).await {
                return Some(allow);
            }
        }
        None
    };
    timeout(ASK_TIME, asked).await.ok().flatten()
}

async fn ask_one<U: Upstream>(upstream: &U, address: &Address, origin: &HeaderValue) -> Option<Allow> {
    let mut headers = HeaderMap::with_capacity(4);
    headers.insert(ORIGIN, origin.clone());
    headers.insert(ACCESS_CONTROL_REQUEST_METHOD, HeaderValue::from_static("POST"));
    headers.insert(ACCESS_CONTROL_REQUEST_HEADERS, HeaderValue::from_static("authorization, content-type"));
    let path = "/v1/chat/completions".to_owned();
    let request = UpstreamRequest { method: Method::OPTIONS, path, headers, ..UpstreamRequest::default() };
    let mut exchange = upstream.send(address, &request, Connection::New).await.ok()?;
    let head = exchange.head().await.ok().filter(|head| !head.status.is_server_error())?;
    let allow = head.headers.get(ACCESS_CONTROL_ALLOW_ORIGIN);
    Some(allow.filter(|allow| head.status.is_success() && (*allow == "*" || *allow == origin)).cloned())
}

#[cfg(test)]
mod tests;
