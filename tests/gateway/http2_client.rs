//! A client that speaks HTTP/2.

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use http::{Request, Response, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::client::TIMEOUT;
use crate::test_gateway::TestGateway;

#[derive(Clone)]
pub(crate) struct Client(pub(crate) SendRequest<Bytes>);

pub(crate) struct Call {
    pub(crate) response: ResponseFuture,
    pub(crate) sending: SendStream<Bytes>,
}

pub(crate) type Driver = JoinHandle<Result<(), h2::Error>>;

pub(crate) async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> (Client, Driver) {
    let (requests, connection) = h2::client::handshake(stream).await.unwrap();
    (Client(requests), tokio::spawn(connection))
}

/// Connects by HTTP/2 with prior knowledge.
pub(crate) async fn plain(gateway: &TestGateway) -> (Client, Driver) {
    over(TcpStream::connect(gateway.address()).await.unwrap()).await
}

impl Client {
    pub(crate) fn of(requests: SendRequest<Bytes>) -> Self {
        Self(requests)
    }

    pub(crate) async fn chat_as(&self, key: &str, body: &str) -> Call {
        self.send("POST", "/v1/chat/completions", Some(key), body, false).await.unwrap()
    }

    /// Sends a request. If `more` is true, further data of the body may follow.
    pub(crate) async fn open(&self, method: &str, path: &str, body: &str, more: bool) -> Result<Call, h2::Error> {
        self.send(method, path, None, body, more).await
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        key: Option<&str>,
        body: &str,
        more: bool,
    ) -> Result<Call, h2::Error> {
        let mut request = Request::builder().method(method).uri(format!("http://gate{path}"));
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.header("content-type", "application/json").body(()).unwrap();
        let mut requests = timeout(TIMEOUT, self.0.clone().ready()).await.expect("no room for a request")?;
        let (response, mut sending) = requests.send_request(request, body.is_empty() && !more)?;
        if !body.is_empty() {
            // The error is ignored: a request that the gateway has refused takes no more data, and
            // its response has the reason.
            let _ = sending.send_data(Bytes::copy_from_slice(body.as_bytes()), !more);
        }
        Ok(Call { response, sending })
    }

    pub(crate) async fn chat(&self, body: &str) -> Call {
        self.open("POST", "/v1/chat/completions", body, false).await.unwrap()
    }

    pub(crate) async fn request(&self, method: &str, path: &str, body: &str) -> (StatusCode, String) {
        let response = self.open(method, path, body, false).await.unwrap().head().await;
        let (head, body) = response.into_parts();
        (head.status, rest(body).await.0)
    }
}

impl Call {
    pub(crate) async fn head(self) -> Response<RecvStream> {
        timeout(TIMEOUT, self.response).await.expect("no response").unwrap()
    }
}

pub(crate) async fn next(body: &mut RecvStream) -> Option<Result<Bytes, h2::Error>> {
    let read = timeout(TIMEOUT, body.data()).await.expect("no bytes arrived")?;
    if let Ok(bytes) = &read {
        body.flow_control().release_capacity(bytes.len()).unwrap();
    }
    Some(read)
}

pub(crate) async fn until(body: &mut RecvStream, text: &str) -> String {
    let mut read = String::new();
    while !read.contains(text) {
        let bytes = next(body).await.unwrap_or_else(|| panic!("ended before '{text}': {read}")).unwrap();
        read += std::str::from_utf8(&bytes).unwrap();
    }
    read
}

/// The rest of a body. If the gateway reset the stream, also the reason.
pub(crate) async fn rest(mut body: RecvStream) -> (String, Option<Reason>) {
    let mut read = String::new();
    while let Some(bytes) = next(&mut body).await {
        match bytes {
            Ok(bytes) => read += std::str::from_utf8(&bytes).unwrap(),
            Err(error) => return (read, Some(error.reason().expect("a reset"))),
        }
    }
    (read, None)
}
