//! Sockets that another process has opened: the gateway that is upgraded, or systemd (socket activation).
//!
//! systemd passes sockets from descriptor 3 on, and says so in `LISTEN_FDS` and `LISTEN_PID`. A socket is taken for the port whose
//! address it has. An address that is configured and was not passed is opened by the gateway itself.

use std::net::{SocketAddr, TcpListener};

use listenfd::ListenFd;

use crate::config::{Config, Server};

/// Sockets that listen already.
#[derive(Debug, Default)]
pub struct Sockets {
    pub(super) client: Option<TcpListener>,
    pub(super) admin: Option<TcpListener>,
}

impl Sockets {
    /// Those that systemd has opened for this process; none where it was started in another way.
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

/// Whether a socket at `address` is meant for clients: it has the configured address, or all addresses and that port. The admin
/// port must have its own, since who may use it depends on that.
fn is_for_clients(configured: SocketAddr, address: SocketAddr) -> bool {
    configured == address || address.ip().is_unspecified() && configured.port() == address.port()
}
