//! Connects the gateway to the simulated engines: an [`Upstream`] without sockets.
//!
//! A response has the same bytes as in `sluice sim`: one event for each token, or for
//! `--stream-interval` tokens, then usage, then `[DONE]`. A request is looked up by id. The body is
//! searched for `continuous_usage_stats`, which the gateway may have added. If there are
//! experiments, it is searched for the model, which an arm may have changed. In a retry it is
//! searched for `max_tokens`. Dropping an exchange aborts the request, as closing the connection
//! does.
//!
//! Another engine continues an answer as in `sluice sim`: the text so far is a part of the prompt.
//! The length of the text follows from `max_tokens`, which the gateway lowers by that length.
//! `/tokenize` counts tokens.
//!
//! Not simulated: connections (each request has a new one, without delay), vLLM's own limits on
//! waiting requests.

use std::future::poll_fn;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, StatusCode};
use memchr::memmem::Finder;

use crate::cluster::{Cluster, ParsedRequest, route};
use crate::engine::EngineRequest;
use sluice_bench::Api;
use sluice_config::Address;
use sluice_core::openai::request;
use sluice_gateway::flow::{Connection, Exchange, ExchangeError, ResponseHead, Upstream, UpstreamRequest};
use sluice_sim::engine::SequenceId;
use sluice_sim::http::wire::{ChunkWriter, Piece, UsageCounts, UsageOptions};
use sluice_sim::real_time::output_collector::{OutputCollector, Progress};
use sluice_sim::validate::RequestKind;

/// The header with the number of the request; in a retry, `-` and the number of the attempt follow.
const REQUEST_ID: &str = "x-request-id";
/// The text of every token: a word and the space before it.
pub(crate) const WORD: &str = " the";
/// The path of vLLM's tokenizer, which counts the text so far before an answer is continued.
const TOKENIZE: &str = "/tokenize";
/// Bytes at the end of a piece that are searched for `stream_options`.
const OPTIONS_WITHIN: usize = 512;

/// A text that is in the gateway's requests to count a text, and in no request to count a prompt.
static IS_TEXT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"add_special_tokens\":false"));
static WORDS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(WORD));
static CONTINUOUS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"continuous_usage_stats\":true"));

#[derive(Debug)]
pub(crate) struct LabUpstream(pub(crate) Arc<Cluster>);

impl Upstream for LabUpstream {
    type Exchange = LabExchange;

    async fn send(&self, to: &Address, call: &UpstreamRequest, _: Connection) -> Result<LabExchange, ExchangeError> {
        let refused = || ExchangeError::Connect("connection refused".to_owned());
        let engine = self.0.at(&to.endpoint).ok_or_else(refused)?;
        let mut state = self.0.lock();
        let state = &mut *state;
        let id = call.headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).unwrap_or_default();
        let number = id.split('-').next().and_then(|number| number.parse().ok());
        let parsed = number.and_then(|number: u64| state.requests.get(&number));
        let parsed = parsed.ok_or_else(|| ExchangeError::Malformed("a request without x-request-id".to_owned()))?;
        // Only an arm of an experiment changes the model on the way.
        let renamed = self.0.arm_model(parsed.api, &call.body).map(|(model, adapter)| {
            let request = EngineRequest { adapter: *adapter, ..parsed.request.clone() };
            ParsedRequest { request, model: Arc::clone(model), api: parsed.api }
        });
        let parsed = renamed.as_ref().unwrap_or(parsed);
        let server = &mut state.engines[engine];
        if !server.is_up() {
            return Err(refused());
        }
        if call.path == TOKENIZE {
            let count = serde_json::json!({"count": count_tokens(parsed, call)}).to_string();
            return Ok(LabExchange::whole(&self.0, engine, (StatusCode::OK, count)));
        }
        // A retry has an id with `-` and the number of the attempt.
        let continued = id.contains('-').then(|| continued(parsed, call)).flatten();
        let parsed = continued.as_ref().unwrap_or(parsed);
        if let Some(response) = server.config.refuse(parsed) {
            return Ok(LabExchange::whole(&self.0, engine, response));
        }
        let collector = Arc::new(OutputCollector::new(1, server.config.stream_interval.max(1)));
        let sequence = server.submit(state.now, &parsed.request, Arc::clone(&collector));
        let stream = TokenStream::new(id, parsed, wants_continuous(call), collector, server.config.prompt_details);
        Ok(LabExchange { cluster: Arc::clone(&self.0), engine, body: Body::Stream(Box::new(stream), sequence) })
    }
}

