//! The client socket: accepting connections, and ending them in order.
//!
//! The accept loop is ours and not pingora's `Server`, for three reasons: a port in use is
//! an error with exit code 1 and a sentence (not a panic), shutting down ends when the last request
//! has (not after a fixed grace period), and several gateways can run in one process (tests, demo).
//!
//! Bounds: `clients.rs` says how many connections there may be; what is beyond is accepted, refused and closed, since a
//! client that gets no response cannot tell a busy gateway from a dead one. When the process is out of file descriptors,
//! accepting pauses for [`ACCEPT_PAUSE`] instead of spinning.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use pingora::apps::HttpServerApp;
use pingora::protocols::http::ServerSession;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;

use super::clients::{ClientLimits, Place};
use super::head::REFUSED_TIME;
use super::http2::{self, Pauses};
use super::socket::ClientSocket;
use super::transport::{Protocol, Transport};
use crate::config::Config;

/// Pause after an accept that failed for want of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long requests that are cut may take to tell their clients, which may not read.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// Connections that the kernel completes before they are accepted; it takes the smaller one of this and
/// `net.core.somaxconn`. What does not fit loses its first packet and comes back a second later, which is a second of
/// TTFT. The standard library's 128 overflow in an ordinary burst.
const BACKLOG: u32 = 4_096;

/// A connection that is silent for this long is probed (TCP keep-alive).
const PROBE_AFTER: u32 = 30;
/// Seconds between two probes.
const PROBE_INTERVAL: u32 = 10;
/// Probes without an answer until the connection counts as broken: 60 s after the last sign of the client.
const PROBES: u32 = 3;

/// Opens a listening socket with room for a burst of connections. Clients whose host has vanished without closing are
/// found by probes, as by HAProxy's `option clitcpka`: a request may wait for minutes without a byte in either direction.
///
/// # Errors
/// Those of `socket`, `bind` and `listen`: the port is in use, or not ours to open.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restart may take over the port while old connections linger; a port with a listener stays in use.
    socket.set_reuseaddr(true)?;
    // Accepted connections inherit these.
    socket.set_keepalive(true)?;
    setsockopt(&socket, sockopt::TcpKeepIdle, &PROBE_AFTER)?;
    setsockopt(&socket, sockopt::TcpKeepInterval, &PROBE_INTERVAL)?;
    setsockopt(&socket, sockopt::TcpKeepCount, &PROBES)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// A socket that could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}")]
pub struct ListenError {
    /// Where.
    pub address: SocketAddr,
    /// Why.
    pub source: std::io::Error,
}

