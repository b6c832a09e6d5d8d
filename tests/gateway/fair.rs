//! Fair queues between keys.
//!
//! However many requests one key has sent, another key is served soon.

use crate::client::{STREAMED, TestClient, post};
use crate::engine::{Engine, LAST, STREAM, Step, chunk, ending, event, gated_stream, send};
use crate::test_gateway::{TestGateway, eventually, key_digest, one_pool};

/// A gateway with one pool and the keys `noisy` and `quiet`, whose secrets are their names.
fn two_keys(engines: &[&Engine]) -> String {
    let urls: Vec<String> = engines.iter().map(|engine| engine.url()).collect();
    let key = |name: &str| format!("[[auth.keys]]\nname = \"{name}\"\nsha256 = \"{}\"\n", key_digest(name));
    one_pool(&urls) + &key("noisy") + &key("quiet")
}

fn chat_of(key: &str, text: &str) -> Vec<u8> {
    let headers = format!("authorization: Bearer {key}\r\n");
    post("/v1/chat/completions", &headers, STREAMED.replace("hi", text).as_bytes())
}

async fn sent(gateway: &TestGateway, request: Vec<u8>) -> TestClient {
    let mut client = gateway.client().await;
    client.send(request).await;
    client
}

fn complete() -> Vec<Step> {
    vec![send(STREAM.to_owned() + &chunk(&event("one")) + &chunk(&ending()) + LAST)]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_next_however_many_requests_of_another_key_wait() {
    let engine = Engine::always(gated_stream()).await;
    let gateway = TestGateway::from_text(&two_keys(&[&engine]), &["pool.only.slots=1"]).await;
    let mut clients = Vec::new();
    for number in 0..20 {
        clients.push(sent(&gateway, chat_of("noisy", "noisy")).await);
        eventually("it runs or waits", async || gateway.load() == (1, number)).await;
    }
    clients.push(sent(&gateway, chat_of("quiet", "quiet")).await);
    eventually("it waits", async || gateway.load() == (1, 20)).await;
    assert_eq!(gateway.metric("sluice_key_waiting", &["pool=\"only\"", "key=\"noisy\""]).await, 19.0);
    (0..2).for_each(|_| engine.open_gate());
    eventually("the next one runs", async || engine.count() == 2).await;
    let next = String::from_utf8_lossy(&engine.seen()[1].body).into_owned();
    assert!(next.contains("quiet"), "{next}");
    drop(clients);
    gateway.settled().await;
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_large_prompts_of_a_key_leave_an_engine_to_another_key_and_take_both_when_alone() {
    let script = || {
        Engine::start(|_, request| match String::from_utf8_lossy(&request.body) {
            body if body.contains("large") => vec![send(STREAM), Step::Gate, send(chunk(&ending()) + LAST)],
            body if body.contains("hold") => gated_stream(),
            _ => complete(),
        })
    };
    let (one, two) = (script().await, script().await);
    let gateway = TestGateway::from_text(&two_keys(&[&one, &two]), &[]).await;
    let large = "large ".repeat(5_000);
    let mut alone = Vec::new();
    for number in 1..=4 {
        alone.push(sent(&gateway, chat_of("noisy", &format!("{number} {large}"))).await);
        eventually("it runs", async || gateway.load() == (number, 0)).await;
    }
    eventually("alone it has both engines", async || (one.count(), two.count()) == (2, 2)).await;
    drop(alone);
    gateway.settled().await;
    let mut held = sent(&gateway, chat_of("quiet", "hold")).await;
    held.until("one").await;
    let mut noisy = Vec::new();
    for number in 0..4 {
        // Each prompt is new, so that no engine has it in its cache.
        noisy.push(sent(&gateway, chat_of("noisy", &format!("beside {number} {large}"))).await);
        eventually("one is in prefill, the others wait", async || gateway.load() == (2, number)).await;
    }
    for _ in 0..5 {
        let served = gateway.request(chat_of("quiet", "hi")).await;
        assert_eq!((served.status(), served.whole), (200, true), "{}", served.text());
    }
    drop((held, noisy));
    gateway.settled().await;
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_gives_a_place_of_the_key_with_most_to_another_key() {
    let engine = Engine::always(gated_stream()).await;
    let sets = ["pool.only.slots=1", "pool.only.queue.length=4"];
    let gateway = TestGateway::from_text(&two_keys(&[&engine]), &sets).await;
    let mut noisy = Vec::new();
    for number in 0..5 {
        noisy.push(sent(&gateway, chat_of("noisy", "noisy")).await);
        eventually("it runs or waits", async || gateway.load() == (1, number)).await;
    }
    gateway.request(chat_of("noisy", "noisy")).await.is(503, "queue_full");
    let quiet = sent(&gateway, chat_of("quiet", "quiet")).await;
    noisy[4].response().await.is(503, "queue_full");
    assert_eq!(gateway.load(), (1, 4));
    drop((noisy, quiet));
    gateway.settled().await;
    gateway.stop().await;
}
