//! Honest clients: requests at Poisson times, each response checked against its own request.
//!
//! Every request is a completion with `echo`, so its response begins with its own prompt, which
//! contains the number of the request. So the client finds bytes of another response, missing bytes
//! and doubled bytes. Nine in ten requests are streamed. One in twenty has a long prompt, whose
//! TTFT is not counted. A request is sent at its time even if earlier requests have no answer yet
//! (open loop), on an idle connection if there is one.
//!
//! [`READERS`] other clients each read one long stream after the other, so that every engine always
//! decodes. Otherwise, in the run without attackers, most faults would hit an idle engine and break
//! off no stream, so the failures of the two runs could not be compared. The TTFT of the readers is
//! not counted.
//!
//! A response is *right* if it is complete and belongs to its request. It is *failed* if it has an
//! error status with a JSON error, or an error event or a broken connection inside a stream,
//! because the test makes engines fail. It is *shed* if it is a 503 or 429 with `Retry-After`, and
//! *wrong* otherwise.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use parking_lot::Mutex;
use serde_json::Value;
use sluice_core::base::Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::machine::Threads;
use super::{HONEST_KEY, MODEL};
use crate::reply::Reply;

const RATE: f64 = 25.0;
/// Clients that read long streams. They are as many as the requests that the attackers may have in
/// flight.
const READERS: u64 = 16;
/// Number of the first request of a reader.
const READERS_FROM: u64 = 1 << 32;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a response that are kept and checked; no response to an honest client is longer.
const KEPT: usize = 1 << 20;
/// Maximum number of wrong responses kept for the message.
const WRONG_KEPT: usize = 8;

#[derive(Default)]
pub(super) struct Honest {
    pub(super) sent: u64,
    pub(super) right: u64,
    /// Requests that were refused with `Retry-After`.
    pub(super) shed: u64,
    failures: BTreeMap<String, u64>,
    pub(super) wrong: Vec<String>,
    /// For each right short stream, when it was sent and its time to first token.
    ttfts: Vec<(Instant, Duration)>,
    /// Scheduling of the thread that runs the honest clients.
    pub(super) threads: Threads,
}

impl Honest {
    pub(super) fn failed(&self) -> u64 {
        self.failures.values().sum()
    }

    pub(super) fn all(&self) -> Ttfts {
        Ttfts::of(self.ttfts.iter())
    }

    /// Times to first token, without the streams that waited for their first token during one of
    /// these periods.
    pub(super) fn outside(&self, periods: &[(Instant, Instant)]) -> Ttfts {
        let within = |(sent, ttft): &&(Instant, Duration)| {
            periods.iter().any(|(begin, end)| sent < end && *sent + *ttft > *begin)
        };
        Ttfts::of(self.ttfts.iter().filter(|stream| !within(stream)))
    }

    fn count(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Right(ttft) => {
                self.right += 1;
                self.ttfts.extend(ttft);
            }
            Verdict::Shed => self.shed += 1,
            Verdict::Failed(kind) => *self.failures.entry(kind).or_default() += 1,
            Verdict::Wrong(why) if self.wrong.len() < WRONG_KEPT => self.wrong.push(why),
            Verdict::Wrong(_) => {}
        }
    }
}

impl fmt::Display for Honest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sent, right, shed, failures, wrong, .. } = self;
        write!(f, "{sent} honest requests, {right} right, {} wrong, {shed} shed, failed {failures:?}", wrong.len())
    }
}

pub(super) struct Ttfts(Vec<Duration>);

impl Ttfts {
    fn of<'a>(streams: impl Iterator<Item = &'a (Instant, Duration)>) -> Self {
        let mut sorted: Vec<Duration> = streams.map(|(_, ttft)| *ttft).collect();
        sorted.sort_unstable();
        Self(sorted)
    }

    /// A quantile by nearest rank; zero if there are no streams.
    pub(super) fn quantile(&self, quantile: f64) -> Duration {
        let rank = (quantile * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }
}