/// A bound client socket.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Binds `address`; port 0 takes a free one.
    pub async fn bind(address: SocketAddr) -> Result<Self, ListenError> {
        let failed = |source| ListenError { address, source };
        let socket = listen(address).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        Ok(Self { socket, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts and serves until `stop` says true, then waits for running requests, at most `server.drain_timeout` and until
    /// `hurry` returns. `configured` gives the configuration in force, which each connection asks for anew.
    /// Whether all of them ended by then; those that did not are ended by `cut`, and get [`CUT_GRACE`] for it.
    pub async fn serve<A, C, H, E>(
        self,
        app: Arc<A>,
        limits: Arc<ClientLimits>,
        mut stop: watch::Receiver<bool>,
        configured: C,
        hurry: H,
        cut: E,
    ) -> bool
    where
        A: HttpServerApp + Send + Sync + 'static,
        C: Fn() -> Arc<Config> + Send + Sync,
        H: Future<Output = ()> + Send,
        E: FnOnce() + Send,
    {
        let tasks = TaskTracker::new();
        loop {
            let accepted = tokio::select! {
                accepted = self.socket.accept() => accepted,
                _ = stop.wait_for(|stopping| *stopping) => break,
            };
            match accepted {
                Ok((connection, from)) => {
                    let Some(place) = limits.connected(from.ip()) else { continue };
                    let (app, stop, config) = (Arc::clone(&app), stop.clone(), configured());
                    tasks.spawn(async move { serve_connection(&app, connection, place, config, stop).await });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections; pausing");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.socket);
        tasks.close();
        tokio::select! {
            biased;
            () = tasks.wait() => return true,
            () = sleep(configured().server.drain_timeout) => cut(),
            () = hurry => cut(),
        }
        let _ = timeout(CUT_GRACE, tasks.wait()).await;
        false
    }
}

/// Serves a connection: TLS where it is configured, then the protocol that the client speaks.
async fn serve_connection<A: HttpServerApp + Send + Sync + 'static>(
    app: &Arc<A>,
    connection: TcpStream,
    place: Place,
    config: Arc<Config>,
    mut stop: watch::Receiver<bool>,
) {
    // Tokens are small and wanted now.
    let _ = connection.set_nodelay(true);
    let max = if place.refused { REFUSED_TIME } else { Duration::MAX };
    let (idle, pause) = (config.server.keepalive.min(max), config.server.header_timeout.min(max));
    let pauses = Pauses { preface: pause, idle };
    let established = tokio::select! {
        // Boxed: freed when it ends, and not kept for as long as the connection lives.
        established = Box::pin(Transport::establish(connection, config, idle, pause)) => established,
        // A client that has sent no request yet loses none.
        _ = stop.wait_for(|stopping| *stopping) => return,
    };
    match established {
        Some((transport, Protocol::Http1)) => serve_http1(app, transport, &place, &stop).await,
        // Its requests would each have to be refused: a client of HTTP/2 understands a closed connection.
        Some((_, Protocol::Http2)) if place.refused => {}
        // Boxed: it is larger than what a connection of HTTP/1.1 keeps.
        Some((transport, Protocol::Http2)) => {
            Box::pin(http2::serve(app, ClientSocket::new(transport, false), pauses, &stop)).await;
        }
        None => {}
    }
}

/// Serves requests one after the other. As pingora's own loop, without its part for HTTP/2, which would keep almost 4 KB
/// more for each open stream.
async fn serve_http1<A: HttpServerApp>(
    app: &Arc<A>,
    transport: Transport,
    place: &Place,
    stop: &watch::Receiver<bool>,
) {
    let mut session = ServerSession::new_http1(Box::new(ClientSocket::new(transport, place.refused)));
    while let Some(reused) = app.process_new_http(session, stop).await {
        let (stream, settings) = reused.consume();
        session = ServerSession::new_http1(stream);
        if let Some(settings) = settings {
            settings.apply_to_session(&mut session);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connections in the accept queue of the socket that listens on `port`, from `/proc/net/tcp`.
    fn completed(port: u16) -> usize {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let local = format!("0100007F:{port:04X}");
        let mut fields = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let listening = fields.find(|fields| fields[1] == local && fields[3] == "0A").unwrap();
        usize::from_str_radix(listening[4].split(':').nth(1).unwrap(), 16).unwrap()
    }

    #[tokio::test]
    async fn a_connection_whose_client_has_vanished_is_probed() {
        use nix::sys::socket::getsockopt;
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(getsockopt(&accepted, sockopt::KeepAlive).unwrap());
        let probes = (
            getsockopt(&accepted, sockopt::TcpKeepIdle).unwrap(),
            getsockopt(&accepted, sockopt::TcpKeepInterval).unwrap(),
            getsockopt(&accepted, sockopt::TcpKeepCount).unwrap(),
        );
        assert_eq!(probes, (PROBE_AFTER, PROBE_INTERVAL, PROBES));
    }

    #[tokio::test]
    async fn a_burst_of_connections_is_completed_before_the_first_is_accepted() {
        let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap().trim().parse().unwrap();
        let burst = 600.min(most);
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let opening = async {
            let mut open = Vec::new();
            while open.len() < burst {
                open.push(TcpStream::connect(address).await.unwrap());
            }
            open
        };
        let open = timeout(Duration::from_secs(20), opening).await.expect("every connection is completed");
        assert_eq!((open.len(), completed(address.port())), (burst, burst));
    }
}
