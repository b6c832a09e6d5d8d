//! A client that sends exactly the bytes of a test and parses responses strictly.
//!
//! Every wait is limited by [`TIMEOUT`]. The message of the panic has the bytes that were read by
//! then.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;
pub(crate) const STREAMED: &str = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;

pub(crate) fn chat(body: &str) -> Vec<u8> {
    post("/v1/chat/completions", "", body.as_bytes())
}

/// A POST request. `headers` are whole lines.
pub(crate) fn post(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}content-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

pub(crate) fn change(path: &str) -> Vec<u8> {
    post(path, "x-sluice-admin: 1\r\n", b"")
}

pub(crate) fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")
}

#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    /// Names, in lower case, and values of the headers.
    pub(crate) headers: Vec<(String, String)>,
}

impl Head {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn retry_after(&self) -> u64 {
        self.header("retry-after").expect("no Retry-After").parse().unwrap()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Response {
    pub(crate) head: Head,
    pub(crate) body: Vec<u8>,
    /// Whether the body is complete according to its framing.
    pub(crate) whole: bool,
}

impl Response {
    pub(crate) fn status(&self) -> u16 {
        self.head.status
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// `error.code` of an OpenAI error, whose four members must all be present.
    pub(crate) fn code(&self) -> String {
        let body = self.json();
        let error = body["error"].as_object().unwrap_or_else(|| panic!("no error object: {body}"));
        assert!(error["message"].is_string() && error["type"].is_string() && error.contains_key("param"), "{body}");
        assert_eq!(self.head.header("content-type"), Some("application/json"));
        error["code"].as_str().unwrap_or_else(|| panic!("not an error code of the gateway: {body}")).to_owned()
    }

    #[track_caller]
    pub(crate) fn is(&self, status: u16, code: &str) -> &Self {
        assert_eq!((self.status(), self.code().as_str()), (status, code), "{}", self.text());
        self
    }
}

pub(crate) struct TestClient {
    socket: TcpStream,
    unread: Vec<u8>,
}

impl TestClient {
    pub(crate) async fn to(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).await.unwrap();
        socket.set_nodelay(true).unwrap();
        Self::over(socket)
    }

    pub(crate) fn over(socket: TcpStream) -> Self {
        Self { socket, unread: Vec::new() }
    }

    /// Connects from the address `from` of this machine.
    pub(crate) async fn between(from: SocketAddr, to: SocketAddr) -> Self {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(from).unwrap();
        Self { socket: socket.connect(to).await.unwrap(), unread: Vec::new() }
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        timeout(TIMEOUT, self.socket.write_all(bytes.as_ref())).await.expect("the gateway does not read").unwrap();
        self
    }

    /// Sends bytes. Returns an error if the gateway has closed the connection.
    pub(crate) async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        timeout(TIMEOUT, self.socket.write_all(bytes.as_ref())).await.expect("the gateway does not read")
    }

    /// Whether bytes of a response, or the end of the connection, have arrived.
    pub(crate) async fn has_response(&self) -> bool {
        timeout(Duration::from_millis(1), self.socket.peek(&mut [0])).await.is_ok()
    }

    pub(crate) async fn half_close(&mut self) {
        self.socket.shutdown().await.unwrap();
    }

    pub(crate) fn reset(self) {
        self.socket.set_zero_linger().unwrap();
    }

    pub(crate) async fn send_bytewise(&mut self, bytes: &[u8]) -> &mut Self {
        for byte in bytes {
            self.send([*byte]).await;
            tokio::task::yield_now().await;
        }
        self
    }

    /// Sends `piece` this many times, then reads the response. Returns whether all pieces were
    /// sent, and the response.
    pub(crate) async fn send_while_reading(self, piece: &[u8], times: usize) -> (bool, Response) {
        let Self { socket, unread } = self;
        let (mut reading, mut writing) = socket.into_split();
        let sending = async {
            for _ in 0..times {
                if writing.write_all(piece).await.is_err() {
                    return false;
                }
            }
            true
        };
        // The client reads the response only after sending, because many clients do not expect an
        // early response.
        let sent = timeout(TIMEOUT, sending).await.expect("the gateway does not read");
        let mut unread = unread;
        let mut whole = None;
        while whole.is_none() {
            let read = timeout(TIMEOUT, reading.read_buf(&mut unread)).await.expect("no response");
            assert!(read.unwrap_or(0) > 0, "the response was lost: {}", String::from_utf8_lossy(&unread));
            whole = parse(&unread, false);
        }
        (sent, whole.unwrap().0)
    }