/// vLLM's checks before it accepts a request. `Some`: status and body of the refusal.
trait Refuse {
    fn refuse(&self, parsed: &ParsedRequest) -> Option<(StatusCode, String)>;
}

impl Refuse for sluice_sim::SimConfig {
    fn refuse(&self, parsed: &ParsedRequest) -> Option<(StatusCode, String)> {
        let (status, kind, message) = if parsed.request.adapter.is_some() && !self.lora {
            (StatusCode::NOT_FOUND, "NotFoundError", format!("The model `{}` does not exist.", parsed.model))
        } else if parsed.request.prompt_tokens.saturating_add(parsed.request.output_tokens) > self.max_model_len {
            let message = format!("This model's maximum context length is {} tokens.", self.max_model_len);
            (StatusCode::BAD_REQUEST, "BadRequestError", message)
        } else {
            return None;
        };
        let code = status.as_u16();
        let error = serde_json::json!({"error": {"message": message, "type": kind, "param": null, "code": code}});
        Some((status, error.to_string()))
    }
}

/// The count that `/tokenize` returns: the tokens of the text in the body, or else of the request's
/// prompt.
fn count_tokens(parsed: &ParsedRequest, call: &UpstreamRequest) -> u64 {
    let body = call.body.to_bytes();
    match IS_TEXT.find(&body) {
        Some(_) => WORDS.find_iter(&body).count() as u64,
        None => u64::from(parsed.request.prompt_tokens),
    }
}

/// The request with the text so far in the prompt; `None` without such a text.
fn continued(parsed: &ParsedRequest, call: &UpstreamRequest) -> Option<ParsedRequest> {
    let body = call.body.to_bytes();
    let limit = request::read(route(parsed.api), &body).ok()?.max_output?;
    let left = parsed.request.output_tokens.min(u32::try_from(limit).unwrap_or(u32::MAX));
    let so_far = parsed.request.output_tokens - left;
    let prompt_tokens = parsed.request.prompt_tokens + so_far;
    let request = EngineRequest { prompt_tokens, output_tokens: left, ..parsed.request.clone() };
    (so_far > 0).then(|| ParsedRequest { request, ..parsed.clone() })
}

fn wants_continuous(call: &UpstreamRequest) -> bool {
    // The gateway puts options at the front of the body or into the client's options, which the
    // load generator puts last.
    call.body.pieces().iter().any(|piece| {
        let end = &piece[piece.len().saturating_sub(OPTIONS_WITHIN)..];
        CONTINUOUS.find(end).is_some()
    })
}

#[derive(Debug)]
struct TokenStream {
    writer: ChunkWriter,
    collector: Arc<OutputCollector>,
    news: Vec<Progress>,
    kind: RequestKind,
    continuous: bool,
    details: bool,
    prompt: u64,
    sent: u32,
    cached: u32,
    /// The event of a token that is not the last. All such events are the same, so it is written
    /// once.
    event: Option<String>,
    ended: bool,
}

impl TokenStream {
    fn new(id: &str, parsed: &ParsedRequest, continuous: bool, collector: Arc<OutputCollector>, details: bool) -> Self {
        let (kind, prefix) = match parsed.api {
            Api::Completions => (RequestKind::Completion, "cmpl-"),
            Api::Chat => (RequestKind::Chat, "chatcmpl-"),
        };
        let shown = UsageOptions { at_end: true, continuous };
        let fingerprint = "vllm-lab".into();
        Self {
            writer: ChunkWriter::new(kind, format!("{prefix}{id}"), 0, &parsed.model, &fingerprint, shown),
            collector,
            news: Vec::new(),
            kind,
            continuous,
            details,
            prompt: u64::from(parsed.request.prompt_tokens),
            sent: 0,
            cached: 0,
            event: None,
            ended: false,
        }
    }

