//! The clients of the soak. The seed and the number of a request determine its content and the
//! moment when its client leaves.
//!
//! Seven of ten requests are finite, and their clients read the response to the end, streamed or
//! plain. Three are endless, and their clients leave: at once (mostly within milliseconds of
//! sending the request, streamed or plain), when the head of the response arrives, or after some
//! events. After a finite request, the next one uses the same connection. A client that leaves
//! closes the connection. Most prompts are short; one in twelve is long, up to 80 KB. The client of
//! one in [`SLOW`] finite requests reads a long stream more slowly than the engine sends it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::bail;
use sluice_core::base::Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::MODELS;
use crate::reply::Reply;

/// Code with which the gateway refuses a body that two engines served when they died.
pub(crate) const SUSPECTED: &str = "suspected_crash";
/// Concurrent clients, to be multiplied by `SLUICE_SOAK_SCALE`. They are more than the slots of all
/// backends, so that a queue forms.
const CLIENTS: usize = 96;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Output tokens of an endless request. The mock would need 1,000 s for them, and a simulated
/// engine two minutes.
const ENDLESS: u64 = 100_000;
/// One in this many finite requests is read slowly.
const SLOW: usize = 128;
/// Output tokens of a request that is read slowly. Its response has more bytes than the sockets can
/// hold.
const SLOW_TOKENS: u64 = 1_600;
/// A slow client reads [`PIECE`] bytes, then pauses for this long.
const SLOW_PAUSE: Duration = Duration::from_millis(50);
const PIECE: usize = 4_096;
/// Maximum number of distinct kinds of failures.
const MAX_KINDS: usize = 16;

#[derive(Default, Debug)]
pub(crate) struct Tally {
    pub(crate) sent: u64,
    pub(crate) completed: u64,
    /// Clients that left before they read anything.
    pub(crate) left_at_once: u64,
    /// Clients that left when the head of a response with status 200 had arrived.
    pub(crate) left_at_head: u64,
    /// Clients that left after some events.
    pub(crate) left_in_content: u64,
    /// Requests that were refused with 503 and `Retry-After`, or with 429.
    pub(crate) shed: u64,
    /// All other requests, which had another status, or a broken or incomplete response.
    pub(crate) failed: u64,
    /// Failed requests by kind of failure.
    pub(crate) failures: BTreeMap<String, u64>,
}

impl Tally {
    pub(crate) fn left(&self) -> u64 {
        self.left_at_once + self.left_at_head + self.left_in_content
    }

    fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.completed += other.completed;
        self.left_at_once += other.left_at_once;
        self.left_at_head += other.left_at_head;
        self.left_in_content += other.left_in_content;
        self.shed += other.shed;
        self.failed += other.failed;
        other.failures.iter().for_each(|(kind, n)| self.count_failure(kind, *n));
    }

    fn count_failure(&mut self, kind: &str, n: u64) {
        let known = self.failures.contains_key(kind) || self.failures.len() < MAX_KINDS;
        *self.failures.entry(if known { kind } else { "other" }.to_owned()).or_default() += n;
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Leave {
    Never,
    AtOnce(Duration),
    AtHead,
    /// The client leaves after this many events.
    InContent(u64),
}

struct RequestPlan {
    model: usize,
    leave: Leave,
    is_slow: bool,
    body: String,
}

impl RequestPlan {
    fn of(number: u64, seed: u64) -> Self {
        let mut rng = Rng::new(seed.rotate_left(32) ^ number);
        let model = rng.below(2);
        let leave = match rng.below(10) {
            0 => {
                let most = if rng.below(3) == 0 { 60 } else { 8 };
                Leave::AtOnce(Duration::from_millis(rng.below(most) as u64))
            }
            1 => Leave::AtHead,
            2 => Leave::InContent(2 + rng.below(6) as u64),
            _ => Leave::Never,
        };
        let finite = leave == Leave::Never;
        // A request whose client leaves at the head or later must be a stream.
        let is_slow = finite && rng.below(SLOW) == 0;
        let stream = is_slow || matches!(leave, Leave::AtHead | Leave::InContent(_)) || rng.below(3) > 0;
        let (tokens, interval) = match (finite, is_slow) {
            (true, false) => (1 + rng.below(8) as u64, 1),
            (true, true) => (SLOW_TOKENS, 1),
            (false, _) => (ENDLESS, 10),
        };
        let first = rng.below(6);
        let prompt = match rng.below(48) {
            0 => 60_000 + rng.below(20_000),
            1..4 => 12_000 + rng.below(30_000),
            4..12 => 2_000 + rng.below(6_000),
            _ => 20 + rng.below(400),
        };
        let body = format!(
            r#"{{"model":"{}","stream":{stream},"max_tokens":{tokens},"ignore_eos":true,"user":"mock:first={first},interval={interval},chunks={tokens};","messages":[{{"role":"user","content":"{}"}}]}}"#,
            MODELS[model],
            "gate ".repeat(prompt / 5)
        );
        Self { model, leave, is_slow, body }
    }
}

pub(crate) struct LoadClients {
    ports: [u16; 2],
    requests: u64,
    seed: u64,
    next: AtomicU64,
}

impl LoadClients {
    /// Clients that send `requests` requests in total. Requests for model `i` go to `ports[i]`.
    pub(crate) fn new(ports: [u16; 2], requests: u64, seed: u64) -> Arc<Self> {
        Arc::new(Self { ports, requests, seed, next: AtomicU64::new(0) })
    }

    pub(crate) fn begun(&self) -> u64 {
        self.next.load(Relaxed).min(self.requests)
    }

    /// Share of the requests that have begun, 0 to 1.
    pub(crate) fn progress(&self) -> f64 {
        self.begun() as f64 / self.requests as f64
    }

    /// Sends all requests; returns one tally per model.
    pub(crate) async fn run(self: Arc<Self>) -> anyhow::Result<[Tally; 2]> {
        let mut tasks = JoinSet::new();
        for _ in 0..CLIENTS * crate::scale() as usize {
            tasks.spawn(Arc::clone(&self).client());
        }
        let mut tallies: [Tally; 2] = Default::default();
        while let Some(of_client) = tasks.join_next().await {
            tallies.iter_mut().zip(&of_client?).for_each(|(all, one)| all.add(one));
        }
        Ok(tallies)
    }

    async fn client(self: Arc<Self>) -> [Tally; 2] {
        let mut tallies: [Tally; 2] = Default::default();
        let mut kept: [Option<TcpStream>; 2] = [None, None];
        loop {
            let number = self.next.fetch_add(1, Relaxed);
            if number >= self.requests {
                return tallies;
            }
            let plan = RequestPlan::of(number, self.seed);
            let (tally, kept) = (&mut tallies[plan.model], &mut kept[plan.model]);
            let exchange = exchange(self.ports[plan.model], &plan, kept, tally);
            if let Err(why) = timeout(TIMEOUT, exchange).await.map_err(anyhow::Error::from).flatten() {
                *kept = None;
                tally.failed += 1;
                tally.count_failure(&format!("{why:#}"), 1);
            }
        }
    }
}

/// Opens a connection. For a slow client it has a small buffer, so that the sockets are soon full.
async fn connect(port: u16, is_slow: bool) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if is_slow {
        socket.set_recv_buffer_size(PIECE as u32)?;
    }
    socket.connect(([127, 0, 0, 1], port).into()).await
}

async fn exchange(
    port: u16,
    plan: &RequestPlan,
    kept: &mut Option<TcpStream>,
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let reuse = if plan.leave == Leave::Never && !plan.is_slow { kept.take() } else { None };
    let mut socket = match reuse {
        Some(socket) => socket,
        None => connect(port, plan.is_slow).await?,
    };
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        plan.body.len()
    );
    socket.write_all(&[head.as_bytes(), plan.body.as_bytes()].concat()).await?;
    tally.sent += 1;
    if let Leave::AtOnce(pause) = plan.leave {
        sleep(pause).await;
        tally.left_at_once += 1;
        return Ok(());
    }
    let mut reply = Reply::keeping(300);
    let mut buffer = [0_u8; PIECE];
    while !reply.done() {
        if plan.is_slow {
            sleep(SLOW_PAUSE).await;
        }
        match socket.read(&mut buffer).await? {
            0 => {
                reply.end();
                if !reply.done() {
                    bail!("closed before the response ended, status {}", reply.status);
                }
            }
            n => reply.feed(&buffer[..n])?,
        }
        let running = reply.status == 200 && !reply.done();
        match plan.leave {
            Leave::AtHead if running => {
                tally.left_at_head += 1;
                return Ok(());
            }
            Leave::InContent(events) if running && reply.events >= events => {
                tally.left_in_content += 1;
                return Ok(());
            }
            _ => {}
        }
    }
    match (reply.status, plan.leave) {
        (200, Leave::Never) if !reply.failed_inside() => tally.completed += 1,
        (429 | 503, _) if reply.retry_after => tally.shed += 1,
        (status, _) => {
            let start = String::from_utf8_lossy(&reply.start);
            // Only the code is kept, because the message has a time. Bodies repeat while engines
            // die all the time, so this refusal is expected.
            match start.contains(SUSPECTED) {
                true => bail!("status {status}: {SUSPECTED}"),
                false => bail!("status {status}: {start}"),
            }
        }
    }
    if plan.leave == Leave::Never && !plan.is_slow && !reply.close {
        *kept = Some(socket);
    }
    Ok(())
}
