//! Clients that send requests without a pause and read every response to its end.
//!
//! Any response except a whole stream with all its tokens and `[DONE]` is a loss. Each loss is kept
//! with the time and the backend that responded, so that the test can exclude the losses that its
//! own faults cause. These are streams on an engine that the test crashed, and connections that
//! broke when the test killed the gateway.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::rig::Rig;

const CLIENTS: usize = 6;
const TIMEOUT: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(10);

#[derive(Clone, Debug)]
#[expect(dead_code, reason = "what happened is there to be printed")]
pub(crate) struct Loss {
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    /// The backend that responded, if one did.
    pub(crate) backend: Option<String>,
    pub(crate) what: String,
}

pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    /// Duration of the longest response in milliseconds.
    slowest: Arc<AtomicU64>,
    clients: JoinSet<Vec<Loss>>,
}

impl Load {
    pub(crate) fn on(port: u16) -> Self {
        Self::of(port, "m")
    }

    pub(crate) fn of(port: u16, model: &'static str) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let slowest = Arc::new(AtomicU64::new(0));
        let mut clients = JoinSet::new();
        for client in 0..CLIENTS {
            let (stop, done, slowest) = (Arc::clone(&stop), Arc::clone(&done), Arc::clone(&slowest));
            clients.spawn(async move {
                let mut losses = Vec::new();
                let mut number = client;
                while !stop.load(Relaxed) {
                    let began = Instant::now();
                    // Most requests end within milliseconds; some take about a second, so that
                    // nearly every restart finds an engine with a request.
                    let tokens = if number.is_multiple_of(9) { 3_000 } else { 8 + number * 7 % 60 };
                    let sent = timeout(TIMEOUT, send(port, model, tokens)).await;
                    let (backend, result) = sent.unwrap_or((None, Err("no end in time".to_owned())));
                    slowest.fetch_max(began.elapsed().as_millis() as u64, Relaxed);
                    match result {
                        Ok(()) => drop(done.fetch_add(1, Relaxed)),
                        Err(what) => losses.push(Loss { began, ended: Instant::now(), backend, what }),
                    }
                    number += CLIENTS;
                    sleep(PAUSE).await;
                }
                losses
            });
        }
        Self { stop, done, slowest, clients }
    }

    pub(crate) fn completed(&self) -> u64 {
        self.done.load(Relaxed)
    }

    pub(crate) fn slowest(&self) -> Duration {
        Duration::from_millis(self.slowest.load(Relaxed))
    }

    /// Ends the load. An error names the requests that were lost, with the gateway's log.
    pub(crate) async fn end_without_loss(self, rig: &Rig) -> anyhow::Result<()> {
        let lost = self.end().await;
        anyhow::ensure!(lost.is_empty(), "lost: {lost:#?}\n{}", rig.log());
        Ok(())
    }

    pub(crate) async fn end(self) -> Vec<Loss> {
        self.stop.store(true, Relaxed);
        self.clients.join_all().await.into_iter().flatten().collect()
    }
}

async fn send(port: u16, model: &str, tokens: usize) -> (Option<String>, Result<(), String>) {
    let body = format!(
        r#"{{"model":"{model}","stream":true,"max_tokens":{tokens},"ignore_eos":true,"messages":[{{"role":"user","content":"roll"}}]}}"#
    );
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut response = Vec::new();
    let exchanged = async {
        let mut socket = TcpStream::connect(("127.0.0.1", port)).await?;
        socket.write_all(request.as_bytes()).await?;
        socket.read_to_end(&mut response).await
    };
    let exchanged = exchanged.await;
    let text = String::from_utf8_lossy(&response);
    let head = text.split("\r\n\r\n").next().unwrap_or_default();
    let backend =
        head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("x-sluice-backend: ").map(str::to_owned));
    let status = head.get(9..12).unwrap_or("none");
    let body = unchunked(text.split_once("\r\n\r\n").map_or("", |(_, body)| body));
    // An engine that is stopped ends its streams properly, with the reason "abort".
    let whole = status == "200" && body.contains("data: [DONE]") && body.contains(r#""finish_reason":"length""#);
    let result = match exchanged {
        _ if whole => Ok(()),
        Ok(_) => Err(format!("status {status}, {} bytes, ends: {}", text.len(), tail(&text))),
        Err(error) => Err(format!("{error} after {} bytes", text.len())),
    };
    (backend, result)
}

/// The content of the whole chunks of a body. A gateway may send an event in several chunks.
fn unchunked(mut body: &str) -> String {
    let mut content = String::new();
    while let Some((size, rest)) = body.split_once("\r\n")
        && let Ok(size) = usize::from_str_radix(size, 16)
        && let Some(chunk) = rest.get(..size).filter(|_| size > 0)
    {
        content += chunk;
        body = rest.get(size + 2..).unwrap_or_default();
    }
    content
}

fn tail(text: &str) -> String {
    let mut from = text.len().saturating_sub(200);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text[from..].to_owned()
}
