//! Notifies systemd (`Type=notify`; see sd_notify(3)). Without systemd, nothing happens.
//!
//! systemd learns when the gateway serves or stops, and which process goes on after an upgrade. A
//! failure is a warning in the log.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends lines such as `READY=1` to the socket in `NOTIFY_SOCKET`.
pub fn notify(state: &str) {
    let Some(socket) = env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()) else { return };
    let send = || -> io::Result<()> {
        let address = match socket.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&socket)?,
        };
        UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address)?;
        Ok(())
    };
    if let Err(error) = send() {
        tracing::warn!(%error, "systemd does not learn {state:?}: NOTIFY_SOCKET={}", socket.display());
    }
}
