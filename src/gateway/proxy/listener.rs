//! The client port: accepts connections, and closes them on shutdown.
//!
//! When the port is handed over to another process ([`Ending::hand_over`]), the socket stays open
//! there. In this process, requests go on, and each connection ends with the next response
//! (HTTP/1.1) or with GOAWAY (HTTP/2). A connection without requests is closed only after
//! `server.keepalive`, because the client could be sending a request.
//!
//! Why not pingora's `Server`: it panics if the port is in use, its shutdown takes a fixed grace
//! period, and a process can have only one (tests and the demo run several).
//!
//! Connections over the limit (`clients.rs`) are accepted, get 503 and are closed, because without
//! a response a client cannot tell a busy gateway from a dead one. Without file descriptors, a
//! connection without a request is closed, and accepting pauses for [`ACCEPT_PAUSE`].

use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use pingora::apps::ReusedHttpStream;
use pingora::protocols::http::ServerSession;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::task::TaskTracker;

use super::app::Gateway;
use super::clients::CountedConnection;
use super::ending::{Ending, Ends};
use super::head::REFUSED_TIME;
use super::http2::{self, Pauses};
use super::proxy_protocol;
use super::socket::ClientSocket;
use super::transport::{Protocol, Transport};
use super::trust;
use sluice_config::Config;

/// Pause after a failed accept, usually for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long requests that are aborted on shutdown may take to send an error.
const ABORT_GRACE: Duration = Duration::from_secs(1);

/// Backlog of the socket; the kernel uses the smaller of this and `net.core.somaxconn`. When it is
/// full, the kernel drops a client's SYN, and the retry a second later adds to TTFT. An ordinary
/// burst overflows the 128 of the standard library.
const BACKLOG: u32 = 4_096;

/// Silence after which a connection is probed (TCP keep-alive).
const PROBE_AFTER: Duration = Duration::from_secs(30);
/// Time between two probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Unanswered probes after which the connection counts as broken, 60 s after the client's last
/// packet.
const PROBES: u32 = 3;
/// Unsent bytes from which a socket accepts no more until a part of them is sent (tcp(7),
/// TCP_NOTSENT_LOWAT). Without this limit, the kernel keeps up to `net.ipv4.tcp_wmem` for each
/// client that reads slowly, which are megabytes that `server.max_response_memory` does not bound.
const UNSENT: u32 = 128 << 10;

/// Opens a listening socket with a backlog for bursts and with TCP keep-alive. Keep-alive detects a
/// client whose host has vanished while a request waits for minutes without a byte in either
/// direction.
///
/// # Errors
/// The port is in use, or the user may not bind it.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Allows binding while old connections are in TIME_WAIT. A port with a listener is still an
    // error.
    socket.set_reuseaddr(true)?;
    set_options(&socket)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Sets the options that accepted connections inherit.
fn set_options(socket: &impl std::os::fd::AsFd) -> std::io::Result<()> {
    let socket = SockRef::from(socket);
    let probes = TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_INTERVAL).with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    socket.set_tcp_notsent_lowat(UNSENT)
}

/// A socket that could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}; end what listens there, or give another address")]
pub struct ListenError {
    /// The address.
    pub address: SocketAddr,
    /// The cause.
    pub source: std::io::Error,
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A bound client socket.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Binds `address`; port 0 means any free port.
    pub async fn bind(address: SocketAddr) -> Result<Self, ListenError> {
        let failed = |source| ListenError { address, source };
        let socket = listen(address).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        Ok(Self { socket, address })
    }

