//! The PROXY header, with which a proxy names the client of a connection (`server.proxy_protocol`).
//!
//! The header comes before TLS and HTTP, in either version of the specification (haproxy.org,
//! proxy-protocol.txt):
//!
//! | header | client |
//! |---|---|
//! | version 2, PROXY, IPv4 or IPv6 over TCP | the source address |
//! | version 2, LOCAL (a health check of the proxy), or another family | the peer |
//! | version 1, `TCP4` or `TCP6` | the source address |
//! | version 1, `UNKNOWN` | the peer |
//!
//! As in HAProxy (`expect-proxy`), a trusted proxy must send a header. A connection of any other
//! client is refused if it begins with a header.
//!
//! Bounds: [`V1_MAX`], [`V2_MAX`]. A header must arrive within `server.header_timeout`.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::clients::CountedConnection;
use crate::telemetry::ProxyFault;
use sluice_config::Server;

const V2_SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
const V1_START: &[u8] = b"PROXY ";
/// Bytes of the longest line of version 1 (specification, 2.1).
const V1_MAX: usize = 107;
/// The most bytes after the start of version 2: up to 216 for addresses, the rest for a client's
/// certificate.
const V2_MAX: usize = 4 << 10;

/// Reads the PROXY header of a connection, and returns the client that it names, if any. Errors are
/// counted and logged.
pub(super) async fn read(
    stream: &mut TcpStream,
    counted: &CountedConnection,
    server: &Server,
    idle: Duration,
    pause: Duration,
) -> Result<Option<IpAddr>, ()> {
    let (from, reports) = (counted.address(), &counted.limits().proxies);
    let refuse = |fault| {
        reports.report(fault, from);
        Err(())
    };
    if !server.is_trusted_proxy(from) {
        let mut first = [0; V2_SIGNATURE.len()];
        let seen = timeout(idle, stream.peek(&mut first)).await.map_err(|_| ())?.map_err(|_| ())?;
        let seen = &first[..seen];
        let is_header = seen.starts_with(V1_START) || seen == V2_SIGNATURE;
        return if is_header { refuse(ProxyFault::Untrusted) } else { Ok(None) };
    }
    match timeout(pause, header(stream)).await {
        Ok(Ok(client)) => Ok(client.map(|client| client.to_canonical())),
        Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => refuse(ProxyFault::Malformed),
        Ok(Err(error)) if error.kind() == io::ErrorKind::Unsupported => refuse(ProxyFault::Missing),
        // A proxy that checks whether the port is open sends nothing.
        Ok(Err(_)) => Err(()),
        Err(_) => refuse(ProxyFault::Timeout),
    }
}

fn malformed() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// Reads a header, and no byte after it. Errors: `Unsupported` if there is none, `InvalidData` if
/// it is malformed.
async fn header(stream: &mut TcpStream) -> io::Result<Option<IpAddr>> {
    // No header of either version is shorter.
    let mut start = [0; V2_SIGNATURE.len()];
    stream.read_exact(&mut start).await?;
    if start == *V2_SIGNATURE {
        version_2(stream).await
    } else if start.starts_with(V1_START) {
        version_1(stream, &start).await
    } else {
        Err(io::ErrorKind::Unsupported.into())
    }
}

async fn version_2(stream: &mut TcpStream) -> io::Result<Option<IpAddr>> {
    let mut fixed = [0; 4];
    stream.read_exact(&mut fixed).await?;
    let [command, family, high, low] = fixed;
    let length = usize::from(u16::from_be_bytes([high, low]));
    if command >> 4 != 2 || length > V2_MAX {
        return Err(malformed());
    }
    let mut addresses = [0; V2_MAX];
    let addresses = &mut addresses[..length];
    stream.read_exact(addresses).await?;
    match (command & 15, family) {
        (0, _) => Ok(None),
        (1, 0x11) => Ok(Some(Ipv4Addr::from(first(addresses, 12)?).into())),
        (1, 0x21) => Ok(Some(Ipv6Addr::from(first(addresses, 36)?).into())),
        // UDP, Unix sockets and unspecified families have no usable address.
        (1, 0x00 | 0x12 | 0x22 | 0x31 | 0x32) => Ok(None),
        _ => Err(malformed()),
    }
}

fn first<const N: usize>(bytes: &[u8], length: usize) -> io::Result<[u8; N]> {
    let source = bytes.first_chunk().filter(|_| bytes.len() >= length);
    source.copied().ok_or_else(malformed)
}

async fn version_1(stream: &mut TcpStream, start: &[u8]) -> io::Result<Option<IpAddr>> {
    let mut line = [0; V1_MAX];
    let mut length = start.len();
    line[..length].copy_from_slice(start);
    // One byte at a time, because the bytes after the line belong to TLS or HTTP.
    while !line[..length].ends_with(b"\r\n") {
        if length == V1_MAX {
            return Err(malformed());
        }
        line[length] = stream.read_u8().await?;
        length += 1;
    }
    let text = std::str::from_utf8(&line[..length - 2]).map_err(|_| malformed())?;
    line_1(text).ok_or_else(malformed)
}

