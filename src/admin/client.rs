//! A client of the admin port, for subcommands.
//!
//! HTTP/1.1 without TLS, one connection per request. Bounds: [`TIMEOUT`], [`RESTART_TIMEOUT`],
//! [`RESPONSE_MAX`]. Errors say how to proceed, with the gateway's own messages.

use std::time::Duration;

use http::header::{AUTHORIZATION, HOST};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::Full;
use hyper::body::Bytes;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;

use super::access::ADMIN_HEADER;
use super::encoding::encode;
use super::restart::{RestartBegun, RestartOptions};
use sluice_fleet::exchange;

/// Time limit of an exchange. Most exchanges take milliseconds, a reload takes a second.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a restart or a reload. The gateway may first run vLLM to list the flags, for at
/// most 300 s.
pub const RESTART_TIMEOUT: Duration = Duration::from_secs(330);
/// Largest response in bytes; the status of the largest configuration has about 1 MiB.
const RESPONSE_MAX: usize = 16 << 20;

/// Why a request to the admin port failed.
#[derive(Debug, thiserror::Error)]
pub enum AdminClientError {
    /// The URL is not `http://host:port`.
    #[error("'{0}' is not an address of an admin port; write for example http://127.0.0.1:8081")]
    Url(String),
    /// No server responds at the address.
    #[error(
        "no response from the admin port at {url}: {reason}; is sluice serve running, and is this its server.admin? \
         (--admin URL, or SLUICE_ADMIN)"
    )]
    Unreachable {
        /// The address.
        url: String,
        /// The cause.
        reason: String,
    },
    /// The address is the client port.
    #[error("{url} is the client port of a gateway; give its admin port, server.admin in its configuration")]
    ClientPort {
        /// The address.
        url: String,
    },
    /// The token is missing.
    #[error("the admin port at {url} requires its token; pass --token or set SLUICE_ADMIN_TOKEN")]
    NoToken {
        /// The address.
        url: String,
    },
    /// The token is wrong.
    #[error("the admin port at {url} has another token; correct --token or SLUICE_ADMIN_TOKEN")]
    WrongToken {
        /// The address.
        url: String,
    },
    /// The token cannot be sent.
    #[error("the admin token has characters that are not allowed in a header; check --token or SLUICE_ADMIN_TOKEN")]
    TokenText,
    /// The gateway refused the request.
    #[error("{message} (sluice explain {code})")]
    Refused {
        /// The status of the response.
        status: StatusCode,
        /// The gateway's error code.
        code: String,
        /// The gateway's message.
        message: String,
        /// The problems of a configuration, one line each.
        problems: Vec<String>,
    },
    /// The server is not an admin port, or has another version.
    #[error("{url} responds, but is not the admin port of a sluice of this version: {reason}; check the address")]
    Unexpected {
        /// The address.
        url: String,
        /// The difference from a valid response.
        reason: String,
    },
}

/// A client of one gateway's admin port.
#[derive(Clone, Debug)]
pub struct AdminClient {
    url: String,
    authority: String,
    target: (String, u16),
    token: Option<String>,
}

impl AdminClient {
    /// A client of the admin port at `url` (`http://host:port`, `host:port`, or `:port` of this
    /// machine).
    pub fn new(url: &str, token: Option<&str>) -> Result<Self, AdminClientError> {
        let wrong = || AdminClientError::Url(url.to_owned());
        let whole = match url.strip_prefix(':') {
            Some(port) => format!("http://127.0.0.1:{port}"),
            None if url.contains("://") => url.to_owned(),
            None => format!("http://{url}"),
        };
        let uri: Uri = whole.parse().map_err(|_| wrong())?;
        let plain = uri.scheme_str() == Some("http") && matches!(uri.path(), "" | "/");
        let authority = uri.authority().filter(|_| plain).ok_or_else(wrong)?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let target = (host, authority.port_u16().unwrap_or(80));
        let token = token.filter(|token| !token.is_empty()).map(str::to_owned);
        Ok(Self { url: format!("http://{authority}"), authority: authority.to_string(), target, token })
    }