    /// A listener on a socket that another process has opened.
    pub fn inherited(socket: std::net::TcpListener) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        set_options(&socket)?;
        let socket = TcpListener::from_std(socket)?;
        let address = socket.local_addr()?;
        Ok(Self { socket, address })
    }

    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Another descriptor of the socket, for another process. While it is open, the kernel
    /// completes connections.
    pub fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.socket.as_fd().try_clone_to_owned()
    }

    /// Accepts and serves connections until `ending` signals an end. Then waits for running
    /// requests until `server.drain_timeout` is over or `fast_shutdown` completes. Aborts the
    /// others, which get [`ABORT_GRACE`] to end, and returns their number.
    ///
    /// The future is boxed, so that the request path is compiled with this crate and not again with
    /// the caller.
    pub fn serve(self, gateway: Arc<Gateway>, ending: Ending, fast_shutdown: BoxFuture<()>) -> BoxFuture<usize> {
        Box::pin(self.accept(gateway, ending, fast_shutdown))
    }

    async fn accept(self, gateway: Arc<Gateway>, ending: Ending, fast_shutdown: BoxFuture<()>) -> usize {
        let tasks = TaskTracker::new();
        let mut ends = ending.watch();
        loop {
            let accepted = tokio::select! {
                accepted = self.socket.accept() => accepted,
                () = ends.closed() => break,
            };
            match accepted {
                Ok((connection, from)) => {
                    let config = Arc::clone(&gateway.flow.routing_table().config);
                    let Some(counted) = gateway.clients.connected(from.ip(), &config.server) else { continue };
                    let (gateway, ends) = (Arc::clone(&gateway), ends.clone());
                    tasks.spawn(async move { serve_connection(&gateway, connection, counted, config, ends).await });
                }
                Err(error) => {
                    // Usually no file descriptor is left.
                    let closed = gateway.clients.close_one();
                    tracing::warn!(%error, closed_an_idle_one = closed, "cannot accept connections; pausing");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.socket);
        ending.has_closed();
        tasks.close();
        let until = Instant::now() + gateway.flow.routing_table().config.server.drain_timeout;
        tokio::select! {
            biased;
            () = tasks.wait() => return 0,
            () = sleep_until(until) => {}
            () = fast_shutdown => {}
        }
        // After a hand-over, connections without a request may still be open.
        ending.stop();
        if gateway.flow.is_handed_over() && timeout(ABORT_GRACE, tasks.wait()).await.is_ok() {
            return 0;
        }
        let (running, waiting) = gateway.flow.admission().load();
        gateway.flow.abort_all();
        let _ = timeout(ABORT_GRACE, tasks.wait()).await;
        running + waiting
    }
}

async fn serve_connection(
    gateway: &Arc<Gateway>,
    connection: TcpStream,
    counted: CountedConnection,
    config: Arc<Config>,
    mut ends: Ends,
) {
    // Tokens are small and must be sent without delay.
    let _ = connection.set_nodelay(true);
    let opened = tokio::select! {
        // Boxed, so that the state of opening is freed when it ends.
        opened = Box::pin(open(connection, counted, &config)) => opened,
        // There is no request yet that could be lost.
        () = ends.stopped() => return,
    };
    drop(config);
    let Some(Opened { transport, protocol, counted, pauses }) = opened else { return };
    let counted = Arc::new(counted);
    match protocol {
        Protocol::Http1 => serve_http1(gateway, transport, counted, &ends.stop).await,
        // Over the limit, each request would have to be refused, so the connection is closed.
        Protocol::Http2 if counted.refused => {}
        // Boxed, so that connections of HTTP/1.1 have no room for its state.
        Protocol::Http2 => {
            let socket = ClientSocket::new(transport, Arc::clone(&counted));
            let naming = |headers: &HeaderMap| {
                let table = gateway.flow.routing_table();
                trust::client(headers, counted.address(), &table.config.server, &gateway.clients.proxies)
            };
            Box::pin(http2::serve(gateway, socket, &counted, &naming, pauses, &ends)).await;
        }
    }
}

struct Opened {
    transport: Transport,
    protocol: Protocol,
    counted: CountedConnection,
    pauses: Pauses,
}

/// Finds out the client and the protocol; `None`: the connection ended, took too long, or must make
/// room for others.
async fn open(mut connection: TcpStream, mut counted: CountedConnection, config: &Config) -> Option<Opened> {
    let server = &config.server;
    let times = |counted: &CountedConnection| {
        let max = if counted.refused { REFUSED_TIME } else { Duration::MAX };
        (server.keepalive.min(max), server.header_timeout.min(max))
    };
    if server.proxy_protocol {
        let (idle, pause) = times(&counted);
        let named = tokio::select! {
            biased;
            // Boxed, because it has a buffer that most gateways do not need.
            named = Box::pin(proxy_protocol::read(&mut connection, &counted, server, idle, pause)) => named.ok()?,
            () = counted.gave_way() => return None,
        };
        if let Some(client) = named {
            counted = counted.named(client, server)?;
        }
    }
    let (idle, pause) = times(&counted);
    let (transport, protocol) = tokio::select! {
        biased;
        established = Transport::establish(connection, &counted, config, idle, pause) => established?,
        () = counted.gave_way() => return None,
    };
    Some(Opened { transport, protocol, counted, pauses: Pauses { preface: pause, idle, send: config.timeouts.send } })
}

/// Serves the requests of a connection one after the other. pingora's loop has an HTTP/2 part that
/// would add almost 4 KB for each open stream.
async fn serve_http1(
    gateway: &Arc<Gateway>,
    transport: Transport,
    counted: Arc<CountedConnection>,
    stop: &watch::Receiver<bool>,
) {
    let mut next = Some(ReusedHttpStream::new(Box::new(ClientSocket::new(transport, counted)), None));
    while let Some(stream) = next {
        next = gateway.serve_next(session_of(stream), stop).await;
    }
}

/// A separate function: a variable would be part of the future, 680 bytes.
fn session_of(stream: ReusedHttpStream) -> ServerSession {
    let (stream, settings) = stream.consume();
    let mut session = ServerSession::new_http1(stream);
    if let Some(settings) = settings {
        settings.apply_to_session(&mut session);
    }
    session
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connections in the accept queue of `port`, from `/proc/net/tcp`.
    fn completed(port: u16) -> usize {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let local = format!("0100007F:{port:04X}");
        let mut fields = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let listening = fields.find(|fields| fields[1] == local && fields[3] == "0A").unwrap();
        usize::from_str_radix(listening[4].split(':').nth(1).unwrap(), 16).unwrap()
    }

    #[tokio::test]
    async fn a_connection_whose_client_has_vanished_is_probed() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let socket = SockRef::from(&accepted);
        assert!(socket.keepalive().unwrap());
        let times = (socket.tcp_keepalive_time().unwrap(), socket.tcp_keepalive_interval().unwrap());
        assert_eq!(times, (PROBE_AFTER, PROBE_INTERVAL));
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), PROBES);
        assert_eq!(socket.tcp_notsent_lowat().unwrap(), UNSENT);
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
