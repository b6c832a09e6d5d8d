//! The client socket: accepting connections, and ending them in order.
//!
//! The accept loop is ours and not pingora's `Server`, for three reasons of manners: a port in use is
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
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::socket::ClientSocket;

/// Client connections at once.
const CONNECTIONS_MAX: usize = 65_536;
/// Pause after an accept that failed for want of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

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
        let socket = TcpListener::bind(address).await.map_err(failed)?;
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