    /// Sends GET and parses the JSON response.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, AdminClientError> {
        self.parse(&self.request(Method::GET, path, Bytes::new(), TIMEOUT).await?)
    }

    /// Sends GET; returns the body as text.
    pub async fn text(&self, path: &str) -> Result<String, AdminClientError> {
        let body = self.request(Method::GET, path, Bytes::new(), TIMEOUT).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Sends POST and parses the JSON response.
    pub async fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T, AdminClientError> {
        self.post_within(path, TIMEOUT).await
    }

    /// [`AdminClient::post`] with another time limit.
    pub async fn post_within<T: DeserializeOwned>(&self, path: &str, limit: Duration) -> Result<T, AdminClientError> {
        self.parse(&self.request(Method::POST, path, Bytes::new(), limit).await?)
    }

    /// Restarts the engine of a backend; the gateway may run vLLM to list the flags.
    pub async fn restart(
        &self,
        pool: &str,
        backend: &str,
        options: &RestartOptions,
    ) -> Result<RestartBegun, AdminClientError> {
        let path = format!("/admin/backends/{}/{}/restart", encode(pool), encode(backend));
        // This cannot fail, because all keys are strings.
        let body = serde_json::to_vec(options).unwrap_or_default();
        self.parse(&self.request(Method::POST, &path, body.into(), RESTART_TIMEOUT).await?)
    }

    /// Sends PUT with a JSON body and parses the JSON response.
    pub async fn put<T: DeserializeOwned>(&self, path: &str, body: Bytes) -> Result<T, AdminClientError> {
        self.parse(&self.request(Method::PUT, path, body, TIMEOUT).await?)
    }

    /// Sends DELETE and parses the JSON response.
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, AdminClientError> {
        self.parse(&self.request(Method::DELETE, path, Bytes::new(), TIMEOUT).await?)
    }

    fn parse<T: DeserializeOwned>(&self, body: &Bytes) -> Result<T, AdminClientError> {
        serde_json::from_slice(body)
            .map_err(|error| AdminClientError::Unexpected { url: self.url.clone(), reason: error.to_string() })
    }

    async fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        limit: Duration,
    ) -> Result<Bytes, AdminClientError> {
        let is_change = method != Method::GET;
        let mut request = Request::builder().method(method).uri(path).header(HOST, &self.authority);
        if is_change {
            request = request.header(ADMIN_HEADER, "1");
        }
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Full::new(body)).map_err(|_| AdminClientError::TokenText)?;
        let (host, port) = &self.target;
        let response = async {
            let socket = TcpStream::connect((host.as_str(), *port)).await.map_err(|error| error.to_string())?;
            exchange(socket, request, RESPONSE_MAX).await.map_err(|error| error.to_string())
        };
        let late = || Err(format!("no response within {} s", limit.as_secs()));
        let response = tokio::time::timeout(limit, response).await.unwrap_or_else(|_| late());
        let (status, body) =
            response.map_err(|reason| AdminClientError::Unreachable { url: self.url.clone(), reason })?;
        if status.is_success() {
            return Ok(body);
        }
        if status == StatusCode::UNAUTHORIZED {
            let url = self.url.clone();
            return Err(match self.token {
                Some(_) => AdminClientError::WrongToken { url },
                None => AdminClientError::NoToken { url },
            });
        }
        Err(self.refused(status, &body))
    }

    fn refused(&self, status: StatusCode, body: &Bytes) -> AdminClientError {
        let error: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
        let Some(message) = error["error"]["message"].as_str() else {
            return AdminClientError::Unexpected { url: self.url.clone(), reason: format!("status {status}") };
        };
        if error["error"]["code"] == "route_not_found" {
            return AdminClientError::ClientPort { url: self.url.clone() };
        }
        let problems = error["error"]["problems"].as_array().into_iter().flatten();
        let problems = problems.filter_map(|line| line.as_str().map(str::to_owned)).collect();
        let code = error["error"]["code"].as_str().unwrap_or("unknown").to_owned();
        AdminClientError::Refused { status, code, message: message.to_owned(), problems }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_code_to_explain() {
        let client = AdminClient::new(":9000", None).unwrap();
        let body = Bytes::from_static(b"{\"error\":{\"code\":\"busy\",\"message\":\"it is being shut down\"}}");
        let refused = client.refused(StatusCode::CONFLICT, &body);
        assert_eq!(refused.to_string(), "it is being shut down (sluice explain busy)");
    }

    #[test]
    fn addresses_are_accepted_with_and_without_scheme() {
        let target = |url: &str| AdminClient::new(url, None).unwrap().target;
        assert_eq!(target("http://127.0.0.1:8081"), ("127.0.0.1".to_owned(), 8081));
        assert_eq!(target("localhost:9000"), ("localhost".to_owned(), 9000));
        assert_eq!(target("http://[::1]:8081/"), ("::1".to_owned(), 8081));
        assert_eq!(target(":9000"), ("127.0.0.1".to_owned(), 9000));
        for wrong in ["https://127.0.0.1:8081", "http://127.0.0.1:8081/metrics", "", "http://"] {
            assert!(matches!(AdminClient::new(wrong, None), Err(AdminClientError::Url(_))), "{wrong}");
        }
    }
}
