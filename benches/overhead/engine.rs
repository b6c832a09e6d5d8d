//! Mock engine: serves `/v1/chat/completions` and `/v1/completions` with bytes shaped like vLLM's.
//!
//! Its cost is small and constant, because it uses plain tokio sockets and formats the events only
//! once, at the start. Responses do not depend on the prompt, so a proxied response equals a direct
//! one byte by byte.
//!
//! A request sets the pace of its response in headers, or in a text in the body, because some
//! proxies drop headers:
//!
//! | header | body text `mock:first=0,interval=5,chunks=64;` | meaning |
//! |---|---|---|
//! | `x-mock-first-ms` | `first` | time before the first event, milliseconds |
//! | `x-mock-interval-ms` | `interval` | time between content events; 0: no pause |
//! | `x-mock-chunks` | `chunks` | content events of the response |
//! | `x-mock-burst` | `burst` | 1: the whole response in one write |
//!
//! A stream has a head, a role event (chat only), `chunks` content events (the last has the finish
//! reason), a usage event if `include_usage` was requested, and `[DONE]`; each event is one chunk
//! and one write, as in uvicorn. The response header `x-mock-body` has the length and xxh3 of the
//! request body; `GET /mock/last` returns the body's SHA-256. The engine notices between events
//! that a client has left, and counts this as `abort`. Bounds: heads of 64 KiB, bodies of 64 MiB,
//! one request at a time per connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::{Buf, BytesMut};
use memchr::memmem;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use twox_hash::XxHash3_64;

/// Maximum length of a request head in bytes.
const MAX_HEAD: usize = 64 << 10;
/// Maximum length of a request body in bytes, twice the gateway's default limit.
const MAX_BODY: usize = 64 << 20;
const MAX_HEADERS: usize = 64;
/// Content events by default, as in the rows of the overhead table.
const DEFAULT_CHUNKS: u64 = 64;
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
/// Words of the content events, in turn.
const WORDS: [&str; 8] = [" the", " gate", " opens", " and", " long", " prompts", " wait", "."];

/// Counts since the engine was created. They go on when `serve` is dropped and started again.
#[derive(Default, Debug)]
pub(crate) struct Counters {
    /// Generation requests whose head and body arrived.
    pub(crate) started: AtomicU64,
    /// Responses written to their end.
    pub(crate) finished: AtomicU64,
    /// Responses whose client left before the end.
    pub(crate) aborted: AtomicU64,
    /// Responses cut off because this engine was killed.
    pub(crate) lost: AtomicU64,
    /// Bytes of all request bodies.
    pub(crate) body_bytes: AtomicU64,
    /// First the number of streams that have sent a first content event. Then the sum of the delays
    /// of these events after the requested time, in ns, which this engine causes and not the proxy.
    first_late: [AtomicU64; 2],
    /// Set while the engine is being killed, so that dropped responses count as `lost`.
    pub(crate) killed: AtomicBool,
    last_body: Mutex<Vec<u8>>,
}

/// One response in progress. If it is dropped before it is marked as finished, it counts as
/// aborted.
struct PendingResponse<'a>(&'a Counters, bool);

impl<'a> PendingResponse<'a> {
    fn begin(counters: &'a Counters) -> Self {
        counters.started.fetch_add(1, Relaxed);
        Self(counters, false)
    }
}

