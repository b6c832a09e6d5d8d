//! Clients that leave.
//!
//! At any stage of the request the engine sees its connection closed, and all resources are
//! released.

use std::time::Duration;

use crate::client::{CHAT, STREAMED, TestClient, chat};
use crate::engine::{Engine, STREAM, Step, gated_stream, send};
use crate::test_gateway::{TestGateway, eventually, eventually_within};

/// Time in which the engine must see the close and the permit must be released.
const SOON: Duration = Duration::from_secs(1);

async fn over(steps: Vec<Step>, sets: &[&str]) -> (Engine, TestGateway) {
    let engine = Engine::always(steps).await;
    let gateway = TestGateway::over(&[engine.url()], sets).await;
    (engine, gateway)
}

async fn left(engine: &Engine, gateway: &TestGateway, times: usize) {
    eventually_within(SOON, "the engine sees its connection closed", async || engine.left() == times).await;
    gateway.settled_within(SOON).await;
    gateway.recorded("client_gone", times as f64).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_before_any_response_ends_the_request() {
    for body in [CHAT, STREAMED] {
        let (engine, gateway) = over(vec![Step::Silence], &[]).await;
        let mut client = gateway.client().await;
        client.send(chat(body)).await;
        eventually("the engine has it", async || engine.count() == 1).await;
        drop(client);
        left(&engine, &gateway, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_before_the_first_token_ends_the_request() {
    let (engine, gateway) = over(vec![send(STREAM), Step::Silence], &[]).await;
    let mut client = gateway.client().await;
    client.send(chat(STREAMED)).await;
    eventually("the engine has it", async || engine.count() == 1).await;
    assert!(gateway.metric("sluice_prefill_tokens", &[]).await > 0.0);
    drop(client);
    left(&engine, &gateway, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_in_the_middle_of_a_stream_ends_the_request() {
    let (engine, gateway) = over(gated_stream(), &[]).await;
    let mut clients: Vec<TestClient> = Vec::new();
    for _ in 0..8 {
        let mut client = gateway.client().await;
        client.send(chat(STREAMED)).await.until("one").await;
        clients.push(client);
    }
    assert_eq!(gateway.metric("sluice_in_flight", &[]).await, 8.0);
    assert_eq!(gateway.metric("sluice_prefill_tokens", &[]).await, 0.0, "released at the first token");
    assert!(gateway.metric("sluice_outstanding_tokens", &[]).await > 0.0);
    drop(clients);
    left(&engine, &gateway, 8).await;
    assert_eq!(gateway.state(0), "ready", "a client that leaves is not the backend's fault");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_the_queue_never_reaches_an_engine() {
    let (engine, gateway) = over(gated_stream(), &["pool.only.slots=1"]).await;
    let mut running = gateway.client().await;
    running.send(chat(STREAMED)).await.until("one").await;
    let mut waiting = Vec::new();
    for _ in 0..5 {
        let mut client = gateway.client().await;
        client.send(chat(STREAMED)).await;
        waiting.push(client);
    }
    eventually("five wait", async || gateway.load() == (1, 5)).await;
    waiting.truncate(1);
    eventually_within(SOON, "four have left", async || gateway.load() == (1, 1)).await;
    assert_eq!(gateway.metric("sluice_queue_length", &[]).await, 1.0);
    engine.open_gate();
    engine.open_gate();
    assert!(running.response().await.whole);
    waiting[0].until("one").await;
    engine.open_gate();
    engine.open_gate();
    assert!(waiting[0].response().await.whole);
    assert_eq!((engine.count(), engine.left()), (2, 0));
    gateway.recorded("client_gone", 4.0).await;
    gateway.settled().await;
}

#[derive(Clone, Copy, Debug)]
enum Leave {
    Close,
    /// The client closes only its sending side. This counts as leaving, because no HTTP client does
    /// it while it waits.
    HalfClose,
    Reset,
}

impl Leave {
    const ALL: [Self; 3] = [Self::Close, Self::HalfClose, Self::Reset];

    /// Lets the client leave. After [`Leave::HalfClose`], returns the client, which still keeps the
    /// connection open.
    async fn leave(self, mut client: TestClient) -> Option<TestClient> {
        match self {
            Self::Close => drop(client),
            Self::HalfClose => {
                client.half_close().await;
                return Some(client);
            }
            Self::Reset => client.reset(),
        }
        None
    }
}

/// Bytes that a client may have sent after its request: a line break, a byte, a request, the start
/// of a request, and more bytes than the gateway takes with one read.
fn sent_ahead() -> Vec<Vec<u8>> {
    vec![b"\r\n".to_vec(), b"x".to_vec(), chat(CHAT), chat(CHAT)[..40].to_vec(), chat(CHAT).repeat(200)]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_has_sent_more_and_leaves_ends_the_request() {
    // Four stages: not streamed, before the head of a stream, before the first token, and in the
    // middle of a stream.
    let scripts = [
        (CHAT, vec![Step::Silence], None),
        (STREAMED, vec![Step::Silence], None),
        (STREAMED, vec![send(STREAM), Step::Silence], None),
        (STREAMED, gated_stream(), Some("one")),
    ];
    for (body, steps, until) in scripts {
        let (engine, gateway) = over(steps, &[]).await;
        let mut times = 0;
        for more in sent_ahead() {
            for how in Leave::ALL {
                let mut client = gateway.client().await;
                client.send(chat(body)).await;
                // The further bytes may come in the same segment as the request, or after the
                // engine has the request.
                if times % 2 == 0 {
                    eventually("the engine has it", async || engine.count() == times + 1).await;
                }
                client.send(&more).await;
                if let Some(text) = until {
                    client.until(text).await;
                }
                eventually("the engine has it", async || engine.count() == times + 1).await;
                let _open = how.leave(client).await;
                times += 1;
                left(&engine, &gateway, times).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_has_sent_more_and_leaves_the_queue_never_reaches_an_engine() {
    let (engine, gateway) = over(gated_stream(), &["pool.only.slots=1"]).await;
    let mut running = gateway.client().await;
    running.send(chat(STREAMED)).await.until("one").await;
    for more in sent_ahead() {
        for how in Leave::ALL {
            let mut client = gateway.client().await;
            client.send([&chat(STREAMED)[..], &more].concat()).await;
            eventually("it waits", async || gateway.load() == (1, 1)).await;
            let _open = how.leave(client).await;
            eventually_within(SOON, "it has left the queue", async || gateway.load() == (1, 0)).await;
        }
    }
    engine.open_gate();
    engine.open_gate();
    assert!(running.response().await.whole);
    assert_eq!((engine.count(), engine.left()), (1, 0));
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_has_sent_the_next_request_and_stays_gets_both_responses() {
    let (engine, gateway) = over(gated_stream(), &["pool.only.slots=1"]).await;
    let mut running = gateway.client().await;
    running.send(chat(STREAMED)).await.until("one").await;
    let mut client = gateway.client().await;
    // The second request comes in pieces while the first one waits, starts and runs.
    let next = chat(STREAMED);
    client.send([b"\r\n", &chat(STREAMED)[..], b"\r\n", &next[..7]].concat()).await;
    eventually("it waits", async || gateway.load() == (1, 1)).await;
    client.send(&next[7..30]).await;
    engine.open_gate();
    engine.open_gate();
    assert!(running.response().await.whole);
    client.until("one").await;
    client.send(&next[30..]).await;
    for _ in 0..4 {
        engine.open_gate();
    }
    for _ in 0..2 {
        let response = client.response().await;
        assert!(response.whole && response.text().ends_with("data: [DONE]\n\n"), "{}", response.text());
    }
    assert_eq!((engine.count(), engine.left()), (3, 0));
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stops_reading_and_leaves_ends_the_request() {
    // The engine sends without end, so the client leaves while bytes of the response are unread.
    let piece = crate::engine::chunk(&crate::engine::event(&"x".repeat(60_000)));
    let steps = vec![send(STREAM), Step::Endlessly(piece.into_bytes())];
    let (engine, gateway) = over(steps, &[]).await;
    let mut client = gateway.client().await;
    client.send(chat(STREAMED)).await.until("xxx").await;
    drop(client);
    left(&engine, &gateway, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_simulated_engine_aborts_the_request_of_a_client_that_left() {
    let engine = crate::health::sim().await;
    let gateway = TestGateway::over(&[format!("http://{}", engine.addr())], &[]).await;
    let mut client = gateway.client().await;
    let endless = STREAMED.replace("\"stream\"", "\"max_tokens\":100000,\"ignore_eos\":true,\"stream\"");
    client.send(chat(&endless)).await.until("data: ").await;
    assert_eq!(engine.snapshot().in_flight, 1);
    drop(client);
    eventually_within(SOON, "the engine aborts", async || engine.snapshot().aborted == 1).await;
    assert_eq!(engine.snapshot().in_flight, 0);
    gateway.settled_within(SOON).await;
    gateway.stop().await;
    engine.shutdown().await;
}
