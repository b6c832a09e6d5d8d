//! A failed request is retried on another backend, but only until the client has received a token.
//!
//! After that it is never retried. `continued.rs` has the streams that another backend continues.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use parking_lot::Mutex;

use crate::client::{CHAT, STREAMED, chat, post};
use crate::engine::{
    COMPLETION, Engine, LAST, ReceivedRequest, STREAM, Step, chunk, completion, ending, event, json, response, send,
};
use crate::test_gateway::TestGateway;

const BUSY: &str = r#"{"error":{"message":"engine is full","type":"ServiceUnavailable","param":null,"code":503}}"#;

fn whole_stream() -> Vec<Step> {
    vec![send(STREAM.to_owned() + &chunk(&event("good")) + &chunk(&ending()) + LAST)]
}

fn good(seen: &ReceivedRequest) -> Vec<Step> {
    if seen.body == STREAMED.as_bytes() { whole_stream() } else { completion() }
}

/// Two engines and a gateway. The first request fails with the steps `bad`, on whichever engine it
/// arrives; all later requests succeed.
async fn first_fails(bad: Vec<Step>) -> ([Engine; 2], TestGateway) {
    let requests = Arc::new(AtomicUsize::new(0));
    let engine = || {
        let (requests, bad) = (Arc::clone(&requests), bad.clone());
        Engine::start(move |_, seen| if requests.fetch_add(1, SeqCst) == 0 { bad.clone() } else { good(seen) })
    };
    let engines = [engine().await, engine().await];
    let gateway = TestGateway::over(&[engines[0].url(), engines[1].url()], &["retry.continue=off"]).await;
    (engines, gateway)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_before_the_first_token_is_retried_on_the_other_backend() {
    let busy_event = format!("data: {BUSY}\n\ndata: [DONE]\n\n");
    let role = event("").replace("\"content\"", "\"role\":\"assistant\",\"content\"");
    for (what, reason, bad) in [
        ("closed at once", "broken", vec![Step::Close]),
        ("garbage", "broken", vec![send("garbage\r\n\r\n"), Step::Close]),
        ("502", "status", vec![Step::Send(response(502, "text/plain", b"bad gateway"))]),
        ("503", "status", vec![Step::Send(response(503, "application/json", BUSY.as_bytes()))]),
        ("a head and nothing more", "broken", vec![send(STREAM), Step::Close]),
        ("a role and nothing more", "broken", vec![send(STREAM.to_owned() + &chunk(&role)), Step::Close]),
        ("a role, and an end in order", "broken", vec![send(STREAM.to_owned() + &chunk(&role) + LAST)]),
        ("503 behind a role", "in_stream", vec![send(STREAM.to_owned() + &chunk(&role) + &chunk(&busy_event) + LAST)]),
        ("503 in the stream", "in_stream", vec![send(STREAM.to_owned() + &chunk(&busy_event) + LAST)]),
    ] {
        let (engines, gateway) = first_fails(bad).await;
        let response = gateway.request(post("/v1/chat/completions", "x-request-id: r\r\n", STREAMED.as_bytes())).await;
        assert_eq!((response.status(), response.text()), (200, event("good") + &ending()), "{what}");
        assert_eq!(engines.each_ref().map(Engine::count), [1, 1], "{what}: the other backend takes over");
        let mut ids: Vec<String> =
            engines.iter().map(|engine| engine.seen()[0].header("x-request-id").unwrap().to_owned()).collect();
        ids.sort();
        assert!(ids[0].starts_with("r-") && ids[1] == format!("{}-r2", ids[0]), "{what}: {ids:?}");
        assert_eq!(response.head.header("x-request-id"), Some("r"));
        gateway.counts("sluice_retries_total", &format!("reason=\"{reason}\""), 1.0).await;
        gateway.recorded("completed", 1.0).await;
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_connection_is_retried_on_the_other_backend() {
    let gone = Engine::always(completion()).await;
    let stays = Engine::always(completion()).await;
    // Probes are rare, so that requests notice the dead engine first. With round robin, three
    // requests do.
    let sets = ["health.probe_interval=1h", "pool.only.policy=round_robin"];
    let gateway = TestGateway::over(&[gone.url(), stays.url()], &sets).await;
    gone.end().await;
    for _ in 0..10 {
        assert_eq!(gateway.request(chat(CHAT)).await.text(), COMPLETION);
    }
    assert_eq!(stays.count(), 10);
    gateway.counts("sluice_retries_total", "reason=\"connect\"", 3.0).await;
    assert_eq!(gateway.state(0), "ejected");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_backend_is_replaced_when_the_first_token_is_overdue() {
    let requests = Arc::new(AtomicUsize::new(0));
    let engine = || {
        let requests = Arc::clone(&requests);
        Engine::start(move |_, seen| if requests.fetch_add(1, SeqCst) == 0 { vec![Step::Silence] } else { good(seen) })
    };
    let engines = [engine().await, engine().await];
    let gateway = TestGateway::over(&[engines[0].url(), engines[1].url()], &["timeouts.first_byte.base=200ms"]).await;
    let response = gateway.request(chat(STREAMED)).await;
    assert_eq!(response.text(), event("good") + &ending());
    gateway.counts("sluice_retries_total", "reason=\"timeout\"", 1.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_every_backend_is_full_the_client_gets_the_engines_own_response() {
    let full = || Engine::always(vec![Step::Send(response(503, "application/json", BUSY.as_bytes()))]);
    let engines = [full().await, full().await];
    let gateway = TestGateway::over(&[engines[0].url(), engines[1].url()], &[]).await;
    for round in 1..=10 {
        let response = gateway.request(chat(CHAT)).await;
        assert_eq!((response.status(), response.text().as_str()), (503, BUSY));
        assert_eq!(engines[0].count() + engines[1].count(), 2 * round);
    }
    assert_eq!([gateway.state(0), gateway.state(1)], ["ready", "ready"], "a full engine is not a broken one");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_first_token_no_request_is_retried() {
    let bad = vec![send(STREAM.to_owned() + &chunk(&event("bad"))), Step::Close];
    let (engines, gateway) = first_fails(bad).await;
    let mut client = gateway.client().await;
    let response = client.request(chat(STREAMED)).await;
    assert!(
        response.text().starts_with(&event("bad")) && response.text().contains("event: error"),
        "{}",
        response.text()
    );
    assert!(!response.whole);
    client.closed().await;
    assert_eq!(engines[0].count() + engines[1].count(), 1);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_4xx_that_is_the_client_s_is_never_retried() {
    for status in [400, 404, 422] {
        let (engines, gateway) = first_fails(vec![Step::Send(response(status, "application/json", b"{}"))]).await;
        assert_eq!(gateway.request(chat(CHAT)).await.status(), status);
        assert_eq!(engines[0].count() + engines[1].count(), 1);
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_are_bounded() {
    // Each engine answers before it breaks the connection, so this does not count as a death of the
    // engine. If it did, the body would not be delivered a third time.
    let bad = || Engine::always(vec![send("garbage\r\n\r\n"), Step::Close]);
    let engines = [bad().await, bad().await, bad().await, bad().await];
    let urls: Vec<String> = engines.iter().map(Engine::url).collect();
    for attempts in [1, 2, 3] {
        let before: usize = engines.iter().map(Engine::count).sum();
        let gateway = TestGateway::over(&urls, &[&format!("retry.attempts={attempts}")]).await;
        gateway.request(chat(CHAT)).await.is(502, "upstream_broke");
        assert_eq!(engines.iter().map(Engine::count).sum::<usize>() - before, attempts);
        gateway.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_that_the_engine_closes_costs_no_request() {
    // vLLM closes idle connections after 5 s. This engine closes a used connection without a byte
    // when the next request arrives on it, or right after its response.
    let used = Mutex::new(HashSet::new());
    let engine = Engine::start(move |number, seen| {
        if !used.lock().insert(seen.connection) {
            return vec![Step::Close];
        }
        let response = Step::Send(json(COMPLETION.as_bytes()));
        if number % 2 == 0 { vec![response, Step::Close] } else { vec![response] }
    })
    .await;
    let gateway = TestGateway::over(&[engine.url()], &["retry.attempts=2"]).await;
    let mut client = gateway.client().await;
    let mut answered = 0.0;
    while gateway.metric("sluice_retries_total", &["reason=\"stale_connection\""]).await < 3.0 {
        let response = client.request(chat(CHAT)).await;
        assert_eq!((response.status(), response.text().as_str()), (200, COMPLETION));
        answered += 1.0;
        assert!(answered < 1_000.0, "connections are never used again");
    }
    gateway.recorded("completed", answered).await;
    assert_eq!(gateway.state(0), "ready", "a stale connection does not count against the backend");
    gateway.settled().await;
}
