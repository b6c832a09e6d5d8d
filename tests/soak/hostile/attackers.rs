//! Attackers: the connections of an attack repeat one kind of misuse until the run is over.
//!
//! Attackers connect from [`ADDRESS`], so that the limits for one client address apply to them and
//! not to the honest clients. Responses to attackers are not checked.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use sluice_core::base::Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::{ATTACKER_KEY, MODEL};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const STEP: Duration = Duration::from_secs(30);
/// Cores that the attack needs at full speed. Attackers, honest clients, engines and the gateway
/// share one machine, so with fewer cores each connection pauses longer between two attempts. The
/// number of connections does not change. So the attackers occupy as many connections, buffered
/// bodies and requests in flight as at full speed.
const FULL_SPEED_CORES: f64 = 16.0;
/// Maximum number of connections of all attacks together.
pub(super) const CONNECTIONS: u64 = 512;

/// The misuse of one connection in one attempt.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Sends a head byte by byte.
    SlowHead,
    /// Declares a large body and sends it byte by byte.
    SlowBody,
    /// Sends most of a body of 3 MiB and stops.
    HeldBody,
    /// Sends a body far beyond the limit, which it declares as length or sends in chunks without
    /// end.
    OversizedBody,
    /// Requests a stream that is longer than the buffers of its connection, and reads nothing.
    StoppedReader,
    /// Closes its sending side after the request and reads the response.
    HalfClose,
    /// Sends several requests at once and leaves.
    Pipeliner,
    /// Sends a request and one byte more, then leaves.
    ByteAndLeave,
    /// Requests many sequences, many inputs, or tokens without end.
    Wide,
    /// Sends bytes that are not HTTP, or HTTP that must be refused.
    Malformed,
    /// Sends half of a request and resets the connection.
    Reset,
    /// Opens a connection and sends nothing.
    Silent,
}

/// Every attack, its name and its number of connections.
const ATTACKS: [(Kind, &str, usize); 12] = [
    (Kind::SlowHead, "slow head", 64),
    (Kind::SlowBody, "slow body", 48),
    (Kind::HeldBody, "held body", 32),
    (Kind::OversizedBody, "oversized body", 8),
    (Kind::StoppedReader, "stopped reader", 24),
    (Kind::HalfClose, "half close", 8),
    (Kind::Pipeliner, "pipeliner", 8),
    (Kind::ByteAndLeave, "one byte more, then leaves", 32),
    (Kind::Wide, "wide request", 16),
    (Kind::Malformed, "malformed", 8),
    (Kind::Reset, "reset", 8),
    (Kind::Silent, "silent connection", 128),
];

fn slower() -> f64 {
    (FULL_SPEED_CORES / cores() as f64).max(1.0)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

pub(super) fn scale() -> String {
    let connections: usize = ATTACKS.iter().map(|(_, _, connections)| connections).sum();
    format!(
        "{} cores: {connections} connections attack, with pauses {:.1} times as long as on {FULL_SPEED_CORES}",
        cores(),
        slower()
    )
}

pub(super) struct Attack {
    pub(super) name: &'static str,
    times: Arc<AtomicU64>,
    tasks: JoinSet<()>,
}

impl Attack {
    /// Starts all attacks. Their connections go on until `over` is set.
    pub(super) fn start_all(port: u16, seed: u64, over: &Arc<AtomicBool>) -> Vec<Self> {
        let slower = slower();
        let start = |(kind, name, connections): (Kind, &'static str, usize)| {
            let times = Arc::new(AtomicU64::new(0));
            let mut tasks = JoinSet::new();
            for number in 0..connections {
                let (times, over) = (Arc::clone(&times), Arc::clone(over));
                let mut rng = Rng::new(seed ^ ((kind as u64) << 32) ^ number as u64);
                tasks.spawn(async move {
                    while !over.load(Relaxed) {
                        if timeout(STEP, once(kind, port, &mut rng, &over)).await.is_ok_and(|result| result.is_ok()) {
                            times.fetch_add(1, Relaxed);
                        }
                        // When the gateway refuses or closes a connection, the attacker opens it
                        // again, but only after a pause.
                        sleep(Duration::from_millis(50 + rng.below(100) as u64).mul_f64(slower)).await;
                    }
                });
            }
            Self { name, times, tasks }
        };
        ATTACKS.map(start).into()
    }

    /// Waits until all connections of the attack are closed. Returns the number of attempts that
    /// the gateway did not cut short.
    pub(super) async fn stop(mut self) -> anyhow::Result<u64> {
        while self.tasks.join_next().await.transpose()?.is_some() {}
        Ok(self.times.load(Relaxed))
    }
}

async fn connect(port: u16) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    // The buffer is small, so that an attacker that stops reading soon blocks the gateway's writes.
    socket.set_recv_buffer_size(4 << 10)?;
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((ADDRESS, 0)))?;
    socket.connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await
}

