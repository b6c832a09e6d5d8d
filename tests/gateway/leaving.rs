//! Clients that leave: at any stage of the request the engine sees its connection closed and all resources are released.

use std::time::Duration;

use crate::client::{CHAT, Client, STREAMED, chat};
use crate::engine::{Engine, STREAM, Step, gated_stream, send};
use crate::gate::{Gate, eventually, eventually_within};

/// Time in which the engine must see the close and the permit must be released.
const SOON: Duration = Duration::from_secs(1);

async fn over(steps: Vec<Step>, sets: &[&str]) -> (Engine, Gate) {
    let engine = Engine::always(steps).await;
    let gate = Gate::over(&[engine.url()], sets).await;
    (engine, gate)
}

async fn left(engine: &Engine, gate: &Gate, times: usize) {
    eventually_within(SOON, "the engine sees its connection closed", async || engine.left() == times).await;
    gate.settled_within(SOON).await;
    gate.recorded("client_gone", times as f64).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_before_any_response_ends_the_request() {
    for body in [CHAT, STREAMED] {
        let (engine, gate) = over(vec![Step::Silence], &[]).await;
        let mut client = gate.client().await;
        client.send(chat(body)).await;
        eventually("the engine has it", async || engine.count() == 1).await;
        drop(client);
        left(&engine, &gate, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_before_the_first_token_ends_the_request() {
    let (engine, gate) = over(vec![send(STREAM), Step::Silence], &[]).await;
    let mut client = gate.client().await;
    client.send(chat(STREAMED)).await;
    eventually("the engine has it", async || engine.count() == 1).await;
    assert!(gate.metric("sluice_prefill_tokens", &[]).await > 0.0);
    drop(client);
    left(&engine, &gate, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_in_the_middle_of_a_stream_ends_the_request() {
    let (engine, gate) = over(gated_stream(), &[]).await;
    let mut clients: Vec<Client> = Vec::new();
    for _ in 0..8 {
        let mut client = gate.client().await;
        client.send(chat(STREAMED)).await.until("one").await;
        clients.push(client);
    }
    assert_eq!(gate.metric("sluice_in_flight", &[]).await, 8.0);
    assert_eq!(gate.metric("sluice_prefill_tokens", &[]).await, 0.0, "released at the first token");
    assert!(gate.metric("sluice_outstanding_tokens", &[]).await > 0.0);
    drop(clients);
    left(&engine, &gate, 8).await;
    assert_eq!(gate.state(0), "ready", "a client that leaves is not the backend's fault");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_the_queue_never_reaches_an_engine() {
    let (engine, gate) = over(gated_stream(), &["pool.only.slots=1"]).await;
    let mut running = gate.client().await;
    running.send(chat(STREAMED)).await.until("one").await;
    let mut waiting = Vec::new();
    for _ in 0..5 {
        let mut client = gate.client().await;
        client.send(chat(STREAMED)).await;
        waiting.push(client);
    }
    eventually("five wait", async || gate.load() == (1, 5)).await;
    waiting.truncate(1);
    eventually_within(SOON, "four have left", async || gate.load() == (1, 1)).await;
    assert_eq!(gate.metric("sluice_queue_length", &[]).await, 1.0);
    // The remaining request gets its turn.
    engine.open_gate();
    engine.open_gate();
    assert!(running.response().await.whole);
    waiting[0].until("one").await;
    engine.open_gate();
    engine.open_gate();
    assert!(waiting[0].response().await.whole);
    assert_eq!((engine.count(), engine.left()), (2, 0));
    gate.recorded("client_gone", 4.0).await;
    gate.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stops_reading_and_leaves_ends_the_request() {
    // The engine sends without end; the client has not read what was sent to it when it leaves.
    let piece = crate::engine::chunk(&crate::engine::event(&"x".repeat(60_000)));
    let steps = vec![send(STREAM), Step::Endlessly(piece.into_bytes())];
    let (engine, gate) = over(steps, &[]).await;
    let mut client = gate.client().await;
    client.send(chat(STREAMED)).await.until("xxx").await;
    drop(client);
    left(&engine, &gate, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_simulated_engine_aborts_the_request_of_a_client_that_left() {
    let engine = crate::health::sim().await;
    let gate = Gate::over(&[format!("http://{}", engine.addr())], &[]).await;
    let mut client = gate.client().await;
    let endless = STREAMED.replace("\"stream\"", "\"max_tokens\":100000,\"ignore_eos\":true,\"stream\"");
    client.send(chat(&endless)).await.until("data: ").await;
    assert_eq!(engine.snapshot().in_flight, 1);
    drop(client);
    eventually_within(SOON, "the engine aborts", async || engine.snapshot().aborted == 1).await;
    assert_eq!(engine.snapshot().in_flight, 0);
    gate.settled_within(SOON).await;
    gate.stop().await;
    engine.shutdown().await;
}
