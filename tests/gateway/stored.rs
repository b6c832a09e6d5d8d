//! Stored responses.
//!
//! Only the key for which a response was made can read, delete or cancel it, at the backend that
//! made it.

use sha2::{Digest, Sha256};

use crate::client::{TestClient, change, post};
use crate::engine::{Engine, LAST, ReceivedRequest, STREAM, Step, chunk, json, response, send};
use crate::test_gateway::{TestGateway, one_pool};

/// An engine that makes the response `resp_NAME`, and returns it when a client reads it.
async fn engine(name: &'static str) -> Engine {
    Engine::start(move |_, seen: &ReceivedRequest| {
        let stored = format!(r#"{{"id":"resp_{name}","object":"response","output":[{{"id":"msg_1"}}]}}"#);
        if seen.head.starts_with("DELETE ") {
            return vec![Step::Send(response(405, "application/json", br#"{"detail":"Method Not Allowed"}"#))];
        }
        if seen.body.windows(13).any(|window| window == br#""stream":true"#) {
            let event = |kind: &str| format!("event: {kind}\ndata: {{\"response\":{stored},\"type\":\"{kind}\"}}\n\n");
            let events = chunk(&event("response.created")) + &chunk(&event("response.completed"));
            return vec![send(STREAM.to_owned() + &events + LAST)];
        }
        vec![Step::Send(json(stored.as_bytes()))]
    })
    .await
}

async fn gateway(engines: &[&Engine]) -> TestGateway {
    let digest =
        |key: &str| Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let urls: Vec<String> = engines.iter().map(|engine| engine.url()).collect();
    let keys = ["mine", "theirs"].map(|key| format!("[[auth.keys]]\nname = \"{key}\"\nsha256 = \"{}\"\n", digest(key)));
    TestGateway::from_text(&(one_pool(&urls) + &keys.concat()), &["pool.only.policy=round_robin"]).await
}

fn with_key(method: &str, path: &str, key: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nhost: gate\r\nauthorization: Bearer {key}\r\ncontent-length: 0\r\n\r\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stored_response_is_found_at_the_backend_that_made_it_and_by_its_key_only() {
    let (one, two) = (engine("one").await, engine("two").await);
    let gateway = gateway(&[&one, &two]).await;
    for body in [r#"{"model":"m","input":"x"}"#, r#"{"model":"m","input":"x","stream":true}"#] {
        let made = post("/v1/responses", "authorization: Bearer mine\r\n", body.as_bytes());
        assert_eq!(gateway.request(made).await.status(), 200);
    }
    assert_eq!((one.count(), two.count()), (1, 1));
    for (name, engine) in [("one", &one), ("two", &two)] {
        let path = format!("/v1/responses/resp_{name}");
        let before = engine.count();
        let found = gateway.request(with_key("GET", &format!("{path}?stream=false"), "mine")).await;
        assert_eq!((found.status(), found.json()["id"].as_str()), (200, Some(&*format!("resp_{name}"))));
        assert!(engine.seen()[before].head.starts_with(&format!("GET {path}?stream=false HTTP/1.1\r\n")));
        assert_eq!(engine.seen()[before].header("authorization"), None);
        assert_eq!(gateway.request(with_key("POST", &format!("{path}/cancel"), "mine")).await.status(), 200);
        let deleted = gateway.request(with_key("DELETE", &path, "mine")).await;
        assert_eq!((deleted.status(), deleted.text().as_str()), (405, r#"{"detail":"Method Not Allowed"}"#));
        assert_eq!(engine.count(), before + 3);
        // Another key does not learn that the response exists.
        gateway.request(with_key("GET", &path, "theirs")).await.is(404, "response_not_found");
        gateway.request(with_key("GET", &path, "none")).await.is(401, "invalid_api_key");
        gateway.request(post(&path, "authorization: Bearer mine\r\n", b"{}")).await.is(405, "method_not_allowed");
        assert_eq!(engine.count(), before + 3);
    }
    gateway.settled().await;
}

fn ask(body: &str, key: &str) -> Vec<u8> {
    post("/v1/responses", &format!("authorization: Bearer {key}\r\n"), body.as_bytes())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_is_continued_at_the_backend_that_made_it_and_by_its_key_only() {
    let (one, two) = (engine("one").await, engine("two").await);
    let gateway = gateway(&[&one, &two]).await;
    for _ in 0..2 {
        assert_eq!(gateway.request(ask(r#"{"model":"m","input":"x"}"#, "mine")).await.status(), 200);
    }
    assert_eq!((one.count(), two.count()), (1, 1));
    let next = |id: &str| format!(r#"{{"model":"m","input":"y","previous_response_id":{id}}}"#);
    for _ in 0..3 {
        let continued = gateway.request(ask(&next(r#""resp_two""#), "mine")).await;
        assert_eq!((continued.status(), continued.json()["id"].as_str()), (200, Some("resp_two")));
    }
    assert_eq!((one.count(), two.count()), (1, 4), "in turn they would go to both");
    // If these requests reached the engine, it would reveal the conversation to another key.
    for id in [r#""resp_two""#, r#""resp\u005ftwo""#, r#""resp_other""#, r#""""#] {
        gateway.request(ask(&next(id), "theirs")).await.is(404, "response_not_found");
    }
    gateway.request(ask(&next("[7]"), "theirs")).await.is(400, "invalid_request");
    // If this request reached the engine, it would replace the response of the key `mine`.
    let replacing = r#"{"model":"m","input":"y","request_id":"resp_two"}"#;
    gateway.request(ask(replacing, "theirs")).await.is(400, "invalid_request");
    assert_eq!((one.count(), two.count()), (1, 4));
    assert_eq!(gateway.request(ask(&next("null"), "theirs")).await.status(), 200);
    assert_eq!(gateway.request(ask(replacing, "mine")).await.status(), 200);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_is_continued_at_no_other_backend_while_its_own_is_away() {
    let (one, two) = (engine("one").await, engine("two").await);
    let gateway = gateway(&[&one, &two]).await;
    assert_eq!(gateway.request(ask(r#"{"model":"m","input":"x"}"#, "mine")).await.status(), 200);
    let (made_by, other) = if one.count() == 1 { (0, &two) } else { (1, &one) };
    let id = ["resp_one", "resp_two"][made_by];
    let next = ask(&format!(r#"{{"model":"m","input":"y","previous_response_id":"{id}"}}"#), "mine");
    let admin = async |what: &str| {
        let path = format!("/admin/backends/only/b{made_by}/{what}");
        assert_eq!(TestClient::to(gateway.admin()).await.request(change(&path)).await.status(), 200);
    };
    admin("drain").await;
    gateway.request(&next).await.is(503, "no_backend");
    admin("enable").await;
    assert_eq!(gateway.request(&next).await.json()["id"].as_str(), Some(id));
    assert_eq!(other.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_keys_a_response_that_is_unknown_here_is_continued_by_any_engine() {
    let one = engine("one").await;
    let gateway = TestGateway::over(&[one.url()], &[]).await;
    let next = post("/v1/responses", "", br#"{"model":"m","input":"y","previous_response_id":"resp_other"}"#);
    assert_eq!(gateway.request(next).await.status(), 200);
    assert_eq!(one.count(), 1);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_response_is_asked_of_no_engine() {
    let one = engine("one").await;
    let gateway = gateway(&[&one]).await;
    gateway.request(with_key("GET", "/v1/responses/resp_other", "mine")).await.is(404, "response_not_found");
    gateway.request(with_key("POST", "/v1/responses/resp_other/cancel", "mine")).await.is(404, "response_not_found");
    gateway.request(with_key("GET", "/v1/responses/..%2fmetrics", "mine")).await.is(404, "route_not_found");
    assert_eq!(one.count(), 0);
    gateway.recorded("refused", 3.0).await;
    gateway.settled().await;
}
