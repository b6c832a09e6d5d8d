//! The admin port's listener: HTTP/1.1 on its own socket, few connections, each with bounds.
//!
//! Bounds: [`CONNECTIONS_MAX`] connections at once, further ones wait in the kernel's backlog; headers must arrive within
//! [`HEADER_TIMEOUT`], which also ends idle keep-alive connections; bodies are not read. It runs beside the data
//! plane and shares only the state behind [`Control`] with it, so a slow reader here delays no request there.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::task::TaskTracker;

use super::control::Control;
use super::routes::Admin;
use crate::proxy::ListenError;

/// Connections at once: a few scrapers, a few browsers with six each, and room.
const CONNECTIONS_MAX: usize = 64;
/// For the headers of a request to arrive, the first or the next one. Above the interval of common scrapers (15 to
/// 60 s), so that they keep their connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(75);
/// Pause after a failed accept, which means that no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A bound admin socket.
#[derive(Debug)]
pub struct Socket {
    listener: TcpListener,
    address: SocketAddr,
}

/// Binds `address`; port 0 takes a free one.
pub async fn bind(address: SocketAddr) -> Result<Socket, ListenError> {
    let failed = |source| ListenError { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok(Socket { listener, address })
}

impl Socket {
    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `end` is true (or its sender is dropped), then lets running requests finish.
    pub async fn serve(self, control: Arc<dyn Control>, mut end: watch::Receiver<bool>) {
        let admin = Admin::new(control);
        let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let connections = TaskTracker::new();
        loop {
            let accepted = tokio::select! {
                accepted = self.accept(&room) => accepted,
                _ = end.wait_for(|ending| *ending) => break,
            };
            let Some((socket, permit)) = accepted else { continue };
            let (admin, end) = (admin.clone(), end.clone());
            connections.spawn(async move {
                connection(socket, admin, end).await;
                drop(permit);
            });
        }
        connections.close();
        connections.wait().await;
    }

    async fn accept(&self, room: &Arc<Semaphore>) -> Option<(TcpStream, OwnedSemaphorePermit)> {
        let permit = Arc::clone(room).acquire_owned().await.ok()?;
        match self.listener.accept().await {
            Ok((socket, _)) => Some((socket, permit)),
            Err(error) => {
                tracing::warn!(%error, "the admin port cannot accept; check the limit on open files (ulimit -n)");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                None
            }
        }
    }
}

async fn connection(socket: TcpStream, admin: Admin, mut end: watch::Receiver<bool>) {
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let admin = admin.clone();
        async move { Ok::<_, Infallible>(admin.respond(&request).await) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    let mut served = std::pin::pin!(http.serve_connection(TokioIo::new(socket), service));
    let early = tokio::select! {
        ended = served.as_mut() => Some(ended),
        _ = end.wait_for(|ending| *ending) => None,
    };
    let ended = match early {
        Some(ended) => ended,
        None => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an admin connection ended early");
    }
}
