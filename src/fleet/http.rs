//! One HTTP/1.1 request on a new connection, with limits on time and size.
//!
//! A probe must fail when an engine accepts no new connections, even while old connections still
//! work. So probes share no connection with requests, but connect in the same way. Commands send
//! requests to an admin port with [`exchange`].

use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use sluice_config::Address;
use sluice_gateway::connect::{ConnectError, Connector};

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// No address of the host works.
    #[error("no connection: {0}")]
    Connect(#[from] ConnectError),
    /// The connection broke, or the response is not HTTP.
    #[error("invalid response: {0}")]
    Http(#[from] hyper::Error),
    /// The body is larger than the limit, or incomplete.
    #[error("unreadable body: {0}")]
    Body(String),
    /// The time limit has passed.
    #[error("no response within {0:?}")]
    Timeout(Duration),
    /// The path is not valid in a request.
    #[error("invalid request: {0}")]
    Request(#[from] http::Error),
}

/// Fetches `path` from an engine: the status and a body of at most `limit` bytes, within
/// `time_limit` in all.
pub async fn fetch(
    address: &Address,
    path: &str,
    time_limit: Duration,
    limit: usize,
) -> Result<(StatusCode, Bytes), FetchError> {
    ask(address, Method::GET, path, None, (time_limit, limit)).await
}

/// Posts JSON to `path`, with limits as for [`fetch`].
pub async fn post(
    address: &Address,
    path: &str,
    body: &serde_json::Value,
    time_limit: Duration,
    limit: usize,
) -> Result<(StatusCode, Bytes), FetchError> {
    ask(address, Method::POST, path, Some(body), (time_limit, limit)).await
}

async fn ask(
    address: &Address,
    method: Method,
    path: &str,
    json: Option<&serde_json::Value>,
    (time_limit, limit): (Duration, usize),
) -> Result<(StatusCode, Bytes), FetchError> {
    let path = format!("{}{path}", address.endpoint.prefix);
    let mut request = Request::builder().method(method).uri(path).header(HOST, &*address.authority);
    request = request.header(CONNECTION, "close");
    if json.is_some() {
        request = request.header(CONTENT_TYPE, "application/json");
    }
    if let Some(key) = &address.api_key {
        request = request.header(AUTHORIZATION, format!("Bearer {}", key.expose()));
    }
    let request = request.body(Full::from(json.map(ToString::to_string).unwrap_or_default()))?;
    let response = async {
        let (_, stream) = Connector::shared().connect(address, time_limit).await?;
        exchange(stream, request, limit).await
    };
    timeout(time_limit, response).await.map_err(|_| FetchError::Timeout(time_limit))?
}

/// Sends a request on a new connection and reads a body of at most `limit` bytes.
///
/// # Errors
/// [`FetchError::Http`] or [`FetchError::Body`].
pub async fn exchange<S>(
    stream: S,
    request: Request<Full<Bytes>>,
    limit: usize,
) -> Result<(StatusCode, Bytes), FetchError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    let mut response = pin!(async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), limit).collect().await;
        let body = body.map_err(|error| FetchError::Body(error.to_string()))?;
        Ok((status, body.to_bytes()))
    });
    tokio::select! {
        received = &mut response => received,
        // The connection may end before the response is taken from it. If both fail, the error of
        // the connection names the cause.
        ended = connection => match (response.await, ended) {
            (Err(FetchError::Http(_)), Err(cause)) => Err(cause.into()),
            (received, _) => received,
        },
    }
}
