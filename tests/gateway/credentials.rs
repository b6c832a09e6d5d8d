//! Clients that send several credentials.
//!
//! A request is accepted if any of its credentials is valid, and the engine gets none of them.

use crate::client::{CHAT, post};
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, access_log, key_digest, one_pool};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_credential_hides_no_key_and_none_reaches_the_engine() {
    let engine = Engine::always(completion()).await;
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("access.log");
    let mut text = one_pool(&[engine.url()]) + &format!("[access_log]\npath = \"{}\"\n", log.display());
    for key in ["one", "two"] {
        text += &format!("[[auth.keys]]\nname = \"{key}\"\nsha256 = \"{}\"\n", key_digest(key));
    }
    let gateway = TestGateway::from_text(&text, &[]).await;
    let cases = [
        (["authorization: Bearer foreign", "x-api-key: one"], Some("one")),
        (["authorization: Bearer one", "x-api-key: foreign"], Some("one")),
        (["authorization: Basic b25lOg==", "x-api-key: one"], Some("one")),
        (["authorization: Bearer foreign", "api-key: one"], Some("one")),
        (["x-api-key: foreign", "api-key: one"], Some("one")),
        (["authorization: Bearer foreign", "authorization: Bearer one"], Some("one")),
        (["authorization:", "x-api-key: one"], Some("one")),
        // If two keys are valid, the order of the headers' names decides, not the order in which
        // they were sent.
        (["x-api-key: two", "authorization: Bearer one"], Some("one")),
        (["api-key: one", "x-api-key: two"], Some("two")),
        (["authorization: Bearer foreign", "x-api-key: other"], None),
        (["authorization: Basic b25lOg==", "cookie: one"], None),
    ];
    let mut served = 0;
    for (index, (headers, key)) in cases.into_iter().enumerate() {
        let request = post("/v1/chat/completions", &(headers.join("\r\n") + "\r\n"), CHAT.as_bytes());
        let response = gateway.request(&request).await;
        assert_eq!(response.status(), if key.is_some() { 200 } else { 401 }, "{headers:?}");
        served += usize::from(key.is_some());
        assert_eq!(engine.count(), served, "{headers:?}");
        if key.is_some() {
            let seen = engine.seen().pop().unwrap();
            let sent = ["authorization", "x-api-key", "api-key"].map(|name| seen.header(name).map(str::to_owned));
            assert_eq!(sent, [None, None, None], "{headers:?}");
        }
        let lines = access_log(&log, index + 1).await;
        let line: serde_json::Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
        assert_eq!(line["key"].as_str(), key, "{headers:?}");
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_keys_credentials_are_for_the_engine_and_give_way_to_that_of_the_backend() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let text = one_pool(&[engine.url()]).replace("url = ", "api_key = \"of-the-backend\"\nurl = ");
    let own = TestGateway::from_text(&text, &[]).await;
    let headers = "authorization: Bearer a\r\nx-api-key: b\r\n";
    for (gateway, sent) in [(gateway, ["Bearer a", "b"]), (own, ["Bearer of-the-backend", ""])] {
        assert_eq!(gateway.request(post("/v1/chat/completions", headers, CHAT.as_bytes())).await.status(), 200);
        let seen = engine.seen().pop().unwrap();
        assert_eq!(["authorization", "x-api-key"].map(|name| seen.header(name).unwrap_or_default()), sent);
        gateway.settled().await;
    }
}
