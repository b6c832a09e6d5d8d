//! Invalid requests get a response that explains the error.
//!
//! Requests that are unusual but valid are served.

use crate::client::{CHAT, STREAMED, TIMEOUT, chat, get, post};
use crate::engine::{COMPLETION, Engine, Step, completion, gated_stream};
use crate::test_gateway::{TestGateway, eventually};

async fn plain() -> (Engine, TestGateway) {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    (engine, gateway)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_comes_one_byte_at_a_time_is_served() {
    let (engine, gateway) = plain().await;
    let mut client = gateway.client().await;
    assert_eq!(client.send_bytewise(&chat(CHAT)).await.response().await.text(), COMPLETION);
    let mut chunked =
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for byte in CHAT.bytes() {
        chunked.extend_from_slice(&[b'1', b'\r', b'\n', byte, b'\r', b'\n']);
    }
    chunked.extend_from_slice(b"0\r\n\r\n");
    assert_eq!(client.send_bytewise(&chunked).await.response().await.text(), COMPLETION);
    for seen in engine.seen() {
        assert_eq!(seen.body, CHAT.as_bytes());
        assert_eq!(seen.header("transfer-encoding"), None, "{}", seen.head);
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_different_lengths_are_refused_and_never_forwarded() {
    let (engine, gateway) = plain().await;
    let request = |lengths: &str| format!("POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\n{lengths}\r\n{CHAT}");
    let (right, wrong) = (CHAT.len(), CHAT.len() - 3);
    for lengths in [
        format!("content-length: {right}\r\ncontent-length: {wrong}\r\n"),
        format!("content-length: {wrong}\r\ncontent-length: {right}\r\n"),
        format!("content-length: {right}, {wrong}\r\n"),
        format!("content-length: +{right}\r\n"),
        format!("content-length: -{right}\r\n"),
        "content-length: 1e2\r\n".to_owned(),
        "content-length: 99999999999999999999999\r\n".to_owned(),
    ] {
        let mut client = gateway.client().await;
        client.send(request(&lengths)).await;
        let response = client.response().await;
        assert!([400, 413].contains(&response.status()), "{lengths}: {}", response.text());
        response.code();
        client.closed().await;
    }
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_length_and_chunks_together_are_refused_as_nginx_does() {
    let (engine, gateway) = plain().await;
    let both = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\ncontent-length: {}\r\ntransfer-encoding: chunked\r\n\r\n\
         {:x}\r\n{CHAT}\r\n0\r\n\r\n",
        CHAT.len(),
        CHAT.len()
    );
    let mut client = gateway.client().await;
    client.request(both).await.is(400, "invalid_request");
    client.closed().await;
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_http_gets_400_and_a_closed_connection_and_other_clients_are_served() {
    let (engine, gateway) = plain().await;
    for garbage in [
        "\u{16}\u{3}\u{1}\u{2}\u{0}\u{1}\u{0}\u{1}\u{fc}\u{3}\u{3}\r\n\r\n",
        "GET\r\n\r\n",
        "POST /v1/chat/completions\r\n\r\n",
        "POST /v1/chat/completions HTTP/9.9\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nno colon\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nspace before : colon\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
    ] {
        let mut client = gateway.client().await;
        client.send(garbage).await;
        let said = client.closed().await;
        assert!(said.starts_with("HTTP/1.1 400 "), "{garbage:?}: {said}");
    }
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 200);
    assert_eq!(engine.count(), 1);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_that_end_in_a_bare_newline_are_read_as_by_nginx() {
    let (engine, gateway) = plain().await;
    let mut client = gateway.client().await;
    let request = format!("POST /v1/chat/completions HTTP/1.1\nhost: gate\ncontent-length: {}\n\n{CHAT}", CHAT.len());
    assert_eq!(client.request(request).await.text(), COMPLETION);
    assert_eq!(engine.seen()[0].body, CHAT.as_bytes());
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_utf_8_is_400_with_its_position() {
    let (engine, gateway) = plain().await;
    let mut body = CHAT.as_bytes().to_vec();
    let at = body.windows(2).position(|window| window == b"hi").unwrap();
    body[at] = 0xff;
    let response = gateway.request(post("/v1/chat/completions", "", &body)).await;
    assert!(response.is(400, "invalid_request").text().contains(&format!("byte {at}")), "{}", response.text());
    // The gateway passes on a header with bytes that are not ASCII.
    let mut request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\nx-name: caf\xe9\r\n".to_vec();
    request.extend_from_slice(format!("content-length: {}\r\n\r\n{CHAT}", CHAT.len()).as_bytes());
    assert_eq!(gateway.request(request).await.status(), 200);
    assert_eq!(engine.count(), 1);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_named_inside_the_prompt_is_ignored() {
    let (engine, gateway) = plain().await;
    for body in [
        r#"{"messages":[{"role":"user","content":"\"model\":\"none\",{\"model\":\"none\"}"}],"model":"m"}"#,
        r#"{"metadata":{"model":"none"},"model":"m","messages":[{"role":"user","content":"x","model":"none"}]}"#,
        r#"{"model":"none","messages":[],"model":"m"}"#,
    ] {
        assert_eq!(gateway.request(chat(body)).await.status(), 200, "{body}");
        assert_eq!(engine.seen().last().unwrap().body, body.as_bytes());
    }
    // The key `\u006dodel` is `model`.
    let escaped = r#"{"\u006dodel":"none","messages":[]}"#;
    gateway.request(chat(escaped)).await.is(404, "model_not_found");
    // The alias is replaced only as the value of `model`, not in other text.
    let alias = r#"{"messages":[{"role":"user","content":"\"model\":\"alias\""}],"model":"alias"}"#;
    assert_eq!(gateway.request(chat(alias)).await.status(), 200);
    let renamed = alias.replace(r#","model":"alias"}"#, r#","model":"m"}"#);
    assert_eq!(engine.seen().last().unwrap().body, renamed.as_bytes());
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_of_prompts_and_n_take_as_many_slots() {
    let engine = Engine::always(vec![Step::Gate, Step::Send(crate::engine::json(COMPLETION.as_bytes()))]).await;
    let gateway = TestGateway::over(&[engine.url()], &["pool.only.slots=16"]).await;
    for (body, slots) in [
        (r#"{"model":"m","prompt":["a","b","c"]}"#, 3),
        (r#"{"model":"m","prompt":[1,2,3]}"#, 1),
        (r#"{"model":"m","prompt":[[1,2],[3]]}"#, 2),
        (r#"{"model":"m","prompt":"x","n":16}"#, 16),
        (r#"{"model":"m","prompt":["x","y"],"n":4}"#, 8),
    ] {
        let mut client = gateway.client().await;
        client.send(post("/v1/completions", "", body.as_bytes())).await;
        eventually(body, async || gateway.slots() == slots).await;
        engine.open_gate();
        assert_eq!(client.response().await.text(), COMPLETION);
        assert_eq!(engine.seen().last().unwrap().body, body.as_bytes());
        gateway.settled().await;
    }
    // The request exceeds the capacity of every backend, so it is refused; otherwise it would wait
    // for ever.
    let more = r#"{"model":"m","prompt":"x","n":17}"#;
    gateway.request(post("/v1/completions", "", more.as_bytes())).await.is(400, "exceeds_backend");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelined_requests_all_get_responses_in_order_and_the_first_is_not_cut() {
    let engine = Engine::start(|number, _| if number == 0 { gated_stream() } else { completion() }).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    client.send([chat(STREAMED), chat(CHAT), get("/health").into_bytes(), chat(CHAT)].concat()).await;
    client.until("one").await;
    // More bytes arrive in the middle of the first response.
    client.send(chat(CHAT)).await;
    engine.open_gate();
    client.until("two").await;
    engine.open_gate();
    let first = client.response().await;
    assert!(first.whole && first.text().ends_with("data: [DONE]\n\n"), "{}", first.text());
    assert_eq!(client.response().await.text(), COMPLETION);
    assert_eq!(client.response().await.status(), 200);
    assert_eq!(client.response().await.text(), COMPLETION);
    assert_eq!(client.response().await.text(), COMPLETION);
    assert_eq!((engine.count(), engine.left()), (4, 0));
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_http_1_0_is_served_until_the_connection_closes() {
    let engine = Engine::start(|number, _| {
        if number == 0 {
            return completion();
        }
        let stream = crate::engine::STREAM.to_owned()
            + &crate::engine::chunk(&crate::engine::event("one"))
            + &crate::engine::chunk(&crate::engine::ending())
            + crate::engine::LAST;
        vec![crate::engine::send(stream)]
    })
    .await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let old = |body: &str| {
        format!("POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
    };
    let mut client = gateway.client().await;
    assert_eq!(client.request(old(CHAT)).await.text(), COMPLETION);
    client.closed().await;
    let mut client = gateway.client().await;
    let stream = client.request(old(STREAMED)).await;
    assert_eq!(stream.head.header("transfer-encoding"), None);
    assert_eq!(stream.text(), crate::engine::event("one") + &crate::engine::ending());
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn head_requests_get_a_head_and_the_connection_stays_open() {
    let (_engine, gateway) = plain().await;
    let mut client = gateway.client().await;
    for path in ["/health", "/ready", "/v1/models"] {
        client.send(format!("HEAD {path} HTTP/1.1\r\nhost: gate\r\n\r\n")).await;
        assert_eq!(client.response_to_head().await.status(), 200, "{path}");
    }
    client.send("HEAD /v1/chat/completions HTTP/1.1\r\nhost: gate\r\n\r\n").await;
    assert_eq!(client.response_to_head().await.status(), 405);
    assert_eq!(client.request(get("/health")).await.status(), 200, "a response to HEAD has no body");
    let models = gateway.request(get("/v1/models")).await.json();
    let ids: Vec<&str> = models["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["m", "alias"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_waits_for_100_continue_gets_it_before_it_sends() {
    let (engine, gateway) = plain().await;
    let mut client = gateway.client().await;
    let request = post("/v1/chat/completions", "expect: 100-continue\r\n", CHAT.as_bytes());
    let head = request.len() - CHAT.len();
    client.send(&request[..head]).await;
    assert_eq!(client.head().await.status, 100);
    assert_eq!(client.request(CHAT).await.text(), COMPLETION);
    assert_eq!(engine.seen()[0].header("expect"), None);
    let other = post("/v1/chat/completions", "expect: a-miracle\r\n", CHAT.as_bytes());
    gateway.request(other).await.is(417, "expectation_failed");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrades_are_refused_with_a_reason() {
    let (engine, gateway) = plain().await;
    let web_socket = "GET /v1/chat/completions HTTP/1.1\r\nhost: gate\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
                      sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    gateway.request(web_socket).await.is(501, "upgrade_not_supported");
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_connection_serves_many_requests_on_both_sides() {
    let (engine, gateway) = plain().await;
    let mut client = gateway.client().await;
    for _ in 0..50 {
        assert_eq!(client.request(chat(CHAT)).await.text(), COMPLETION);
    }
    let connections: std::collections::HashSet<usize> = engine.seen().iter().map(|seen| seen.connection).collect();
    assert_eq!(connections.len(), 1, "the connection to the engine is reused");
    // The gateway obeys a client's `connection: close`.
    let closing = post("/v1/chat/completions", "connection: close\r\n", CHAT.as_bytes());
    assert_eq!(client.request(closing).await.text(), COMPLETION);
    client.closed().await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_head_and_half_a_body_release_everything() {
    let (engine, gateway) = plain().await;
    for length in [1, 10, 40, 100, chat(CHAT).len() - 1] {
        let mut client = gateway.client().await;
        client.send(&chat(CHAT)[..length]).await;
        drop(client);
    }
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 200);
    assert_eq!(engine.count(), 1);
    gateway.settled().await;
    let connections = async || gateway.metric("sluice_client_connections", &[]).await;
    eventually("all connections have ended", async || connections().await == 0.0).await;
    assert!(tokio::time::timeout(TIMEOUT, gateway.stop()).await.expect("half requests hold up the stop"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clients_request_id_is_kept_and_a_bad_one_replaced() {
    let (engine, gateway) = plain().await;
    let response = gateway.request(post("/v1/chat/completions", "x-request-id: mine-7\r\n", CHAT.as_bytes())).await;
    assert_eq!(response.head.header("x-request-id"), Some("mine-7"));
    assert!(engine.seen()[0].header("x-request-id").unwrap().starts_with("mine-7-"));
    let long = format!("x-request-id: {}\r\n", "x".repeat(4_000));
    let response = gateway.request(post("/v1/chat/completions", &long, CHAT.as_bytes())).await;
    let id = response.head.header("x-request-id").unwrap();
    assert_eq!(id.len(), 32);
    assert_eq!(engine.seen()[1].header("x-request-id"), Some(id));
    assert!(response.head.header("server-timing").unwrap().starts_with("estimate;dur="));
    assert_eq!(response.head.header("x-sluice-pool"), Some("only"));
}
