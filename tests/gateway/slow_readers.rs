//! Clients that read slowly, or not at all.
//!
//! Such a client holds the bytes of its response in the gateway, but no slot of an engine. A client
//! that reads slowly gets its whole response, however long that takes.

use std::time::Duration;

use http::StatusCode;
use tokio::net::{TcpSocket, TcpStream};

use crate::client::{STREAMED, TestClient, chat};
use crate::engine::{Engine, LAST, STREAM, Step, chunk, completion, ending, event, send};
use crate::http2_client::{Client, over, rest, until};
use crate::test_gateway::{TestGateway, eventually, key_digest, one_pool};

/// Tokens of a stream. The stream has more bytes than the sockets and the buffers below the gateway
/// can hold.
const TOKENS: usize = 100;
const TOKEN: usize = 2_000;

fn long_stream() -> Vec<Step> {
    let token = chunk(&event(&"#".repeat(TOKEN)));
    let mut steps = vec![send(STREAM)];
    steps.extend((0..TOKENS).map(|_| send(token.clone())));
    steps.push(send(chunk(&ending()) + LAST));
    steps
}

/// A stream that the engine sends at once when the request arrives.
fn ready_stream() -> Vec<Step> {
    let token = chunk(&event(&"#".repeat(TOKEN)));
    vec![send([STREAM, &token.repeat(TOKENS), &chunk(&ending()), LAST].concat())]
}

/// Bytes that a reluctant client accepts ahead of reading.
const WINDOW: u32 = 4_000;

/// A connection whose streams may send [`WINDOW`] bytes until the client asks for more.
async fn reluctant(gateway: &TestGateway) -> (Client, tokio::task::JoinHandle<Result<(), h2::Error>>) {
    let stream = TcpStream::connect(gateway.address()).await.unwrap();
    let mut settings = h2::client::Builder::new();
    settings.initial_window_size(WINDOW);
    let (requests, connection) = settings.handshake(stream).await.unwrap();
    (Client::of(requests), tokio::spawn(connection))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_holds_no_slot_and_gets_every_byte_when_it_does() {
    let engine = Engine::always(long_stream()).await;
    let sets = ["pool.0.slots=1", "pool.0.slo={ tpot = \"50ms\", e2el = \"3s\" }"];
    let gateway = TestGateway::over(&[engine.url()], &sets).await;
    let (client, _driver) = reluctant(&gateway).await;
    let body = client.chat(STREAMED).await.head().await.into_body();
    eventually("the slot is free", async || gateway.load() == (0, 0)).await;
    eventually("the response waits", async || held(&gateway).await > 100_000.0).await;
    let (other, _driver) = over(TcpStream::connect(gateway.address()).await.unwrap()).await;
    let (status, text) = other.request("POST", "/v1/chat/completions", STREAMED).await;
    assert_eq!((status, text.len() > TOKENS * TOKEN), (StatusCode::OK, true));

    // This pause is longer than the objective for the whole request.
    tokio::time::sleep(Duration::from_millis(3_100)).await;
    let (text, reset) = rest(body).await;
    assert_eq!((text.matches('#').count(), reset), (TOKENS * TOKEN, None));
    assert!(text.ends_with(&ending()));
    gateway.recorded("completed", 2.0).await;
    assert_eq!(gateway.metric("sluice_slo_requests_total", &["result=\"missed\""]).await, 0.0);
    assert!(gateway.metric("sluice_client_wait_seconds_sum", &[]).await > 3.0);
    eventually("nothing is held", async || held(&gateway).await == 0.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_does_not_read_its_responses_holds_no_slots_beyond_its_limit() {
    let engine = Engine::always(completion()).await;
    let keys = format!(
        "[auth]\nkeys = [{{ name = \"one\", sha256 = \"{}\", limit = {{ in_flight = 1 }} }}]\n",
        key_digest("one")
    );
    let text = one_pool(&[engine.url()]) + &keys;
    let gateway = TestGateway::from_text(&text, &["pool.0.slots=4"]).await;
    let (client, _driver) = reluctant(&gateway).await;
    let mut unread = Vec::new();
    for sent in 1..=12 {
        unread.push(client.chat_as("one", STREAMED).await);
        eventually("the engine has answered", async || engine.count() == sent).await;
        eventually("the slot is free", async || gateway.load() == (0, 0)).await;
    }
    assert_eq!(gateway.slots(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_nothing_is_cut_after_its_time_and_one_that_reads_slowly_is_not() {
    let engine = Engine::always(long_stream()).await;
    let gateway = TestGateway::over(&[engine.url()], &["timeouts.send=3s"]).await;
    let (client, _driver) = reluctant(&gateway).await;
    let unread = client.chat(STREAMED).await.head().await.into_body();
    gateway.recorded("client_gone", 1.0).await;
    let (text, reset) = rest(unread).await;
    assert!(reset.is_some() && text.len() < TOKENS * TOKEN, "{} bytes", text.len());

    let mut slow = client.chat(STREAMED).await.head().await.into_body();
    for _ in 0..8 {
        tokio::time::sleep(Duration::from_millis(400)).await;
        until(&mut slow, "####").await;
    }
    assert_eq!(rest(slow).await.1, None);
    gateway.recorded("completed", 1.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_takes_longer_than_its_pause_for_one_write_gets_every_byte() {
    let engine = Engine::always(ready_stream()).await;
    let gateway = TestGateway::over(&[engine.url()], &["timeouts.send=1s"]).await;
    let (client, _driver) = reluctant(&gateway).await;
    let mut slow = client.chat(STREAMED).await.head().await.into_body();
    eventually("all but the first write waits", async || held(&gateway).await > 100_000.0).await;
    // The client takes three times `timeouts.send` for more bytes than the gateway writes at once.
    let mut read = String::new();
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        read += &until(&mut slow, "#").await;
    }
    let (text, reset) = rest(slow).await;
    assert_eq!(((read + &text).matches('#').count(), reset), (TOKENS * TOKEN, None));
    gateway.recorded("completed", 1.0).await;

    let unread = client.chat(STREAMED).await.head().await.into_body();
    gateway.recorded("client_gone", 1.0).await;
    drop(unread);
    eventually("nothing is held", async || held(&gateway).await == 0.0).await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_http1_client_that_does_not_read_holds_no_slot() {
    let engine = Engine::always(long_stream()).await;
    let gateway = TestGateway::over(&[engine.url()], &["pool.0.slots=1"]).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(WINDOW).unwrap();
    let mut client = TestClient::over(socket.connect(gateway.address()).await.unwrap());
    client.send(chat(STREAMED)).await;
    eventually("the engine has the request", async || engine.count() == 1).await;
    eventually("the slot is free", async || gateway.load() == (0, 0)).await;
    // The kernel's buffers have room for only a part of the response.
    eventually("the rest waits", async || held(&gateway).await > 0.0).await;
    let response = client.response().await;
    assert!(response.whole && response.text().matches('#').count() == TOKENS * TOKEN);
    gateway.settled().await;
}

async fn held(gateway: &TestGateway) -> f64 {
    gateway.metric("sluice_response_bytes", &[]).await
}
