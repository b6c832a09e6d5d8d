//! The listener of the admin port: HTTP/1.1 on a separate socket.
//!
//! The port shares only the state behind [`Control`] with the data plane, so a slow reader here
//! delays no request there. A shutdown waits at most [`SHUTDOWN_MAX`] for responses that clients
//! have not taken. After a hand-over of the port, an open connection has the same time to send one
//! more request.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONNECTION, HeaderValue};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::connections::{Connections, Phase, Progress, WatchedSocket};
use super::control::Control;
use super::routes::Admin;
use sluice_gateway::proxy::{Ending, Ends, ListenError};

/// Longest wait for responses that are under way.
const SHUTDOWN_MAX: Duration = Duration::from_secs(2);
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Pause after a failed accept, which is usually a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A bound admin socket.
#[derive(Debug)]
pub struct Socket {
    listener: TcpListener,
    address: SocketAddr,
}

/// Binds `address`; port 0 means any free port.
pub async fn bind(address: SocketAddr) -> Result<Socket, ListenError> {
    let failed = |source| ListenError { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok(Socket { listener, address })
}

impl Socket {
    /// A socket that another process has opened and that listens already.
    pub fn inherited(socket: std::net::TcpListener) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        let listener = TcpListener::from_std(socket)?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// Duplicates the descriptor, for another process.
    pub fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `ending`, then lets running requests finish, for at most [`SHUTDOWN_MAX`].
    pub async fn serve(self, control: Arc<dyn Control>, ending: Ending) {
        let mut ends = ending.watch();
        let admin = Admin::new(control);
        let mut connections = Connections::default();
        let mut check = interval(CHECK_INTERVAL);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                now = check.tick() => {
                    connections.close_late(now);
                    continue;
                }
                () = ends.closed() => break,
            };
            match accepted {
                Ok((socket, _)) => {
                    connections.make_room().await;
                    let progress = Progress::new(Instant::now());
                    let task = connection(socket, Arc::clone(&progress), admin.clone(), ends.clone());
                    connections.add(progress, tokio::spawn(task));
                }
                Err(error) => {
                    tracing::warn!(%error, "the admin port cannot accept; check the limit on open files (ulimit -n)");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.listener);
        ending.has_closed();
        connections.finish(SHUTDOWN_MAX).await;
    }
}

async fn connection(socket: TcpStream, progress: Arc<Progress>, admin: Admin, mut ends: Ends) {
    let seen = ends.clone();
    let service = service_fn(|request: hyper::Request<Incoming>| {
        let (admin, progress, ends) = (admin.clone(), Arc::clone(&progress), seen.clone());
        async move {
            progress.enter(Phase::Serving);
            let mut response = admin.respond(request).await;
            progress.enter(Phase::Writing);
            if ends.is_closed() {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response.map(|body| body.watch(progress)))
        }
    });
    let socket = WatchedSocket { socket, progress: Arc::clone(&progress) };
    // `connections` enforces the deadlines.
    let mut served = std::pin::pin!(http1::Builder::new().serve_connection(TokioIo::new(socket), service));
    let early = tokio::select! {
        ended = served.as_mut() => Some(ended),
        () = ends.closed() => None,
    };
    let has_request = !matches!(progress.phase(), Phase::Idle | Phase::Head);
    let ended = match early {
        Some(ended) => ended,
        // After a hand-over, a request may be on the way.
        None if !has_request => tokio::select! {
            ended = served.as_mut() => ended,
            () = ends.stopped() => return,
        },
        None => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an admin connection ended early");
    }
}
