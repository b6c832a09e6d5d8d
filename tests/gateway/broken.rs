//! Engines that misbehave.
//!
//! The client gets an error or a stream that is visibly broken, never a stream that looks complete.
//! Afterwards the gateway holds no resources of the request.

use crate::client::{CHAT, STREAMED, chat};
use crate::engine::{COMPLETION, Engine, LAST, STREAM, Step, chunk, completion, ending, event, json, send};
use crate::test_gateway::{TestGateway, eventually};

/// A gateway over one engine, which the gateway never ejects, so every request reaches it.
async fn over(steps: Vec<Step>) -> (Engine, TestGateway) {
    let engine = Engine::always(steps).await;
    let gateway = TestGateway::over(&[engine.url()], &["health.failures=1000", "timeouts.idle=2s"]).await;
    (engine, gateway)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_with_an_invalid_head_is_502() {
    let head = "HTTP/1.1 200 OK\r\n";
    for (what, bytes) in [
        ("garbage", b"\x00\x01\x02 what?\r\n\r\n".to_vec()),
        ("another protocol", b"SSH-2.0-OpenSSH_9.6\r\n\r\n".to_vec()),
        ("half a head", format!("{head}content-le").into_bytes()),
        ("a length that is not a number", format!("{head}content-length: many\r\n\r\n{{}}").into_bytes()),
        ("two lengths", format!("{head}content-length: 2\r\ncontent-length: 3\r\n\r\n{{}}").into_bytes()),
        (
            "length and chunks",
            format!("{head}content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{{}}").into_bytes(),
        ),
        ("too many headers", format!("{head}{}\r\n", "x: y\r\n".repeat(1_000)).into_bytes()),
        ("a switch of protocols", b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n".to_vec()),
        ("a status out of range", b"HTTP/1.1 999999 What\r\n\r\n".to_vec()),
    ] {
        let (engine, gateway) = over(vec![Step::Send(bytes), Step::Close]).await;
        for body in [CHAT, STREAMED] {
            let response = gateway.request(chat(body)).await;
            assert_eq!(response.status(), 502, "{what}: {}", response.text());
            response.is(502, "upstream_broke");
        }
        assert!(engine.count() >= 2);
        gateway.recorded("upstream_error", 2.0).await;
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_without_end_are_502_and_bounded() {
    for endless in ["x-filler: 1\r\n", "x"] {
        let steps = vec![send("HTTP/1.1 200 OK\r\n"), Step::Endlessly(endless.repeat(1_000).into_bytes())];
        let (engine, gateway) = over(steps).await;
        gateway.request(chat(CHAT)).await.is(502, "upstream_broke");
        eventually("the engine is left", async || engine.left() == engine.count()).await;
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interim_responses_are_not_forwarded() {
    let interim = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n";
    let whole = [interim.repeat(20).into_bytes(), json(COMPLETION.as_bytes())].concat();
    let (_engine, gateway) = over(vec![Step::Send(whole)]).await;
    let mut client = gateway.client().await;
    for _ in 0..2 {
        let response = client.request(chat(CHAT)).await;
        assert_eq!((response.status(), response.text().as_str()), (200, COMPLETION));
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_interim_responses_do_not_hold_a_request_for_ever() {
    let engine = Engine::always(vec![Step::Endlessly(b"HTTP/1.1 100 Continue\r\n\r\n".repeat(100))]).await;
    let gateway =
        TestGateway::over(&[engine.url()], &["timeouts.response=500ms", "timeouts.first_byte.base=500ms"]).await;
    for body in [CHAT, STREAMED] {
        let status = gateway.request(chat(body)).await.status();
        assert!([502, 504].contains(&status), "{status}");
    }
    eventually("the engine is left", async || engine.left() == engine.count()).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_200_without_a_body_is_502_because_the_client_has_received_nothing() {
    for head in [
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n".to_owned(),
        STREAM.to_owned(),
    ] {
        let (_engine, gateway) = over(vec![send(head), Step::Close]).await;
        for body in [CHAT, STREAMED] {
            gateway.request(chat(body)).await.is(502, "upstream_broke");
        }
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_incomplete_response_reaches_the_client_as_incomplete() {
    let half = &COMPLETION[..60];
    let long =
        format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", COMPLETION.len());
    let chunked = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    for steps in [
        vec![send(long + half), Step::Gate, Step::Close],
        vec![send(chunked.to_owned() + &chunk(half)), Step::Gate, Step::Close],
        vec![send(chunked.to_owned() + &chunk(half)), Step::Gate, send("zz\r\n"), Step::Close],
    ] {
        let (engine, gateway) = over(steps).await;
        let mut client = gateway.client().await;
        client.send(chat(CHAT)).await.until(half).await;
        engine.open_gate();
        let response = client.response().await;
        assert!(!response.whole, "half a response looks complete: {}", response.text());
        assert_eq!(response.text(), half);
        gateway.recorded("upstream_error", 1.0).await;
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_breaks_off_ends_with_an_error_event_and_a_closed_connection() {
    let begun = STREAM.to_owned() + &chunk(&event("one"));
    for (what, steps) in [
        ("closed inside a chunk", vec![send("20\r\nhalf"), Step::Close]),
        ("closed between chunks", vec![Step::Close]),
        ("ended in order without its end", vec![send(LAST)]),
        ("a chunk of no size", vec![send("what\r\n"), Step::Silence]),
        ("a chunk that is longer than it says", vec![send("2\r\nlonger\r\n"), Step::Silence]),
    ] {
        let steps = [vec![send(begun.clone()), Step::Gate], steps].concat();
        let (engine, gateway) = over(steps).await;
        let mut client = gateway.client().await;
        client.send(chat(STREAMED)).await.until("one").await;
        engine.open_gate();
        let response = client.response().await;
        let text = response.text();
        assert!(text.starts_with(&event("one")), "{what}: {text}");
        assert!(text.contains("\n\nevent: error\ndata: {\"error\":"), "{what}: {text}");
        assert!(!text.contains("[DONE]") && !text.contains("finish_reason\":\"stop"), "{what}: a fake end: {text}");
        assert!(!response.whole, "{what}: the client cannot detect that it is incomplete");
        gateway.recorded("upstream_error", 1.0).await;
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_stream_ends_with_an_error_event() {
    let engine = Engine::always(vec![send(STREAM.to_owned() + &chunk(&event("one"))), Step::Silence]).await;
    let gateway = TestGateway::over(&[engine.url()], &["timeouts.idle=200ms"]).await;
    let response = gateway.request(chat(STREAMED)).await;
    assert!(
        response.text().contains("event: error") && response.text().contains("upstream_timeout"),
        "{}",
        response.text()
    );
    assert!(!response.whole);
    eventually("the engine is left", async || engine.left() == 1).await;
    gateway.recorded("timeout", 1.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_with_done_is_complete_even_if_its_framing_is_not() {
    // The engine sends `[DONE]`, but not the last chunk.
    let text = event("one") + &ending();
    let (_engine, gateway) = over(vec![send(STREAM.to_owned() + &chunk(&text)), Step::Close]).await;
    let response = gateway.request(chat(STREAMED)).await;
    assert!(response.text().starts_with(&text), "{}", response.text());
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_bytes_than_announced_never_reach_the_next_request() {
    let engine = Engine::start(|number, _| {
        if number == 0 {
            let response = [json(COMPLETION.as_bytes()), json(b"smuggled")].concat();
            return vec![Step::Send(response)];
        }
        completion()
    })
    .await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    for _ in 0..3 {
        assert_eq!(client.request(chat(CHAT)).await.text(), COMPLETION);
    }
    let seen = engine.seen();
    assert_ne!(seen[0].connection, seen[1].connection, "a connection with bytes left in it was used again");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_until_close_and_one_without_body_are_complete() {
    let until_close = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n".to_owned() + COMPLETION;
    let (_engine, gateway) = over(vec![send(until_close), Step::Close]).await;
    let response = gateway.request(chat(CHAT)).await;
    assert_eq!((response.whole, response.text().as_str()), (true, COMPLETION));
    gateway.settled().await;

    let (_engine, gateway) = over(vec![send("HTTP/1.1 204 No Content\r\n\r\n")]).await;
    let mut client = gateway.client().await;
    for _ in 0..2 {
        assert_eq!(client.request(chat(CHAT)).await.status(), 204);
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_huge_chunk_passes() {
    let event = event(&"x".repeat(3_000_000));
    let text = STREAM.to_owned() + &chunk(&(event.clone() + &ending())) + LAST;
    let (_engine, gateway) = over(vec![send(text)]).await;
    let response = gateway.request(chat(STREAMED)).await;
    assert!(response.whole && response.text() == event + &ending());
    gateway.recorded("completed", 1.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_sent_before_the_engine_has_read_the_prompt_reaches_the_client() {
    // The engine refuses 2 MB after it has read only the head, and closes. The client must get this
    // response, not a broken pipe.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut bytes = vec![0; 1_000];
            let count = socket.read(&mut bytes).await.unwrap();
            if bytes[..count].starts_with(b"GET /health") {
                socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            } else if bytes[..count].starts_with(b"POST") {
                let body = r#"{"error":{"message":"too long","type":"x","param":null,"code":400}}"#;
                let response = crate::engine::response(400, "application/json", body.as_bytes());
                socket.write_all(&response).await.unwrap();
                // The engine reads the rest, so that closing the socket does not reset the
                // connection.
                while socket.read(&mut bytes).await.is_ok_and(|count| count > 0) {}
            }
        }
    });
    let gateway = TestGateway::over(&[url], &[]).await;
    let body = format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(2_000_000));
    assert_eq!(gateway.request(chat(&body)).await.status(), 400);
    gateway.settled().await;
    serving.abort();
}