fn line_1(text: &str) -> Option<Option<IpAddr>> {
    let mut words = text.split(' ').skip(1);
    let family = words.next()?;
    if family == "UNKNOWN" {
        return Some(None);
    }
    let (source, _target): (IpAddr, IpAddr) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let ports = [words.next()?.parse::<u16>().is_ok(), words.next()?.parse::<u16>().is_ok()];
    let fine = match family {
        "TCP4" => source.is_ipv4(),
        "TCP6" => source.is_ipv6(),
        _ => false,
    };
    (fine && ports == [true; 2] && words.next().is_none()).then_some(Some(source))
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    /// The result of a read from these bytes, and the number of bytes left.
    async fn read_from(bytes: &[u8]) -> (Result<Option<String>, io::ErrorKind>, usize) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut server = listener.accept().await.unwrap().0;
        client.write_all(bytes).await.unwrap();
        drop(client);
        let read = timeout(Duration::from_secs(20), header(&mut server)).await.expect("it ends");
        let mut rest = Vec::new();
        let left = server.read_to_end(&mut rest).await.unwrap_or_default();
        (read.map(|client| client.map(|client| client.to_string())).map_err(|error| error.kind()), left)
    }

    fn v2(command: u8, family: u8, addresses: &[u8]) -> Vec<u8> {
        let length = (addresses.len() as u16).to_be_bytes();
        [&V2_SIGNATURE[..], &[command, family, length[0], length[1]], addresses].concat()
    }

    #[tokio::test]
    async fn both_versions_name_the_client_and_leave_what_follows() {
        let v4 = [192, 0, 2, 1, 10, 0, 0, 1, 0, 80, 1, 187];
        let v6: Vec<u8> = (1..37).collect();
        let with_fields = [&v4[..], &[4, 0, 1, 0]].concat();
        let cases = [
            (v2(0x21, 0x11, &v4), Some("192.0.2.1")),
            (v2(0x21, 0x11, &with_fields), Some("192.0.2.1")),
            (v2(0x21, 0x21, &v6), Some("102:304:506:708:90a:b0c:d0e:f10")),
            (v2(0x20, 0x00, &[]), None),
            (v2(0x21, 0x31, &[0; 216]), None),
            (b"PROXY TCP4 192.0.2.1 10.0.0.1 56324 443\r\n".to_vec(), Some("192.0.2.1")),
            (b"PROXY TCP6 2001:db8::1 ::1 56324 443\r\n".to_vec(), Some("2001:db8::1")),
            (b"PROXY UNKNOWN\r\n".to_vec(), None),
            (b"PROXY UNKNOWN some thing\r\n".to_vec(), None),
        ];
        for (sent, client) in cases {
            let read = read_from(&[&sent[..], b"GET /"].concat()).await;
            assert_eq!(read, (Ok(client.map(str::to_owned)), 5), "{sent:?}");
        }
    }

    #[tokio::test]
    async fn garbage_is_malformed_or_no_header() {
        use io::ErrorKind::{InvalidData, UnexpectedEof, Unsupported};
        let long = [b"PROXY TCP4 ", &[b'1'; 200][..], b"\r\n"].concat();
        let cases = [
            (b"GET / HTTP/1.1\r\n\r\n".to_vec(), Unsupported),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00".to_vec(), Unsupported),
            (b"PROXY".to_vec(), UnexpectedEof),
            (b"PROXY TCP4 192.0.2.1 10.0.0.1 56324 44".to_vec(), UnexpectedEof),
            (b"PROXY TCP4 192.0.2.1 10.0.0.1 99999 443\r\n".to_vec(), InvalidData),
            (b"PROXY TCP4 2001:db8::1 ::1 1 2\r\n".to_vec(), InvalidData),
            (b"PROXY TCP4 192.0.2.1 10.0.0.1 1 2 3\r\n".to_vec(), InvalidData),
            (b"PROXY TCP9 192.0.2.1 10.0.0.1 1 2\r\n".to_vec(), InvalidData),
            (b"PROXY \xff\xfe\xfd\xfc\xfb\xfa\r\n".to_vec(), InvalidData),
            (long, InvalidData),
            (v2(0x31, 0x11, &[0; 12]), InvalidData),
            (v2(0x22, 0x11, &[0; 12]), InvalidData),
            (v2(0x21, 0x77, &[0; 12]), InvalidData),
            (v2(0x21, 0x11, &[0; 11]), InvalidData),
            (v2(0x21, 0x11, &vec![0; V2_MAX + 1]), InvalidData),
            (v2(0x21, 0x11, &[0; 12])[..20].to_vec(), UnexpectedEof),
        ];
        for (sent, error) in cases {
            assert_eq!(read_from(&sent).await.0, Err(error), "{:?}", &sent[..sent.len().min(40)]);
        }
    }
}
