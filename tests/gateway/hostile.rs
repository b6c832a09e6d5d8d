//! Requests that are made to confuse a server. Each gets the one right response, and the connection
//! ends if the next request cannot be found.
//!
//! The statuses are the same as those of nginx 1.22, with these exceptions: nginx answers 501 where
//! the gateway answers 400 (`chunked` twice, an empty or unknown last coding, a parameter), answers
//! 400 or 405 to CONNECT, and accepts a user in `Host`.

use crate::client::{CHAT, TestClient, chat, get};
use crate::engine::{COMPLETION, Engine, completion};
use crate::test_gateway::TestGateway;

async fn plain() -> (Engine, TestGateway) {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    (engine, gateway)
}

fn raw(headers: &str, body: &str) -> String {
    format!("POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\n{body}")
}

fn chunked(body: &str) -> String {
    raw("host: gate\r\ntransfer-encoding: chunked\r\n", body)
}

fn whole() -> String {
    format!("{:x}\r\n{CHAT}\r\n0\r\n\r\n", CHAT.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_whose_end_is_in_doubt_get_their_response_and_a_closed_connection() {
    let (engine, gateway) = plain().await;
    let length = CHAT.len();
    let sized = format!("content-length: {length}\r\n");
    let coded = |line: &str| raw(&format!("host: gate\r\n{line}"), &whole());
    let table = [
        // `Host` (RFC 9112, 3.2) and `Content-Length` (6.3).
        ("no host", raw(&sized, CHAT), 400),
        ("two hosts", raw(&format!("host: a\r\nhost: a\r\n{sized}"), CHAT), 400),
        ("a host with a path", raw(&format!("host: a/b\r\n{sized}"), CHAT), 400),
        ("a host with a user", raw(&format!("host: u@a\r\n{sized}"), CHAT), 400),
        ("an empty host", raw(&format!("host:\r\n{sized}"), CHAT), 400),
        ("the same length twice", raw(&format!("host: gate\r\n{sized}{sized}"), CHAT), 400),
        (
            "the same length twice in a line",
            raw(&format!("host: gate\r\ncontent-length: {length}, {length}\r\n"), CHAT),
            400,
        ),
        ("no host, GET", "GET /health HTTP/1.1\r\n\r\n".to_owned(), 400),
        // Transfer codings: RFC 9112, 6.1.
        ("an unknown coding before chunked", coded("transfer-encoding: gzip, chunked\r\n"), 501),
        (
            "an unknown coding in a line of its own",
            coded("transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n"),
            501,
        ),
        ("chunked twice", coded("transfer-encoding: chunked, chunked\r\n"), 400),
        ("chunked twice in two lines", coded("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"), 400),
        ("chunked is not last", coded("transfer-encoding: chunked, gzip\r\n"), 400),
        ("identity", coded("transfer-encoding: identity\r\n"), 400),
        ("an empty coding", coded("transfer-encoding:\r\n"), 400),
        ("a list with an empty place", coded("transfer-encoding: ,chunked\r\n"), 501),
        ("a vertical tab in front", coded("transfer-encoding: \x0bchunked\r\n"), 400),
        ("a parameter", coded("transfer-encoding: chunked;q=1\r\n"), 400),
        ("a coding in HTTP/1.0", coded("transfer-encoding: chunked\r\n").replace("HTTP/1.1", "HTTP/1.0"), 400),
        // Chunks: RFC 9112, 7.1.
        ("a size that is no number", chunked("what\r\n"), 400),
        ("a size in 0x notation", chunked(&whole().replacen("39", "0x39", 1)), 400),
        ("a negative size", chunked("-1\r\n\r\n0\r\n\r\n"), 400),
        ("a size with a sign", chunked("+1\r\na\r\n0\r\n\r\n"), 400),
        ("a size over 64 bits", chunked("fffffffffffffffff\r\n"), 400),
        ("a size near 64 bits", chunked("fffffffffffffffe\r\na"), 400),
        ("a blank in front of the size", chunked(" 1\r\na\r\n0\r\n\r\n"), 400),
        ("a chunk longer than its size", chunked("1\r\nab\r\n0\r\n\r\n"), 400),
        ("a chunk without its end", chunked("1\r\na0\r\n\r\n"), 400),
        ("a size without its line feed", chunked("1\ra\r\n0\r\n\r\n"), 400),
        // The request line.
        ("CONNECT", "CONNECT gate:443 HTTP/1.1\r\nhost: gate:443\r\n\r\n".to_owned(), 501),
        ("CONNECT without a host", "CONNECT gate:443 HTTP/1.1\r\n\r\n".to_owned(), 501),
        ("CONNECT of a path", "CONNECT /v1/chat/completions HTTP/1.1\r\nhost: gate\r\n\r\n".to_owned(), 501),
    ];
    for (what, request, status) in table {
        let mut client = gateway.client().await;
        // The next request must not be served, because the gateway does not know where it begins.
        client.send([request.as_bytes(), &chat(CHAT)].concat()).await;
        let response = client.response().await;
        assert_eq!(response.status(), status, "{what}: {}", response.text());
        response.code();
        assert_eq!(response.head.header("connection"), Some("close"), "{what}");
        assert_eq!(client.closed().await, "", "{what}: something was served behind it");
    }
    assert_eq!(engine.count(), 0, "none of them reached the engine");
    assert_eq!(gateway.request(chat(CHAT)).await.text(), COMPLETION);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusual_requests_that_are_valid_are_served() {
    let (engine, gateway) = plain().await;
    let sized = format!("content-length: {}\r\n", CHAT.len());
    for (what, request) in [
        ("a coding in capitals", chunked(&whole()).replace("chunked", "CHUNKED")),
        ("blanks around the coding", chunked(&whole()).replace(" chunked", " \t chunked \t")),
        ("chunk extensions", chunked(&whole().replacen("\r\n", ";name=\"v\"\r\n", 1))),
        ("zeros in front of the size", chunked(&format!("000{}", whole()))),
        ("trailers", chunked(&whole().replace("0\r\n\r\n", "0\r\nx-sum: 1\r\n\r\n"))),
        ("a host with a port", raw(&format!("host: gate:8080\r\n{sized}"), CHAT)),
        ("an IPv6 host", raw(&format!("host: [::1]:8080\r\n{sized}"), CHAT)),
        ("a host with an underscore", raw(&format!("host: my_gate\r\n{sized}"), CHAT)),
        ("an absolute target", raw(&format!("host: gate\r\n{sized}"), CHAT).replace("POST ", "POST http://gate")),
        ("line breaks in front", format!("\r\n\r\n{}", raw(&format!("host: gate\r\n{sized}"), CHAT))),
        ("no host in HTTP/1.0", raw(&sized, CHAT).replace("HTTP/1.1", "HTTP/1.0")),
    ] {
        let response = gateway.request(&request).await;
        assert_eq!((response.status(), response.text().as_str()), (200, COMPLETION), "{what}");
        assert_eq!(engine.seen().last().unwrap().body, CHAT.as_bytes(), "{what}");
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offer_of_http_2_is_ignored_as_by_nginx_and_haproxy() {
    let (engine, gateway) = plain().await;
    // The head that Java's HttpClient sends with every request by default.
    let offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n";
    let mut client = gateway.client().await;
    for _ in 0..2 {
        let response = client.request(crate::client::post("/v1/chat/completions", offer, CHAT.as_bytes())).await;
        assert_eq!((response.status(), response.text().as_str()), (200, COMPLETION));
        assert_eq!(response.head.header("upgrade"), None);
    }
    let response = client.request(format!("GET /health HTTP/1.1\r\nhost: gate\r\n{offer}\r\n")).await;
    assert_eq!(response.status(), 200);
    for seen in engine.seen() {
        assert_eq!(seen.body, CHAT.as_bytes());
        for name in ["upgrade", "http2-settings", "connection"] {
            assert_eq!(seen.header(name), None, "{}", seen.head);
        }
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_http_1_0_gets_no_100_continue() {
    let (_engine, gateway) = plain().await;
    for expected in ["100-continue", "a-miracle"] {
        let head = format!("host: gate\r\nexpect: {expected}\r\ncontent-length: {}\r\n", CHAT.len());
        let mut client = gateway.client().await;
        client.send(raw(&head, CHAT).replace("HTTP/1.1", "HTTP/1.0")).await;
        let response = client.response().await;
        assert_eq!((response.status(), response.text().as_str()), (200, COMPLETION), "expect is ignored");
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_reaches_a_client_that_goes_on_sending() {
    let (_engine, gateway) = plain().await;
    for bad in [chunked("what\r\n"), raw("content-length: 5\r\n", "12345")] {
        let mut client = gateway.client().await;
        client.send(bad).await;
        // If the gateway closed a socket with unread bytes, the kernel would reset the connection,
        // and the response would be lost.
        let (sent, response) = client.send_while_reading(&[b'x'; 64 << 10], 40).await;
        response.is(400, "invalid_request");
        assert!(sent, "the connection was reset while the client was sending");
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_without_end_is_refused_before_it_fills_the_memory() {
    let (_engine, gateway) = plain().await;
    for piece in ["x-filler: 1\r\n".repeat(600), "x".repeat(8_000)] {
        let mut client = gateway.client().await;
        client.send("GET /health HTTP/1.1\r\nhost: gate\r\nx: ").await;
        let (_, response) = client.send_while_reading(piece.as_bytes(), 100).await;
        response.is(431, "headers_too_large");
    }
    gateway.settled().await;
}

/// Sends up to `count` bytes, one after each pause, until there is a response. Returns the number
/// of bytes sent.
async fn drip(client: &mut TestClient, count: usize, pause: std::time::Duration) -> usize {
    for sent in 0..count {
        if client.has_response().await || client.try_send(b"x").await.is_err() {
            return sent;
        }
        tokio::time::sleep(pause).await;
    }
    count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_head_has_one_deadline_from_its_first_byte() {
    let engine = Engine::always(completion()).await;
    let sets = ["server.header_timeout=300ms", "server.keepalive=10m"];
    let gateway = TestGateway::over(&[engine.url()], &sets).await;
    // A connection that has served a request. The gateway may have read a part of the next request
    // together with it.
    let used = async || {
        let mut client = gateway.client().await;
        let both = [&chat(CHAT)[..], b"GET /health HTTP/1.1\r\nx"].concat();
        assert_eq!(client.request(both).await.status(), 200);
        client
    };
    let mut quiet = used().await;
    quiet.response().await.is(408, "header_timeout");
    for mut client in [used().await, gateway.client().await] {
        // Twenty times as long as a head may take.
        let sent = drip(&mut client, 120, std::time::Duration::from_millis(50)).await;
        assert!(sent < 120, "each byte extended the deadline");
        client.response().await.is(408, "header_timeout");
        client.closed().await;
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_is_closed_without_a_word_after_its_keepalive() {
    let engine = Engine::always(completion()).await;
    let sets = ["server.header_timeout=10m", "server.keepalive=200ms"];
    let gateway = TestGateway::over(&[engine.url()], &sets).await;
    let mut used = gateway.client().await;
    // A line break after a body, as some clients send it, does not begin a request.
    assert_eq!(used.request([&chat(CHAT)[..], b"\r\n"].concat()).await.status(), 200);
    let mut fresh = gateway.client().await;
    assert_eq!(used.closed().await, "");
    assert_eq!(fresh.closed().await, "");
    let mut late = gateway.client().await;
    late.send(&get("/health").into_bytes()[..20]).await;
    tokio::time::sleep(std::time::Duration::from_millis(400)).await;
    late.send(&get("/health").into_bytes()[20..]).await;
    assert_eq!(late.response().await.status(), 200, "a head may take longer than a connection may be idle");
}
