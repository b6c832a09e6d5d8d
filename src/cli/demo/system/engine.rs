//! Simulated engines as the gateway's upstream: virtual servers that tokio's paused clock drives, without sockets.
//!
//! An engine behaves like a server: it refuses requests while it is dead, sends tokens as events of a completion stream, and
//! aborts a request when its exchange is dropped. When an engine dies, its streams end.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, StatusCode};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::flow::{Connection, Exchange, ExchangeError, ResponseHead, Upstream, UpstreamRequest};
use crate::pool::Address;
use crate::sim::engine::{Content, SequenceId};
use crate::sim::{Request, SimConfig, VirtualServer};

const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"text\":\"w\",\"finish_reason\":null}]}\n\n";
const LAST: &str = "data: {\"choices\":[{\"index\":0,\"text\":\"w\",\"finish_reason\":\"length\"}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";

#[derive(Deserialize)]
struct Body {
    prompt: Vec<u32>,
    max_tokens: u32,
    stream_options: Option<Options>,
}

#[derive(Deserialize)]
struct Options {
    include_usage: Option<bool>,
}

/// An event for one generated token.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Token {
    Inner,
    Last,
}

struct EngineState {
    server: VirtualServer,
    streams: HashMap<SequenceId, mpsc::Sender<Token>>,
    alive: bool,
    hung_since: Option<Instant>,
    /// Real time at virtual time zero.
    epoch: Instant,
    next: SequenceId,
}

/// One engine.
pub(super) struct Engine {
    config: SimConfig,
    state: Mutex<EngineState>,
    changed: Notify,
}

impl Engine {
    pub(super) fn new(config: SimConfig) -> Arc<Self> {
        let state = EngineState {
            server: config.virtual_server(),
            streams: HashMap::new(),
            alive: true,
            hung_since: None,
            epoch: Instant::now(),
            next: 0,
        };
        Arc::new(Self { config, state: Mutex::new(state), changed: Notify::new() })
    }

    /// Runs steps when they are due, until the task is dropped.
    pub(super) async fn drive(self: Arc<Self>) {
        loop {
            let wake = self.catch_up();
            let sleep = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.changed.notified() => {}
                () = sleep => {}
            }
        }
    }

    fn catch_up(&self) -> Option<Instant> {
        let mut state = self.state.lock();
        let state = &mut *state;
        if !state.alive || state.hung_since.is_some() {
            return None;
        }
        let now = state.epoch.elapsed();
        while state.server.next_at().is_some_and(|at| at <= now) {
            let Some(end) = state.server.poll(now) else { continue };
            assert!(end.refused.is_empty(), "requests of the test fit");
            for token in end.emitted {
                let Some(stream) = state.streams.get(&token.id) else { continue };
                // A stream whose client has left is aborted by its drop.
                let _ = stream.try_send(if token.last { Token::Last } else { Token::Inner });
                if token.last {
                    state.streams.remove(&token.id);
                }
            }
        }
        state.server.next_at().map(|at| state.epoch + at)
    }

    /// The engine dies with all its requests.
    pub(super) fn die(&self) {
        let mut state = self.state.lock();
        state.streams.clear();
        (state.server, state.epoch) = (self.config.virtual_server(), Instant::now());
        (state.alive, state.hung_since) = (false, None);
    }

    /// The engine starts again, with an empty server.
    pub(super) fn restart(&self) {
        let mut state = self.state.lock();
        (state.alive, state.epoch) = (true, Instant::now());
    }

    pub(super) fn hang(&self) {
        self.state.lock().hung_since.get_or_insert_with(Instant::now);
    }

    /// A hung engine continues as if no time had passed.
    pub(super) fn resume(&self) {
        let mut state = self.state.lock();
        if let Some(since) = state.hung_since.take() {
            state.epoch += since.elapsed();
        }
        self.changed.notify_one();
    }

    pub(super) fn stall(&self, extra: Duration) {
        self.state.lock().server.stall(extra);
    }

    pub(super) fn is_alive(&self) -> bool {
        self.state.lock().alive
    }

    pub(super) fn is_hung(&self) -> bool {
        self.state.lock().hung_since.is_some()
    }

    /// Checks that no request is left.
    pub(super) fn check_empty(&self) {
        let state = self.state.lock();
        assert!(state.streams.is_empty(), "{} streams are left", state.streams.len());
        assert_eq!((state.server.in_front_end(), state.server.engine().is_empty()), (0, true));
        // The step after the last abort has released its request.
        let engine = state.server.engine();
        assert_eq!((engine.running(), engine.waiting()), (0, 0));
    }

    fn time(state: &EngineState) -> Duration {
        state.hung_since.unwrap_or_else(Instant::now).saturating_duration_since(state.epoch)
    }

    fn submit(self: &Arc<Self>, body: &Body) -> Option<Stream> {
        let mut state = self.state.lock();
        if !state.alive {
            return None;
        }
        let (sender, tokens) = mpsc::channel(body.max_tokens as usize + 1);
        let id = state.next;
        state.next += 1;
        let prompt = body.prompt.len() as u32;
        state.streams.insert(id, sender);
        let content = Content::shared(u64::from(body.prompt[0]), prompt, id);
        let now = Self::time(&state);
        state.server.submit(now, [Request { content, ..Request::new(id, prompt, body.max_tokens) }]);
        drop(state);
        self.changed.notify_one();
        let usage = body.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false);
        let usage = usage.then_some((prompt, body.max_tokens));
        Some(Stream { engine: Arc::clone(self), id, tokens, usage, ended: false, open: None })
    }
}

