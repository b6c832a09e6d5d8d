//! Load generator: a closed loop over raw keep-alive connections, which takes so little CPU that it
//! can share two cores with a proxy.
//!
//! Each of `--streams` tasks sends the same request again and again until all tasks together have
//! started `--requests` requests, or until `--seconds` have passed. Times count from just before
//! the request is written:
//!
//! - `ttft`: to the read that completes the first event with content (for a plain response: the
//!   first byte of its body)
//! - `e2el`: to the read that completes the response
//!
//! The result is one line of JSON on stdout: counts, exact percentiles in microseconds, digests of
//! the decoded responses, whether request bodies reached the engine unchanged, and failures by kind
//! (such as a status other than 200, or the wrong number of events).
//!
//! With `--hold` the program opens all streams, waits for the first content of each, prints how
//! many have received it, and keeps them open until it is killed. It works with the mock engine
//! only; `sluice bench` measures real engines.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use twox_hash::XxHash3_64;

use crate::reply::Reply;

const READ: usize = 8 << 10;
/// Time limit of one response; a slower one counts as failed.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The most connections that `--hold` opens at once, so that no listen backlog overflows.
const OPENING: usize = 256;
/// Maximum bytes of a wrong response that the result quotes.
const KEPT: usize = 200;
/// Kinds of failures in the result; further kinds count as `other`.
const MAX_KINDS: usize = 16;

/// Arguments of `load`.
#[derive(Args, Clone)]
pub(crate) struct Load {
    /// `host:port` to send to.
    #[arg(long)]
    target: String,
    /// Streams at the same time.
    #[arg(long, default_value_t = 32)]
    streams: usize,
    /// Requests in all.
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    /// No request is started after this many seconds.
    #[arg(long, default_value_t = 30)]
    seconds: u64,
    /// Bytes of the request body.
    #[arg(long, default_value_t = 1024)]
    body: usize,
    /// Content events of a response.
    #[arg(long, default_value_t = 64)]
    chunks: u64,
    /// Milliseconds between them; 0: back to back.
    #[arg(long, default_value_t = 0)]
    interval_ms: u64,
    /// The engine writes the whole response at once.
    #[arg(long)]
    burst: bool,
    /// Request a plain JSON response instead of a stream.
    #[arg(long)]
    plain: bool,
    /// Open all streams, report, and keep them open until killed.
    #[arg(long)]
    hold: bool,
}

#[derive(Default)]
struct Tally {
    ttft_us: Vec<u64>,
    e2el_us: Vec<u64>,
    digests: BTreeMap<u64, u64>,
    bodies_intact: u64,
    bodies_changed: u64,
    failures: BTreeMap<String, u64>,
    connections: u64,
    events: u64,
}

/// Runs the load and prints the result. Fails only if the target cannot be reached at all.
pub(crate) async fn run(load: Load) -> anyhow::Result<()> {
    let request = build(&load);
    TcpStream::connect(&load.target).await.with_context(|| format!("cannot reach {}", load.target))?;
    if load.hold {
        return hold(load, request).await;
    }
    let request: &'static Request = Box::leak(Box::new(request));
    let load: &'static Load = Box::leak(Box::new(load));
    let begun = Instant::now();
    let left = std::rc::Rc::new(std::cell::Cell::new(load.requests));
    let local = tokio::task::LocalSet::new();
    let mut tasks = JoinSet::new();
    for _ in 0..load.streams {
        tasks.spawn_local_on(stream(load, request, begun, std::rc::Rc::clone(&left)), &local);
    }
    let mut all = Tally::default();
    local
        .run_until(async {
            while let Some(tally) = tasks.join_next().await {
                all.add(tally?);
            }
            anyhow::Ok(())
        })
        .await?;
    println!("{}", all.report(begun.elapsed()));
    Ok(())
}

struct Request {
    bytes: Vec<u8>,
    seen: String,
}

