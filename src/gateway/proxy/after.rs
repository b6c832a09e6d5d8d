//! Ends or keeps a connection after a request, and finds the address at the other end.
//!
//! A refused client may still be sending its body. Closing the socket, or resetting the HTTP/2
//! stream, would lose the response. So the rest of the body is read and dropped first: for at most
//! [`LINGER`], or with HTTP/2 within the bounds of `http2::linger`.

use std::net::IpAddr;
use std::time::Duration;

use pingora::protocols::http::ServerSession;
use tokio::time::timeout;

use super::client_handle::ClientHandle;
use super::http2;
use sluice_config::Config;

/// How long the end of a request may take before the connection is closed.
pub(super) const SETTLE: Duration = Duration::from_secs(5);
pub(super) const LINGER: Duration = Duration::from_secs(5);
/// [`LINGER`] while the gateway shuts down.
pub(super) const LINGER_CLOSING: Duration = Duration::from_secs(1);

pub(super) enum Next {
    Request,
    /// The connection is closed after the client had this long to finish sending and to read the
    /// response.
    Close {
        linger: Duration,
    },
}

impl Next {
    pub(super) const CLOSE: Self = Self::Close { linger: Duration::ZERO };
}

/// Shuts down the sending side, gives the client up to `linger` to finish, and closes the
/// connection.
pub(super) async fn end(session: &mut ServerSession, linger: Duration) {
    if ClientHandle::of(session).is_none() {
        http2::linger(session, linger).await;
        return;
    }
    let closed = timeout(SETTLE, session.shutdown()).await;
    if closed.is_ok()
        && !linger.is_zero()
        && let Some(client) = ClientHandle::of(session)
    {
        client.linger(linger).await;
    }
}

/// Lets a client end an HTTP/2 stream after a complete response to a request whose body was not
/// read.
pub(super) async fn end_stream(session: &mut ServerSession) {
    if !session.is_body_done() && ClientHandle::of(session).is_none() {
        http2::linger(session, LINGER).await;
    }
}

/// The address of a client for logs and records, if the configuration wants it.
pub(super) fn shown(client: Option<IpAddr>, config: &Config) -> Option<IpAddr> {
    let wanted = config.access_log.as_ref().is_some_and(|log| log.client_address)
        || config.records.as_ref().is_some_and(|records| records.client_address);
    client.filter(|_| wanted)
}

/// The address at the other end of a connection, or the one that a PROXY header has named.
pub(super) fn peer(session: &ServerSession) -> Option<IpAddr> {
    Some(session.client_addr()?.as_inet()?.ip())
}
