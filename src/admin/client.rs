//! The other side of the admin port: what subcommands ask a running gateway with.
//!
//! One connection per request, HTTP/1.1 without TLS, as the port speaks it. Bounds: [`TIMEOUT`] for the whole exchange (see [`RESTART_TIMEOUT`]),
//! [`ANSWER_MAX`] bytes of answer. Errors say what to do next; an answer that is an error is one too, with
//! what the gateway said.

use std::time::Duration;

use http::header::{AUTHORIZATION, HOST};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;

/// For connecting, asking and answering together: most things here take milliseconds, a reload a second.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The same where a restart is asked for: the gateway may first have to ask vLLM for its flags, which is given 300 s.
pub const RESTART_TIMEOUT: Duration = Duration::from_secs(330);
/// Largest answer that is read: the status of the largest configuration has about 1 MiB.
const ANSWER_MAX: usize = 16 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The URL is not `http://host:port`.
    #[error("'{0}' is not an address of an admin port; write for example http://127.0.0.1:8081")]
    Url(String),
    /// Nobody answers there.
    #[error(
        "no answer from the admin port at {url}: {reason}; is sluice serve running, and is server.admin this address?"
    )]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        reason: String,
    },
    /// It wants a token, or another one.
    #[error("the admin port at {url} wants its token; pass --token or set SLUICE_ADMIN_TOKEN")]
    Token {
        /// Where.
        url: String,
    },
    /// The token cannot be sent.
    #[error("the admin token contains characters that a header cannot carry; check --token or SLUICE_ADMIN_TOKEN")]
    TokenText,
    /// The gateway refused, and says why.
    #[error("{message}")]
    Refused {
        /// The status of the answer.
        status: StatusCode,
        /// What the gateway said.
        message: String,
        /// What is wrong with a configuration, one line each.
        problems: Vec<String>,
    },
    /// Something answered that is no gateway of ours, or of another version.
    #[error("{url} answers, but not as an admin port of sluice does: {reason}; check the address")]
    NotOurs {
        /// Where.
        url: String,
        /// What is odd.
        reason: String,
    },
}

/// A way to ask one gateway.
#[derive(Clone, Debug)]
pub struct Client {
    url: String,
    authority: String,
    /// With the port, for connecting.
    target: (String, u16),
    token: Option<String>,
}

impl Client {
    /// A client of the admin port at `url` (`http://host:port`, or `host:port`).
    pub fn new(url: &str, token: Option<&str>) -> Result<Self, ClientError> {
        let wrong = || ClientError::Url(url.to_owned());
        let whole = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let uri: Uri = whole.parse().map_err(|_| wrong())?;
        let plain = uri.scheme_str() == Some("http") && matches!(uri.path(), "" | "/");
        let authority = uri.authority().filter(|_| plain).ok_or_else(wrong)?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let target = (host, authority.port_u16().unwrap_or(80));
        let token = token.filter(|token| !token.is_empty()).map(str::to_owned);
        Ok(Self { url: format!("http://{authority}"), authority: authority.to_string(), target, token })
    }

    /// Asks and reads the JSON answer.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.read(&self.ask(Method::GET, path, TIMEOUT).await?)
    }

    /// Tells it to do something and reads the JSON answer.
    pub async fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.post_within(path, TIMEOUT).await
    }

    /// The same, for what may take longer.
    pub async fn post_within<T: DeserializeOwned>(&self, path: &str, limit: Duration) -> Result<T, ClientError> {
        self.read(&self.ask(Method::POST, path, limit).await?)
    }

    fn read<T: DeserializeOwned>(&self, answer: &Bytes) -> Result<T, ClientError> {
        serde_json::from_slice(answer)
            .map_err(|error| ClientError::NotOurs { url: self.url.clone(), reason: error.to_string() })
    }

    async fn ask(&self, method: Method, path: &str, limit: Duration) -> Result<Bytes, ClientError> {
        let mut request = Request::builder().method(method).uri(path).header(HOST, &self.authority);
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Empty::<Bytes>::new()).map_err(|_| ClientError::TokenText)?;
        let exchanged = tokio::time::timeout(limit, self.exchange(request)).await;
        let (status, answer) = match exchanged {
            Ok(Ok(answer)) => answer,
            Ok(Err(reason)) => return Err(self.unreachable(reason.to_string())),
            Err(_) => return Err(self.unreachable(format!("nothing came for {} s", limit.as_secs()))),
        };
        if status.is_success() {
            return Ok(answer);
        }
        if status == StatusCode::UNAUTHORIZED {
            return Err(ClientError::Token { url: self.url.clone() });
        }
        Err(self.refused(status, &answer))
    }

    async fn exchange(
        &self,
        request: Request<Empty<Bytes>>,
    ) -> Result<(StatusCode, Bytes), Box<dyn std::error::Error + Send + Sync>> {
        let (host, port) = &self.target;
        let socket = TcpStream::connect((host.as_str(), *port)).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket)).await?;
        let asking = async {
            let answer = sender.send_request(request).await?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), ANSWER_MAX).collect().await?;
            Ok((status, body.to_bytes()))
        };
        let mut asking = std::pin::pin!(asking);
        tokio::select! {
            answered = &mut asking => answered,
            // The connection's side ends first when the answer closes it; what was read is still to come.
            ended = connection => match asking.await {
                Ok(answered) => Ok(answered),
                Err(error) => Err(ended.err().map_or(error, Into::into)),
            },
        }
    }

    fn unreachable(&self, reason: String) -> ClientError {
        ClientError::Unreachable { url: self.url.clone(), reason }
    }

    fn refused(&self, status: StatusCode, answer: &Bytes) -> ClientError {
        let said: serde_json::Value = serde_json::from_slice(answer).unwrap_or_default();
        let Some(message) = said["error"]["message"].as_str() else {
            return ClientError::NotOurs { url: self.url.clone(), reason: format!("it said {status}") };
        };
        let problems = said["error"]["problems"].as_array().into_iter().flatten();
        let problems = problems.filter_map(|line| line.as_str().map(str::to_owned)).collect();
        ClientError::Refused { status, message: message.to_owned(), problems }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_people_write_them() {
        let target = |url: &str| Client::new(url, None).unwrap().target;
        assert_eq!(target("http://127.0.0.1:8081"), ("127.0.0.1".to_owned(), 8081));
        assert_eq!(target("localhost:9000"), ("localhost".to_owned(), 9000));
        assert_eq!(target("http://[::1]:8081/"), ("::1".to_owned(), 8081));
        for wrong in ["https://127.0.0.1:8081", "http://127.0.0.1:8081/metrics", "", "http://"] {
            assert!(matches!(Client::new(wrong, None), Err(ClientError::Url(_))), "{wrong}");
        }
    }
}
