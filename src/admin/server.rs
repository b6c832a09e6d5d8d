//! The admin port's listener: HTTP/1.1 on its own socket, few connections, each with bounds.
//!
//! Bounds: [`CONNECTIONS_MAX`] connections at once, further ones wait in the kernel's backlog; headers must arrive within
//! [`HEADER_TIMEOUT`], which also ends idle keep-alive connections; bodies are not read. It runs beside the data
//! plane and shares nothing with it but what [`Control`] hands out, so a slow reader here delays nobody there.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Admin, Control};

/// Connections at once: a few scrapers, a few browsers with six each, and room.
const CONNECTIONS_MAX: usize = 64;
/// For the headers of a request to arrive, the first or the next one. Above the interval of common scrapers (15 to
/// 60 s), so that they keep their connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(75);
/// After a failed accept, which means that descriptors ran out: room may come back soon.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stop` is cancelled, then lets running requests finish.
pub async fn serve<C: Control>(listener: TcpListener, admin: Arc<Admin<C>>, stop: CancellationToken) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let connections = TaskTracker::new();
    loop {
        let permit = tokio::select! {
            permit = Arc::clone(&room).acquire_owned() => permit,
            () = stop.cancelled() => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((socket, _)) => {
                let (admin, stop) = (Arc::clone(&admin), stop.clone());
                connections.spawn(async move {
                    connection(socket, admin, stop).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the admin port cannot accept; check the limit on open files (ulimit -n)");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections.close();
    connections.wait().await;
}

async fn connection<C: Control>(socket: TcpStream, admin: Arc<Admin<C>>, stop: CancellationToken) {
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let admin = Arc::clone(&admin);
        async move { Ok::<_, Infallible>(admin.answer(&request).await) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    let mut served = std::pin::pin!(http.serve_connection(TokioIo::new(socket), service));
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an admin connection ended early");
    }
}
