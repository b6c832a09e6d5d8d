//! Three kinds of clients that send requests during the upgrades.
//!
//! Some always have a stream open, some open a new connection for each request, and some keep their
//! connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use sluice_core::base::Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::engine::LONG_BYTES;

const TIMEOUT: Duration = Duration::from_secs(60);
const KEEPING: usize = 10;
/// Minimum pause of a client between two requests.
const PAUSE: Duration = Duration::from_millis(50);
/// Milliseconds between two tokens of a long stream.
const PACE: usize = 200;
/// One in this many short requests has a long prompt.
const ONE_LONG_IN: usize = 20;

#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) streams: u64,
    pub(super) short: u64,
    pub(super) kept: u64,
    pub(super) failures: Vec<String>,
}

impl Tally {
    pub(super) fn completed(&self) -> u64 {
        self.streams + self.short + self.kept
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Stream,
    Short,
    Kept,
}

pub(super) struct Clients {
    stop: Arc<AtomicBool>,
    open: Arc<AtomicUsize>,
    tasks: JoinSet<Vec<(Kind, Result<(), String>)>>,
}

impl Clients {
    pub(super) fn begin(gateway: SocketAddr, streams: usize, rate: u64) -> Self {
        let (stop, open) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let mut tasks = JoinSet::new();
        for number in 0..streams {
            tasks.spawn(stream(gateway, number as u64, Arc::clone(&stop), Arc::clone(&open)));
        }
        for number in 0..KEEPING {
            tasks.spawn(keep(gateway, number as u64, Arc::clone(&stop)));
        }
        tasks.spawn(connect(gateway, rate, Arc::clone(&stop)));
        Self { stop, open, tasks }
    }

    pub(super) fn open(&self) -> usize {
        self.open.load(Relaxed)
    }

    pub(super) async fn end(self) -> Tally {
        self.stop.store(true, Relaxed);
        let mut tally = Tally::default();
        for (kind, result) in self.tasks.join_all().await.into_iter().flatten() {
            match (result, kind) {
                (Err(what), _) => tally.failures.push(what),
                (Ok(()), Kind::Stream) => tally.streams += 1,
                (Ok(()), Kind::Short) => tally.short += 1,
                (Ok(()), Kind::Kept) => tally.kept += 1,
            }
        }
        tally
    }
}

/// Reads one stream after the other, each on a new connection.
async fn stream(
    gateway: SocketAddr,
    seed: u64,
    stop: Arc<AtomicBool>,
    open: Arc<AtomicUsize>,
) -> Vec<(Kind, Result<(), String>)> {
    let (mut rng, mut results) = (Rng::new(seed), Vec::new());
    while !stop.load(Relaxed) {
        let tokens = 8 + rng.below(32);
        let result = one(gateway, tokens, PACE, 100).await;
        if results.is_empty() {
            open.fetch_add(1, Relaxed);
        }
        results.push((Kind::Stream, result.map_err(|what| format!("a stream of {tokens} tokens: {what}"))));
    }
    results
}

/// Opens new connections at a constant rate, even if earlier ones still wait.
async fn connect(gateway: SocketAddr, rate: u64, stop: Arc<AtomicBool>) -> Vec<(Kind, Result<(), String>)> {
    let (mut rng, mut requests) = (Rng::new(7), JoinSet::new());
    let mut ticks = interval(Duration::from_secs(1) / u32::try_from(rate).unwrap_or(u32::MAX));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    while !stop.load(Relaxed) {
        ticks.tick().await;
        let bytes = if rng.below(ONE_LONG_IN) == 0 { LONG_BYTES + 4_000 } else { 100 };
        requests.spawn(one(gateway, 3, 10, bytes));
    }
    let short = |result: Result<(), String>| (Kind::Short, result.map_err(|what| format!("a new connection: {what}")));
    requests.join_all().await.into_iter().map(short).collect()
}

/// Sends one request after the other on one connection. When the gateway announces that it closes
/// the connection, the next request opens a new one.
async fn keep(gateway: SocketAddr, seed: u64, stop: Arc<AtomicBool>) -> Vec<(Kind, Result<(), String>)> {
    let (mut rng, mut results, mut kept) = (Rng::new(seed), Vec::new(), None);
    while !stop.load(Relaxed) {
        let exchanged = timeout(TIMEOUT, exchange(gateway, kept.take(), request(3, 10, 100, "keep-alive"))).await;
        let result = match exchanged.unwrap_or_else(|_| Err("no end in time".to_owned())) {
            Ok(socket) => {
                kept = socket;
                Ok(())
            }
            Err(what) => Err(format!("a kept connection: {what}")),
        };
        results.push((Kind::Kept, result));
        sleep(PAUSE + Duration::from_millis(rng.below(50) as u64)).await;
    }
    results
}

async fn one(gateway: SocketAddr, tokens: usize, pace: usize, bytes: usize) -> Result<(), String> {
    let exchanged = timeout(TIMEOUT, exchange(gateway, None, request(tokens, pace, bytes, "close"))).await;
    exchanged.unwrap_or_else(|_| Err("no end in time".to_owned())).map(drop)
}

fn request(tokens: usize, pace: usize, bytes: usize, connection: &str) -> (String, usize) {
    let text = "roll ".repeat(bytes / 5);
    let body = format!(
        r#"{{"model":"m","stream":true,"max_tokens":{tokens},"seed":{pace},"messages":[{{"role":"user","content":"{text}"}}]}}"#
    );
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    (request, tokens)
}

/// Sends a request and reads its whole response. Returns the connection if it may be used again.
async fn exchange(
    gateway: SocketAddr,
    kept: Option<TcpStream>,
    (request, tokens): (String, usize),
) -> Result<Option<TcpStream>, String> {
    let mut response = Vec::new();
    let exchanged = async {
        let mut socket = match kept {
            Some(socket) => socket,
            None => TcpStream::connect(gateway).await?,
        };
        socket.write_all(request.as_bytes()).await?;
        while !response.ends_with(b"\r\n0\r\n\r\n") && socket.read_buf(&mut response).await? > 0 {}
        Ok(socket)
    };
    let exchanged: std::io::Result<TcpStream> = exchanged.await;
    let text = String::from_utf8_lossy(&response);
    let status = text.get(9..12).unwrap_or("none");
    let socket = exchanged.map_err(|error| format!("{error} after {} bytes", text.len()))?;
    let is_whole =
        text.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n") && text.matches("\"content\":\"w\"").count() == tokens;
    if status != "200" || !is_whole {
        let tail: String = text.chars().rev().take(200).collect::<Vec<_>>().into_iter().rev().collect();
        return Err(format!("status {status}, {} bytes, ends: {tail}", text.len()));
    }
    let head = text.split("\r\n\r\n").next().unwrap_or_default().to_ascii_lowercase();
    Ok((!head.contains("connection: close")).then_some(socket))
}
