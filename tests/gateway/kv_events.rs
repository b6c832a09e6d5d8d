//! KV events of engines correct which cached prefixes the gateway expects.
//!
//! Simulated engines publish the events of their own prefix cache. A scripted publisher leaves out
//! events, or sends broken ones.

use std::time::Duration;

use sluice_sim::{Handle, Profile, SimConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::client::{CHAT, TIMEOUT, TestClient, chat, post};
use crate::engine::{Engine, completion};
use crate::ports::free_port;
use crate::test_gateway::{TestGateway, eventually, one_pool};

/// Blocks of the simulated cache, in which three conversations have no room.
const BLOCKS: u32 = 400;

/// A simulated engine with a small cache, and the port of the events.
async fn engine() -> (Handle, u16) {
    let port = free_port();
    let mut config = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
    (config.engine.num_blocks, config.speed, config.prompt_details) = (BLOCKS, 20.0, true);
    (config.kv_events, config.dev_mode) = (Some(port), true);
    (sluice_sim::spawn(config, TcpListener::bind("127.0.0.1:0").await.unwrap()).unwrap(), port)
}

async fn gateway_over(url: &str, prefix: &str, port: u16) -> TestGateway {
    let text = one_pool(&[url.to_owned()]) + &format!("events_port = {port}\n");
    TestGateway::from_text(&text, &[&format!("pool.only.prefix={prefix}")]).await
}

/// The first turn of a conversation, of about 2,500 tokens.
fn conversation(name: &str) -> String {
    let said = format!("{name} says something long. ").repeat(500);
    format!("{{\"model\":\"m\",\"max_tokens\":4,\"messages\":[{{\"role\":\"user\",\"content\":\"{said}\"}}]}}")
}

async fn state(gateway: &TestGateway, state: &str) {
    let label = format!("state=\"{state}\"");
    gateway.counts("sluice_kv_event_state", &label, 1.0).await;
}

/// Sends one more request. Returns how many of its tokens the gateway expected in the cache, and
/// how many were there.
async fn asked(gateway: &TestGateway, body: &str) -> (f64, f64) {
    let names = ["sluice_expected_cached_prompt_tokens_total", "sluice_cached_prompt_tokens_total"];
    let requests = gateway.metric("sluice_requests_total", &[]).await;
    let before = [gateway.metric(names[0], &[]).await, gateway.metric(names[1], &[]).await];
    assert_eq!(gateway.request(chat(body)).await.status(), 200);
    gateway.counts("sluice_requests_total", "", requests + 1.0).await;
    (gateway.metric(names[0], &[]).await - before[0], gateway.metric(names[1], &[]).await - before[1])
}

/// Expected and real cached tokens of a conversation, before and after other clients of the engine
/// have filled the cache.
async fn after_eviction(prefix: &str) -> ((f64, f64), (f64, f64)) {
    let (engine, port) = engine().await;
    let gateway = gateway_over(&format!("http://{}", engine.addr()), prefix, port).await;
    let is_followed = prefix == "events";
    if is_followed {
        // The gateway must have subscribed before the first prompt is sent.
        eventually("the engine has a subscriber", async || engine.kv_subscribers() == 1).await;
    }
    asked(&gateway, &conversation("Anna")).await;
    let again = asked(&gateway, &conversation("Anna")).await;
    if is_followed {
        state(&gateway, "followed").await;
        gateway.counts("sluice_kv_event_prompts_total", "result=\"linked\"", 2.0).await;
    }
    for name in ["Bert", "Cleo", "Dora"] {
        let answer = TestClient::to(engine.addr()).await.request(chat(&conversation(name))).await;
        assert_eq!(answer.status(), 200);
    }
    if is_followed {
        // The other clients' blocks have replaced the blocks of the conversation when the events
        // name the whole cache.
        eventually("the events name the blocks of the cache", async || {
            gateway.metric("sluice_kv_event_blocks", &[]).await == engine.published_blocks() as f64
        })
        .await;
    }
    (again, asked(&gateway, &conversation("Anna")).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evictions_for_other_clients_are_seen_in_the_events() {
    let ((expected, had), (afterwards, has)) = after_eviction("estimate").await;
    assert!(expected > 2_000.0 && had > 2_000.0, "{expected} of {had}");
    assert!(afterwards > 2_000.0 && has == 0.0, "the estimate knows nothing of the others: {afterwards} of {has}");
    let ((expected, had), (afterwards, has)) = after_eviction("events").await;
    assert!(expected > 2_000.0 && had > 2_000.0, "{expected} of {had}");
    assert_eq!((afterwards, has), (0.0, 0.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_expected_of_a_cache_that_was_reset() {
    let (engine, port) = engine().await;
    let gateway = gateway_over(&format!("http://{}", engine.addr()), "events", port).await;
    eventually("the engine has a subscriber", async || engine.kv_subscribers() == 1).await;
    asked(&gateway, &conversation("Anna")).await;
    assert!(asked(&gateway, &conversation("Anna")).await.0 > 2_000.0);
    let blocks = async || gateway.metric("sluice_kv_event_blocks", &[]).await;
    eventually("the events name blocks", async || blocks().await > 100.0).await;
    // The engine refuses while a sequence holds blocks.
    eventually("the cache is reset", async || {
        let reset = TestClient::to(engine.addr()).await.request(post("/reset_prefix_cache", "", b"")).await;
        reset.json()["success"] == true
    })
    .await;
    // vLLM publishes the reset together with the events of the next step, so a request is sent.
    assert_eq!(TestClient::to(engine.addr()).await.request(chat(CHAT)).await.status(), 200);
    eventually("the events name the blocks of that request alone", async || {
        let named = blocks().await;
        named < 100.0 && named == engine.published_blocks() as f64
    })
    .await;
    assert_eq!(asked(&gateway, &conversation("Anna")).await, (0.0, 0.0));
}

/// A publisher whose messages the test writes.
struct ScriptedPublisher {
    listener: TcpListener,
}

impl ScriptedPublisher {
    async fn subscriber(&self) -> TcpStream {
        let (mut stream, _) = tokio::time::timeout(TIMEOUT, self.listener.accept()).await.unwrap().unwrap();
        let mut greeting = [0; 64];
        (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).await.unwrap();
        // Reads the subscriber's greeting and handshake, and then its subscription.
        stream.read_exact(&mut [0; 64 + 27]).await.unwrap();
        stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB").await.unwrap();
        stream.read_exact(&mut [0; 3]).await.unwrap();
        stream
    }
}

fn message(number: u64, batch: &[u8]) -> Vec<u8> {
    let number = number.to_be_bytes();
    [&[1, 0, 1, 8][..], &number, &[0, batch.len() as u8], batch].concat()
}

/// A batch in which a request stores block `hash` behind `parent`.
fn stored(session: &str, hash: u8, parent: Option<u8>) -> Vec<u8> {
    let text = |text: &str| [&[0xa0 | text.len() as u8][..], text.as_bytes()].concat();
    let parent = parent.unwrap_or(0xc0);
    [
        vec![0x92, 0, 0x91, 0x85],
        [text("type"), text("BlockStored")].concat(),
        [text("block_hashes"), vec![0x91, hash], text("parent_block_hash"), vec![parent]].concat(),
        [text("block_size"), vec![16], text("session_id"), text(session)].concat(),
    ]
    .concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_unreadable_and_huge_messages_are_counted_and_the_estimate_goes_on() {
    let engine = Engine::always(completion()).await;
    let publisher = ScriptedPublisher { listener: TcpListener::bind("127.0.0.1:0").await.unwrap() };
    let port = publisher.listener.local_addr().unwrap().port();
    let gateway = gateway_over(&engine.url(), "events", port).await;
    let mut stream = publisher.subscriber().await;
    state(&gateway, "absent").await;
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 200);
    let session = engine.seen()[0].header("x-session-id").expect("the gateway names the request").to_owned();
    stream.write_all(&message(3, &stored(&session, 7, None))).await.unwrap();
    state(&gateway, "followed").await;
    gateway.counts("sluice_kv_event_blocks", "", 1.0).await;
    stream.write_all(&message(4, &stored("another gateway's", 8, Some(7)))).await.unwrap();
    gateway.counts("sluice_kv_event_blocks", "", 2.0).await;
    stream.write_all(&message(9, &stored("", 9, None))).await.unwrap();
    gateway.counts("sluice_kv_event_losses_total", "", 1.0).await;
    gateway.counts("sluice_kv_event_blocks", "", 1.0).await;
    let unreadable: [&[u8]; 3] =
        [&message(10, b"nonsense"), b"\x00\x01x", &[&[2][..], &u64::MAX.to_be_bytes()].concat()];
    for (number, bytes) in unreadable.into_iter().enumerate() {
        stream.write_all(bytes).await.unwrap();
        assert_eq!(stream.read(&mut [0; 8]).await.unwrap_or(0), 0, "the gateway closes the connection");
        state(&gateway, "absent").await;
        stream = publisher.subscriber().await;
        stream.write_all(&message(20 + number as u64, &stored("", 9, None))).await.unwrap();
        state(&gateway, "followed").await;
    }
    assert!(gateway.metric("sluice_kv_event_losses_total", &[]).await >= 3.0);
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 200);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_without_events_is_served_by_the_estimate_and_named() {
    let (engine, _) = engine().await;
    let gateway = gateway_over(&format!("http://{}", engine.addr()), "events", free_port()).await;
    asked(&gateway, &conversation("Anna")).await;
    let (expected, had) = asked(&gateway, &conversation("Anna")).await;
    assert!(expected > 2_000.0 && had > 2_000.0, "{expected} of {had}");
    state(&gateway, "absent").await;
    let status = TestClient::to(gateway.admin()).await.request(crate::client::get("/admin/status")).await.text();
    assert!(status.contains("\"kv_events\":{\"state\":\"absent\""), "{status}");
    tokio::time::timeout(Duration::from_secs(10), gateway.stop()).await.unwrap();
}
