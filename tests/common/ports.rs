//! Ports for servers that tests start as processes; no port is returned twice.
//!
//! The operating system may give any free ephemeral port to an outgoing connection, so the ports of
//! this module lie below the ephemeral range. A lock file per port keeps concurrent test programs
//! from choosing the same port.

use parking_lot::Mutex;
use std::fs::File;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU16, Ordering};

/// Below the range of `net.ipv4.ip_local_port_range`, which begins at 32768 by default.
const PORTS: std::ops::Range<u16> = 12_000..32_000;

/// Lock files, held until the process ends.
static LOCKS: Mutex<Vec<File>> = Mutex::new(Vec::new());
static NEXT: AtomicU16 = AtomicU16::new(0);

pub(crate) fn free_port() -> u16 {
    let folder = std::env::temp_dir().join("sluice-test-ports");
    std::fs::create_dir_all(&folder).unwrap();
    // Processes begin at different ports, so that they seldom try the same one.
    let begin = std::process::id().wrapping_mul(7_919) as usize;
    for _ in PORTS {
        let step = NEXT.fetch_add(1, Ordering::Relaxed) as usize;
        let port = PORTS.start + ((begin + step) % PORTS.len()) as u16;
        let lock = File::options().create(true).append(true).open(folder.join(port.to_string())).unwrap();
        // The test connects to the port and does not listen on it, because every process that
        // another thread starts meanwhile would inherit a listener for a moment.
        let is_free =
            || TcpStream::connect(("127.0.0.1", port)).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
        if lock.try_lock().is_ok() && is_free() {
            LOCKS.lock().push(lock);
            return port;
        }
    }
    panic!("no free port in {PORTS:?}");
}
