//! A scripted server for tests: the test gives the response to each request.
//!
//! The server parses only the length of a request. It exists because this crate may not depend on
//! `sim`.

#![allow(missing_docs, unreachable_pub, reason = "used only by tests")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::load::length::Length;
use crate::load::workload::{Class, LoadRequest, Workload};

#[derive(Clone, Debug)]
pub struct MockResponse {
    pub status: u16,
    /// Pieces of the body. The server sends each piece with one write.
    pub pieces: Vec<String>,
    pub pause: Duration,
    /// Header lines, each with CRLF.
    pub headers: String,
    /// Whether the server closes the connection before the end of the body.
    pub breaks: bool,
}

impl MockResponse {
    pub fn stream(pieces: Vec<String>, pause: Duration) -> Self {
        Self { status: 200, pieces, pause, headers: String::new(), breaks: false }
    }
}

/// A completions stream of `tokens` events, usage and `[DONE]`.
pub fn completion_stream(tokens: u64) -> Vec<String> {
    let event = "data: {\"choices\":[{\"index\":0,\"text\":\" a\",\"finish_reason\":null}]}\n\n".to_owned();
    let mut pieces = vec![event; usize::try_from(tokens).unwrap()];
    pieces.push(format!(
        "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":3,\"completion_tokens\":{tokens}}}}}\n\ndata: [DONE]\n\n"
    ));
    pieces
}

pub fn small_workload() -> Workload {
    let class = Class::new("small", Length::Exactly(3), Length::Exactly(2), 1.0);
    Workload::of_classes("m", vec![class], 1)
}

pub fn request() -> LoadRequest {
    small_workload().request(0)
}

type Script = Arc<dyn Fn(u64) -> MockResponse + Send + Sync>;

pub struct MockEngine {
    address: SocketAddr,
    script: Script,
    counts: Arc<Counts>,
    accepting: tokio::task::JoinHandle<Infallible>,
}

#[derive(Default)]
struct Counts {
    connections: AtomicU64,
    requests: AtomicU64,
    bodies: parking_lot::Mutex<Vec<Vec<u8>>>,
}

impl MockEngine {
    /// Serves on a free port. `script` gets the number of the request, from 0, and gives the
    /// response.
    pub async fn start(script: impl Fn(u64) -> MockResponse + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::serve(listener, Arc::new(script))
    }

    fn serve(listener: TcpListener, script: Script) -> Self {
        let address = listener.local_addr().unwrap();
        let counts = Arc::new(Counts::default());
        let accepting = tokio::spawn(accept(listener, script.clone(), counts.clone()));
        Self { address, script, counts, accepting }
    }

    /// Closes all connections and serves again on the same port. The counts start again at 0.
    pub async fn restart(mut self) -> Self {
        self.accepting.abort();
        let _ = (&mut self.accepting).await;
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(self.address).unwrap();
        Self::serve(socket.listen(64).unwrap(), self.script.clone())
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn connections(&self) -> u64 {
        self.counts.connections.load(Ordering::SeqCst)
    }

    pub fn bodies(&self) -> Vec<serde_json::Value> {
        self.counts.bodies.lock().iter().map(|body| serde_json::from_slice(body).unwrap()).collect()
    }

    pub fn requests(&self) -> u64 {
        self.counts.requests.load(Ordering::SeqCst)
    }
}

impl Drop for MockEngine {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Aborting this task closes the connections, whose tasks it owns.
async fn accept(listener: TcpListener, script: Script, counts: Arc<Counts>) -> Infallible {
    let mut connections = JoinSet::new();
    loop {
        let (socket, _) = listener.accept().await.unwrap();
        counts.connections.fetch_add(1, Ordering::SeqCst);
        connections.spawn(connection(socket, script.clone(), counts.clone()));
    }
}

async fn connection(mut socket: TcpStream, script: Script, counts: Arc<Counts>) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    let mut input = Vec::new();
    while let Some(body) = read_request(&mut socket, &mut input).await? {
        if !body.is_empty() {
            counts.bodies.lock().push(body);
        }
        let response = script(counts.requests.fetch_add(1, Ordering::SeqCst));
        let head =
            format!("HTTP/1.1 {} Status\r\ntransfer-encoding: chunked\r\n{}\r\n", response.status, response.headers);
        socket.write_all(head.as_bytes()).await?;
        for piece in &response.pieces {
            tokio::time::sleep(response.pause).await;
            let chunk = format!("{:x}\r\n{piece}\r\n", piece.len());
            socket.write_all(chunk.as_bytes()).await?;
        }
        if response.breaks {
            return Ok(());
        }
        socket.write_all(b"0\r\n\r\n").await?;
    }
    Ok(())
}

/// Reads a request and returns the body. `None` if the client closed the connection.
async fn read_request(socket: &mut TcpStream, input: &mut Vec<u8>) -> std::io::Result<Option<Vec<u8>>> {
    loop {
        if let Some(head) = memchr::memmem::find(input, b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&input[..head]).to_lowercase();
            let length = text.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
            let total = head + 4 + length.trim().parse::<usize>().unwrap();
            if input.len() >= total {
                return Ok(Some(input.drain(..total).skip(head + 4).collect()));
            }
        }
        let mut piece = [0; 4096];
        match socket.read(&mut piece).await? {
            0 => return Ok(None),
            read => input.extend_from_slice(&Bytes::copy_from_slice(&piece[..read])),
        }
    }
}
