//! Limits on all clients together: bytes of request bodies, and connections.
//!
//! A client that exceeds a limit gets 503 or 408, and the requests of other clients are still
//! served.

use std::time::Duration;

use tokio::time::Instant;

use crate::client::{CHAT, STREAMED, TestClient, chat, get, post};
use crate::engine::{COMPLETION, Engine, Step, completion, gated_stream};
use crate::test_gateway::{TestGateway, eventually};

const MIB: usize = 1 << 20;

async fn plain(sets: &[&str]) -> (Engine, TestGateway) {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], sets).await;
    (engine, gateway)
}

async fn counted(gateway: &TestGateway) -> f64 {
    gateway.metric("sluice_body_bytes", &[]).await
}

fn long(bytes: usize) -> String {
    CHAT.replace("hi", &"long ".repeat(bytes / 5))
}

/// Begins a request with a body of `announced` bytes and sends `sent` bytes of it.
async fn begin(gateway: &TestGateway, announced: usize, sent: usize) -> TestClient {
    let mut client = gateway.client().await;
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\ncontent-length: {announced}\r\n\r\n").into_bytes();
    client.send([head, vec![b' '; sent]].concat()).await;
    client
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_are_sent_in_part_and_held_take_no_more_than_the_memory_for_bodies() {
    let sets = ["server.max_body=4MiB", "server.max_body_memory=16MiB", "server.body_timeout=10m"];
    let (engine, gateway) = plain(&sets).await;
    assert_eq!(gateway.metric("sluice_body_bytes_max", &[]).await, (16 * MIB) as f64);
    let mut held = Vec::new();
    for number in 0..8 {
        let client = begin(&gateway, 4 * MIB, 3 * MIB + MIB / 2).await;
        held.push(client);
        if number < 3 {
            let bytes = ((number + 1) * (3 * MIB + MIB / 2)) as f64;
            eventually("it is counted", async || counted(&gateway).await == bytes).await;
        }
    }
    // Large bodies may take seven eighths of the memory, which are 14 MiB. There is no room for a
    // fourth large body, so it is refused before its end arrives. A body without an announced size
    // is refused when it has filled the rest.
    let mut growing = gateway.client().await;
    growing.send("POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\ntransfer-encoding: chunked\r\n\r\n").await;
    growing.send(format!("{:x}\r\n{}", 4 * MIB, " ".repeat(4 * MIB))).await;
    held.push(growing);
    for client in &mut held[3..] {
        let response = client.response().await;
        assert!(response.is(503, "body_memory_full").head.retry_after() >= 1);
        client.closed().await;
    }
    assert_eq!(counted(&gateway).await, (3 * (3 * MIB + MIB / 2)) as f64);
    gateway.counts("sluice_shed_total", "reason=\"body_memory_full\"", 6.0).await;
    // Small requests are still served, but a large request is not.
    assert_eq!(gateway.request(chat(&long(MIB - 200))).await.status(), 200);
    gateway.request(chat(&long(4 * MIB - 200))).await.is(503, "body_memory_full");
    drop(held);
    eventually("the memory is free", async || counted(&gateway).await == 0.0).await;
    assert_eq!(gateway.request(chat(&long(2 * MIB))).await.status(), 200);
    assert_eq!(engine.count(), 2);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_is_counted_while_it_waits_and_is_sent_and_until_it_is_not_needed() {
    let engine = Engine::always(gated_stream()).await;
    let sets = ["server.max_body=4MiB", "server.max_body_memory=4MiB", "pool.only.slots=1"];
    let gateway = TestGateway::over(&[engine.url()], &sets).await;
    let body = STREAMED.replace("hi", &"long ".repeat(MIB / 5));
    let size = body.len() as f64;
    // Renaming a model splits the body into pieces that share its memory.
    let body = body.replace("\"m\"", "\"alias\"");
    let mut running = gateway.client().await;
    running.send(chat(&body)).await.until("one").await;
    eventually("a body that is not sent again is free", async || counted(&gateway).await == 0.0).await;
    let mut waiting = gateway.client().await;
    waiting.send(chat(&body)).await;
    eventually("one waits", async || gateway.load() == (1, 1)).await;
    assert_eq!(counted(&gateway).await, size + 4.0);
    let mut leaving = gateway.client().await;
    leaving.send(chat(&body)).await;
    eventually("two wait", async || gateway.load() == (1, 2)).await;
    assert_eq!(counted(&gateway).await, 2.0 * (size + 4.0));
    drop(leaving);
    eventually("one has left", async || counted(&gateway).await == size + 4.0).await;
    for _ in 0..4 {
        engine.open_gate();
    }
    assert!(running.response().await.whole && waiting.response().await.whole);
    assert_eq!(counted(&gateway).await, 0.0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_trickles_is_408_although_it_never_pauses() {
    let sets = ["server.body_timeout=1500ms", "server.body_min_rate=10KiB"];
    let (engine, gateway) = plain(&sets).await;
    let begun = Instant::now();
    // A client that sends half of the body at once gets no more time for the rest.
    for sent in [0, 100_000] {
        let mut client = begin(&gateway, 200_000, sent).await;
        while client.try_send(b" ").await.is_ok() && begun.elapsed() < Duration::from_secs(20) {
            if client.has_response().await {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let response = client.response().await;
        assert!(response.is(408, "body_timeout").head.retry_after() >= 1);
        client.closed().await;
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "each byte extended the deadline");
    // A client that sends at the minimum rate may take longer than `server.body_timeout`.
    let request = chat(&long(40_000));
    let mut client = gateway.client().await;
    let begun = Instant::now();
    for piece in request.chunks(2_500) {
        client.send(piece).await;
        tokio::time::sleep(Duration::from_millis(110)).await;
    }
    assert!(begun.elapsed() > Duration::from_millis(1_500));
    assert_eq!(client.response().await.text(), COMPLETION);
    assert_eq!(engine.count(), 1);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_over_the_limit_get_503_and_leave_room_again() {
    let engine = Engine::always(vec![Step::Gate, Step::Send(crate::engine::json(COMPLETION.as_bytes()))]).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.max_connections=4"]).await;
    assert_eq!(gateway.metric("sluice_client_connections_max", &[]).await, 4.0);
    let connections = async || gateway.metric("sluice_client_connections", &[]).await;
    // One address has requests on three quarters of the connections.
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut client = gateway.client().await;
        client.send(chat(CHAT)).await;
        held.push(client);
    }
    eventually("three run", async || engine.count() == 3).await;
    for request in [chat(CHAT), get("/health").into_bytes(), post("/v1/chat/completions", "", &[b' '; 2 * MIB])] {
        let mut client = gateway.client().await;
        client.send(request).await;
        let response = client.response().await;
        assert!(response.is(503, "too_many_connections").head.retry_after() >= 1);
        assert_eq!(client.closed().await, "");
    }
    // A connection without a request keeps the last place until another address needs this place.
    let mut silent = gateway.client().await;
    eventually("it is open", async || connections().await == 4.0).await;
    let connected = async |from: &str| TestClient::between(from.parse().unwrap(), gateway.address()).await;
    let mut fourth = connected("127.0.0.2:0").await;
    assert_eq!(silent.closed().await, "");
    fourth.send("POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\ncontent-length: 9\r\n\r\n{").await;
    let bytes = (3 * CHAT.len() + 1) as f64;
    eventually("its request has begun", async || counted(&gateway).await == bytes).await;
    // Now each connection has a request, so no connection gives way to another address.
    connected("127.0.0.3:0").await.request(get("/health")).await.is(503, "too_many_connections");
    drop(fourth);
    eventually("it is closed", async || connections().await == 3.0).await;
    engine.open_gate();
    eventually("one has its response", async || gateway.load().0 == 2).await;
    drop(held.remove(0));
    eventually("one has left", async || connections().await < 3.0).await;
    let mut client = gateway.client().await;
    client.send(chat(CHAT)).await;
    eventually("it runs", async || engine.count() == 4).await;
    for _ in 0..3 {
        engine.open_gate();
    }
    assert_eq!(client.response().await.text(), COMPLETION);
    for client in &mut held {
        assert_eq!(client.response().await.status(), 200);
    }
    gateway.counts("sluice_shed_total", "reason=\"too_many_connections\"", 4.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_address_has_a_limit_of_its_own() {
    let (_engine, gateway) = plain(&["server.max_connections_per_address=2"]).await;
    let _held = [gateway.client().await, gateway.client().await];
    eventually("both are open", async || gateway.metric("sluice_client_connections", &[]).await == 2.0).await;
    gateway.request(get("/health")).await.is(503, "too_many_connections");
    let mut other = TestClient::between("127.0.0.2:0".parse().unwrap(), gateway.address()).await;
    assert_eq!(other.request(get("/health")).await.status(), 200);
}
