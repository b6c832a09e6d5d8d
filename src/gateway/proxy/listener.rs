//! The client socket: accepting connections, and ending them in order.
//!
//! The accept loop is ours and not pingora's `Server`, for three reasons: a port in use is
//! an error with exit code 1 and a sentence (not a panic), shutting down ends when the last request
//! has (not after a fixed grace period), and several gateways can run in one process (tests, demo).
//!
//! Bounds: [`CONNECTIONS_MAX`] at once; beyond that connections wait in the kernel's backlog. When the
//! process is out of file descriptors, accepting pauses for [`ACCEPT_PAUSE`] instead of spinning.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pingora::apps::HttpServerApp;
use pingora::protocols::http::ServerSession;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::socket::ClientSocket;

/// Client connections at once.
const CONNECTIONS_MAX: usize = 65_536;
/// Pause after an accept that failed for want of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections that the kernel completes before they are accepted; it takes the smaller one of this and
/// `net.core.somaxconn`. What does not fit loses its first packet and comes back a second later, which is a second of
/// TTFT. The standard library's 128 overflow in an ordinary burst.
const BACKLOG: u32 = 4_096;

/// Opens a listening socket with room for a burst of connections.
///
/// # Errors
/// Those of `socket`, `bind` and `listen`: the port is in use, or not ours to open.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restart may take over the port while old connections linger; a port with a listener stays in use.
    socket.set_reuseaddr(true)?;
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

    /// Accepts and serves until `stop` says true, then waits for running requests, at most what `drain` then says.
    /// Whether all of them ended.
    pub async fn serve<A, D>(self, app: Arc<A>, mut stop: watch::Receiver<bool>, drain: D) -> bool
    where
        A: HttpServerApp + Send + Sync + 'static,
        D: FnOnce() -> Duration + Send,
    {
        let tasks = TaskTracker::new();
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let place = tokio::select! {
                place = Arc::clone(&places).acquire_owned() => place,
                _ = stop.wait_for(|stopping| *stopping) => break,
            };
            let Ok(place) = place else { break };
            let accepted = tokio::select! {
                accepted = self.socket.accept() => accepted,
                _ = stop.wait_for(|stopping| *stopping) => break,
            };
            match accepted {
                Ok((connection, _)) => {
                    let (app, stop) = (Arc::clone(&app), stop.clone());
                    tasks.spawn(async move {
                        let _place = place;
                        serve_connection(&app, connection, &stop).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections; pausing");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.socket);
        tasks.close();
        timeout(drain(), tasks.wait()).await.is_ok()
    }
}

/// Serves a connection's requests one after the other. As pingora's own loop, without its part for HTTP/2, which
/// would keep almost 4 KB more for each open stream.
async fn serve_connection<A: HttpServerApp>(app: &Arc<A>, connection: TcpStream, stop: &watch::Receiver<bool>) {
    // Tokens are small and wanted now.
    let _ = connection.set_nodelay(true);
    let mut session = ServerSession::new_http1(Box::new(ClientSocket::new(connection)));
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
