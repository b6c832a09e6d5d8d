//! One request to an engine: bounded in time and in size, on a connection of its own.
//!
//! Probes do not share connections with requests: a probe must fail when an engine no longer accepts,
//! even while old connections still work.

use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST};
use http::{Request, StatusCode, request};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use sluice_gateway::pool::Address;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Nobody listens, or the host is gone.
    #[error("no connection: {0}")]
    Connect(#[from] std::io::Error),
    /// The connection broke or what came is not HTTP.
    #[error("broken answer: {0}")]
    Http(#[from] hyper::Error),
    /// More than the caller is ready to read, or a broken body.
    #[error("unreadable body: {0}")]
    Body(String),
    /// It took too long.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The path cannot be put into a request.
    #[error("unusable request: {0}")]
    Request(#[from] http::Error),
}

/// Fetches `path` from an engine: status and body of at most `limit` bytes, within `patience` in all.
pub async fn fetch(
    address: &Address,
    path: &str,
    patience: Duration,
    limit: usize,
) -> Result<(StatusCode, Bytes), FetchError> {
    let asking = exchange(address, Request::get(path_of(address, path)), Bytes::new(), limit);
    timeout(patience, asking).await.map_err(|_| FetchError::Timeout(patience))?
}

/// Sends JSON to `path` of an engine: status and body of at most `limit` bytes, within `patience` in all.
pub async fn post(
    address: &Address,
    path: &str,
    body: &serde_json::Value,
    patience: Duration,
    limit: usize,
) -> Result<(StatusCode, Bytes), FetchError> {
    let request = Request::post(path_of(address, path)).header(CONTENT_TYPE, "application/json");
    let asking = exchange(address, request, Bytes::from(body.to_string()), limit);
    timeout(patience, asking).await.map_err(|_| FetchError::Timeout(patience))?
}

fn path_of(address: &Address, path: &str) -> String {
    format!("{}{path}", address.endpoint.prefix)
}

async fn exchange(
    address: &Address,
    request: request::Builder,
    body: Bytes,
    limit: usize,
) -> Result<(StatusCode, Bytes), FetchError> {
    let endpoint = &address.endpoint;
    let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let driving = async {
        // Ends by itself when the answer has been read; its error would repeat ours.
        let _ = connection.await;
        std::future::pending::<()>().await
    };
    let mut request = request.header(HOST, &*address.authority).header(CONNECTION, "close");
    if let Some(key) = &address.api_key {
        request = request.header(AUTHORIZATION, format!("Bearer {}", key.expose()));
    }
    let request = request.body(Full::new(body))?;
    let asking = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), limit).collect().await;
        let body = body.map_err(|error| FetchError::Body(error.to_string()))?;
        Ok((status, body.to_bytes()))
    };
    tokio::select! {
        answer = asking => answer,
        () = driving => Err(FetchError::Body("connection ended".to_owned())),
    }
}