    /// Reads more bytes; false at the end of the connection.
    async fn read(&mut self) -> bool {
        match timeout(TIMEOUT, self.socket.read_buf(&mut self.unread)).await {
            Ok(read) => read.unwrap_or(0) > 0,
            Err(_) => panic!("no bytes arrived; so far: {}", String::from_utf8_lossy(&self.unread)),
        }
    }

    /// Waits for the head of the next response, and not for the body.
    pub(crate) async fn head(&mut self) -> Head {
        loop {
            if let Some((head, length)) = parse_head(&self.unread) {
                self.unread.drain(..length);
                return head;
            }
            assert!(self.read().await, "closed before a head: {}", String::from_utf8_lossy(&self.unread));
        }
    }

    /// Reads until `text` has arrived, including framing, and returns everything so far without
    /// consuming it.
    pub(crate) async fn until(&mut self, text: &str) -> String {
        loop {
            let so_far = String::from_utf8_lossy(&self.unread).into_owned();
            if so_far.contains(text) {
                return so_far;
            }
            assert!(self.read().await, "closed before '{text}': {so_far}");
        }
    }

    /// Reads until this many events of a stream have begun, without consuming them.
    pub(crate) async fn until_events(&mut self, events: usize) {
        while self.unread.windows(6).filter(|window| window == b"data: ").count() < events {
            assert!(self.read().await, "closed before {events} events");
        }
    }

    pub(crate) async fn response(&mut self) -> Response {
        self.response_to("").await
    }

    /// Reads the response to a HEAD request: no body, regardless of `content-length`.
    pub(crate) async fn response_to_head(&mut self) -> Response {
        self.response_to("HEAD").await
    }

    async fn response_to(&mut self, method: &str) -> Response {
        loop {
            if method == "HEAD" {
                let head = self.head().await;
                return Response { head, body: Vec::new(), whole: true };
            }
            if let Some((response, used)) = parse(&self.unread, false) {
                self.unread.drain(..used);
                return response;
            }
            if !self.read().await {
                let rest = std::mem::take(&mut self.unread);
                let (response, _) = parse(&rest, true)
                    .unwrap_or_else(|| panic!("closed without a response: {}", String::from_utf8_lossy(&rest)));
                return response;
            }
        }
    }

    /// Waits for the gateway to close the connection; returns the bytes that were not consumed
    /// before.
    pub(crate) async fn closed(&mut self) -> String {
        while self.read().await {}
        String::from_utf8_lossy(&self.unread).into_owned()
    }

    pub(crate) async fn request(&mut self, request: impl AsRef<[u8]>) -> Response {
        self.send(request).await.response().await
    }
}

fn parse_head(bytes: &[u8]) -> Option<(Head, usize)> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let text = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut lines = text.split("\r\n");
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let headers = lines.filter_map(|line| line.split_once(':'));
    let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned())).collect();
    Some((Head { status, headers }, end + 4))
}

/// The response at the front of `bytes`, and its length in bytes. `None` for an incomplete
/// response, unless the connection has ended (`end`).
fn parse(bytes: &[u8], end: bool) -> Option<(Response, usize)> {
    let (head, start) = parse_head(bytes)?;
    let rest = &bytes[start..];
    if head.status < 200 || head.status == 204 || head.status == 304 {
        return Some((Response { head, body: Vec::new(), whole: true }, start));
    }
    let (body, used, whole) = if let Some(length) = head.header("content-length") {
        let length: usize = length.parse().unwrap();
        let there = rest.len().min(length);
        (rest[..there].to_vec(), there, there == length)
    } else if head.header("transfer-encoding") == Some("chunked") {
        dechunk(rest)
    } else {
        (rest.to_vec(), rest.len(), end)
    };
    (whole || end).then_some((Response { head, body, whole }, start + used))
}

/// The body as far as it can be decoded, the number of bytes used for it, and whether the last
/// chunk was among them.
fn dechunk(bytes: &[u8]) -> (Vec<u8>, usize, bool) {
    let (mut body, mut at) = (Vec::new(), 0);
    while let Some(line) = bytes[at..].windows(2).position(|window| window == b"\r\n") {
        let size = std::str::from_utf8(&bytes[at..at + line]).unwrap();
        let size = usize::from_str_radix(size, 16).expect("a chunk's size");
        let data = at + line + 2;
        if bytes.len() < data + size + 2 {
            break;
        }
        body.extend_from_slice(&bytes[data..data + size]);
        assert_eq!(&bytes[data + size..data + size + 2], b"\r\n");
        at = data + size + 2;
        if size == 0 {
            return (body, at, true);
        }
    }
    (body, at, false)
}