/// Makes the request. The prompt is prose of varied words, so that a proxy that reads prompts has
/// realistic work.
fn build(load: &Load) -> Request {
    const WORDS: [&str; 12] =
        ["gate", "river", "the", "of", "a", "lock", "sluice", "opens", "2026", "slowly", "\\nand", "\\\"water\\\""];
    let Load { chunks, interval_ms, .. } = load;
    let (stream, burst) = (!load.plain, u8::from(load.burst));
    let mut body = format!(
        r#"{{"model":"mock","stream":{stream},"max_tokens":{chunks},"user":"mock:first=0,interval={interval_ms},chunks={chunks},burst={burst};","messages":[{{"role":"user","content":""#
    );
    let tail = r#""}]}"#;
    let mut pick = 7_usize;
    while body.len() + tail.len() + 16 < load.body {
        pick = pick.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        body.push_str(WORDS[(pick >> 33) % WORDS.len()]);
        body.push(' ');
    }
    while body.len() + tail.len() < load.body {
        body.push('.');
    }
    body.push_str(tail);
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nuser-agent: overhead\r\naccept: */*\r\nx-mock-interval-ms: {interval_ms}\r\nx-mock-chunks: {chunks}\r\nx-mock-burst: {burst}\r\ncontent-length: {}\r\n\r\n",
        load.target,
        body.len()
    );
    let seen = format!("{}-{:016x}", body.len(), XxHash3_64::oneshot(body.as_bytes()));
    Request { bytes: [head.as_bytes(), body.as_bytes()].concat(), seen }
}

async fn stream(
    load: &'static Load,
    request: &'static Request,
    begun: Instant,
    left: std::rc::Rc<std::cell::Cell<u64>>,
) -> Tally {
    let mut tally = Tally::default();
    let mut connection: Option<TcpStream> = None;
    let mut buffer = vec![0_u8; READ];
    while left.get() > 0 && begun.elapsed() < Duration::from_secs(load.seconds) {
        left.set(left.get() - 1);
        let result = timeout(TIMEOUT, exchange(load, request, &mut connection, &mut buffer, &mut tally)).await;
        if let Err(kind) = result.map_err(anyhow::Error::from).flatten() {
            connection = None;
            tally.fail(format!("{kind:#}"));
        }
    }
    tally
}

async fn exchange(
    load: &Load,
    request: &Request,
    connection: &mut Option<TcpStream>,
    buffer: &mut [u8],
    tally: &mut Tally,
) -> anyhow::Result<()> {
    if connection.is_none() {
        let socket = TcpStream::connect(&load.target).await?;
        socket.set_nodelay(true)?;
        tally.connections += 1;
        *connection = Some(socket);
    }
    let socket = connection.as_mut().context("connected above")?;
    let begun = Instant::now();
    socket.write_all(&request.bytes).await?;
    let mut reply = Reply::keeping(KEPT);
    let mut first = None;
    while !reply.done() {
        let n = socket.read(buffer).await?;
        if n == 0 {
            reply.end();
            if !reply.done() {
                bail!("closed before the response ended");
            }
            break;
        }
        reply.feed(&buffer[..n])?;
        // A chat stream begins with the role event, so the second event is the first content.
        if first.is_none() && (reply.events >= 2 || load.plain && reply.bytes > 0) {
            first = Some(begun.elapsed());
        }
    }
    let whole = begun.elapsed();
    if reply.close {
        *connection = None;
    }
    tally.take(load, request, &reply, first.unwrap_or(whole), whole)
}

impl Tally {
    fn take(
        &mut self,
        load: &Load,
        request: &Request,
        reply: &Reply,
        first: Duration,
        whole: Duration,
    ) -> anyhow::Result<()> {
        // Role event, content events and [DONE]; the last content event has the finish reason.
        let expected = if load.plain { 0 } else { load.chunks + 2 };
        if reply.status != 200 {
            bail!("status {}: {}", reply.status, String::from_utf8_lossy(&reply.start));
        }
        if reply.events != expected {
            bail!("{} events instead of {expected}", reply.events);
        }
        if reply.failed_inside() {
            bail!("the stream ended without [DONE]");
        }
        self.events += reply.events;
        self.ttft_us.push(u64::try_from(first.as_micros())?);
        self.e2el_us.push(u64::try_from(whole.as_micros())?);
        *self.digests.entry(reply.digest()).or_default() += 1;
        match &reply.request_seen {
            Some(seen) if *seen == request.seen => self.bodies_intact += 1,
            Some(_) => self.bodies_changed += 1,
            None => {}
        }
        Ok(())
    }

    fn fail(&mut self, kind: String) {
        let known = self.failures.contains_key(&kind) || self.failures.len() < MAX_KINDS;
        *self.failures.entry(if known { kind } else { "other".into() }).or_default() += 1;
    }

    fn add(&mut self, other: Self) {
        self.ttft_us.extend(other.ttft_us);
        self.e2el_us.extend(other.e2el_us);
        self.bodies_intact += other.bodies_intact;
        self.bodies_changed += other.bodies_changed;
        self.connections += other.connections;
        self.events += other.events;
        for (digest, n) in other.digests {
            *self.digests.entry(digest).or_default() += n;
        }
        for (kind, n) in other.failures {
            let known = self.failures.contains_key(&kind) || self.failures.len() < MAX_KINDS;
            *self.failures.entry(if known { kind } else { "other".into() }).or_default() += n;
        }
    }

    fn report(mut self, wall: Duration) -> serde_json::Value {
        self.ttft_us.sort_unstable();
        self.e2el_us.sort_unstable();
        let digests: Vec<String> = self.digests.keys().take(MAX_KINDS).map(|d| format!("{d:016x}")).collect();
        json!({
            "ok": self.e2el_us.len(), "failures": self.failures, "wall_s": wall.as_secs_f64(), "events": self.events,
            "connections": self.connections, "digests": digests,
            "bodies_intact": self.bodies_intact, "bodies_changed": self.bodies_changed,
            "ttft_us": spread(&self.ttft_us), "e2el_us": spread(&self.e2el_us),
        })
    }
}

fn spread(sorted: &[u64]) -> serde_json::Value {
    let at = |share: f64| sorted.get(((sorted.len() as f64 - 1.0) * share).round().max(0.0) as usize).copied();
    json!({"min": at(0.0), "p50": at(0.5), "p99": at(0.99), "max": at(1.0)})
}

async fn hold(load: Load, request: Request) -> anyhow::Result<()> {
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(OPENING));
    let request = std::sync::Arc::new(request);
    let (opened, mut opens) = tokio::sync::mpsc::channel::<anyhow::Result<()>>(load.streams.max(1));
    let mut tasks = JoinSet::new();
    for _ in 0..load.streams {
        let (gate, request, opened, target) = (gate.clone(), request.clone(), opened.clone(), load.target.clone());
        tasks.spawn(async move {
            let permit = gate.acquire_owned().await;
            let begun = timeout(TIMEOUT, open(&target, &request)).await.map_err(anyhow::Error::from).flatten();
            drop(permit);
            let (report, socket) = match begun {
                Ok(socket) => (Ok(()), Some(socket)),
                Err(e) => (Err(e), None),
            };
            let _ = opened.send(report).await;
            // The task goes on reading, as a client would, so that the proxy can go on writing.
            if let Some(mut socket) = socket {
                let mut sink = [0_u8; 1024];
                while matches!(socket.read(&mut sink).await, Ok(1..)) {}
            }
        });
    }
    let mut failures = BTreeMap::<String, u64>::new();
    for _ in 0..load.streams {
        if let Some(Err(e)) = opens.recv().await {
            let text = format!("{e:#}");
            let known = failures.contains_key(&text) || failures.len() < MAX_KINDS;
            *failures.entry(if known { text } else { "other".into() }).or_default() += 1;
        }
    }
    let failed: u64 = failures.values().sum();
    println!("{}", json!({"open": load.streams as u64 - failed, "failures": failures}));
    while tasks.join_next().await.is_some() {}
    Ok(())
}

async fn open(target: &str, request: &Request) -> anyhow::Result<TcpStream> {
    let mut socket = TcpStream::connect(target).await?;
    socket.set_nodelay(true)?;
    socket.write_all(&request.bytes).await?;
    let mut reply = Reply::keeping(KEPT);
    let mut buffer = [0_u8; 2048];
    while reply.events < 2 {
        let n = socket.read(&mut buffer).await?;
        if n == 0 || reply.status != 0 && reply.status != 200 {
            bail!("status {}: {}", reply.status, String::from_utf8_lossy(&reply.start));
        }
        reply.feed(&buffer[..n])?;
    }
    Ok(socket)
}
