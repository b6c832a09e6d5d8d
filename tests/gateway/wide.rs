//! Requests that need more room than is free.
//!
//! The gateway refuses a request that could never get its room at once. Other such requests wait,
//! and delay no request. The limits of a key count sequences and tokens.

use crate::client::{STREAMED, TestClient, chat, post};
use crate::engine::{Engine, LAST, STREAM, Step, chunk, ending, event, gated_stream, send};
use crate::test_gateway::{TestGateway, eventually, one_pool};

/// A chat that the engine keeps open until the test opens its gates.
const HELD: &str = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"hold"}]}"#;

async fn engine() -> Engine {
    Engine::start(|_, request| match String::from_utf8_lossy(&request.body).contains("hold") {
        true => gated_stream(),
        false => complete(),
    })
    .await
}

fn complete() -> Vec<Step> {
    vec![send(STREAM.to_owned() + &chunk(&event("one")) + &chunk(&ending()) + LAST)]
}

fn with(members: &str) -> Vec<u8> {
    chat(&STREAMED.replacen('{', &format!("{{{members},"), 1))
}

/// Four backends with 2 slots in use on each, and the clients that hold these slots.
async fn quarter_busy(sets: &[&str]) -> (Vec<Engine>, TestGateway, Vec<TestClient>) {
    let mut engines = Vec::new();
    for _ in 0..4 {
        engines.push(engine().await);
    }
    let urls: Vec<String> = engines.iter().map(Engine::url).collect();
    let gateway = TestGateway::over(&urls, sets).await;
    let mut holders = Vec::new();
    for _ in 0..8 {
        let mut client = gateway.client().await;
        client.send(chat(HELD)).await.until("one").await;
        holders.push(client);
    }
    assert!(engines.iter().all(|engine| engine.count() == 2), "two on each");
    (engines, gateway, holders)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wide_request_does_not_stop_the_line() {
    let (engines, gateway, mut holders) = quarter_busy(&[]).await;
    let refused = gateway.request(with("\"n\":16384")).await;
    let message = refused.is(400, "exceeds_backend").text();
    assert!(message.contains("16384 sequences") && message.contains("at most 256"), "{message}");
    let mut wide = gateway.client().await;
    wide.send(with("\"n\":255")).await;
    eventually("the wide request waits", async || gateway.load() == (8, 1)).await;
    let mut others = Vec::new();
    for _ in 0..20 {
        let mut client = gateway.client().await;
        client.send(chat(STREAMED)).await;
        others.push(client);
    }
    for client in &mut others {
        let other = client.response().await;
        assert_eq!((other.status(), other.whole), (200, true), "{}", other.text());
    }
    assert_eq!(gateway.load().1, 1, "they were served while it waits");
    for engine in &engines {
        (0..4).for_each(|_| engine.open_gate());
    }
    for holder in &mut holders {
        assert!(holder.response().await.whole);
    }
    let served = wide.response().await;
    assert_eq!((served.status(), served.whole), (200, true));
    gateway.settled().await;
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_makes_a_request_too_wide_is_refused_at_once() {
    let (_engines, gateway, _holders) = quarter_busy(&["pool.only.tokens=400k"]).await;
    // Token ids are counted exactly: 2,048 inputs of 200 tokens.
    let ids = format!("[{}]", vec!["7"; 200].join(","));
    let inputs = format!(r#"{{"model":"m","input":[{}]}}"#, vec![ids; 2_048].join(","));
    let prompts = format!(r#"{{"model":"m","n":3,"prompt":[{}]}}"#, vec!["\"x\""; 100].join(","));
    let cases = [
        (post("/v1/embeddings", "", inputs.as_bytes()), "at most 400000"),
        (post("/v1/completions", "", prompts.as_bytes()), "300 sequences"),
        (with("\"min_tokens\":1000000000"), "at most 400000"),
        (with("\"min_tokens\":2000,\"n\":250"), "at most 400000"),
    ];
    for (request, says) in cases {
        let refused = gateway.request(request).await;
        let message = refused.is(400, "exceeds_backend").text();
        assert!(message.contains(says), "{message}");
    }
    // The gateway does not refuse a request for output tokens that are only expected or permitted.
    for members in ["\"max_tokens\":1000000", "\"n\":200,\"max_tokens\":10000"] {
        let mut client = gateway.client().await;
        client.send(with(&format!("{members},\"ignore_eos\":true"))).await;
        eventually("it waits for a backend of its own", async || gateway.load() == (8, 1)).await;
        drop(client);
        eventually("it has left", async || gateway.load() == (8, 0)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limits_of_a_key_count_sequences_and_tokens() {
    let engine = engine().await;
    // The SHA-256 of "k".
    let digest = "8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a";
    let text = one_pool(&[engine.url()])
        + &format!(
            "[[auth.keys]]\nname = \"k\"\nsha256 = \"{digest}\"\n\
             limit = {{ sequences = 4, tokens = \"10k\", tokens_per_minute = \"15k\" }}\n"
        );
    let gateway = TestGateway::from_text(&text, &[]).await;
    let request = |members: &str, content: &str| {
        let body = STREAMED.replacen('{', &format!("{{{members},"), 1).replace("hi", content);
        post("/v1/chat/completions", "authorization: Bearer k\r\n", body.as_bytes())
    };
    gateway.request(request("\"n\":5", "hi")).await.is(400, "exceeds_key_limit");
    gateway.request(request("\"min_tokens\":10001", "hi")).await.is(400, "exceeds_key_limit");
    let mut held = gateway.client().await;
    held.send(request("\"n\":3,\"max_tokens\":10", "hold")).await.until("one").await;
    gateway.request(request("\"n\":2,\"max_tokens\":10", "hi")).await.is(429, "rate_limit_exceeded");
    gateway.request(request("\"min_tokens\":9990", "hi")).await.is(429, "rate_limit_exceeded");
    assert_eq!(gateway.request(request("\"max_tokens\":10", "hi")).await.status(), 200);
    drop(held);
    eventually("it has left", async || gateway.load() == (0, 0)).await;
    assert_eq!(gateway.request(request("\"min_tokens\":9000", "hi")).await.status(), 200);
    eventually("what was not used is given back", async || {
        gateway.request(request("\"min_tokens\":9000", "hi")).await.status() == 200
    })
    .await;
    gateway.settled().await;
}
