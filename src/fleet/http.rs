//! One request to an engine, on a new connection, with limits on time and size.
//!
//! A probe must fail when an engine accepts no connections any more, even while old ones still
//! work. So probes share no connection with requests, but connect in the same way.

use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST};
use http::{Request, StatusCode, request};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
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
    let exchange = exchange(address, Request::get(path_of(address, path)), Bytes::new(), (time_limit, limit));
    timeout(time_limit, exchange).await.map_err(|_| FetchError::Timeout(time_limit))?
}

/// Posts JSON to `path`, with limits as for [`fetch`].
pub async fn post(
    address: &Address,
    path: &str,
    body: &serde_json::Value,
    time_limit: Duration,
    limit: usize,
) -> Result<(StatusCode, Bytes), FetchError> {
    let request = Request::post(path_of(address, path)).header(CONTENT_TYPE, "application/json");
    let exchange = exchange(address, request, Bytes::from(body.to_string()), (time_limit, limit));
    timeout(time_limit, exchange).await.map_err(|_| FetchError::Timeout(time_limit))?
}

fn path_of(address: &Address, path: &str) -> String {
    format!("{}{path}", address.endpoint.prefix)
}

async fn exchange(
    address: &Address,
    request: request::Builder,
    body: Bytes,
    (time_limit, limit): (Duration, usize),
) -> Result<(StatusCode, Bytes), FetchError> {
    let (_, stream) = Connector::shared().connect(address, time_limit).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let driving = async {
        // Ends when the response has been read. An error here would repeat the error of the
        // request.
        let _ = connection.await;
        std::future::pending::<()>().await
    };
    let mut request = request.header(HOST, &*address.authority).header(CONNECTION, "close");
    if let Some(key) = &address.api_key {
        request = request.header(AUTHORIZATION, format!("Bearer {}", key.expose()));
    }
    let request = request.body(Full::new(body))?;
    let request = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), limit).collect().await;
        let body = body.map_err(|error| FetchError::Body(error.to_string()))?;
        Ok((status, body.to_bytes()))
    };
    tokio::select! {
        response = request => response,
        () = driving => Err(FetchError::Body("connection ended".to_owned())),
    }
}
