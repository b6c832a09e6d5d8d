//! HTTP/2 to clients, over TLS and in plain text.
//!
//! Requests share a connection, and the gateway bounds what a client may do with it.

use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, SendStream};
use http::{Request, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::client::{CHAT, STREAMED, TIMEOUT, TestClient, chat};
use crate::engine::{COMPLETION, Engine, STREAM, Step, chunk, completion, ending, event, gated_stream, send};
use crate::http2_client::{over, plain, rest, until};
use crate::test_gateway::{TestGateway, eventually, eventually_within};
use crate::tunnel::{Files, connect};

/// Time in which an engine must see that a client has left.
const SOON: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_passes_at_once_over_tls_and_in_plain_text() {
    for secure in [true, false] {
        let (files, engine) = (Files::new(), Engine::always(gated_stream()).await);
        let own = files.server();
        let sets: Vec<&str> = own.iter().map(String::as_str).collect();
        let gateway = TestGateway::over(&[engine.url()], if secure { &sets } else { &[] }).await;
        let (client, _driver) = if secure {
            let stream = connect(gateway.address(), files.client(&["h2", "http/1.1"])).await.unwrap();
            assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
            over(stream).await
        } else {
            plain(&gateway).await
        };
        for (method, path) in [("GET", "/health"), ("HEAD", "/v1/models")] {
            assert_eq!(client.request(method, path, "").await, (StatusCode::OK, String::new()), "{path}");
        }
        let response = client.chat(STREAMED).await.head().await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["x-sluice-backend"], "b0");
        assert!(response.headers().contains_key("x-request-id") && !response.headers().contains_key("connection"));
        let mut body = response.into_body();
        assert_eq!(until(&mut body, "one").await, event("one"));
        engine.open_gate();
        assert_eq!(until(&mut body, "two").await, event("two"));
        engine.open_gate();
        assert_eq!(rest(body).await, (ending(), None));
        assert!(engine.seen()[0].head.starts_with("POST /v1/chat/completions HTTP/1.1"), "the engine gets HTTP/1.1");
        gateway.settled().await;
    }
}

