//! Proxies that name their clients, in the header `X-Forwarded-For`, or by the PROXY protocol
//! before TLS and HTTP.

use std::path::Path;

use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::client::{TIMEOUT, TestClient};
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, access_log, eventually};
use crate::tunnel::Files;

/// The PROXY header, version 2, of a client at 192.0.2.33.
const V2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c\xc0\x00\x02\x21\x0a\x00\x00\x01\xdc\x04\x01\xbb";
/// The PROXY header, version 1, of the same client.
const V1: &[u8] = b"PROXY TCP4 192.0.2.33 10.0.0.1 56324 443\r\n";

/// A request that the gateway refuses, so that it leaves a line in the access log.
fn unknown(headers: &str) -> String {
    format!("GET /v1/nothing HTTP/1.1\r\nhost: gate\r\n{headers}\r\n")
}

async fn gateway(log: &Path, sets: &[&str]) -> (Engine, TestGateway) {
    let engine = Engine::always(completion()).await;
    let log = format!("access_log={{path=\"{}\", client_address=true}}", log.display());
    let sets = [&[log.as_str(), "server.trusted_proxies=[\"127.0.0.1\"]"], sets].concat();
    let gateway = TestGateway::over(&[engine.url()], &sets).await;
    (engine, gateway)
}

async fn clients(log: &Path, lines: usize) -> Vec<String> {
    let text = access_log(log, lines).await;
    let client = |line: &str| serde_json::from_str::<Value>(line).unwrap()["client"].as_str().unwrap().to_owned();
    text.lines().map(client).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trusted_proxy_names_the_client_in_a_header_and_no_one_else_does() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.log");
    let (_engine, gateway) = gateway(&log, &[]).await;
    let forwarded = unknown("x-forwarded-for: 203.0.113.5, 192.0.2.9\r\n");
    gateway.request(&forwarded).await.is(404, "route_not_found");
    assert_eq!(clients(&log, 1).await, ["192.0.2.9"]);
    let mut other = TestClient::between("127.0.0.2:0".parse().unwrap(), gateway.address()).await;
    other.request(&forwarded).await.is(404, "route_not_found");
    assert_eq!(clients(&log, 2).await[1], "127.0.0.2");
    gateway.counts("sluice_proxy_headers_refused_total", "reason=\"forwarded_untrusted\"", 1.0).await;
    // The header has the same effect over HTTP/2.
    let socket = TcpStream::connect(gateway.address()).await.unwrap();
    let (mut requests, connection) = h2::client::handshake(socket).await.unwrap();
    let _driver = tokio::spawn(connection);
    let request =
        http::Request::get("http://gate/v1/nothing").header("x-forwarded-for", "192.0.2.10").body(()).unwrap();
    let response = requests.send_request(request, true).unwrap().0;
    assert_eq!(timeout(TIMEOUT, response).await.unwrap().unwrap().status(), 404);
    assert_eq!(clients(&log, 3).await[2], "192.0.2.10");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_header_names_the_client_of_a_connection() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.log");
    let (_engine, gateway) = gateway(&log, &["server.proxy_protocol=true"]).await;
    for (number, header) in [V1, V2].into_iter().enumerate() {
        let mut client = gateway.client().await;
        // The PROXY header arrives byte by byte, and its last byte together with the request.
        client.send_bytewise(&header[..header.len() - 1]).await;
        client.send([&header[header.len() - 1..], unknown("").as_bytes()].concat()).await;
        client.response().await.is(404, "route_not_found");
        assert_eq!(clients(&log, number + 1).await[number], "192.0.2.33");
    }
    let mut socket = TcpStream::connect(gateway.address()).await.unwrap();
    socket.write_all(V2).await.unwrap();
    let (http2, _driver) = crate::http2_client::over(socket).await;
    assert_eq!(http2.request("POST", "/v1/nothing", "{}").await.0, 404);
    assert_eq!(clients(&log, 3).await[2], "192.0.2.33");
    // A client that is no trusted proxy connects without a header.
    let mut other = TestClient::between("127.0.0.2:0".parse().unwrap(), gateway.address()).await;
    other.request(unknown("")).await.is(404, "route_not_found");
    assert_eq!(clients(&log, 4).await[3], "127.0.0.2");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_header_stands_before_tls() {
    let (folder, files) = (tempfile::tempdir().unwrap(), Files::new());
    let log = folder.path().join("access.log");
    let own = files.server();
    let sets = [own[0].as_str(), own[1].as_str(), "server.proxy_protocol=true"];
    let (_engine, gateway) = gateway(&log, &sets).await;
    let mut socket = TcpStream::connect(gateway.address()).await.unwrap();
    socket.write_all(V2).await.unwrap();
    let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
    let connector = TlsConnector::from(std::sync::Arc::new(files.client(&["h2"])));
    let secure = timeout(TIMEOUT, connector.connect(name, socket)).await.unwrap().unwrap();
    let (http2, _driver) = crate::http2_client::over(secure).await;
    assert_eq!(http2.request("POST", "/v1/nothing", "{}").await.0, 404);
    assert_eq!(clients(&log, 1).await, ["192.0.2.33"]);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_missing_late_and_foreign_proxy_headers_close_the_connection_and_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.log");
    let sets = ["server.proxy_protocol=true", "server.header_timeout=300ms"];
    let (_engine, gateway) = gateway(&log, &sets).await;
    let cases: [(&str, &str, Vec<u8>); 5] = [
        ("127.0.0.1:0", "malformed", b"PROXY TCP4 one two three four\r\n".to_vec()),
        ("127.0.0.1:0", "missing", unknown("").into_bytes()),
        ("127.0.0.1:0", "timeout", V2[..20].to_vec()),
        ("127.0.0.2:0", "untrusted", V2.to_vec()),
        ("127.0.0.2:0", "untrusted", V1.to_vec()),
    ];
    for (from, reason, sent) in &cases {
        let mut client = TestClient::between(from.parse().unwrap(), gateway.address()).await;
        // The gateway may close while bytes are on their way.
        let _ = client.try_send(sent).await;
        assert_eq!(client.closed().await, "", "{reason}");
    }
    for (reason, count) in [("malformed", 1.0), ("missing", 1.0), ("timeout", 1.0), ("untrusted", 2.0)] {
        gateway.counts("sluice_proxy_headers_refused_total", &format!("reason=\"{reason}\""), count).await;
    }
    eventually("nothing is open", async || gateway.metric("sluice_client_connections", &[]).await == 0.0).await;
    gateway.settled().await;
}
