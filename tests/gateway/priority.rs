//! Priorities of requests. The gateway clamps them to the range of the key, and sends them only to
//! engines that schedule by priority.

use crate::client::{get, post};
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, key_digest, one_pool};

const BARE: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;

fn asking(priority: &str) -> String {
    BARE.replacen('{', &format!("{{\"priority\":{priority},"), 1)
}

/// Sends a request and returns the priority that the engine got with it: the number in the body,
/// and whether there was a header.
async fn seen(gateway: &TestGateway, engine: &Engine, path: &str, headers: &str, body: &str) -> (Option<i64>, bool) {
    let response = gateway.request(post(path, headers, body.as_bytes())).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    let seen = engine.seen().pop().unwrap();
    let body: serde_json::Value = serde_json::from_slice(&seen.body).unwrap();
    (body.get("priority").map(|priority| priority.as_i64().unwrap()), seen.header("x-vllm-priority").is_some())
}

fn with_keys(engine: &Engine) -> String {
    let mut text = one_pool(&[engine.url()]);
    for (name, rule) in [("low", "priority = 100"), ("wide", "priority = 10\npriority_min = -5\npriority_max = 20")] {
        text += &format!("[[auth.keys]]\nname = \"{name}\"\nsha256 = \"{}\"\n{rule}\n", key_digest(name));
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_served_no_earlier_by_the_engine_than_it_may() {
    let engine = Engine::always(completion()).await;
    let by_priority = &["pool.only.scheduling_policy=priority"];
    let gateway = TestGateway::from_text(&with_keys(&engine), by_priority).await;
    let chat = "/v1/chat/completions";
    for (key, header, body, expected) in [
        ("low", "", asking("-1000000"), 100),
        ("low", "x-vllm-priority: -1000000\r\n", BARE.to_owned(), 100),
        ("low", "", BARE.to_owned(), 100),
        ("low", "", asking("200"), 200),
        ("wide", "", BARE.to_owned(), 10),
        ("wide", "", asking("-99999999999999999999"), -5),
        ("wide", "", asking("\"-3\""), -3),
        ("wide", "X-VLLM-Priority: 15\r\n", asking("-3"), 15),
        ("wide", "x-vllm-priority: soon\r\n", asking("-3"), -3),
        ("wide", "x-vllm-priority: 99\r\n", asking("-3"), 20),
    ] {
        let headers = format!("authorization: Bearer {key}\r\n{header}");
        let got = seen(&gateway, &engine, chat, &headers, &body).await;
        assert_eq!(got, (Some(expected), false), "{key} {header} {body}");
    }
    let before = engine.count();
    for wrong in ["1.5", "[1]", "\"x\"", "1,\"priority\":2"] {
        let request = post(chat, "authorization: Bearer low\r\n", asking(wrong).as_bytes());
        let response = gateway.request(request).await;
        assert_eq!(response.status(), 400, "{wrong}");
        assert_eq!(response.json()["error"]["param"], "priority", "{wrong}");
    }
    assert_eq!(engine.count(), before);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_not_known_to_schedule_by_priority_gets_none() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::from_text(&with_keys(&engine), &[]).await;
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"] {
        let body = r#"{"priority":-4,"model":"m","max_tokens":4,"prompt":"a","input":"a","messages":[{"role":"user","content":"hi"}]}"#;
        let headers = "authorization: Bearer wide\r\nx-vllm-priority: -4\r\n";
        assert_eq!(seen(&gateway, &engine, path, headers, body).await, (None, false), "{path}");
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_keys_a_request_may_step_back_and_messages_get_the_header() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &["pool.only.scheduling_policy=priority"]).await;
    let chat = "/v1/chat/completions";
    assert_eq!(seen(&gateway, &engine, chat, "", &asking("-1")).await, (Some(0), false));
    assert_eq!(seen(&gateway, &engine, chat, "", &asking("9")).await, (Some(9), false));
    assert_eq!(seen(&gateway, &engine, chat, "", BARE).await, (None, false));
    assert_eq!(gateway.request(get("/health")).await.status(), 200);
    let body = r#"{"model":"m","max_tokens":4,"messages":[{"role":"user","content":"hi"}],"priority":9}"#;
    assert_eq!(seen(&gateway, &engine, "/v1/messages", "", body).await, (None, true));
    assert_eq!(engine.seen().pop().unwrap().header("x-vllm-priority"), Some("9"));
    gateway.settled().await;
}
