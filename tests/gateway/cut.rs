//! Requests that still run when `server.drain_timeout` is over.
//!
//! Each client gets an error before its connection is closed.

use std::time::Duration;

use tokio::time::timeout;

use crate::client::{CHAT, STREAMED, TIMEOUT, TestClient, chat, post};
use crate::engine::{Engine, STREAM, Step, chunk, event, send};
use crate::test_gateway::{TestGateway, eventually};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_outlives_the_drain_timeout_gets_an_error_and_not_only_a_closed_connection() {
    let message = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{}}\n\n\
                   event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n\n";
    let engine = Engine::start(move |_, seen| match seen.head.split(' ').nth(1) {
        Some("/v1/messages") => vec![send(STREAM.to_owned() + &chunk(message)), Step::Silence],
        _ if seen.body == STREAMED.as_bytes() => vec![send(STREAM.to_owned() + &chunk(&event("one"))), Step::Silence],
        _ => vec![Step::Silence],
    })
    .await;
    let sets = ["server.drain_timeout=100ms", "pool.only.slots=3"];
    let gateway = TestGateway::over(&[engine.url()], &sets).await;
    let mut openai = gateway.client().await;
    openai.send(chat(STREAMED)).await.until("one").await;
    let mut anthropic = gateway.client().await;
    anthropic.send(post("/v1/messages", "", STREAMED.as_bytes())).await.until("message_start").await;
    let mut plain = gateway.client().await;
    plain.send(chat(CHAT)).await;
    eventually("three run", async || engine.count() == 3).await;
    let mut waiting = gateway.client().await;
    waiting.send(chat(CHAT)).await;
    eventually("one waits", async || gateway.load() == (3, 1)).await;

    assert!(!timeout(TIMEOUT, gateway.stop()).await.expect("the stop does not end"), "not in order");

    for (client, shape) in [
        (&mut openai, r#"event: error\ndata: {"error":{"code":"shutting_down","#),
        (
            &mut anthropic,
            r#"event: error\ndata: {"error":{"message":"the gateway is shutting down","type":"api_error"},"type":"error"}"#,
        ),
    ] {
        let response = client.response().await;
        let shape = shape.replace("\\n", "\n");
        assert!(response.text().contains(&shape), "{}", response.text());
        assert!(!response.whole && !response.text().contains("[DONE]"), "no fake end: {}", response.text());
        client.closed().await;
    }
    for client in [&mut plain, &mut waiting] {
        let response = client.response().await;
        response.is(503, "shutting_down");
        assert_eq!(response.head.retry_after(), 1);
    }
    assert_eq!(engine.count(), 3, "what waited was not sent");
    eventually("the engine is left", async || engine.left() == 3).await;
}

/// A client that does not read cannot get an error. It must not delay the stop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_does_not_hold_up_the_cut() {
    let flood = chunk(&event(&"x".repeat(8_000)));
    let engine = Engine::always(vec![send(STREAM), Step::Endlessly(flood.into_bytes())]).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.drain_timeout=100ms"]).await;
    let mut client = TestClient::to(gateway.address()).await;
    client.send(chat(STREAMED)).await.until("xxx").await;
    let stopped = timeout(Duration::from_secs(5), gateway.stop()).await;
    assert!(!stopped.expect("a client that does not read holds up the stop"));
}
