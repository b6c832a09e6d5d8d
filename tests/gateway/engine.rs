//! A scripted engine: it sends exactly the bytes that a test lists.
//!
//! It responds to the gateway's own requests (`/health`, `/v1/models`, `/metrics`) without a
//! script. Every other request is recorded and then served by steps, which the test's script
//! returns for the number of the request. While a step waits, the engine watches the connection. If
//! the gateway closes it, the engine counts this at once, as vLLM would abort the request.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use parking_lot::Mutex;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// Requested size of the receive buffer of a hasty engine's socket, in bytes. The kernel doubles
/// it.
const UNREAD: u32 = 64 << 10;

#[derive(Clone)]
pub(crate) enum Step {
    Send(Vec<u8>),
    /// Send these bytes in writes of one byte.
    Bytewise(Vec<u8>),
    /// Send these bytes repeatedly until the gateway closes the connection.
    Endlessly(Vec<u8>),
    /// Wait until the test has opened the gate once for this step, or the gateway closes the
    /// connection.
    Gate,
    /// Send nothing until the gateway closes the connection.
    Silence,
    /// End the sending direction of the connection, but go on reading.
    EndSending,
    /// Hold the connection open and read nothing, until the engine is dropped.
    Deaf,
    /// Read the body of a request whose script began at its head.
    Body,
    Close,
}

#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    /// Request line and headers, as sent.
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// Number of the connection on which the request arrived.
    pub(crate) connection: usize,
}

impl ReceivedRequest {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

type Script = Box<dyn Fn(usize, &ReceivedRequest) -> Vec<Step> + Send + Sync>;

struct Inside {
    script: Script,
    /// Whether a script begins when the head of a request has arrived, before the body is read.
    hasty: bool,
    seen: Mutex<Vec<ReceivedRequest>>,
    healthy: AtomicBool,
    models: Mutex<Vec<String>>,
    /// The response to `/v1/models` if it is not the list of `models`: status and body.
    list: Mutex<Option<(u16, String)>>,
    /// Status and body for paths whose requests run no script.
    pages: Mutex<HashMap<String, (u16, String)>>,
    connections: AtomicUsize,
    left: AtomicUsize,
    gate: Semaphore,
}

pub(crate) struct Engine {
    address: SocketAddr,
    inside: Arc<Inside>,
    accepting: JoinHandle<()>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Engine {
    /// `script` gets the number of the recorded request, from 0.
    pub(crate) async fn start(script: impl Fn(usize, &ReceivedRequest) -> Vec<Step> + Send + Sync + 'static) -> Self {
        Self::at("127.0.0.1:0".parse().unwrap(), script).await
    }

    pub(crate) async fn always(steps: Vec<Step>) -> Self {
        Self::start(move |_, _| steps.clone()).await
    }

    /// An engine that always responds with [`COMPLETION`] and reports models `m` and `lora`.
    pub(crate) async fn with_adapter() -> Self {
        let engine = Self::always(completion()).await;
        engine.set_models(&["m", "lora"]);
        engine
    }

    pub(crate) fn set_models(&self, names: &[&str]) {
        *self.inside.models.lock() = names.iter().map(|name| (*name).to_owned()).collect();
    }

    pub(crate) fn set_list(&self, status: u16, body: &str) {
        *self.inside.list.lock() = Some((status, body.to_owned()));
    }

    /// Sets the response to GET requests for `path`, query included.
    pub(crate) fn set_page(&self, path: &str, status: u16, body: &str) {
        self.inside.pages.lock().insert(path.to_owned(), (status, body.to_owned()));
    }

    pub(crate) async fn at(
        address: SocketAddr,
        script: impl Fn(usize, &ReceivedRequest) -> Vec<Step> + Send + Sync + 'static,
    ) -> Self {
        Self::serve(TcpListener::bind(address).await.unwrap(), false, Box::new(script))
    }

    /// An engine that runs its script as soon as it has read the head of a request. A script that
    /// reads no body must close the connection. The sockets hold little unread data ([`UNREAD`]).
    pub(crate) async fn hasty(script: impl Fn(usize, &ReceivedRequest) -> Vec<Step> + Send + Sync + 'static) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(UNREAD).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        Self::serve(socket.listen(128).unwrap(), true, Box::new(script))
    }

    fn serve(listener: TcpListener, hasty: bool, script: Script) -> Self {
        let address = listener.local_addr().unwrap();
        let inside = Arc::new(Inside {
            script,
            hasty,
            seen: Mutex::default(),
            healthy: AtomicBool::new(true),
            models: Mutex::new(vec!["m".to_owned()]),
            list: Mutex::default(),
            pages: Mutex::default(),
            connections: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
            gate: Semaphore::new(0),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&inside)));
        Self { address, inside, accepting }
    }

