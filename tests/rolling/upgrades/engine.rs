//! An engine that counts its concurrent sequences and long prompts.
//!
//! A sequence counts from the arrival of its request until just before the engine sends its last
//! bytes. A long prompt counts until just before the engine sends its first token. So neither count
//! is ever above the gateway's count.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

/// If the body of a request has more bytes than this, its prompt counts as long.
pub(super) const LONG_BYTES: usize = 8_000;
/// Time to the first token of a short and of a long prompt.
const PREFILL: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(60)];

#[derive(Debug, Default)]
struct Count {
    now: AtomicU32,
    most: AtomicU32,
}

/// Counts one sequence or prompt until it is dropped.
struct Counted<'a>(&'a Count);

impl Count {
    fn one(&self) -> Counted<'_> {
        self.most.fetch_max(self.now.fetch_add(1, SeqCst) + 1, SeqCst);
        Counted(self)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, SeqCst);
    }
}

#[derive(Debug, Default)]
struct Counts {
    running: Count,
    prefilling: Count,
}

#[derive(Debug)]
pub(super) struct CountingEngine {
    address: SocketAddr,
    counts: Arc<Counts>,
}

impl CountingEngine {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, counts) = (listener.local_addr()?, Arc::<Counts>::default());
        let shared = Arc::clone(&counts);
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let counts = Arc::clone(&shared);
                tokio::spawn(async move { serve(socket, &counts).await });
            }
        });
        Ok(Self { address, counts })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn running(&self) -> u32 {
        self.counts.running.now.load(SeqCst)
    }

    pub(super) fn most_running(&self) -> u32 {
        self.counts.running.most.load(SeqCst)
    }

    pub(super) fn most_prefilling(&self) -> u32 {
        self.counts.prefilling.most.load(SeqCst)
    }
}

async fn serve(mut socket: TcpStream, counts: &Counts) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    let mut bytes = Vec::new();
    loop {
        let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
            if socket.read_buf(&mut bytes).await? == 0 {
                return Ok(());
            }
            continue;
        };
        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
        let length =
            head.lines().find_map(|line| line.strip_prefix("content-length: ")?.trim().parse().ok()).unwrap_or(0);
        while bytes.len() < end + 4 + length {
            if socket.read_buf(&mut bytes).await? == 0 {
                return Ok(());
            }
        }
        let body: Vec<u8> = bytes.drain(..end + 4 + length).skip(end + 4).collect();
        match head.starts_with("post") {
            true => generate(&mut socket, &body, counts).await?,
            false => socket.write_all(own_response(&head).as_bytes()).await?,
        }
    }
}

fn own_response(head: &str) -> String {
    let body = match head.starts_with("get /v1/models") {
        true => r#"{"object":"list","data":[{"id":"m","object":"model","max_model_len":131072}]}"#,
        false => "",
    };
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// Streams as many tokens as the request asks for, one per `seed` milliseconds.
async fn generate(socket: &mut TcpStream, body: &[u8], counts: &Counts) -> std::io::Result<()> {
    let request: serde_json::Value = serde_json::from_slice(body)?;
    let (tokens, pace) = (request["max_tokens"].as_u64().unwrap_or(1), request["seed"].as_u64().unwrap_or(1));
    let is_long = body.len() > LONG_BYTES;
    let running = counts.running.one();
    let prefilling = is_long.then(|| counts.prefilling.one());
    sleep(PREFILL[usize::from(is_long)]).await;
    drop(prefilling);
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    socket.write_all(head.as_bytes()).await?;
    for number in 1..tokens {
        chunk(socket, &event("w", "null")).await?;
        if number < tokens {
            sleep(Duration::from_millis(pace)).await;
        }
    }
    drop(running);
    let usage = format!(
        "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"model\":\"m\",\"choices\":[],\"usage\":{{\"prompt_tokens\":5,\"completion_tokens\":{tokens},\"total_tokens\":{}}}}}\n\n",
        tokens + 5
    );
    chunk(socket, &(event("w", "\"length\"") + &usage + "data: [DONE]\n\n")).await?;
    socket.write_all(b"0\r\n\r\n").await
}

fn event(content: &str, finish: &str) -> String {
    format!(
        "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"model\":\"m\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{content}\"}},\"finish_reason\":{finish}}}]}}\n\n"
    )
}

async fn chunk(socket: &mut TcpStream, text: &str) -> std::io::Result<()> {
    socket.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).await
}
