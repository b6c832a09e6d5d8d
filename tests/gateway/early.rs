//! Backends that respond, or stop reading, before they have received a large request.

use std::collections::HashSet;
use std::io::Write;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::client::{CHAT, STREAMED, chat, post};
use crate::engine::{COMPLETION, Engine, LAST, STREAM, Step, chunk, completion, ending, event, json, response, send};
use crate::test_gateway::{TestGateway, eventually};

const REFUSAL: &str = r#"{"error":{"message":"no","type":"x","param":null,"code":401}}"#;

/// Bytes of a large prompt: more than fit into the gateway's send buffer (4 MiB by default,
/// `net.ipv4.tcp_wmem`) and a hasty engine's receive buffer together.
const LARGE: usize = 6 << 20;

fn large() -> Vec<u8> {
    let prompt = "lorem ipsum ".repeat(LARGE / 12);
    chat(&format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{prompt}"}}]}}"#))
}

/// If the gateway wrote until the engine closes the connection, it would lose the response. A
/// prompt that fits into the socket buffers would not show this fault.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_before_the_body_was_read_reaches_the_client_and_is_no_failure_of_the_backend() {
    let refusal = |status| Step::Send(response(status, "application/json", REFUSAL.as_bytes()));
    let only_head = |status: u16| send(format!("HTTP/1.1 {status} No\r\ncontent-length: {}\r\n\r\n", REFUSAL.len()));
    for (what, status, body, steps) in [
        ("closed with the body unread, which resets the connection", 401, REFUSAL, vec![refusal(401), Step::Close]),
        ("kept open, and nothing read", 413, REFUSAL, vec![refusal(413), Step::Deaf]),
        ("kept open and read", 413, REFUSAL, vec![refusal(413), Step::Body, Step::Deaf]),
        ("closed behind the head", 413, "", vec![only_head(413), Step::Close]),
        (
            "interim responses first",
            401,
            REFUSAL,
            vec![send("HTTP/1.1 100 Continue\r\n\r\n"), refusal(401), Step::Close],
        ),
    ] {
        let engine = || {
            Engine::hasty({
                let steps = steps.clone();
                move |_, _| steps.clone()
            })
        };
        let engines = [engine().await, engine().await];
        let gateway = TestGateway::over(&[engines[0].url(), engines[1].url()], &["timeouts.send=5s"]).await;
        for _ in 0..8 {
            let response = gateway.request(large()).await;
            assert_eq!((response.status(), response.text().as_str(), response.whole), (status, body, true), "{what}");
        }
        let connections: HashSet<_> = engines
            .iter()
            .enumerate()
            .flat_map(|(e, engine)| engine.seen().into_iter().map(move |r| (e, r.connection)))
            .collect();
        assert_eq!(connections.len(), 8, "{what}: one delivery each, and no connection was used again");
        assert_eq!([gateway.state(0), gateway.state(1)], ["ready", "ready"], "{what}");
        gateway.recorded("refused", 8.0).await;
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_stops_reading_is_given_up_in_time_and_another_one_takes_over() {
    let deaf = Engine::hasty(|_, _| vec![Step::Deaf]).await;
    let gateway = TestGateway::over(&[deaf.url()], &["timeouts.send=200ms"]).await;
    let begun = Instant::now();
    gateway.request(large()).await.is(504, "upstream_timeout");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    gateway.recorded("timeout", 1.0).await;
    gateway.settled().await;

    let good = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[deaf.url(), good.url()], &["timeouts.send=200ms"]).await;
    let before = deaf.count();
    while deaf.count() == before {
        assert_eq!(gateway.request(large()).await.text(), COMPLETION);
        assert!(good.count() < 100, "the other backend is never asked");
    }
    gateway.counts("sluice_retries_total", "reason=\"timeout\"", 1.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_that_begins_before_the_body_was_read_does_not_cut_the_body() {
    let engine = Engine::hasty(|_, _| {
        let begun = STREAM.to_owned() + &chunk(&event("one"));
        vec![send(begun), Step::Gate, Step::Body, send(chunk(&ending()) + LAST)]
    })
    .await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    client.send(large()).await.until("one").await;
    engine.open_gate();
    let response = client.response().await;
    assert!(response.whole && response.text() == event("one") + &ending(), "{}", response.text());
    let sent = large();
    let seen = &engine.seen()[0].body;
    assert!(sent.ends_with(seen) && seen.len() > LARGE, "{} bytes arrived", seen.len());
    gateway.recorded("completed", 1.0).await;
    gateway.settled().await;
}

/// Two engines that close a used connection without sending a byte, and answer 503 on a new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_connections_do_not_multiply_the_deliveries_of_a_request() {
    for attempts in [1, 2, 3] {
        let engine = || {
            let used = Mutex::new(HashSet::new());
            Engine::start(move |_, seen| match seen.header("x-request-id") {
                Some(id) if id.starts_with("warm") => {
                    used.lock().insert(seen.connection);
                    completion()
                }
                _ if used.lock().contains(&seen.connection) => vec![Step::Close],
                _ => vec![Step::Send(response(503, "application/json", b"{}"))],
            })
        };
        let engines = [engine().await, engine().await];
        let set = format!("retry.attempts={attempts}");
        let gateway = TestGateway::over(&[engines[0].url(), engines[1].url()], &[&set]).await;
        let ask = |id: &str| post("/v1/chat/completions", &format!("x-request-id: {id}\r\n"), CHAT.as_bytes());
        let mut warm = 0;
        while engines.iter().any(|engine| engine.count() == 0) {
            assert_eq!(gateway.request(ask("warm")).await.status(), 200);
            warm += 1;
            assert!(warm < 1_000, "one engine is never asked");
        }
        gateway.settled().await;
        let response = gateway.request(ask("r")).await;
        assert!([502, 503].contains(&response.status()), "{}", response.text());
        let ids: Vec<String> = engines
            .iter()
            .flat_map(Engine::seen)
            .map(|seen| seen.header("x-request-id").unwrap().to_owned())
            .filter(|id| !id.starts_with("warm"))
            .collect();
        assert_eq!(ids.len(), attempts, "deliveries: {ids:?}");
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), attempts, "an id is used twice: {ids:?}");
        gateway.settled().await;
    }
}

