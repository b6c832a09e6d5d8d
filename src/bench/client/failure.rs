//! Why a request failed.
//!
//! The text of a failure is a key in results and reports, so it is part of the format of result
//! files.

use std::fmt;

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestFailure {
    /// No connection could be made.
    Connect,
    /// The certificate is not trusted, or the server speaks no TLS.
    Tls,
    /// The connection broke before the response began.
    NoResponse,
    /// A status other than 200.
    Status(u16),
    /// An error object inside the stream, with the error code if it is a number.
    InStream(Option<u16>),
    /// The server ended the request early (`finish_reason` is `abort`).
    Aborted,
    /// No `[DONE]`, finish reason or usage at the end of the stream.
    Truncated,
    /// A complete stream without a token event.
    Empty,
    /// The body is not an event stream of this API.
    Malformed,
    /// More token events than one response may have.
    TooManyEvents,
    /// The time limit of the request expired.
    Timeout,
    /// The client left on purpose, as the workload specifies.
    ClientLeft,
}

impl fmt::Display for RequestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("no connection"),
            Self::Tls => f.write_str("TLS handshake failed"),
            Self::NoResponse => f.write_str("connection broke before the answer"),
            Self::Status(status) => write!(f, "status {status}"),
            Self::InStream(Some(code)) => write!(f, "error {code} in the stream"),
            Self::InStream(None) => f.write_str("error in the stream"),
            Self::Aborted => f.write_str("given up by the server (abort)"),
            Self::Truncated => f.write_str("stream cut"),
            Self::Empty => f.write_str("stream without tokens"),
            Self::Malformed => f.write_str("not an event stream"),
            Self::TooManyEvents => f.write_str("stream without end"),
            Self::Timeout => f.write_str("timed out"),
            Self::ClientLeft => f.write_str("left on purpose"),
        }
    }
}