impl fmt::Display for Ttfts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p50, p90, p99, p999] = [0.5, 0.9, 0.99, 0.999].map(|quantile| self.quantile(quantile).as_secs_f64() * 1e3);
        write!(f, "TTFT of {} streams: P50 {p50:.1}, P90 {p90:.1}, P99 {p99:.1}, P99.9 {p999:.1} ms", self.0.len())
    }
}

enum Verdict {
    /// For a short stream, with the moment of sending and the time to first token.
    Right(Option<(Instant, Duration)>),
    Shed,
    Failed(String),
    Wrong(String),
}

struct HonestRequest {
    prompt: String,
    tokens: u64,
    stream: bool,
    /// Whether the TTFT of this request counts.
    counts: bool,
}

impl HonestRequest {
    fn new(number: u64, rng: &mut Rng) -> Self {
        let short = rng.below(20) > 0;
        let words = if short { 10 + rng.below(300) } else { 3_000 + rng.below(3_000) };
        let word = ["rain", "wind", "snow", "hail"][rng.below(4)];
        let prompt = format!("request {number} says{}", format!(" {word}").repeat(words));
        Self { prompt, tokens: 4 + rng.below(60) as u64, stream: rng.below(10) > 0, counts: short }
    }

    fn long_stream(number: u64, rng: &mut Rng) -> Self {
        let prompt = format!("request {number} asks for more");
        Self { prompt, tokens: 2_000 + rng.below(1_000) as u64, stream: true, counts: false }
    }

    fn bytes(&self) -> Vec<u8> {
        let Self { prompt, tokens, stream, .. } = self;
        let body = format!(
            r#"{{"model":"{MODEL}","prompt":"{prompt}","echo":true,"stream":{stream},"max_tokens":{tokens},"ignore_eos":true}}"#
        );
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {HONEST_KEY}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes()
    }

    fn judge(&self, reply: &Reply, ttft: Option<(Instant, Duration)>) -> Verdict {
        let body = String::from_utf8_lossy(&reply.start);
        let shown = || format!("status {}: {}", reply.status, body.chars().take(300).collect::<String>());
        match reply.status {
            200 if self.stream => match streamed_text(&body) {
                Ok(text) if !self.is_own(&text) => Verdict::Wrong(shown()),
                Ok(_) => Verdict::Right(ttft.filter(|_| self.counts)),
                Err(Broken::ErrorEvent) => Verdict::Failed("error event".to_owned()),
                Err(Broken::Malformed) => Verdict::Wrong(shown()),
            },
            200 => match serde_json::from_str::<Value>(&body) {
                Ok(value) if self.is_own(value["choices"][0]["text"].as_str().unwrap_or_default()) => {
                    Verdict::Right(None)
                }
                _ => Verdict::Wrong(shown()),
            },
            429 | 503 if reply.retry_after => Verdict::Shed,
            500..600 if serde_json::from_str::<Value>(&body).is_ok_and(|value| value["error"].is_object()) => {
                Verdict::Failed(format!("status {}", reply.status))
            }
            _ => Verdict::Wrong(shown()),
        }
    }

    /// Whether a text is this prompt followed by generated text.
    fn is_own(&self, text: &str) -> bool {
        text.strip_prefix(&self.prompt).is_some_and(|rest| !rest.is_empty() && !rest.contains("request "))
    }
}

enum Broken {
    /// The gateway or the engine reported an error inside the stream.
    ErrorEvent,
    Malformed,
}