    fn usage(&self) -> UsageCounts {
        let cached = self.details.then_some(u64::from(self.cached));
        UsageCounts { prompt: self.prompt, completion: u64::from(self.sent), cached, ..UsageCounts::default() }
    }

    fn write(&mut self, Progress { tokens, finish, cached }: Progress, into: &mut BytesMut) {
        let mut out = String::new();
        if self.sent == 0 && self.kind == RequestKind::Chat {
            self.writer.role(&mut out, 0, None, self.usage());
        }
        self.cached = self.cached.max(cached);
        self.sent += tokens;
        let usage = self.usage();
        if finish.is_some() || self.continuous || tokens != 1 {
            let text = WORD.repeat(tokens as usize);
            let piece = Piece { text, finish, stop_reason: "null".to_owned(), ..Piece::default() };
            self.writer.content(&mut out, 0, &piece, usage);
            into.extend_from_slice(out.as_bytes());
        } else {
            let writer = &self.writer;
            let event = self.event.get_or_insert_with(|| {
                let (mut event, text) = (String::new(), WORD.to_owned());
                writer.content(&mut event, 0, &Piece { text, ..Piece::default() }, usage);
                event
            });
            into.extend_from_slice(out.as_bytes());
            into.extend_from_slice(event.as_bytes());
        }
        if finish.is_some() {
            let mut end = String::new();
            self.writer.end(&mut end, usage);
            into.extend_from_slice(end.as_bytes());
            self.ended = true;
        }
    }
}

#[derive(Debug)]
enum Body {
    Stream(Box<TokenStream>, SequenceId),
    /// A status and a body that is sent at once. `None`: the body has been read.
    Whole(StatusCode, Option<Bytes>),
}

#[derive(Debug)]
pub(crate) struct LabExchange {
    cluster: Arc<Cluster>,
    engine: usize,
    body: Body,
}

impl LabExchange {
    fn whole(cluster: &Arc<Cluster>, engine: usize, (status, body): (StatusCode, String)) -> Self {
        Self { cluster: Arc::clone(cluster), engine, body: Body::Whole(status, Some(body.into())) }
    }
}

impl Exchange for LabExchange {
    fn reused(&self) -> bool {
        false
    }

    fn connect_time(&self) -> Duration {
        Duration::ZERO
    }

    async fn head(&mut self) -> Result<ResponseHead, ExchangeError> {
        let (status, kind) = match &self.body {
            Body::Stream(..) => (StatusCode::OK, "text/event-stream; charset=utf-8"),
            Body::Whole(status, _) => (*status, "application/json"),
        };
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(kind))]);
        Ok(ResponseHead { status, headers })
    }

    async fn body(&mut self, into: &mut BytesMut) -> Result<bool, ExchangeError> {
        let stream = match &mut self.body {
            Body::Stream(stream, _) => stream,
            Body::Whole(_, body) => {
                let body = body.take();
                into.extend_from_slice(body.as_deref().unwrap_or_default());
                return Ok(body.is_some());
            }
        };
        if stream.ended {
            return Ok(false);
        }
        let collector = Arc::clone(&stream.collector);
        let taken = poll_fn(|cx| collector.poll_take(cx, &mut stream.news)).await;
        taken.map_err(|_| ExchangeError::Closed("the engine was stopped".to_owned()))?;
        stream.write(stream.news[0], into);
        Ok(true)
    }

    fn at_end(&self) -> bool {
        match &self.body {
            Body::Stream(stream, _) => stream.ended,
            Body::Whole(_, body) => body.is_none(),
        }
    }

    async fn keep_alive(self) {}
}

impl Drop for LabExchange {
    fn drop(&mut self) {
        if let Body::Stream(stream, sequence) = &self.body
            && !stream.ended
        {
            let mut state = self.cluster.lock();
            if let Some(engine) = state.engines.get_mut(self.engine) {
                engine.abort(*sequence);
            }
        }
    }
}
