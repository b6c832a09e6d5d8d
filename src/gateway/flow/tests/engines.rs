//! Scripted engines in memory.
//!
//! Each request takes the next script of the engine. The engines count open exchanges, and record
//! each request that they receive: port, request id and body.

use std::collections::VecDeque;

use bytes::BytesMut;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};

use super::*;

#[derive(Clone)]
pub(super) enum Script {
    NoConnection,
    StaleConnection,
    /// A reused connection is closed without a byte; a new one is refused.
    StaleAndGone,
    CloseBeforeHead,
    NeverAnswers,
    StopsReading,
    /// A reused connection is closed without a byte; a new one gets this response.
    Stale(u16, &'static str),
    /// A head with this status; then the connection is closed.
    HeadOnly(u16),
    Json(u16, &'static str),
    /// Like `Json`, with a coding that the gateway does not read.
    Coded(u16, &'static str),
    /// Like `Json`, with the body after this many milliseconds.
    Late(u16, u64, &'static str),
    /// Chunks of a stream with the pause before each, in milliseconds; `true`: the stream ends
    /// properly.
    Stream(Vec<(u64, &'static str)>, bool),
}

pub(super) const ROLE: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
pub(super) const WORD: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"w\"},\"finish_reason\":null}]}\n\n";
pub(super) const LAST: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"z\"},\"finish_reason\":\"stop\"}]}\n\n";
pub(super) const USAGE: &str =
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"total_tokens\":11,\"completion_tokens\":2}}\n\n";
pub(super) const GIVEN_UP: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"abort\"}]}\n\n";
pub(super) const DONE: &str = "data: [DONE]\n\n";
pub(super) const BUSY: &str =
    "data: {\"error\":{\"message\":\"busy\",\"type\":\"x\",\"code\":503}}\n\ndata: [DONE]\n\n";

pub(super) fn good() -> Script {
    Script::Stream(vec![(10, ROLE), (0, WORD), (5, LAST), (0, USAGE), (0, DONE)], true)
}

/// Engines by port. Each request takes the next script; the last script repeats.
#[derive(Default)]
pub(super) struct Engines {
    pub(super) scripts: Mutex<Vec<(u16, VecDeque<Script>)>>,
    pub(super) calls: Mutex<Vec<(u16, String, Bytes)>>,
    pub(super) open: Arc<Mutex<i32>>,
    /// The paths of the calls.
    pub(super) paths: Mutex<Vec<String>>,
    /// Bodies of the requests to `/tokenize`, which are not among the calls.
    pub(super) counts: Mutex<Vec<Bytes>>,
    /// The response to a count of a request; `None`: 404.
    pub(super) request_count: Mutex<Option<Script>>,
    /// The response to a count of a text; `None`: 404.
    pub(super) text_count: Mutex<Option<Script>>,
}

pub(super) struct Served {
    script: VecDeque<(u64, &'static str)>,
    /// When the next chunk comes. Set by the first wait, since a wait may be cancelled and begun
    /// again.
    next_at: Option<Instant>,
    in_order: bool,
    head: Result<ResponseHead, ExchangeError>,
    responds: bool,
    reused: bool,
    open: Arc<Mutex<i32>>,
}

impl Upstream for Engines {
    type Exchange = Served;

    async fn send(
        &self,
        to: &Address,
        call: &UpstreamRequest,
        connection: Connection,
    ) -> Result<Served, ExchangeError> {
        let id = call.headers["x-request-id"].to_str().unwrap().to_owned();
        let body = call.body.to_bytes();
        let script = if call.path == "/tokenize" {
            let is_text = String::from_utf8_lossy(&body).contains("add_special_tokens");
            self.counts.lock().push(body);
            let count = if is_text { &self.text_count } else { &self.request_count };
            count.lock().clone().unwrap_or(Script::Json(404, "{}"))
        } else {
            self.calls.lock().push((to.endpoint.port, id, body));
            self.paths.lock().push(call.path.clone());
            let mut scripts = self.scripts.lock();
            let (_, queue) = scripts.iter_mut().find(|(port, _)| *port == to.endpoint.port).unwrap();
            if queue.len() > 1 { queue.pop_front().unwrap() } else { queue[0].clone() }
        };
        let closed = || ExchangeError::Closed("eof".to_owned());
        let head = |status: u16, kind: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
            Ok(ResponseHead { status: StatusCode::from_u16(status).unwrap(), headers })
        };
        let served = |head, script: Vec<(u64, &'static str)>, in_order, responds, reused| {
            *self.open.lock() += 1;
            let open = Arc::clone(&self.open);
            Ok(Served { script: script.into(), next_at: None, in_order, head, responds, reused, open })
        };
        match script {
            Script::NoConnection => Err(ExchangeError::Connect("refused".to_owned())),
            Script::StaleConnection if connection == Connection::Any => {
                served(Err(closed()), vec![], false, true, true)
            }
            Script::StaleAndGone if connection == Connection::Any => served(Err(closed()), vec![], false, true, true),
            Script::StaleAndGone => Err(ExchangeError::Connect("refused".to_owned())),
            Script::StaleConnection => served(head(200, "text/event-stream"), script_of(good()), true, true, false),
            Script::Stale(..) if connection == Connection::Any => served(Err(closed()), vec![], false, true, true),
            Script::Stale(status, body) => served(head(status, "application/json"), vec![(1, body)], true, true, false),
            Script::StopsReading => Err(ExchangeError::NotTaken),
            Script::HeadOnly(status) => served(head(status, "application/json"), vec![], false, true, false),
            Script::CloseBeforeHead => served(Err(closed()), vec![], false, true, false),
            Script::NeverAnswers => served(Err(closed()), vec![], false, false, false),
            Script::Json(status, body) => served(head(status, "application/json"), vec![(20, body)], true, true, false),
            Script::Late(status, pause, body) => {
                served(head(status, "application/json"), vec![(pause, body)], true, true, false)
            }
            Script::Coded(status, body) => {
                let mut coded = head(status, "application/json");
                if let Ok(head) = &mut coded {
                    head.headers.insert(CONTENT_ENCODING, HeaderValue::from_static("br"));
                }
                served(coded, vec![(1, body)], true, true, false)
            }
            Script::Stream(chunks, in_order) => {
                served(head(200, "text/event-stream; charset=utf-8"), chunks, in_order, true, false)
            }
        }
    }
}

fn script_of(script: Script) -> Vec<(u64, &'static str)> {
    if let Script::Stream(chunks, _) = script { chunks } else { vec![] }
}

impl Exchange for Served {
    fn reused(&self) -> bool {
        self.reused
    }

    fn connect_time(&self) -> Duration {
        Duration::ZERO
    }

    async fn head(&mut self) -> Result<ResponseHead, ExchangeError> {
        if !self.responds {
            std::future::pending::<()>().await;
        }
        // Lets other tasks run between a request and its response.
        tokio::task::yield_now().await;
        self.head.clone()
    }

    async fn body(&mut self, into: &mut BytesMut) -> Result<bool, ExchangeError> {
        match self.script.front().copied() {
            Some((pause, text)) => {
                let at = *self.next_at.get_or_insert_with(|| Instant::now() + Duration::from_millis(pause));
                tokio::time::sleep_until(at).await;
                self.next_at = None;
                self.script.pop_front();
                into.extend_from_slice(text.as_bytes());
                Ok(true)
            }
            None if self.in_order => Ok(false),
            None => Err(ExchangeError::Closed("eof".to_owned())),
        }
    }

    fn at_end(&self) -> bool {
        self.script.is_empty() && self.in_order
    }

    async fn keep_alive(self) {}
}

impl Drop for Served {
    fn drop(&mut self) {
        *self.open.lock() -= 1;
    }
}