    /// Stops the engine. When this returns, connections are refused; an engine that is only dropped
    /// may still accept one for a moment.
    pub(crate) async fn end(mut self) {
        self.accepting.abort();
        let _ = (&mut self.accepting).await;
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Recorded requests, without the gateway's own requests such as probes.
    pub(crate) fn seen(&self) -> Vec<ReceivedRequest> {
        self.inside.seen.lock().clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.inside.seen.lock().len()
    }

    /// Connections that the gateway closed while a script was still running on them.
    pub(crate) fn left(&self) -> usize {
        self.inside.left.load(SeqCst)
    }

    pub(crate) fn set_healthy(&self, healthy: bool) {
        self.inside.healthy.store(healthy, SeqCst);
    }

    pub(crate) fn open_gate(&self) {
        self.inside.gate.add_permits(1);
    }
}

async fn accept(listener: TcpListener, inside: Arc<Inside>) {
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let Ok((socket, _)) = listener.accept().await else { return };
        socket.set_nodelay(true).unwrap();
        let inside = Arc::clone(&inside);
        tasks.spawn(async move {
            let _ = converse(socket, &inside).await;
        });
    }
}

async fn converse(mut socket: TcpStream, inside: &Inside) -> std::io::Result<()> {
    let connection = inside.connections.fetch_add(1, SeqCst);
    let mut unread = Vec::new();
    while let Some(seen) = receive(&mut socket, &mut unread, connection, inside.hasty).await? {
        if seen.head.starts_with("GET ") && !seen.head.starts_with("GET /v1/responses/") {
            socket.write_all(&own_response(&seen.head, inside)).await?;
            continue;
        }
        let number = {
            let mut all = inside.seen.lock();
            all.push(seen.clone());
            all.len() - 1
        };
        for step in (inside.script)(number, &seen) {
            match perform(step, &mut socket, inside).await {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    inside.left.fetch_add(1, SeqCst);
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Reads the next request. `None` if the gateway closes the connection instead.
async fn receive(
    socket: &mut TcpStream,
    unread: &mut Vec<u8>,
    connection: usize,
    hasty: bool,
) -> std::io::Result<Option<ReceivedRequest>> {
    loop {
        if let Some(at) = unread.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&unread[..at]).into_owned();
            let mut seen = ReceivedRequest { head, body: Vec::new(), connection };
            let length = seen.header("content-length").map_or(0, |text| text.parse().unwrap());
            unread.drain(..at + 4);
            if hasty {
                seen.body = std::mem::take(unread);
                return Ok(Some(seen));
            }
            while unread.len() < length {
                if socket.read_buf(unread).await? == 0 {
                    return Ok(None);
                }
            }
            seen.body = unread.drain(..length).collect();
            return Ok(Some(seen));
        }
        if socket.read_buf(unread).await? == 0 {
            return Ok(None);
        }
    }
}

/// The responses to the gateway's own requests: probes, model list, metrics.
fn own_response(head: &str, inside: &Inside) -> Vec<u8> {
    let path = head.split(' ').nth(1).unwrap_or("/");
    if let Some((status, body)) = inside.pages.lock().get(path) {
        return response(*status, "text/plain", body.as_bytes());
    }
    match path {
        "/health" if !inside.healthy.load(SeqCst) => response(503, "text/plain", b""),
        "/health" => response(200, "text/plain", b""),
        "/v1/models" => {
            if let Some((status, body)) = &*inside.list.lock() {
                return response(*status, "application/json", body.as_bytes());
            }
            let card = |name: &String| format!(r#"{{"id":"{name}","object":"model","max_model_len":131072}}"#);
            let cards: Vec<String> = inside.models.lock().iter().map(card).collect();
            json(format!(r#"{{"object":"list","data":[{}]}}"#, cards.join(",")).as_bytes())
        }
        _ => response(404, "text/plain", b"not found"),
    }
}

/// Runs a step. Returns false if the step closes the connection.
async fn perform(step: Step, socket: &mut TcpStream, inside: &Inside) -> std::io::Result<bool> {
    match step {
        Step::Send(bytes) => socket.write_all(&bytes).await?,
        Step::Bytewise(bytes) => {
            for byte in bytes {
                socket.write_all(&[byte]).await?;
                // Lets other tasks run, so that the gateway reads the bytes one by one.
                tokio::task::yield_now().await;
            }
        }
        Step::Endlessly(bytes) => loop {
            socket.write_all(&bytes).await?;
        },
        Step::Gate => tokio::select! {
            permit = inside.gate.acquire() => permit.unwrap().forget(),
            // A hasty engine does not watch, because it would take a byte of the unread body for
            // the end of the connection.
            gone = gone(socket), if !inside.hasty => return Err(gone),
        },
        Step::Silence => return Err(gone(socket).await),
        Step::EndSending => socket.shutdown().await?,
        Step::Deaf => std::future::pending().await,
        Step::Body => {
            let mut seen = inside.seen.lock().last().expect("a request").clone();
            let length: usize = seen.header("content-length").map_or(0, |text| text.parse().unwrap());
            while seen.body.len() < length && socket.read_buf(&mut seen.body).await? > 0 {}
            *inside.seen.lock().last_mut().expect("a request") = seen;
        }
        Step::Close => return Ok(false),
    }
    Ok(true)
}

/// Resolves when the other side has closed the connection.
async fn gone(socket: &mut TcpStream) -> std::io::Error {
    let mut byte = [0];
    match socket.read(&mut byte).await {
        Ok(_) => std::io::ErrorKind::UnexpectedEof.into(),
        Err(error) => error,
    }
}

pub(crate) fn response(status: u16, kind: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} Said\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n");
    [head.as_bytes(), body].concat()
}

pub(crate) fn json(body: &[u8]) -> Vec<u8> {
    response(200, "application/json", body)
}

pub(crate) const COMPLETION: &str = r#"{"id":"c","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}"#;

pub(crate) fn completion() -> Vec<Step> {
    vec![Step::Send(json(COMPLETION.as_bytes()))]
}

pub(crate) const STREAM: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
pub(crate) const LAST: &str = "0\r\n\r\n";

pub(crate) fn event(content: &str) -> String {
    format!(
        r#"data: {{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{{"index":0,"delta":{{"content":"{content}"}},"finish_reason":null}}]}}"#
    ) + "\n\n"
}

pub(crate) fn ending() -> String {
    concat!(
        r#"data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#,
        "\n\ndata: [DONE]\n\n"
    )
    .to_owned()
}

pub(crate) fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

pub(crate) fn send(text: impl Into<String>) -> Step {
    Step::Send(text.into().into_bytes())
}

/// One event, a gate, another event, a gate, the end.
pub(crate) fn gated_stream() -> Vec<Step> {
    vec![
        send(STREAM.to_owned() + &chunk(&event("one"))),
        Step::Gate,
        send(chunk(&event("two"))),
        Step::Gate,
        send(chunk(&ending()) + LAST),
    ]
}
