//! Every error response of the gateway: its status, code and shape, and the fact that the request
//! reached no engine.

use crate::client::{CHAT, STREAMED, TestClient, chat, get, post};
use crate::engine::{Engine, LAST, STREAM, Step, chunk, completion, ending, event, gated_stream, send};
use crate::test_gateway::{TestGateway, eventually, key_digest, one_pool};

async fn plain() -> (Engine, TestGateway) {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    (engine, gateway)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_body_is_400_with_a_reason_and_the_connection_stays_open() {
    let engine = Engine::always(completion()).await;
    let two_models = one_pool(&[engine.url()]) + "[[model]]\nname = \"other\"\n";
    let gateway = TestGateway::from_text(&two_models, &["pool.only.models=['m', 'other']"]).await;
    let mut client = gateway.client().await;
    for (body, code, word) in [
        ("", "invalid_request", "JSON"),
        ("this is not JSON", "invalid_request", "JSON"),
        (r#"{"model":"m","messages":[{"role":"user""#, "invalid_request", "JSON"),
        ("[1,2]", "invalid_request", "object"),
        ("{}", "model_missing", "model"),
        (r#"{"model":null}"#, "model_missing", "model"),
        (r#"{"model":5}"#, "invalid_request", "model"),
        (r#"{"model":"m","stream":"perhaps"}"#, "invalid_request", "stream"),
        (r#"{"model":"m","max_tokens":"many"}"#, "invalid_request", "max_tokens"),
        (r#"{"model":"m","n":0}"#, "invalid_request", "'n'"),
        (r#"{"model":"m","stream_options":7}"#, "invalid_request", "stream_options"),
    ] {
        let response = client.request(chat(body)).await;
        response.is(400, code);
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(word), "{body}: {message}");
    }
    assert_eq!(client.request(chat(CHAT)).await.status(), 200);
    assert_eq!(engine.count(), 1);
    gateway.recorded("refused", 11.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_announced_body_over_the_limit_is_413_before_it_is_sent() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.max_body=1KiB"]).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: gate\r\ncontent-length: 1025\r\n";
    for expect in ["", "expect: 100-continue\r\n"] {
        let response = gateway.request(format!("{head}{expect}\r\n")).await;
        response.is(413, "body_too_large");
        assert!(response.text().contains("1024"), "{}", response.text());
    }
    let fits = format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(1024 - 25));
    assert_eq!(fits.len(), 1024);
    assert_eq!(gateway.request(chat(&fits)).await.status(), 200);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_only_after_sending_40_mb_still_gets_its_413() {
    const MB: usize = 1 << 20;
    let (engine, gateway) = plain().await;
    let mut client = gateway.client().await;
    client.send(format!("POST /v1/completions HTTP/1.1\r\nhost: gate\r\ncontent-length: {}\r\n\r\n", 40 * MB)).await;
    let (sent, response) = client.send_while_reading(&vec![b'x'; MB], 40).await;
    assert!(sent, "the gateway closed while the client was sending");
    response.is(413, "body_too_large");

    let mut client = gateway.client().await;
    client.send("POST /v1/completions HTTP/1.1\r\nhost: gate\r\ntransfer-encoding: chunked\r\n\r\n").await;
    let piece = [format!("{MB:x}\r\n").as_bytes(), &vec![b'x'; MB], b"\r\n"].concat();
    let (sent, response) = client.send_while_reading(&piece, 40).await;
    assert!(sent, "the gateway closed while the client was sending");
    response.is(413, "body_too_large");
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_stops_coming_is_408_and_the_connection_is_closed() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.body_timeout=100ms"]).await;
    let mut client = gateway.client().await;
    let request = chat(CHAT);
    let response = client.request(&request[..request.len() - 5]).await;
    response.is(408, "body_timeout");
    client.closed().await;
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_headers_and_a_huge_one_are_431() {
    let (engine, gateway) = plain().await;
    for headers in ["x-filler: 1\r\n".repeat(10_000), format!("x-huge: {}\r\n", "x".repeat(1 << 20))] {
        let mut client = gateway.client().await;
        let response = client.request(post("/v1/chat/completions", &headers, CHAT.as_bytes())).await;
        response.is(431, "headers_too_large");
    }
    let many = "x-filler: 1\r\n".repeat(100);
    assert_eq!(gateway.request(post("/v1/chat/completions", &many, CHAT.as_bytes())).await.status(), 200);
    assert_eq!(engine.count(), 1);
    gateway.settled().await;
}

/// A gateway with two keys whose secrets are `all` and `some`; the key `some` may not use the model
/// `m`.
async fn with_keys(engine: &Engine, limit: &str) -> TestGateway {
    let text = one_pool(&[engine.url()])
        + &format!(
            "[[model]]\nname = \"other\"\n\
             [[auth.keys]]\nname = \"first\"\nsha256 = \"{}\"\n{limit}\n\
             [[auth.keys]]\nname = \"second\"\nsha256 = \"{}\"\nmodels = [\"other\"]\n",
            key_digest("all"),
            key_digest("some")
        );
    TestGateway::from_text(&text, &["pool.only.models=['m', 'other']"]).await
}

fn with_key(key: &str, body: &str) -> Vec<u8> {
    post("/v1/chat/completions", &format!("authorization: Bearer {key}\r\n"), body.as_bytes())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_required_and_never_reach_the_engine() {
    let engine = Engine::always(completion()).await;
    let gateway = with_keys(&engine, "").await;
    gateway.request(chat(CHAT)).await.is(401, "missing_api_key");
    gateway.request(with_key("wrong", CHAT)).await.is(401, "invalid_api_key");
    gateway.request(with_key("some", CHAT)).await.is(403, "model_forbidden");
    gateway.request(get("/v1/models")).await.is(401, "missing_api_key");
    gateway
        .request("GET /v1/models HTTP/1.1\r\nhost: gate\r\nauthorization: Bearer wrong\r\n\r\n")
        .await
        .is(401, "invalid_api_key");
    assert_eq!(engine.count(), 0);
    assert_eq!(gateway.request(with_key("all", CHAT)).await.status(), 200);
    let anthropic = post("/v1/messages", "x-api-key: all\r\n", CHAT.as_bytes());
    assert_eq!(gateway.request(anthropic).await.status(), 200);
    for seen in engine.seen() {
        assert_eq!((seen.header("authorization"), seen.header("x-api-key")), (None, None), "{}", seen.head);
    }
    assert_eq!(
        gateway.request("GET /v1/models HTTP/1.1\r\nhost: gate\r\nauthorization: Bearer all\r\n\r\n").await.status(),
        200
    );
    assert_eq!(gateway.request(get("/health")).await.status(), 200, "load balancers have no key");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_sees_the_models_it_may_use_and_no_others() {
    let engine = Engine::always(completion()).await;
    let gateway = with_keys(&engine, "").await;
    let list = async |key: &str| {
        let response = gateway
            .request(format!("GET /v1/models HTTP/1.1\r\nhost: gate\r\nauthorization: Bearer {key}\r\n\r\n"))
            .await;
        let page: serde_json::Value = serde_json::from_slice(&response.body).unwrap();
        let cards = page["data"].as_array().unwrap();
        cards.iter().map(|card| card["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(list("all").await, ["m", "alias", "other"]);
    assert_eq!(list("some").await, ["other"]);
    let unknown = r#"{"model":"absent","messages":[]}"#;
    let said = |response: crate::client::Response| {
        String::from_utf8(response.is(404, "model_not_found").body.clone()).unwrap()
    };
    let (all, some) =
        (gateway.request(with_key("all", unknown)).await, gateway.request(with_key("some", unknown)).await);
    assert!(said(all).contains("m, other"));
    assert!(!said(some).contains("m, other"), "models that a key may not use are not listed to it");
    gateway.settled().await;
}

/// The gateway frees the resources of a request before it sends the last bytes of the response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_with_one_request_in_flight_may_send_the_next_at_once() {
    let stream = vec![send(STREAM.to_owned() + &chunk(&event("one"))), send(chunk(&ending()) + LAST)];
    for (script, body) in [(completion(), CHAT), (stream, STREAMED)] {
        let engine = Engine::always(script).await;
        let gateway = with_keys(&engine, "limit = { in_flight = 1 }").await;
        for _ in 0..50 {
            assert_eq!(gateway.request(with_key("all", body)).await.status(), 200);
            assert_eq!(gateway.request(with_key("all", "{}")).await.status(), 400);
        }
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_keys_own_limit_is_429_with_retry_after() {
    let engine = Engine::always(gated_stream()).await;
    let gateway = with_keys(&engine, "limit = { in_flight = 1 }").await;
    let mut first = gateway.client().await;
    first.send(with_key("all", STREAMED)).await.until("one").await;
    let response = gateway.request(with_key("all", CHAT)).await;
    assert!(response.is(429, "rate_limit_exceeded").head.retry_after() >= 1);
    engine.open_gate();
    engine.open_gate();
    assert!(first.response().await.whole);
    gateway.settled().await;
    let mut next = gateway.client().await;
    next.send(with_key("all", STREAMED)).await.until("one").await;
    drop(next);
    gateway.settled().await;

    let engine = Engine::always(completion()).await;
    let gateway = with_keys(&engine, "limit = { requests_per_minute = 2 }").await;
    let mut client = gateway.client().await;
    let mut statuses = Vec::new();
    let last = loop {
        let response = client.request(with_key("all", CHAT)).await;
        statuses.push(response.status());
        if response.status() != 200 || statuses.len() > 3 {
            break response;
        }
    };
    let wait = last.is(429, "rate_limit_exceeded").head.retry_after();
    assert!((1..=30).contains(&wait), "{wait} s after {statuses:?}");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_models_and_routes_are_404_and_control_routes_are_not_exposed() {
    let (engine, gateway) = plain().await;
    let response = gateway.request(chat(r#"{"model":"M","messages":[]}"#)).await;
    assert!(response.is(404, "model_not_found").text().contains("'M'"), "{}", response.text());
    assert!(response.text().contains('m'), "the names that would work are listed: {}", response.text());
    let mut client = gateway.client().await;
    for path in ["/", "/v1", "/v1/chat/completions/x", "/V1/chat/completions", "/sleep", "/v1/load_lora_adapter"] {
        client.request(post(path, "", CHAT.as_bytes())).await.is(404, "route_not_found");
        client = gateway.client().await;
    }
    for path in ["/metrics", "/version", "/admin/status", "/v1/../metrics", "//version"] {
        gateway.request(get(path)).await.is(404, "route_not_found");
    }
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wrong_method_is_405_and_names_the_right_one() {
    let (engine, gateway) = plain().await;
    let response = gateway.request(get("/v1/chat/completions")).await;
    assert_eq!(response.is(405, "method_not_allowed").head.header("allow"), Some("POST"));
    for path in ["/v1/models", "/health", "/ready"] {
        let response = gateway.request(post(path, "", b"{}")).await;
        assert_eq!(response.is(405, "method_not_allowed").head.header("allow"), Some("GET, HEAD"), "{path}");
    }
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_and_a_long_wait_are_503_with_retry_after() {
    let engine = Engine::always(gated_stream()).await;
    let sets = ["pool.only.slots=1", "pool.only.queue.length=1", "pool.only.queue.timeout=300ms"];
    let gateway = TestGateway::over(&[engine.url()], &sets).await;
    let mut running = gateway.client().await;
    running.send(chat(STREAMED)).await.until("one").await;
    let mut waiting = gateway.client().await;
    waiting.send(chat(STREAMED)).await;
    eventually("one request waits", async || gateway.load() == (1, 1)).await;
    let full = gateway.request(chat(STREAMED)).await;
    assert!(full.is(503, "queue_full").head.retry_after() >= 1);
    let late = waiting.response().await;
    assert!(late.is(503, "queue_timeout").head.retry_after() >= 1);
    engine.open_gate();
    engine.open_gate();
    assert!(running.response().await.whole);
    assert_eq!(engine.count(), 1);
    gateway.counts("sluice_shed_total", "reason=\"queue_full\"", 1.0).await;
    gateway.counts("sluice_shed_total", "reason=\"queue_timeout\"", 1.0).await;
    gateway.settled().await;
}

pub(crate) async fn closed_url() -> String {
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}", socket.local_addr().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_ready_backend_it_is_503_with_retry_after_and_not_ready() {
    let gateway = TestGateway::over(&[closed_url().await], &[]).await;
    let response = gateway.request(chat(CHAT)).await;
    assert!(response.is(503, "no_backend").head.retry_after() >= 1);
    assert_eq!(gateway.request(get("/ready")).await.status(), 503);
    assert_eq!(gateway.request(get("/health")).await.status(), 200);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_while_the_gateway_stops_is_503_with_retry_after() {
    let (engine, gateway) = plain().await;
    let mut client = gateway.client().await;
    let request = post("/v1/chat/completions", "expect: 100-continue\r\n", CHAT.as_bytes());
    let head = request.len() - CHAT.len();
    client.send(&request[..head]).await;
    assert_eq!(client.head().await.status, 100);
    // The test stops the gateway when it has read the head and waits for the body.
    let address = gateway.address();
    let stopping = gateway.begin_stop();
    eventually("the client socket is closed", async || tokio::net::TcpStream::connect(address).await.is_err()).await;
    let response = client.request(CHAT).await;
    assert!(response.is(503, "shutting_down").head.retry_after() >= 1);
    client.closed().await;
    assert!(stopping.await.unwrap());
    assert_eq!(engine.count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_breaks_or_stays_silent_before_the_first_byte_is_502_or_504() {
    let engine = Engine::always(vec![Step::Close]).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    gateway.request(chat(CHAT)).await.is(502, "upstream_broke");
    gateway.request(chat(STREAMED)).await.is(502, "upstream_broke");
    gateway.settled().await;

    let engine = Engine::always(vec![Step::Silence]).await;
    let sets = ["timeouts.first_byte.base=150ms", "timeouts.response=150ms"];
    let gateway = TestGateway::over(&[engine.url()], &sets).await;
    gateway.request(chat(STREAMED)).await.is(504, "upstream_timeout");
    gateway.request(chat(CHAT)).await.is(504, "upstream_timeout");
    eventually("the engine's connections are closed", async || engine.left() == 2).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_on_messages_have_anthropics_shape() {
    let gateway = TestGateway::over(&[closed_url().await], &["server.max_body=1KiB"]).await;
    let long = format!(r#"{{"model":"m","x":"{}"}}"#, "x".repeat(2_000));
    for (body, status, kind) in [
        ("{", 400, "invalid_request_error"),
        (r#"{"model":"none","messages":[]}"#, 404, "not_found_error"),
        (&*long, 413, "request_too_large"),
        (CHAT, 503, "overloaded_error"),
    ] {
        let response = gateway.request(post("/v1/messages", "", body.as_bytes())).await;
        let said = response.json();
        assert_eq!(response.status(), status, "{said}");
        assert_eq!((said["type"].as_str(), said["error"]["type"].as_str()), (Some("error"), Some(kind)), "{said}");
        assert!(said["error"]["message"].is_string(), "{said}");
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_of_the_engine_passes_unchanged() {
    let body = br#"{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}"#;
    let engine = Engine::always(vec![Step::Send(crate::engine::response(400, "application/json", body))]).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = TestClient::to(gateway.address()).await;
    for _ in 0..5 {
        let response = client.request(chat(CHAT)).await;
        assert_eq!((response.status(), response.body.as_slice()), (400, &body[..]));
        assert_eq!(response.head.header("x-sluice-backend"), Some("b0"));
    }
    assert_eq!(engine.count(), 5, "a 4xx is the client's: no other attempt");
    assert_eq!(gateway.state(0), "ready");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_404_names_the_path_that_was_probably_meant_or_the_admin_port() {
    let (_engine, gateway) = plain().await;
    let message = async |request: Vec<u8>| {
        let response = gateway.request(request).await;
        response.is(404, "route_not_found");
        response.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    let near = message(post("/v1/v1/chat/completions?x=1", "", CHAT.as_bytes())).await;
    assert_eq!(near, "this path is not served here; did you mean /v1/chat/completions?");
    let admin = message(get("/metrics").into_bytes()).await;
    assert!(admin.contains("are on the admin port (server.admin)"), "{admin}");
    let far = message(get("/sleep").into_bytes()).await;
    assert!(far.ends_with("clients.md lists the served paths"), "{far}");
    let client = TestClient::to(gateway.admin()).await.request(get("/v1/models")).await;
    assert!(client.text().contains("is for the client port (server.listen)"), "{}", client.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_requests_per_minute_are_two_at_once_and_the_429_names_the_limit_and_the_key() {
    let engine = Engine::always(completion()).await;
    let limited = format!(
        "[[auth.keys]]\nname = \"team-a\"\nsha256 = \"{}\"\nlimit = {{ requests_per_minute = 2 }}\n",
        key_digest("secret")
    );
    let gateway = TestGateway::from_text(&(one_pool(&[engine.url()]) + &limited), &[]).await;
    let request = post("/v1/chat/completions", "authorization: Bearer secret\r\n", CHAT.as_bytes());
    for _ in 0..2 {
        assert_eq!(gateway.request(&request).await.status(), 200);
    }
    let response = gateway.request(&request).await;
    response.is(429, "rate_limit_exceeded");
    let after = response.head.retry_after();
    assert!((1..=30).contains(&after), "{after}");
    let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
    let wanted = format!("the API key 'team-a' has reached its limit of 2 requests per minute; try again in {after} s");
    assert_eq!(message, wanted);
    gateway.settled().await;
}
