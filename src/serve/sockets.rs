//! Sockets that another process has opened: the gateway that is upgraded, or systemd (socket
//! activation).
//!
//! systemd passes sockets from descriptor 3 on, and announces them in `LISTEN_FDS` and
//! `LISTEN_PID`. A socket serves the port with the same address. The gateway opens every other
//! configured address.

use std::net::{SocketAddr, TcpListener};

use listenfd::ListenFd;

use sluice_config::{Config, Server};

/// Listening sockets.
#[derive(Debug, Default)]
pub struct Sockets {
    pub(super) client: Option<TcpListener>,
    pub(super) admin: Option<TcpListener>,
}

impl Sockets {
    /// The sockets that systemd has opened for this process, if it started the process.
    pub fn activated(config: &Config) -> Self {
        let mut passed = ListenFd::from_env();
        let mut sockets = Sockets::default();
        for number in 0..passed.len() {
            match passed.take_tcp_listener(number) {
                Ok(Some(socket)) => sockets.put(socket, &config.server),
                Ok(None) => {}
                Err(error) => tracing::warn!(
                    "socket {number} of systemd is not used: {error}; use ListenStream= with an IP address and a port"
                ),
            }
        }
        sockets
    }

    fn put(&mut self, socket: TcpListener, server: &Server) {
        let Ok(address) = socket.local_addr() else { return };
        let (key, place) = match address {
            address if is_for_clients(server.listen, address) => ("server.listen", &mut self.client),
            address if address == server.admin => ("server.admin", &mut self.admin),
            other => {
                tracing::warn!(
                    "the socket of systemd at {other} is not used: it is neither server.listen ({}) nor server.admin ({})",
                    server.listen,
                    server.admin
                );
                return;
            }
        };
        tracing::info!("{key}: the socket of systemd at {address} is used");
        *place = Some(socket);
    }
}

/// Whether a socket at `address` is for clients: at the configured address, or at all addresses
/// with the configured port. The admin socket must match exactly, because the address decides who
/// may use the socket.
fn is_for_clients(configured: SocketAddr, address: SocketAddr) -> bool {
    configured == address || address.ip().is_unspecified() && configured.port() == address.port()
}
