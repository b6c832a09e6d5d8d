//! Which parts of a request reach an engine, and which requests are refused first.
//!
//! A refusal has the shape that the client's API expects.

use crate::client::{CHAT, chat, get, post};
use crate::engine::{COMPLETION, Engine, Step, completion, json};
use crate::test_gateway::{TestGateway, access_log, eventually, one_pool};

async fn plain() -> (Engine, TestGateway) {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    (engine, gateway)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_request_id_sent_twice_is_two_ids_at_the_engine_and_in_the_log() {
    let engine = Engine::always(completion()).await;
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.log");
    let text = one_pool(&[engine.url()]) + &format!("[access_log]\npath = \"{}\"\n", log.display());
    let gateway = TestGateway::from_text(&text, &[]).await;
    let request = post("/v1/chat/completions", "x-request-id: mine-7\r\n", CHAT.as_bytes());
    for lines in 1..=2 {
        assert_eq!(gateway.request(&request).await.head.header("x-request-id"), Some("mine-7"));
        access_log(&log, lines).await;
    }
    let ids: Vec<String> = engine.seen().iter().map(|seen| seen.header("x-request-id").unwrap().to_owned()).collect();
    assert!(ids[0] != ids[1] && ids.iter().all(|id| id.starts_with("mine-7-")), "{ids:?}");
    for (line, id) in access_log(&log, 2).await.lines().zip(&ids) {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((line["request_id"].as_str(), line["upstream_id"].as_str()), (Some("mine-7"), Some(id.as_str())));
    }
    // An id that the gateway has made is unique and stays as it is.
    let own = gateway.request(chat(CHAT)).await;
    assert_eq!(own.head.header("x-request-id"), engine.seen()[2].header("x-request-id"));
    assert!(!access_log(&log, 3).await.lines().last().unwrap().contains("upstream_id"));
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_does_not_choose_the_engine_core() {
    let (engine, gateway) = plain().await;
    let headers = "X-data-parallel-rank: 1\r\nx-session-id: s\r\n";
    assert_eq!(gateway.request(post("/v1/chat/completions", headers, CHAT.as_bytes())).await.status(), 200);
    let seen = &engine.seen()[0];
    assert_eq!((seen.header("x-data-parallel-rank"), seen.header("x-session-id")), (None, Some("s")));
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_vllm_accepts_is_accepted() {
    let (engine, gateway) = plain().await;
    let deep = format!(r#"{{"model":"m","messages":[],"metadata":{}1{}}}"#, "[".repeat(900), "]".repeat(900));
    let marked = format!("\u{feff}{CHAT}");
    for body in [&deep, &marked] {
        assert_eq!(gateway.request(chat(body)).await.status(), 200);
        assert_eq!(engine.seen().last().unwrap().body, body.as_bytes());
    }
    // If there is only one model, the gateway inserts its name into a request without a model.
    for (body, sent) in
        [(r#"{"messages":[]}"#, r#"{"model":"m","messages":[]}"#), (r#"{"model":null}"#, r#"{"model":"m"}"#)]
    {
        assert_eq!(gateway.request(chat(body)).await.status(), 200);
        assert_eq!(String::from_utf8_lossy(&engine.seen().last().unwrap().body), sent);
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn anthropics_clients_get_every_refusal_in_their_shape() {
    let (engine, gateway) = plain().await;
    let version = "anthropic-version: 2023-06-01\r\n";
    for (request, status) in [
        (get("/v1/messages/batches").into_bytes(), 404),
        (post("/v1/messages/batches", "", b"{}"), 404),
        (post("/v1/complete", version, b"{}"), 404),
        (get("/v1/messages").into_bytes(), 405),
        (post("/v1/messages/count_tokens", "", b"["), 400),
    ] {
        let response = gateway.request(&request).await;
        let body = response.json();
        assert_eq!((response.status(), body["type"].as_str()), (status, Some("error")), "{body}");
        assert!(body["error"]["type"].is_string() && body["error"]["message"].is_string(), "{body}");
    }
    gateway.request(post("/v1/complete", "", b"{}")).await.is(404, "route_not_found");
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_counts_and_batches_reach_the_engine() {
    let engine = Engine::always(vec![Step::Gate, Step::Send(json(COMPLETION.as_bytes()))]).await;
    let gateway = TestGateway::over(&[engine.url()], &["pool.only.slots=16"]).await;
    let talk = r#"[{"role":"user","content":"hi"}]"#;
    for (path, body, slots) in [
        ("/v1/messages/count_tokens", format!(r#"{{"model":"m","messages":{talk}}}"#), 1),
        ("/v1/chat/completions/batch", format!(r#"{{"model":"m","messages":[{talk},{talk},{talk}]}}"#), 3),
        ("/v2/rerank", r#"{"model":"m","query":"a","documents":["b","c"]}"#.to_owned(), 1),
    ] {
        let mut client = gateway.client().await;
        client.send(post(path, "", body.as_bytes())).await;
        eventually(path, async || gateway.slots() == slots).await;
        engine.open_gate();
        assert_eq!(client.response().await.text(), COMPLETION);
        let seen = engine.seen().pop().unwrap();
        assert!(
            seen.head.starts_with(&format!("POST {path} HTTP/1.1\r\n")) && seen.body == body.as_bytes(),
            "{}",
            seen.head
        );
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_that_would_outlive_its_exchange_is_refused() {
    let (engine, gateway) = plain().await;
    let body = br#"{"model":"m","input":"x","background":true}"#;
    let refused = gateway.request(post("/v1/responses", "", body)).await;
    assert_eq!(refused.is(400, "invalid_request").json()["error"]["param"], "background");
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_in_a_coding_that_is_not_read_is_415() {
    let (engine, gateway) = plain().await;
    for coding in ["compress", "br", "gzip, gzip"] {
        let request = post("/v1/chat/completions", &format!("content-encoding: {coding}\r\n"), CHAT.as_bytes());
        gateway.request(request).await.is(415, "content_encoding_not_supported");
    }
    let identity = post("/v1/chat/completions", "content-encoding: identity\r\n", CHAT.as_bytes());
    assert_eq!(gateway.request(identity).await.status(), 200);
    assert_eq!(engine.count(), 1);
    gateway.settled().await;
}
