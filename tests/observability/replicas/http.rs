//! One HTTP/1.0 request to a loopback port.
//!
//! Each request opens a new connection.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the status and the body of the response, or `None` if it is not complete.
pub(crate) fn http(port: u16, request: &str, headers: &str, body: &str) -> Option<(u16, String)> {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).ok()?;
    socket.set_read_timeout(Some(TIMEOUT)).ok()?;
    let length = body.len();
    let head = format!("{request} HTTP/1.0\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {length}\r\n{headers}\r\n");
    socket.write_all((head + body).as_bytes()).ok()?;
    let mut reply = Vec::new();
    socket.read_to_end(&mut reply).ok()?;
    let reply = String::from_utf8(reply).ok()?;
    let (head, body) = reply.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}
