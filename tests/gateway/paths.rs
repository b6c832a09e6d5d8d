//! Paths in the spellings of clients, and paths that the gateway serves itself.
//!
//! No spelling of a path reaches a route of the engine that the gateway does not serve.

use crate::client::{CHAT, get, post};
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, key_digest, one_pool};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slashes_that_are_too_many_are_removed_and_the_body_arrives() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    for (path, sent) in [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completions///?a=//b/", "/v1/chat/completions?a=//b/"),
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat//completions", "/v1/chat/completions"),
    ] {
        assert_eq!(client.request(post(path, "", CHAT.as_bytes())).await.status(), 200, "{path}");
        let seen = engine.seen().pop().unwrap();
        assert!(seen.head.starts_with(&format!("POST {sent} HTTP/1.1\r\n")), "{path}: {}", seen.head);
        assert_eq!(seen.body, CHAT.as_bytes());
    }
    for path in ["/v1/models/", "//v1/models", "/health/", "/ready//"] {
        assert_eq!(client.request(get(path)).await.status(), 200, "{path}");
    }
    let anthropic = client.request(post("//v1/messages/batches/", "", b"{}")).await;
    assert_eq!(anthropic.json()["type"], "error", "{}", anthropic.text());
    // No spelling reaches a route that is not served.
    for path in ["/v1/chat%2Fcompletions", "/V1/chat/completions", "//sleep", "/v1/../sleep", "/./v1/completions"] {
        client = gateway.client().await;
        client.request(post(path, "", CHAT.as_bytes())).await.is(404, "route_not_found");
    }
    assert_eq!(engine.count(), 4);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_found_by_its_name_with_slashes_and_only_by_keys_that_may_use_it() {
    let engine = Engine::always(completion()).await;
    let mut text = one_pool(&[engine.url()]).replace("models = [\"m\"]\n", "");
    for name in ["org/name", "/models/llama", "café"] {
        text += &format!("[[model]]\nname = \"{name}\"\n");
    }
    for (key, models) in [("all", "*"), ("few", "org/name")] {
        let digest = key_digest(key);
        text += &format!("[[auth.keys]]\nname = \"{key}\"\nsha256 = \"{digest}\"\nmodels = [\"{models}\"]\n");
    }
    let gateway = TestGateway::from_text(&text, &[]).await;
    let mut client = gateway.client().await;
    for (path, key, found) in [
        ("org/name", "few", Some("org/name")),
        ("org%2Fname", "few", Some("org/name")),
        ("org%2fname/", "few", Some("org/name")),
        ("/models/llama", "all", Some("/models/llama")),
        ("%2Fmodels%2Fllama", "all", Some("/models/llama")),
        ("caf%C3%A9", "all", Some("café")),
        ("m", "all", Some("m")),
        ("alias", "all", Some("alias")),
        ("/models/llama", "few", None),
        ("m", "few", None),
        ("alias", "few", None),
        ("nothing", "all", None),
        ("%FF", "all", None),
        ("%", "all", None),
    ] {
        let request = format!("GET /v1/models/{path} HTTP/1.1\r\nhost: gate\r\nauthorization: Bearer {key}\r\n\r\n");
        let response = client.request(request).await;
        match found {
            Some(name) => {
                let card = response.json();
                assert_eq!((response.status(), card["id"].as_str()), (200, Some(name)), "{path}");
                assert_eq!(card["object"], "model");
            }
            None => {
                let error = response.is(404, "model_not_found").json()["error"].clone();
                assert_eq!(error["param"], "model");
                let listed = error["message"].as_str().unwrap().contains("café");
                assert_eq!(listed, key == "all", "names of other keys are not listed: {error}");
                client = gateway.client().await;
            }
        }
    }
    gateway.request(get("/v1/models/m")).await.is(401, "missing_api_key");
    gateway.request(post("/v1/models/m", "authorization: Bearer all\r\n", b"{}")).await.is(405, "method_not_allowed");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invocation_is_charged_and_counted_as_what_its_body_is() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    for (body, route) in [
        (CHAT, "chat_completions"),
        (r#"{"model":"m","prompt":"a"}"#, "completions"),
        (r#"{"model":"m","input":["a","b"]}"#, "embeddings"),
        (r#"{"model":"m","query":"a","documents":["b"]}"#, "rerank"),
        (r#"{"model":"m","text_1":"a","text_2":"b"}"#, "score"),
    ] {
        assert_eq!(client.request(post("/invocations", "", body.as_bytes())).await.status(), 200, "{body}");
        let seen = engine.seen().pop().unwrap();
        assert!(
            seen.head.starts_with("POST /invocations HTTP/1.1\r\n") && seen.body == body.as_bytes(),
            "{}",
            seen.head
        );
        gateway.counts("sluice_requests_total", &format!("route=\"{route}\""), 1.0).await;
    }
    gateway.request(post("/invocations", "", br#"{"model":"m"}"#)).await.is(400, "invalid_request");
    gateway.request(post("/invocations", "", br#"{"model":"x","prompt":"a"}"#)).await.is(404, "model_not_found");
    // vLLM would serve another model than the checked one.
    let adapter = "X-Amzn-SageMaker-Adapter-Identifier: other\r\n";
    gateway.request(post("/invocations", adapter, CHAT.as_bytes())).await.is(400, "invalid_request");
    assert_eq!(engine.count(), 5);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_that_only_some_engines_have_are_passed_on_with_the_engine_s_answer() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    for (path, body, route) in [
        ("/v2/embed", r#"{"model":"alias","texts":["a"]}"#, "cohere_embed"),
        ("/cohere/v2/chat", r#"{"model":"alias","messages":[]}"#, "cohere_chat"),
        ("/generative_scoring", r#"{"model":"alias","query":"a","items":["b"]}"#, "generative_scoring"),
        ("/v1/decisions", r#"{"model":"alias","state":"a","questions":{}}"#, "decisions"),
        ("/v1/responses/input_tokens", r#"{"model":"alias","input":"a"}"#, "response_tokens"),
    ] {
        assert_eq!(client.request(post(path, "", body.as_bytes())).await.status(), 200, "{path}");
        let seen = engine.seen().pop().unwrap();
        assert!(seen.head.starts_with(&format!("POST {path} HTTP/1.1\r\n")), "{}", seen.head);
        assert_eq!(String::from_utf8_lossy(&seen.body), body.replace("alias", "m"));
        gateway.counts("sluice_requests_total", &format!("route=\"{route}\""), 1.0).await;
    }
    assert_eq!(client.request(get("/v1/responses/input_tokens")).await.status(), 405);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sagemaker_s_ping_says_whether_a_backend_is_ready() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    assert_eq!(client.request(get("/ping")).await.status(), 200);
    assert_eq!(client.request(post("/ping", "", b"")).await.status(), 200, "on the same connection");
    assert_eq!(client.request(post("/ping", "", b"")).await.status(), 200);
    let closed = gateway.request(post("/ping", "", b"an unread body")).await;
    assert_eq!((closed.status(), closed.head.header("connection")), (200, Some("close")));
    gateway.request("PUT /ping HTTP/1.1\r\nhost: gate\r\n\r\n").await.is(405, "method_not_allowed");
    let alone = TestGateway::over(&["http://127.0.0.1:1".to_owned()], &[]).await;
    assert_eq!(alone.request(get("/ping")).await.status(), 503);
    assert_eq!(engine.count(), 0);
}
