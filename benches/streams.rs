//! The lag of the simulator: many streams from one `sluice sim` process on one core, compared with
//! the same streams on virtual time.
//!
//! `cargo build --release && cargo bench --bench streams [STREAMS] [SECONDS]` starts
//! `target/release/sluice sim` (or `SLUICE_BIN`) on core 0, runs itself on core 1, and opens
//! STREAMS streams (default 2,000; 64 prompt tokens, ignore_eos). It measures the gaps between
//! events while all streams decode, for about SECONDS (default 6).
//!
//! It prints the gaps that the client measured and the gaps of the same steps on virtual time. The
//! difference is the lag. It also prints which part of its core the server used. If this is near 1,
//! the core is the limit. Needs `taskset` (util-linux), two cores and an open-file limit of STREAMS
//! + 100 or more. Nothing is asserted.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sluice_sim::Profile;
use sluice_sim::{Request, SimConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const PROMPT: u32 = 64;

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(streams: u32, port: u16) -> Server {
    let program = std::env::var("SLUICE_BIN").unwrap_or_else(|_| "target/release/sluice".to_owned());
    let seqs = streams.to_string();
    let arguments =
        ["sim", "m", "--host", "127.0.0.1", "--max-num-seqs", &seqs, "--port", &port.to_string(), "--sim-orphan", "0"];
    let mut command = Command::new("taskset");
    command.args(["-c", "0", &program]).args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
    Server(command.spawn().expect("taskset and the release build of sluice"))
}

fn wait_for(address: SocketAddr) {
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until {
        if let Ok(mut stream) = TcpStream::connect(address) {
            let _ = stream.write_all(b"GET /health HTTP/1.1\r\nhost: m\r\nconnection: close\r\n\r\n");
            let mut text = String::new();
            if stream.read_to_string(&mut text).is_ok() && text.starts_with("HTTP/1.1 200") {
                return;
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("the server does not respond on {address}");
}

/// CPU seconds of a process since it started.
fn cpu(id: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

/// Reads one stream to its end. Returns the time and the number of events of each read with
/// events.
async fn follow(address: SocketAddr, number: u32, tokens: u32) -> Vec<(Instant, u32)> {
    let prompt: Vec<String> = (0..PROMPT).map(|at| (number * PROMPT + at).to_string()).collect();
    let body = format!(
        r#"{{"model":"m","prompt":[{}],"max_tokens":{tokens},"ignore_eos":true,"stream":true}}"#,
        prompt.join(",")
    );
    let head = "POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\n";
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("a connection");
    let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).await.expect("a request is taken");
    let mut seen = Vec::with_capacity(tokens as usize);
    let mut buffer = vec![0; 16_384];
    loop {
        let count = stream.read(&mut buffer).await.expect("a response");
        let bytes = &buffer[..count];
        let events = memchr::memmem::find_iter(bytes, b"data: {").count() as u32;
        if events > 0 {
            seen.push((Instant::now(), events));
        }
        if count == 0 || memchr::memmem::find(bytes, b"[DONE]").is_some() {
            return seen;
        }
    }
}

/// Lengths in milliseconds of the steps in which all sequences decode, on virtual time.
fn simulated(streams: u32, tokens: u32) -> Vec<f64> {
    let mut config = SimConfig::new("m", Profile::named("h200-llama-8b").expect("built in"));
    config.engine.max_num_seqs = streams;
    let mut server = config.virtual_server();
    (0..streams).for_each(|id| server.submit(Duration::ZERO, [Request::new(u64::from(id), PROMPT, tokens)]));
    let (mut last, mut gaps) = (None::<Duration>, Vec::new());
    while let Some(at) = server.next_at() {
        let Some(end) = server.poll(at) else { continue };
        let all = end.emitted.len() == streams as usize && end.load.tokens == streams;
        if let Some(last) = last.filter(|_| all) {
            gaps.push((end.ended - last).as_secs_f64() * 1e3);
        }
        last = all.then_some(end.ended);
    }
    gaps
}

fn row(name: &str, mut gaps: Vec<f64>) {
    gaps.sort_by(f64::total_cmp);
    if gaps.is_empty() {
        return println!("| {name} | | | | | 0 |");
    }
    let at = |q: f64| gaps[(q * (gaps.len() - 1) as f64) as usize];
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    println!("| {name} | {mean:.2} | {:.2} | {:.2} | {:.2} | {} |", at(0.5), at(0.9), at(0.99), gaps.len());
}

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|word| word.parse::<u32>().ok());
    let (streams, seconds) = (numbers.next().unwrap_or(2_000), f64::from(numbers.next().unwrap_or(6)));
    let step = simulated(streams, 12).first().copied().unwrap_or(20.0);
    // Each stream has enough tokens for SECONDS in which all streams decode. But there is no
    // preemption, because even at the end all contexts fit into the cache of this GPU.
    let blocks = SimConfig::new("m", Profile::named("h200-llama-8b").expect("built in")).engine.num_blocks;
    let room = (blocks / streams.max(1)).saturating_sub(1) * 16;
    let tokens = (((seconds + 8.0) * 1e3 / step) as u32).min(room.saturating_sub(PROMPT)).max(8);
    let port = TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("bound").port();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let server = start(streams, port);
    let own = std::process::id().to_string();
    let _ = Command::new("taskset").args(["-acp", "1", &own]).stdout(Stdio::null()).status();
    wait_for(address);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let id = server.0.id();
    let (lives, used) = runtime.block_on(async {
        let all: Vec<_> = (0..streams).map(|number| tokio::spawn(follow(address, number, tokens))).collect();
        let watch = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(4)).await;
            let before = cpu(id);
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
            (cpu(id) - before) / seconds
        });
        let mut lives = Vec::new();
        for one in all {
            lives.push(one.await.expect("a stream is read"));
        }
        (lives, watch.await.expect("watched"))
    });
    // A gap counts only if it lies in the time when every stream has begun and none has ended.
    let begun = lives.iter().filter_map(|life| Some(life.first()?.0)).max().expect("streams");
    let ended = lives.iter().filter_map(|life| Some(life.last()?.0)).min().expect("streams");
    let (mut gaps, mut merged, mut reads) = (Vec::new(), 0, 0u64);
    for pair in lives.iter().flat_map(|life| life.windows(2)) {
        if pair[0].0 > begun && pair[1].0 < ended {
            gaps.push((pair[1].0 - pair[0].0).as_secs_f64() * 1e3 / f64::from(pair[1].1));
            merged += u64::from(pair[1].1 > 1);
            reads += 1;
        }
    }
    let middle = (ended - begun).as_secs_f64();
    println!(
        "{streams} streams for {middle:.1} s; server: {used:.2} of its core; {merged} of {reads} reads had merged events"
    );
    println!("| gaps between tokens, ms | mean | P50 | P90 | P99 | count |");
    println!("|---|--:|--:|--:|--:|--:|");
    row("simulated", simulated(streams, tokens));
    row("seen by the client", gaps);
}