/// Sends `size` bytes. Returns the reason if the gateway resets the stream meanwhile.
async fn send_all(mut sending: SendStream<Bytes>, size: usize) -> Option<Reason> {
    let mut left = size;
    while left > 0 {
        sending.reserve_capacity(left.min(64 << 10));
        match timeout(TIMEOUT, poll_fn(|cx| sending.poll_capacity(cx))).await.expect("the window stays shut") {
            Some(Ok(room)) if sending.send_data(Bytes::from(vec![b'y'; room.min(left)]), room >= left).is_ok() => {
                left = left.saturating_sub(room);
            }
            _ => return timeout(TIMEOUT, poll_fn(|cx| sending.poll_reset(cx))).await.ok()?.ok(),
        }
    }
    None
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_arrives_while_the_client_still_sends_its_body_and_no_reset_follows() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.max_body=\"100KiB\""]).await;
    let (client, _driver) = plain(&gateway).await;
    for (path, status, code) in [("/nope", 404, "route_not_found"), ("/v1/chat/completions", 413, "body_too_large")] {
        for size in [1_000, 300_000, 3_000_000, 30_000_000] {
            let call = client.open("POST", path, "{", true).await.unwrap();
            let sending = tokio::spawn(send_all(call.sending, size));
            let response = timeout(TIMEOUT, call.response).await.expect("no response");
            if size == 1_000 && status == 413 {
                // The gateway reads this body, because it is small, and answers that it is not
                // JSON.
                assert_eq!(response.unwrap().status(), 400);
            } else {
                let response = response.unwrap_or_else(|error| panic!("{path}, {size} bytes: {error}"));
                assert_eq!(response.status(), status, "{path}, {size} bytes");
                let (text, broken) = rest(response.into_body()).await;
                assert!(text.contains(code) && broken.is_none(), "{path}, {size} bytes: {broken:?} {text}");
            }
            assert_eq!(sending.await.unwrap(), None, "{path}, {size} bytes: the body was cut");
        }
    }
    // If a client never ends the body of a refused request, the gateway ends the stream.
    let call = client.open("POST", "/nope", "{", true).await.unwrap();
    let (response, mut sending) = (call.response, call.sending);
    assert_eq!(timeout(TIMEOUT, response).await.unwrap().unwrap().status(), 404);
    let reset = timeout(2 * TIMEOUT, poll_fn(|cx| sending.poll_reset(cx))).await.expect("the stream stays open");
    assert_eq!(reset.unwrap(), Reason::NO_ERROR);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_versions_are_served_on_one_port() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let (client, _driver) = plain(&gateway).await;
    let mut first = gateway.client().await;
    for _ in 0..3 {
        assert_eq!(client.request("POST", "/v1/chat/completions", CHAT).await, (StatusCode::OK, COMPLETION.to_owned()));
        assert_eq!(first.request(chat(CHAT)).await.text(), COMPLETION);
    }
    // A request and the preface arrive byte by byte. Neither is mistaken for the other.
    let mut slow = gateway.client().await;
    slow.send_bytewise(&chat(CHAT)).await;
    assert_eq!(slow.response().await.text(), COMPLETION);
    let mut slow = TcpStream::connect(gateway.address()).await.unwrap();
    slow.set_nodelay(true).unwrap();
    for byte in b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0" {
        slow.write_all(&[*byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    let mut settings = [0; 9];
    timeout(TIMEOUT, slow.read_exact(&mut settings)).await.unwrap().unwrap();
    assert_eq!((settings[3], settings[4]), (4, 0), "the gateway sends its settings");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_reset_ends_its_request_and_no_other() {
    // Three requests run: a stream in progress, one before its first token, one without any
    // response. A fourth request waits.
    let script = |number, _: &_| match number {
        0 => gated_stream(),
        1 => vec![send(STREAM), Step::Silence],
        _ => vec![Step::Silence],
    };
    let engine = Engine::start(script).await;
    let gateway = TestGateway::over(&[engine.url()], &["pool.only.slots=3"]).await;
    let (client, _driver) = plain(&gateway).await;
    let mut running = client.chat(STREAMED).await.head().await.into_body();
    assert_eq!(until(&mut running, "one").await, event("one"));
    let mut calls = Vec::new();
    for count in 2..=3 {
        calls.push(client.chat(STREAMED).await);
        eventually("the engine has it", async || engine.count() == count).await;
    }
    calls.push(client.chat(STREAMED).await);
    eventually("one waits", async || gateway.load() == (3, 1)).await;
    // The client resets the fourth request while it waits. It ends two of the running requests by
    // dropping them.
    let mut waiting = calls.pop().unwrap();
    waiting.sending.send_reset(Reason::CANCEL);
    eventually_within(SOON, "the queue is left", async || gateway.load() == (3, 0)).await;
    for left in 1..=2 {
        drop(calls.pop());
        eventually_within(SOON, "the engine sees it", async || engine.left() == left).await;
        eventually_within(SOON, "its lease is free", async || gateway.load() == (3 - left, 0)).await;
    }
    gateway.recorded("client_gone", 3.0).await;
    engine.open_gate();
    engine.open_gate();
    assert_eq!(rest(running).await, (event("two") + &ending(), None));
    // The client resets a stream in the middle.
    let engine = Engine::always(gated_stream()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let (client, _driver) = plain(&gateway).await;
    let mut bodies = Vec::new();
    for _ in 0..2 {
        let mut body = client.chat(STREAMED).await.head().await.into_body();
        until(&mut body, "one").await;
        bodies.push(body);
    }
    drop(bodies.pop());
    eventually_within(SOON, "the engine sees it", async || engine.left() == 1).await;
    engine.open_gate();
    engine.open_gate();
    assert_eq!(rest(bodies.pop().unwrap()).await, (event("two") + &ending(), None));
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_ends_ends_all_of_its_requests() {
    let files = Files::new();
    let own = files.server();
    let sets: Vec<&str> = own.iter().map(String::as_str).chain(["pool.only.slots=4"]).collect();
    for secure in [true, false] {
        let engine = Engine::start(|number, _| if number < 2 { gated_stream() } else { vec![Step::Silence] }).await;
        let gateway = TestGateway::over(&[engine.url()], if secure { &sets } else { &sets[2..] }).await;
        let (client, driver) = match secure {
            true => over(connect(gateway.address(), files.client(&["h2"])).await.unwrap()).await,
            false => plain(&gateway).await,
        };
        let mut open = Vec::new();
        for _ in 0..2 {
            let mut body = client.chat(STREAMED).await.head().await.into_body();
            until(&mut body, "one").await;
            open.push(body);
        }
        let mut calls = Vec::new();
        for _ in 0..4 {
            calls.push(client.chat(STREAMED).await);
        }
        eventually("four run, two wait", async || gateway.load() == (4, 2) && engine.count() == 4).await;
        // Closes the socket without a GOAWAY frame.
        driver.abort();
        eventually_within(SOON, "the engine sees all of them", async || engine.left() == 4).await;
        gateway.settled_within(SOON).await;
        gateway.recorded("client_gone", 6.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_says_go_away_and_lets_streams_finish() {
    let engine = Engine::always(gated_stream()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let (client, driver) = plain(&gateway).await;
    let (idle, idle_driver) = plain(&gateway).await;
    assert_eq!(idle.request("GET", "/health", "").await.0, StatusCode::OK);
    let mut body = client.chat(STREAMED).await.head().await.into_body();
    until(&mut body, "one").await;
    let stopping = gateway.begin_stop();
    let ended = timeout(TIMEOUT, idle_driver).await.expect("an idle connection ends").unwrap();
    assert!(ended.is_ok(), "in order: {ended:?}");
    eventually("no new request is taken", async || match client.open("GET", "/health", "", false).await {
        Err(_) => true,
        Ok(call) => timeout(TIMEOUT, call.response).await.expect("no response").is_err(),
    })
    .await;
    assert!(!stopping.is_finished());
    engine.open_gate();
    engine.open_gate();
    assert_eq!(rest(body).await, (event("two") + &ending(), None));
    assert!(timeout(TIMEOUT, driver).await.expect("the connection ends").unwrap().is_ok());
    assert!(timeout(TIMEOUT, stopping).await.expect("the stop ends").unwrap());
    assert_eq!(engine.left(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_any_size_arrive_unchanged() {
    let engine = Engine::start(|_, seen| vec![Step::Send(crate::engine::json(&seen.body))]).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let (client, _driver) = plain(&gateway).await;
    for size in [1, 16_384, 65_536, 3_000_000] {
        let body = CHAT.replace("hi", &"x".repeat(size));
        let (status, echo) = client.request("POST", "/v1/chat/completions", &body).await;
        assert!(status == StatusCode::OK && echo == body, "{size}: {status}, {} bytes", echo.len());
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_or_a_broken_response_ends_its_stream_and_not_the_connection() {
    let broken = vec![send(STREAM.to_owned() + &chunk(&event("one"))), Step::Close];
    let engine = Engine::start(move |number, _| if number == 0 { broken.clone() } else { completion() }).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.max_body=1000"]).await;
    let (client, _driver) = plain(&gateway).await;
    // Each body is unfinished when the request is refused.
    let route = client.open("POST", "/v1/nothing", "{", true).await.unwrap();
    assert_eq!(route.head().await.status(), StatusCode::NOT_FOUND);
    let large = client.open("POST", "/v1/chat/completions", &"x".repeat(2_000), true).await.unwrap().head().await;
    assert_eq!(large.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert!(rest(large.into_body()).await.0.contains("body_too_large"));
    let (said, reset) = rest(client.chat(STREAMED).await.head().await.into_body()).await;
    assert!(said.starts_with(&event("one")) && said.contains("\"error\""), "{said}");
    assert!(reset.is_some(), "no fake finish");
    let mut many = Request::builder().method("POST").uri("http://gate/v1/chat/completions");
    for number in 0..200 {
        many = many.header(format!("x-{number}"), "y");
    }
    let mut requests = client.0.clone().ready().await.unwrap();
    let (response, _) = requests.send_request(many.body(()).unwrap(), true).unwrap();
    assert_eq!(
        timeout(TIMEOUT, response).await.unwrap().unwrap().status(),
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
    );
    assert_eq!(client.request("POST", "/v1/chat/completions", CHAT).await, (StatusCode::OK, COMPLETION.to_owned()));
    gateway.settled().await;
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn post_head(stream: u32) -> Vec<u8> {
    let path = b"/v1/chat/completions";
    let mut block = vec![0x83, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
    block.extend_from_slice(path);
    block.extend_from_slice(b"\x01\x04gate");
    frame(1, 4, stream, &block)
}

/// Sends frames as fast as the gateway takes them. Returns the gateway's frames (kind, stream,
/// payload) when the gateway has closed the connection, or when `enough` is true for the frames so
/// far.
async fn raw(
    gateway: &TestGateway,
    frames: Vec<u8>,
    enough: impl Fn(&[(u8, u32, Vec<u8>)]) -> bool,
) -> Vec<(u8, u32, Vec<u8>)> {
    let (mut reading, mut writing) = TcpStream::connect(gateway.address()).await.unwrap().into_split();
    let writing = tokio::spawn(async move {
        let hello = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &frame(4, 0, 0, &[])[..]].concat();
        let _ = writing.write_all(&hello).await;
        let _ = writing.write_all(&frames).await;
        writing
    });
    let (mut unread, mut found) = (Vec::new(), Vec::new());
    while !enough(&found) {
        let read = timeout(TIMEOUT, reading.read_buf(&mut unread)).await;
        if read.unwrap_or_else(|_| panic!("neither closed nor enough: {found:?}")).unwrap_or(0) == 0 {
            break;
        }
        while unread.len() >= 9 {
            let length = u32::from_be_bytes([0, unread[0], unread[1], unread[2]]) as usize;
            if unread.len() < 9 + length {
                break;
            }
            let stream = u32::from_be_bytes([unread[5], unread[6], unread[7], unread[8]]);
            found.push((unread[3], stream, unread[9..9 + length].to_vec()));
            unread.drain(..9 + length);
        }
    }
    writing.abort();
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floods_of_costly_frames_end_the_connection_and_hold_up_no_other() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let (client, _driver) = plain(&gateway).await;
    let cancel = 8_u32.to_be_bytes();
    let resets: Vec<u8> =
        (0..20_000).flat_map(|n| [post_head(2 * n + 1), frame(3, 0, 2 * n + 1, &cancel)].concat()).collect();
    let nameless = |flags, stream| frame(1, flags, stream, &[0x83, 0x86, 0x84]);
    let floods = [
        ("rapid reset", resets),
        ("ping", frame(6, 0, 0, &[0; 8]).repeat(20_000)),
        ("settings", frame(4, 0, 0, &[]).repeat(20_000)),
        ("empty data", [post_head(1), frame(0, 0, 1, &[]).repeat(20_000)].concat()),
        ("continuation", [nameless(0, 1), frame(9, 0, 1, &[]).repeat(20_000)].concat()),
        ("priority", frame(2, 0, 1, &[0, 0, 0, 3, 7]).repeat(20_000)),
        ("requests without an authority", (0..20_000).flat_map(|n| nameless(5, 2 * n + 1)).collect()),
    ];
    for (name, flood) in floods {
        let said = raw(&gateway, flood, |_| false).await;
        let goaway = said.iter().find(|(kind, ..)| *kind == 7).map(|(.., payload)| payload[4..8].to_vec());
        // If the gateway closes the socket with unread bytes, the reset may lose the last frames.
        assert!(goaway.is_none() || goaway == Some(vec![0, 0, 0, 11]), "{name}: {goaway:?}");
        assert_eq!(client.request("POST", "/v1/chat/completions", CHAT).await.1, COMPLETION, "{name}");
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_beyond_the_bound_are_refused_and_can_be_tried_again() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    // 200 requests whose bodies do not come. The gateway accepts 128 of them.
    let heads = (0..200).flat_map(|number| post_head(2 * number + 1)).collect();
    let refused = |found: &[(u8, u32, Vec<u8>)]| {
        found.iter().filter(|(kind, _, payload)| *kind == 3 && payload[..] == 7_u32.to_be_bytes()).count()
    };
    let found = raw(&gateway, heads, |found| refused(found) >= 72).await;
    assert_eq!(refused(&found), 72, "REFUSED_STREAM");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_share_a_connection_count_as_connections() {
    let engine = Engine::always(gated_stream()).await;
    let limits = ["server.max_connections=4", "server.max_connections_per_address=4"];
    let gateway = TestGateway::over(&[engine.url()], &limits).await;
    let (client, _driver) = plain(&gateway).await;
    let mut running = Vec::new();
    for _ in 0..3 {
        let mut body = client.chat(STREAMED).await.head().await.into_body();
        until(&mut body, "one").await;
        running.push(body);
    }
    let refused = timeout(TIMEOUT, client.chat(STREAMED).await.response).await.unwrap().unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::REFUSED_STREAM));
    let mut other = TestClient::to(gateway.address()).await;
    other.request(chat(CHAT)).await.is(503, "too_many_connections");
    drop(running.pop());
    eventually("there is room", async || {
        let response = timeout(TIMEOUT, client.chat(STREAMED).await.response).await.unwrap();
        response.is_ok()
    })
    .await;
    drop(running);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_without_requests_is_closed_in_order() {
    let engine = Engine::always(gated_stream()).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.keepalive=200ms"]).await;
    let (client, driver) = plain(&gateway).await;
    let mut body = client.chat(STREAMED).await.head().await.into_body();
    until(&mut body, "one").await;
    // The gateway closes a connection that is silent from the start, and a connection that only
    // begins a head, but not a connection with a request.
    for opened in [Vec::new(), frame(1, 0, 1, &[0x83])] {
        let said = raw(&gateway, opened, |_| false).await;
        assert!(said.iter().any(|(kind, ..)| *kind == 7), "GOAWAY: {said:?}");
    }
    engine.open_gate();
    engine.open_gate();
    assert_eq!(rest(body).await, (event("two") + &ending(), None));
    assert!(timeout(TIMEOUT, driver).await.expect("closed once it is idle").unwrap().is_ok());
    gateway.settled().await;
}
