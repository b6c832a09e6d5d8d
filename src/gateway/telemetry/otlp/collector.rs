//! The connection to an OpenTelemetry collector: OTLP over HTTP/1.1, with protobuf.
//!
//! There is one connection, which is kept open. A collector may have closed it while it was idle,
//! so a request that fails on a used connection is repeated once on a new one. The collector may
//! then get spans twice, with the same ids. The caller limits the time. Bounds: [`RESPONSE_MAX`].

use std::fmt;
use std::time::Duration;

use http::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use sluice_config::tls::{ClientTls, TlsError};
use sluice_config::{Endpoint, Tracing};

/// Pause between two warnings about a collector.
pub(super) const WARN_EVERY: Duration = Duration::from_secs(60);
/// The most bytes of a response, usually none.
const RESPONSE_MAX: usize = 64 << 10;

/// A request to send everything now. The channel signals that this is done.
pub(super) type Flush = std::sync::mpsc::SyncSender<()>;

/// The reason why a collector did not take a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum CollectorError {
    #[error("no answer within {0:?} (tracing.timeout)")]
    TimedOut(Duration),
    #[error("no connection: {0}; is the collector running, and is this its OTLP port for HTTP?")]
    Connect(std::io::Error),
    #[error("{0}; is this its OTLP port for HTTP, and not that for gRPC?")]
    Http(#[from] hyper::Error),
    #[error("its response cannot be read: {0}")]
    Response(String),
    #[error("it answered with status {0}")]
    Status(StatusCode),
}

pub(super) struct Collector {
    endpoint: Endpoint,
    tls: Option<ClientTls>,
    uri: Uri,
    headers: HeaderMap,
    connection: Option<SendRequest<Full<Bytes>>>,
}

impl fmt::Display for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.endpoint.fmt(f)
    }
}

impl Collector {
    /// The configured collector, with `path` below the address.
    pub(super) fn new(config: &Tracing, path: &str) -> Result<Self, TlsError> {
        let endpoint = config.endpoint.clone();
        let mut headers = HeaderMap::new();
        // Invalid headers cannot occur, because the configuration was checked.
        for (name, value) in &config.headers {
            if let (Ok(name), Ok(mut value)) = (HeaderName::try_from(name), HeaderValue::try_from(value.expose())) {
                value.set_sensitive(true);
                headers.insert(name, value);
            }
        }
        if let Ok(host) = HeaderValue::try_from(endpoint.authority()) {
            headers.insert(HOST, host);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("sluice/", env!("CARGO_PKG_VERSION"))));
        let uri = Uri::try_from(format!("{}{path}", endpoint.prefix)).unwrap_or_default();
        Ok(Self { tls: config.connection()?, endpoint, uri, headers, connection: None })
    }

    /// Sends a request and returns the response. Dropping the future closes the connection.
    pub(super) async fn post<R: Message + Default>(&mut self, request: &impl Message) -> Result<R, CollectorError> {
        let body = Bytes::from(request.encode_to_vec());
        if let Some(connection) = self.connection.take()
            && let Ok(response) = self.exchange(connection, body.clone()).await
        {
            return response;
        }
        let connection = self.connect().await?;
        self.exchange(connection, body).await?
    }

    /// Makes one request. An error of the outer result means that the connection was not usable.
    async fn exchange<R: Message + Default>(
        &mut self,
        mut connection: SendRequest<Full<Bytes>>,
        body: Bytes,
    ) -> Result<Result<R, CollectorError>, CollectorError> {
        connection.ready().await?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        let response = connection.send_request(request).await?;
        let accepted = read(response).await;
        if !matches!(accepted, Err(CollectorError::Response(_))) {
            self.connection = Some(connection);
        }
        Ok(accepted)
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, CollectorError> {
        let Endpoint { host, port, .. } = &self.endpoint;
        let socket = TcpStream::connect((host.as_str(), *port)).await.map_err(CollectorError::Connect)?;
        match &self.tls {
            None => serve(socket).await,
            Some(tls) => serve(tls.connect(socket).await.map_err(CollectorError::Connect)?).await,
        }
    }
}

async fn serve<S>(stream: S) -> Result<SendRequest<Full<Bytes>>, CollectorError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    // The task ends when the sender is dropped or the collector closes the connection; the request
    // gets the error.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}

async fn read<R: Message + Default>(response: Response<Incoming>) -> Result<R, CollectorError> {
    let status = response.status();
    let body = Limited::new(response.into_body(), RESPONSE_MAX).collect().await;
    let body = body.map_err(|error| CollectorError::Response(error.to_string()))?.to_bytes();
    if !status.is_success() {
        return Err(CollectorError::Status(status));
    }
    // The collector took the request; the response may be JSON.
    Ok(R::decode(body).unwrap_or_default())
}