/// The engines, by port.
pub(super) struct Engines {
    pub(super) by_port: Vec<(u16, Arc<Engine>)>,
    pub(super) open: Arc<Mutex<usize>>,
}

impl Upstream for Engines {
    type Exchange = Stream;

    async fn send(
        &self,
        to: &Address,
        call: &UpstreamRequest,
        _connection: Connection,
    ) -> Result<Stream, ExchangeError> {
        let (_, engine) = self.by_port.iter().find(|(port, _)| *port == to.endpoint.port).unwrap();
        let body: Body = serde_json::from_slice(&call.body.to_bytes()).unwrap();
        let refused = || ExchangeError::Connect("refused".to_owned());
        let stream = engine.submit(&body).ok_or_else(refused)?;
        *self.open.lock() += 1;
        let mut stream = stream;
        stream.open = Some(Arc::clone(&self.open));
        Ok(stream)
    }
}

/// One response in progress.
pub(super) struct Stream {
    engine: Arc<Engine>,
    id: SequenceId,
    tokens: mpsc::Receiver<Token>,
    /// Prompt and completion tokens, when usage was requested.
    usage: Option<(u32, u32)>,
    ended: bool,
    open: Option<Arc<Mutex<usize>>>,
}

impl Stream {
    fn write(&mut self, token: Token, into: &mut BytesMut) {
        match token {
            Token::Inner => return into.extend_from_slice(TOKEN.as_bytes()),
            Token::Last => into.extend_from_slice(LAST.as_bytes()),
        }
        if let Some((prompt, completion)) = self.usage {
            let total = prompt + completion;
            let usage = format!(
                "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\
                 \"completion_tokens\":{completion}}}}}\n\n"
            );
            into.extend_from_slice(usage.as_bytes());
        }
        into.extend_from_slice(DONE.as_bytes());
        self.ended = true;
    }
}

impl Exchange for Stream {
    fn reused(&self) -> bool {
        false
    }

    fn connect_time(&self) -> Duration {
        Duration::ZERO
    }

    async fn head(&mut self) -> Result<ResponseHead, ExchangeError> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        Ok(ResponseHead { status: StatusCode::OK, headers })
    }

    async fn body(&mut self, into: &mut BytesMut) -> Result<bool, ExchangeError> {
        if self.ended {
            return Ok(false);
        }
        let Some(token) = self.tokens.recv().await else {
            return Err(ExchangeError::Closed("the engine died".to_owned()));
        };
        self.write(token, into);
        while let Ok(token) = self.tokens.try_recv() {
            self.write(token, into);
        }
        Ok(true)
    }

    fn at_end(&self) -> bool {
        self.ended
    }

    async fn keep_alive(self) {}
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(open) = &self.open {
            *open.lock() -= 1;
        }
        let mut state = self.engine.state.lock();
        // A stream that ended with its engine is not known to the new one.
        if state.streams.remove(&self.id).is_some() {
            state.server.abort(self.id);
            drop(state);
            self.engine.changed.notify_one();
        }
    }
}