/// If a request does not fit into the socket buffers, the gateway finds a stale connection while it
/// still writes the request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_request_that_meets_a_stale_connection_is_no_failure_of_the_backend() {
    let used = Mutex::new(HashSet::new());
    let engine = Engine::hasty(move |_, seen| match used.lock().insert(seen.connection) {
        true => [vec![Step::Body], completion()].concat(),
        false => vec![Step::EndSending, Step::Deaf],
    })
    .await;
    let gateway = TestGateway::over(&[engine.url()], &["health.failures=1"]).await;
    let mut answered = 0;
    while gateway.metric("sluice_retries_total", &["reason=\"stale_connection\""]).await < 3.0 {
        let response = gateway.request(large()).await;
        assert_eq!((response.status(), response.text().as_str()), (200, COMPLETION));
        answered += 1;
        assert!(answered < 100, "connections are never used again");
    }
    gateway.recorded("completed", f64::from(answered)).await;
    let stale = gateway.metric("sluice_retries_total", &["reason=\"stale_connection\""]).await;
    assert_eq!(gateway.metric("sluice_retries_total", &[]).await, stale, "for no other reason");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_head_on_a_used_connection_is_a_failure_and_not_a_stale_connection() {
    let used = Mutex::new(HashSet::new());
    let engine = Engine::start(move |_, seen| match used.lock().insert(seen.connection) {
        true => completion(),
        false => vec![send("HTTP/1.1 200 OK\r\ncontent-"), Step::Close],
    })
    .await;
    let gateway = TestGateway::over(&[engine.url()], &["retry.attempts=2", "health.failures=1000"]).await;
    let mut asked = 0;
    while gateway.request(chat(CHAT)).await.status() == 200 {
        asked += 1;
        assert!(asked < 100, "connections are never used again");
    }
    assert_eq!(gateway.metric("sluice_retries_total", &[]).await, 0.0);
    gateway.recorded("upstream_error", 1.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_503_inside_a_stream_keeps_its_status_and_its_words_where_there_is_one_backend() {
    let busy = r#"{"error":{"message":"the engine is full","type":"ServiceUnavailable","param":null,"code":503}}"#;
    let body = chunk(&format!("data: {busy}\n\ndata: [DONE]\n\n")) + LAST;
    let patient = STREAM.replacen("\r\n", "\r\nretry-after: 7\r\n", 1);
    for (head, seconds) in [(STREAM, 1..=60), (patient.as_str(), 7..=7)] {
        let engine = Engine::always(vec![send(head.to_owned() + &body)]).await;
        let gateway = TestGateway::over(&[engine.url()], &[]).await;
        for (path, shape) in [("/v1/chat/completions", "service_unavailable"), ("/v1/messages", "overloaded_error")] {
            let response = gateway.request(post(path, "", STREAMED.as_bytes())).await;
            assert_eq!(response.status(), 503, "{}", response.text());
            assert!(seconds.contains(&response.head.retry_after()), "{:?}", response.head);
            let error = &response.json()["error"];
            assert_eq!((&error["message"], &error["type"]), (&"the engine is full".into(), &shape.into()));
        }
        assert_eq!(gateway.state(0), "ready");
        gateway.recorded("upstream_error", 2.0).await;
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn media_types_have_no_case() {
    let usage =
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"total_tokens\":11,\"completion_tokens\":2}}\n\n";
    for kind in ["Text/Event-Stream", "TEXT/EVENT-STREAM ; Charset=UTF-8", "text/event-stream;charset=utf-8"] {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n");
        let end = ending();
        let (finish, done) = end.split_at(end.find("data: [DONE]").unwrap());
        let body = chunk(&event("one")) + &chunk(finish) + &chunk(usage) + &chunk(done) + LAST;
        let engine = Engine::always(vec![send(head + &body)]).await;
        let gateway = TestGateway::over(&[engine.url()], &["pool.only.usage=final"]).await;
        let response = gateway.request(chat(STREAMED)).await;
        assert_eq!(response.text(), event("one") + &end, "{kind}: injected usage shows");
        assert_eq!(response.head.header("content-type"), Some(kind), "unchanged");
        gateway.recorded("completed", 1.0).await;
        gateway.settled().await;
    }
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn coded(coding: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: {coding}\r\ncontent-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_an_engine_compresses_all_the_same_is_decoded_and_metered() {
    let usage =
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"total_tokens\":10009,\"completion_tokens\":10000}}\n\n";
    let end = ending();
    let (finish, done) = end.split_at(end.find("data: [DONE]").unwrap());
    let many = event("word").repeat(10_000);
    for coding in ["gzip", "X-GZIP"] {
        let stream = gzip(&[&many, finish, usage, done].concat());
        let engine = Engine::always(vec![Step::Send(coded(coding, &stream))]).await;
        let gateway = TestGateway::over(&[engine.url()], &["pool.only.usage=final"]).await;
        let mut client = gateway.client().await;
        for _ in 0..3 {
            let response = client.request(chat(STREAMED)).await;
            assert_eq!(response.status(), 200, "{}", response.text());
            assert!(
                response.whole && response.text() == many.clone() + &end,
                "{coding}: {} bytes",
                response.body.len()
            );
            assert_eq!(response.head.header("content-encoding"), None);
        }
        gateway.counts("sluice_generation_tokens_total", "", 30_000.0).await;
        gateway.recorded("completed", 3.0).await;
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_in_another_coding_passes_as_it_is_unless_something_must_be_taken_out_of_it() {
    let bytes = b"\x1b\x0f\x00\xf8 only a decoder of brotli could read this";
    let engine = Engine::always(vec![Step::Send(coded("br", bytes))]).await;
    let gateway = TestGateway::over(&[engine.url()], &["pool.only.usage=off"]).await;
    let response = gateway.request(chat(STREAMED)).await;
    assert_eq!((response.status(), response.body.as_slice(), response.whole), (200, &bytes[..], true));
    assert_eq!(response.head.header("content-encoding"), Some("br"));
    gateway.recorded("completed", 1.0).await;
    gateway.settled().await;

    let gateway = TestGateway::over(&[engine.url()], &["pool.only.usage=final"]).await;
    gateway.request(chat(STREAMED)).await.is(502, "upstream_broke");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_are_asked_for_uncompressed_responses() {
    let engine = Engine::always(vec![Step::Send(json(COMPLETION.as_bytes()))]).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let request = post("/v1/chat/completions", "accept-encoding: gzip, br\r\n", CHAT.as_bytes());
    assert_eq!(gateway.request(request).await.text(), COMPLETION);
    let head = engine.seen()[0].head.to_ascii_lowercase();
    let lines: Vec<&str> = head.lines().filter(|line| line.starts_with("accept-encoding")).collect();
    assert_eq!(lines, ["accept-encoding: identity"]);
    eventually("it is recorded", async || gateway.metric("sluice_requests_total", &[]).await == 1.0).await;
    gateway.settled().await;
}