/// The text of all events of a stream that ended with `[DONE]`.
fn streamed_text(body: &str) -> Result<String, Broken> {
    let mut text = String::new();
    let mut finished = false;
    let mut done = false;
    for event in body.split_terminator("\n\n") {
        let data = event.strip_prefix("data: ").ok_or(Broken::Malformed)?;
        if done {
            return Err(Broken::Malformed);
        }
        if data == "[DONE]" {
            done = true;
            continue;
        }
        let value: Value = serde_json::from_str(data).map_err(|_| Broken::Malformed)?;
        if value.get("error").is_some() {
            return Err(Broken::ErrorEvent);
        }
        let choice = &value["choices"][0];
        text += choice["text"].as_str().ok_or(Broken::Malformed)?;
        finished |= choice["finish_reason"].is_string();
    }
    if done && finished { Ok(text) } else { Err(Broken::Malformed) }
}

/// Sends honest requests for `length`. All run on this thread, so that work of the attackers does
/// not delay the measurements.
pub(super) fn run(port: u16, length: Duration, seed: u64) -> anyhow::Result<Honest> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut honest = runtime.block_on(send_all(port, length, seed))?;
    honest.threads = Threads::own()?;
    Ok(honest)
}

async fn send_all(port: u16, length: Duration, seed: u64) -> anyhow::Result<Honest> {
    let mut rng = Rng::new(seed ^ 0x40E5);
    let begin = Instant::now();
    let end = begin + length;
    let clients = Clients { port, honest: Arc::default(), idle: Arc::default() };
    let (mut readers, mut tasks) = (JoinSet::new(), JoinSet::new());
    for reader in 0..READERS {
        let (clients, mut rng) = (clients.clone(), Rng::new(seed ^ reader));
        readers.spawn(async move {
            for number in READERS_FROM + (reader << 24).. {
                clients.ask(&HonestRequest::long_stream(number, &mut rng)).await;
                // After a refusal, the reader pauses before it sends the next request.
                sleep(Duration::from_millis(20)).await;
            }
        });
    }
    let mut at = begin;
    for number in 0.. {
        at += Duration::from_secs_f64(rng.exponential() / RATE);
        if at >= end {
            break;
        }
        sleep_until(at).await;
        let (clients, request) = (clients.clone(), HonestRequest::new(number, &mut rng));
        tasks.spawn(async move { clients.ask(&request).await });
        while tasks.try_join_next().transpose()?.is_some() {}
    }
    while tasks.join_next().await.transpose()?.is_some() {}
    // The readers leave in the middle of their streams.
    readers.shutdown().await;
    let honest = std::mem::take(&mut *clients.honest.lock());
    Ok(honest)
}

#[derive(Clone)]
struct Clients {
    port: u16,
    honest: Arc<Mutex<Honest>>,
    idle: Arc<Mutex<Vec<TcpStream>>>,
}

impl Clients {
    async fn ask(&self, request: &HonestRequest) {
        self.honest.lock().sent += 1;
        let verdict = match timeout(TIMEOUT, send(self.port, request, &self.idle)).await {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(why)) => Verdict::Failed(format!("{why:#}")),
            Err(_) => Verdict::Wrong(format!("no complete response within {TIMEOUT:?}")),
        };
        self.honest.lock().count(verdict);
    }
}

async fn send(port: u16, request: &HonestRequest, idle: &Mutex<Vec<TcpStream>>) -> anyhow::Result<Verdict> {
    let kept = idle.lock().pop();
    let mut socket = match kept {
        Some(socket) => socket,
        None => TcpStream::connect(("127.0.0.1", port)).await?,
    };
    let begun = Instant::now();
    socket.write_all(&request.bytes()).await?;
    let mut reply = Reply::keeping(KEPT);
    let mut buffer = vec![0_u8; 16 << 10];
    let mut ttft = None;
    while !reply.done() {
        match socket.read(&mut buffer).await? {
            0 => {
                reply.end();
                if !reply.done() {
                    bail!("connection closed inside a response with status {}", reply.status);
                }
            }
            count => reply.feed(&buffer[..count])?,
        }
        if reply.events > 0 && ttft.is_none() {
            ttft = Some((begun, begun.elapsed()));
        }
    }
    if !reply.close {
        idle.lock().push(socket);
    }
    Ok(request.judge(&reply, ttft))
}