impl Drop for PendingResponse<'_> {
    fn drop(&mut self) {
        let c = self.0;
        let slot = match (self.1, c.killed.load(Relaxed)) {
            (true, _) => &c.finished,
            (false, true) => &c.lost,
            (false, false) => &c.aborted,
        };
        slot.fetch_add(1, Relaxed);
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Pace {
    first: Duration,
    interval: Duration,
    chunks: u64,
    burst: bool,
}

/// The parts of a request that this engine uses.
struct Request {
    method: String,
    path: String,
    pace: Option<Pace>,
    body: BytesMut,
    keep_alive: bool,
}

/// The events of one route as chunks, formatted once.
struct Frames {
    role: Vec<u8>,
    words: Vec<Vec<u8>>,
    last: Vec<u8>,
    id: &'static str,
    object: &'static str,
}

fn frame(event: &str) -> Vec<u8> {
    let body = format!("data: {event}\n\n");
    format!("{:x}\r\n{body}\r\n", body.len()).into_bytes()
}

impl Frames {
    fn chat() -> Self {
        let (id, object) = ("chatcmpl-mock", "chat.completion.chunk");
        let event = |delta: String, finish: &str| {
            frame(&format!(
                r#"{{"id":"{id}","object":"{object}","created":1763683200,"model":"mock","choices":[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish},"token_ids":null}}]}}"#
            ))
        };
        let word = |w: &str| format!(r#"{{"content":"{w}"}}"#);
        Self {
            role: event(r#"{"role":"assistant","content":""}"#.into(), "null"),
            words: WORDS.iter().map(|w| event(word(w), "null")).collect(),
            last: event(word("!"), r#""length","stop_reason":null"#),
            id,
            object,
        }
    }

    fn completions() -> Self {
        let (id, object) = ("cmpl-mock", "text_completion");
        let event = |w: &str, finish: &str| {
            frame(&format!(
                r#"{{"id":"{id}","object":"{object}","created":1763683200,"model":"mock","choices":[{{"index":0,"text":"{w}","logprobs":null,"finish_reason":{finish},"stop_reason":null,"token_ids":null}}]}}"#
            ))
        };
        Self {
            role: Vec::new(),
            words: WORDS.iter().map(|w| event(w, "null")).collect(),
            last: event("!", r#""length""#),
            id,
            object,
        }
    }

    /// Content event number `i` of `chunks`. The last one has the finish reason.
    fn content(&self, i: u64, chunks: u64) -> &[u8] {
        if i + 1 == chunks { &self.last } else { &self.words[i as usize % WORDS.len()] }
    }

    /// The events after the content, which are usage if the body asks for it, and `[DONE]`.
    fn end(&self, body: &[u8], chunks: u64) -> Vec<Vec<u8>> {
        let usage = says(body, "include_usage", "true").then(|| self.usage(chunks));
        usage.into_iter().chain([frame("[DONE]")]).collect()
    }

    fn usage(&self, chunks: u64) -> Vec<u8> {
        let (id, object) = (self.id, self.object);
        frame(&format!(
            r#"{{"id":"{id}","object":"{object}","created":1763683200,"model":"mock","choices":[],"usage":{}}}"#,
            usage(chunks)
        ))
    }
}

fn usage(chunks: u64) -> String {
    format!(r#"{{"prompt_tokens":256,"total_tokens":{},"completion_tokens":{chunks}}}"#, 256 + chunks)
}

/// A socket with a long backlog: the usual 128 overflows when 256 streams are opened at once.
fn listen(address: &str) -> anyhow::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(address.parse()?)?;
    Ok(socket.listen(4_096)?)
}

pub(crate) async fn listen_and_serve(address: &str) -> anyhow::Result<()> {
    let listener = listen(address).with_context(|| format!("cannot listen on {address}"))?;
    println!("engine on http://{}", listener.local_addr()?);
    serve(listener, Arc::new(Counters::default())).await;
    Ok(())
}

/// Serves connections; dropping the future closes all of them.
pub(crate) async fn serve(listener: TcpListener, counters: Arc<Counters>) {
    let frames = Arc::new([Frames::chat(), Frames::completions()]);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((socket, _)) = accepted else { continue };
                let (frames, counters) = (Arc::clone(&frames), Arc::clone(&counters));
                connections.spawn(async move {
                    // The error means that the client has left. It is ignored, because the counters
                    // have recorded it.
                    let _ = connection(socket, &frames, &counters).await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(mut socket: TcpStream, frames: &[Frames; 2], counters: &Counters) -> anyhow::Result<()> {
    socket.set_nodelay(true)?;
    let mut buffer = BytesMut::with_capacity(8 << 10);
    while let Some(request) = read_request(&mut socket, &mut buffer).await? {
        match (request.method.as_str(), request.path.as_str()) {
            ("POST", "/v1/chat/completions") => send(&mut socket, &request, &frames[0], counters).await?,
            ("POST", "/v1/completions") => send(&mut socket, &request, &frames[1], counters).await?,
            ("GET", path) => {
                let (status, kind, body) = page(path, counters);
                socket.write_all(reply(status, kind, "", body.as_bytes()).as_slice()).await?;
            }
            _ => socket.write_all(&reply("404 Not Found", "application/json", "", b"{}")).await?,
        }
        if !request.keep_alive {
            return Ok(());
        }
    }
    Ok(())
}

fn page(path: &str, c: &Counters) -> (&'static str, &'static str, String) {
    let load = |a: &AtomicU64| a.load(Relaxed);
    match path {
        "/health" | "/ping" => ("200 OK", "text/plain", String::new()),
        "/version" => ("200 OK", "application/json", r#"{"version":"0.33.0"}"#.into()),
        "/v1/models" => (
            "200 OK",
            "application/json",
            r#"{"object":"list","data":[{"id":"mock","object":"model","created":1763683200,"owned_by":"vllm","root":"mock","parent":null,"max_model_len":131072,"permission":[]}]}"#.into(),
        ),
        "/mock/last" => {
            let digest = Sha256::digest(&*c.last_body.lock());
            ("200 OK", "application/json", format!("{{\"bytes\":{},\"sha256\":\"{digest:x}\"}}", c.last_body.lock().len()))
        }
        "/metrics" => {
            let running = load(&c.started) - load(&c.finished) - load(&c.aborted) - load(&c.lost);
            let labels = r#"engine="0",model_name="mock""#;
            (
                "200 OK",
                "text/plain; version=0.0.4; charset=utf-8",
                format!(
                    "vllm:num_requests_running{{{labels}}} {running}\nvllm:num_requests_waiting{{{labels}}} 0\n\
                     vllm:request_success_total{{{labels},finished_reason=\"length\"}} {}\n\
                     vllm:request_success_total{{{labels},finished_reason=\"abort\"}} {}\n\
                     vllm:kv_cache_usage_perc{{{labels}}} 0\nmock:body_bytes_total {}\n\
                     mock:first_late_seconds_count {}\nmock:first_late_seconds_sum {}\n",
                    load(&c.finished),
                    load(&c.aborted),
                    load(&c.body_bytes),
                    load(&c.first_late[0]),
                    load(&c.first_late[1]) as f64 / 1e9
                ),
            )
        }
        _ => ("404 Not Found", "application/json", r#"{"error":{"message":"Not Found","type":"Not Found","param":null,"code":404}}"#.into()),
    }
}

fn reply(status: &str, kind: &str, extra: &str, body: &[u8]) -> Vec<u8> {
    let mut out = format!(
        "HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-type: {kind}\r\n{extra}content-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    out.extend_from_slice(body);
    out
}

/// Writes the response to one generation request. Fails if the client has left; the request then
/// counts as aborted.
async fn send(socket: &mut TcpStream, request: &Request, frames: &Frames, counters: &Counters) -> anyhow::Result<()> {
    let mut progress = PendingResponse::begin(counters);
    let body = &request.body[..];
    counters.body_bytes.fetch_add(body.len() as u64, Relaxed);
    let integrity = format!("x-mock-body: {}-{:016x}\r\n", body.len(), XxHash3_64::oneshot(body));
    if let Some(mut last) = counters.last_body.try_lock() {
        last.clear();
        last.extend_from_slice(body);
    }
    let pace = request.pace.unwrap_or_else(|| pace_of_body(body));
    let mut due = Instant::now() + pace.first;
    if !says(body, "stream", "true") {
        due += pace.interval * u32::try_from(pace.chunks).unwrap_or(u32::MAX);
        wait(socket, due).await?;
        let text = plain(frames, pace.chunks);
        socket.write_all(&reply("200 OK", "application/json", &integrity, text.as_bytes())).await?;
        progress.1 = true;
        return Ok(());
    }
    let head = format!(
        "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n{integrity}transfer-encoding: chunked\r\n\r\n"
    );
    if pace.burst {
        wait(socket, due).await?;
        let mut whole = head.into_bytes();
        whole.extend_from_slice(&frames.role);
        (0..pace.chunks).for_each(|i| whole.extend_from_slice(frames.content(i, pace.chunks)));
        frames.end(body, pace.chunks).iter().for_each(|event| whole.extend_from_slice(event));
        whole.extend_from_slice(LAST_CHUNK);
        progress.1 = true;
        return Ok(socket.write_all(&whole).await?);
    }
    socket.write_all(head.as_bytes()).await?;
    wait(socket, due).await?;
    if !frames.role.is_empty() {
        socket.write_all(&frames.role).await?;
    }
    for i in 0..pace.chunks {
        if i > 0 {
            due += pace.interval;
            wait(socket, due).await?;
        }
        socket.write_all(frames.content(i, pace.chunks)).await?;
        if i == 0 {
            counters.first_late[0].fetch_add(1, Relaxed);
            counters.first_late[1].fetch_add(due.elapsed().as_nanos() as u64, Relaxed);
        }
    }
    for event in frames.end(body, pace.chunks) {
        socket.write_all(&event).await?;
    }
    // As in vLLM, the generation has ended at this point, so a client that leaves now aborts
    // nothing.
    progress.1 = true;
    socket.write_all(LAST_CHUNK).await?;
    Ok(())
}

fn plain(frames: &Frames, chunks: u64) -> String {
    let text: String = (0..chunks).map(|i| WORDS[i as usize % WORDS.len()]).collect();
    let choice = if frames.role.is_empty() {
        format!(r#""text":"{text}""#)
    } else {
        format!(
            r#""message":{{"role":"assistant","content":"{text}","refusal":null,"tool_calls":[],"reasoning":null}}"#
        )
    };
    let object = if frames.role.is_empty() { frames.object } else { "chat.completion" };
    format!(
        r#"{{"id":"{}","object":"{object}","created":1763683200,"model":"mock","choices":[{{"index":0,{choice},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}}],"service_tier":null,"system_fingerprint":null,"usage":{},"prompt_logprobs":null,"kv_transfer_params":null}}"#,
        frames.id,
        usage(chunks)
    )
}

/// Waits until `due`. Fails if the client leaves before that.
async fn wait(socket: &mut TcpStream, due: Instant) -> anyhow::Result<()> {
    if due <= Instant::now() {
        return Ok(());
    }
    let mut byte = [0u8; 1];
    tokio::select! {
        () = sleep_until(due) => Ok(()),
        n = socket.peek(&mut byte) => match n? {
            0 => bail!("the client left"),
            // The client has sent its next request, which waits for the end of this response.
            _ => { sleep_until(due).await; Ok(()) }
        },
    }
}

/// Whether the JSON text has `"key":value`, with or without one blank.
fn says(body: &[u8], key: &str, value: &str) -> bool {
    ["", " "].iter().any(|gap| memmem::find(body, format!("\"{key}\":{gap}{value}").as_bytes()).is_some())
}

fn pace_of_body(body: &[u8]) -> Pace {
    let knob = |name: &str| -> Option<u64> {
        let start = memmem::find(body, b"mock:")? + 5;
        let text = &body[start..start + memchr::memchr(b';', &body[start..])?];
        std::str::from_utf8(text).ok()?.split(',').find_map(|kv| kv.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
    };
    pace(knob)
}

fn pace(knob: impl Fn(&str) -> Option<u64>) -> Pace {
    let ms = |name| Duration::from_millis(knob(name).unwrap_or(0));
    Pace {
        first: ms("first"),
        interval: ms("interval"),
        chunks: knob("chunks").unwrap_or(DEFAULT_CHUNKS).max(1),
        burst: knob("burst") == Some(1),
    }
}

enum Framing {
    Length(usize),
    Chunked,
}

/// Reads the next request. `None` if the client has closed the connection.
async fn read_request(socket: &mut TcpStream, buffer: &mut BytesMut) -> anyhow::Result<Option<Request>> {
    let (mut request, framing, expects) = loop {
        if let Some(found) = parse_head(buffer)? {
            break found;
        }
        if buffer.len() > MAX_HEAD {
            bail!("head too long");
        }
        if socket.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    if expects {
        socket.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
    }
    match framing {
        Framing::Length(length) => {
            if length > MAX_BODY {
                bail!("body too long");
            }
            buffer.reserve(length.saturating_sub(buffer.len()));
            fill(socket, buffer, length).await?;
            request.body = buffer.split_to(length);
        }
        Framing::Chunked => loop {
            let line = loop {
                if let Some(end) = memmem::find(buffer, b"\r\n") {
                    break end;
                }
                let more = buffer.len() + 1;
                fill(socket, buffer, more).await?;
            };
            let size = usize::from_str_radix(
                std::str::from_utf8(&buffer[..line])?.split(';').next().unwrap_or("").trim(),
                16,
            )?;
            if request.body.len().saturating_add(size) > MAX_BODY {
                bail!("body too long");
            }
            buffer.advance(line + 2);
            fill(socket, buffer, size + 2).await?;
            request.body.extend_from_slice(&buffer[..size]);
            buffer.advance(size + 2);
            if size == 0 {
                break;
            }
        },
    }
    Ok(Some(request))
}

async fn fill(socket: &mut TcpStream, buffer: &mut BytesMut, length: usize) -> anyhow::Result<()> {
    while buffer.len() < length {
        if socket.read_buf(buffer).await? == 0 {
            bail!("the client left inside a request");
        }
    }
    Ok(())
}

fn parse_head(buffer: &mut BytesMut) -> anyhow::Result<Option<(Request, Framing, bool)>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let httparse::Status::Complete(length) = head.parse(buffer)? else { return Ok(None) };
    let find = |name: &str| {
        let header = head.headers.iter().find(|h| h.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(header.value).ok().map(str::trim)
    };
    let number = |name: &str| find(name).and_then(|v| v.parse::<u64>().ok());
    let framing = match (find("transfer-encoding"), number("content-length")) {
        (Some(coding), _) if coding.eq_ignore_ascii_case("chunked") => Framing::Chunked,
        (_, length) => Framing::Length(usize::try_from(length.unwrap_or(0)).unwrap_or(usize::MAX)),
    };
    let named = |name: &str| match name {
        "first" => number("x-mock-first-ms"),
        "interval" => number("x-mock-interval-ms"),
        "chunks" => number("x-mock-chunks"),
        _ => number("x-mock-burst"),
    };
    let path = head.path.unwrap_or("/");
    let request = Request {
        method: head.method.unwrap_or("").to_owned(),
        path: path.split('?').next().unwrap_or("/").to_owned(),
        pace: number("x-mock-interval-ms").map(|_| pace(named)),
        body: BytesMut::new(),
        keep_alive: !find("connection").is_some_and(|v| v.eq_ignore_ascii_case("close")),
    };
    let expects = find("expect").is_some();
    buffer.advance(length);
    Ok(Some((request, framing, expects)))
}