/// Makes one attempt. An error means that the gateway closed the connection first.
async fn once(kind: Kind, port: u16, rng: &mut Rng, over: &AtomicBool) -> std::io::Result<()> {
    let mut socket = connect(port).await?;
    match kind {
        Kind::SlowHead => {
            let head = head("/v1/completions", "content-length: 100000");
            drip(&mut socket, &head, Duration::from_millis(500), over).await;
        }
        Kind::SlowBody => {
            socket.write_all(&head("/v1/completions", "content-length: 100000")).await?;
            drip(&mut socket, &[b' '; 1_000], Duration::from_secs(1), over).await;
        }
        Kind::HeldBody => {
            socket.write_all(&head("/v1/completions", "content-length: 3145728")).await?;
            // The error is ignored, because the gateway refuses a body before its end when the
            // memory for bodies is used up.
            let _ = socket.write_all(&vec![b' '; 3_000_000]).await;
            hold(&mut socket, Duration::from_secs(15), over).await;
        }
        Kind::OversizedBody if rng.below(2) == 0 => {
            socket.write_all(&head("/v1/completions", "content-length: 10000000000")).await?;
            flood(&mut socket, &vec![b' '; 64 << 10], over).await;
        }
        Kind::OversizedBody => {
            socket.write_all(&head("/v1/completions", "transfer-encoding: chunked")).await?;
            let chunk = [b"10000\r\n".as_slice(), &vec![b' '; 64 << 10], b"\r\n"].concat();
            flood(&mut socket, &chunk, over).await;
        }
        Kind::StoppedReader => {
            socket.write_all(&completion(r#""stream":true,"max_tokens":3000,"logprobs":5,"ignore_eos":true"#)).await?;
            let until = Instant::now() + Duration::from_secs(20);
            while Instant::now() < until && !over.load(Relaxed) {
                sleep(Duration::from_millis(100)).await;
            }
        }
        Kind::HalfClose => {
            socket.write_all(&completion(r#""max_tokens":5"#)).await?;
            socket.shutdown().await?;
            drain(&mut socket).await?;
        }
        Kind::Pipeliner => {
            let request = completion(r#""stream":true,"max_tokens":20"#);
            socket.write_all(&request.repeat(2 + rng.below(4))).await?;
            let mut some = [0; 2_000];
            socket.read(&mut some).await.map(drop)?;
        }
        Kind::ByteAndLeave => {
            socket.write_all(&completion(r#""max_tokens":5000,"ignore_eos":true"#)).await?;
            socket.write_all([b"\r\n".as_slice(), b"P", b"POST / HTTP/1.1\r\n"][rng.below(3)]).await?;
            sleep(Duration::from_millis(rng.below(50) as u64)).await;
        }
        Kind::Wide => {
            let wide = [
                completion(r#""n":16384"#),
                completion(r#""n":60,"max_tokens":20"#),
                completion(r#""min_tokens":1000000000"#),
                completion(r#""max_tokens":100000,"ignore_eos":true"#),
                request("/v1/embeddings", &format!(r#"{{"model":"{MODEL}","input":[{}"x"]}}"#, r#""x","#.repeat(300))),
            ];
            socket.write_all(&wide[rng.below(wide.len())]).await?;
            let mut some = [0; 2_000];
            let _ = timeout(Duration::from_secs(2), socket.read(&mut some)).await;
        }
        Kind::Malformed => {
            let noise: Vec<u8> = (0..200).map(|_| rng.next_u64() as u8).collect();
            let texts: [&[u8]; 8] = [
                &noise,
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
                b"CONNECT evil:443 HTTP/1.1\r\nhost: evil\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
                b"GET / HTTP/1.1\r\n\r\n",
                b"GET / HTTP/9.9\r\nhost: \x00\r\n\r\n",
            ];
            socket.write_all(texts[rng.below(texts.len())]).await?;
            let mut some = [0; 2_000];
            let _ = timeout(Duration::from_secs(2), socket.read(&mut some)).await;
        }
        Kind::Reset => {
            let request = completion(r#""max_tokens":50"#);
            socket.write_all(&request[..rng.below(request.len())]).await?;
            sleep(Duration::from_millis(rng.below(20) as u64)).await;
            socket.set_zero_linger()?;
        }
        Kind::Silent => hold(&mut socket, Duration::from_secs(20), over).await,
    }
    Ok(())
}

fn head(path: &str, framing: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {ATTACKER_KEY}\r\n\
         content-type: application/json\r\n{framing}\r\n\r\n"
    )
    .into_bytes()
}

fn request(path: &str, body: &str) -> Vec<u8> {
    [&head(path, &format!("content-length: {}", body.len())), body.as_bytes()].concat()
}

fn completion(fields: &str) -> Vec<u8> {
    request("/v1/completions", &format!(r#"{{"model":"{MODEL}","prompt":"let me in",{fields}}}"#))
}

/// Sends one byte after each pause until the gateway closes the connection or responds.
async fn drip(socket: &mut TcpStream, bytes: &[u8], pause: Duration, over: &AtomicBool) {
    let mut some = [0; 1_000];
    for byte in bytes {
        if over.load(Relaxed) || socket.write_all(&[*byte]).await.is_err() {
            return;
        }
        if timeout(pause, socket.read(&mut some)).await.is_ok() {
            return;
        }
    }
}

async fn flood(socket: &mut TcpStream, piece: &[u8], over: &AtomicBool) {
    while !over.load(Relaxed) && socket.write_all(piece).await.is_ok() {}
}

/// Keeps the connection open until the gateway closes it or responds, but not longer than `most`.
async fn hold(socket: &mut TcpStream, most: Duration, over: &AtomicBool) {
    let mut some = [0; 1_000];
    let until = Instant::now() + most;
    while Instant::now() < until && !over.load(Relaxed) {
        if timeout(Duration::from_millis(200), socket.read(&mut some)).await.is_ok() {
            return;
        }
    }
}

async fn drain(socket: &mut TcpStream) -> std::io::Result<()> {
    let mut some = [0; 4_096];
    while socket.read(&mut some).await? > 0 {}
    Ok(())
}
